"""Gather-reduce on a GPU: rows of sources summed per segment, forward and backward alike.

Many sources, of different dims and dtypes, share one launch: each gets thread blocks and a geometry of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Ref

from jrec.pallas import segments
from jrec.pallas.interpret import interpret_params
from jrec.pallas.launch import Interpret, Job, Steps, check_dim, launch_together, ops_for
from jrec.pallas.segments import Gather
from jrec.pallas.tile import Tile
from jrec.pallas.tuning import TuningConfig, runs_a_block, sums_directly, tune


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One gather-reduce among several; see ``gather_reduce`` for the fields."""

    source: jax.Array
    indices: jax.Array
    offsets: jax.Array | None = None
    weights: jax.Array | None = None
    config: TuningConfig | None = None

    @property
    def num_segments(self) -> int:
        """How many segments there are."""
        return self.indices.shape[0] if self.offsets is None else self.offsets.shape[0] - 1


def gather_reduce(
    source: jax.Array,
    indices: jax.Array,
    offsets: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    config: TuningConfig | None = None,
) -> jax.Array:
    """Sums (weighted) rows of ``source`` per segment: ``out[s] = sum_j weights[j] * source[indices[j]]``.

    Deterministic run to run. See ``jrec.ops.gather_reduce`` for the contract.

    Args:
      source: (rows, dim), float32, bfloat16 or float16.
      indices: int32, (num_segments, length) or, with ``offsets``, (capacity,).
      offsets: (num_segments + 1,) int32 or None.
      weights: float32 of the shape of ``indices``, or None.
      config: Tuning, or None for ``tune``'s.

    Returns:
      (num_segments, dim) float32.

    Raises:
      NotImplementedError: For a dim of more than 1024.
    """
    return gather_reduce_many(
        [Request(source=source, indices=indices, offsets=offsets, weights=weights, config=config)]
    )[0]


def gather_reduce_many(requests: Sequence[Request]) -> list[jax.Array]:
    """Several gather-reduces in the launches of one; dims and dtypes may differ.

    Args:
      requests: What to sum.

    Returns:
      (num_segments, dim) float32 each: the bits that ``gather_reduce`` gives one by one.

    Raises:
      NotImplementedError: For a dim of more than 1024.
    """
    out: dict[int, jax.Array] = {}
    work, variants, numbers = [], [], []
    for number, request in enumerate(requests):
        check_dim("gather_reduce", request.source.shape[1])
        if request.num_segments == 0 or request.indices.size == 0:
            out[number] = jnp.zeros((request.num_segments, request.source.shape[1]), jnp.float32)
            continue
        prepared, variant = _prepared(request)
        work.append(prepared)
        variants.append(variant)
        numbers.append(number)
    if work:
        sums = _gather_reduce(work, variants=tuple(variants), interpret=interpret_params())
        out |= dict(zip(numbers, sums, strict=True))
    return [out[number] for number in range(len(requests))]


_Variant = tuple[int | None, TuningConfig]  # lookups of every segment where none is split, and the tuning


def _prepared(request: Request) -> tuple[tuple[Gather, jax.Array | None], _Variant]:
    """Flat indices and offsets, or None where the kernel knows where segments begin; and what it is compiled for."""
    source, indices, offsets, config = request.source, request.indices, request.offsets, request.config
    dim, itemsize = source.shape[1], source.dtype.itemsize
    length = indices.shape[1] if offsets is None else None
    if config is None:
        config = tune(dim=dim, itemsize=itemsize, length=length)
    # A few long segments would leave most threads without work; with offsets they are cut in runs like ragged ones.
    if length is not None and not sums_directly(
        segments=indices.shape[0], length=length, dim=dim, itemsize=itemsize, config=config
    ):
        offsets, length = jnp.arange(indices.shape[0] + 1, dtype=jnp.int32) * length, None
    if source.shape[0] == 0:  # every index is past the end
        source, indices = jnp.zeros((1, dim), source.dtype), jnp.where(indices < 0, indices, 1)
    weights = None if request.weights is None else request.weights.reshape(-1)
    return (Gather(source, indices.reshape(-1), weights), offsets), (length, config)


@functools.partial(jax.jit, static_argnames=("variants", "interpret"))
def _gather_reduce(
    work: list[tuple[Gather, jax.Array | None]], *, variants: tuple[_Variant, ...], interpret: Interpret
) -> list[jax.Array]:
    steps = [
        _padded(gather, *variant, interpret) if offsets is None else _ragged(gather, offsets, variant[1], interpret)
        for (gather, offsets), variant in zip(work, variants, strict=True)
    ]
    return launch_together(steps, interpret=interpret)


def _padded(gather: Gather, length: int | None, config: TuningConfig, interpret: Interpret) -> Steps[jax.Array]:
    """Segments of ``length`` lookups each."""
    assert length is not None
    ops, dim = ops_for(interpret), gather.rows.shape[1]
    tile = Tile.of(dim, gather.rows.dtype.itemsize, chunks=config.chunks)
    num_segments = gather.indices.shape[0] // length

    def gather_reduce_padded(segment: jax.Array, gather: Gather, out: Ref) -> None:
        # Past the last segment the range is empty, and the row takes part in the warp's loop without loads.
        low = jnp.where(segment >= 0, segment * length, 0)
        high = jnp.where(segment >= 0, low + length, 0)
        total = segments.add_range(tile, ops, gather, low, high, tile.zeros(), unroll=config.unroll)
        ops.store_rows(tile, out, segment, total)

    out = jax.ShapeDtypeStruct((num_segments, dim), jnp.float32)
    ((total,),) = yield [
        Job(
            body=gather_reduce_padded,
            tile=tile,
            count=num_segments,
            operands=(gather,),
            out_types=(out,),
            blocks=config.blocks,
        )
    ]
    return total


def _ragged(gather: Gather, offsets: jax.Array, config: TuningConfig, interpret: Interpret) -> Steps[jax.Array]:
    """Segments of any length: pieces first, then all segments in one launch, long ones from their pieces."""
    ops, dim = ops_for(interpret), gather.rows.shape[1]
    tile = Tile.of(dim, gather.rows.dtype.itemsize, chunks=config.chunks)
    num_segments, capacity = offsets.shape[0] - 1, gather.indices.shape[0]

    def gather_reduce_short(segment: jax.Array, gather: Gather, offsets: Ref, out: Ref) -> None:
        low, high = segments.bounds(tile, ops, offsets, segment)
        bad = segments.malformed(segment, low, high, capacity)
        short = (segment >= 0) & (bad | segments.is_short(low, high, config.split))
        # A malformed segment is summed over nothing, so that no load goes astray, and begins with NaN.
        end = jnp.where(short, jnp.where(bad, low, high), low)
        start = segments.nan_where(tile, ops, bad)
        total = segments.add_range(tile, ops, gather, low, end, start, unroll=config.unroll)
        ops.store_rows(tile, out, jnp.where(short, segment, -1), total)

    short = Job(
        body=gather_reduce_short,
        tile=tile,
        count=num_segments,
        operands=(gather, offsets),
        out_types=(jax.ShapeDtypeStruct((num_segments, dim), jnp.float32),),
        blocks=config.blocks,
    )
    # Pieces have launches of their own, before: the end of a launch is the only barrier between thread blocks here.
    levels, runs = yield from make_pieces(dim, gather, offsets, config, interpret)
    if runs is None:
        ((out,),) = yield [short]
        return out
    long_tile = Tile.of(dim, gather.rows.dtype.itemsize)
    width = runs_a_block(runs.shape[0], long_tile)

    def gather_reduce_long(item: jax.Array, levels: list[Gather], runs: Ref, offsets: Ref, out: Ref) -> None:
        def visit(segment: jax.Array, low: jax.Array, high: jax.Array) -> None:
            bad = segments.malformed(segment, low, high, capacity)
            # The kernel of short segments has written NaN for it, whatever its length.
            segment, low, high = jnp.where(bad, -1, segment), jnp.where(bad, 0, low), jnp.where(bad, 0, high)
            total = segments.add_nodes(long_tile, ops, levels, low, high, split=config.split, unroll=config.long_unroll)
            ops.store_rows(long_tile, out, segment, total)

        segments.visit_long(long_tile, ops, runs, offsets, item, visit, split=config.split, width=width)

    long = Job(
        body=gather_reduce_long,
        tile=long_tile,
        count=-(-runs.shape[0] // width) * long_tile.rows,
        operands=(levels, runs, offsets),
        out_types=(),
        blocks=config.blocks,
        writes=short,
    )
    _, (out,) = yield [long, short]  # long ones first: they take longer
    return out


def make_pieces(
    dim: int, gather: Gather, offsets: jax.Array, config: TuningConfig, interpret: Interpret
) -> Steps[tuple[list[Gather], jax.Array | None]]:
    """Sums the pieces of all levels, one launch a level.

    Returns:
      The lookups and the pieces of each level; and (nodes,) int32, the segment that each node of the lowest level lies
      within, or -1. The last is None where no segment can be long.
    """
    levels, runs = [gather], None
    for level, nodes in enumerate(segments.level_sizes(gather.indices.shape[0], config.split, top=config.top)):
        ((sums, *new_runs),) = yield [_pieces(dim, levels[-1], offsets, runs, level, nodes, config, interpret)]
        levels.append(Gather(sums))
        if runs is None:
            (runs,) = new_runs
    return levels, runs


def _pieces(
    dim: int,
    children: Gather,
    offsets: jax.Array,
    runs: jax.Array | None,
    level: int,
    nodes: int,
    config: TuningConfig,
    interpret: Interpret,
) -> Job:
    """(nodes, dim) float32: sums of ``split`` children each, where a node lies within one segment; else unwritten.

    The lowest level's second output, (nodes,) int32, is the segment that each node lies within, or -1.
    """
    ops, tile = ops_for(interpret), Tile.of(dim, children.rows.dtype.itemsize)

    def pieces(
        node: jax.Array,
        children: Gather,
        offsets: Ref,
        runs: Ref,
        out: Ref,
        new_runs: Ref | None = None,
    ) -> None:
        segment = segments.run_at(tile, ops, offsets, runs, node, level=level, split=config.split)
        low = jnp.where(segment >= 0, node * config.split, 0)
        high = jnp.where(segment >= 0, low + config.split, 0)
        total = segments.add_range(tile, ops, children, low, high, tile.zeros(), unroll=config.unroll)
        # Nodes within no segment stay unwritten, and nobody reads
        # them: a segment is covered by nodes that lie within it.
        ops.store_rows(tile, out, jnp.where(segment >= 0, node, -1), total)
        if new_runs is not None:
            ops.store_scalars(tile, new_runs, node, segment)

    sums = jax.ShapeDtypeStruct((nodes, dim), jnp.float32)
    return Job(
        body=pieces,
        tile=tile,
        count=nodes,
        operands=(children, offsets, runs),
        out_types=(sums, jax.ShapeDtypeStruct((nodes,), jnp.int32)) if runs is None else (sums,),
        blocks=config.blocks,
    )
