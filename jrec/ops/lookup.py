"""The two phases of sparse training: look rows up, then apply the gradients of what was looked up.

    activations, residuals = lookup(tables, bags)
    loss, activation_gradients = jax.value_and_grad(dense_model)(activations)
    tables, slots = apply_gradients(optimizer, tables, slots, residuals, activation_gradients, step=step)

Tables are plain arrays by name, of any dims and dtypes: on a GPU the kernels of all tables share their launches.
Nothing here makes a gradient the size of a table, and everything works under jit, shard_map and donation. Where
gradients of the tables themselves are wanted, use ``embedding_bag``: ``jax.grad`` of a function that calls ``lookup``
gives the same, an array of each table's size. Updates have derivatives in XLA's implementation only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrec.ops import rounding
from jrec.ops.arrays import Activations, Count, RoundingKey, Scalar, Scale, Slots, Step, Tables
from jrec.ops.current_rows import current_rows, numbered
from jrec.ops.dispatch import Implementation
from jrec.ops.doors import (
    about,
    checked_gradients,
    checked_optimizer,
    checked_scale,
    checked_step,
    checked_table,
)
from jrec.ops.explicit_axes import auto_inside, like, like_bags
from jrec.ops.forms import formed_bags
from jrec.ops.gather_reduce import gather_reduce_call, gather_reduce_together
from jrec.ops.row_update import casted_gather_reduce, casted_update_call, casted_update_together
from jrec.ops.sizes import static
from jrec.ops.tensor_cast import cast_of
from jrec.ops.types import Bags, Cast, array_record, known
from jrec.row_optimizers import RowOptimizers, optimizer_of


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residuals:
    """What a lookup leaves for its backward pass: the cast of the ids, their weights, and of what table they are.

    The table's ``width`` and ``dtype`` are static, and so is whether rows were read as an ``exact`` optimizer needs it;
    where they are None, nobody compares them.
    """

    cast: Cast
    weights: jax.Array | None = None
    width: int | None = known()
    dtype: str | None = known()
    exact: bool | None = known()


@auto_inside(lambda tables, bags, **_: (_like_bags_of(tables, bags), PartitionSpec()))
def lookup(
    tables: Mapping[str, Tables],
    bags: Mapping[str, Bags],
    *,
    unique_capacities: Mapping[str, int] | None = None,
    optimizer: RowOptimizers | None = None,
    slots: Mapping[str, Slots] | None = None,
    step: Step = 0,
    implementation: Implementation | None = None,
) -> tuple[dict[str, Activations], dict[str, Residuals]]:
    """Pools the rows of every bag, and casts the ids for the backward pass where the loader did not.

    Args:
      tables: (rows, dim) each, by name.
      bags: What to look up in each table; a table without bags is an error, as are bags without a table. JAX wraps
        int64 ids that are given to a jitted function; convert them by ``jrec.checked_ids``.
      unique_capacities: How many unique rows fit, by table. Tables that are not named, and all for None, have room for
        every row; bags that bring a cast keep its capacity. Of rows that do not fit the activations are right (NaN with
        an exact optimizer), but ``apply_gradients`` leaves them as they are: whoever sets a capacity must check
        ``rows_left_out``.
      optimizer: As ``apply_gradients`` takes it; needed where it is exact (``ExactAdam`` and the like), as are
        ``slots`` and ``step``, with which such rows are read.
      slots: The slots by table.
      step: () int32, how many steps were taken before.
      implementation: See ``gather_reduce``.

    Returns:
      ``activations``, (num_bags, dim) float32 by table, and ``residuals`` for ``apply_gradients``. A bag with an id
      past its table, or whose offsets descend, are negative or too large, is NaN; such ids and bags update no row.

    Raises:
      ValueError: If tables and bags have different names, a capacity has no table, shapes or dtypes do not fit, a cast
        is of other bags or another table, an exact optimizer comes without slots, or, outside jit, offsets are
        malformed.

    Example:
      >>> activations, residuals = lookup(tables, bags)
      >>> activations["items"].shape
      (2, 8)
    """
    _same_names("bags", bags, tables)
    exact = {name for name in tables if (own := optimizer_of(optimizer, name)) is not None and own.has_tail}
    if exact:
        _same_names("slots", slots or {}, tables)
        step = checked_step(step)
    capacities = dict(unique_capacities or {})
    if unknown := sorted(capacities.keys() - tables.keys()):
        raise ValueError(f"unique_capacities name {unknown}, but the tables are {sorted(tables)}")
    formed, calls, residuals = {}, [], {}
    for name, table in tables.items():
        with about(f"table {name!r}"):
            rows, formed[name] = checked_table(table), (bag := formed_bags(bags[name]))
            if slots is not None and name in exact:
                room, rule = capacities.get(name), checked_optimizer(optimizer_of(optimizer, name))
                cast = cast_of(bag, rows.shape[0], unique_capacity=room, implementation=implementation)
                formed[name] = dataclasses.replace(bag, cast=cast)
                # Only the unique rows are brought up to date, once each, and bags then read these.
                rows, bag = current_rows(rule, rows, slots[name], cast.rows, step), numbered(bag, cast)
            calls.append(gather_reduce_call(rows, bag.ids, bag.offsets, weights=bag.weights))
    activations = dict(zip(tables, gather_reduce_together(calls, implementation, tables=True), strict=True))
    for (name, bag), table in zip(formed.items(), tables.values(), strict=True):
        with about(f"table {name!r}"):
            room = capacities.get(name)
            cast = cast_of(bag, table.shape[0], unique_capacity=room, implementation=implementation)
        of_table = {"width": static(table.shape[1]), "dtype": table.dtype.name, "exact": name in exact}
        residuals[name] = Residuals(cast=cast, weights=bag.weights, **of_table)
    return activations, residuals


def rows_left_out(residuals: Mapping[str, Residuals]) -> dict[str, Count]:
    """How many unique rows did not fit into each table's cast, () int32 by table: ``apply_gradients`` skips them.

    Example:
      >>> activations, residuals = lookup(tables, bags, unique_capacities={"items": 100_000})
      >>> left_out = rows_left_out(residuals)["items"]  # check it after the step, as jax.device_get(left_out) == 0
    """
    casts = {name: _checked(of_table).cast for name, of_table in residuals.items()}
    return {name: jnp.maximum(cast.num_unique - cast.rows.shape[0], 0) for name, cast in casts.items()}


@auto_inside(
    lambda optimizer, tables, slots, *_, **__: (
        like(dict(tables)),
        like({name: dict(by_slot) for name, by_slot in slots.items()}),
    )
)
def apply_gradients(
    optimizer: RowOptimizers,
    tables: Mapping[str, Tables],
    slots: Mapping[str, Slots],
    residuals: Mapping[str, Residuals],
    gradients: Mapping[str, Activations],
    *,
    step: Step = 0,
    gradient_scale: Scale = 1.0,
    rounding_key: RoundingKey | None = None,
    dims: Mapping[str, int] | None = None,
    implementation: Implementation | None = None,
) -> tuple[dict[str, Tables], dict[str, Slots]]:
    """Updates the rows that were looked up; see ``casted_update``.

    Args:
      optimizer: The optimizer of all tables, or a function from a table's name to its own, or to None where the table
        is frozen: it and its slots are then returned as they are.
      tables: The tables, in the sizes and dtypes that were given to ``lookup``.
      slots: The slots by table, as ``init_slots`` makes them.
      residuals: From ``lookup``.
      gradients: (num_bags, dim) float32 or bfloat16 by table: the loss's gradient of the activations.
      step: () int32, how many steps were taken before; outside jit a negative one is refused.
      gradient_scale: Multiplies the gradients: one over the loss scale.
      rounding_key: (2,) uint32, a new one for every step: tables of 16 bits are rounded stochastically, each with
        ``jrec.ops.rounding.derived_key(rounding_key, i)``, where ``i`` is its place among the sorted names. None
        rounds to nearest; float32 tables are never rounded.
      dims: How many elements of a row are real, by table, where tables and slots are padded; None for all of them.
      implementation: See ``casted_update``.

    Returns:
      The new tables and slots.

    Raises:
      ValueError: If names, shapes, dtypes or slots do not fit each other or what was looked up, the step is negative or
        no integer, or the rounding key is not (2,) uint32.

    Example:
      >>> activations, residuals = lookup(tables, bags)
      >>> tables, slots = apply_gradients(optimizer, tables, slots, residuals, gradients)
    """
    if rounding_key is not None:
        rounding.check_key(rounding_key)
    step, gradient_scale = checked_step(step), checked_scale(gradient_scale)
    named = {"slots": slots, "residuals": residuals, "gradients": gradients}
    for argument, values in (named if dims is None else {**named, "dims": dims}).items():
        _same_names(argument, values, tables)
    number = {name: i for i, name in enumerate(sorted(tables))}
    calls, own = {}, {name: optimizer_of(optimizer, name) for name in tables}
    for name, table in tables.items():
        if (rule := own[name]) is None:
            continue
        with about(f"table {name!r}"):
            looked_up, rows = _checked(residuals[name]), checked_table(table)
            _check_same_table(looked_up, rows)
            if checked_optimizer(rule).has_tail and looked_up.exact is False:
                raise ValueError(
                    f"its rows were looked up as they lie, but {type(rule).__name__} reads them with their slots; give"
                    " lookup the optimizer, its slots and the step, too"
                )
            key = None
            if rounding_key is not None and rows.dtype.itemsize < 4:
                # By the table's place among sorted names: whatever the order of the mapping, the bits are the same.
                key = rounding.derived_key(rounding_key, number[name])
            calls[name] = casted_update_call(
                rule,
                rows,
                slots[name],
                looked_up.cast,
                gradients[name],
                weights=looked_up.weights,
                step=step,
                gradient_scale=gradient_scale,
                rounding_key=key,
                dim=None if dims is None else dims[name],
            )
    # All tables at once, whose kernels share launches on a GPU.
    results = casted_update_together(list(calls.values()), implementation) if calls else []
    changed = dict(zip(calls, results, strict=True))
    updated = {name: changed.get(name, (table, slots[name])) for name, table in tables.items()}
    new_tables = {name: table for name, (table, _) in updated.items()}
    return new_tables, {name: new_slots for name, (_, new_slots) in updated.items()}


@auto_inside(lambda *_, **__: PartitionSpec())
def squared_gradient_norm(
    residuals: Mapping[str, Residuals],
    gradients: Mapping[str, Activations],
    *,
    implementation: Implementation | None = None,
) -> Scalar:
    """Sum of squares of the gradients of all rows that were looked up, for clipping by a norm over all parameters.

    A row's gradient is the sum over its lookups, as a dense gradient of the table has it; the norm of the activations'
    gradients is another one. It takes one more gather-reduce of each table, of (unique rows, dim) float32.

    Args:
      residuals: From ``lookup``.
      gradients: (num_bags, dim) float32 or bfloat16 by table, as given to ``apply_gradients``; tables that are not
        named, as frozen ones, do not count.
      implementation: See ``gather_reduce``.

    Returns:
      () float32.

    Raises:
      ValueError: If names or shapes do not fit.

    Example:
      >>> squares = squared_gradient_norm(residuals, gradients) + optax.tree.norm(dense_gradients) ** 2
      >>> scale = jnp.minimum(1.0, 10.0 * jax.lax.rsqrt(squares))
      >>> dense_gradients = jax.tree.map(lambda gradient: scale * gradient, dense_gradients)
      >>> tables, slots = apply_gradients(optimizer, tables, slots, residuals, gradients, gradient_scale=scale)
    """
    if missing := sorted(gradients.keys() - residuals.keys()):
        raise ValueError(f"gradients are named {missing}, but residuals only {sorted(residuals)}")
    total = jnp.float32(0)
    for name, of_bags in gradients.items():
        with about(f"table {name!r}"):
            looked_up = _checked(residuals[name])
            of_bags = checked_gradients(of_bags, looked_up.cast, "dim")
            dim, width = static(of_bags.shape[1]), looked_up.width
            if dim is not None and width is not None and dim > width:  # less where the table is padded
                raise ValueError(f"gradients are of dim {dim}, but the table's rows hold {width} elements")
        rows = casted_gather_reduce(looked_up.cast, of_bags, looked_up.weights, implementation=implementation)
        # Padding of a cast has empty segments, which add zero.
        total += jnp.sum(jnp.square(rows))
    return total


def init_slots(optimizer: RowOptimizers, tables: Mapping[str, Tables]) -> dict[str, Slots]:
    """Fresh optimizer slots for every table; none for a frozen one (see ``apply_gradients``)."""
    own = {name: optimizer_of(optimizer, name) for name in tables}
    slots: dict[str, Slots] = {}
    for name, table in tables.items():
        with about(f"table {name!r}"):
            rule = None if own[name] is None else checked_optimizer(own[name])
            slots[name] = {} if rule is None else rule.init(checked_table(table))
    return slots


def _like_bags_of(tables: Mapping[str, jax.Array], bags: Mapping[str, Bags]) -> dict[str, PartitionSpec]:
    return {name: like_bags(bags[name].ids, bags[name].offsets, table) for name, table in tables.items()}


def _checked(residuals: Residuals) -> Residuals:
    if not isinstance(residuals, Residuals):
        raise ValueError(f"the residuals must come from lookup, but are of type {type(residuals).__name__}")
    return residuals


def _check_same_table(residuals: Residuals, table: jax.Array) -> None:
    """Raises ValueError on a table of another width or dtype than the one that was looked up; rows are the cast's."""
    was = residuals.width, residuals.dtype
    if was != (None, None) and was != (now := (static(table.shape[1]), table.dtype.name)):
        raise ValueError(f"its rows are {now[1]} of {now[0]} elements, but were {was[1]} of {was[0]} when looked up")


def _same_names(argument: str, named: Mapping[str, object], tables: Mapping[str, jax.Array]) -> None:
    if named.keys() != tables.keys():
        raise ValueError(
            f"{argument} are named {sorted(named)}, but the tables are {sorted(tables)}; the names must agree"
        )
