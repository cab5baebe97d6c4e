"""The primitives of ``segments`` for blocks of products: what a kernel's threads do for one block of every item."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Ref

from jrec.pallas import segments
from jrec.pallas.launch import Interpret, ops_for
from jrec.pallas.segments import Gather
from jrec.pallas.tile import Operand, Tile
from jrec.pallas.tt import inline, twins
from jrec.pallas.tt.block import Block, divide


def tt_ops_for(interpret: Interpret) -> ModuleType:
    """The primitives on blocks of compiled kernels, or their twins."""
    return inline if interpret is None else twins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What products a kernel is compiled for.

    Attributes:
      block: How blocks cover a product.
      contraction: Terms of an element.
      transposed: Whether left factors are stored transposed.
    """

    block: Block
    contraction: int
    transposed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """Takes the place of ``pallas.inline`` or ``pallas.twins`` in ``segments``: it adds blocks of products, not rows.

    Attributes:
      spec: What the products are compiled for.
      ops: ``jrec.pallas.inline`` or ``jrec.pallas.twins``.
      tt_ops: ``jrec.pallas.tt.inline`` or ``jrec.pallas.tt.twins``.
      rows: The matrix's rows, block scalars.
      columns: The matrix's columns, each thread's first, block scalars.
    """

    spec: Spec
    ops: ModuleType
    tt_ops: ModuleType
    rows: jax.Array
    columns: jax.Array

    @staticmethod
    def at(spec: Spec, interpret: Interpret, item: jax.Array) -> tuple[Engine, jax.Array]:
        """The engine for the blocks that items number, and the matrices these are blocks of (-1 for no item)."""
        block, ops = spec.block, tt_ops_for(interpret)
        matrix = divide(item, block.chunks)
        rows, columns = block.row_numbers(), block.column_numbers()
        # Where one chunk covers an axis it is skipped: folded to a constant, its layout would be lost to inline code.
        if block.chunks > block.column_chunks:
            chunk_row = divide(item - matrix * block.chunks, block.column_chunks)
            rows = rows + ops.repeat(block, chunk_row * block.rows)
        if block.column_chunks > 1:
            chunk_column = item - divide(item, block.column_chunks) * block.column_chunks
            columns = columns + ops.repeat(block, chunk_column * block.columns)
        engine = Engine(spec=spec, ops=ops_for(interpret), tt_ops=ops, rows=rows, columns=columns)
        return engine, jnp.where(item >= 0, matrix, -1)

    def add_range(self, gather: Gather, low: jax.Array, high: jax.Array) -> jax.Array:
        """The sum of positions ``[low, high)``, values."""
        block, ops = self.spec.block, cast(ModuleType, self)
        return segments.add_range(block.items, ops, gather, low, high, block.values.zeros(), unroll=1)

    def add_nodes(self, levels: list[Gather], low: jax.Array, high: jax.Array, *, split: int) -> jax.Array:
        """The sum of positions ``[low, high)``, of which long runs were summed before; see ``segments``."""
        values, ops = self.spec.block.values, cast(ModuleType, self)
        return segments.add_nodes(
            self.spec.block.items, ops, levels, low, high, split=split, unroll=1, zeros=values.zeros
        )

    def load_scalars(self, tile: Tile, ref: Operand, positions: jax.Array, *, fill: float = 0) -> jax.Array:
        """Scalars of the tile's geometry, see ``inline``."""
        return self.ops.load_scalars(tile, ref, positions, fill=fill)

    def most(self, tile: Tile, scalars: jax.Array) -> jax.Array:
        """The greatest of the warp's row scalars."""
        return self.ops.most(tile, scalars)

    def spread(self, tile: Tile, scalars: jax.Array) -> jax.Array:
        """Item scalars as values."""
        del tile
        return self.ops.spread(self.spec.block.values, self.repeat(scalars))

    def load_rows(self, tile: Tile, source: Any, positions: jax.Array) -> jax.Array:
        """The block of each position's product, or of its stored sum where ``source`` is a ref of such."""
        # Levels above the lowest hold sums of products, which were
        # stored as blocks: ``segments`` adds both kinds alike.
        if not hasattr(source, "left_index"):
            return self.tt_ops.load_blocks(self.spec.block, source, self.stored_rows(positions), self.columns)
        left, right = (
            positions if index is None else self.ops.load_scalars(tile, index, positions, fill=-1)
            for index in (source.left_index, source.right_index)
        )
        return self.multiply(source.left, source.right, left, right)

    def multiply(self, left_factors: Operand, right_factors: Operand, left: jax.Array, right: jax.Array) -> jax.Array:
        """Blocks of ``left_factors[left] @ right_factors[right]``; zero where either number is none."""
        block, terms = self.spec.block, self.spec.contraction
        height = terms if self.spec.transposed else block.height
        taken = (left >= 0) & (left < left_factors.shape[0] // height)
        # An entry of padding, or one that names no factor, is a zero product, not an access out of bounds.
        taken = taken & (right >= 0) & (right < right_factors.shape[0] // terms)
        # int32: ``check_int32`` has counted the rows of all factors.
        left_row = self.repeat(jnp.where(taken, left * height, 0))
        # Rows below the matrix read its last row, and columns past it the
        # last ones: loads need no branch, and what they give is not stored.
        row = jnp.minimum(self.rows, block.height - 1)
        if not self.spec.transposed:
            left_row, row = left_row + row, None
        return self.multiply_rows(left_factors, right_factors, left_row, row, jnp.where(taken, right, -1))

    def multiply_rows(
        self, left: Operand, right: Operand, left_rows: jax.Array, left_columns: jax.Array | None, factor: jax.Array
    ) -> jax.Array:
        """See ``inline.multiply``; ``factor`` is the right factor's number, item scalars, -1 for a zero product."""
        block, terms = self.spec.block, self.spec.contraction
        first = jnp.maximum(factor, 0) * terms
        columns = jnp.minimum(self.columns, block.width - block.vector)
        return self.tt_ops.multiply(
            block, left, right, left_rows, left_columns, first, columns, factor, contraction=terms
        )

    def repeat(self, scalars: jax.Array) -> jax.Array:
        """Item scalars as block scalars."""
        return self.tt_ops.repeat(self.spec.block, scalars)

    def stored_rows(self, matrices: jax.Array) -> jax.Array:
        """Where the rows of matrices lie in an array of them, block scalars; -1 for no matrix and past the height."""
        height = self.spec.block.height
        matrix = self.repeat(matrices)
        return jnp.where((matrix >= 0) & (self.rows < height), matrix * height + self.rows, -1)

    def store(self, out: Ref, matrices: jax.Array, values: jax.Array) -> None:
        """Writes blocks to (matrices * height, width)."""
        self.tt_ops.store_blocks(self.spec.block, out, self.stored_rows(matrices), self.columns, values)
