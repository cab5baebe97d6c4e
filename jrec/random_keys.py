"""Arrays of random keys, as streams of random numbers have them, where plain arrays are needed: as their words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def key_implementation(leaf: object) -> str | None:
    """The name of the generator of an array of keys, abstract or not; None of any other array."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    return str(jax.random.key_impl(jnp.zeros((), dtype)))


def over_words(function: Callable[[Any], Any], leaf: object) -> Any:
    """The function of an array; of an array of keys, the keys whose words are the function of its words."""
    if (implementation := key_implementation(leaf)) is None:
        return function(leaf)
    return jax.random.wrap_key_data(function(words(leaf)), impl=implementation)


def words(leaf: Any) -> Any:
    """The words of an array of keys, uint32 of one more axis, with its sharding; any other array as it is."""
    if key_implementation(leaf) is None:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        plain = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf)
