"""Embedding layers whose gradients are rows, in the manner of ``nnx.Embed`` and of torch's ``EmbeddingBag``."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx.nn.linear import default_embed_init
from jax.typing import DTypeLike
from jaxtyping import PyTree

import jrec.optax
from jrec.ops.dispatch import Implementation
from jrec.ops.embedding_bag import Combiner, check_combiner, embedding_bag
from jrec.ops.layout import TableConfig
from jrec.ops.row_init import init_stack_rows
from jrec.ops.table import Table
from jrec.ops.types import Bags


def uniform_rows(bound: float | None = None) -> Callable[..., jax.Array]:
    """An initializer of huge tables: uniform within ± ``bound``, made a few megabytes at a time.

    Other initializers hold the random bits of the whole table beside it.

    Args:
      bound: The bound; None for 1 / sqrt(rows).
    """

    def make(
        key: jax.Array, shape: tuple[int, int], dtype: DTypeLike = jnp.float32, out_sharding: object = None
    ) -> jax.Array:
        del out_sharding
        rows, dim = shape
        table = TableConfig(name="rows", rows=rows, dim=dim, dtype=jnp.dtype(dtype).name, initial_bound=bound)
        return jax.jit(lambda key: init_stack_rows([table], [0], key, rows))(key)

    return make


class Embed(nnx.Module):
    """``nnx.Embed`` with row gradients: ``nnx.grad`` makes nothing of the table's size, and a step touches read rows.

    Two things differ: a negative id is no id, whose vector is zero, and vectors are float32 unless ``dtype`` is given.

    Args:
      num_embeddings: Rows of the table.
      features: Elements of a row.
      dtype: The dtype of the vectors; None for float32.
      param_dtype: The dtype of the stored rows, float32, bfloat16 or float16.
      embedding_init: Makes the first rows, from a key, shape and dtype; None takes the default of ``nnx.Embed``, which
        holds the table about three times over while it makes it (``uniform_rows`` does not).
      capacity: As of ``jrec.Table``.
      implementation: As of ``jrec.Table``.
      rngs: The key of the first rows is ``rngs.params()``, as in ``nnx.Embed``.

    Attributes:
      embedding: The table, a ``nnx.Param`` of a ``jrec.Table``.

    Example:
      >>> layer = Embed(num_embeddings=5, features=3, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[0, 1, 2], [4, 4, -1]])).shape
      (2, 3, 3)
      >>> gradients = nnx.grad(lambda layer: jnp.sum(layer(jnp.array([4, 1, 4]))))(layer)
      >>> gradients.embedding.get_value().rows()[0].tolist()
      [1, 4, 5]
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        embedding_init: Callable[..., jax.Array] | None = None,
        capacity: int | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        rows = (embedding_init or default_embed_init)(rngs.params(), (num_embeddings, features), param_dtype)
        self.embedding = nnx.Param(Table(rows, capacity=capacity, implementation=implementation))
        self.num_embeddings, self.features = num_embeddings, features
        self.dtype, self.param_dtype = dtype or jnp.float32, param_dtype

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The rows of ids of any shape, (*shape, features); an id past the table gives NaN."""
        vectors = embedding_bag(self.embedding.get_value(), inputs.reshape(-1))
        return vectors.reshape(*inputs.shape, self.features).astype(self.dtype)

    def attend(self, query: jax.Array) -> jax.Array:
        """Products of vectors, (*shape, features), with all rows, (*shape, num_embeddings), as of an output softmax.

        Its gradient has all rows, which takes as much memory as the table.
        """
        table = self.embedding.get_value().array
        return query.astype(self.dtype) @ table.T.astype(self.dtype)


class EmbeddingBag(nnx.Module):
    """Pooled rows of bags of ids with row gradients (``jrec.embedding_bag``), as torch's ``EmbeddingBag(sparse=True)``.

    Args:
      num_embeddings: Rows of the table.
      features: Elements of a row.
      combiner: "sum", "mean", "sqrtn" or "max".
      param_dtype, embedding_init, capacity, implementation, rngs: As of ``Embed``.

    Attributes:
      embedding: The table, a ``nnx.Param`` of a ``jrec.Table``.

    Raises:
      ValueError: On an unknown combiner.

    Example:
      >>> layer = EmbeddingBag(num_embeddings=5, features=3, combiner="mean", rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[0, 1], [4, -1]])).shape
      (2, 3)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        combiner: Combiner = "sum",
        param_dtype: DTypeLike = jnp.float32,
        embedding_init: Callable[..., jax.Array] | None = None,
        capacity: int | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        check_combiner(combiner)
        rows = (embedding_init or default_embed_init)(rngs.params(), (num_embeddings, features), param_dtype)
        self.embedding = nnx.Param(Table(rows, capacity=capacity, implementation=implementation))
        self.num_embeddings, self.features = num_embeddings, features
        self.combiner: Combiner = combiner

    def __call__(
        self, ids: jax.Array | Bags, offsets: jax.Array | None = None, *, weights: jax.Array | None = None
    ) -> jax.Array:
        """(num_bags, features) float32; see ``jrec.embedding_bag`` for the forms of ids."""
        table = self.embedding.get_value()
        return embedding_bag(table, ids, offsets, weights=weights, combiner=self.combiner)


class Optimizer(nnx.Optimizer):
    """``nnx.Optimizer`` of modules in which some parameters are a ``jrec.Table``.

    Args:
      model: The module.
      tx: A transformation, such as ``jrec.optax.partition(rows=jrec.optax.adagrad(0.1), dense=optax.adam(1e-3))``.
      wrt: Which of the module's variables it steps, as in ``nnx.Optimizer``.

    Example:
      >>> model = Embed(num_embeddings=5, features=3, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, jrec.optax.adagrad(0.1), wrt=nnx.Param)
      >>> optimizer.update(model, nnx.grad(lambda model: jnp.sum(model(jnp.array([4, 1, 4]))))(model))
    """

    def __init__(self, model: nnx.Module, tx: optax.GradientTransformation, *, wrt: nnx.filterlib.Filter):
        super().__init__(model, tx, wrt=wrt)

    def update(self, model: nnx.Module, grads: PyTree, /, **kwargs: object) -> None:
        """One step, in place on ``model``.

        Args:
          model: The module.
          grads: What ``nnx.grad`` gave for it.
          **kwargs: Further arguments of the transformation.
        """
        params, gradients, state = (
            nnx.as_pure(tree) for tree in (nnx.state(model, self.wrt), nnx.state(grads, self.wrt), self.opt_state)
        )
        updates, new_state = self.tx.update(gradients, state, params, **nnx.as_pure(kwargs))
        nnx.update(model, jrec.optax.apply_updates(params, updates))
        nnx.update(self.opt_state, nnx.state(new_state))
        self.step[...] += 1
