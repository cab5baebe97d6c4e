"""Loaders of a run: shuffled training batches, and one ordered pass for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jrec.app.config import TrainConfig
from jrec.app.models.catalogue import training_counts
from jrec.app.models.model_schema import item_table
from jrec.app.models.next_items import NextItemPacker
from jrec.app.models.oov_ids import OovIds
from jrec.app.models.user_items import UserItemPacker
from jrec.app.tables import vocabularies_of
from jrec.batch import Batch
from jrec.data.dataset_packer import dataset_packer
from jrec.data.gathering import Gathering
from jrec.data.loader import Loader, LoaderConfig, make_loader
from jrec.data.packers import AnyPacker
from jrec.data.packing import CastPlace
from jrec.data.schema import Schema, Table
from jrec.data.value_rows import Keys, TableVocabulary
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout


def train_loader(config: TrainConfig, schema: Schema, layout: EmbeddingLayout) -> Loader:
    """The shuffled training batches of this process, over all epochs.

    Where tables grow, it gives out columns with keys, which ``Run.feed`` gives rows, one batch after the other, before
    they are packed.

    Args:
      config: The run's configuration.
      schema: The dataset's schema.
      layout: The tables' layout.
    """
    packer = _training_packer(config, schema, layout)
    if rate := config.data.oov_rate:
        packer = OovIds(packer, _oov_rows(config, schema), rate=rate, seed=config.seed)
    return make_loader(
        config.data.path,
        schema,
        layout,
        "train",
        _train_order(config),
        epochs=config.epochs,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        packer=packer,
    )


def _training_packer(config: TrainConfig, schema: Schema, layout: EmbeddingLayout) -> AnyPacker:
    if config.model.ranks:
        return ranking_packer(config, schema, layout, training=True)
    vocabularies, order = vocabularies_of(config, schema), _train_order(config)
    growing = {name: Keys(stored=True, key_seed=own.key_seed) for name, own in vocabularies.items()}
    options: dict[str, Any] = {"on_bad_id": order.on_bad_id, "cast": order.cast, "growing": growing}
    packer = dataset_packer(config.data.path, schema, layout, **options)
    return Gathering(packer) if growing else packer


def _oov_rows(config: TrainConfig, schema: Schema) -> dict[str, int]:
    """By feature the OOV row of its table, but of an item to rank, which is never an unknown one.

    Raises:
      ConfigError: If no table has one.
    """
    ranked = config.model.ranked if config.model.ranks else ""
    found = {f.name: schema.table(f.table).oov_row for f in schema.categorical if f.name != ranked}
    rows = {name: row for name, row in found.items() if row is not None}
    if not rows:
        raise ConfigError(
            f"data.oov_rate is {config.data.oov_rate}, but no table that {schema.name!r} reads for it has an OOV row:"
            " hashed and growing tables have none; leave it out"
        )
    return rows


def ranking_packer(config: TrainConfig, schema: Schema, layout: EmbeddingLayout, *, training: bool) -> AnyPacker:
    """What packs batches of a model that ranks items; of two towers, also items without users and the reverse.

    Args:
      config: The run's configuration.
      schema: The features that the model reads (``model_schema``).
      layout: Its layout.
      training: Whether to train; else batches have the items to rank.
    """
    table, on_bad_id = item_table(config.model, schema), config.data.on_bad_id
    cast: CastPlace = _train_order(config).cast if training else "none"
    if config.model.kind == "two_tower":
        own = config.model.two_tower
        log_q = _log_shares(schema, table) if training and own.log_q else None
        extras = UserItemPacker.names(training=training, log_q=log_q is not None)
        packer = dataset_packer(config.data.path, schema, layout, on_bad_id=on_bad_id, cast=cast, extras=extras)
        return UserItemPacker(packer, item=own.id, history=own.history, log_q=log_q)
    history = next(feature for feature in schema.categorical if feature.name == config.model.history)
    return NextItemPacker(
        layout,
        history=history.name,
        item=config.model.ranked,
        rows=table.rows,
        oov_row=table.oov_row,
        seed=config.seed if training else None,
        aged=bool(history.aged),
        on_bad_id=on_bad_id,
        cast=cast,
    )


def _log_shares(schema: Schema, table: Table) -> np.ndarray:
    """(rows,) float32, the logarithm of the share of training's accesses that each row has."""
    if (counts := training_counts(schema, table)) is None:
        raise ConfigError(
            f"model.two_tower.log_q is true, but {schema.folder or schema.name} has no counts of table {table.name!r};"
            " set it to false, or prepare the dataset again"
        )
    return np.log(np.maximum(counts, 1) / max(counts.sum(), 1)).astype(np.float32)


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
    shuffle: bool = False,
) -> Loader:
    """One pass over a split, every example once, the last batch padded.

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
      shuffle: Whether blocks of the split come in an order drawn by the run's seed, so that the first batches are of
        all of it; else examples come in the order of time.
    """
    data, multiple = config.data, multiple or max(1, config.mesh.devices)
    batch_size = -(-data.eval_batch_size // multiple) * multiple
    processes = jax.process_count() if shared else 1
    order = LoaderConfig(
        batch_size=batch_size // processes,
        shuffle=shuffle,
        seed=config.seed,
        window_blocks=max(1, data.window_blocks),
        workers=data.threads,
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
        packer=ranking_packer(config, schema, layout, training=False) if config.model.ranks else None,
    )


def _train_order(config: TrainConfig) -> LoaderConfig:
    data = config.data
    return LoaderConfig(
        batch_size=_local_batch(data.batch_size),
        shuffle=data.window_blocks > 0,
        seed=config.seed,
        window_blocks=max(1, data.window_blocks),
        workers=data.threads,
        prefetch=data.prefetch,
        cast="none" if config.planned else cast_place(config),
        on_bad_id=data.on_bad_id,
        drop_remainder=data.drop_remainder,
    )


def cast_place(config: TrainConfig) -> CastPlace:
    """Where batches are cast: "none" leaves it to the step."""
    chosen = config.data.cast or ("host" if jax.default_backend() == "cpu" else "device")
    return "host" if chosen == "host" else "none"


def _local_batch(batch_size: int) -> int:
    processes = jax.process_count()
    if batch_size % processes:
        raise ConfigError(f"data.batch_size is {batch_size}, which {processes} processes cannot share equally")
    return batch_size // processes
