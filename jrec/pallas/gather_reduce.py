"""Gather-reduce on a GPU: rows of a source summed per segment, forward and backward alike."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrec.pallas import segments
from jrec.pallas.interpret import interpret_params
from jrec.pallas.launch import Interpret, check_dim, launch, ops_for
from jrec.pallas.segments import Gather
from jrec.pallas.tile import Tile
from jrec.pallas.tuning import TuningConfig, tune

_PIECES_UNROLL = 4  # a piece has many lookups, so its loads are always worth overlapping


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
      config: tuning, or None for ``tune``'s.

    Returns:
      (num_segments, dim) float32.

    Raises:
      NotImplementedError: for a dim of more than 1024.
    """
    check_dim("gather_reduce", source.shape[1])
    num_segments = indices.shape[0] if offsets is None else offsets.shape[0] - 1
    if config is None:
        config = tune(dim=source.shape[1], itemsize=source.dtype.itemsize, segments=num_segments, lookups=indices.size)
    if num_segments == 0 or indices.size == 0:
        return jnp.zeros((num_segments, source.shape[1]), jnp.float32)
    length = None
    if offsets is None:
        if indices.shape[1] < 2 * config.split:
            length = indices.shape[1]
        else:
            offsets = jnp.arange(num_segments + 1, dtype=jnp.int32) * indices.shape[1]
    flat_weights = None if weights is None else weights.reshape(-1)
    return _gather_reduce(
        source, indices.reshape(-1), offsets, flat_weights, length=length, config=config, interpret=interpret_params()
    )


@functools.partial(jax.jit, static_argnames=("length", "config", "interpret"))
def _gather_reduce(
    source: jax.Array,
    indices: jax.Array,
    offsets: jax.Array | None,
    weights: jax.Array | None,
    *,
    length: int | None,
    config: TuningConfig,
    interpret: Interpret,
) -> jax.Array:
    dim = source.shape[1]
    if source.shape[0] == 0:  # every index is past the end
        source, indices = jnp.zeros((1, dim), source.dtype), jnp.where(indices < 0, indices, 1)
    tile = Tile.of(dim, source.dtype.itemsize, chunks=config.chunks)
    gather = Gather(source, indices, weights)
    if offsets is None:
        assert length is not None
        return _padded(tile, gather, length, config, interpret)
    out = _short(tile, gather, offsets, config, interpret)
    tree = sum_pieces(dim, gather, offsets, config, interpret)
    return out if tree is None else _long(tile, out, offsets, tree, config, interpret)


class Tree(NamedTuple):
    """The nodes that long segments are summed from.

    Attributes:
      levels: the lookups, and then the pieces of each level.
      runs: (nodes,) int32, the segment that each node of the first level of pieces lies within, or -1.
    """

    levels: list[Gather]
    runs: jax.Array


def sum_pieces(dim: int, gather: Gather, offsets: jax.Array, config: TuningConfig, interpret: Interpret) -> Tree | None:
    """Sums the full runs of every level; None where the capacity has room for none."""
    sizes = segments.level_sizes(gather.indices.shape[0], config.split)
    if not sizes:
        return None
    runs = segments.full_runs(offsets, sizes, config.split)
    levels = [gather]
    for of_node in runs:
        levels.append(Gather(_pieces(dim, levels[-1], of_node, config, interpret)))
    return Tree(levels, runs[0])


def _pieces(dim: int, children: Gather, runs: jax.Array, config: TuningConfig, interpret: Interpret) -> jax.Array:
    """(nodes, dim) float32: sums of ``split`` children each, where a node lies within one segment; else unwritten."""
    ops = ops_for(interpret)
    tile = Tile.of(dim, children.rows.dtype.itemsize)

    def sum_pieces(node: jax.Array, children: Gather, runs: Any, out: Any) -> None:
        full = ops.load_scalars(tile, runs, node, fill=-1) >= 0
        low = jnp.where(full, node * config.split, 0)
        high = jnp.where(full, low + config.split, 0)
        total = segments.add_range(tile, ops, children, low, high, tile.zeros(), unroll=_PIECES_UNROLL)
        ops.store_rows(tile, out, jnp.where(full, node, -1), total)

    return launch(
        sum_pieces,
        tile,
        runs.shape[0],
        (children, runs),
        out_type=jax.ShapeDtypeStruct((runs.shape[0], dim), jnp.float32),
        blocks=config.blocks,
        interpret=interpret,
    )


def _padded(tile: Tile, gather: Gather, length: int, config: TuningConfig, interpret: Interpret) -> jax.Array:
    """Segments of ``length`` lookups each."""
    ops = ops_for(interpret)
    num_segments = gather.indices.shape[0] // length

    def gather_reduce_padded(segment: jax.Array, gather: Gather, out: Any) -> None:
        low = jnp.where(segment >= 0, segment * length, 0)
        high = jnp.where(segment >= 0, low + length, 0)
        total = segments.add_range(tile, ops, gather, low, high, tile.zeros(), unroll=config.unroll)
        ops.store_rows(tile, out, segment, total)

    return launch(
        gather_reduce_padded,
        tile,
        num_segments,
        (gather,),
        out_type=jax.ShapeDtypeStruct((num_segments, tile.dim), jnp.float32),
        blocks=config.blocks,
        interpret=interpret,
    )


def _short(tile: Tile, gather: Gather, offsets: jax.Array, config: TuningConfig, interpret: Interpret) -> jax.Array:
    """Sums of short and empty segments; the rows of long ones stay unwritten."""
    ops = ops_for(interpret)
    num_segments = offsets.shape[0] - 1

    def gather_reduce_short(segment: jax.Array, gather: Gather, offsets: Any, out: Any) -> None:
        low, high = segments.bounds(tile, ops, offsets, segment)
        mine = (segment >= 0) & segments.is_short(low, high, config.split)
        total = segments.add_range(
            tile, ops, gather, low, jnp.where(mine, high, low), tile.zeros(), unroll=config.unroll
        )
        ops.store_rows(tile, out, jnp.where(mine, segment, -1), total)

    return launch(
        gather_reduce_short,
        tile,
        num_segments,
        (gather, offsets),
        out_type=jax.ShapeDtypeStruct((num_segments, tile.dim), jnp.float32),
        blocks=config.blocks,
        interpret=interpret,
    )


def _long(
    tile: Tile, out: jax.Array, offsets: jax.Array, tree: Tree, config: TuningConfig, interpret: Interpret
) -> jax.Array:
    """Writes the sums of long segments into ``out``, in place."""
    ops = ops_for(interpret)

    def gather_reduce_long(run: jax.Array, levels: list[Gather], runs: Any, offsets: Any, out: Any) -> None:
        segment, low, high = segments.long_segment(tile, ops, runs, offsets, run, split=config.split)
        total = segments.add_nodes(tile, ops, levels, low, high, split=config.split, unroll=config.unroll)
        ops.store_rows(tile, out, segment, total)

    target = jax.new_ref(out)
    launch(
        gather_reduce_long,
        tile,
        tree.runs.shape[0],
        (tree.levels, tree.runs, offsets, target),
        out_type=(),
        blocks=config.blocks,
        interpret=interpret,
    )
    return jax.freeze(target)
