"""A row optimizer's configuration as the numbers that the kernels take: traced inside jit, NumPy's on the host."""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.row_optimizers import ROW_OPTIMIZERS, RowOptimizer

STEPS: tuple[type[RowOptimizer], ...] = tuple(ROW_OPTIMIZERS.values())
"""The optimizers that have a native step; their places are the numbers in ``optimizer_steps``."""


class Hyper(enum.IntEnum):
    """Words of the int32 array of hyperparameters: bits of float32 up to REST_B, then integers.

    A, B and C are the optimizer's own hyperparameters (``RowOptimizer.hyperparameters``), in their order.
    """

    LEARNING_RATE = 0
    SCALE = 1  # of the gradients
    WEIGHT_DECAY = 2
    MAX_NORM = 3  # infinite for no clipping
    A = 4
    B = 5
    C = 6
    CORRECTION1 = 7  # Adam's 1 - b1**t
    CORRECTION2 = 8
    REST_A = 9  # 1 - A and 1 - B, subtracted before they are rounded to float32
    REST_B = 10
    STOCHASTIC = 11  # 1 to round 16-bit rows with the key, 0 to round them to nearest
    KEY0 = 12
    KEY1 = 13


HYPER_FLOATS = int(Hyper.STOCHASTIC)


def kind_of(optimizer: RowOptimizer) -> int:
    """The kernels' number of an optimizer.

    Raises:
      NotImplementedError: for an optimizer that has no native step.
    """
    if type(optimizer) not in STEPS:
        raise NotImplementedError(
            f"{type(optimizer).__name__} has no native step; use implementation='xla', which calls its step_rows"
        )
    return STEPS.index(type(optimizer))


def hyperparameters(
    optimizer: RowOptimizer, step: jax.Array, scale: jax.Array, rounding_key: jax.Array | None = None
) -> jax.Array:
    """What the kernels need to know of one step, (len(Hyper),) int32; see ``Hyper``."""
    corrections = optimizer.bias_corrections((step + 1).astype(jnp.float32))
    values = _values(optimizer, optimizer.learning_rate_at(step), scale, corrections)
    floats = jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
    key = jnp.zeros(2, jnp.uint32) if rounding_key is None else rounding_key
    flag = jnp.full(1, rounding_key is not None, jnp.int32)
    return jnp.concatenate([jax.lax.bitcast_convert_type(part, jnp.int32) for part in (floats, flag, key)])


def host_hyperparameters(
    optimizer: RowOptimizer, step: int, scale: float, rounding_key: np.ndarray | None = None
) -> np.ndarray:
    """As ``hyperparameters``, without a trip to the device where the learning rate is no schedule."""
    rate = optimizer.learning_rate
    if callable(rate):
        rate = float(np.asarray(optimizer.learning_rate_at(jnp.asarray(step, jnp.int32))))
    corrections = optimizer.bias_corrections(np.float32(step + 1))
    floats = np.array(_values(optimizer, rate, scale, corrections), np.float32)
    key = np.zeros(2, np.uint32) if rounding_key is None else rounding_key
    return np.concatenate([floats.view(np.int32), [np.int32(rounding_key is not None)], key.view(np.int32)])


def _values(optimizer: RowOptimizer, rate: Any, scale: Any, corrections: tuple[Any, Any]) -> list[Any]:
    own = [float(getattr(optimizer, field.name)) for field in optimizer.hyperparameters()]
    values: dict[int, Any] = {
        Hyper.LEARNING_RATE: rate,
        Hyper.SCALE: scale,
        Hyper.WEIGHT_DECAY: optimizer.weight_decay,
        Hyper.MAX_NORM: np.inf if optimizer.max_row_norm is None else optimizer.max_row_norm,
        Hyper.CORRECTION1: corrections[0],
        Hyper.CORRECTION2: corrections[1],
        **dict(zip((Hyper.A, Hyper.B, Hyper.C), own, strict=False)),
        **dict(zip((Hyper.REST_A, Hyper.REST_B), [1 - value for value in own], strict=False)),
    }
    return [values.get(i, 0.0) for i in range(HYPER_FLOATS)]
