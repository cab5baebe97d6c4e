"""The batches of a run of several processes, and static sizes that hold every batch in all of them.

All processes compile one program, so sizes must be equal, but each process sees only its own devices' parts. The first
batches' needs settle the sizes before the first step. From then on a batch carries what the batch ``LEAD`` steps behind
it needs in this process, and its step returns the greatest need of all devices: a few integers beside the labels, which
are gathered anyway. The result is there when that later batch is prepared, since the training loop has read the step's
loss by then. So all processes grow their sizes at the same step, without a collective of its own and without waiting.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import numpy as np

from jrec.data.loader import Loader
from jrec.train.mesh_arrays import Shapes, Sizes, from_table, table_of
from jrec.train.mesh_batch import Dealt

LEAD = 2
"""Steps from a batch that carries a need to the batch that has it: the loop reads a step's loss one step late."""

Growth = dict[str, tuple[Sizes, Sizes]]
"""By stack, sizes before and after."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Waiting:
    """A batch that was read ahead.

    Attributes:
      dealt: The batch.
      position: The loader's position behind it.
      needed: What it needs in this process.
    """

    dealt: Dealt
    position: dict[str, Any]
    needed: dict[str, Sizes]


class BatchesAhead:
    """Reads batches ahead, and grows sizes to what all processes need.

    Args:
      loader: The process's training batches, cut into parts.
      shapes: Sizes that hold the next ``LEAD`` batches of all processes.
      devices: Numbers of the process's own devices.
      total: Batches of the run; none behind them is read.
    """

    def __init__(self, loader: Loader, shapes: Shapes, devices: list[int], total: int):
        self._loader, self._shapes, self._devices, self._total = loader, shapes, devices, total
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._agreed: collections.deque[jax.Array] = collections.deque()
        self._position = loader.state()

    def next(self) -> tuple[Dealt, np.ndarray | None, Growth]:
        """The next batch; all processes call it at the same step.

        Returns:
          The batch; (local devices, stacks, kinds) int32, what the batch ``LEAD`` behind it needs here, zeros where
          there is none, or None where no stack has routes; and what had to grow for this one.

        Raises:
          RuntimeError: If all batches were given out.
        """
        while len(self._waiting) <= LEAD and self._loader.position < self._total:
            dealt: Any = next(self._loader)
            needed = self._shapes.needed(dealt, self._devices)
            self._waiting.append(_Waiting(dealt=dealt, position=self._loader.state(), needed=needed))
        if not self._waiting:
            raise RuntimeError("all steps of the run are taken")
        grown: Growth = {}
        if len(self._agreed) == LEAD:
            grown = self._shapes.grow(from_table(self._shapes.stacks, np.asarray(self._agreed.popleft())))
        later = self._waiting[LEAD].needed if len(self._waiting) > LEAD else {}
        batch = self._waiting.popleft()
        self._shapes.check(batch.needed)
        self._position = batch.position
        if not self._shapes.stacks:
            return batch.dealt, None, grown
        needs = table_of(self._shapes.stacks, later).astype(np.int32)
        return batch.dealt, np.repeat(needs[None], len(self._devices), axis=0), grown

    def stepped(self, needs: jax.Array | None) -> None:
        """Takes what the batch's step returned: (stacks, kinds) int32, the greatest needs of all devices, or None."""
        if needs is not None:
            self._agreed.append(needs)

    def position(self) -> dict[str, Any]:
        """The loader's position behind the batch that was given out last."""
        return self._position


def described(grown: Growth) -> dict[str, dict[str, list[int]]]:
    """By stack and kind, size before and after, of those that grew."""
    return {
        name: {
            kind: [size, getattr(after, kind)]
            for kind, size in dataclasses.asdict(before).items()
            if getattr(after, kind) != size
        }
        for name, (before, after) in grown.items()
    }
