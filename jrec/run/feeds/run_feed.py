"""Batches of a program's own iterable, ready for the steps of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from jrec.batch import Batch
from jrec.data.gathering import Gathered
from jrec.data.growing_tables import GrowingTables, Grown
from jrec.data.packing import Packer
from jrec.data.packing_columns import PreparedColumns
from jrec.json_values import JsonObject
from jrec.run.feeds.batches import Position
from jrec.run.feeds.feed import Feed, Ready
from jrec.run.feeds.hand_packed import check_rows
from jrec.run.step import HostResults, StepResults


@dataclasses.dataclass(frozen=True, eq=False)
class FedBatch:
    """A batch of a ``RunFeed``, ready for its step; of a feed with ``steps``, several for one dispatch.

    Attributes:
      ready: The batches as the steps take them.
      feed: The batches' feed.
    """

    ready: Ready
    feed: RunFeed

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The examples of each step as they were packed, NumPy arrays; with several processes, this process's."""
        return self.ready.batches

    @property
    def batch(self) -> Batch:
        """The only one of ``batches``."""
        (batch,) = self.batches
        return batch


class RunFeed:
    """Batches of a run, packed and routed in threads ahead of their steps; an iterator. Use it from one thread.

    ``Run.feed`` makes it. Take the step of a batch before you ask for the next one.

    Attributes:
      reads_ahead: Whether it reads rows in host memory ahead of the steps, so that no other steps may change them.
      replays: Whether its first batches can be read again, wherever it stands, as a ``jrec.data.Loader``'s can.
    """

    def __init__(self, feed: Feed, *, reads_ahead: bool, replays: bool):
        self._feed, self._closed = feed, False
        self.reads_ahead, self.replays = reads_ahead, replays
        self._out: FedBatch | None = None  # whose step is not taken yet

    def __iter__(self) -> Iterator[FedBatch]:
        return self

    def __next__(self) -> FedBatch:
        if self._closed:
            raise StopIteration
        if self._out is not None:
            raise RuntimeError("take the step of the last batch before you ask for the next one: rows depend on it")
        try:
            ready = self._feed.next()
        except StopIteration:
            self.close()
            raise
        self._out = FedBatch(ready, self)
        return self._out

    def check(self, batch: FedBatch) -> None:
        """Raises ValueError unless this is the batch whose step is to be taken."""
        if batch is not self._out:
            raise ValueError("a step takes a batch of this run's feed, and each batch once")

    def stepped(self, batch: FedBatch, host: HostResults, outputs: StepResults) -> None:
        """Takes back a batch after its step; see ``Feed``."""
        self._feed.stepped(batch.ready, host, outputs)
        self._out = None

    @property
    def closed(self) -> bool:
        """Whether all batches are taken, or the feed was closed."""
        return self._closed

    def position(self) -> Position:
        """The position after the last step, in JSON types, for ``Run.save`` and ``Run.feed(..., position=...)``."""
        return self._feed.position()

    def restore(self, position: Position) -> None:
        """Continues from a ``position()``. Call before the first batch.

        Raises:
          CheckpointError: If it is of other batches.
        """
        # Feeds of earlier versions wrapped a loader, whose position is the inner one.
        wrapped = self.replays and isinstance(position, dict) and "iterator" in position
        self._feed.restore(position["iterator"] if wrapped else position)

    def sections(self, seconds: float) -> JsonObject:
        """What a report says of the batches, by section.

        Args:
          seconds: The duration of training.
        """
        return self._feed.sections(seconds)

    def flush(self) -> None:
        """Waits until host memory holds every row as the last step left it."""
        if not self._closed:
            self._feed.flush()

    def close(self, *, flush: bool = True) -> None:
        """Stores what the last step left, unless told otherwise, and ends the threads.

        A feed whose batches are all taken is closed.
        """
        if not self._closed:
            # First: closing must not run twice, and a failure to flush still ends the threads.
            self._closed = True
            try:
                if flush:
                    self._feed.flush()
            finally:
                # Asked before the feed closes its loader, which then reads no further.
                position = self._feed.position()
                self._feed.close()
                if self.replays:  # a loader goes on behind the last step, however far the feed read ahead
                    self._feed.restore(position)

    def __enter__(self) -> RunFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ItemPacker:
    """Packs the items of a feed into batches of one size.

    Args:
      packer: Packs columns.
      batch_size: Examples of a batch; None for as many as the first item has.
      shared: The devices of this process that share a batch.
      growing: The tables that grow.
      columns_wait: Whether columns wait to be packed while further items are read, which may write over them.
      batches_wait: Whether packed batches wait that may be written over: any but a ``jrec.data.Loader``'s.
    """

    def __init__(
        self,
        packer: Packer,
        batch_size: int | None,
        shared: int,
        growing: GrowingTables,
        *,
        columns_wait: bool,
        batches_wait: bool,
    ):
        self._packer, self._size, self._shared = packer, batch_size, shared
        self._map = growing.mapper() if growing else None
        self._columns_wait, self._batches_wait = columns_wait, batches_wait

    def order(self, item: object) -> tuple[object, Grown | None]:
        """Sees the items in their order: the first one has the size of all, unless it was given.

        Copies what the program may write over before it is packed, or read by a step.

        Returns:
          What ``pack`` takes: the item, or its columns whose keys have rows; and what changed in tables that grow.

        Raises:
          ValueError: If tables grow, and the item is a packed batch; or the first one has no examples.
        """
        if self._map is not None:
            if isinstance(item, Gathered):
                columns, grown = self._map(item.columns)
                return dataclasses.replace(item, columns=columns), grown
            if isinstance(item, Batch):
                raise ValueError("a packed batch has rows, but tables of the run grow; give the feed columns of values")
            prepared, grown = self._map(self._packer.prepare(self._packer.read(item, copy=self._columns_wait)))
            self._size = self._size or _size_of(prepared)
            return prepared, grown
        if isinstance(item, Batch):
            # Where batches do not wait, a step on a CPU may still read one when the next is made: JAX takes aligned
            # arrays over without a copy. Steps of 0.2 ms were 7 to 10 % longer when jrec's own were copied, too.
            return item if item.packed and not self._batches_wait else _copied(item), None
        read = self._packer.read(item, copy=self._columns_wait)
        self._size = self._size or _size_of(self._packer.prepare(read))
        return read, None

    def __call__(self, item: object) -> Batch:
        """The item's batch; an item that is one stays as it is.

        Raises:
          ValueError: If ``jrec.data`` did not pack a batch, and an address is no row of its table; see ``check_rows``.
        """
        if isinstance(item, Batch):
            if not item.packed:
                check_rows(self._packer.layout, item)
            return item
        if isinstance(item, Gathered):
            return item.pack()
        prepared = item if isinstance(item, PreparedColumns) else self._packer.prepare(item)
        # A multiple of the devices that share the batch, since their parts have one static size.
        size = -(-(self._size or prepared.examples) // self._shared) * self._shared
        return self._packer.pack(prepared, size)


def _size_of(first: PreparedColumns) -> int:
    if not first.examples:
        raise ValueError(
            "the first batch has no examples, but all have its size; leave it out, or give feed(..., batch_size=...)"
        )
    return first.examples


def _copied(batch: Batch) -> Batch:
    copied = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)
    object.__setattr__(copied, "packed", batch.packed)
    return copied
