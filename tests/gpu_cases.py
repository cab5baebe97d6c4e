"""What tests of a GPU share: whether there is one, fresh random numbers, poisoned memory."""

import secrets

import jax
import jax.numpy as jnp
import numpy as np


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _rng():
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201, a failure is repeated by it
    return np.random.default_rng(seed)


def _poison(shape):
    """Leaves NaN in the memory that the next arrays of this shape are made in."""
    for _ in range(4):
        jnp.full(shape, jnp.nan).block_until_ready().delete()
