"""Optimizer steps on unique rows on a GPU, in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Ref

from jrec.pallas import rules
from jrec.pallas.interpret import interpret_params
from jrec.pallas.launch import Interpret, Job, check_dim, launch, ops_for
from jrec.pallas.rules import Rule
from jrec.pallas.tile import Tile
from jrec.pallas.tuning import TuningConfig, tune
from jrec.pallas.update import Rounding, Target, Updater, finished, in_place
from jrec.row_optimizers import RowOptimizer


def row_update(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: dict[str, jax.Array],
    rows: jax.Array,
    gradients: jax.Array,
    step: jax.Array,
    gradient_scale: jax.Array,
    *,
    rounding: Rounding | None = None,
    rounding_key: jax.Array | None = None,
    rounding_rows: jax.Array | None = None,
    dim: int | None = None,
    config: TuningConfig | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One optimizer step on ``table[rows]``; all other rows and slots keep their bits.

    See ``jrec.ops.row_update`` for the contract.

    Args:
      optimizer: One of jrec's row optimizers.
      table: (num_rows, dim), float32, bfloat16 or float16.
      slots: The slots by name, float32.
      rows: (n,) int32, unique; ``num_rows`` and more is padding.
      gradients: (n, dim) float32.
      step: () int32.
      gradient_scale: () float32.
      rounding: ``jrec.ops.rounding.round_values``, which is used with a key.
      rounding_key: (2,) uint32 for stochastic rounding, or None for round to nearest.
      rounding_rows: (n,) int32, the numbers that rounding hashes in place of ``rows``; None for the rows themselves.
      dim: Elements of a row that count, where the storage is padded; None for all.
      config: Tuning, or None for ``tune``'s.

    Returns:
      The new table and slots, aliases of the old ones under donation.

    Raises:
      NotImplementedError: For a dim of more than 1024 or an unknown optimizer.
    """
    check_dim("row_update", table.shape[1])
    rule = rules.rule_of(optimizer, dim or table.shape[1])
    if rows.shape[0] == 0 or table.shape[0] == 0:
        return table, slots
    if config is None:
        elements = sum(shape == "element" for _, shape in rule.slots)
        config = tune(
            dim=table.shape[1],
            itemsize=rule.access(table.dtype.itemsize),
            length=1,
            element_slots=elements,
        )
    hyper = rules.hyperparameters(optimizer, step, gradient_scale)
    target = Target(table, slots, rows, hyper, rounding_key, rounding_rows)
    return _row_update(
        target,
        gradients,
        rule=rule,
        rounding=rounding if rounding_key is not None else None,
        config=config,
        interpret=interpret_params(),
    )


@functools.partial(jax.jit, static_argnames=("rule", "rounding", "config", "interpret"))
def _row_update(
    target: Target,
    gradients: jax.Array,
    *,
    rule: Rule,
    rounding: Rounding | None,
    config: TuningConfig,
    interpret: Interpret,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    tile = Tile.of(target.table.shape[1], rule.access(target.table.dtype.itemsize), chunks=config.chunks)
    updater = Updater(tile=tile, ops=ops_for(interpret), rule=rule, rounding=rounding)
    target = in_place(target)

    def row_update(item: jax.Array, target: Target, gradients: Ref) -> None:
        address = updater.addresses(target, item)
        old = updater.load(target, item, address)
        # Padded rows load nothing, as ``updater.load`` does for them: their gradients may be anything, NaN too.
        row_gradients = updater.ops.load_rows(tile, gradients, jnp.where(address >= 0, item, -1))
        updater.apply(target, old, row_gradients)

    job = Job(
        body=row_update,
        tile=tile,
        count=target.rows.shape[0],
        operands=(target, gradients),
        out_types=(),
        blocks=2**20,
    )
    launch([job], interpret=interpret)
    return finished(target)
