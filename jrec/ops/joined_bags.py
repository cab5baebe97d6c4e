"""The bags of several lookups of one table, or of a batch of lookups, as the bags of one lookup."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jrec.ops.types import Bags


def merged(bags: Bags) -> Bags:
    """The bags of several batches, which are the leading axis, as the bags of one, without a cast."""
    if bags.offsets is None:
        ids, weights = (None if x is None else x.reshape(-1, x.shape[-1]) for x in (bags.ids, bags.weights))
        assert ids is not None
        return Bags(ids=ids, weights=weights)
    bags = dataclasses.replace(bags, cast=None)
    return joined([jax.tree.map(lambda leaf, i=i: leaf[i], bags) for i in range(len(bags.ids))])


def joined(several: Sequence[Bags]) -> Bags:
    """The bags of several lookups of a table, one after the other; without a cast, if they are not a single one.

    They stay padded where all are, and of one length. Lookups without weights have weights of one beside others.
    """
    if len(several) == 1:
        return several[0]
    weights = None
    if any(bags.weights is not None for bags in several):
        ones = (jnp.ones(bags.ids.shape, jnp.float32) if bags.weights is None else bags.weights for bags in several)
        weights = [array.reshape(-1) for array in ones]
    if all(bags.offsets is None for bags in several) and len({bags.ids.shape[1] for bags in several}) == 1:
        ids = jnp.concatenate([bags.ids for bags in several])
        return Bags(ids=ids, weights=None if weights is None else jnp.concatenate(weights).reshape(ids.shape))
    begins = np.cumsum([0, *(bags.capacity for bags in several)])
    pairs = [_ragged(bags, int(begin)) for bags, begin in zip(several, begins, strict=False)]
    return Bags(
        ids=jnp.concatenate([ids for ids, _ in pairs]),
        offsets=jnp.concatenate([*(offsets for _, offsets in pairs), jnp.full((1,), begins[-1], jnp.int32)]),
        weights=None if weights is None else jnp.concatenate(weights),
    )


def _ragged(bags: Bags, begin: int) -> tuple[jax.Array, jax.Array]:
    """Ids, (capacity,), and where each bag begins, (num_bags,), of bags whose first lookup is number ``begin``."""
    ids, offsets = bags.ids.reshape(-1), bags.offsets
    if offsets is None:
        return ids, jnp.arange(bags.num_bags, dtype=jnp.int32) * jnp.int32(bags.ids.shape[1]) + jnp.int32(begin)
    # What lies before the first bag or past the last one becomes part of a bag: as no id.
    place = jnp.arange(bags.capacity)
    ids = jnp.where((place >= offsets[0]) & (place < offsets[-1]), ids, -1)
    return ids, offsets[:-1] + jnp.int32(begin)
