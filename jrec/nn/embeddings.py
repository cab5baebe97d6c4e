"""The embedding tables of a model: one stacked array per (dim, dtype), in a Variable type of their own."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jrec.ops.dispatch import Implementation
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.lookup import Residuals, lookup
from jrec.ops.row_init import init_rows
from jrec.ops.types import Bags
from jrec.pallas.storage import pad, strip


class Table(nnx.Variable):
    """A stack of embedding tables. Not an ``nnx.Param``: dense optimizers and ``nnx.grad`` leave it alone."""


class EmbeddingCollection(nnx.Module):
    """All embedding tables of a model that live whole on the device.

    Every table starts uniform in ±1/sqrt(rows), as in the reference DLRM.

    Args:
      layout: the tables and features.
      implementation: of the embedding ops; None for the platform's fastest.
      pad_rows: whether rows are stored with zeros up to a multiple of 16 bytes, for the widest accesses of a GPU; None
        does so for the Pallas kernels. Activations, gradients and results are those of rows that are not padded.
      rngs: ``params`` of the initial rows.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        *,
        implementation: Implementation | None = None,
        pad_rows: bool | None = None,
        rngs: nnx.Rngs,
    ):
        self.layout = layout
        self.implementation: Implementation | None = implementation
        self.pad_rows = implementation == "pallas" if pad_rows is None else pad_rows
        key = rngs.params()
        stacks = {name: init_stack(stack, key) for name, stack in layout.stacks.items()}
        self.stacks = nnx.Dict({name: Table(pad(rows) if self.pad_rows else rows) for name, rows in stacks.items()})

    def arrays(self) -> dict[str, jax.Array]:
        """The stacks as they are stored: plain arrays, (rows, dim or more) by name; see ``dims``."""
        return {name: table[...] for name, table in self.stacks.items()}

    @property
    def dims(self) -> dict[str, int]:
        """How many elements of a stored row are real, by stack; zeros follow where rows are padded."""
        return {name: stack.dim for name, stack in self.layout.stacks.items()}

    def set_arrays(self, arrays: Mapping[str, jax.Array]) -> None:
        """Replaces the stacks, after ``apply_gradients``."""
        for name, table in self.stacks.items():
            table[...] = arrays[name]

    def lookup(self, bags: Mapping[str, Bags]) -> tuple[dict[str, jax.Array], dict[str, Residuals]]:
        """Phase one: activations (num_bags, dim) by stack, and what their backward pass needs."""
        activations, residuals = lookup(self.arrays(), bags, implementation=self.implementation)
        return {name: strip(rows, self.dims[name]) for name, rows in activations.items()}, residuals

    def features(self, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]) -> dict[str, jax.Array]:
        """Activations by feature: (batch, dim) where pooled, (batch, max_length, dim) where not; see ``masks``."""
        out = {}
        for name, stack in self.layout.stacks.items():
            batch = activations[name].shape[0] // stack.bags_per_example
            for feature in stack.features:
                config = feature.config
                begin = feature.first_bag * batch
                rows = activations[name][begin : begin + config.bags_per_example * batch]
                if config.unpooled:
                    rows = rows.reshape(batch, config.max_length, stack.dim)
                if config.pooling == "max":
                    rows = masked_max(rows, _present(bags[name], begin, batch, config.max_length))
                out[config.name] = rows
        return out

    def masks(self, bags: Mapping[str, Bags]) -> dict[str, jax.Array]:
        """Which positions of each unpooled ("none") feature hold an id, (batch, max_length) bool by feature."""
        out = {}
        for name, stack in self.layout.stacks.items():
            batch = bags[name].num_bags // stack.bags_per_example
            for feature in stack.features:
                if feature.config.pooling == "none":
                    length = feature.config.max_length
                    out[feature.config.name] = _present(bags[name], feature.first_bag * batch, batch, length)
        return out

    def pooled(self, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]) -> list[jax.Array]:
        """Pooled features grouped by stack, (batch, features, dim) each: what interactions take."""
        groups = []
        by_feature: dict[str, jax.Array] | None = None
        for name, stack in self.layout.stacks.items():
            if any(f.config.unpooled for f in stack.features):
                if by_feature is None:
                    by_feature = self.features(activations, bags)
                group = jnp.stack([by_feature[f.config.name] for f in stack.features], axis=1)
            else:
                group = activations[name].reshape(len(stack.features), -1, stack.dim).swapaxes(0, 1)
            groups.append(group)
        return groups


def init_stack(stack: Stack, key: jax.Array) -> jax.Array:
    """(rows, dim) of the stack's dtype, the initial rows of its tables."""

    @jax.jit
    def init(key: jax.Array) -> jax.Array:
        return jnp.concatenate([init_rows(table, key) for table in stack.tables])

    return init(key)


def masked_max(rows: jax.Array, present: jax.Array) -> jax.Array:
    """Elementwise maximum over the present positions: (batch, length, dim), (batch, length) to (batch, dim)."""
    lowest = jnp.asarray(-jnp.inf, rows.dtype)
    highest = jnp.max(jnp.where(present[..., None], rows, lowest), axis=1)
    return jnp.where(jnp.any(present, axis=1)[:, None], highest, jnp.zeros((), rows.dtype))


def _present(bags: Bags, begin: int, batch: int, length: int) -> jax.Array:
    """Which of ``batch * length`` one-id bags from ``begin`` on hold an id, (batch, length) bool."""
    stop = begin + batch * length
    if bags.offsets is None:
        present = bags.ids[begin:stop, 0] >= 0
    else:
        present = bags.offsets[begin + 1 : stop + 1] > bags.offsets[begin:stop]
    return present.reshape(batch, length)
