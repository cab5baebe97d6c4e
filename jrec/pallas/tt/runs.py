"""Entries of a level by the slice they are multiplied by, in runs short enough for one block. Plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrec.pallas.tile import Operand


class Runs(NamedTuple):
    """Runs of entries with one right factor: arrays outside a kernel, refs inside.

    Attributes:
      order: (capacity,) int32, entries by right factor; padding comes last and is in no run.
      factors: (runs,) int32, the right factor of each run; -1 for padding.
      begins: (runs,) int32, where each begins in ``order``.
      ends: (runs,) int32, where each ends.
      count: (1,) int32, how many are real; they come first.
    """

    order: Operand
    factors: Operand
    begins: Operand
    ends: Operand
    count: Operand


def bounds_of(sorted_numbers: jax.Array, count: int) -> jax.Array:
    """(count + 1,) int32: where each of ``count`` numbers begins among ascending ones; larger ones come after."""
    wanted = jnp.arange(count + 1, dtype=jnp.int32)
    return jnp.searchsorted(sorted_numbers, wanted, side="left", method="scan_unrolled").astype(jnp.int32)


def runs_of(order: jax.Array, bounds: jax.Array, length: int) -> Runs:
    """Cuts entries in runs.

    Args:
      order: (capacity,) int32, entries by right factor.
      bounds: (factors + 1,) int32, where each factor's entries begin in it.
      length: The most entries of a run.
    """
    factors = bounds.shape[0] - 1
    size = jnp.int32(length)
    # Runs of each factor; their sum is known only on the device, so the arrays have room for the most there can be.
    of_factor = (bounds[1:] - bounds[:-1] + (size - 1)) // size
    ends = jnp.cumsum(of_factor, dtype=jnp.int32)
    # Each factor's last run may be short.
    number = jnp.arange(order.shape[0] // length + min(factors, order.shape[0]), dtype=jnp.int32)
    factor = jnp.searchsorted(ends, number, side="right", method="scan_unrolled").astype(jnp.int32)
    real = number < ends[-1]
    # Runs behind the last one would read past the bounds; what they read is dropped below.
    factor = jnp.minimum(factor, jnp.int32(factors - 1))
    begin = bounds[factor] + (number - (ends - of_factor)[factor]) * size
    return Runs(
        order=order,
        factors=jnp.where(real, factor, jnp.int32(-1)),
        begins=jnp.where(real, begin, jnp.int32(0)),
        ends=jnp.where(real, jnp.minimum(begin + size, bounds[factor + 1]), jnp.int32(0)),
        count=ends[-1:],
    )
