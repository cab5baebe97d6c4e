"""Rows padded in storage to a multiple of 16 bytes, so that kernels use their widest loads and stores on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ALIGNMENT = 16  # bytes: the widest load or store of one GPU thread


def padded_dim(dim: int, itemsize: int) -> int:
    """The least dim not below ``dim`` whose rows are a multiple of 16 bytes."""
    elements = ALIGNMENT // itemsize
    return -(-dim // elements) * elements


def pad(table: jax.Array) -> jax.Array:
    """A table (rows, dim) as (rows, padded_dim), with zeros behind each row.

    They stay zero: sums of zeros are, and so is every optimizer's step, with an ``eps`` above zero, along a gradient of
    zero from a weight of zero. Give updates ``dim=`` so that a mean over the row leaves them out.
    """
    return jnp.pad(table, ((0, 0), (0, padded_dim(table.shape[1], table.dtype.itemsize) - table.shape[1])))


def strip(rows: jax.Array, dim: int) -> jax.Array:
    """The first ``dim`` columns: undoes ``pad``, on a table or on sums of its rows."""
    return rows[:, :dim]


def real_dim(width: int, dim: int | None) -> int:
    """How many elements of a row of ``width`` are real.

    Raises:
      ValueError: If ``dim`` is not from 1 to ``width``.
    """
    if dim is not None and not (isinstance(dim, int) and 1 <= dim <= width):
        raise ValueError(f"dim is {dim}, but rows hold {width} elements; it counts those that are not padding")
    return width if dim is None else dim
