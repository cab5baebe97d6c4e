"""The loader: shuffled, packed, prefetched batches of a dataset split, at a position that can be saved and restored."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jrec.batch import Batch
from jrec.data.bijection import table_checksums
from jrec.data.dataset_packer import dataset_packer
from jrec.data.loader_source import BatchSource, BlockWatch, OrderConfig, SharesSource, windows_needed
from jrec.data.moments import Moments
from jrec.data.packers import AnyPacker
from jrec.data.packing import CastPlace, OnBadId
from jrec.data.schema import DatasetError, Schema
from jrec.data.value_rows import TableVocabulary
from jrec.errors import CheckpointError
from jrec.json_values import JsonObject
from jrec.ops.layout import EmbeddingLayout
from jrec.optional_packages import explains_missing

if TYPE_CHECKING:
    import grain

_STATE_VERSION = 1
_UNLESS_DEFAULT = ("start", "first", "half_life")  # of an identity, where they are not what they are by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are made.

    Attributes:
      batch_size: Examples in a batch of one process.
      shuffle: Permute blocks over the whole split, and examples within windows; else the order of time.
      seed: The seed of the permutations.
      window_blocks: Blocks in a shuffling window: more of them mix better and take more memory.
      workers: Threads that read and pack; 0 does it in the caller's. The batches are the same for any number.
      prefetch: Batches made ahead.
      cast: Where the cast is computed: "host" here in the loader, "none" leaves it to the device.
      on_bad_id: Ids outside of their table "raise" before the step, are clipped to its ends ("clip"), or go to its
        OOV row ("oov").
      drop_remainder: Leave out the short last batch of an epoch instead of padding it with mask 0.
      together: Whether processes read each batch of one order together, every one its part, as an order of time needs;
        else each reads a share of an epoch of its own.
      start: Begin with this example of an epoch's order, all processes together.
      first: Read only this many examples from there on, all processes together; None for all.
      half_life: Seconds after which an example counts half as much, beside its weight; 0 for all alike. The packer has
        to take weights (``schema.weighted``).
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
    together: bool = False
    start: int = 0
    first: int | None = None
    half_life: int = 0

    def __post_init__(self) -> None:
        if self.first is not None and self.first < 1:
            raise ValueError(f"first is {self.first}; it must be at least 1, or None for all examples")
        leasts = {"batch_size": 1, "window_blocks": 1}
        leasts |= dict.fromkeys(("workers", "prefetch", "seed", "start", "half_life"), 0)
        for name, least in leasts.items():
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
    transform: Callable[[Batch], Any] | None = None,
    orders: Mapping[str, np.ndarray] | None = None,
    growing: Mapping[str, TableVocabulary] | None = None,
    packer: AnyPacker | None = None,
    watch: BlockWatch | None = None,
) -> Loader:
    """Opens a split of a dataset.

    Args:
      folder: The dataset.
      schema: Its description; None reads and checks it.
      layout: The stacks to pack addresses for.
      split: "train", "valid" or "test".
      config: How batches are made.
      epochs: Passes over the split, each in an order of its own; None for no end.
      process_index, process_count: Which contiguous share of the permuted examples is read. Shares differ by at most
        one example, and every process gets the same number of batches.
      transform: What becomes of every batch, in the threads that made it; the loader then gives out its results.
      orders: By table of which the dataset numbers only some rows, (numbered rows,) uint32: the row of the layout's
        table for each of them.
      growing: By table that grows, the rows that keys have; see ``dataset_packer``.
      packer: Packs batches instead of the dataset's packer; ``orders`` and ``growing`` then do not count.
      watch: Sees the blocks as they are read; see ``BatchSource``.

    Raises:
      DatasetError: If the split is missing or empty, or begins with no such example, or layout and dataset do not fit
        together.

    Example:
      >>> loader = make_loader("data", None, layout, "train", LoaderConfig(batch_size=2048), epochs=3)
      >>> examples = 0
      >>> for batch in loader:
      ...     examples += int(batch.mask.sum())
      ...     position = loader.state()  # for a checkpoint
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index is {process_index}; it must lie in 0 to process_count - 1 = {process_count - 1}"
        )
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs is {epochs}; it must be at least 1, or None for no end")
    schema = Schema.load(folder) if schema is None else schema
    made = packer or dataset_packer(
        folder, schema, layout, on_bad_id=config.on_bad_id, cast=config.cast, orders=orders, growing=growing
    )
    check_split(folder, schema, split, config.batch_size * process_count if config.drop_remainder else 1)
    if config.start >= (examples := schema.splits[split].examples):
        raise DatasetError(f"the {split!r} split of {folder} has {examples:,} examples, none from {config.start:,} on")

    counts = None
    if config.half_life:
        counts = functools.partial(Moments.load(folder, schema, split).recency, half_life=config.half_life)

    def share(index: int, count: int, batch_size: int) -> BatchSource:
        return BatchSource(
            folder,
            schema,
            split,
            made,
            order=OrderConfig(
                shuffle=config.shuffle,
                seed=config.seed,
                window_blocks=config.window_blocks,
                process_index=index,
                process_count=count,
                start=config.start,
                first=config.first,
            ),
            batch_size=batch_size,
            drop_remainder=config.drop_remainder,
            epochs=epochs,
            windows_ahead=windows_needed(
                batch_size=batch_size,
                window_blocks=config.window_blocks,
                block_size=schema.block_size,
                batches_ahead=config.prefetch + config.workers,
                threads=config.workers,
            ),
            threads=config.workers,
            watch=watch,
            counts=counts,
        )

    def shared(count: int) -> BatchSource | SharesSource:
        if count == process_count:
            return share(process_index, count, config.batch_size)
        whole = config.batch_size * process_count
        share_of_process = (process_index * config.batch_size, (process_index + 1) * config.batch_size)
        return SharesSource(layout, lambda s: share(s, count, whole // count), *share_of_process, whole // count)

    # Read together, the processes' parts are those of one process with the whole batch, so that the position is, too.
    common = config.together and process_count > 1
    identity = {
        "dataset": schema.name,
        "split": split,
        "examples": schema.splits[split].examples,
        "block_size": schema.block_size,
        "batch_size": config.batch_size * (process_count if common else 1),
        "shuffle": config.shuffle,
        "seed": config.seed,
        "window_blocks": config.window_blocks,
        "drop_remainder": config.drop_remainder,
        "process_count": 1 if common else process_count,
        **({"start": config.start} if config.start else {}),
        **({} if config.first is None else {"first": config.first}),
        **({"half_life": config.half_life} if config.half_life else {}),
        "reordered": table_checksums(schema),
    }
    return Loader(shared, config, identity, transform, schema=schema)


def check_split(folder: str | os.PathLike[str], schema: Schema, split: str, least: int = 1) -> None:
    """Raises DatasetError if there is no such split, or if it has fewer than ``least`` examples."""
    if split not in schema.splits:
        raise DatasetError(f"{folder} has no {split!r} split; it has {', '.join(schema.splits) or 'none'}")
    examples = schema.splits[split].examples
    if not examples:
        raise DatasetError(
            f"the {split!r} split of {folder} has no examples; prepare more rows or other split fractions"
        )
    if examples < least:
        raise DatasetError(
            f"the {split!r} split of {folder} has {examples:,} examples, less than one full batch for every process"
            f" ({least:,}); reduce the batch size or pad the last batch (drop_remainder = false)"
        )


class Loader:
    """An iterator over batches of NumPy arrays that knows its position.

    ``for batch in loader`` goes on where the loader stands, and starts over once it has reached the end, so that an
    evaluation loader can be used again and again. Made by ``make_loader``.
    """

    def __init__(
        self,
        shared: Callable[[int], BatchSource | SharesSource],
        config: LoaderConfig,
        identity: JsonObject,
        transform: Callable[[Batch], Any] | None = None,
        *,
        schema: Schema,
    ):
        self.config, self.schema = config, schema
        self._transform = transform
        self._passed_through: Callable[[Batch], Any] | None = None  # a feed's
        self._shared, self._source = shared, shared(identity["process_count"])
        self._identity = identity
        self._position = 0
        self._iterator: grain.DatasetIterator | None = None

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
    def aside(self) -> None:
        """Nothing comes beside a loader's batches; see ``jrec.run.feeds.batches.Batches``."""

    @property
    def position(self) -> int:
        """Batches given out so far, over all epochs."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._position // self.batches_per_epoch

    @property
    def packs(self) -> bool:
        """Whether it gives out batches, and not what a ``transform`` made of them."""
        return self._transform is None

    def pass_through(self, function: Callable[[Batch], Any] | None) -> None:
        """From the next batch on gives out what a function makes of batches, in the threads that pack; None for none.

        It may change from one look at a batch to the next, as before ``first`` and after it.
        """
        self.close()
        self._passed_through = function

    def batch(self, index: int) -> Batch:
        """Batch ``index`` of the run, without moving the position."""
        if not 0 <= index < len(self._source):
            raise IndexError(f"the loader has batches 0 to {len(self._source) - 1}, not {index}")
        batch = self._source[index]
        for function in self._functions():
            batch = function(batch)
        return batch

    def first(self, count: int) -> list[Batch]:
        """The run's first batches, at most ``count``, without moving the position."""
        return [self.batch(index) for index in range(min(count, len(self._source)))]

    def upcoming(self, count: int) -> list[Batch]:
        """The next batches, at most ``count``, without moving the position."""
        return [self.batch(index) for index in range(self._position, min(self._position + count, len(self._source)))]

    def __iter__(self) -> Iterator[Batch]:
        if self._position == self.total_batches:
            self._move(0)
        return self

    def __next__(self) -> Batch:
        if self._position == self.total_batches:
            self.close()
            raise StopIteration
        iterator = self._iterator = self._start() if self._iterator is None else self._iterator
        try:
            batch = next(iterator)
        except BaseException:
            self.close()
            raise
        self._position += 1
        return batch

    def state(self) -> JsonObject:
        """The position and what it depends on, as a small dictionary that JSON can hold."""
        return {"version": _STATE_VERSION, "position": self._position, **self._identity}

    def restore(self, state: JsonObject) -> None:
        """Continues from a saved position; the batches from there on are bit-identical to the run's that saved it.

        Another number of processes shares that run's batches anew, as long as its batches together are as large.

        Raises:
          CheckpointError: If the position was saved by a loader of other data or another order.
        """
        if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
            raise CheckpointError(f"{json.dumps(state, default=str)[:200]} is no loader position of this jrec")
        # First, since with the shares' number the identity changes that is compared next.
        self._share_as(state)
        # Also what only the saved position names: a part of the epoch counted other batches than the whole does.
        names = dict.fromkeys((*self._identity, *_UNLESS_DEFAULT))
        if different := [k for k in names if state.get(k) != self._identity.get(k)]:
            saved = ", ".join(f"{k}={state.get(k)!r}" for k in different)
            ours = ", ".join(f"{k}={self._identity.get(k)!r}" for k in different)
            raise CheckpointError(
                f"the loader's position was saved with {saved}, but this run has {ours}; resume with the same data and"
                " loader settings, or start a new run"
            )
        position = state.get("position")
        if not isinstance(position, int) or not 0 <= position <= len(self._source):
            raise CheckpointError(
                f"the loader's position {position!r} lies outside of this run of {len(self._source):,} batches; resume"
                " with at least as many epochs as before"
            )
        self._move(position)

    def _share_as(self, state: JsonObject) -> None:
        """Cuts the epochs into the shares of the processes that saved a position, however many processes there are now.

        Each of their batches was one batch of every share, and so are ours; every process takes its part of it.
        """
        ours, count, size = self._identity, state.get("process_count"), state.get("batch_size")
        whole = ours["batch_size"] * ours["process_count"]
        if count == ours["process_count"] or not (isinstance(count, int) and isinstance(size, int)):
            return
        if count > 0 and count * size == whole:
            self.close()
            self._source = self._shared(count)
            self._identity = {**ours, "process_count": count, "batch_size": size}

    def close(self) -> None:
        """Stops the threads. The position stays, and iterating again starts them anew."""
        iterator, self._iterator = self._iterator, None  # another thread may be in ``__next__``
        if iterator is not None:
            iterator.close()
            self._source.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(self, position: int) -> None:
        self.close()
        self._position = position

    def _functions(self) -> list[Callable[[Batch], Any]]:
        return [function for function in (self._transform, self._passed_through) if function is not None]

    @explains_missing
    def _start(self) -> grain.DatasetIterator:
        import grain

        self._source.open()
        options = grain.ReadOptions(
            num_threads=self.config.workers, prefetch_buffer_size=self.config.prefetch if self.config.workers else 0
        )
        batches = grain.MapDataset.source(self._source)
        for function in self._functions():
            batches = batches.map(function)
        iterator = iter(batches.to_iter_dataset(options))
        # All that resuming takes: batch ``i`` is a function of its number (``loader_source``), whatever ran before.
        iterator.set_state({"next_index": self._position})
        return iterator
