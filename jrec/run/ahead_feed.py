"""Batches that a thread makes ready ahead of their steps: read, stacked for several steps, placed on the device."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrec.batch import Batch
from jrec.data.growing_tables import Grown
from jrec.host.stages import Channel, Finished, Monitor, Stage
from jrec.host.timeline import Timeline
from jrec.run.batches import Batches, Position
from jrec.run.feed import LoaderFeed, Ready, remaining
from jrec.run.mesh_arrays import Growth
from jrec.run.step import HostResults, StepBatch, StepResults

_ALIGNMENT = 64  # of arrays that XLA reads on CPUs where they are; others it copies
_AHEAD = 3
"""How many dispatches a program may be ahead of the device: each holds its batches there."""


class Made(NamedTuple):
    """Batches for their steps, the loader's position after them, and the sizes that they made grow."""

    ready: Ready
    position: Position
    growth: Growth = {}  # noqa: RUF012, never changed


class AheadFeed(LoaderFeed):
    """A loader's batches, made ready by a thread two dispatches ahead: one waits for its step, one for its place.

    A subclass says how (``make``).

    Args:
      loader: The training batches.
      total: The number of batches that the run takes; None for all.
    """

    def __init__(self, loader: Batches, *, total: int | None):
        super().__init__(loader)
        self.source = remaining(loader, total)
        self._monitor, timeline = Monitor(), Timeline()
        self._waiting: Channel[tuple[int, Made]] = Channel(self._monitor, "ready", 1, timeline)
        self._stage = Stage(
            "prepare",
            take=((number, None) for number in itertools.count(1)).__next__,
            work=self._make,
            give=self._waiting.put,
            finish=self._waiting.finish,
            fail=self._waiting.finish,
            timeline=timeline,
        )
        # Freeing a batch's arrays takes 0.2 to 0.4 ms, which the thread does: it drops a batch some batches later.
        self._recent: collections.deque[Made] = collections.deque(maxlen=4)
        self._out: Made | None = None
        self._position: Position | None = None  # after the last step, once the thread has begun

    def make(self) -> Made:
        """The next batches for a dispatch, made in the thread; raises ``Finished`` where there are none."""
        raise NotImplementedError

    def begin(self) -> None:
        """Prepares the first ``make``, in the program's thread."""

    def next(self) -> Ready:
        """The next batches, ready for their steps; see ``Feed``."""
        if self._position is None:
            self.begin()
            self._position = self._loader.state()
            self._stage.start()
        if (made := self._waiting.next()) is None:
            raise StopIteration
        number, self._out = made
        self.taken(number, self._out)
        return self._out.ready

    def taken(self, number: int, made: Made) -> None:
        """Called in the program's thread with each dispatch's batches and its number, from 1."""

    def stepped(self, ready: Ready, host: HostResults, results: StepResults) -> None:
        """Moves the position behind the batches; see ``Feed``."""
        assert self._out is not None
        self._position = self._out.position

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

    def _make(self, number: int, item: None) -> Made:
        del number, item
        made = self.make()
        self._recent.append(made)
        return made


class PlacedFeed(AheadFeed):
    """A loader's batches, on the device ahead of their steps, where one device has all rows.

    Args:
      loader: The training batches.
      total: The number of batches that the run takes; None for all.
      steps: How many of them a dispatch takes that begins behind a number of batches.
    """

    def __init__(self, loader: Batches, *, total: int | None, steps: Callable[[int], int]):
        super().__init__(loader, total=total)
        self._steps = steps
        self._device = jax.config.jax_default_device  # of the program's thread
        self._alone: collections.deque[_Read] = collections.deque()  # read for a dispatch that they cannot share
        self._under_way: collections.deque[jax.Array] = collections.deque()

    def make(self) -> Made:
        """The next dispatch; batches of unlike shapes, and the last ones, take one each."""
        if not self._alone:
            count = max(1, self._steps(self._loader.position))
            read = list(itertools.islice(self.source, count))
            if len(read) == count > 1 and len({_shapes(batch) for batch, _ in read}) == 1:
                return self._placed(read)
            self._alone.extend(read)
        if not self._alone:
            raise Finished
        return self._placed([self._alone.popleft()])

    def stepped(self, ready: Ready, host: HostResults, results: StepResults) -> None:
        """Moves the position, and waits where the program is far ahead of the device; see ``Feed``."""
        super().stepped(ready, host, results)
        self._under_way.append(results.loss)
        if len(self._under_way) > _AHEAD:
            self._under_way.popleft().block_until_ready()

    def _placed(self, read: Sequence[_Read]) -> Made:
        batches = tuple(batch for batch, _ in read)
        position, grown = read[-1][1]
        with jax.default_device(self._device):
            placed = [jax.device_put(batch) for batch in batches]
            placed = placed[0] if len(placed) == 1 else _stacked(*placed)
        prepared = StepBatch(batch=placed, steps=len(batches))
        return Made(Ready(batches=batches, prepared=prepared, grown=grown), position)


_Read = tuple[Batch, tuple[Position, Grown | None]]


def _shapes(batch: Batch) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(batch)
    return (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))


@jax.jit
def _stacked(*batches: Batch) -> Batch:
    """Batches with an axis of them in front of every leaf; on the device, since a copy there takes the least time."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without content, at an address from which jitted functions on CPUs read it without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    space = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -space.ctypes.data % _ALIGNMENT
    return space[begin : begin + size].view(dtype).reshape(shape)
