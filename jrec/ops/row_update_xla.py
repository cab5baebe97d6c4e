"""A row optimizer's step as XLA runs it: new rows written by a scatter on CPUs, tables updated in place on GPUs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jrec.ops import rounding
from jrec.ops.platforms import cpu_or_other
from jrec.ops.sizes import all_static, is_static
from jrec.row_optimizers import MOST_STEPS, Number, RowOptimizer, Slots, taken_before


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayMath:
    """``jrec.row_optimizers.StepMath`` on gathered rows.

    Attributes:
      learning_rate: () float32.
      gradient_scale: () float32.
      corrections: The optimizer's ``bias_corrections``.
      step: () int32, how many steps were taken before, for a ``step_rows`` of its own form.
      tails: The optimizer's ``tail_numbers`` before the step and after it.
    """

    learning_rate: jax.Array
    gradient_scale: jax.Array
    corrections: tuple[Number, Number]
    step: jax.Array
    tails: tuple[jax.Array, jax.Array]

    sqrt = staticmethod(jnp.sqrt)
    rsqrt = staticmethod(jax.lax.rsqrt)

    @staticmethod
    def of(optimizer: RowOptimizer, step: jax.Array, gradient_scale: jax.Array) -> ArrayMath:
        """The math of step number ``step``, () int32, from 0."""
        return ArrayMath(
            learning_rate=optimizer.learning_rate_at(step),
            gradient_scale=gradient_scale,
            corrections=optimizer.bias_corrections((step + 1).astype(jnp.float32)),
            step=step,
            tails=(optimizer.tail_numbers(step), optimizer.tail_numbers(step + 1)),
        )

    @property
    def taken(self) -> jax.Array:
        """How many steps were taken before, () float32."""
        return taken_before(self.step)

    def tail(self, number: int | jax.Array, *, after: bool = False) -> jax.Array:
        """An entry of ``tails``, () float32."""
        return self.tails[after][number]

    def power(self, base: float, exponents: jax.Array, /) -> jax.Array:
        """See ``StepMath``.

        Of products only: a CPU's ``exp`` has other bits where it takes several numbers at once, so that a row's would
        depend on where it lies.
        """
        # By squaring, bit by bit of the exponent; ``1 + 0 * exponents`` is NaN where the exponent is.
        bits, power = exponents.astype(jnp.int32), 1 + 0 * exponents
        for bit in range(MOST_STEPS.bit_length() - 1):
            power = power * jnp.where((bits >> bit) & 1 == 1, jnp.float32(base ** (1 << bit)), jnp.float32(1))
        return power

    def rounded(self, x: jax.Array, /) -> jax.Array:
        """``x``: XLA's compiler makes no fused multiply-add of a product that a choice stands behind."""
        return jnp.where(x == x, x, jnp.float32(jnp.nan))

    def summed(self, term: Callable[[int | jax.Array], jax.Array], count: int, /) -> jax.Array:
        """The sum of ``term(0)`` to ``term(count - 1)``."""
        return functools.reduce(jnp.add, map(term, range(count)))

    def spread(self, scalars: jax.Array) -> jax.Array:
        """(n,) as (n, 1); () as it is."""
        return scalars[:, None] if scalars.ndim else scalars

    def where(self, condition: jax.Array, x: jax.Array, y: float, /) -> jax.Array:
        """``x`` where ``condition``, else ``y``."""
        return jnp.where(condition, x, jnp.float32(y))

    def clipped(self, values: jax.Array, norm: float) -> jax.Array:
        """Rows scaled down to Euclidean norm ``norm`` where theirs is greater."""
        norms = jnp.sqrt(jnp.sum(jnp.square(values), axis=-1, keepdims=True))
        return jnp.where(norms > norm, values * (norm / norms), values)

    def row_mean(self, values: jax.Array) -> jax.Array:
        """(n, dim) to (n,)."""
        return jnp.mean(values, axis=-1)

    def unbiased(self, values: jax.Array, moment: int) -> jax.Array:
        """The moment divided by its bias correction."""
        return values / self.corrections[moment]


def update_rows(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    rows: jax.Array,
    gradients: jax.Array,
    step: jax.Array,
    gradient_scale: jax.Array,
    rounding_key: jax.Array | None,
    rounding_rows: jax.Array | None = None,
) -> tuple[jax.Array, Slots]:
    """The step of ``jrec.ops.row_update``, in XLA; arguments and results are those."""
    args = (table, slots, rows, gradients, step, gradient_scale, rounding_key, rounding_rows)
    in_place = optimizer.has_terms

    def cpu(*args: PyTree) -> tuple[jax.Array, Slots]:
        return _write_rows(optimizer, *args)

    def other(*args: PyTree) -> tuple[jax.Array, Slots]:
        return _step_in_place(optimizer, *args)

    return cpu_or_other(args, cpu=cpu, other=other) if in_place else cpu(*args)


def _write_rows(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    rows: jax.Array,
    gradients: jax.Array,
    step: jax.Array,
    gradient_scale: jax.Array,
    rounding_key: jax.Array | None,
    rounding_rows: jax.Array | None,
) -> tuple[jax.Array, Slots]:
    """Reads rows and slots, computes new ones, and writes them."""
    rows = distinct(rows, table.shape[0])
    old = _take(table, rows, gradients).astype(jnp.float32)
    math = ArrayMath.of(optimizer, step, gradient_scale)
    gradients = optimizer.prepare(old, gradients, math)
    old_slots = {name: _take(slot, rows, gradients) for name, slot in slots.items()}
    new, new_slots = optimizer.step_rows(old, gradients, old_slots, math)
    if rounding_key is not None:
        numbers = rows if rounding_rows is None else rounding_rows
        new = rounding.stochastic_round(new, table.dtype, rounding_key, numbers)
    return _put(table, rows, new), {name: _put(slot, rows, new_slots[name]) for name, slot in slots.items()}


def _step_in_place(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    rows: jax.Array,
    gradients: jax.Array,
    step: jax.Array,
    gradient_scale: jax.Array,
    rounding_key: jax.Array | None,
    rounding_rows: jax.Array | None,
) -> tuple[jax.Array, Slots]:
    """Adds to slots and rows where they lie.

    XLA fuses what a scatter writes into the scatter unless it reads the array that the scatter overwrites. New rows
    computed from old ones are therefore an array of their own, as large as the gradients; increments are not.
    """
    rows = distinct(rows, table.shape[0])
    old = _take(table, rows, gradients).astype(jnp.float32)
    # Slots first: the change of a row is computed from their new values, as every optimizer here defines it.
    math = ArrayMath.of(optimizer, step, gradient_scale)
    gradients = optimizer.prepare(old, gradients, math)
    new_slots = {}
    for name, (decay, increment) in optimizer.slot_terms(gradients, math).items():
        # Two scatters, of a product and of a sum, each in place; one of both would read the slots that it overwrites.
        slot = slots[name] if decay is None else _scale(slots[name], rows, decay, increment)
        new_slots[name] = _add(slot, rows, increment)
    at_rows = {name: _take(slot, rows, gradients) for name, slot in new_slots.items()}
    change = optimizer.row_change(gradients, at_rows, math)
    if table.dtype == jnp.float32:
        return _add(table, rows, -change), new_slots
    new = old - change  # rounded to 16 bits, so that no sum within the scatter gives the same
    if rounding_key is not None:
        numbers = rows if rounding_rows is None else rounding_rows
        new = rounding.stochastic_round(new, table.dtype, rounding_key, numbers)
    return _put(table, rows, new), new_slots


def distinct(rows: jax.Array, num_rows: int) -> jax.Array:
    """Rows whose padding is distinct rows past the end, which are dropped: the promise of unique rows holds for all.

    Raises:
      ValueError: If there are no such numbers in int32, in which they would be rows of the table again.
    """
    if is_static(num_rows) and all_static(rows) and num_rows + rows.shape[0] > 2**31:
        raise ValueError(
            f"a table of {num_rows:,} rows cannot be updated at {rows.shape[0]:,} rows at once: together they must be"
            f" at most 2**31; split the table, or update fewer rows (unique_capacities)"
        )
    return jnp.where(rows < num_rows, rows, num_rows + jnp.arange(rows.shape[0], dtype=jnp.int32))


def _place(array: jax.Array, rows: jax.Array, gradients: jax.Array) -> jax.Array | tuple[jax.Array, slice]:
    # A padded table is read and written in its first columns only: what lies behind them keeps its bits.
    return rows if array.shape[1:] in ((), gradients.shape[1:]) else (rows, slice(gradients.shape[1]))


def _take(array: jax.Array, rows: jax.Array, gradients: jax.Array) -> jax.Array:
    at = array.at[_place(array, rows, gradients)]
    # Both promises hold: a cast's rows ascend, and ``distinct`` has numbered the padding on from the last row.
    return at.get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)


def _put(array: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    at, values = array.at[_place(array, rows, values)], values.astype(array.dtype)
    return at.set(values, mode="drop", unique_indices=True, indices_are_sorted=True)


def _add(array: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    at = array.at[_place(array, rows, values)]
    return at.add(values, mode="drop", unique_indices=True, indices_are_sorted=True)


def _scale(array: jax.Array, rows: jax.Array, factor: float, like: jax.Array) -> jax.Array:
    at = array.at[_place(array, rows, like)]
    return at.multiply(jnp.float32(factor), mode="drop", unique_indices=True, indices_are_sorted=True)
