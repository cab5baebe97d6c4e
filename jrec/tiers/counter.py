"""Counters of a long run on a device without 64-bit integers: exact up to 2**64, two words of 32 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def empty_counter() -> jax.Array:
    """(2,) uint32, the lower word first."""
    return jnp.zeros(2, jnp.uint32)


def count(counter: jax.Array, more: jax.Array) -> jax.Array:
    """The counter raised by ``more``, () int32 of at least 0."""
    low = counter[0] + more.astype(jnp.uint32)
    return jnp.stack([low, counter[1] + (low < counter[0]).astype(jnp.uint32)])


def counted(counter: ArrayLike) -> int:
    """The counter's value; waits for the device."""
    low, high = np.asarray(counter).tolist()
    return (high << 32) + low
