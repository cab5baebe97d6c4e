"""What the steps of all rows of a stack share, and casts of the rows of one array: a shard, or the replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jrec.ops.dispatch import Implementation
from jrec.ops.layout import Stack
from jrec.ops.rounding_rows import rounding_rows
from jrec.ops.row_update import casted_gather_reduce
from jrec.ops.tensor_cast import tensor_cast
from jrec.ops.types import Cast


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What the steps of all arrays of a stack have in common; see ``casted_update``.

    Attributes:
      step: () int32, the number of steps taken before.
      gradient_scale: A factor of the gradients.
      rounding_key: (2,) uint32, the step's key, or None to round 16-bit rows to nearest.
      stack: The stack, by whose tables rows are rounded; None to round them by their addresses.
      implementation: The ops' implementation; None for the platform's fastest.
    """

    step: jax.Array | int = 0
    gradient_scale: jax.Array | float = 1.0
    rounding_key: jax.Array | None = None
    stack: Stack | None = dataclasses.field(default=None, metadata={"static": True})
    implementation: Implementation | None = dataclasses.field(default=None, metadata={"static": True})

    def rounds(self, table: jax.Array) -> bool:
        """Whether rows of this table are rounded stochastically."""
        # A float32 row holds the sum as it is, so there is nothing to round.
        return self.rounding_key is not None and table.dtype.itemsize < 4

    def arguments(self, table: jax.Array, addresses: jax.Array | None) -> dict[str, Any]:
        """Arguments of ``casted_update`` and ``row_update``, by name.

        Args:
          table: (rows, dim), whose lines need not be the stack's addresses.
          addresses: (n,) int32, the addresses in the stack of the rows to step; None where ``table`` is not rounded
            stochastically.

        Raises:
          ValueError: If there are no addresses to round by.
        """
        shared = {"step": self.step, "gradient_scale": self.gradient_scale}
        if not self.rounds(table):
            return shared
        if addresses is None:
            raise ValueError(
                f"{table.dtype} rows are rounded stochastically by table and row, so by their addresses in the stack,"
                " which the route lacks; give it `addresses`, or no rounding key"
            )
        # By table and row, not by line of this array: a row rounds alike on whatever device, and in host memory.
        numbers = addresses if self.stack is None else rounding_rows(self.stack, addresses)
        return shared | {"rounding_key": self.rounding_key, "rounding_rows": numbers}


def cast_rows(rows: jax.Array, *, num_rows: int, options: StepOptions) -> Cast:
    """The cast of (n,) rows, one bag each; rows of ``num_rows`` or more are padding."""
    return tensor_cast(rows[:, None], num_rows=num_rows, implementation=options.implementation)


def of_unique(cast: Cast, values: jax.Array) -> jax.Array:
    """(unique_capacity, ...): the values of ``cast.rows``, from one value per lookup, equal for equal rows."""
    # All lookups of a row have the same value, so the first of its segment will
    # do. Places past the last unique row read anything, which nobody uses.
    firsts = cast.positions.at[cast.offsets[:-1]].get(mode="clip")
    return values.at[firsts].get(mode="clip")


def squares_of(cast: Cast, gradients: jax.Array, weights: jax.Array | None, options: StepOptions) -> jax.Array:
    """The sum of squares of the summed gradients of ``cast.rows``, () float32; see ``casted_gather_reduce``."""
    rows = casted_gather_reduce(cast, gradients, weights, implementation=options.implementation)
    return jnp.sum(jnp.square(rows))
