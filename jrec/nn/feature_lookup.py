"""One feature of a collection looked up by itself, as for serving, without ids for the other features."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jrec.ops.embedding_bag import normalized_weights
from jrec.ops.forms import FormedBags, formed
from jrec.ops.gather_reduce import lookup_of_table
from jrec.ops.layout import FeatureConfig, Stack, StackedFeature
from jrec.ops.storage import strip
from jrec.ops.types import Bags

if TYPE_CHECKING:
    from jrec.nn.embeddings import EmbeddingCollection

_NO_ROW = 2**31 - 1  # past every stack: its bag is NaN


def lookup_feature(collection: EmbeddingCollection, name: str, ids: object, weights: object = None) -> jax.Array:
    """See ``EmbeddingCollection.lookup_feature``."""
    places = collection.layout.places.get(name)
    if places is None:
        raise ValueError(
            f"there is no feature {name!r}; the features are {', '.join(sorted(collection.layout.places))}"
        )
    if elsewhere := [stack.name for stack, _ in places if stack.name not in (*collection.stacks, *collection.tt)]:
        raise ValueError(
            f"rows of feature {name!r} are in host memory or on several devices, stack(s) {', '.join(elsewhere)}; look"
            " it up in a step that has their stores (jrec.nn.step)"
        )
    (stack, number), *_ = places
    feature = stack.features[number]
    if feature.table_rows > _NO_ROW:
        raise ValueError(f"table {feature.config.table!r} has {feature.table_rows:,} rows, which int32 does not number")
    bags = formed(ids, None, weights, feature.table_rows)
    one_by_one = _one_by_one(bags, feature.config)
    pooled = functools.reduce(
        jnp.add, [_rows_in(collection, stack, stack.features[number], one_by_one) for stack, number in places]
    )
    if not feature.config.unpooled:
        return bags.in_form(pooled)
    rows = pooled.reshape(*bags.ids.shape, stack.dim)
    if feature.config.pooling == "none":
        return rows.reshape(*bags.axes, *rows.shape[1:])
    return bags.in_form(masked_max(rows, bags.ids >= 0))


def _one_by_one(bags: FormedBags, config: FeatureConfig) -> Bags:
    """Bags to sum: with the weights of a mean, or of one id each for what is not summed."""
    ids, weights = bags.ids, bags.weights
    if config.unpooled:
        return Bags(ids=ids.reshape(-1, 1), weights=None if weights is None else weights.reshape(-1, 1))
    if config.pooling != "sum":
        weights = normalized_weights(ids, None, weights, config.pooling)
    return Bags(ids=ids, weights=weights)


def _rows_in(collection: EmbeddingCollection, stack: Stack, feature: StackedFeature, bags: Bags) -> jax.Array:
    """(num_bags, dim): what one stack, which may hold only a part of the table, adds to the bags."""
    rows = bags.ids - jnp.int32(feature.first_row)
    here = (rows >= 0) & (rows < feature.rows) & (bags.ids >= 0)
    addresses = jnp.where(here, rows + jnp.int32(feature.base), jnp.int32(-1))
    bags = Bags(ids=jnp.where(bags.ids < feature.table_rows, addresses, jnp.int32(_NO_ROW)), weights=bags.weights)
    if stack.name in collection.stacks:
        table = collection.stacks[stack.name].get_value()
        pooled = lookup_of_table(table, bags.ids, weights=bags.weights, implementation=collection.implementation)
        return strip(pooled, stack.dim)
    store = collection.tt[stack.name].store({})
    pooled, _ = store.lookup(bags, collection.contexts()[stack.name]).finish(None)
    return pooled


def masked_max(rows: jax.Array, present: jax.Array) -> jax.Array:
    """Elementwise maximum over the present positions: (batch, length, dim), (batch, length) to (batch, dim)."""
    lowest = jnp.asarray(-jnp.inf, rows.dtype)
    highest = jnp.max(jnp.where(present[..., None], rows, lowest), axis=1)
    return jnp.where(jnp.any(present, axis=1)[:, None], highest, jnp.zeros((), rows.dtype))
