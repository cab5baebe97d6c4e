"""Products of entries that share a bfloat16 right factor, on the tensor cores: 64 rows of a run's left factors at once.

The right factor is exact in bfloat16. A float32 left factor is cut in three bfloat16 pieces, 8 bits of its significand
each, which add up to it exactly; so every product is exact in float32, and what is lost is lost in the accumulator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from jrec.pallas.capability import HOPPER, capability
from jrec.pallas.launch import Interpret, check_manual_axes
from jrec.pallas.threads import constant, guarded, inline_op, not_negative, to_index
from jrec.pallas.threads import when as when_true
from jrec.pallas.tile import Operand
from jrec.pallas.tt.runs import Runs, runs_of
from jrec.pallas.tt.tuning import WGMMA_ROWS, WgmmaConfig, tune_wgmma

_PIECES = 3  # bfloat16 numbers that a float32 is the sum of
_SPLAT = plgpu.Layout.WG_SPLAT(())


def wgmma_products(
    left: jax.Array,
    right: jax.Array,
    left_index: jax.Array | None,
    order: jax.Array,
    bounds: jax.Array,
    *,
    interpret: Interpret,
    config: WgmmaConfig | None = None,
) -> jax.Array:
    """See ``grouped_products``, with ``right`` in bfloat16.

    Raises:
      ValueError: For shapes that no tile fits, from ``tune_wgmma``.
      NotImplementedError: On a GPU that is no Hopper.
    """
    major, minor = capability()
    if major != HOPPER:
        raise NotImplementedError(
            f"wgmma is an instruction of Hopper GPUs (compute capability 9.0), and this one has {major}.{minor};"
            " grouped_products takes multiply-adds there"
        )
    height, terms, width = left.shape[1], right.shape[1], right.shape[2]
    if config is None:
        config = tune_wgmma(height=height, terms=terms, width=width)
    check_manual_axes((left, right, left_index, order))
    runs = runs_of(order, bounds, config.entries)
    flat = left.reshape(left.shape[0] * height, terms)
    out = _products(flat, right, left_index, runs, height=height, config=config, interpret=interpret)
    return out.reshape(order.shape[0], height, width)


@functools.partial(jax.jit, static_argnames=("height", "config", "interpret"))
def _products(
    left: jax.Array,
    right: jax.Array,
    left_index: jax.Array | None,
    runs: Runs,
    *,
    height: int,
    config: WgmmaConfig,
    interpret: Interpret,
) -> jax.Array:
    _, terms, width = right.shape
    tile, tiles = config.columns, width // config.columns
    transforms = (
        plgpu.TilingTransform((8, config.swizzle // 2)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(config.swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    compiled = interpret is None
    load, multiply, store = (_load, _multiply, _store) if compiled else (_twin_load, _twin_multiply, _twin_store)
    depths = [(first, min(config.depth, terms - first)) for first in range(0, terms, config.depth)]

    def tt_wgmma_products(
        left: Ref, right: Ref, left_index: Ref, runs: Runs, out: Ref, smem: Any, barrier: Any
    ) -> None:
        number = jax.lax.axis_index("block")
        run = jax.lax.div(number, jnp.int32(tiles))
        first_column = (number - run * tiles) * tile

        # The grid has a block for every run that there could be; those without one end here. The condition is the same
        # for the whole block, so the barrier inside is reached by all threads or by none.
        @pl.when(run < runs.count[0])
        def _() -> None:
            factor = right.at[runs.factors[run], :, pl.ds(first_column, tile)]
            # By TMA, which one thread starts and the barrier counts: no registers, and no thread waits here.
            plgpu.copy_gmem_to_smem(factor, smem, barrier)
            begin, end = runs.begins[run], runs.ends[run]

            def rows_of(first_term: int, terms: int) -> jax.Array:
                return load(left, left_index, runs.order, begin, end, height=height, first_term=first_term, terms=terms)

            # The slice travels to shared memory meanwhile: left rows are gathered before the barrier is waited for.
            rows = rows_of(*depths[0])
            plgpu.barrier_wait(barrier)
            product = multiply(rows, rows_of, smem, depths, 1 if left.dtype == jnp.bfloat16 else _PIECES)
            store(out, runs.order, begin, end, first_column, product, height=height)

    return plgpu.kernel(
        tt_wgmma_products,
        out_type=jax.ShapeDtypeStruct((runs.order.shape[0] * height, width), jnp.float32),
        grid=(runs.factors.shape[0] * tiles,),
        grid_names=("block",),
        scratch_types=(plgpu.SMEM((terms, tile), jnp.bfloat16, transforms=transforms), plgpu.Barrier()),
        interpret=interpret,
    )(left, right, left_index, runs)


def _load(
    left: Ref,
    left_index: Ref,
    order: Operand,
    begin: jax.Array,
    end: jax.Array,
    *,
    height: int,
    first_term: int,
    terms: int,
) -> jax.Array:
    """Columns of the left factors of entries ``order[begin:end]`` below one another, zero past them.

    Returns:
      (64, terms) float32, columns ``first_term`` to ``first_term + terms`` of the factors.
    """
    shape = WGMMA_ROWS, terms
    by_entry = left_index is None

    @inline_op(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), _SPLAT, _SPLAT),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def load(ctx, left, left_index, order, begin, end):
        del ctx
        layout = mgpu.WGMMA_LAYOUT
        # In the layout in which wgmma takes its left factor from registers, so that it never passes through shared
        # memory.
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        stored = ir.VectorType.get((2,), left.type.element_type)
        single = ir.VectorType.get((2,), ir.F32Type.get())
        zero = vector.broadcast(stored, constant(0, stored.element_type))
        for place, (row, column) in zip(np.ndindex(registers.shape), layout.thread_idxs(shape), strict=True):
            entry, of_entry = _entry(row, order, begin, end, height)
            factor = entry
            if not by_entry:
                factor = guarded(
                    not_negative(entry), entry.type, lambda e=entry: memref.load(left_index, [to_index(e)]), entry
                )
            first = arith.muli(to_index(factor), constant(height, ir.IndexType.get()))
            term = arith.addi(column, constant(first_term, column.type)) if first_term else column
            where = [arith.addi(first, of_entry), term]
            value = guarded(not_negative(factor), stored, lambda w=where: vector.load(stored, left, w), zero)
            registers[place] = value if stored == single else arith.extf(single, value)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(left, order if by_entry else left_index, order, begin, end)


def _pieces(rows: jax.Array, count: int) -> Iterator[jax.Array]:
    """Bfloat16 arrays that add up to the float32 one; exactly, where there are three."""
    for _ in range(count):
        # What remains after rounding is exact in float32, and has 8 significant bits less.
        piece = rows.astype(jnp.bfloat16)
        yield piece
        rows = rows - piece.astype(jnp.float32)


_RowsOf = Callable[[int, int], jax.Array]  # (first term, terms) -> left rows


def _multiply(
    rows: jax.Array, rows_of: _RowsOf, right: Ref, depths: Sequence[tuple[int, int]], pieces: int
) -> jax.Array:
    """Left rows times ``right`` in float32, a few terms at a time.

    Args:
      rows: The left rows of the first terms.
      rows_of: Loads the left rows of later terms.
      right: (terms, columns) bfloat16 in shared memory.
      depths: The first term and the number of terms of each step.
      pieces: Bfloat16 numbers that a left element is cut in.
    """

    def accumulate(total: Any) -> jax.Array:
        for number, (first, terms) in enumerate(depths):
            for piece in _pieces(rows_of(first, terms) if number else rows, pieces):
                plgpu.wgmma(total, piece, right.at[pl.ds(first, terms)] if len(depths) > 1 else right)
                # The left factor is in registers, which the next piece
                # overwrites: the tensor core must have read them before.
                plgpu.wgmma_wait(0)
        return total[...]

    total = plgpu.ACC((WGMMA_ROWS, right.shape[1]), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(accumulate, total)


def _store(
    out: Ref,
    order: Operand,
    begin: jax.Array,
    end: jax.Array,
    first_column: jax.Array,
    values: jax.Array,
    *,
    height: int,
) -> None:
    """Writes rows of entries ``order[begin:end]``."""

    @inline_op(arg_types=(plgpu.RefType(), plgpu.RefType(), _SPLAT, _SPLAT, _SPLAT, plgpu.Layout.WGMMA))
    def store(ctx, out, order, begin, end, first_column, values):
        del ctx
        start = to_index(values_of(first_column))
        places = mgpu.WGMMA_LAYOUT.thread_idxs(values.shape)
        # Rows of the tile past the run's end belong to no entry: they were loaded as zeros, and are not stored.
        for register, (row, column) in zip(values.registers.flat, places, strict=True):
            entry, of_entry = _entry(row, order, begin, end, height)
            first = arith.muli(to_index(entry), constant(height, ir.IndexType.get()))
            where = [arith.addi(first, of_entry), arith.addi(start, column)]
            when_true(not_negative(entry), lambda r=register, w=where: vector.store(r, out, w))

    store(out, order, begin, end, first_column, values)


def _entry(
    row: ir.Value, order: ir.Value, begin: mgpu.FragmentedArray, end: mgpu.FragmentedArray, height: int
) -> tuple[ir.Value, ir.Value]:
    """The entry that a row of the tile belongs to, i32, -1 for none; and which of the entry's rows it is."""
    size = constant(height, row.type)
    of_entry = arith.remui(row, size)
    i32 = ir.IntegerType.get_signless(32)
    position = arith.addi(values_of(begin), arith.index_cast(i32, arith.divui(row, size)))
    inside = arith.cmpi(arith.CmpIPredicate.slt, position, values_of(end))
    # Guarded: past the run's end ``order`` may end, too.
    entry = guarded(inside, i32, lambda: memref.load(order, [to_index(position)]), constant(-1, i32))
    return entry, of_entry


def values_of(splat: mgpu.FragmentedArray) -> ir.Value:
    """The number that all threads hold."""
    return splat.registers.flat[0]


def _twin_rows(order: Operand, begin: jax.Array, end: jax.Array, height: int) -> tuple[jax.Array, jax.Array]:
    number = jnp.arange(WGMMA_ROWS, dtype=jnp.int32)
    position = begin + number // jnp.int32(height)
    entry = order[...].at[position].get(mode="fill", fill_value=-1)
    return jnp.where(position < end, entry, -1), number % jnp.int32(height)


def _twin_load(
    left: Ref,
    left_index: Ref,
    order: Operand,
    begin: jax.Array,
    end: jax.Array,
    *,
    height: int,
    first_term: int,
    terms: int,
) -> jax.Array:
    """Plain twin of ``_load``."""
    entry, of_entry = _twin_rows(order, begin, end, height)
    factor = entry
    if left_index is not None:
        factor = jnp.where(entry >= 0, left_index[...].at[jnp.maximum(entry, 0)].get(mode="fill", fill_value=-1), -1)
    columns = left[...][:, first_term : first_term + terms]
    rows = columns.at[jnp.maximum(factor, 0) * height + of_entry].get(mode="fill", fill_value=0)
    return jnp.where((factor >= 0)[:, None], rows.astype(jnp.float32), jnp.float32(0))


def _twin_multiply(
    rows: jax.Array, rows_of: _RowsOf, right: Ref, depths: Sequence[tuple[int, int]], pieces: int
) -> jax.Array:
    """Plain twin of ``_multiply``: the interpreter's wgmma takes no left factor from registers."""
    wide = right[...].astype(jnp.float32)
    products = [
        jnp.matmul(piece.astype(jnp.float32), wide[first : first + terms], precision="highest")
        for number, (first, terms) in enumerate(depths)
        for piece in _pieces(rows_of(first, terms) if number else rows, pieces)
    ]
    return functools.reduce(jnp.add, products)


def _twin_store(
    out: Ref,
    order: Operand,
    begin: jax.Array,
    end: jax.Array,
    first_column: jax.Array,
    values: jax.Array,
    *,
    height: int,
) -> None:
    """Plain twin of ``_store``, a row at a time."""
    entry, of_entry = _twin_rows(order, begin, end, height)

    def put(row: jax.Array, none: None) -> None:
        def write() -> None:
            out[entry[row] * height + of_entry[row], pl.ds(first_column, values.shape[1])] = values[row]

        jax.lax.cond(entry[row] >= 0, write, lambda: None)
        return none

    jax.lax.fori_loop(0, WGMMA_ROWS, put, None)
