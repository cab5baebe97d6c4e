"""What all kernels share: the grid, the walk over tiles, and the choice of inline code or its twins."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jrec.pallas import inline, twins
from jrec.pallas.tile import Tile

Interpret = plgpu.InterpretGPUParams | None
MAX_DIM = 1024  # longer rows would not fit a fused update's registers


def ops_for(interpret: Interpret) -> ModuleType:
    """The primitives of compiled kernels, or their twins."""
    return inline if interpret is None else twins


def check_dim(op: str, dim: int) -> None:
    """Raises NotImplementedError for rows that no kernel holds in registers."""
    if not 1 <= dim <= MAX_DIM:
        raise NotImplementedError(
            f"{op}: Pallas kernels take dims from 1 to {MAX_DIM}, not {dim}; use implementation='xla' or None"
        )


def check_manual_axes(operands: Any) -> None:
    """Raises NotImplementedError inside a shard_map that tracks which axes values vary over: Mosaic GPU cannot."""
    for leaf in jax.tree.leaves(operands):
        kind = getattr(jax.typeof(leaf), "manual_axis_type", None)
        if kind is not None and kind.varying:
            axes = ", ".join(sorted(map(str, kind.varying)))
            raise NotImplementedError(
                "Pallas kernels inside shard_map need jax.shard_map(..., check_vma=False): their operands vary over"
                f" {axes}"
            )


def launch(
    body: Callable[..., None],
    tile: Tile,
    count: int,
    operands: tuple[Any, ...],
    *,
    out_type: Any,
    blocks: int,
    interpret: Interpret,
    active: int | None = None,
) -> Any:
    """Launches a kernel over tiles of ``count`` rows.

    Args:
      body: called with ``item``, the row scalars that number the tile's rows (-1 past the end), and then the refs. Its
        name is the kernel's.
      tile: the geometry.
      count: rows to walk over.
      operands: arrays, refs, and pytrees of them.
      out_type: ShapeDtypeStructs of the outputs.
      blocks: the most thread blocks.
      interpret: parameters of interpret mode, or None.
      active: which operand, if any, is a (1,) int32 array holding how many of the ``count`` rows are worth visiting.

    Raises:
      NotImplementedError: inside a ``shard_map`` with ``check_vma=True``.
    """
    check_manual_axes(operands)
    ops = ops_for(interpret)
    tiles = -(-count // tile.rows)
    grid = min(tiles, blocks)

    def kernel(*refs: Any) -> None:
        block = jax.lax.axis_index("block")

        def visit(number: jax.Array) -> None:
            item = number * tile.rows + tile.row_numbers()
            body(jnp.where(item < count, item, -1), *refs)

        if grid == tiles and active is None:
            visit(block)
            return
        last = tiles
        if active is not None:
            real = ops.most(tile, ops.load_scalars(tile, refs[active], tile.row_scalars(0, jnp.int32)))
            last = jnp.minimum(tiles, jax.lax.div(real + (tile.rows - 1), jnp.int32(tile.rows)))
        turns = jax.lax.div(last - block + (grid - 1), jnp.int32(grid))

        def turn(i: jax.Array, none: None) -> None:
            visit(block + i * grid)
            return none

        jax.lax.fori_loop(0, turns, turn, None)

    kernel.__name__ = body.__name__
    return plgpu.kernel(kernel, out_type=out_type, grid=(grid,), grid_names=("block",), interpret=interpret)(*operands)
