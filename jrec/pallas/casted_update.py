"""The whole backward pass of a lookup on a GPU: casted gather-reduce and optimizer step in one kernel.

The gradient of a unique row is summed in registers and applied from there; it never reaches device memory. Only long
segments (see ``segments``) leave partial sums behind, at most one row for every ``split`` lookups.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jrec.pallas import rules, segments
from jrec.pallas.gather_reduce import Tree, sum_pieces
from jrec.pallas.interpret import interpret_params
from jrec.pallas.launch import Interpret, check_dim, launch, ops_for
from jrec.pallas.rules import Rule
from jrec.pallas.segments import Gather
from jrec.pallas.tile import Tile
from jrec.pallas.tuning import TuningConfig, tune
from jrec.pallas.update import Rounding, Target, Updater, finished, in_place


def casted_update(
    optimizer: Any,
    table: jax.Array,
    slots: dict[str, jax.Array],
    rows: jax.Array,
    offsets: jax.Array,
    sources: jax.Array,
    num_unique: jax.Array,
    bag_gradients: jax.Array,
    weights: jax.Array | None,
    step: jax.Array,
    gradient_scale: jax.Array,
    *,
    rounding: Rounding | None = None,
    rounding_key: jax.Array | None = None,
    dim: int | None = None,
    config: TuningConfig | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sums the bag gradients of every unique row and takes an optimizer step along them (Algorithm 3, fused).

    See ``jrec.ops.casted_update`` for the contract, and ``row_update`` for the arguments that are not listed here.

    Args:
      optimizer: one of jrec's row optimizers.
      table: (num_rows, dim), float32, bfloat16 or float16.
      slots: by name, float32.
      rows: (unique_capacity,) int32 of the cast.
      offsets: (unique_capacity + 1,) int32 of the cast.
      sources: (capacity,) int32 of the cast.
      num_unique: () int32 of the cast.
      bag_gradients: (num_bags, dim) float32.
      weights: (capacity,) float32 in the order of the cast, or None.
      step: () int32.
      gradient_scale: () float32.
      rounding: see ``row_update``.
      rounding_key: see ``row_update``.
      dim: see ``row_update``.
      config: tuning, or None for ``tune``'s.

    Returns:
      The new table and slots, aliases of the old ones under donation.

    Raises:
      NotImplementedError: for a dim of more than 1024 or an unknown optimizer.
    """
    check_dim("casted_update", table.shape[1])
    rule = rules.rule_of(optimizer, dim or table.shape[1])
    if rows.shape[0] == 0 or sources.shape[0] == 0 or bag_gradients.shape[0] == 0:
        return table, slots
    if config is None:
        config = tune(
            dim=table.shape[1],
            itemsize=table.dtype.itemsize,
            segments=rows.shape[0],
            lookups=sources.shape[0],
            element_slots=sum(shape == "element" for _, shape in rule.slots),
        )
    target = Target(table, slots, rows, rules.hyperparameters(optimizer, step, gradient_scale), rounding_key)
    active = jnp.minimum(num_unique, rows.shape[0]).reshape(1)
    return _casted_update(
        target,
        Gather(bag_gradients, sources, weights),
        offsets,
        active,
        rule=rule,
        rounding=rounding if rounding_key is not None else None,
        config=config,
        interpret=interpret_params(),
    )


@functools.partial(jax.jit, static_argnames=("rule", "rounding", "config", "interpret"))
def _casted_update(
    target: Target,
    gather: Gather,
    offsets: jax.Array,
    active: jax.Array,
    *,
    rule: Rule,
    rounding: Rounding | None,
    config: TuningConfig,
    interpret: Interpret,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    dim = target.table.shape[1]
    tile = Tile.of(dim, target.table.dtype.itemsize, chunks=config.chunks)
    updater = Updater(tile=tile, ops=ops_for(interpret), rule=rule, rounding=rounding)
    target = in_place(target)
    _short(updater, target, gather, offsets, active, config, interpret)
    tree = sum_pieces(dim, gather, offsets, config, interpret)
    if tree is not None:
        _long(updater, target, tree, offsets, config, interpret)
    return finished(target)


def _short(
    updater: Updater,
    target: Target,
    gather: Gather,
    offsets: jax.Array,
    active: jax.Array,
    config: TuningConfig,
    interpret: Interpret,
) -> None:
    """Updates the rows whose segments are short."""
    tile, ops = updater.tile, updater.ops

    def casted_update_short(item: jax.Array, active: Any, target: Target, gather: Gather, offsets: Any) -> None:
        del active  # Read by ``launch``.
        low, high = segments.bounds(tile, ops, offsets, item)
        address = updater.addresses(target, item)
        # An empty segment updates too: with momentum or decay, a row of zero gradient moves.
        address = jnp.where(segments.is_short(low, high, config.split), address, -1)
        high = jnp.where(address >= 0, high, low)
        old = updater.load(target, address) if config.prefetch else None
        gradients = segments.add_range(tile, ops, gather, low, high, tile.zeros(), unroll=config.unroll)
        updater.apply(target, old or updater.load(target, address), gradients)

    launch(
        casted_update_short,
        tile,
        target.rows.shape[0],
        (active, target, gather, offsets),
        out_type=(),
        blocks=config.blocks,
        interpret=interpret,
        active=0,
    )


def _long(
    updater: Updater,
    target: Target,
    tree: Tree,
    offsets: jax.Array,
    config: TuningConfig,
    interpret: Interpret,
) -> None:
    """Updates the rows whose segments are long, from their pieces."""
    tile, ops = updater.tile, updater.ops

    def casted_update_long(run: jax.Array, target: Target, levels: list[Gather], runs: Any, offsets: Any) -> None:
        item, low, high = segments.long_segment(tile, ops, runs, offsets, run, split=config.split)
        gradients = segments.add_nodes(tile, ops, levels, low, high, split=config.split, unroll=config.unroll)
        updater.apply(target, updater.load(target, updater.addresses(target, item)), gradients)

    launch(
        casted_update_long,
        tile,
        tree.runs.shape[0],
        (target, tree.levels, tree.runs, offsets),
        out_type=(),
        blocks=config.blocks,
        interpret=interpret,
    )
