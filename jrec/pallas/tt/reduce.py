"""Sums of products on a GPU: for every segment, products of small matrices that its positions name, added in order.

    out[s] = sum_j weights[j] * left[l(j)] @ right[r(j)]        j from offsets[s] to offsets[s + 1]

This one primitive is a tensor-train table's last product fused with pooling (segments are bags), its products entry by
entry (segments of one), the gradient of the level below (segments are parents) and, with the left factors transposed,
the gradient of a core's slices (segments are digits). No product reaches memory. Long segments are split as in
``segments``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Ref
from jaxtyping import PyTree

from jrec.pallas import segments
from jrec.pallas.interpret import interpret_params
from jrec.pallas.launch import Interpret, Job, launch
from jrec.pallas.segments import Gather
from jrec.pallas.tile import Operand
from jrec.pallas.tt.engine import Engine, Spec
from jrec.pallas.tt.tuning import ReduceConfig, check_int32, tune_reduce


class Products(NamedTuple):
    """What is multiplied: arrays outside a kernel, refs inside. A product that either index leaves out is zero.

    Attributes:
      left: (L, height, contraction), or transposed (L, contraction, height); float32 or bfloat16. Flat inside: (rows,
        columns).
      right: (M, contraction, width), float32 or bfloat16. Flat inside.
      left_index: (entries,) int32, the left factor of an entry; None where it is the entry's number.
      right_index: (entries,) int32, the right factor of an entry; None where it is the entry's number.
    """

    left: Operand
    right: Operand
    left_index: Operand | None
    right_index: Operand | None

    @property
    def shape(self) -> tuple[int, ...]:
        """(entries,)."""
        index = self.right_index if self.left_index is None else self.left_index
        assert index is not None
        return index.shape

    def flat(self) -> Products:
        """With factors below one another."""
        left, right = (
            factors.reshape(factors.shape[0] * factors.shape[1], factors.shape[2])
            for factors in cast(tuple[jax.Array, jax.Array], (self.left, self.right))
        )
        return self._replace(left=left, right=right)


def reduce_products(
    products: Products,
    indices: jax.Array | None,
    offsets: jax.Array,
    weights: jax.Array | None = None,
    *,
    transposed: bool = False,
    config: ReduceConfig | None = None,
) -> jax.Array:
    """Sums products per segment. Deterministic run to run: no atomics, and an order that depends only on offsets.

    Args:
      products: The products of every entry.
      indices: (capacity,) int32, the entry of every position; negative ones are skipped, one past the entries makes its
        segment NaN. None where a position is an entry.
      offsets: (segments + 1,) int32, ascending from 0.
      weights: (capacity,) float32, or None for ones. Only with indices.
      transposed: Whether ``left`` holds transposed factors.
      config: Tuning, or None for ``tune_reduce``'s.

    Returns:
      (segments, height, width) float32; empty segments are zero.

    Raises:
      NotImplementedError: Where int32 does not number the rows of an operand or the blocks of the result.
    """
    contraction, width = products.right.shape[1:]
    height = products.left.shape[2 if transposed else 1]
    num_segments = offsets.shape[0] - 1
    capacity = products.shape[0] if indices is None else indices.shape[0]
    # Kernels take no arrays without elements.
    if num_segments == 0 or capacity == 0 or 0 in products.left.shape or 0 in products.right.shape:
        return jnp.zeros((num_segments, height, width), jnp.float32)
    if config is None:
        config = tune_reduce(height=height, width=width, positions=capacity)
    check_int32("rows of left factors", products.left.shape[0] * products.left.shape[1])
    check_int32("rows of right factors", products.right.shape[0] * contraction)
    check_int32("rows and blocks of the result", num_segments * max(height, config.block.chunks))
    out = _reduce(
        Gather(products.flat(), indices, weights),
        offsets,
        spec=Spec(block=config.block, contraction=contraction, transposed=transposed),
        config=config,
        interpret=interpret_params(),
    )
    return out.reshape(num_segments, height, width)


@functools.partial(jax.jit, static_argnames=("spec", "config", "interpret"))
def _reduce(gather: Gather, offsets: jax.Array, *, spec: Spec, config: ReduceConfig, interpret: Interpret) -> jax.Array:
    # Short segments first, as a result of their own; the launch of long ones writes their rows into it, in place.
    out = _short(gather, offsets, spec, config, interpret)
    sizes = segments.level_sizes(_capacity(gather), config.split)
    if not sizes:
        return out
    levels, runs = [gather], None
    for level, nodes in enumerate(sizes):
        sums, *new_runs = _pieces(levels[-1], offsets, runs, level, nodes, spec, config, interpret)
        levels.append(Gather(sums))
        runs = new_runs[0] if runs is None else runs
    assert runs is not None
    return _long(out, levels, runs, offsets, spec, config, interpret)


def _capacity(gather: Gather) -> int:
    """How many positions there are to sum."""
    return gather.rows.shape[0] if gather.indices is None else gather.indices.shape[0]


def _short(gather: Gather, offsets: jax.Array, spec: Spec, config: ReduceConfig, interpret: Interpret) -> jax.Array:
    """Sums of short and empty segments; the rows of long ones stay unwritten."""
    block, num_segments = spec.block, offsets.shape[0] - 1
    capacity = _capacity(gather)

    def tt_reduce_short(item: jax.Array, gather: Gather, offsets: Ref, out: Ref) -> None:
        engine, segment = Engine.at(spec, interpret, item)
        low, high = segments.bounds(block.items, engine.ops, offsets, segment)
        bad = segments.malformed(segment, low, high, capacity)
        short = (segment >= 0) & (bad | segments.is_short(low, high, config.split))
        total = engine.add_range(gather, low, jnp.where(short, jnp.where(bad, low, high), low))
        total = total + engine.spread(block.items, jnp.where(bad, jnp.float32(jnp.nan), jnp.float32(0)))
        engine.store(out, jnp.where(short, segment, -1), total)

    return _launch(tt_reduce_short, spec, num_segments, (gather, offsets), config, interpret, rows=num_segments)[0]


def _pieces(
    children: Gather,
    offsets: jax.Array,
    runs: jax.Array | None,
    level: int,
    nodes: int,
    spec: Spec,
    config: ReduceConfig,
    interpret: Interpret,
) -> tuple[jax.Array, ...]:
    """(nodes * height, width): sums of ``split`` children each, where a node lies in one segment; else unwritten.

    From the lowest level also (nodes,) int32: the segment that each node lies within, or -1.
    """
    items, chunks = spec.block.items, spec.block.chunks

    def tt_reduce_pieces(
        item: jax.Array,
        children: Gather,
        offsets: Ref,
        runs: Ref,
        out: Ref,
        new_runs: Ref | None = None,
    ) -> None:
        engine, node = Engine.at(spec, interpret, item)
        segment = segments.run_at(items, engine.ops, offsets, runs, node, level=level, split=config.split)
        low = jnp.where(segment >= 0, node * config.split, 0)
        total = engine.add_range(children, low, jnp.where(segment >= 0, low + config.split, 0))
        engine.store(out, jnp.where(segment >= 0, node, -1), total)
        if new_runs is not None:  # by the first of the node's blocks
            engine.ops.store_scalars(items, new_runs, jnp.where(item == node * chunks, node, -1), segment)

    more = (jax.ShapeDtypeStruct((nodes,), jnp.int32),) if runs is None else ()
    operands = (children, offsets, runs)
    return _launch(tt_reduce_pieces, spec, nodes, operands, config, interpret, rows=nodes, more=more)


def _long(
    out: jax.Array,
    levels: list[Gather],
    runs: jax.Array,
    offsets: jax.Array,
    spec: Spec,
    config: ReduceConfig,
    interpret: Interpret,
) -> jax.Array:
    """Writes the sums of long segments into ``out``, in place."""
    items, capacity = spec.block.items, _capacity(levels[0])

    def tt_reduce_long(item: jax.Array, levels: list[Gather], runs: Ref, offsets: Ref, out: Ref) -> None:
        engine, run = Engine.at(spec, interpret, item)
        # One item a run: most runs begin no long segment, and sum nothing.
        segment, low, high = segments.long_segment(items, engine.ops, runs, offsets, run, split=config.split)
        bad = segments.malformed(segment, low, high, capacity)
        segment, low, high = jnp.where(bad, -1, segment), jnp.where(bad, 0, low), jnp.where(bad, 0, high)
        total = engine.add_nodes(levels, low, high, split=config.split)
        engine.store(out, segment, total)

    # A ref: the launch writes rows of long segments where the others lie, instead of a second array to be joined.
    target = jax.new_ref(out)
    _launch(tt_reduce_long, spec, runs.shape[0], (levels, runs, offsets, target), config, interpret, rows=None)
    return jax.freeze(target)


def _launch(
    body: Callable[..., None],
    spec: Spec,
    count: int,
    operands: tuple[PyTree, ...],
    config: ReduceConfig,
    interpret: Interpret,
    *,
    rows: int | None,
    more: tuple[jax.ShapeDtypeStruct, ...] = (),
) -> tuple[jax.Array, ...]:
    """Launches over all blocks of ``count`` matrices, of which ``rows`` are made; ``more`` outputs follow them."""
    block = spec.block
    made = () if rows is None else (jax.ShapeDtypeStruct((rows * block.height, block.width), jnp.float32),)
    job = Job(
        body=body,
        tile=block.items,
        count=count * block.chunks,
        operands=operands,
        out_types=(*made, *more),
        blocks=config.blocks,
    )
    return launch([job], interpret=interpret)[0]
