"""Threads that pass items on through bounded channels, and stop together.

All waits are on the condition of one ``Monitor``, and a failure wakes every waiter. A stage that makes items for the
caller fails as it would without threads: its channel ends with the failure, and the taker gets all items made before
it, then the failure itself. A stage after the caller's step (``Monitor.fail``) stops all threads at once: every wait
raises ``Stopped``, threads end on it, and the caller gets the failure (``Monitor.guarded``). Either way the failure
keeps its traceback, and no wait outlives its reason.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from jrec.host.timeline import Timeline

JOIN_SECONDS = 60.0
"""How long ``Stage.join`` waits for work that is under way, such as a read from a slow disk."""


class Stopped(Exception):  # noqa: N818, a message to threads
    """A wait ended because the pipeline failed or was closed."""


class Finished(Exception):  # noqa: N818, as StopIteration
    """A channel is empty and stays empty; ``reason`` is the failure that ended it early, or None."""

    def __init__(self, reason: BaseException | None = None):
        super().__init__()
        self.reason = reason


class Monitor:
    """The state that a pipeline's threads share: a lock, a condition, and whether to go on."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False

    def fail(self, error: BaseException) -> None:
        """Stops everything because of ``error``; the first one counts."""
        with self._condition:
            self._failure = error if self._failure is None else self._failure
            self._condition.notify_all()

    def close(self) -> None:
        """Stops everything."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def change(self, action: Callable[[], None]) -> None:
        """Runs ``action`` under the lock and lets every waiter look again."""
        with self._condition:
            action()
            self._condition.notify_all()

    def wait[T](self, ready: Callable[[], bool], action: Callable[[], T]) -> T:
        """Waits until ``ready()`` and returns ``action()``, both under the lock; others look again afterwards.

        Raises:
          Stopped: If the pipeline failed or was closed.
        """
        with self._condition:
            while True:
                # Looked at before every wait and after each waking: no thread sleeps on when there is nothing to come.
                if self._failure is not None or self._closed:
                    raise Stopped
                if ready():
                    break
                # In a loop, since any change wakes all: a wait ends only by its own condition.
                self._condition.wait()
            # One condition for all waits: an action may be what any other thread waits for, and there are few threads.
            result = action()
            self._condition.notify_all()
            return result

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Around the waits of the pipeline's caller: raises the pipeline's failure in place of ``Stopped``."""
        try:
            yield
            return
        except Stopped:
            failure = self._failure
        if failure is None:
            raise RuntimeError("this host pipeline is closed; make another one")
        raise failure


class Channel[T]:
    """A bounded queue between two stages.

    Args:
      monitor: The pipeline's monitor.
      name: The channel's name in the timeline.
      capacity: The most items that it holds.
      timeline: Records its depths.
    """

    def __init__(self, monitor: Monitor, name: str, capacity: int, timeline: Timeline):
        if capacity < 1:
            raise ValueError(f"channel {name!r} has capacity {capacity}; it must be at least 1")
        self.name = name
        self._monitor, self._capacity, self._timeline = monitor, capacity, timeline
        self._items: collections.deque[T] = collections.deque()
        self._end: Finished | None = None

    def put(self, item: T) -> None:
        """Adds an item, as soon as there is room."""
        self._monitor.wait(lambda: len(self._items) < self._capacity, lambda: self._items.append(item))

    def get(self) -> T:
        """Takes the oldest item, as soon as there is one.

        Raises:
          Finished: If the channel is empty and has ended.
        """

        def take() -> T:
            if not self._items:
                # Only when the channel is empty: a failure comes in its turn, behind the items made before it.
                raise Finished(None if self._end is None else self._end.reason)
            self._timeline.depth(self.name, len(self._items))
            return self._items.popleft()

        return self._monitor.wait(lambda: bool(self._items) or self._end is not None, take)

    def next(self) -> T | None:
        """Takes the oldest item for the caller of the stages; None at the end.

        Raises:
          Exception: The failure that ended the channel, after the items before it; or the failure of a later stage.
        """
        try:
            with self._monitor.guarded():
                return self.get()
        except Finished as end:
            failure = end.reason
        if failure is not None:
            raise failure
        return None

    def finish(self, reason: BaseException | None = None) -> None:
        """Ends the channel, with the failure if one is the reason."""

        def end() -> None:
            self._end = Finished(reason)

        self._monitor.change(end)


class Progress:
    """A count of finished items that others wait for."""

    def __init__(self, monitor: Monitor):
        self._monitor = monitor
        self.count = 0

    def advance(self) -> None:
        """Adds one to the count."""

        def add() -> None:
            self.count += 1

        self._monitor.change(add)

    def wait_for(self, count: int) -> None:
        """Waits until ``count`` items are finished."""
        self._monitor.wait(lambda: self.count >= count, lambda: None)


class Stage:
    """A thread that makes items from items.

    Args:
      name: The stage's name in the timeline, errors and debuggers.
      take: Gives the next (number, item); raises ``Finished`` at the end.
      work: Makes the next stage's item from a number and an item; it too may raise ``Finished``.
      give: Takes the result of ``work``.
      finish: Called after the last item, with the failure if a failed stage is the reason.
      fail: Called if this stage fails.
      timeline: Records when it worked and when it waited.
    """

    def __init__[A, B](
        self,
        name: str,
        *,
        take: Callable[[], tuple[int, A]],
        work: Callable[[int, A], B],
        give: Callable[[tuple[int, B]], None],
        finish: Callable[[BaseException | None], None],
        fail: Callable[[BaseException], None],
        timeline: Timeline,
    ):
        self.name = name

        def run() -> None:
            done = 0
            try:
                while True:
                    start = time.perf_counter()
                    number, item = take()
                    timeline.waited(name, time.perf_counter() - start)
                    with timeline.working(name, number):
                        made = work(number, item)
                    start = time.perf_counter()
                    give((number, made))
                    timeline.waited(name, time.perf_counter() - start)
                    done += 1
            except Finished as end:
                finish(end.reason)
            # Whoever stopped the pipeline knows why; this thread only ends.
            except Stopped:
                pass
            except BaseException as error:
                # Interrupts and exits, too: a stage that ended without a word would leave its neighbours waiting.
                error.add_note(f"(in stage {name!r}, after {done} batches)")
                fail(error)

        # A daemon: a program that ends without ``close`` does not hang on a thread that waits.
        self._thread = threading.Thread(target=run, name=f"jrec-{name.replace(' ', '-')}", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self) -> None:
        """Waits for the thread, which ends after the item it is working on.

        Raises:
          RuntimeError: If that takes longer than ``JOIN_SECONDS``.
        """
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(
                f"stage {self.name!r} did not end within {JOIN_SECONDS:.0f} seconds of the request to stop; whatever it"
                " is waiting for (a file system, a device) does not answer"
            )
