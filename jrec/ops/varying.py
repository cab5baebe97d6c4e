"""Constants inside ``jax.shard_map`` that vary over a mesh's axes, as the arrays that they meet in a loop do."""

from __future__ import annotations

import jax
from jaxtyping import PyTree


def varying_axes(*trees: PyTree) -> frozenset[str]:
    """The mesh axes over which any array of some pytrees varies; none outside ``jax.shard_map``."""
    return frozenset[str]().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(trees)))


def varying_like[T](tree: T, *operands: PyTree) -> T:
    """A pytree whose arrays vary over the axes that ``operands`` vary over, too, such as a loop's first value.

    With ``check_vma``, the default of ``jax.shard_map``, a loop must end with the type that it began with.
    """
    axes = varying_axes(operands)

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(leaf).manual_axis_type.varying))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)
