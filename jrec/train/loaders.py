"""Loaders of a run: shuffled training batches, and one ordered pass for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jrec.batch import Batch
from jrec.data.gathering import Gathered, Gathering
from jrec.data.growing_tables import GrowingTables, Grown
from jrec.data.loader import Loader, LoaderConfig, make_loader
from jrec.data.schema import Schema
from jrec.data.value_rows import TableVocabulary
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout
from jrec.run.batches import Batches, PackedBatches
from jrec.train.config import TrainConfig


def train_loader(
    config: TrainConfig,
    schema: Schema,
    layout: EmbeddingLayout,
    *,
    transform: Callable[[Batch], Any] | None = None,
    orders: Mapping[str, np.ndarray] | None = None,
) -> Loader:
    """The shuffled batches of this process, over all epochs.

    Args:
      config: The run's configuration.
      schema: The dataset's schema.
      layout: The tables' layout.
      transform: A function of every batch, see ``make_loader``; it gets batches without casts.
      orders: See ``make_loader``.
    """
    return make_loader(
        config.data.path,
        schema,
        layout,
        "train",
        _train_order(config, transform),
        epochs=config.epochs,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        transform=transform,
        orders=orders,
    )


def train_batches(
    config: TrainConfig,
    schema: Schema,
    layout: EmbeddingLayout,
    growing: GrowingTables,
    *,
    transform: Callable[[Batch], Any] | None = None,
) -> tuple[Batches, int]:
    """The shuffled training batches of a run, and how many there are in all epochs.

    Where tables grow, the loader gives out columns with keys, which get rows one batch after the other, and threads
    pack them then. Arguments as of ``train_loader``.
    """
    if not growing:
        loader = train_loader(config, schema, layout, transform=transform)
        return loader, loader.total_batches or 0
    data, with_rows = config.data, growing.mapper()
    loader = make_loader(
        data.path,
        schema,
        layout,
        "train",
        _train_order(config, transform),
        epochs=config.epochs,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        growing=growing.keys(stored=True),
        packer=Gathering,
    )

    def order(batch: Gathered) -> tuple[Gathered, Grown]:
        columns, grown = with_rows(batch.columns)
        return dataclasses.replace(batch, columns=columns), grown

    threads = {"workers": data.workers, "prefetch": data.prefetch}
    return PackedBatches(loader, Gathered.pack, transform=transform, order=order, **threads), loader.total_batches or 0


def eval_loader(
    config: TrainConfig,
    schema: Schema,
    layout: EmbeddingLayout,
    split: str,
    *,
    limit: int = 0,
    multiple: int = 0,
    transform: Callable[[Batch], Any] | None = None,
    shared: bool = False,
    growing: Mapping[str, TableVocabulary] | None = None,
) -> Loader:
    """One pass over a split in the order of time, every example once, the last batch padded.

    Args:
      config: The run's configuration.
      schema: The dataset's schema.
      layout: The tables' layout.
      split: "train", "valid" or "test".
      limit: Batches to read at most; 0 for all.
      multiple: The batch size is a multiple of it; 0 for the number of the mesh's devices.
      transform: A function of every batch, see ``make_loader``.
      shared: Whether each process reads a contiguous share of the examples, of sizes that differ by at most one, and
        its part of a batch; else every process reads all.
      growing: By table that grows, the rows that keys have; see ``make_loader``.
    """
    data, multiple = config.data, multiple or max(1, config.mesh.devices)
    batch_size = -(-data.eval_batch_size // multiple) * multiple
    processes = jax.process_count() if shared else 1
    order = LoaderConfig(
        batch_size=batch_size // processes,
        shuffle=False,
        workers=data.workers,
        prefetch=data.prefetch,
        on_bad_id=data.on_bad_id,
        first=limit * batch_size or None,
    )
    return make_loader(
        data.path,
        schema,
        layout,
        split,
        order,
        process_index=jax.process_index() if shared else 0,
        process_count=processes,
        transform=transform,
        growing=growing,
    )


def _train_order(config: TrainConfig, transform: Callable[[Batch], Any] | None) -> LoaderConfig:
    data = config.data
    return LoaderConfig(
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


def _local_batch(batch_size: int) -> int:
    processes = jax.process_count()
    if batch_size % processes:
        raise ConfigError(f"data.batch_size is {batch_size}, which {processes} processes cannot share equally")
    return batch_size // processes
