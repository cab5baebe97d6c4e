"""The loader: shuffled, packed, prefetched batches of a dataset split, at a position that can be saved and restored."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

from jrec.batch import Batch
from jrec.data.loader_checks import check_layout, check_split
from jrec.data.loader_order import OrderConfig
from jrec.data.loader_source import BatchSource, windows_needed
from jrec.data.packing import CastPlace, OnBadId, Packer
from jrec.data.reorder_file import load_orders, table_checksums
from jrec.data.schema import Schema
from jrec.errors import CheckpointError
from jrec.ops.layout import EmbeddingLayout

_STATE_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are made.

    Attributes:
      batch_size: examples in a batch of one process.
      shuffle: permute blocks over the whole split, and examples within windows; else the order of time.
      seed: of the permutations.
      window_blocks: blocks in a shuffling window: more mix better and take more memory.
      workers: threads that read and pack; 0 does it in the caller's. The batches are the same for any number.
      prefetch: batches made ahead.
      cast: where the cast is computed: "host" here in the loader, "none" leaves it to the device.
      on_bad_id: ids outside of their table "raise" before the step, are clipped to its ends ("clip"), or go to its
        OOV row ("oov").
      drop_remainder: leave out the short last batch of an epoch instead of padding it with mask 0.
    """

    batch_size: int
    shuffle: bool = True
    seed: int = 0
    window_blocks: int = 8
    workers: int = 2
    prefetch: int = 8
    cast: CastPlace = "none"
    on_bad_id: OnBadId = "raise"
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("window_blocks", 1), ("workers", 0), ("prefetch", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")


def make_loader(
    folder: str | os.PathLike[str],
    schema: Schema | None,
    layout: EmbeddingLayout,
    split: str,
    config: LoaderConfig,
    *,
    epochs: int | None = 1,
    process_index: int = 0,
    process_count: int = 1,
) -> Loader:
    """Opens a split of a dataset.

    Args:
      folder: the dataset.
      schema: its description; None reads and checks it.
      layout: the stacks to pack addresses for.
      split: "train", "valid" or "test".
      config: how batches are made.
      epochs: passes over the split, each in an order of its own; None for no end.
      process_index, process_count: which contiguous share of the permuted examples is read. Shares differ by at most
        one example, and every process gets the same number of batches.

    Raises:
      DatasetError: if the split is missing or empty, or layout and dataset do not fit together.

    Example:
      >>> loader = make_loader("data", None, layout, "train", LoaderConfig(batch_size=2048), epochs=3)
      >>> for batch in loader:
      ...     step(batch)
      ...     checkpoint(loader.state())
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index is {process_index}; it must lie in 0 to process_count - 1 = {process_count - 1}"
        )
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs is {epochs}; it must be at least 1, or None for no end")
    schema = Schema.load(folder) if schema is None else schema
    check_layout(schema, layout, config.on_bad_id)
    check_split(folder, schema, split, config.batch_size * process_count if config.drop_remainder else 1)
    packer = Packer(
        layout,
        dense=[f.name for f in schema.dense],
        on_bad_id=config.on_bad_id,
        oov_rows={t.name: t.oov_row for t in schema.tables},
        orders=load_orders(folder, schema, [t.name for stack in layout.members for t in stack.tables]),
        cast=config.cast,
    )
    source = BatchSource(
        folder,
        schema,
        split,
        packer,
        order=OrderConfig(
            shuffle=config.shuffle,
            seed=config.seed,
            window_blocks=config.window_blocks,
            process_index=process_index,
            process_count=process_count,
        ),
        batch_size=config.batch_size,
        drop_remainder=config.drop_remainder,
        epochs=epochs,
        windows_ahead=windows_needed(
            batch_size=config.batch_size,
            window_blocks=config.window_blocks,
            block_size=schema.block_size,
            batches_ahead=config.prefetch + config.workers,
        ),
    )
    identity = {
        "dataset": schema.name,
        "split": split,
        "examples": schema.splits[split].examples,
        "block_size": schema.block_size,
        "batch_size": config.batch_size,
        "shuffle": config.shuffle,
        "seed": config.seed,
        "window_blocks": config.window_blocks,
        "drop_remainder": config.drop_remainder,
        "process_count": process_count,
        "reordered": table_checksums(schema),
    }
    return Loader(source, config, identity)


class Loader:
    """An iterator over batches of NumPy arrays that knows its position.

    ``for batch in loader`` goes on where the loader stands, and starts over once it has reached the end, so that an
    evaluation loader can be used again and again. Made by ``make_loader``.
    """

    def __init__(self, source: BatchSource, config: LoaderConfig, identity: dict[str, Any]):
        self.config = config
        self._source = source
        self._identity = identity
        self._position = 0
        self._iterator: Any = None

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one pass."""
        return self._source.batches_per_epoch

    @property
    def epochs(self) -> int | None:
        """Passes, or None for no end."""
        return self._source.epochs

    @property
    def total_batches(self) -> int | None:
        """Batches in all passes, or None for no end."""
        return None if self.epochs is None else self.epochs * self.batches_per_epoch

    @property
    def position(self) -> int:
        """Batches given out so far, over all epochs."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._position // self.batches_per_epoch

    def batch(self, index: int) -> Batch:
        """Batch ``index`` of the run, without moving the position."""
        if not 0 <= index < len(self._source):
            raise IndexError(f"the loader has batches 0 to {len(self._source) - 1}, not {index}")
        return self._source[index]

    def __iter__(self) -> Iterator[Batch]:
        if self._position == self.total_batches:
            self._move(0)
        return self

    def __next__(self) -> Batch:
        if self._position == self.total_batches:
            self.close()
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._start()
        try:
            batch = next(self._iterator)
        except BaseException:
            self.close()
            raise
        self._position += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The position and what it depends on, as a small dictionary that JSON can hold."""
        return {"version": _STATE_VERSION, "position": self._position, **self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a saved position; the batches from there on are bit-identical to those of the run that saved it.

        Raises:
          CheckpointError: if the position was saved by a loader of other data or another order.
        """
        if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
            raise CheckpointError(f"{json.dumps(state, default=str)[:200]} is no loader position of this jrec")
        if different := [k for k, v in self._identity.items() if state.get(k) != v]:
            saved = ", ".join(f"{k}={state.get(k)!r}" for k in different)
            ours = ", ".join(f"{k}={self._identity[k]!r}" for k in different)
            raise CheckpointError(
                f"the loader's position was saved with {saved}, but this run has {ours}; resume with the same data and"
                " loader settings, or start a new run"
            )
        position = state["position"]
        if not isinstance(position, int) or not 0 <= position <= len(self._source):
            raise CheckpointError(
                f"the loader's position {position!r} lies outside of this run of {len(self._source):,} batches; resume"
                " with at least as many epochs as before"
            )
        self._move(position)

    def close(self) -> None:
        """Stops the threads. The position stays, and iterating again starts them anew."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(self, position: int) -> None:
        self.close()
        self._position = position

    def _start(self) -> Any:
        import grain

        options = grain.ReadOptions(
            num_threads=self.config.workers, prefetch_buffer_size=self.config.prefetch if self.config.workers else 0
        )
        iterator = iter(grain.MapDataset.source(self._source).to_iter_dataset(options))
        iterator.set_state({"next_index": self._position})
        return iterator
