"""Batches that a thread makes ready ahead of their steps: read, stacked for several steps, placed on the device."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrec.batch import Batch
from jrec.host.stages import Channel, Finished, Monitor, Stage
from jrec.host.timeline import Timeline
from jrec.run.feeds.batches import Batches, Position
from jrec.run.feeds.feed import LoaderFeed, Ready, remaining
from jrec.run.step import HostResults, StepBatch, StepResults

_ALIGNMENT = 64  # of arrays that XLA reads on CPUs where they are; others it copies
_AHEAD = 3
"""How many dispatches a program may be ahead of the device: each holds its batches there."""


class Placed(NamedTuple):
    """A batch for its step.

    Attributes:
      batch: NumPy arrays, as the loader made them.
      prepared: The batch as ``AheadFeed.together`` takes it.
    """

    batch: Batch
    prepared: StepBatch


class _Made(NamedTuple):
    """Batches of a dispatch, and the loader's position after them."""

    ready: Ready
    position: Position


class AheadFeed(LoaderFeed):
    """A loader's batches, made ready by a thread two dispatches ahead: one waits for its step, one for its place.

    A subclass says where they are placed (``place`` and ``together``).

    Args:
      loader: The training batches.
      total: The number of batches that the run takes; None for all.
      steps: How many of them a dispatch takes that begins behind a number of batches.
    """

    def __init__(self, loader: Batches, *, total: int | None, steps: Callable[[int], int]):
        super().__init__(loader)
        self._source, self._steps = remaining(loader, total), steps
        self._monitor, timeline = Monitor(), Timeline()
        # Room for one: with the dispatch that the thread is making, two are ahead of the step.
        self._waiting: Channel[tuple[int, _Made]] = Channel(self._monitor, "ready", 1, timeline)
        self._stage = Stage(
            "prepare",
            take=((number, None) for number in itertools.count(1)).__next__,
            work=self._make,
            give=self._waiting.put,
            finish=self._waiting.finish,
            fail=self._waiting.finish,
            timeline=timeline,
        )
        self._alone: collections.deque[_Made] = collections.deque()  # read for a dispatch that they cannot share
        # Freeing a batch's arrays takes 0.2 to 0.4 ms, which the thread does: it drops a batch some batches later.
        self._recent: collections.deque[_Made] = collections.deque(maxlen=4)
        self._under_way: collections.deque[jax.Array] = collections.deque()
        self._failure: Exception | None = None
        self._out: _Made | None = None
        self._position: Position | None = None  # after the last step, once the thread has begun

    def place(self, item: Any) -> Placed:
        """Prepares a batch of the loader for ``together``; in the thread."""
        raise NotImplementedError

    def together(self, batches: Sequence[StepBatch]) -> StepBatch:
        """The batches of a dispatch, one or several of equal shapes, where their steps are taken; in the thread."""
        raise NotImplementedError

    def begin(self) -> None:
        """Called before the first batch is placed, in the program's thread."""

    def next(self) -> Ready:
        """The next batches, ready for their steps; see ``Feed``."""
        if self._position is None:
            # Not in the constructor: until the first batch is asked for, a position may still be restored, and no
            # thread may read while the first batches are looked at.
            self.begin()
            self._position = self._loader.state()
            self._stage.start()
        if (made := self._waiting.next()) is None:
            raise StopIteration
        _, self._out = made
        return self._out.ready

    def stepped(self, ready: Ready, host: HostResults, results: StepResults) -> None:
        """Moves the position, and waits where the program is far ahead of the device; see ``Feed``."""
        assert self._out is not None
        self._position = self._out.position
        # A program that reads no results would else queue dispatches without end, each with its batches on the device.
        self._under_way.append(results.loss)
        if len(self._under_way) > _AHEAD:
            # The loss of a dispatch is ready when all of it is, since one program makes both.
            self._under_way.popleft().block_until_ready()

    def position(self) -> Position:
        """The position after the last step, JSON; the loader itself is ahead."""
        return super().position() if self._position is None else self._position

    def close(self) -> None:
        """Ends the thread; no more batches."""
        # Everything that the thread may wait for ends before it is joined.
        self._monitor.close()
        super().close()
        if self._position is not None:
            self._stage.join()
        self._recent.clear()

    def _make(self, number: int, item: None) -> _Made:
        """The next dispatch; batches of unlike shapes, and the last ones, take one each."""
        del number, item
        if not self._alone:
            if self._failure is not None:
                raise self._failure
            count, read = max(1, self._steps(self._loader.position)), []
            try:
                for batch, after in itertools.islice(self._source, count):
                    read.append((self.place(batch), *after))
            except Exception as error:
                self._failure = error  # for the batch that it is of: those before it come first
                if not read:
                    raise
            # A scan is compiled for its number of batches and their shapes: fewer, or unlike ones, take the program for
            # one.
            together = len(read) == count and len({_shapes(placed.prepared) for placed, *_ in read}) == 1
            for some in [read] if together else ([one] for one in read):
                placed, (position, grown) = [placed for placed, *_ in some], some[-1][1:]
                prepared = self.together([one.prepared for one in placed])
                ready = Ready(batches=tuple(one.batch for one in placed), prepared=prepared, grown=grown)
                self._alone.append(_Made(ready, position))
        if not self._alone:
            raise Finished
        self._recent.append(made := self._alone.popleft())
        return made


class PlacedFeed(AheadFeed):
    """A loader's batches, on the device ahead of their steps, where one device has all rows; see ``AheadFeed``."""

    def __init__(self, loader: Batches, *, total: int | None, steps: Callable[[int], int]):
        super().__init__(loader, total=total, steps=steps)
        self._device = jax.config.jax_default_device  # of the program's thread

    def place(self, item: Batch) -> Placed:
        """The batch, still in the host's memory."""
        return Placed(item, StepBatch(batch=item))

    def together(self, batches: Sequence[StepBatch]) -> StepBatch:
        """The batches on the device, sent as one array a leaf.

        Sixteen times as many transfers, one for each batch, would hold Python's lock for longer than the loader's
        threads do that pack them; a copy of the arrays does not hold it.
        """
        made = batches[0].batch
        if len(batches) > 1:
            made = jax.tree.map(lambda *leaves: np.stack(leaves), *(batch.batch for batch in batches))
        with jax.default_device(self._device):
            return StepBatch(batch=jax.device_put(made), steps=len(batches))


def _shapes(prepared: StepBatch) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(prepared.batch)
    return (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without content, at an address from which jitted functions on CPUs read it without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    space = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -space.ctypes.data % _ALIGNMENT
    return space[begin : begin + size].view(dtype).reshape(shape)
