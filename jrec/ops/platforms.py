"""Programs that XLA runs well on a CPU and badly on a GPU, or the other way round, in one op."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.core import Tracer
from jaxtyping import PyTree


def cpu_or_other[Result](
    args: tuple[PyTree, ...], *, cpu: Callable[..., Result], other: Callable[..., Result]
) -> Result:
    """Calls ``cpu(*args)`` in programs lowered for a CPU and ``other(*args)`` in all others.

    Outside jit the arrays' own platform decides, so that only one of the two is traced.

    Args:
      args: Pytrees of arrays.
      cpu: What to run on a CPU.
      other: What to run elsewhere; of the same result shapes and dtypes.
    """
    leaves = jax.tree.leaves(args)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return jax.lax.platform_dependent(*args, cpu=cpu, default=other)
    platforms = {device.platform for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
    return (cpu if (platforms or {jax.default_backend()}) == {"cpu"} else other)(*args)
