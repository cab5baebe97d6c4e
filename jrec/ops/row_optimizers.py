"""Row optimizers: the mathematics of one step on the touched rows of a table.

Each equals the optax optimizer of its name on a table where every row is touched, and leaves untouched rows and their
slots bit-identical (*lazy*). The step is written once, over any number of gathered rows; where and how rows are
gathered, and whether the gradient ever reaches memory, is the business of ``row_update`` and of the kernels.

Common to all, in this order: the gradient is multiplied by ``gradient_scale`` (one over the loss scale), clipped to the
row norm ``max_row_norm``, and ``weight_decay * row`` is added (L2, on touched rows).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

Slots = dict[str, jax.Array]
Schedule = Callable[[Any], Any]  # step number -> learning rate, as optax.Schedule
SlotShape = Literal["element", "row"]  # (rows, dim) or (rows,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """Base of the row optimizers.

    Attributes:
      learning_rate: a float, or an optax schedule of the step number.
      weight_decay: L2 factor added to the gradient of touched rows.
      max_row_norm: gradient rows of greater Euclidean norm are scaled down to it; None for no clipping.
    """

    learning_rate: float | Schedule
    weight_decay: float = 0.0
    max_row_norm: float | None = None

    slots: ClassVar[Mapping[str, SlotShape]] = {}  # name -> shape, of the subclass

    def slot_terms(self, gradients: jax.Array) -> dict[str, tuple[float | None, jax.Array]]:
        """What the step makes of each slot: ``decay * slot + increment``.

        Args:
          gradients: (n, dim) float32, prepared (see the module).

        Returns:
          By slot, the decay (None for one) and the increment, float32, (n, dim) or (n,).
        """
        del gradients
        return {}

    def row_change(self, gradients: jax.Array, slots: Slots, learning_rate: jax.Array, step: jax.Array) -> jax.Array:
        """What the step subtracts from rows.

        Args:
          gradients: (n, dim) float32, prepared (see the module).
          slots: The new slots of the rows, float32, (n, dim) or (n,) each.
          learning_rate: () float32.
          step: () int32, how many steps the table took before.

        Returns:
          (n, dim) float32.
        """
        raise NotImplementedError(f"{type(self).__name__} must define slot_terms and row_change, or step_rows")

    def step_rows(
        self, rows: jax.Array, gradients: jax.Array, slots: Slots, learning_rate: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Slots]:
        """One step on gathered rows.

        An optimizer defines ``slot_terms`` and ``row_change``, from which this follows. One whose step is of another
        form overrides this instead, and then costs an array of new rows and slots on a GPU.

        Args:
          rows: (n, dim) float32.
          gradients: (n, dim) float32, prepared (see the module).
          slots: float32, (n, dim) or (n,) each.
          learning_rate: () float32.
          step: () int32, how many steps the table took before.

        Returns:
          The new rows and slots.
        """
        new_slots = {}
        for name, (decay, increment) in self.slot_terms(gradients).items():
            old = slots[name]
            new_slots[name] = old + increment if decay is None else increment + jnp.float32(decay) * old
        return rows - self.row_change(gradients, new_slots, learning_rate, step), new_slots

    def initial_slot(self, name: str) -> float:
        """What slot ``name`` starts as."""
        del name
        return 0.0

    def init(self, table: jax.Array) -> Slots:
        """Fresh slots for a table of (rows, dim)."""
        return {
            name: jnp.full(table.shape if shape == "element" else table.shape[:1], self.initial_slot(name), jnp.float32)
            for name, shape in self.slots.items()
        }

    def learning_rate_at(self, step: jax.Array) -> jax.Array:
        """The learning rate of step number ``step``, () float32."""
        if not callable(self.learning_rate):
            return jnp.asarray(self.learning_rate, jnp.float32)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
            return jnp.asarray(self.learning_rate(step), jnp.float32)

    def prepare(self, rows: jax.Array, gradients: jax.Array, gradient_scale: jax.Array | float = 1.0) -> jax.Array:
        """Unscales, clips and decays gradient rows, (n, dim) float32 each."""
        gradients = gradients * jnp.asarray(gradient_scale, jnp.float32)
        if self.max_row_norm is not None:
            norm = jnp.sqrt(jnp.sum(jnp.square(gradients), axis=-1, keepdims=True))
            limit = jnp.float32(self.max_row_norm)
            gradients = jnp.where(norm > limit, gradients * (limit / norm), gradients)
        if self.weight_decay:
            gradients = gradients + jnp.float32(self.weight_decay) * rows
        return gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(RowOptimizer):
    """Stochastic gradient descent: ``row -= lr * g`` (``optax.sgd``)."""

    def row_change(self, gradients: jax.Array, slots: Slots, learning_rate: jax.Array, step: jax.Array) -> jax.Array:
        """See the base class."""
        del slots, step
        return learning_rate * gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(RowOptimizer):
    """SGD with momentum: ``trace = g + momentum * trace; row -= lr * trace`` (``optax.sgd(momentum=...)``)."""

    momentum: float = 0.9
    nesterov: bool = False

    slots: ClassVar[Mapping[str, SlotShape]] = {"trace": "element"}

    def slot_terms(self, gradients: jax.Array) -> dict[str, tuple[float | None, jax.Array]]:
        """See the base class."""
        return {"trace": (self.momentum, gradients)}

    def row_change(self, gradients: jax.Array, slots: Slots, learning_rate: jax.Array, step: jax.Array) -> jax.Array:
        """See the base class."""
        del step
        trace = slots["trace"]
        return learning_rate * (gradients + jnp.float32(self.momentum) * trace if self.nesterov else trace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(RowOptimizer):
    """Adagrad: ``sum += g**2; row -= lr * g / sqrt(sum + eps)`` (``optax.adagrad``)."""

    initial_accumulator: float = 0.1
    eps: float = 1e-7

    slots: ClassVar[Mapping[str, SlotShape]] = {"sum": "element"}

    def initial_slot(self, name: str) -> float:
        """See the base class."""
        return self.initial_accumulator

    def slot_terms(self, gradients: jax.Array) -> dict[str, tuple[float | None, jax.Array]]:
        """See the base class."""
        return {"sum": (None, jnp.square(gradients))}

    def row_change(self, gradients: jax.Array, slots: Slots, learning_rate: jax.Array, step: jax.Array) -> jax.Array:
        """See the base class."""
        del step
        total = slots["sum"]
        scale = jnp.where(total > 0, jax.lax.rsqrt(total + jnp.float32(self.eps)), jnp.float32(0))
        return learning_rate * gradients * scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(RowOptimizer):
    """Row-wise Adagrad: one accumulator a row, ``sum += mean(g**2)``; a dim-th of Adagrad's memory.

    The field's standard for embedding tables (FBGEMM's ``EXACT_ROWWISE_ADAGRAD``), with optax's place for ``eps``.
    """

    initial_accumulator: float = 0.1
    eps: float = 1e-7

    slots: ClassVar[Mapping[str, SlotShape]] = {"sum": "row"}

    def initial_slot(self, name: str) -> float:
        """See the base class."""
        return self.initial_accumulator

    def slot_terms(self, gradients: jax.Array) -> dict[str, tuple[float | None, jax.Array]]:
        """See the base class."""
        return {"sum": (None, jnp.mean(jnp.square(gradients), axis=-1))}

    def row_change(self, gradients: jax.Array, slots: Slots, learning_rate: jax.Array, step: jax.Array) -> jax.Array:
        """See the base class."""
        del step
        total = slots["sum"]
        scale = jnp.where(total > 0, jax.lax.rsqrt(total + jnp.float32(self.eps)), jnp.float32(0))
        return (learning_rate * scale)[:, None] * gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSProp(RowOptimizer):
    """RMSprop: ``nu = decay * nu + (1 - decay) * g**2; row -= lr * g / sqrt(nu + eps)`` (``optax.rmsprop``)."""

    decay: float = 0.9
    eps: float = 1e-8

    slots: ClassVar[Mapping[str, SlotShape]] = {"nu": "element"}

    def slot_terms(self, gradients: jax.Array) -> dict[str, tuple[float | None, jax.Array]]:
        """See the base class."""
        return {"nu": (self.decay, jnp.float32(1 - self.decay) * jnp.square(gradients))}

    def row_change(self, gradients: jax.Array, slots: Slots, learning_rate: jax.Array, step: jax.Array) -> jax.Array:
        """See the base class."""
        del step
        return learning_rate * gradients * jax.lax.rsqrt(slots["nu"] + jnp.float32(self.eps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(RowOptimizer):
    """Lazy Adam: ``optax.adam`` on touched rows, the bias correction counting the table's steps.

    ``mu = b1 * mu + (1 - b1) * g``, ``nu = b2 * nu + (1 - b2) * g**2``, and with ``t = step + 1``
    ``row -= lr * (mu / (1 - b1**t)) / (sqrt(nu / (1 - b2**t)) + eps)``. Untouched rows keep ``mu`` and ``nu``.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    slots: ClassVar[Mapping[str, SlotShape]] = {"mu": "element", "nu": "element"}

    def bias_corrections(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``1 - b1**t`` and ``1 - b2**t`` for ``t = step + 1``, () float32 each."""
        t = (step + 1).astype(jnp.float32)
        return 1 - jnp.float32(self.b1) ** t, 1 - jnp.float32(self.b2) ** t

    def slot_terms(self, gradients: jax.Array) -> dict[str, tuple[float | None, jax.Array]]:
        """See the base class."""
        return {
            "mu": (self.b1, jnp.float32(1 - self.b1) * gradients),
            "nu": (self.b2, jnp.float32(1 - self.b2) * jnp.square(gradients)),
        }

    def row_change(self, gradients: jax.Array, slots: Slots, learning_rate: jax.Array, step: jax.Array) -> jax.Array:
        """See the base class."""
        del gradients
        correction1, correction2 = self.bias_corrections(step)
        nu = slots["nu"] / correction2
        return learning_rate * ((slots["mu"] / correction1) / (jnp.sqrt(nu) + jnp.float32(self.eps)))
