"""Loaders of a run: shuffled training batches, and one ordered pass for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jrec.batch import Batch
from jrec.data.loader import Loader, LoaderConfig, make_loader
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout
from jrec.train.config import TrainConfig


def train_loader(
    config: TrainConfig,
    schema: Schema,
    layout: EmbeddingLayout,
    *,
    transform: Callable[[Batch], Any] | None = None,
) -> Loader:
    """The shuffled batches of this process, over all epochs.

    Args:
      config: of the run.
      schema: of the dataset.
      layout: of the tables.
      transform: of every batch, see ``make_loader``; it gets batches without casts.
    """
    data = config.data
    order = LoaderConfig(
        batch_size=_local_batch(data.batch_size),
        shuffle=data.window_blocks > 0,
        seed=config.seed,
        window_blocks=max(1, data.window_blocks),
        workers=data.workers,
        prefetch=data.prefetch,
        cast="host" if data.cast == "host" and transform is None else "none",
        on_bad_id=data.on_bad_id,
        drop_remainder=data.drop_remainder,
    )
    return make_loader(
        data.path,
        schema,
        layout,
        "train",
        order,
        epochs=config.epochs,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        transform=transform,
    )


def eval_loader(config: TrainConfig, schema: Schema, layout: EmbeddingLayout, split: str) -> Loader:
    """One pass over a split in the order of time, every example once, the last batch padded."""
    data = config.data
    order = LoaderConfig(
        batch_size=-(-data.eval_batch_size // max(1, config.mesh.devices)) * max(1, config.mesh.devices),
        shuffle=False,
        workers=data.workers,
        prefetch=data.prefetch,
        on_bad_id=data.on_bad_id,
    )
    return make_loader(data.path, schema, layout, split, order)


def _local_batch(batch_size: int) -> int:
    processes = jax.process_count()
    if batch_size % processes:
        raise ConfigError(f"data.batch_size is {batch_size}, which {processes} processes cannot share equally")
    return batch_size // processes
