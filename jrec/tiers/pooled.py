"""Rows in host memory that the host pools and updates itself: the step sees only the sums of bags, and their gradients.

On a CPU host memory is the device's own, so that no row needs to be copied for the step. The step takes a
``PooledRows`` for a stack and gives back a ``PooledUpdate``; ``jrec.run.feeds.in_place`` pools before the step and
updates the rows after it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jrec.mesh.step import StepOptions
from jrec.ops.lookup import Residuals, squared_gradient_norm
from jrec.ops.types import Bags
from jrec.tiers.store import Context, Deferred, Update


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledUpdate:
    """What the host needs to update the rows of a stack after a step.

    Attributes:
      gradients: (num_bags, dim) float32 or bfloat16, the loss's gradient of the pooled rows.
      hyperparameters: (HYPER_WORDS,) int32, the step's learning rate, gradient scale, rounding key and whatever
        else the native kernels read (``jrec.native.hyper``). The step computes them, so that schedules have the same
        bits as for rows on the device.
    """

    gradients: jax.Array
    hyperparameters: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledRows:
    """A batch's rows of a stack, pooled by the host.

    Attributes:
      values: (num_bags, dim) float32, in the order of the batch's bags.
    """

    values: jax.Array

    def lookup(self, bags: Bags, context: Context) -> Deferred[tuple[jax.Array, Residuals | None]]:
        """The pooled rows as they are; the bags need a cast only where gradients are clipped. See ``Store``."""
        del context
        residuals = None if bags.cast is None else Residuals(cast=bags.cast, weights=bags.weights)
        return Deferred.done((self.values, residuals))

    def update(
        self, residuals: Residuals | None, gradients: jax.Array, context: Context
    ) -> Update[PooledRows, Residuals | None]:
        """What the host updates the rows with; see ``Store``."""
        return _Update(store=self, residuals=residuals, gradients=gradients, context=context)


class _Update(Update[PooledRows, Residuals | None]):
    """The update of pooled rows, which the host makes."""

    def squares(self) -> jax.Array:
        if self.residuals is None:
            raise ValueError("gradients are clipped, which takes a cast of the bags; the host's loader makes it")
        implementation = self.context.options.implementation
        return squared_gradient_norm({"": self.residuals}, {"": self.gradients}, implementation=implementation)

    def step(self, options: StepOptions) -> Deferred[PooledUpdate]:
        from jrec.native.hyper import hyperparameters

        taken, scale = jnp.asarray(options.step, jnp.int32), jnp.asarray(options.gradient_scale, jnp.float32)
        words = hyperparameters(self.context.row_optimizer, taken, scale, options.rounding_key)
        return Deferred.done(PooledUpdate(gradients=self.gradients, hyperparameters=words))
