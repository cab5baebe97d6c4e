"""A row optimizer's configuration as the numbers that the kernels take: traced inside jit, NumPy's on the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.ops.row_optimizers import SGD, Adagrad, Adam, Momentum, RMSProp, RowOptimizer, RowWiseAdagrad


def kind_of(optimizer: RowOptimizer) -> int:
    """The kernels' number of an optimizer.

    Raises:
      NotImplementedError: for an optimizer that has no native step.
    """
    from jrec.native import optimizer_steps as steps

    kinds: dict[type[RowOptimizer], int] = {
        SGD: steps.SGD,
        Momentum: steps.MOMENTUM,
        Adagrad: steps.ADAGRAD,
        RowWiseAdagrad: steps.ROWWISE_ADAGRAD,
        RMSProp: steps.RMSPROP,
        Adam: steps.ADAM,
    }
    if type(optimizer) not in kinds:
        raise NotImplementedError(
            f"{type(optimizer).__name__} has no native step; use implementation='xla', which calls its step_rows"
        )
    return kinds[type(optimizer)]


def hyperparameters(
    optimizer: RowOptimizer, step: jax.Array, scale: jax.Array, rounding_key: jax.Array | None = None
) -> jax.Array:
    """What the kernels need to know of one step, (len(Hyper),) int32; see ``optimizer_steps.Hyper``."""
    corrections = optimizer.bias_corrections(step) if isinstance(optimizer, Adam) else (1.0, 1.0)
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
    corrections = (1.0, 1.0)
    if isinstance(optimizer, Adam):
        t, one = np.float32(step + 1), np.float32(1)
        corrections = (one - np.float32(optimizer.b1) ** t, one - np.float32(optimizer.b2) ** t)
    floats = np.array(_values(optimizer, rate, scale, corrections), np.float32)
    key = np.zeros(2, np.uint32) if rounding_key is None else rounding_key
    return np.concatenate([floats.view(np.int32), [np.int32(rounding_key is not None)], key.view(np.int32)])


def _values(optimizer: RowOptimizer, rate: Any, scale: Any, corrections: tuple[Any, Any]) -> list[Any]:
    from jrec.native.optimizer_steps import HYPER_FLOATS, Hyper

    values: dict[int, Any] = {
        Hyper.LEARNING_RATE: rate,
        Hyper.SCALE: scale,
        Hyper.WEIGHT_DECAY: optimizer.weight_decay,
        Hyper.MAX_NORM: np.inf if optimizer.max_row_norm is None else optimizer.max_row_norm,
        Hyper.CORRECTION1: corrections[0],
        Hyper.CORRECTION2: corrections[1],
    }
    match optimizer:
        case Momentum():
            values |= {Hyper.A: optimizer.momentum, Hyper.B: float(optimizer.nesterov)}
        case Adagrad() | RowWiseAdagrad():
            values |= {Hyper.A: optimizer.eps}
        case RMSProp():
            values |= {Hyper.A: optimizer.decay, Hyper.B: optimizer.eps, Hyper.REST_A: 1 - optimizer.decay}
        case Adam():
            values |= {Hyper.A: optimizer.b1, Hyper.B: optimizer.b2, Hyper.C: optimizer.eps}
            values |= {Hyper.REST_A: 1 - optimizer.b1, Hyper.REST_B: 1 - optimizer.b2}
    return [values.get(i, 0.0) for i in range(HYPER_FLOATS)]
