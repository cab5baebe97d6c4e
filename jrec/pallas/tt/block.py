"""Blocks of a product: which thread computes which elements of a (height, width) matrix, and how blocks cover it.

An *item* is one block of one product's matrix. ``lanes`` neighbouring threads of a warp share it: ``across`` of them
lie side by side along the columns, ``vector`` neighbouring elements each, the rest below one another; each thread goes
on ``lanes // across`` rows further down, ``down`` times:

    row 0   thread 0 | thread 1 | .. across          an item of lanes=4, across=2, down=2
    row 1   thread 2 | thread 3
    row 2   thread 0 | thread 1
    row 3   thread 2 | thread 3

so a thread's elements lie in the same columns, and what it loads of the right factor serves all its rows. Two shapes of
array stand for a block in kernel code: *item scalars*, the row scalars of ``Block.items``, one number an item; and the
*values* of ``Block.values`` with its *block scalars*, one number a thread and row of the block.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jrec.pallas.tile import ACCESS_BYTES, THREADS, WARP, Tile

REGISTER_BUDGET = 160  # of 255 a thread may have: the rest is addresses and loop counters
_FLOATS = ACCESS_BYTES // 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """The geometry of the blocks of (height, width) matrices.

    Attributes:
      height: Rows of the whole matrix.
      width: Columns of the whole matrix, a multiple of ``vector``.
      vector: Neighbouring elements of a thread, 1, 2 or 4.
      lanes: Threads that share an item, a power of two up to 32.
      across: How many of them lie along the columns, a power of two up to ``lanes``.
      down: Rows of the block that each thread computes.

    Raises:
      ValueError: On a geometry that no warp has, or whose sums exceed a thread's registers.
    """

    height: int
    width: int
    vector: int
    lanes: int
    across: int
    down: int

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or self.down < 1:
            raise ValueError(f"{self.height=}, {self.width=} and {self.down=} must be at least 1")
        if self.vector not in (1, 2, 4) or self.width % self.vector:
            raise ValueError(f"{self.vector=} must be 1, 2 or 4 and divide {self.width=}")
        for name in ("lanes", "across"):
            value = getattr(self, name)
            if value & (value - 1) or not 1 <= value <= WARP:
                raise ValueError(f"{name}={value} must be a power of two up to {WARP}")
        if self.across > self.lanes:
            raise ValueError(f"{self.across=} exceeds {self.lanes=}")
        if self.registers > REGISTER_BUDGET:
            raise ValueError(
                f"down={self.down} and vector={self.vector} need {self.registers} registers a thread for sums and"
                f" operands, but {REGISTER_BUDGET} are to be had; halve down"
            )

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.lanes // self.across * self.down

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.across * self.vector

    @property
    def column_chunks(self) -> int:
        """Blocks side by side that cover a matrix."""
        return -(-self.width // self.columns)

    @property
    def chunks(self) -> int:
        """Blocks that cover a matrix."""
        return -(-self.height // self.rows) * self.column_chunks

    @property
    def registers(self) -> int:
        """32-bit registers for a total, a product that is added to it, and four steps' operands."""
        return 2 * self.down * self.vector + 4 * self.vector + 4 * self.down

    @functools.cached_property
    def items(self) -> Tile:
        """Geometry of item scalars."""
        return self._tile(1)

    @functools.cached_property
    def values(self) -> Tile:
        """Geometry of values and block scalars: register ``k`` of a thread is its ``k``-th row of the item."""
        return self._tile(self.down)

    def _tile(self, down: int) -> Tile:
        return Tile(
            dim=self.lanes * self.vector,
            vector=self.vector,
            lanes=self.lanes,
            blocks=1,
            rows=THREADS // self.lanes * down,
        )

    def row_numbers(self) -> jax.Array:
        """Row of every value within its block, block scalars."""
        number, lane = self._iota(0), self._iota(1)
        return divide(number, THREADS // self.lanes) * (self.lanes // self.across) + divide(lane, self.across)

    def column_numbers(self) -> jax.Array:
        """First column of a thread within its block, block scalars."""
        lane = self._iota(1)
        if self.across == 1:  # folded to a constant, its layout would be lost to inline code
            return self.values.row_scalars(0, jnp.int32)
        return (lane - divide(lane, self.across) * self.across) * self.vector

    def _iota(self, axis: int) -> jax.Array:
        shape = self.values.scalar_shape
        return plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, shape, axis), self.values.scalar_layout)

    @staticmethod
    def of(height: int, width: int, *, down: int = 8) -> Block:
        """The block for (height, width) matrices: up to 64 columns, up to ``down`` rows a thread."""
        # The widest load that divides the width, so that no access of a thread crosses the end of a row.
        vector = _FLOATS
        while width % vector:
            vector //= 2
        across = 1
        # At most half a warp along the columns, so that the other half can use the same lines of the right factor.
        while across < WARP // 2 and across * vector < width:
            across *= 2
        lanes = across
        while lanes < WARP and lanes // across < height:
            lanes *= 2
        rows = -(-height // (lanes // across))  # that a thread would have, were the block as high as the matrix
        # As many blocks as ``down`` needs, then rows dealt evenly among them: no block is nearly empty.
        rows = -(-rows // -(-rows // down))
        return Block(height=height, width=width, vector=vector, lanes=lanes, across=across, down=rows)


def divide(value: jax.Array, by: int) -> jax.Array:
    """``value // by`` for values that are not negative, 0 for -1 by more than 1: floor division is not lowered."""
    return value if by == 1 else jax.lax.div(value, jnp.full_like(value, by))
