"""Tensor-train tables as Flax NNX modules: ``TTEmbeddingBag``, which pools, and ``TTEmbed``, as ``nnx.Embed``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jrec.ops.dispatch import Implementation
from jrec.ops.embedding_bag import Combiner
from jrec.ops.tt import TTShape, TTTraffic, tt_embedding_bag, tt_init, tt_svd
from jrec.ops.tt.cost import Contraction
from jrec.ops.tt.decompose import check_cores
from jrec.ops.tt.init import Cores, Initializer


class TTTable(nnx.Module):
    """The cores of a table, and how they are contracted: what ``TTEmbeddingBag`` and ``TTEmbed`` have in common."""

    def __init__(
        self,
        shape: TTShape,
        *,
        initializer: Initializer,
        variance: float | None,
        dtype: DTypeLike,
        contraction: Contraction | None,
        traffic: TTTraffic | None,
        implementation: Implementation | None,
        cores: Sequence[ArrayLike] | None,
        rngs: nnx.Rngs | None,
    ):
        if cores is None:
            if rngs is None:
                raise ValueError(f"a {type(self).__name__} needs rngs to initialize its cores, or cores to start from")
            cores = tt_init(shape, rngs.params(), initializer=initializer, variance=variance, dtype=jnp.dtype(dtype))
        check_cores(cores, shape)
        self.shape = shape
        self.contraction: Contraction | None = contraction
        self.traffic = traffic
        self.implementation: Implementation | None = implementation
        self.cores = nnx.List([nnx.Param(jnp.asarray(core, jnp.dtype(dtype))) for core in cores])

    def arrays(self) -> Cores:
        """The cores as plain arrays."""
        return tuple(core[...] for core in self.cores)

    def _pooled(
        self, ids: jax.Array, offsets: jax.Array | None, weights: jax.Array | None, combiner: Combiner
    ) -> jax.Array:
        return tt_embedding_bag(
            self.arrays(),
            self.shape,
            ids,
            offsets,
            weights=weights,
            combiner=combiner,
            contraction=self.contraction,
            traffic=self.traffic,
            implementation=self.implementation,
        )


class TTEmbeddingBag(TTTable):
    """An embedding bag whose table is a tensor train. In the place of ``nnx.Embed``, which does not pool: ``TTEmbed``.

    Its cores are small, so they are ordinary parameters: ``nnx.Param``, trained by ``nnx.Optimizer`` with any optax
    optimizer, and replicated over devices.

    Args:
      shape: The table's shape, such as ``TTShape.search(rows, dim, ranks=32)``.
      combiner: "sum", "mean", "sqrtn" or "max".
      initializer: How the cores are drawn; see ``tt_init``.
      dtype: The cores' dtype, float32 or bfloat16.
      contraction: See ``tt_embedding_bag``; None for the choice of ``jrec.ops.tt.explain``.
      traffic: What a batch looks up, for that choice; None for what is expected of a click log.
      implementation: The op's implementation; None for the platform's fastest.
      cores: Cores to start from in place of random ones, with shapes ``shape.core_shapes``.
      rngs: Its ``params`` stream initializes the cores; not needed with ``cores``.

    Raises:
      ValueError: Without ``rngs`` and ``cores``, or with cores that do not fit the shape.

    Example:
      >>> bag = TTEmbeddingBag(TTShape.search(1_000_000, 16), combiner="mean", rngs=nnx.Rngs(0))
      >>> bag(jnp.array([[0, 999_999], [5, -1]], jnp.int32)).shape
      (2, 16)
    """

    def __init__(
        self,
        shape: TTShape,
        *,
        combiner: Combiner = "sum",
        initializer: Initializer = "sampled_gaussian",
        dtype: DTypeLike = "float32",
        contraction: Contraction | None = None,
        traffic: TTTraffic | None = None,
        implementation: Implementation | None = None,
        cores: Sequence[ArrayLike] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(
            shape,
            initializer=initializer,
            variance=None,
            dtype=dtype,
            contraction=contraction,
            traffic=traffic,
            implementation=implementation,
            cores=cores,
            rngs=rngs,
        )
        self.combiner: Combiner = combiner

    @staticmethod
    def from_table(
        table: np.ndarray, shape: TTShape, *, relative_error: float | None = None, **options: Any
    ) -> TTEmbeddingBag:
        """The module of a given table, compressed by ``tt_svd``.

        Args:
          table: (rows, dim).
          shape: The factors of rows and dim, and the ranks to use unless ``relative_error`` is given.
          relative_error: Chooses the least ranks that reach it.
          **options: The module's other arguments.

        Warns:
          UserWarning: If the cores have more elements than the table.
        """
        train = tt_svd(table, shape, relative_error=relative_error)
        if train.shape.num_parameters > table.size:
            warnings.warn(
                f"the cores of ranks {list(train.shape.ranks)} have {train.shape.num_parameters:,} elements, but the"
                f" table {table.size:,}: lower the ranks, or keep the table as it is",
                stacklevel=2,
            )
        return TTEmbeddingBag(train.shape, cores=train.cores, **options)

    def __call__(
        self, ids: jax.Array, offsets: jax.Array | None = None, *, weights: jax.Array | None = None
    ) -> jax.Array:
        """(num_bags, dim) float32, or (batch, features, dim); see ``tt_embedding_bag``."""
        return self._pooled(ids, offsets, weights, self.combiner)


class TTEmbed(TTTable):
    """An ``nnx.Embed`` whose table is a tensor train: the same arguments and results, a fraction of the parameters.

    Its cores are ordinary parameters, ``nnx.Param``, trained by ``nnx.Optimizer`` with ``nnx.grad``. Other than
    ``nnx.Embed``, which takes negative ids from the table's end, it gives zeros for them, and outside jit it refuses
    ids past the table; inside jit they give NaN, as there.

    Args:
      num_embeddings: The number of rows.
      features: The elements of a row.
      num_cores: 2, 3 or 4; see ``TTShape.search``.
      ranks: One rank for all bonds, which is lowered where a smaller one represents every table, or one for each.
      dtype: The dtype of the results; None for ``param_dtype``. They are computed in float32.
      param_dtype: The cores' dtype, float32 or bfloat16.
      initializer: How the cores are drawn; see ``tt_init``.
      variance: The variance of the table's elements at the start; None for ``1 / features``, which ``nnx.Embed`` has.
      shape: The table's shape in place of ``num_cores`` and ``ranks``.
      contraction: See ``tt_embedding_bag``.
      traffic: See ``tt_embedding_bag``.
      implementation: The op's implementation; None for the platform's fastest.
      cores: Cores to start from in place of random ones, such as ``tt_svd`` gives.
      rngs: Its ``params`` stream initializes the cores; not needed with ``cores``.

    Raises:
      ValueError: Without ``rngs`` and ``cores``, with a shape or cores of another table, or on ranks that ``TTShape``
        refuses.

    Example:
      >>> embed = TTEmbed(num_embeddings=1_000_000, features=16, rngs=nnx.Rngs(0))
      >>> embed(jnp.array([[0, 999_999, 7], [5, 1, 3]])).shape
      (2, 3, 16)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        num_cores: int = 3,
        ranks: int | Sequence[int] = 32,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        initializer: Initializer = "sampled_gaussian",
        variance: float | None = None,
        shape: TTShape | None = None,
        contraction: Contraction | None = None,
        traffic: TTTraffic | None = None,
        implementation: Implementation | None = None,
        cores: Sequence[ArrayLike] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        if shape is None:
            shape = TTShape.search(num_embeddings, features, num_cores=num_cores, ranks=1)
            # Searched with ranks of 1, since the factors do not depend on them; only then is it known which ranks are
            # too many.
            bounds = shape.max_ranks
            shape = shape.with_ranks([min(ranks, bound) for bound in bounds] if isinstance(ranks, int) else ranks)
        if (shape.rows, shape.dim) != (num_embeddings, features):
            raise ValueError(
                f"the shape is of {shape.rows:,} rows of {shape.dim}, but the table has"
                f" num_embeddings={num_embeddings:,} and features={features}; search a shape for these"
            )
        super().__init__(
            shape,
            initializer=initializer,
            variance=1 / features if variance is None else variance,
            dtype=param_dtype,
            contraction=contraction,
            traffic=traffic,
            implementation=implementation,
            cores=cores,
            rngs=rngs,
        )
        self.num_embeddings, self.features = num_embeddings, features
        self.dtype = jnp.dtype(param_dtype if dtype is None else dtype)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The rows of ids.

        Args:
          inputs: Integers of any type and shape; negative ones are absent.

        Returns:
          (*inputs.shape, features) of ``dtype``; zeros for absent ids.

        Raises:
          ValueError: If the ids are no integers, or, outside jit, one is past the table.
        """
        rows = self._pooled(inputs.reshape(-1), None, None, "sum")
        return rows.reshape(*inputs.shape, self.features).astype(self.dtype)

    def bag(
        self,
        ids: jax.Array,
        offsets: jax.Array | None = None,
        *,
        weights: jax.Array | None = None,
        combiner: Combiner = "sum",
    ) -> jax.Array:
        """Pooled rows, (num_bags, features) float32; see ``tt_embedding_bag``."""
        return self._pooled(ids, offsets, weights, combiner)

    def attend(self, query: jax.Array) -> jax.Array:
        """Products of query vectors with all rows, as logits that share the table's parameters.

        One core after the other is contracted, so that the table is never in memory; the largest array between them has
        ``ranks[-1] * dim_factors[-1] / row_factors[-1]`` times the result's elements.

        Args:
          query: (..., features) float.

        Returns:
          (..., num_embeddings) of ``dtype``, computed in float32.

        Raises:
          ValueError: If the query's last axis is not ``features``.
        """
        if query.ndim < 1 or query.shape[-1] != self.features:
            raise ValueError(f"query must be (..., {self.features}), but is {query.dtype}{list(query.shape)}")
        shape, queries = self.shape, math.prod(query.shape[:-1])
        products = query.astype(jnp.float32).reshape(queries, 1, 1, self.features)  # query, row prefix, rank, rest
        for core, (row_factor, rank, dim_factor, next_rank) in zip(self.arrays(), shape.core_shapes, strict=True):
            rows, rest = products.shape[1], products.shape[3] // dim_factor
            products = products.reshape(queries, rows, rank, dim_factor, rest)
            products = jnp.einsum("qirnd,mrns->qimsd", products, core.astype(jnp.float32), precision="highest")
            products = products.reshape(queries, rows * row_factor, next_rank, rest)
        logits = products.reshape(queries, shape.capacity)[:, : shape.rows]
        return logits.reshape(*query.shape[:-1], shape.rows).astype(self.dtype)
