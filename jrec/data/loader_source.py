"""Batch ``i`` of a training run, from any thread: windows of blocks are read once and kept while they are needed.

Which example is the k-th of an epoch is a pure function of seed, epoch and process. An epoch permutes all blocks. The
stream of their examples is cut into one contiguous share a process, whose sizes differ by one at most. The blocks of a
share, its first and last perhaps in part, are grouped into *windows* of ``window_blocks``, and every window's examples
are permuted. Nothing depends on threads, so a position in the stream is all that resuming needs.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

import numpy as np

from jrec.batch import Batch
from jrec.data.blocks import EXAMPLE_WEIGHT, ShardReader
from jrec.data.columns import Column, concatenate, count_examples, cut
from jrec.data.gathering import Gathered, joined
from jrec.data.packed_window import PackedWindow, batch_of
from jrec.data.packers import AnyPacker
from jrec.data.packing_columns import PreparedColumns, join
from jrec.data.packing_kernels import permutation
from jrec.data.regroup import gathered
from jrec.data.schema import DatasetError, Schema
from jrec.ops.host_cast import with_cast
from jrec.ops.layout import EmbeddingLayout

BlockWatch = Callable[[int, Mapping[str, Column]], None]
_BLOCKS, _EXAMPLES = 1, 2  # keep the random numbers of the two permutations apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderConfig:
    """What the order depends on, besides the sizes of the blocks."""

    shuffle: bool
    seed: int
    window_blocks: int
    process_index: int = 0
    process_count: int = 1
    start: int = 0
    first: int | None = None

    def share(self, examples: int) -> tuple[int, int]:
        """The bounds of this process's share of an epoch's stream, or of the part of it that is read."""
        p, count, examples = self.process_index, self.process_count, self.read(examples)
        return self.start + p * examples // count, self.start + (p + 1) * examples // count

    def read(self, examples: int) -> int:
        """How many of an epoch's examples are read, by all processes together."""
        left = examples - self.start
        return left if self.first is None else min(left, self.first)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """One process's share of one epoch.

    Attributes:
      epoch: Its number.
      blocks: (pieces,) the blocks to read, in order.
      starts, stops: (pieces,) the examples of each block that belong to the share.
      window_starts: (windows + 1,) positions in the share at which windows begin.
    """

    config: OrderConfig
    epoch: int
    blocks: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    window_starts: np.ndarray

    @property
    def examples(self) -> int:
        """Examples in the share."""
        return int(self.window_starts[-1])

    def pieces(self, window: int) -> list[tuple[int, int, int]]:
        """(block, start, stop) of the parts of a window."""
        chosen = slice(window * self.config.window_blocks, (window + 1) * self.config.window_blocks)
        columns = self.blocks[chosen], self.starts[chosen], self.stops[chosen]
        return [(int(b), int(i), int(j)) for b, i, j in zip(*columns, strict=True)]

    def examples_of(self, window: int) -> np.ndarray:
        """The order of a window's examples, (n,) int32 positions in the window as it was read."""
        size = int(self.window_starts[window + 1] - self.window_starts[window])
        if not self.config.shuffle:
            return np.arange(size, dtype=np.int32)
        return permutation(size, self.config.seed, _EXAMPLES, self.epoch, self.config.process_index, window)

    def spans(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The parts of windows that hold positions ``start`` to ``stop``: (window, first, last + 1)."""
        spans = []
        window = int(np.searchsorted(self.window_starts, start, side="right")) - 1
        while start < stop:
            begin, end = int(self.window_starts[window]), int(self.window_starts[window + 1])
            upto = min(stop, end)
            if upto > start:
                spans.append((window, start - begin, upto - begin))
            start, window = upto, window + 1
        return spans


def epoch_order(config: OrderConfig, block_examples: np.ndarray, epoch: int) -> EpochOrder:
    """The order of one epoch.

    Args:
      config: What it depends on.
      block_examples: (blocks,) int64, examples in every block of the split, in time order.
      epoch: Which epoch.
    """
    blocks = np.arange(len(block_examples), dtype=np.int32)
    if config.shuffle:
        blocks = permutation(len(block_examples), config.seed, _BLOCKS, epoch)
    bounds = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum(block_examples[blocks], out=bounds[1:])
    low, high = config.share(int(bounds[-1]))
    starts = np.maximum(low - bounds[:-1], 0)
    stops = np.minimum(high - bounds[:-1], block_examples[blocks])
    shared = stops > starts
    blocks, starts, stops = blocks[shared], starts[shared], stops[shared]
    ends = np.concatenate([[0], np.cumsum(stops - starts)])
    # Unique, where the last window is full, and for a share without examples: [0].
    window_starts = np.unique(np.append(ends[:: config.window_blocks], ends[-1]))
    return EpochOrder(
        config=config, epoch=epoch, blocks=blocks, starts=starts, stops=stops, window_starts=window_starts
    )


class SharedCache[T]:
    """The last ``capacity`` values by key; threads that ask for the same one at once share one computation."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[Hashable, concurrent.futures.Future[T]] = collections.OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        """Whether the value is here, or a thread makes it."""
        with self._lock:
            return key in self._futures

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, from ``make`` if it is not there.

        A failure is raised where it happened, and not kept: threads that waited for it make the value themselves, since
        what failed may have been fixed after the other one began.
        """
        while True:
            with self._lock:
                future = self._futures.get(key)
                ours = future is None
                if future is None:
                    # Under the lock only the promise is made; whoever comes next waits for it outside.
                    future = self._futures[key] = concurrent.futures.Future()
                    # What is evicted while it is made is still given to those that wait for it.
                    while len(self._futures) > self._capacity:
                        self._futures.popitem(last=False)
                self._futures.move_to_end(key)
            if not ours:
                if future.exception() is None:
                    return future.result()
                continue
            try:
                value = make()
            except BaseException as error:
                with self._lock:
                    # It may have been evicted, and made by another thread since.
                    if self._futures.get(key) is future:
                        del self._futures[key]
                future.set_exception(error)
                raise
            future.set_result(value)
            return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Some blocks in memory, their examples in the order ``order`` in which batches take them: columns, or packed."""

    columns: PreparedColumns | None
    packed: PackedWindow | None
    order: np.ndarray
    pieces: list[tuple[int, int, int]]

    def place(self, example: int) -> tuple[int, int]:
        """(block, example in it) of an example of the window as it was read."""
        for block, start, stop in self.pieces:
            if example < stop - start:
                return block, start + example
            example -= stop - start
        raise IndexError(example)


class BatchSource:
    """``source[i]`` is batch ``i`` of the run, counted over all epochs. Thread-safe.

    Args:
      folder: The dataset's folder.
      schema: The dataset's schema.
      split: The split to read.
      packer: Packs the columns.
      order: How examples are ordered.
      batch_size: Examples in a batch.
      drop_remainder: Leave out an epoch's last batch if it is short, instead of padding it.
      epochs: Passes, or None for no end.
      windows_ahead: How many windows are in use at once.
      threads: How many blocks of a window are read side by side.
      watch: Called with the number of each block that is read, and all columns of its examples that belong to
        the share; in several threads, and again where a window is read again. None for nothing.
      counts: How much the examples from one number of the split to below another count, beside their weights; None for
        as much as their weights say.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        schema: Schema,
        split: str,
        packer: AnyPacker,
        *,
        order: OrderConfig,
        batch_size: int,
        drop_remainder: bool,
        epochs: int | None,
        windows_ahead: int,
        threads: int,
        watch: BlockWatch | None = None,
        counts: Callable[[int, int], np.ndarray] | None = None,
    ):
        self.folder = pathlib.Path(folder)
        shards = schema.splits[split].shards
        self._packer, self._order_config, self._batch_size, self._threads = packer, order, batch_size, threads
        self._watch, self._counts = watch, counts
        self._readers = [ShardReader(folder, shard) for shard in shards]
        self._first_block = np.cumsum([0, *(s.blocks for s in shards)])
        sizes = [min(schema.block_size, s.examples - i * schema.block_size) for s in shards for i in range(s.blocks)]
        self._block_examples = np.array(sizes, np.int64)
        total, count = order.read(int(self._block_examples.sum())), order.process_count
        # The same number of batches for every process: of the smallest share if short ones go, else of the largest.
        share = total // count if drop_remainder else math.ceil(total / count)
        self.batches_per_epoch = share // batch_size if drop_remainder else math.ceil(share / batch_size)
        self.epochs = epochs
        self._epochs = SharedCache[EpochOrder](2)
        self._windows = SharedCache[Window](windows_ahead)
        self._reads_ahead = False
        self._readers_ahead: list[threading.Thread] = []
        self._one_at_a_time = threading.Lock()

    @property
    def casts(self) -> bool:
        """Whether batches come with their casts."""
        return self._packer.cast != "none"

    def __len__(self) -> int:
        # Endless runs get a length that no run reaches and that still fits a 64-bit index.
        return self.batches_per_epoch * (self.epochs if self.epochs is not None else 2**32)

    def open(self) -> None:
        """From now on windows are read ahead of the batches that need them, in threads; until ``close``."""
        self._reads_ahead = self._threads > 0

    def close(self) -> None:
        """Waits for a window that is read ahead, and reads no more."""
        with self._one_at_a_time:
            self._reads_ahead, readers = False, self._readers_ahead
        for reader in readers:
            reader.join()

    def __getitem__(self, index: int) -> Batch:
        epoch, batch = divmod(int(index), self.batches_per_epoch)
        order = self.order(epoch)
        start = batch * self._batch_size
        spans = order.spans(start, min(start + self._batch_size, order.examples))
        windows = [self._window(order, w) for w, _, _ in spans]
        if self._reads_ahead and spans:
            self._read_ahead(order, spans[-1][0])

        def where(k: int) -> str:
            for window, (_, i, j) in zip(windows, spans, strict=True):
                if k < j - i:
                    block, example = window.place(int(window.order[i + k]))
                    return f"example {example} of {self._block_name(block)}"
                k -= j - i
            raise IndexError(k)

        packed = [(window.packed, i, j) for window, (_, i, j) in zip(windows, spans, strict=True) if window.packed]
        if spans and len(packed) == len(spans):
            return batch_of(packed, self._batch_size)
        # Of two windows one may be packed, and the other not, where a feature happens to be regular in one.
        pieces = [
            (self._columns(order, number) if window.columns is None else window.columns).cut(i, j)
            for window, (number, i, j) in zip(windows, spans, strict=True)
        ]
        columns = pieces[0] if len(pieces) == 1 else join(pieces or [self._no_columns])
        # Another number for each process's batch: what is drawn by it must not be the same in all of them.
        of_run = int(index) * self._order_config.process_count + self._order_config.process_index
        return self._packer.pack(columns, self._batch_size, where, number=of_run)

    def _window(self, order: EpochOrder, window: int) -> Window:
        return self._windows.get((order.epoch, window), functools.partial(self._load, order, window))

    def _read_ahead(self, order: EpochOrder, window: int) -> None:
        """Begins to read the windows after this one, of the next epoch after the last, unless they are there.

        Otherwise every thread would wait for one, one batch in as many as a window holds. A failure is left to the
        batch that needs the window, which then reads it again.
        """
        with self._one_at_a_time:
            self._readers_ahead = [reader for reader in self._readers_ahead if reader.is_alive()]
            for _ in range(windows_ahead(self._threads)):
                window += 1
                if window == len(order.window_starts) - 1:
                    if order.epoch + 1 == self.epochs:
                        return
                    order, window = self.order(order.epoch + 1), 0
                busy = len(self._readers_ahead) >= windows_ahead(self._threads)
                if busy or not self._reads_ahead or (order.epoch, window) in self._windows:
                    continue

                def read(order: EpochOrder = order, window: int = window) -> None:
                    with contextlib.suppress(Exception):
                        self._window(order, window)

                # A thread for each window, so that a loader that nobody closes leaves none behind.
                self._readers_ahead.append(threading.Thread(target=read, name="jrec-read-ahead", daemon=True))
                self._readers_ahead[-1].start()

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch."""
        return self._epochs.get(epoch, lambda: epoch_order(self._order_config, self._block_examples, epoch))

    def _load(self, order: EpochOrder, window: int) -> Window:
        columns, packed = self._columns(order, window), None
        with contextlib.suppress(DatasetError):  # left to the batch that has the example
            # In the thread that has read the window, once, and not batch by batch in all of them.
            packed = self._packer.window(columns, self._batch_size)
        return Window(
            columns=columns if packed is None else None,
            packed=packed,
            order=order.examples_of(window),
            pieces=order.pieces(window),
        )

    def _columns(self, order: EpochOrder, window: int) -> PreparedColumns:
        pieces = order.pieces(window)
        collected: dict[str, list[Column]] = {name: [] for name in self._packer.columns}
        blocks = self._read_all([block for block, _, _ in pieces])
        for columns, (block, start, stop) in zip(blocks, pieces, strict=True):
            if self._watch is not None:
                self._watch(block, {name: cut(column, start, stop) for name, column in columns.items()})
            for name, pieces_of_column in collected.items():
                pieces_of_column.append(cut(columns[name], start, stop))
        try:
            columns = self._packer.prepare(
                {name: concatenate(pieces_of_column) for name, pieces_of_column in collected.items()}
            )
        except (ValueError, DatasetError) as error:
            names = ", ".join(self._block_name(block) for block, _, _ in pieces)
            raise DatasetError(
                f"{names} do not hold what the schema says: {error}; prepare the dataset anew"
            ) from error
        # Here, column by column, and not batch by batch: a column of a window stays in the cache, where the examples of
        # a batch, each in 26 columns, cost 2.8 µs of misses an example of DLRM-DCNv2. Here it is 0.2 µs.
        return columns.take(order.examples_of(window)) if order.config.shuffle else columns

    def _read_all(self, blocks: list[int]) -> list[dict[str, Column]]:
        # All threads wait for a window that none has read. Its blocks take most of the time: one by one they would keep
        # DLRM-DCNv2 at 0.55 M examples/s for any number of threads. Columns are too small to be made side by side.
        if self._threads < 2:
            return [self._read(block) for block in blocks]
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._read, blocks))

    def _read(self, block: int) -> dict[str, Column]:
        shard = self._shard_of(block)
        columns = self._readers[shard].read(block - int(self._first_block[shard]))
        if self._counts is not None:
            first = int(self._block_examples[:block].sum())
            counts = self._counts(first, first + int(self._block_examples[block]))
            weights = columns.get(EXAMPLE_WEIGHT)
            columns = {**columns, EXAMPLE_WEIGHT: counts if weights is None else counts * cast(np.ndarray, weights)}
        if missing := [name for name in self._packer.columns if name not in columns]:
            problem = f"has no column {', '.join(missing)}"
        elif any(count_examples(column) != self._block_examples[block] for column in columns.values()):
            problem = f"has not the {self._block_examples[block]:,} examples that the schema promises"
        else:
            return columns
        raise DatasetError(f"{self._block_name(block)} {problem}; the dataset is damaged: prepare it anew")

    @functools.cached_property
    def _no_columns(self) -> PreparedColumns:
        """No examples, in the types of the dataset: for a process whose share ends a batch before another's."""
        first = self._read(0)
        return self._packer.prepare({name: cut(first[name], 0, 0) for name in self._packer.columns})

    def _shard_of(self, block: int) -> int:
        return int(np.searchsorted(self._first_block, block, side="right")) - 1

    def _block_name(self, block: int) -> str:
        shard = self._shard_of(block)
        return f"block {block - int(self._first_block[shard])} of {self._readers[shard].path}"


class SharesSource:
    """Some examples of the batches of several shares, for a run that other processes go on with than began it.

    ``source[i]`` holds the examples ``begin`` to ``stop`` of the batches ``i`` of all shares, joined in the order of
    the shares.

    Args:
      layout: The batches' layout.
      share: Makes the source of a share.
      begin, stop: The first example, and one past the last.
      batch_size: The batch size of a share.
    """

    def __init__(
        self, layout: EmbeddingLayout, share: Callable[[int], BatchSource], begin: int, stop: int, batch_size: int
    ):
        self._layout, self._pieces = layout, []
        for number in range(begin // batch_size, (stop - 1) // batch_size + 1):
            low, high = max(begin - number * batch_size, 0), min(stop - number * batch_size, batch_size)
            self._pieces.append((share(number), low, high))

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch, the same in every share."""
        return self._pieces[0][0].batches_per_epoch

    @property
    def epochs(self) -> int | None:
        """Passes, or None for no end."""
        return self._pieces[0][0].epochs

    def open(self) -> None:
        """Opens the sources of all shares."""
        for source, _, _ in self._pieces:
            source.open()

    def close(self) -> None:
        """Closes the sources of all shares."""
        for source, _, _ in self._pieces:
            source.close()

    def __len__(self) -> int:
        return len(self._pieces[0][0])

    def __getitem__(self, index: int) -> Any:
        pieces: list[Any] = [(share[index], low, high) for share, low, high in self._pieces]
        if isinstance(pieces[0][0], Gathered):
            return joined(pieces)
        batch = gathered(self._layout, pieces)
        if not self._pieces[0][0].casts:
            return batch
        bags = {name: with_cast(bags, self._layout.stacks[name]) for name, bags in batch.bags.items()}
        return dataclasses.replace(batch, bags=bags)


def windows_ahead(threads: int) -> int:
    """How many windows are read side by side.

    Of a window only the blocks are; what follows, column by column, is one thread's work, and takes so long that one
    window at a time keeps four threads or more waiting.
    """
    return max(1, threads // 2)


def windows_needed(*, batch_size: int, window_blocks: int, block_size: int, batches_ahead: int, threads: int) -> int:
    """How many windows the batches under way can touch, those that are read ahead, and one to spare."""
    return math.ceil(batches_ahead * batch_size / (window_blocks * block_size)) + 2 + windows_ahead(threads)
