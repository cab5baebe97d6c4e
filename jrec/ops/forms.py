"""The forms in which ids come to the public doors, and the two that ops compute with: padded and ragged int32 bags."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jrec.ops.doors import check_bags
from jrec.ops.gather_reduce import check_segments
from jrec.ops.ids import check_ids
from jrec.ops.types import Bags

_HIGHEST = 2**31 - 1  # past every table, which has at most 2^31 - 1 rows


class FormedBags(NamedTuple):
    """Padded or ragged int32 bags, and the axes that their results have in place of (num_bags,)."""

    ids: jax.Array
    offsets: jax.Array | None
    weights: jax.Array | None
    axes: tuple[int, ...]

    def in_form(self, pooled: jax.Array) -> jax.Array:
        """(num_bags, dim) results in the form of the ids."""
        return pooled.reshape(*self.axes, pooled.shape[1]) if len(self.axes) > 1 else pooled


def formed(ids: object, offsets: object, weights: object, num_rows: int) -> FormedBags:
    """Bags from ids of any accepted form.

    Args:
      ids: NumPy or JAX integers of any width. With ``offsets`` (capacity,); without, (num_bags,) for one id a bag,
        (num_bags, length), or (batch, features, .., length). Negative ids are absent.
      offsets: (num_bags + 1,) integers, or None.
      weights: float32 of the shape of ``ids``, or None.
      num_rows: The table's rows.

    Raises:
      ValueError: On other shapes or dtypes, or, outside jit, malformed offsets or an id past the table.
    """
    numbers = _array(ids)
    narrow, factors = narrowed(numbers), None if weights is None else _array(weights)
    bounds = None if offsets is None else narrowed(_array(offsets), name="offsets")
    axes = (narrow.shape[0],) if narrow.ndim == 1 else narrow.shape[:-1]
    if bounds is None and narrow.ndim not in (0, 2):
        width = 1 if narrow.ndim == 1 else narrow.shape[-1]
        if factors is not None:
            if factors.shape != narrow.shape:
                raise ValueError(f"weights must have the ids' shape {narrow.shape}, but have shape {factors.shape}")
            factors = factors.reshape(math.prod(axes), width)
        narrow = narrow.reshape(math.prod(axes), width)
    check_segments(narrow, bounds, factors)
    if not isinstance(numbers, Tracer) and not isinstance(offsets, Tracer):
        _check_rows(np.asarray(numbers), bounds, num_rows)
    return FormedBags(narrow, bounds, factors, axes if bounds is None else (bounds.shape[0] - 1,))


def formed_bags(bags: Bags) -> Bags:
    """Bags whose ids and offsets are int32, (num_bags, 1) where they were (num_bags,) without offsets.

    Raises:
      ValueError: On what are no bags, or ids that are no integers.
    """
    check_bags(bags)
    ids = narrowed(_array(bags.ids))
    offsets = None if bags.offsets is None else narrowed(_array(bags.offsets), name="offsets")
    weights = bags.weights
    if offsets is None and ids.ndim == 1:
        ids = ids[:, None]
        weights = weights[:, None] if weights is not None and weights.ndim == 1 else weights
    return dataclasses.replace(bags, ids=ids, offsets=offsets, weights=weights)


def narrowed[A: (jax.Array, np.ndarray)](values: A, *, name: str = "ids") -> A:
    """Integers as int32, NumPy's on the host and JAX's on the device; those that do not fit never become other rows.

    Args:
      values: Integers of any width.
      name: What they are called in messages.

    Returns:
      int32 of their shape: -1 for what lies below int32, 2^31 - 1, which no table has, for what lies above.

    Raises:
      ValueError: If they are no integers.
    """
    dtype = values.dtype
    if dtype == jnp.int32:
        return values
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, but are {dtype}; convert them, such as by {name}.astype('int32')")
    module: Any = np if isinstance(values, np.ndarray) else jnp
    limits = jnp.iinfo(dtype)
    # Clamped in their own type before the cast, which would wrap: 2^32 + 3 must not become row 3.
    if limits.max > _HIGHEST:
        values = module.minimum(values, np.asarray(_HIGHEST, dtype))
    if limits.min < -_HIGHEST:
        values = module.maximum(values, np.asarray(-1, dtype))
    return values.astype(np.int32)


def _array(values: object) -> Any:
    return values if hasattr(values, "dtype") and hasattr(values, "ndim") else np.asarray(values)


def _check_rows(ids: np.ndarray, offsets: ArrayLike | None, num_rows: int) -> None:
    """Raises ValueError on the largest id in a bag where it is no row of the table."""
    # NumPy, since jnp would trace even concrete arrays inside another function's jit.
    in_bags = ids if offsets is None else ids[: int(np.asarray(offsets)[-1])]
    if in_bags.size:
        check_ids(in_bags, num_rows)
