"""Two-tower retrieval (Yi et al. 2019): a vector of a user and one of an item, whose product scores the pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jrec.batch import Batch
from jrec.nn.embeddings import EmbeddingCollection
from jrec.nn.losses import in_batch_softmax, mean_of_positions
from jrec.nn.mlp import MLP, check_rate
from jrec.nn.optimizer import Loss
from jrec.nn.sequences import unit
from jrec.nn.tt_stack import TTOptions
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.types import Bags


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerConfig:
    """What each tower reads, and its layers.

    Attributes:
      user, item: The categorical features of each tower, pooled ones.
      user_dense, item_dense: How many dense features each tower reads; a batch has the user's first.
      user_mlp, item_mlp: Widths of each tower's layers. ReLU follows all but the last, which makes the vector and is
        as wide in both.
      dropout: The rate of dropout in training after each layer but the last.
      compute_dtype: The dtype of the layers' computation; parameters stay float32.

    Raises:
      ValueError: If a tower reads nothing or has no layers, both read one feature, or their vectors differ in size.
    """

    user: tuple[str, ...]
    item: tuple[str, ...]
    user_dense: int = 0
    item_dense: int = 0
    user_mlp: tuple[int, ...] = (128, 64)
    item_mlp: tuple[int, ...] = (128, 64)
    dropout: float = 0.0
    compute_dtype: DTypeLike = "float32"

    def __post_init__(self) -> None:
        check_rate(self.dropout)
        for side in ("user", "item"):
            if not getattr(self, side) and not getattr(self, f"{side}_dense"):
                raise ValueError(
                    f"the {side} tower reads no feature; name some in {side}, or count them in {side}_dense"
                )
        names = [*self.user, *self.item]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"feature {repeated[0]!r} is named twice in user {self.user} and item {self.item}")
        if not self.user_mlp or not self.item_mlp or self.user_mlp[-1] != self.item_mlp[-1]:
            raise ValueError(
                f"user_mlp is {list(self.user_mlp)} and item_mlp {list(self.item_mlp)}; both need a layer, and last"
                " layers of one width, whose products are the scores"
            )


class _Tower(nnx.Module):
    """Vectors of length one, of some features."""

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...], config: TwoTowerConfig, *, rngs: nnx.Rngs):
        self.names = names
        self.mlp = MLP(sizes, activate_last=False, dtype=config.compute_dtype, dropout=config.dropout, rngs=rngs)

    def __call__(self, dense: jax.Array, features: Mapping[str, jax.Array]) -> jax.Array:
        """(batch, dim) float32 of (batch, n) dense features and (batch, dim) vectors by feature."""
        inputs = jnp.concatenate([dense, *(features[name] for name in self.names)], axis=1)
        return unit(self.mlp(inputs).astype(jnp.float32))


class TwoTower(nnx.Module):
    """A tower for users and one for items, trained by ``two_tower_loss``; each has its own features.

    A tower's MLP reads its dense features and the vectors of its categorical ones side by side; what comes out has
    length one.

    Args:
      layout: The layout of the embedding tables, with every feature of the configuration and no other.
      config: The towers.
      implementation: The implementation of the embedding ops; None for the platform's fastest.
      tt: Options of tensor-train tables.
      key: The key of the initial rows; see ``EmbeddingCollection``. None draws one.
      rngs: Its ``params`` and ``dropout`` streams.

    Raises:
      ValueError: If the layout has other features, or one of pooling "none".
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        config: TwoTowerConfig,
        *,
        implementation: Implementation | None = None,
        tt: TTOptions | None = None,
        key: jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        dims = {feature.name: dim for feature, dim in layout.features}
        if dims.keys() != {*config.user, *config.item}:
            raise ValueError(
                f"the layout has the features {', '.join(sorted(dims))}, but the towers read"
                f" {', '.join(sorted({*config.user, *config.item}))}; both must be the same"
            )
        if lists := [feature.name for feature, _ in layout.features if feature.pooling == "none"]:
            raise ValueError(f"feature {lists[0]!r} has pooling 'none', but a tower reads one vector of each; pool it")
        self.embeddings = EmbeddingCollection(layout, implementation=implementation, tt=tt, key=key, rngs=rngs)
        self.user_dense = config.user_dense

        def tower(names: tuple[str, ...], num_dense: int, mlp: tuple[int, ...]) -> _Tower:
            return _Tower(names, (num_dense + sum(dims[name] for name in names), *mlp), config, rngs=rngs)

        self.user = tower(config.user, config.user_dense, config.user_mlp)
        self.item = tower(config.item, config.item_dense, config.item_mlp)

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]
    ) -> dict[str, jax.Array]:
        """Vectors of length one, float32, whose products are scores.

        Returns:
          "user" and "item", (batch, dim) each.
        """
        features = self.embeddings.features(activations, bags)
        return {
            "user": self.user(dense[:, : self.user_dense], features),
            "item": self.item(dense[:, self.user_dense :], features),
        }

    def for_users(self) -> UserTower:
        """A module of only the user tower, with the same parameters."""
        return UserTower(self.embeddings, self.user)


class UserTower(nnx.Module):
    """The user tower of a ``TwoTower``, which answers requests where the items' vectors were made before.

    Args:
      embeddings: The model's embeddings.
      user: The model's user tower.
    """

    def __init__(self, embeddings: EmbeddingCollection, user: _Tower):
        self.embeddings, self.user = embeddings, user

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]
    ) -> dict[str, jax.Array]:
        """Only "user" of ``TwoTower.logits``; ``dense`` has only the user's features."""
        return {"user": self.user(dense, self.embeddings.features(activations, bags))}


def two_tower_loss(item: str, *, log_q: str = "", by_label: bool = False, temperature: float = 0.05) -> Loss:
    """The loss of ``TwoTower``: each line's own item against the items of the whole batch, on all devices.

    It is the mean of ``in_batch_softmax`` over the batch's lines, the same on any number of devices.

    Args:
      item: The extra of batches that tells items apart, such as their rows: (batch,) integers. Lines of the same item
        are no negatives of each other.
      log_q: The extra with the logarithm of the share that each line's item has in the log, (batch,) float32, which is
        taken off its scores; "" for none.
      by_label: Whether only lines with label 1 are to find their item, over which the mean then is; the others' items
        are only negatives.
      temperature: What products of vectors are divided by.

    Returns:
      A loss of batches with these ``extras``.

    Raises:
      ValueError: If the temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, but must be above 0")

    def loss(outputs: dict[str, jax.Array], batch: Batch) -> jax.Array:
        losses = in_batch_softmax(
            outputs["user"],
            outputs["item"],
            ids=batch.extras[item],
            mask=batch.mask,
            log_q=batch.extras[log_q] if log_q else None,
            temperature=temperature,
        )
        positive = batch.labels > 0 if by_label else jnp.ones(batch.mask.shape, bool)
        return mean_of_positions(losses[:, None], positive[:, None], batch.mask)

    return loss
