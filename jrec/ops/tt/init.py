"""Initial cores: chosen so that the *product*, the table, has the wanted distribution (TT-Rec, Section 3.2)."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jrec.ops.arrays import Core
from jrec.ops.doors import CORES, array
from jrec.ops.tt.shape import TTShape

Initializer = Literal["sampled_gaussian", "gaussian", "uniform"]
INITIALIZERS: tuple[str, ...] = get_args(Initializer)

Cores = tuple[Core, ...]

_CUT = 2.0  # Algorithm 3 samples a normal variable until its magnitude passes 2
_TAIL = math.erfc(_CUT / math.sqrt(2)) / 2
_TAIL_VARIANCE = 1 + _CUT * math.exp(-(_CUT**2) / 2) / math.sqrt(2 * math.pi) / _TAIL


def tt_init(
    shape: TTShape,
    key: jax.Array,
    *,
    initializer: Initializer = "sampled_gaussian",
    variance: float | None = None,
    dtype: jnp.dtype | type | str = jnp.float32,
) -> Cores:
    """Random cores whose product has mean 0 and the given variance.

    An element of the table is a sum of ``R_1 * .. * R_(d-1)`` products of ``d`` independent elements of cores, so
    elements of variance ``(variance / (R_1 * .. * R_(d-1))) ** (1 / d)`` do it, whatever their distribution. (TT-Rec's
    Algorithm 3 divides by the d-th root of sqrt(1 / 3n) and leaves ranks and the truncation's own variance out.)

    Args:
      shape: The table's shape.
      key: A key of ``jax.random``.
      initializer: "sampled_gaussian" draws normal variables of magnitude above 2 (Algorithm 3): fewer products near
        zero, so that the table's elements come closer to a normal distribution than with "gaussian" ones; "uniform".
      variance: The variance of the table's elements; None for ``1 / (3 * rows)``, which DLRM's uniform ±1/sqrt(rows)
        has.
      dtype: The cores' dtype.

    Returns:
      The cores, ``shape.core_shapes`` each.

    Raises:
      ValueError: On an unknown initializer, a dtype that cores do not have, or a variance that is not positive.
    """
    if initializer not in INITIALIZERS:
        raise ValueError(f"initializer {initializer!r} is unknown; choose one of {', '.join(INITIALIZERS)}")
    variance = 1 / (3 * shape.rows) if variance is None else variance
    if not variance > 0:
        raise ValueError(f"variance is {variance}; it must be positive")
    array("key", key, "a key of jax.random")
    if jnp.dtype(dtype).name not in CORES:
        raise ValueError(f"dtype is {jnp.dtype(dtype)}; cores are {' or '.join(CORES)}")
    scale = (variance / math.prod(shape.ranks)) ** (0.5 / shape.num_cores)
    return _draw(key, scale, shape, initializer, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _draw(key: jax.Array, scale: float, shape: TTShape, initializer: str, dtype: jnp.dtype) -> Cores:
    # All cores in one draw, cut afterwards: what takes the compiler long is compiled once.
    values = _unit(initializer, key, (shape.num_parameters,)) * jnp.asarray(scale, jnp.float32)
    ends = list(itertools.accumulate(math.prod(core) for core in shape.core_shapes))
    pieces = jnp.split(values, ends[:-1])
    return tuple(piece.reshape(core).astype(dtype) for piece, core in zip(pieces, shape.core_shapes, strict=True))


def _unit(initializer: str, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Independent elements of mean 0 and variance 1, float32."""
    if initializer == "gaussian":
        return jax.random.normal(key, shape, jnp.float32)
    if initializer == "uniform":
        bound = math.sqrt(3)
        return jax.random.uniform(key, shape, jnp.float32, minval=-bound, maxval=bound)
    key_sign, key_tail = jax.random.split(key)
    # By the inverse of the distribution, in place of Algorithm 3's rejection, whose loop has no static length; never 0,
    # whose quantile is infinite.
    tail = jax.random.uniform(key_tail, shape, jnp.float32, minval=jnp.finfo(jnp.float32).tiny, maxval=_TAIL)
    magnitude = -jax.scipy.special.ndtri(tail) * jnp.float32(_TAIL_VARIANCE**-0.5)
    return magnitude * jax.random.rademacher(key_sign, shape, jnp.float32)
