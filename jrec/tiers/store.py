"""Lookup and update of the rows of a stack, wherever they live.

Both are *deferred*: a store prepares its part and one kernel call, which the stacks of a step make together, so that on
a GPU they share launches. ``look_up`` and ``apply_updates`` run them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import jax

from jrec.mesh.communication import Communication
from jrec.mesh.step import StepOptions
from jrec.ops.current_rows import current
from jrec.ops.dispatch import Call, Implementation
from jrec.ops.gather_reduce import gather_reduce_together
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.row_update import casted_update_together
from jrec.ops.types import Bags

Residuals = Any  # what a store's lookup leaves for its update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """A store's view of the step.

    Attributes:
      options: Steps taken before, the stack's rounding key, and the implementation of the ops.
      optimizer: The optimizer of rows, which also says what a lookup reads of them; None for frozen rows, and where
        nothing is updated and rows are read as they lie.
      cores: The optimizer of tensor-train cores, to which a slice is a row; None for ``optimizer``.
      pad_rows: Whether kernels want rows in memory to be a multiple of 16 bytes.
      communication: The other devices, inside ``shard_map``; None on a single device.
    """

    options: StepOptions
    optimizer: RowOptimizer | None = None
    cores: RowOptimizer | None = None
    pad_rows: bool = False
    communication: Communication | None = None

    @property
    def row_optimizer(self) -> RowOptimizer:
        """The optimizer of rows; raises ValueError if the step has none."""
        if self.optimizer is None:
            raise ValueError("rows are updated, but no optimizer was given")
        return self.optimizer

    def current(self, values: jax.Array, slots: Slots) -> jax.Array:
        """Rows as lookups read them, from those that the table holds and their slots (``jrec.ops.current_rows``)."""
        return values if self.optimizer is None else current(self.optimizer, values, slots, self.options.step)

    @property
    def has_tail(self) -> bool:
        """Whether lookups read other rows than the table holds."""
        return self.optimizer is not None and self.optimizer.has_tail

    @property
    def together(self) -> Communication:
        """The other devices; raises ValueError if the step is not inside ``shard_map``."""
        if self.communication is None:
            raise ValueError("rows on several devices are used inside shard_map; give the step its communication")
        return self.communication

    def summed[T](self, tree: T) -> T:
        """Sums over the devices that compute."""
        return tree if self.communication is None else self.communication.summed(tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deferred[T]:
    """Work whose kernel call may be made together with other stacks' calls.

    Attributes:
      finish: The rest of the work, a function of the call's result; of None where there is no call.
      call: The call, or None.
    """

    finish: Callable[[Any], T]
    call: Call | None = None

    @staticmethod
    def done[V](value: V) -> Deferred[V]:
        """Work without a call, whose result is there."""
        return Deferred(finish=lambda _: value)

    def then[V](self, function: Callable[[T], V]) -> Deferred[V]:
        """The same work, and ``function`` of its result."""
        return Deferred(finish=lambda result: function(self.finish(result)), call=self.call)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update[S, R]:
    """The update of a store: nothing is done before a method is called, and ``step`` reuses the work of ``squares``.

    Attributes:
      store: The rows before the step.
      residuals, gradients, context: As ``Store.update`` takes them.
    """

    store: S
    residuals: R
    gradients: jax.Array
    context: Context

    def squares(self) -> jax.Array:
        """The sum of squares of the gradients of all rows, or cores, each summed over its lookups: () float32.

        On a mesh, the device's share: the shares of all devices add up to it.
        """
        raise NotImplementedError

    def step(self, options: StepOptions) -> Deferred[S]:
        """The store after the optimizer's step, with the context's options or another ``gradient_scale`` in them."""
        raise NotImplementedError


class Store(Protocol):
    """The rows of a stack, or a batch's rows of it, with their slots: a pytree."""

    def lookup(self, bags: Bags, context: Context) -> Deferred[tuple[jax.Array, Residuals]]:
        """Pools the rows of every bag: (num_bags, dim) float32, and what ``update`` needs.

        Args:
          bags: The bags to look up.
          context: The step.
        """
        ...

    def update(self, residuals: Residuals, gradients: jax.Array, context: Context) -> Update[Self, Residuals]:
        """The rows after the optimizer's step, and the norm of their gradients.

        Args:
          residuals: The residuals from ``lookup``.
          gradients: (num_bags, dim) float32, the loss's gradient of the pooled rows.
          context: The step.
        """
        ...


Stores = Mapping[str, Store]  # by stack


def look_up(
    stores: Stores,
    bags: Mapping[str, Bags],
    contexts: Mapping[str, Context],
    implementation: Implementation | None,
) -> tuple[dict[str, jax.Array], dict[str, Residuals]]:
    """Phase one: activations, (num_bags, dim) float32 by stack, and residuals for ``updates``.

    Args:
      stores: The stores, by stack.
      bags: The bags to look up, by stack.
      contexts: The contexts, by stack.
      implementation: See ``gather_reduce``.
    """
    # In the stores' order, which is the same on all devices: some of them exchange rows while they prepare.
    pending = {name: store.lookup(bags[name], contexts[name]) for name, store in stores.items()}
    run = functools.partial(gather_reduce_together, implementation=implementation, tables=True)
    completed: dict[str, tuple[jax.Array, Residuals]] = _complete(pending, run)
    return {n: activations for n, (activations, _) in completed.items()}, {
        n: left_behind for n, (_, left_behind) in completed.items()
    }


def updates(
    stores: Stores,
    residuals: Mapping[str, Residuals],
    gradients: Mapping[str, jax.Array],
    contexts: Mapping[str, Context],
) -> dict[str, Update[Store, Residuals]]:
    """Phase two, for ``apply_updates``: the update of each store whose context has an optimizer.

    Args:
      stores: The stores, by stack.
      residuals: The residuals from ``look_up``.
      gradients: (num_bags, dim) float32 by stack, the loss's gradient of the activations.
      contexts: The contexts, by stack.
    """
    return {
        name: store.update(residuals[name], gradients[name], contexts[name])
        for name, store in stores.items()
        if contexts[name].optimizer is not None
    }


def apply_updates(
    stores: Stores,
    updates: Mapping[str, Update[Store, Residuals]],
    contexts: Mapping[str, Context],
    implementation: Implementation | None,
    *,
    gradient_scale: jax.Array | None = None,
) -> dict[str, Store]:
    """The stores after the step; one without an update is returned as it is.

    Args:
      stores: The stores, by stack.
      updates: The updates from ``updates``, by stack.
      contexts: The contexts, by stack.
      implementation: See ``casted_update``.
      gradient_scale: () float32, a factor of all gradients; None for one.
    """
    pending = {}
    for name, update in updates.items():
        options = contexts[name].options
        if gradient_scale is not None:
            options = dataclasses.replace(options, gradient_scale=gradient_scale)
        pending[name] = update.step(options)
    updated = _complete(pending, functools.partial(casted_update_together, implementation=implementation))
    return {name: updated.get(name, store) for name, store in stores.items()}


def _complete[T](pending: Mapping[str, Deferred[T]], run: Callable[[Sequence[Call]], Sequence[Any]]) -> dict[str, T]:
    # All calls at once, so that on a GPU they share launches; only then is any result needed.
    calls = {name: deferred.call for name, deferred in pending.items() if deferred.call is not None}
    results = dict(zip(calls, run(list(calls.values())), strict=True)) if calls else {}
    return {name: deferred.finish(results.get(name)) for name, deferred in pending.items()}
