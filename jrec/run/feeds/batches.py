"""Batches as a feed takes them: from a dataset's loader, or of any iterable, packed in threads ahead of time."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from jrec.batch import Batch
from jrec.data.growing_tables import Grown
from jrec.errors import CheckpointError
from jrec.json_values import JsonObject

Position = JsonObject
"""Where a feed or a loader stands, in JSON types."""


class Batches(Protocol):
    """What a feed reads: ``jrec.data.Loader``, and ``PackedBatches``."""

    @property
    def position(self) -> int:
        """Batches given out so far."""
        ...

    @property
    def aside(self) -> Grown | None:
        """What came with the last batch that was given out beside it (``PackedBatches``), or None."""
        ...

    def __next__(self) -> Any:
        """The next batch."""
        ...

    def first(self, count: int) -> list[Any]:
        """The first batches of all that it can still give, at most ``count``, without moving the position."""
        ...

    def upcoming(self, count: int) -> list[Any]:
        """The next batches, at most ``count``, without moving the position."""
        ...

    def state(self) -> Position:
        """The position after the last batch, in JSON types."""
        ...

    def restore(self, state: Position) -> None:
        """Continues from a ``state()``. Call before the first batch."""
        ...

    def close(self) -> None:
        """Ends the threads."""
        ...


class PackedBatches:
    """The items of an iterable, packed side by side in threads, in their order. Use it from one thread.

    One thread reads the iterable; ``workers`` pack. Batches that are packed and need no ``transform`` are taken as they
    come, since a thread would only hand them on. An iterator with ``get_state`` and ``set_state``, as grain's, or
    with ``state`` and ``restore``, as ``jrec.data.Loader``, can be restored; of others the caller skips what was taken.

    Args:
      items: The iterable.
      pack: Makes a batch of what ``order`` returned for an item.
      transform: What becomes of a batch, which may change between two looks at it.
      workers: Threads that pack; 0 does all work when a batch is asked for.
      prefetch: Packed batches that may wait.
      order: Called with each item, in their order, before it is packed; returns what to pack, and what comes with the
        batch beside it (``aside``).
    """

    def __init__(
        self,
        items: Iterable[object],
        pack: Callable[[Any], Any],
        *,
        transform: Callable[[Batch], Any] | None = None,
        workers: int = 2,
        prefetch: int = 2,
        order: Callable[[Any], tuple[object, Grown | None]] = lambda item: (item, None),
    ):
        self._items, self._pack, self._transform, self._order = iter(items), pack, transform, order
        self._workers, self._prefetch = workers, prefetch
        self._held: collections.deque[_Read] = collections.deque()  # read, but not given out
        self._threads: _Threads | None = None
        self._position, self._state = 0, _state_of(self._items)
        self._aside: Grown | None = None
        self._closed = False

    @property
    def position(self) -> int:
        """Batches given out so far."""
        return self._position

    @property
    def aside(self) -> Grown | None:
        """What ``order`` returned beside the last batch that was given out; None before the first."""
        return self._aside

    def first(self, count: int) -> list[Any]:
        """The first batches; the next ones where some are taken, since an iterable does not go back."""
        return self.upcoming(count)

    def upcoming(self, count: int) -> list[Any]:
        """The next batches, at most ``count``; only while no thread reads ahead."""
        if self._threads is not None:
            raise RuntimeError("the batches are read ahead by now; look at them before the first one is taken")
        while len(self._held) < count:
            try:
                self._held.append(self._read())
            except StopIteration:
                break
        # Made anew when they are given out: what ``transform`` does may change in between.
        return [self._made(read.item) for read in list(self._held)[:count]]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
          StopIteration: If there is none.
          Exception: What the iterable or ``pack`` raised for this batch.
        """
        if self._closed:
            raise StopIteration
        if self._threads is None and self._workers and self._transform is None:
            # The first item decides: batches that are packed already need no threads, which would only hand them on.
            self._held = self._held or collections.deque([self._read()])
            self._workers = 0 if isinstance(self._held[0].item, Batch) else self._workers
        if not self._workers:
            read = self._held.popleft() if self._held else self._read()
            made = self._made(read.item)
        else:
            if self._threads is None:
                self._threads = _Threads(self._all(), self._made, self._workers, self._workers + self._prefetch)
            try:
                made, read = self._threads.next()
            except BaseException:
                self._threads.close()
                raise
        # Only now, so that a batch that failed is not counted. The state is the one right after this item, however far
        # the reading thread is by now.
        self._position, self._state, self._aside = self._position + 1, read.state, read.aside
        return made

    def state(self) -> Position:
        """How many batches were given out, and the iterator's own state, if it has one, after the last of them."""
        return {"batches": self._position, **({} if self._state is None else {"iterator": self._state})}

    def restore(self, state: Position) -> None:
        """Continues from a ``state()``.

        An iterator without a state is left where it is: the caller gives one that begins behind the batches taken.

        Raises:
          CheckpointError: If it is no state of this iterator.
        """
        if not isinstance(state, dict) or not isinstance(state.get("batches"), int):
            raise CheckpointError(f"{str(state)[:200]} is no position of a feed")
        if self._state is not None and "iterator" in state:
            set_state = getattr(self._items, "set_state", None) or getattr(self._items, "restore", None)
            assert set_state is not None  # as it has get_state or state
            set_state(_decoded(state["iterator"]))
            # They were read where the iterator stood before.
            self._held.clear()
        self._position, self._state = state["batches"], state.get("iterator")

    def close(self) -> None:
        """Ends the threads, even while another one waits for a batch; no more batches."""
        self._closed = True
        if self._threads is not None:
            self._threads.close()

    def _read(self) -> _Read:
        item, aside = self._order(next(self._items))
        return _Read(item, _state_of(self._items), aside)

    def _all(self) -> Iterator[_Read]:
        while self._held:
            yield self._held.popleft()
        while True:
            try:
                yield self._read()
            except StopIteration:
                return

    def _made(self, item: object) -> Any:
        batch = self._pack(item)
        return batch if self._transform is None else self._transform(batch)


class _Read(NamedTuple):
    """An item in its turn: what to pack, the iterator's state after it, and what comes beside the batch."""

    item: object
    state: object
    aside: Grown | None


class _Threads:
    """One thread that reads, and some that pack."""

    def __init__(self, items: Iterator[_Read], made: Callable[[Any], Any], workers: int, room: int):
        self._made, self._closed = made, threading.Event()
        self._room = threading.Semaphore(room)
        self._results: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], _Read]] = queue.SimpleQueue()
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="jrec-pack")
        # A daemon, since an iterable may block forever in its ``next``, which no close can end, and must not keep a
        # program alive.
        self._thread = threading.Thread(target=self._read, args=(items,), name="jrec-read", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Any, _Read]:
        if self._closed.is_set():
            raise StopIteration
        future, read = self._results.get()
        # Futures come in the order of the items, whichever worker is done first. Room is given back only with the
        # result, so that no more than ``room`` items wait, and the one with which the reading thread waits for room.
        made = future.result()
        self._room.release()
        return made, read

    def close(self) -> None:
        self._closed.set()
        self._room.release()
        # The release wakes the reading thread, which then sees that it is closed.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._end(StopIteration())  # wakes what waits in ``next``

    def _read(self, items: Iterator[_Read]) -> None:
        end: BaseException = StopIteration()
        try:
            for read in items:
                self._room.acquire()
                if self._closed.is_set():
                    return
                with contextlib.suppress(RuntimeError):  # the pool was closed meanwhile
                    self._results.put((self._pool.submit(self._made, read.item), read))
        except BaseException as error:
            end = error
        self._end(end)

    def _end(self, end: BaseException) -> None:
        # The end is a future that failed: ``next`` meets it in its turn, behind all batches before it.
        last: concurrent.futures.Future[Any] = concurrent.futures.Future()
        last.set_exception(end)
        self._results.put((last, _Read(None, None, None)))


def _state_of(iterator: object) -> object:
    """A copy of an iterator's state in JSON types, which it may change in place; None if it has none."""
    get_state = getattr(iterator, "get_state", None) or getattr(iterator, "state", None)
    if not callable(get_state):
        return None
    state = get_state()
    # Latin-1 has a character for every byte, so that any bytes survive JSON.
    return {"bytes": state.decode("latin-1")} if isinstance(state, bytes) else copy.deepcopy(state)


def _decoded(state: object) -> object:
    return state["bytes"].encode("latin-1") if isinstance(state, dict) and state.keys() == {"bytes"} else state
