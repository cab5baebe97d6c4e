"""Loaders of a run: shuffled training batches, and one ordered pass for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax

from jrec.app.config import TrainConfig
from jrec.app.models.oov_ids import OovIds
from jrec.app.tables import vocabularies_of
from jrec.batch import Batch
from jrec.data.gathering import Gathering
from jrec.data.loader import Loader, LoaderConfig, make_loader
from jrec.data.loader_source import BlockWatch
from jrec.data.packers import AnyPacker
from jrec.data.packing import CastPlace, Packer
from jrec.data.schema import Schema
from jrec.data.value_rows import Keys, TableVocabulary
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout

if TYPE_CHECKING:
    from jrec.data.dataset_packer import PackerOptions


def train_loader(config: TrainConfig, schema: Schema, layout: EmbeddingLayout) -> Loader:
    """The shuffled training batches of this process, over all epochs.

    Where tables grow, it gives out columns with keys, which ``Run.feed`` gives rows, one batch after the other, before
    they are packed.

    Args:
      config: The run's configuration.
      schema: The dataset's schema.
      layout: The tables' layout.
    """
    if config.data.half_life:
        schema = dataclasses.replace(schema, weighted=True)  # as the loader has it
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
        watch=config.model.of_kind.watch(config.model),
    )


def _training_packer(config: TrainConfig, schema: Schema, layout: EmbeddingLayout) -> AnyPacker:
    vocabularies = vocabularies_of(config, schema)
    growing = {name: Keys(stored=True, key_seed=own.key_seed) for name, own in vocabularies.items()}
    options: PackerOptions = {"growing": growing} if growing else {}
    options["cast"] = _train_order(config).cast
    packer = config.model.of_kind.packer(config, schema, layout, training=True, **options)
    if not growing:
        return packer
    assert isinstance(packer, Packer), f"model.kind {config.model.kind!r} packs no tables that grow"
    return Gathering(packer)


def _oov_rows(config: TrainConfig, schema: Schema) -> dict[str, int]:
    """By feature the OOV row of its table, but of an item to rank, which is never an unknown one.

    Raises:
      ConfigError: If no table has one.
    """
    ranked = config.model.of_kind.keeps_ids(config.model)
    oov_rows = {f.name: schema.table(f.table).oov_row for f in schema.categorical if f.name != ranked}
    rows = {name: row for name, row in oov_rows.items() if row is not None}
    if not rows:
        raise ConfigError(
            f"data.oov_rate is {config.data.oov_rate}, but no table that {schema.name!r} reads for it has an OOV row:"
            " hashed and growing tables have none; leave it out"
        )
    return rows


def eval_batch_size(config: TrainConfig, multiple: int = 0) -> int:
    """Examples that are predicted at once, by all processes together.

    Args:
      config: The run's configuration.
      multiple: A number that divides them; 0 for the number of the mesh's devices.
    """
    multiple = multiple or max(1, config.mesh.devices)
    return -(-config.data.eval_batch_size // multiple) * multiple


def eval_loader(
    config: TrainConfig,
    schema: Schema,
    layout: EmbeddingLayout,
    split: str,
    *,
    start: int = 0,
    stop: int | None = None,
    limit: int = 0,
    multiple: int = 0,
    transform: Callable[[Batch], object] | None = None,
    shared: bool = False,
    growing: Mapping[str, TableVocabulary] | None = None,
    shuffle: bool = False,
    watch: BlockWatch | None = None,
    weighted: bool = True,
) -> Loader:
    """One pass over a split, every example once, the last batch padded.

    Args:
      config: The run's configuration.
      schema: The dataset's schema.
      layout: The tables' layout.
      split: "train", "valid" or "test".
      start, stop: The examples to read, the ``start``-th of the order and those up to the ``stop``-th; None for all.
      limit: Batches to read at most; 0 for all.
      multiple: The batch size is a multiple of it; 0 for the number of the mesh's devices.
      transform: A function of every batch, see ``make_loader``.
      shared: Whether each process reads a contiguous share of the examples, of sizes that differ by at most one, and
        its part of a batch; else every process reads all.
      growing: By table that grows, the rows that keys have; see ``make_loader``.
      shuffle: Whether blocks of the split come in an order drawn by the run's seed, so that the first batches are of
        all of it; else examples come in the order of time.
      watch: Sees the blocks as they are read; see ``make_loader``.
      weighted: Whether examples have their weights, where the dataset has any.
    """
    data, batch_size = config.data, eval_batch_size(config, multiple)
    processes = jax.process_count() if shared else 1
    options: PackerOptions = {"growing": growing} if growing else {}
    if schema.weighted and not weighted:
        options["weighted"] = False
    order = LoaderConfig(
        batch_size=batch_size // processes,
        shuffle=shuffle,
        seed=config.seed,
        window_blocks=max(1, data.window_blocks),
        workers=data.threads,
        prefetch=data.prefetch,
        on_bad_id=data.on_bad_id,
        start=start,
        # 0 stands for no limit: nobody asks for a window that ends where it begins.
        first=min((number for number in (stop and stop - start, limit * batch_size) if number), default=None),
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
        packer=config.model.of_kind.packer(config, schema, layout, training=False, **options),
        watch=watch,
    )


def _train_order(config: TrainConfig) -> LoaderConfig:
    data = config.data
    return LoaderConfig(
        batch_size=_local_batch(data.batch_size),
        shuffle=data.shuffled,
        together=data.order == "time",
        seed=config.seed,
        window_blocks=max(1, data.window_blocks),
        workers=data.threads,
        prefetch=data.prefetch,
        cast="none" if config.planned else cast_place(config),
        on_bad_id=data.on_bad_id,
        drop_remainder=data.drop_remainder,
        half_life=data.half_life_seconds,
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
