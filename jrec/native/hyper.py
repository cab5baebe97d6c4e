"""A row optimizer's configuration as the numbers that the kernels take: traced inside jit, NumPy's on the host."""

from __future__ import annotations

import enum
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jrec.row_optimizers import MOST_STEPS, ROW_OPTIMIZERS, RowOptimizer, taken_before

STEPS: tuple[type[RowOptimizer], ...] = tuple(ROW_OPTIMIZERS.values())
"""The optimizers that have a native step; their places are the numbers in ``optimizer_steps``."""


class Hyper(enum.IntEnum):
    """Words of the int32 array of hyperparameters: bits of float32 up to LOG_ROW, integers, and the tails.

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
    TAKEN = 11  # steps before this one, of exact optimizers
    REST_ROW = 12  # the share of rows that a step takes away without a gradient
    LOG_A = 13  # logarithms of A, B and of the share of rows that stays
    LOG_B = 14
    LOG_ROW = 15
    STOCHASTIC = 16  # 1 to round 16-bit rows with the key, 0 to round them to nearest
    KEY0 = 17
    KEY1 = 18
    TAIL = 19  # the first of the numbers of the tail before the step (``RowOptimizer.tail_numbers``)
    TAIL_AFTER = 35  # the first of those after it


_LOGS = (Hyper.LOG_A, Hyper.LOG_B)
HYPER_FLOATS = int(Hyper.STOCHASTIC)
HYPER_WORDS = 51
_TAIL_WORDS = int(Hyper.TAIL_AFTER) - int(Hyper.TAIL)


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
    """What the kernels need to know of one step, (HYPER_WORDS,) int32; see ``Hyper``."""
    # Optimizers count steps from 1 here, as Adam's paper does; ``step`` is how many were taken.
    corrections = optimizer.bias_corrections((step + 1).astype(jnp.float32))
    values = _values(optimizer, optimizer.learning_rate_at(step), scale, corrections, taken_before(step))
    floats = jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
    key = jnp.zeros(2, jnp.uint32) if rounding_key is None else rounding_key
    flag = jnp.full(1, rounding_key is not None, jnp.int32)
    tails = [_filled(optimizer.tail_numbers(number), jnp) for number in (step, step + 1)]
    return jnp.concatenate([jax.lax.bitcast_convert_type(part, jnp.int32) for part in (floats, flag, key, *tails)])


def _filled[A: (jax.Array, np.ndarray)](numbers: A, library: ModuleType) -> A:
    return library.concatenate([numbers, library.zeros(_TAIL_WORDS - numbers.size, np.float32)])


def host_hyperparameters(
    optimizer: RowOptimizer, step: int, scale: float, rounding_key: np.ndarray | None = None
) -> np.ndarray:
    """As ``hyperparameters``, without a trip to the device where the learning rate is no schedule."""
    rate = optimizer.learning_rate
    if callable(rate):
        rate = float(np.asarray(optimizer.learning_rate_at(jnp.asarray(step, jnp.int32))))
    corrections = optimizer.bias_corrections(np.float32(step + 1))
    taken = step if step < MOST_STEPS else np.nan
    floats = np.array(_values(optimizer, rate, scale, corrections, taken), np.float32)
    key = np.zeros(2, np.uint32) if rounding_key is None else rounding_key
    tails = [np.zeros(0, np.float32)] * 2
    if optimizer.has_tail:
        tails = [np.asarray(optimizer.tail_numbers(jnp.int32(number))) for number in (step, step + 1)]
    words = [floats.view(np.int32), [np.int32(rounding_key is not None)], key.view(np.int32)]
    return np.concatenate([*words, *(_filled(numbers, np).view(np.int32) for numbers in tails)])


def _values(
    optimizer: RowOptimizer,
    rate: ArrayLike,
    scale: ArrayLike,
    corrections: tuple[ArrayLike, ArrayLike],
    taken: ArrayLike,
) -> list[ArrayLike]:
    own = [float(getattr(optimizer, field.name)) for field in optimizer.hyperparameters()]
    values: dict[int, ArrayLike] = {
        Hyper.LEARNING_RATE: rate,
        Hyper.SCALE: scale,
        Hyper.WEIGHT_DECAY: optimizer.weight_decay if optimizer.decays_gradients else 0.0,
        Hyper.MAX_NORM: np.inf if optimizer.max_row_norm is None else optimizer.max_row_norm,
        Hyper.CORRECTION1: corrections[0],
        Hyper.CORRECTION2: corrections[1],
        Hyper.TAKEN: taken,
        Hyper.REST_ROW: 1 - optimizer.row_decay,
        Hyper.LOG_ROW: np.log(optimizer.row_decay),
        **{word: np.log(value) if value > 0 else -np.inf for word, value in zip(_LOGS, own, strict=False)},
        **dict(zip((Hyper.A, Hyper.B, Hyper.C), own, strict=False)),
        **dict(zip((Hyper.REST_A, Hyper.REST_B), [1 - value for value in own], strict=False)),
    }
    return [values.get(i, 0.0) for i in range(HYPER_FLOATS)]
