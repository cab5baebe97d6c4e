"""Rows in one device's array: a stack, or the rows of a stack that a batch reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jrec.mesh.step import StepOptions
from jrec.ops.current_rows import current_rows, numbered
from jrec.ops.gather_reduce import gather_reduce_call
from jrec.ops.lookup import Residuals, squared_gradient_norm
from jrec.ops.row_optimizers import Slots
from jrec.ops.row_update import casted_update_call
from jrec.ops.storage import padded_dim, strip
from jrec.ops.tensor_cast import tensor_cast
from jrec.ops.types import Bags, Cast
from jrec.tiers.store import Context, Deferred, Update


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalRows:
    """Rows in one array, which the ids of bags number.

    Attributes:
      values: (rows, dim or more); zeros follow each row where rows are padded.
      slots: The rows' slots, shaped as from ``RowOptimizer.init(values)``; empty to predict.
      addresses: (n,) int32, the addresses in the stack of the n rows of the bags' cast; None where the array is the
        whole stack.
      dim: How many elements of a row are real.
      unique_capacity: How many unique rows fit into a cast that ``lookup`` makes; None for all.
      fetched: Whether the array has no other rows than those that the bags read.
    """

    values: jax.Array
    slots: Slots
    addresses: jax.Array | None = None
    dim: int = dataclasses.field(metadata={"static": True})
    unique_capacity: int | None = dataclasses.field(default=None, metadata={"static": True})
    fetched: bool = dataclasses.field(default=False, metadata={"static": True})

    def lookup(self, bags: Bags, context: Context) -> Deferred[tuple[jax.Array, Residuals]]:
        """Defers one gather-reduce of the array, and casts the ids if the bags have no cast; see ``Store``."""
        values, read = self.values, bags
        if context.has_tail:
            values, read, bags = self._current(bags, context)
        call = gather_reduce_call(self.padded(values, context), read.ids, read.offsets, weights=read.weights)

        def finish(pooled: jax.Array) -> tuple[jax.Array, Residuals]:
            cast = self._cast(bags, context)
            return strip(pooled, self.dim), Residuals(cast=cast, weights=bags.weights)

        return Deferred(call=call, finish=finish)

    def _cast(self, bags: Bags, context: Context) -> Cast:
        if bags.cast is not None:
            return bags.cast
        return tensor_cast(
            bags.ids,
            bags.offsets,
            num_rows=self.values.shape[0],
            unique_capacity=self.unique_capacity,
            implementation=context.options.implementation,
        )

    def _current(self, bags: Bags, context: Context) -> tuple[jax.Array, Bags, Bags]:
        """The rows that the bags read as they are now, bags that number these, and the bags with their cast."""
        if self.fetched:
            return context.current(strip(self.values, self.dim), self.slots), bags, bags
        cast, optimizer = self._cast(bags, context), context.row_optimizer
        rows = current_rows(optimizer, self.values, self.slots, cast.rows, context.options.step, dim=self.dim)
        return rows, numbered(bags, cast), dataclasses.replace(bags, cast=cast)

    def update(self, residuals: Residuals, gradients: jax.Array, context: Context) -> LocalUpdate:
        """Defers one casted update of the array; see ``Store``."""
        return LocalUpdate(store=self, residuals=residuals, gradients=gradients, context=context)

    def padded(self, array: jax.Array, context: Context) -> jax.Array:
        """An array of rows with the padding that kernels want; unchanged where rows are stored with it."""
        if not context.pad_rows or array.ndim == 1:
            return array
        width = padded_dim(self.dim, self.values.dtype.itemsize)
        return jnp.pad(array, ((0, 0), (0, width - array.shape[1])))


class LocalUpdate(Update[LocalRows, Residuals]):
    """The update of rows in one array."""

    def squares(self) -> jax.Array:
        """The sum of squares of the gradients of all rows, () float32."""
        implementation = self.context.options.implementation
        return squared_gradient_norm({"": self.residuals}, {"": self.gradients}, implementation=implementation)

    def step(self, options: StepOptions) -> Deferred[LocalRows]:
        """Defers one casted update of the array, whose result is cut back to the stored width."""
        store, context, cast = self.store, self.context, self.residuals.cast
        call = casted_update_call(
            context.row_optimizer,
            store.padded(store.values, context),
            {name: store.padded(slot, context) for name, slot in store.slots.items()},
            cast,
            self.gradients,
            weights=self.residuals.weights,
            dim=store.dim,
            **options.arguments(store.values, cast.rows if store.addresses is None else store.addresses),
        )

        def finish(updated: tuple[jax.Array, Slots]) -> LocalRows:
            # Stored rows may be narrower than what the kernel took: padding that was added for the call goes again.
            width = store.values.shape[1]
            values, slots = jax.tree.map(lambda array: strip(array, width) if array.ndim == 2 else array, updated)
            return dataclasses.replace(store, values=values, slots=slots)

        return Deferred(call=call, finish=finish)


def of_batch(values: jax.Array, slots: Slots, bags: Bags) -> tuple[LocalRows, Bags]:
    """A batch's rows, and its bags with a cast that numbers these rows, as the bags' ids do.

    Args:
      values: (capacity, dim), the batch's unique rows in ascending order of their addresses.
      slots: The rows' slots; empty to predict.
      bags: The batch's bags, whose cast names rows of the stack.

    Raises:
      ValueError: If the bags have no cast.
    """
    if bags.cast is None:
        raise ValueError("bags of rows from host memory have no cast; jrec.host.HostPipeline gives them one")
    capacity, cast = values.shape[0], bags.cast
    # Unique rows and the fetched ones are the same list, in one order: the k-th row of the cast is row k of the array.
    numbers = jnp.arange(cast.rows.shape[0], dtype=jnp.int32)
    numbered: Any = jnp.where(numbers < cast.num_unique, numbers, jnp.int32(capacity))
    rows = LocalRows(values=values, slots=slots, addresses=cast.rows, dim=values.shape[1], fetched=True)
    return rows, dataclasses.replace(bags, cast=dataclasses.replace(cast, rows=numbered))
