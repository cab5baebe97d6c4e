"""How many steps of a run go to the device in one dispatch, so that a GPU does not wait for Python between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax

from jrec.ops.layout import EmbeddingLayout

_MOST = 16  # steps: what Python does for a dispatch, 0.5 ms, is then a fraction of any step
_BYTES = 128 << 20  # of a dispatch's batches, of which the device holds a few


def most_steps(layout: EmbeddingLayout, *, batch_size: int, num_dense: int) -> int:
    """How many steps a dispatch takes at most where the configuration leaves it open.

    One on CPUs: a step there takes several times as long as its dispatch.

    Args:
      layout: The tables.
      batch_size: The examples of a batch.
      num_dense: The float features of an example.
    """
    if jax.default_backend() == "cpu":
        return 1
    numbers = batch_size * (num_dense + 2) + sum(stack.capacity(batch_size) for stack in layout.members)
    return max(1, min(_MOST, _BYTES // (4 * numbers)))


def steps_of_dispatches(most: int, *, total: int, every: Iterable[int]) -> Callable[[int], int]:
    """A function of the steps before a dispatch to how many it takes: ``most`` or a few less, one by one at ends.

    Args:
      most: How many steps a dispatch takes at most.
      total: The steps of the run.
      every: After which numbers of steps something is due that comes between dispatches; 0 for never.
    """
    due = [steps for steps in every if steps]
    common = math.gcd(*due)  # 0 where nothing is due
    fitting = max((size for size in range(1, most + 1) if common % size == 0), default=1)
    # A size that ends where something is due leaves no steps over, which are taken one by one.
    size = fitting if 2 * fitting >= most else most

    def at(before: int) -> int:
        upto = min([total, *((before // steps + 1) * steps for steps in due)])
        return size if before + size <= upto else 1

    return at
