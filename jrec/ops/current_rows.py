"""Rows as a lookup reads them, where the table holds what an exact optimizer keeps of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jrec.ops.arrays import AnyRows, RowSlots, RowsOfAny, Step, Table
from jrec.ops.doors import checked_optimizer, checked_slots, checked_step, checked_table
from jrec.ops.gather_reduce import segment_of_entries
from jrec.ops.row_update_xla import ArrayMath
from jrec.ops.storage import strip
from jrec.ops.types import Bags, Cast
from jrec.row_optimizers import RowOptimizer, Slots


def current(optimizer: RowOptimizer, values: jax.Array, slots: Slots, step: jax.Array | int) -> jax.Array:
    """Rows before step number ``step``, from 0, where the table holds ``values``: (n, dim) of their dtype.

    Args:
      optimizer: The table's optimizer; of one without a tail (``RowOptimizer.has_tail``) these are the rows themselves.
      values: (n, dim), rows of the table.
      slots: The same rows' slots, whose width may be greater than ``dim``.
      step: () int32, how many steps were taken before.
    """
    if not optimizer.has_tail:
        return values
    math = ArrayMath.of(optimizer, jnp.asarray(step, jnp.int32), jnp.float32(1))
    dim = values.shape[1]
    of_rows = {name: strip(slot, dim) if slot.ndim == 2 else slot for name, slot in slots.items()}
    return optimizer.current(values.astype(jnp.float32), of_rows, math).astype(values.dtype)


def current_rows(
    optimizer: RowOptimizer,
    table: Table,
    slots: RowSlots,
    rows: AnyRows,
    step: Step,
    *,
    dim: int | None = None,
) -> RowsOfAny:
    """Rows as an exact optimizer's lookup reads them: every row of the table after all steps that it took.

    Numbers outside of the table read any row. Of an optimizer that is not exact these are ``table[rows]``.

    Args:
      optimizer: The table's optimizer.
      table: (num_rows, dim or more).
      slots: The table's slots.
      rows: (...) int32, such as ids.
      step: () int32, how many steps were taken before.
      dim: How many elements of a row are real, where rows are padded; None for all.

    Returns:
      (..., dim) of the table's dtype.

    Raises:
      ValueError: If the optimizer is none of jrec's, the slots are not its own, or shapes or dtypes do not fit.

    Example:
      >>> rule = jrec.ops.ExactAdam(learning_rate=0.01)
      >>> table = jnp.zeros((1000, 16))
      >>> vectors = jrec.ops.current_rows(rule, table, rule.init(table), jnp.array([3, 999]), step=0)
    """
    table, rule = checked_table(table), checked_optimizer(optimizer)
    slots, step, rows = checked_slots(rule, table, slots), checked_step(step), jnp.asarray(rows)
    dim = table.shape[1] if dim is None else dim
    flat = rows.reshape(-1)

    def of_rows(array: jax.Array) -> jax.Array:
        # Padding behind the elements is not read: its slots hold no moments.
        at = array.at[flat] if array.ndim == 1 else array.at[flat, :dim]
        return at.get(mode="clip", wrap_negative_indices=False)

    values = current(optimizer, of_rows(table), {name: of_rows(slot) for name, slot in slots.items()}, step)
    return values.reshape(*rows.shape, dim)


def numbered(bags: Bags, cast: Cast) -> Bags:
    """Bags whose ids number the unique rows of their cast."""
    # Ids past the table have no segment, and get the number behind the last one: their bags are NaN, as in the table
    # itself.
    segments = segment_of_entries(cast.offsets, cast.positions.shape[0])
    numbers = jnp.zeros_like(segments).at[cast.positions].set(segments, unique_indices=True)
    return dataclasses.replace(bags, ids=jnp.where(bags.ids < 0, -1, numbers.reshape(bags.ids.shape)))


def current_on_host(
    optimizer: RowOptimizer,
    values: np.ndarray,
    slots: Mapping[str, np.ndarray],
    step: int,
    numbers: np.ndarray | None = None,
) -> np.ndarray:
    """``current`` of rows in NumPy's arrays; ``numbers`` in place of the optimizer's ``tail_numbers``."""
    return _on_host(optimizer, "current", values, slots, step, numbers)


def settled_on_host(
    optimizer: RowOptimizer, values: np.ndarray, slots: Mapping[str, np.ndarray], step: int
) -> np.ndarray:
    """What a table holds of current rows whose slots are of this step: the inverse of ``current_on_host``."""
    return _on_host(optimizer, "settled", values, slots, step, None)


def _on_host(
    optimizer: RowOptimizer,
    form: str,
    values: np.ndarray,
    slots: Mapping[str, np.ndarray],
    step: int,
    numbers: np.ndarray | None,
) -> np.ndarray:
    count = len(values)
    # A power of two, so that few programs are compiled.
    size = 1 << max(6, (count - 1).bit_length())

    def padded(array: np.ndarray) -> jax.Array:
        return jnp.asarray(np.concatenate([array, np.zeros((size - count, *array.shape[1:]), array.dtype)]))

    of_rows = {name: padded(slot) for name, slot in slots.items()}
    return np.asarray(_converted(optimizer, form, padded(values), of_rows, jnp.int32(step), numbers))[:count]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _converted(
    optimizer: RowOptimizer, form: str, values: jax.Array, slots: Slots, step: jax.Array, numbers: jax.Array | None
) -> jax.Array:
    math = ArrayMath.of(optimizer, step, jnp.float32(1))
    if numbers is not None:
        math = dataclasses.replace(math, tails=(numbers, numbers))
    convert = optimizer.current if form == "current" else optimizer.settled
    return convert(values.astype(jnp.float32), slots, math).astype(values.dtype)
