"""Large arrays of rows filled in place, piece by piece: what is not yet in the array never takes more than a piece."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

PIECE_BYTES = 32 << 20
"""Bytes that travel to the device at a time."""

_MADE_ELEMENTS = 1 << 20
"""Elements that a loop makes at a time: what making them takes besides (random bits, 16 bytes each) stays in caches."""


def filled(rows: int, width: int, dtype: str, piece: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    """(rows, width) of ``dtype`` from a function of the row number, inside jit or outside.

    Args:
      rows: Number of rows, below 2^31.
      width: Elements of a row.
      dtype: Name of the dtype.
      piece: ``first row () int32, number of rows -> (number of rows, width)``. Must not depend on how rows are cut into
        pieces: the last piece begins earlier than the one before it ends where the sizes do not divide.
    """
    most = min(rows, max(1, _MADE_ELEMENTS // width))

    def fill(number: jax.Array | int, array: jax.Array) -> jax.Array:
        # The last piece reaches back, so that all have one size: it makes some rows twice, with the same bits.
        begin = jnp.minimum(jnp.asarray(number, jnp.int32) * jnp.int32(most), jnp.int32(rows - most))
        return jax.lax.dynamic_update_slice_in_dim(array, piece(begin, most), begin, axis=0)

    return jax.lax.fori_loop(0, -(-rows // most), fill, jnp.zeros((rows, width), dtype))


def fill_rows(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    pieces: Iterable[np.ndarray],
    *,
    device: object = None,
) -> jax.Array:
    """An array on a device from rows in host memory, such as a checkpoint's, without a second copy of all rows.

    Pieces of any lengths are collected to ``PIECE_BYTES``, so that programs are compiled for two lengths at most,
    however many tables a stack has.

    Args:
      shape: (rows, dim) or (rows,).
      dtype: The array's dtype.
      pieces: Rows one piece behind the other, (n, dim) or (n,) of that dtype, ``shape[0]`` rows in all. A piece may be
        a buffer that the next one overwrites.
      device: The `jax.Device` for the array; None for JAX's default device.

    Raises:
      ValueError: If pieces are of another dtype or width, or are not as many rows as the array has.
    """
    dtype = np.dtype(dtype)
    array = jnp.zeros(shape, dtype, device=device)  # committed to it, so that pieces follow
    line = max(1, int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize)
    buffer = np.empty((min(shape[0], max(1, PIECE_BYTES // line)), *shape[1:]), dtype)
    begin = held = 0
    for piece in pieces:
        if piece.dtype != dtype or piece.shape[1:] != shape[1:] or begin + held + len(piece) > shape[0]:
            raise ValueError(
                f"a piece of {piece.shape} {piece.dtype} does not fit behind row {begin + held:,} of an array of"
                f" {shape} {dtype}"
            )
        while len(piece):
            taken = min(len(piece), len(buffer) - held)
            buffer[held : held + taken] = piece[:taken]
            piece, held = piece[taken:], held + taken
            if held == len(buffer):
                array, begin, held = _put(array, buffer, begin), begin + held, 0
    if held:
        array, begin = _put(array, buffer[:held], begin), begin + held
    if begin != shape[0]:
        raise ValueError(f"the pieces are {begin:,} rows, but the array is of {shape} {dtype}")
    return array


def _put(array: jax.Array, rows: np.ndarray, begin: int) -> jax.Array:
    # The buffer is written again afterwards, and a CPU device may read it where it lies.
    return jax.block_until_ready(_write(array, rows, np.int32(begin)))


@functools.partial(jax.jit, donate_argnums=0)
def _write(array: jax.Array, rows: jax.Array, begin: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, rows, begin, axis=0)
