"""What the ops' public doors refuse: arguments that do not fit each other, judged only by types and static shapes.

Native kernels read and write memory by the shapes that they are told, so nothing behind a door looks again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jrec.ops.sizes import is_static, static
from jrec.ops.types import Bags, Cast
from jrec.row_optimizers import RowOptimizer, Slots

FLOAT32 = ("float32",)
CORES = ("float32", "bfloat16")
BAG_GRADIENTS = ("float32", "bfloat16")
TABLES = ("float32", "bfloat16", "float16")
INT32 = ("int32",)
_HIGHEST = 2**31 - 1


def checked(
    name: str, values: object, shape: tuple[object, ...], dtypes: tuple[str, ...] = FLOAT32, *, why: str = ""
) -> jax.Array:
    """An array of one of these dtypes and of this shape; NumPy's becomes JAX's, as under ``jit``.

    Args:
      name: What the argument is called.
      values: What was given for it.
      shape: A size for each axis, or the name of one that may be anything.
      dtypes: Names of dtypes.
      why: What the message ends with.

    Raises:
      ValueError: If it is something else.
    """
    names = " or ".join(filter(None, (", ".join(dtypes[:-1]), dtypes[-1])))
    wanted = f"{names} of shape ({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    argument = array(name, values, wanted)
    fits = len(argument.shape) == len(shape) and all(map(_fits, argument.shape, shape))
    if not fits or argument.dtype.name not in dtypes:
        raise ValueError(f"{name} must be {wanted}, but is {argument.dtype.name}{list(argument.shape)}{why}")
    return jnp.asarray(argument)


def array(name: str, values: object, wanted: str) -> Any:
    """An argument that must be an array, JAX's or NumPy's.

    Raises:
      ValueError: If it is something else; says what is ``wanted``.
    """
    if isinstance(values, jax.Array | np.ndarray | np.generic):
        return values
    raise ValueError(f"{name} must be {wanted}, JAX's or NumPy's, but is of type {type(values).__name__}")


def _fits(size: object, wanted: object) -> bool:
    return isinstance(wanted, str) or not (is_static(size) and is_static(wanted)) or size == wanted


def checked_table(table: object, name: str = "table") -> jax.Array:
    """A table, (rows, dim)."""
    return checked(name, table, ("rows", "dim"), TABLES)


def checked_optimizer(optimizer: object) -> RowOptimizer:
    """A row optimizer.

    Raises:
      ValueError: If it is something else.
    """
    if not isinstance(optimizer, RowOptimizer):
        raise ValueError(
            "the optimizer must be one of jrec.ops, such as jrec.ops.Adagrad(learning_rate=0.1), but is of type"
            f" {type(optimizer).__name__}"
        )
    return optimizer


def checked_slots(optimizer: RowOptimizer, table: jax.Array | jax.ShapeDtypeStruct, slots: object) -> Slots:
    """A table's slots, such as ``optimizer.init(table)`` makes.

    Raises:
      ValueError: If they are others, or the optimizer is none.
    """
    checked_optimizer(optimizer)
    if not isinstance(slots, Mapping) or sorted(slots) != sorted(optimizer.slots):
        names = sorted(slots) if isinstance(slots, Mapping) else f"a {type(slots).__name__}"
        raise ValueError(
            f"{type(optimizer).__name__} keeps slots {sorted(optimizer.slots)}, but was given {names};"
            " make them with optimizer.init(table)"
        )
    return {
        name: checked(f"slot {name!r}", slots[name], table.shape if shape == "element" else table.shape[:1])
        for name, shape in optimizer.slots.items()
    }


def checked_gradients(gradients: object, cast: Cast, dim: object, dtypes: tuple[str, ...] = BAG_GRADIENTS) -> jax.Array:
    """The gradients of the bags of a cast, (num_bags, dim) float32 or bfloat16."""
    bags = "num_bags" if cast.num_bags is None else cast.num_bags
    why = "" if cast.num_bags is None else f"; {cast.num_bags} bags were looked up"
    return checked("gradients", gradients, (bags, dim), dtypes, why=why)


def checked_cast(cast: object, num_rows: object, bags: Bags | None = None) -> Cast:
    """A cast, checked against the table of ``num_rows`` rows that it is to be used with.

    Args:
      cast: The argument that should be a cast.
      num_rows: The table's rows.
      bags: The bags that the cast must belong to; None where they are not known.

    Raises:
      ValueError: If it is no cast, or the cast of another table or of other bags.
    """
    if not isinstance(cast, Cast):
        raise ValueError(f"the cast must be a jrec.Cast, as jrec.tensor_cast makes it, but is a {type(cast).__name__}")
    if cast.num_rows is not None and not _fits(num_rows, cast.num_rows):
        raise ValueError(f"the table has {num_rows} rows, but the ids were cast for one of {cast.num_rows}")
    rows = checked("cast.rows", cast.rows, ("unique_capacity",), INT32)
    sources = checked("cast.sources", cast.sources, ("capacity",), INT32)
    leaves = {
        "rows": rows,
        "offsets": checked("cast.offsets", cast.offsets, (rows.shape[0] + 1,), INT32),
        "sources": sources,
        "positions": checked("cast.positions", cast.positions, sources.shape, INT32),
        "num_unique": checked("cast.num_unique", cast.num_unique, (), INT32),
    }
    if bags is None:
        return dataclasses.replace(cast, **leaves)
    of_cast, of_bags = (sources.shape[0], cast.num_bags), (bags.capacity, bags.num_bags)
    if not _fits(of_cast[0], of_bags[0]) or not _fits(of_bags[1], "any" if of_cast[1] is None else of_cast[1]):
        raise ValueError(
            f"the bags' cast is of {of_cast[0]} lookups in {of_cast[1] or 'other'} bags, but they hold {of_bags[0]} in"
            f" {of_bags[1]}; leave it out, or make it of these ids"
        )
    return dataclasses.replace(cast, **leaves, num_rows=static(num_rows), num_bags=static(bags.num_bags))


def checked_weights(weights: object, cast: Cast) -> jax.Array:
    """The weights of a cast's lookups, float32 in the shape of their ids.

    Raises:
      ValueError: If they are something else.
    """
    factors, lookups = array("weights", weights, "float32"), cast.positions.shape[0]
    if factors.dtype.name not in FLOAT32 or not _fits(factors.size, lookups):
        raise ValueError(
            f"weights must be float32 for {lookups} lookups, but are {factors.dtype.name}{list(factors.shape)}"
        )
    return jnp.asarray(factors)


def check_bags(bags: object) -> None:
    """Raises ValueError on what are no bags."""
    if not isinstance(bags, Bags):
        raise ValueError(f"bags must be jrec.Bags(ids=..., offsets=...), but are of type {type(bags).__name__}")


def checked_step(step: Any) -> jax.Array:
    """The number of steps taken before, () int32; only outside jit is its value looked at.

    Raises:
      ValueError: If it is no integer, or negative.
    """
    number, known = step, isinstance(step, numbers.Integral) and not isinstance(step, bool)
    if isinstance(step, jax.Array | np.ndarray) and step.shape == () and jnp.issubdtype(step.dtype, jnp.integer):
        known, number = True, 0 if isinstance(step, Tracer) else int(step)
    if not known or not 0 <= number <= _HIGHEST:
        raise ValueError(f"step must be how many steps were taken before, an integer from 0 on, but is {step!r}")
    return jnp.asarray(step).astype(jnp.int32)


def checked_scale(scale: Any) -> jax.Array:
    """A factor of gradients, () float32.

    Raises:
      ValueError: If it is no real number.
    """
    is_array = isinstance(scale, jax.Array | np.ndarray) and scale.shape == ()
    if not (is_array and jnp.issubdtype(scale.dtype, jnp.floating)) and not isinstance(scale, numbers.Real):
        raise ValueError(f"gradient_scale must be a single number, but is {scale!r}")
    return jnp.asarray(scale, jnp.float32)


def check_count(name: str, count: object, least: int = 0) -> None:
    """Raises ValueError on what is no number of rows, which int32 holds."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        if not hasattr(count, "dimension_as_value"):  # no size of ``jax.export`` either
            raise ValueError(f"{name} is {count!r}; it must be an integer")
    elif not least <= count <= _HIGHEST:
        raise ValueError(f"{name} is {count}; row numbers are int32, so it must lie in {least}..2**31 - 1")


@contextlib.contextmanager
def about(subject: str) -> Iterator[None]:
    """Begins a ValueError from inside with what it is about."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:  # JAX's own, or one of the configuration
            raise
        raise ValueError(f"{subject}: {error}") from None
