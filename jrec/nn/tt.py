"""A tensor-train table as a Flax NNX module."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jrec.ops.dispatch import Implementation
from jrec.ops.embedding_bag import Combiner
from jrec.ops.tt import TTShape, TTTraffic, tt_embedding_bag, tt_init, tt_svd
from jrec.ops.tt.cost import Contraction
from jrec.ops.tt.decompose import check_cores
from jrec.ops.tt.init import Cores, Initializer


class TTEmbeddingBag(nnx.Module):
    """An embedding bag whose table is a tensor train: a drop-in for an embedding table that needs little memory.

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
        cores: Sequence[Any] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        if cores is None:
            if rngs is None:
                raise ValueError("a TTEmbeddingBag needs rngs to initialize its cores, or cores to start from")
            cores = tt_init(shape, rngs.params(), initializer=initializer, dtype=jnp.dtype(dtype))
        check_cores(cores, shape)
        self.shape = shape
        self.combiner: Combiner = combiner
        self.contraction: Contraction | None = contraction
        self.traffic = traffic
        self.implementation: Implementation | None = implementation
        self.cores = nnx.List([nnx.Param(jnp.asarray(core, jnp.dtype(dtype))) for core in cores])

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

    def arrays(self) -> Cores:
        """The cores as plain arrays."""
        return tuple(core[...] for core in self.cores)

    def __call__(
        self, ids: jax.Array, offsets: jax.Array | None = None, *, weights: jax.Array | None = None
    ) -> jax.Array:
        """(num_bags, dim) float32; see ``tt_embedding_bag``."""
        return tt_embedding_bag(
            self.arrays(),
            self.shape,
            ids,
            offsets,
            weights=weights,
            combiner=self.combiner,
            contraction=self.contraction,
            traffic=self.traffic,
            implementation=self.implementation,
        )
