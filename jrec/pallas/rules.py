"""The row optimizers' mathematics on register tiles: ``step_rows`` of ``jrec.ops.row_optimizers``, tile for rows.

A second wording of it is needed because a tile keeps row sums as row scalars, and because a kernel takes what depends
on the step number (learning rate, bias corrections) as numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jrec.pallas.tile import Tile

State = dict[str, jax.Array]  # slots by name: values, or row scalars for a row slot
_HOME = "jrec.ops.row_optimizers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What of a row optimizer a kernel is compiled for.

    Attributes:
      kind: The optimizer's name.
      constants: Its numbers, by field.
      slots: Its slots' shapes by name, "element" or "row".
      weight_decay: See the optimizer.
      max_row_norm: See the optimizer.
      dim: Elements of a row that count in a mean: fewer than the storage's where rows are padded.
    """

    kind: str
    constants: tuple[tuple[str, float], ...]
    slots: tuple[tuple[str, str], ...]
    weight_decay: float
    max_row_norm: float | None
    dim: int

    def __getitem__(self, constant: str) -> float:
        return dict(self.constants)[constant]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What a rule may use: the geometry, the primitives, and the numbers of this step as values.

    Attributes:
      tile: The geometry.
      ops: ``inline`` or ``twins``.
      learning_rate: Row scalars.
      corrections: Row scalars ``1 / (1 - b1**t)`` and ``1 / (1 - b2**t)`` for Adam.
    """

    tile: Tile
    ops: ModuleType
    learning_rate: jax.Array
    corrections: tuple[jax.Array, jax.Array]

    def spread(self, scalars: jax.Array) -> jax.Array:
        """Row scalars as values."""
        return self.ops.spread(self.tile, scalars)

    def row_sum(self, values: jax.Array) -> jax.Array:
        """Sums along rows as row scalars."""
        return self.ops.row_sum(self.tile, values)


def rule_of(optimizer: Any, dim: int) -> Rule:
    """The rule of one of jrec's row optimizers.

    Raises:
      NotImplementedError: For any other, a subclass included, whose step no kernel knows.
    """
    kind = type(optimizer)
    if kind.__module__ != _HOME or kind.__name__ not in _STEPS:
        raise NotImplementedError(
            f"no Pallas kernel knows the step of {kind.__name__}; known are {', '.join(_STEPS)}."
            " Use implementation='xla' or None"
        )
    common = ("learning_rate", "weight_decay", "max_row_norm")
    fields = [f.name for f in dataclasses.fields(optimizer) if f.name not in common]
    return Rule(
        kind=kind.__name__,
        constants=tuple((name, float(getattr(optimizer, name))) for name in fields),
        slots=tuple(optimizer.slots.items()),
        weight_decay=optimizer.weight_decay,
        max_row_norm=optimizer.max_row_norm,
        dim=dim,
    )


def hyperparameters(optimizer: Any, step: jax.Array, gradient_scale: jax.Array) -> jax.Array:
    """What a kernel needs of a step, (4,) float32: learning rate, gradient scale, Adam's two inverse corrections."""
    one = jnp.float32(1)
    first, second = optimizer.bias_corrections(step) if hasattr(optimizer, "bias_corrections") else (one, one)
    return jnp.stack([optimizer.learning_rate_at(step), gradient_scale, 1 / first, 1 / second])


def prepare(rule: Rule, step: Step, rows: jax.Array, gradients: jax.Array, gradient_scale: jax.Array) -> jax.Array:
    """Unscales, clips and decays gradients, as ``RowOptimizer.prepare``."""
    gradients = gradients * step.spread(gradient_scale)
    if rule.max_row_norm is not None:
        norm = jnp.sqrt(step.row_sum(gradients * gradients))
        limit = jnp.float32(rule.max_row_norm)
        gradients = gradients * step.spread(jnp.where(norm > limit, limit / norm, jnp.float32(1)))
    if rule.weight_decay:
        gradients = gradients + jnp.float32(rule.weight_decay) * rows
    return gradients


def step_rows(rule: Rule, step: Step, rows: jax.Array, gradients: jax.Array, slots: State) -> tuple[jax.Array, State]:
    """New rows and slots, values or row scalars each, from prepared gradients."""
    return _STEPS[rule.kind](rule, step, rows, gradients, slots)


def _sgd(rule: Rule, step: Step, rows: jax.Array, gradients: jax.Array, slots: State) -> tuple[jax.Array, State]:
    del rule
    return rows - step.spread(step.learning_rate) * gradients, slots


def _momentum(rule: Rule, step: Step, rows: jax.Array, gradients: jax.Array, slots: State) -> tuple[jax.Array, State]:
    momentum = jnp.float32(rule["momentum"])
    trace = gradients + momentum * slots["trace"]
    update = gradients + momentum * trace if rule["nesterov"] else trace
    return rows - step.spread(step.learning_rate) * update, {"trace": trace}


def _adagrad(rule: Rule, step: Step, rows: jax.Array, gradients: jax.Array, slots: State) -> tuple[jax.Array, State]:
    total = slots["sum"] + gradients * gradients
    scale = _inverse_root(total, rule["eps"])
    return rows - step.spread(step.learning_rate) * gradients * scale, {"sum": total}


def _row_wise_adagrad(
    rule: Rule, step: Step, rows: jax.Array, gradients: jax.Array, slots: State
) -> tuple[jax.Array, State]:
    total = slots["sum"] + step.row_sum(gradients * gradients) * jnp.float32(1 / rule.dim)
    rate = step.learning_rate * _inverse_root(total, rule["eps"])
    return rows - step.spread(rate) * gradients, {"sum": total}


def _rmsprop(rule: Rule, step: Step, rows: jax.Array, gradients: jax.Array, slots: State) -> tuple[jax.Array, State]:
    decay = jnp.float32(rule["decay"])
    nu = (1 - decay) * (gradients * gradients) + decay * slots["nu"]
    scale = jax.lax.rsqrt(nu + jnp.float32(rule["eps"]))
    return rows - step.spread(step.learning_rate) * gradients * scale, {"nu": nu}


def _adam(rule: Rule, step: Step, rows: jax.Array, gradients: jax.Array, slots: State) -> tuple[jax.Array, State]:
    b1, b2 = jnp.float32(rule["b1"]), jnp.float32(rule["b2"])
    mu = (1 - b1) * gradients + b1 * slots["mu"]
    nu = (1 - b2) * (gradients * gradients) + b2 * slots["nu"]
    first, second = (step.spread(c) for c in step.corrections)
    update = mu * first / (jnp.sqrt(nu * second) + jnp.float32(rule["eps"]))
    return rows - step.spread(step.learning_rate) * update, {"mu": mu, "nu": nu}


def _inverse_root(total: jax.Array, eps: float) -> jax.Array:
    return jnp.where(total > 0, jax.lax.rsqrt(total + jnp.float32(eps)), jnp.float32(0))


_StepFunction = Callable[[Rule, Step, jax.Array, jax.Array, State], tuple[jax.Array, State]]
_STEPS: Mapping[str, _StepFunction] = {
    "SGD": _sgd,
    "Momentum": _momentum,
    "Adagrad": _adagrad,
    "RowWiseAdagrad": _row_wise_adagrad,
    "RMSProp": _rmsprop,
    "Adam": _adam,
}
