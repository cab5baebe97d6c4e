"""DLRM (Naumov et al. 2019): bottom MLP, embedding tables, feature interaction, top MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jrec.batch import Batch
from jrec.nn.embeddings import EmbeddingCollection
from jrec.nn.interaction import concat_interaction, dot_interaction
from jrec.nn.mlp import MLP
from jrec.nn.tt_stack import TTOptions
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.types import Bags


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    """The dense part of a DLRM.

    Attributes:
      num_dense: Dense features of an example; 0 leaves the bottom MLP out.
      bottom_mlp: Layer sizes after the dense features; the last must be the embedding dim for "dot".
      top_mlp: Layer sizes after the interaction; the last must be 1, the logit.
      interaction: "dot" (pairwise dot products beside the bottom MLP's output) or "concat".
      compute_dtype: The dtype of the MLPs and the interaction; parameters stay float32.
    """

    num_dense: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    interaction: Literal["dot", "concat"] = "dot"
    compute_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.top_mlp or self.top_mlp[-1] != 1:
            raise ValueError(f"top_mlp {list(self.top_mlp)} must end in 1, the logit")
        if self.num_dense and not self.bottom_mlp:
            raise ValueError(f"bottom_mlp is empty, but there are {self.num_dense} dense features")
        if self.interaction not in ("dot", "concat"):
            raise ValueError(f"interaction {self.interaction!r} is unknown; choose dot or concat")


class DLRM(nnx.Module):
    """Deep learning recommendation model: ``model(batch)`` gives one click logit per example.

    A feature of pooling "none" enters the interaction as ``max_length`` vectors, one per position, like ``max_length``
    features of one id that read the same table: so the top MLP tells positions apart. Positions without an id are
    zeros, whose products are zero. A dot interaction of ``n`` vectors has ``n * (n - 1) / 2`` products, including the
    products between the positions of a feature.

    Args:
      config: The dense part's configuration.
      layout: The layout of the embedding tables (``EmbeddingLayout.build``).
      implementation: The implementation of the embedding ops; None for the platform's fastest.
      pad_rows: Whether rows of embedding tables are padded; see ``EmbeddingCollection``.
      tt: Options of the tensor-train tables.
      unique_capacities: How many unique rows of a batch fit, by stack; see ``EmbeddingCollection``.
      key: The key of the initial rows; see ``EmbeddingCollection``. None draws one.
      rngs: Its ``params`` stream initializes everything.

    Raises:
      ValueError: If the interaction cannot join the features' dims.
    """

    def __init__(
        self,
        config: DLRMConfig,
        layout: EmbeddingLayout,
        *,
        implementation: Implementation | None = None,
        pad_rows: bool | None = None,
        tt: TTOptions | None = None,
        unique_capacities: Mapping[str, int] | None = None,
        key: jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.embeddings = EmbeddingCollection(
            layout,
            implementation=implementation,
            pad_rows=pad_rows,
            tt=tt,
            unique_capacities=unique_capacities,
            key=key,
            rngs=rngs,
        )
        dtype = jnp.dtype(config.compute_dtype)
        bottom_sizes = (config.num_dense, *config.bottom_mlp)
        self.bottom = MLP(bottom_sizes, activate_last=True, dtype=dtype, rngs=rngs) if config.num_dense else None
        width = interaction_width(config, layout)
        self.top = MLP((width, *config.top_mlp), activate_last=False, dtype=dtype, rngs=rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        """Logits, (batch,) float32."""
        activations, _ = self.embeddings.lookup(batch.bags)
        return self.logits(batch.dense, activations, batch.bags)

    def logits(self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]) -> jax.Array:
        """Phase two: from dense features (batch, num_dense) and looked-up activations to logits, (batch,) float32."""
        dtype = jnp.dtype(self.config.compute_dtype)
        groups = [g.astype(dtype) for g in self.embeddings.vectors(activations, bags)]
        bottom = None if self.bottom is None else self.bottom(dense.astype(dtype))
        if self.config.interaction == "dot":
            vectors = groups if bottom is None else [bottom[:, None, :], *groups]
            crossed = dot_interaction(jnp.concatenate(vectors, axis=1))
            parts = [crossed] if bottom is None else [bottom, crossed]
        else:
            parts = [concat_interaction(g) for g in groups]
            parts = parts if bottom is None else [bottom, *parts]
        return self.top(jnp.concatenate(parts, axis=1))[:, 0].astype(jnp.float32)


def interaction_width(config: DLRMConfig, layout: EmbeddingLayout) -> int:
    """Inputs of the top MLP.

    Raises:
      ValueError: On dims that a dot interaction cannot join.
    """
    bottom = config.bottom_mlp[-1] if config.num_dense else 0
    if config.interaction == "concat":
        return bottom + sum(feature.vectors * dim for feature, dim in layout.features)
    if len(widths := {dim for _, dim in layout.features} | ({bottom} if bottom else set())) > 1:
        raise ValueError(
            f"a dot interaction needs one dim for all features and the last bottom layer, but they are"
            f" {sorted(widths)}; give all tables the dim of the last bottom layer, or use interaction 'concat'"
        )
    count = sum(feature.vectors for feature, _ in layout.features) + bool(bottom)
    return bottom + count * (count - 1) // 2
