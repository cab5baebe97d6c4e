"""The dense part of a model as one program of looked-up vectors: StableHLO by ``jax.export``, of any batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from jrec.ops.layout import EmbeddingLayout, FeatureConfig

PLATFORMS = ("cpu", "cuda")


class _Vectors:
    """Stands for a model's ``EmbeddingCollection`` where vectors were looked up elsewhere, by feature."""

    def __init__(self, layout: EmbeddingLayout, vectors: Mapping[str, jax.Array], masks: Mapping[str, jax.Array]):
        self.layout, self._vectors, self._masks = layout, vectors, masks

    def vectors(self, activations: Any, bags: Any) -> list[jax.Array]:
        """See ``EmbeddingCollection.vectors``."""
        del activations, bags
        rows = [self._vectors[name] for name in self.layout.order]
        return [x if x.ndim == 3 else x[:, None] for x in rows]

    def features(self, activations: Any, bags: Any) -> dict[str, jax.Array]:
        """See ``EmbeddingCollection.features``."""
        del activations, bags
        return dict(self._vectors)

    def masks(self, bags: Any) -> dict[str, jax.Array]:
        """See ``EmbeddingCollection.masks``."""
        del bags
        return dict(self._masks)


class _Served:
    """A model whose embeddings are ``_Vectors``; everything else is the model's."""

    def __init__(self, model: Any, embeddings: _Vectors):
        self._model, self.embeddings = model, embeddings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def dense_program(model: Any, layout: EmbeddingLayout) -> Any:
    """The function ``dense, vectors, masks -> logits`` of a model.

    ``dense`` is (batch, num_dense) float32, ``vectors`` float32 by feature: (batch, dim), of pooling "none"
    (batch, max_length, dim), zeros where a position holds no id; ``masks`` (batch, max_length) bool by feature of
    pooling "none". Logits are (batch,) float32.
    """

    def logits(dense: jax.Array, vectors: Mapping[str, jax.Array], masks: Mapping[str, jax.Array]) -> jax.Array:
        served = _Served(model, _Vectors(layout, vectors, masks))
        return type(model).logits(served, dense, {}, {})

    return logits


def export_program(model: Any, layout: EmbeddingLayout, num_dense: int, platforms: Sequence[str] = PLATFORMS) -> bytes:
    """``dense_program`` as ``jax.export`` serializes it, with the model's parameters inside.

    Args:
      model: A trained model; its embeddings are not used.
      layout: Its tables and features.
      num_dense: Dense features of an example.
      platforms: What it can run on.
    """
    exported = export.export(jax.jit(dense_program(model, layout)), platforms=tuple(platforms))(
        *symbolic_inputs(layout, num_dense)
    )
    return bytes(exported.serialize())


def symbolic_inputs(layout: EmbeddingLayout, num_dense: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Shapes of the program's inputs for a batch of any size."""
    (batch,) = export.symbolic_shape("batch")

    def shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *sizes), dtype)

    def of(feature: FeatureConfig, dim: int) -> jax.ShapeDtypeStruct:
        sizes = (feature.max_length, dim) if feature.pooling == "none" else (dim,)
        return shape(jnp.float32, *sizes)

    vectors = {feature.name: of(feature, dim) for feature, dim in layout.features}
    masks = {f.name: shape(jnp.bool_, f.max_length) for f, _ in layout.features if f.pooling == "none"}
    return shape(jnp.float32, num_dense), vectors, masks
