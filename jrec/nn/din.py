"""DIN (Zhou et al. 2018, arXiv 1706.06978): a history's items count by how much they have to do with the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.nn.calibration import Calibration
from jrec.nn.dense_encoding import Boundaries, encoded_width, piecewise_linear
from jrec.nn.embeddings import EmbeddingCollection
from jrec.nn.mlp import MLP
from jrec.nn.multi_task import MultiTaskConfig, MultiTaskHeads
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.types import Bags


class TargetAttention(nnx.Module):
    """A history's sum, in which each item's weight says how much it has to do with the target (DIN, section 4.3).

    The weight is an MLP's over the item, the target, their difference and their product. It is no softmax's unless
    ``normalized``: the sum of weights is how strong the interest is, which the paper keeps.

    Args:
      dim: Elements of a vector.
      mlp: Widths of the hidden layers.
      normalized: Whether the weights of a history sum to 1.
      dtype: The dtype of the computation; parameters are float32.
      rngs: Its ``params`` stream initializes the parameters.
    """

    def __init__(self, dim: int, mlp: Sequence[int], *, normalized: bool, dtype: str, rngs: nnx.Rngs):
        self.normalized = normalized
        self.mlp = MLP((4 * dim, *mlp, 1), activate_last=False, dtype=dtype, rngs=rngs)

    def __call__(self, target: jax.Array, history: jax.Array, present: jax.Array) -> jax.Array:
        """(batch, dim), zeros for an empty history.

        Args:
          target: (batch, dim).
          history: (batch, length, dim).
          present: (batch, length) bool, which places hold an item.
        """
        batch, length, dim = history.shape
        each = jnp.broadcast_to(target[:, None, :], history.shape)
        pairs = jnp.concatenate([history, each, history - each, history * each], axis=2)
        weights = self.mlp(pairs.reshape(batch * length, 4 * dim)).reshape(batch, length)
        if self.normalized:
            weights = jax.nn.softmax(jnp.where(present, weights, jnp.finfo(weights.dtype).min), axis=1)
        return jnp.einsum("bl,bld->bd", jnp.where(present, weights, 0), history)


class DIN(nnx.Module):
    """Deep interest network: the vectors of all features, and of the histories what concerns the target, into an MLP.

    Items of several features, such as a shop's item and its category, are one vector side by side, as in the paper.
    Layers have ReLU in place of the paper's Dice.

    Args:
      layout: The layout of the embedding tables; histories have pooling "none".
      histories: The feature with a history's items, by the target's feature of the same table.
      num_dense: Dense features of an example.
      bottom_mlp: Layer sizes over the dense features; empty for the features as they are.
      attention_mlp: Hidden layer sizes of the weights (``TargetAttention``).
      top_mlp: Layer sizes after everything side by side; the last is 1, the logit.
      normalized: Whether a history's weights sum to 1.
      compute_dtype: The dtype of the computation; parameters are float32.
      dropout: The rate of dropout after the hidden layers of the bottom and top MLPs, in training.
      batch_norm: Whether these layers have BatchNorm before their ReLU.
      dense_boundaries: The boundaries of each dense feature's pieces; see ``jrec.nn.DLRMConfig``.
      calibrated: Whether a scale and a shift of the logit apply in eval mode.
      multi_task: Heads for several tasks in place of the top MLP; logits are then a dictionary by task.
      rngs: Its ``params`` stream initializes everything; dropout needs a ``dropout`` stream, too.
      embeddings: Further arguments of ``jrec.nn.EmbeddingCollection``.

    Raises:
      ValueError: If histories are of unlike lengths, or a target reads another table than its history.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        *,
        histories: Mapping[str, str],
        num_dense: int = 0,
        bottom_mlp: Sequence[int] = (),
        attention_mlp: Sequence[int] = (36,),
        top_mlp: Sequence[int] = (64, 1),
        normalized: bool = False,
        compute_dtype: str = "float32",
        dropout: float = 0.0,
        batch_norm: bool = False,
        dense_boundaries: Boundaries = (),
        calibrated: bool = False,
        multi_task: MultiTaskConfig | None = None,
        rngs: nnx.Rngs,
        **embeddings: Any,
    ):
        _check(layout, histories)
        self.histories, self.boundaries, self.dtype = tuple(histories.items()), dense_boundaries, compute_dtype
        self.embeddings = EmbeddingCollection(layout, rngs=rngs, **embeddings)
        options: dict[str, Any] = {"dtype": compute_dtype, "dropout": dropout, "batch_norm": batch_norm}
        widths = (encoded_width(dense_boundaries, num_dense), *bottom_mlp)
        self.bottom = MLP(widths, activate_last=True, **options, rngs=rngs) if num_dense and bottom_mlp else None
        sizes = {feature.name: feature.vectors * dim for feature, dim in layout.features}
        target = sum(sizes[name] for name in histories)
        self.attention = TargetAttention(target, attention_mlp, normalized=normalized, dtype=compute_dtype, rngs=rngs)
        pooled = sum(size for name, size in sizes.items() if name not in histories.values())  # the target among them
        inputs = (widths[-1] if num_dense else 0) + pooled + target
        tasks = None if multi_task is None else MultiTaskHeads(inputs, multi_task, rngs=rngs)
        top = MLP((inputs, *top_mlp), activate_last=False, **options, rngs=rngs) if tasks is None else None
        self.tasks, self.top = tasks, top
        self.calibration = Calibration() if calibrated else None

    def __call__(self, batch: Batch) -> PyTree[jax.Array]:
        """Logits, (batch,) float32, or a dictionary of them by task."""
        activations, _ = self.embeddings.lookup(batch.bags)
        return self.logits(batch.dense, activations, batch.bags, mask=batch.mask)

    def logits(
        self,
        dense: jax.Array,
        activations: Mapping[str, jax.Array],
        bags: Mapping[str, Bags],
        *,
        mask: jax.Array | None = None,
    ) -> PyTree[jax.Array]:
        """Logits, (batch,) float32 or by task, of dense features (batch, num_dense) and looked-up activations.

        ``mask``, (batch,) float32, is 0 for examples that BatchNorm leaves out; None leaves out none.
        """
        real = None if mask is None else mask > 0
        features = {n: x.astype(self.dtype) for n, x in self.embeddings.features(activations, bags).items()}
        present = self.embeddings.masks(bags)
        targets, histories = zip(*self.histories, strict=True)
        # A step counts where all of its features have an id: half an item would be weighed by what it lacks.
        there = jnp.all(jnp.stack([present[name] for name in histories]), axis=0)
        target = jnp.concatenate([features[name] for name in targets], axis=1)
        history = jnp.concatenate([features[name] for name in histories], axis=2)
        batch = target.shape[0]  # symbolic in an export
        inputs = [x.reshape(batch, -1) for name, x in features.items() if name not in histories]
        inputs.append(self.attention(target, history, there))
        if dense.shape[1]:  # XLA crashes on CPUs when a program of several devices reads an array without elements
            dense = piecewise_linear(dense, self.boundaries).astype(self.dtype)
            inputs.append(dense if self.bottom is None else self.bottom(dense, mask=real))
        x = jnp.concatenate(inputs, axis=1)
        if self.tasks is not None:
            return self.tasks(x)
        assert self.top is not None
        logits = self.top(x, mask=real)[:, 0].astype(jnp.float32)
        return logits if self.calibration is None else self.calibration(logits)


def _check(layout: EmbeddingLayout, histories: Mapping[str, str]) -> None:
    features = {feature.name: feature for feature, _ in layout.features}
    if not histories:
        raise ValueError("histories is empty; name the history of at least one feature of the target")
    if absent := [name for pair in histories.items() for name in pair if name not in features]:
        raise ValueError(f"histories names feature {absent[0]!r}, but the features are {', '.join(features)}")
    for target, history in histories.items():
        if features[target].table != features[history].table:
            raise ValueError(
                f"{target!r} reads table {features[target].table!r} and its history {history!r} table"
                f" {features[history].table!r}; they must share one"
            )
        if features[history].pooling != "none" or features[target].pooling == "none":
            raise ValueError(f"the history {history!r} needs pooling 'none', and its target {target!r} another")
    lengths = {name: features[name].max_length for name in histories.values()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"histories must have one max_length, but they have {lengths}")
