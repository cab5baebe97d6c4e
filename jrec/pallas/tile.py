"""Register tiles of embedding rows: which thread of a warpgroup holds which 16 bytes of which row.

A tile is ``rows`` rows spread over the 128 threads of a warpgroup. ``lanes`` neighbouring threads of one warp share a
row, each holding ``vector`` neighbouring elements of it; a row longer than ``lanes * vector`` elements continues in the
next of ``blocks`` column blocks. Two shapes of array stand for it in kernel code:

* *values*, (blocks * rows, lanes * vector): element ``(b * rows + r, c)`` is column ``b * lanes * vector + c`` of
  row ``r``;
* *row scalars*, (rows, lanes): every lane holds its row's value, so that nothing has to be exchanged to use it. Only
  what the lanes of a row load or look for together differs from lane to lane (``segments.Lookups``, ``visit_long``).

Rows never leave their warp, so sums along a row are shuffles, and nothing here needs shared memory or a barrier.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

Operand = jax.Array | jax.Ref  # of a kernel: an array outside, its ref inside
THREADS = 128  # of a warpgroup
WARP = 32
ACCESS_BYTES = 16  # the widest load or store of one thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """The geometry of a register tile.

    Attributes:
      dim: Elements of a row.
      vector: Neighbouring elements per thread and access, a power of two that divides ``dim``.
      lanes: Threads that share a row, a power of two up to 32.
      blocks: Column blocks of ``lanes * vector`` elements that cover ``dim``.
      rows: Rows of the tile; ``rows * lanes`` is a multiple of 128.
    """

    dim: int
    vector: int
    lanes: int
    blocks: int
    rows: int

    def __post_init__(self) -> None:
        if self.dim % self.vector or self.vector & (self.vector - 1):
            raise ValueError(f"{self.vector=} must be a power of two that divides {self.dim=}")
        if self.lanes & (self.lanes - 1) or not 1 <= self.lanes <= WARP:
            raise ValueError(f"{self.lanes=} must be a power of two up to {WARP}")
        if self.rows * self.lanes % THREADS or not self.rows:
            raise ValueError(f"{self.rows=} times {self.lanes=} must be a multiple of {THREADS}")
        if self.blocks * self.lanes * self.vector < self.dim:
            raise ValueError(f"{self} does not cover its dim")

    @property
    def width(self) -> int:
        """Columns of one block."""
        return self.lanes * self.vector

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the values."""
        return self.blocks * self.rows, self.width

    @property
    def scalar_shape(self) -> tuple[int, int]:
        """Shape of the row scalars."""
        return self.rows, self.lanes

    @property
    def layout(self) -> Any:
        """Register layout of the values: register ``b * chunks + k`` of a thread is block ``b`` of its ``k``-th row."""
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=self.vector)

    @property
    def scalar_layout(self) -> Any:
        """Register layout of the row scalars: register ``k`` of a thread belongs to its ``k``-th row."""
        return plgpu.Layout.WG_STRIDED(self.scalar_shape, vec_size=1)

    @property
    def chunks(self) -> int:
        """Rows that each thread takes part in."""
        return self.rows * self.lanes // THREADS

    @property
    def registers(self) -> int:
        """32-bit registers a thread needs for one tile of float32 values."""
        return self.blocks * self.chunks * self.vector

    @staticmethod
    def of(dim: int, itemsize: int, *, chunks: int = 1) -> Tile:
        """The tile for rows of ``dim`` elements of ``itemsize`` bytes, ``chunks`` rows per thread."""
        vector = ACCESS_BYTES // itemsize
        # Rows begin at multiples of ``dim``: a vector that divides it is aligned in every row, as wide loads must be.
        while dim % vector:
            vector //= 2
        lanes = 1
        # Enough lanes for the row and no more: short rows share a warp, and rows past 32 accesses take several blocks.
        while lanes < WARP and lanes * vector < dim:
            lanes *= 2
        blocks = -(-dim // (lanes * vector))
        return Tile(dim=dim, vector=vector, lanes=lanes, blocks=blocks, rows=chunks * THREADS // lanes)

    def zeros(self) -> jax.Array:
        """Values of zero."""
        return plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)

    def row_numbers(self) -> jax.Array:
        """Row scalars 0 to ``rows - 1``, int32."""
        return plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, self.scalar_shape, 0), self.scalar_layout)

    def lane_numbers(self) -> jax.Array:
        """For each row scalar, which of the threads that share the row holds it: 0 to ``lanes - 1``, int32."""
        return plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, self.scalar_shape, 1), self.scalar_layout)

    def row_scalars(self, value: jax.Array | float, dtype: jnp.dtype | type) -> jax.Array:
        """Row scalars that all equal ``value``."""
        return plgpu.layout_cast(jnp.full(self.scalar_shape, value, dtype), self.scalar_layout)

    def columns(self) -> jax.Array:
        """The column of each value, int32; columns of ``dim`` and more are padding."""
        column = plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, self.shape, 1), self.layout)
        # Short rows, the common case, need no second iota and no division.
        if self.blocks == 1:
            return column
        row = plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, self.shape, 0), self.layout)
        return column + row // self.rows * self.width


def shift_right(value: jax.Array, by: int) -> jax.Array:
    """``value // by`` for a power of two and values that are not negative."""
    return jax.lax.shift_right_logical(value, jnp.full_like(value, by.bit_length() - 1))
