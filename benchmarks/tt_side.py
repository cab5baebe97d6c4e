"""jrec's side of the tensor-train benchmarks: cores, ids and the jitted programs over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from jrec import ops
from jrec.ops import tt

KAGGLE_ROWS = max(workloads.CRITEO_KAGGLE_ROWS)
EXPONENT = 1.05
PLAIN = ops.RowWiseAdagrad(learning_rate=0.01, initial_accumulator=0.1)
FUSED = ops.Adagrad(learning_rate=0.01, initial_accumulator=0.1)


def shape_of(rows: int, dim: int, rank: int) -> tt.TTShape:
    """TT-Rec's shape of the largest Criteo Kaggle table, and the search's of any other."""
    if (rows, dim) == (KAGGLE_ROWS, 16):
        return tt.TTShape(rows=rows, dim=dim, row_factors=(200, 220, 250), dim_factors=(2, 2, 4), ranks=(rank, rank))
    return tt.TTShape.search(rows, dim, ranks=rank)


def describe(shape: tt.TTShape, lookups: int, pooling: int = 1, *, uniform: bool = False) -> str:
    """A case's name."""
    bags = "" if pooling == 1 else f" in bags of {pooling}"
    spread = ", uniform ids" if uniform else ""
    return f"{shape.rows:,} rows x {shape.dim}, rank {shape.ranks[0]}, {lookups:,} lookups{bags}{spread}"


class Side:
    """Programs over ``lookups`` ids of a power law, or of all rows alike, in bags of ``pooling``.

    A step takes the gradient of half the squared distance between the activations and given targets, so that, as in
    training, it is known no sooner than they are.
    """

    def __init__(self, shape: tt.TTShape, lookups: int, pooling: int = 1, *, uniform: bool = False) -> None:
        self.shape = shape
        self.cores = tt.tt_init(shape, jax.random.key(0))
        rng = np.random.default_rng(0)
        ids = (
            rng.integers(0, shape.rows, lookups) if uniform else workloads.zipf_ids(rng, shape.rows, lookups, EXPONENT)
        )
        self.ids = jnp.asarray(ids.astype(np.int32).reshape(-1, pooling))
        self.gradient = jnp.asarray(rng.standard_normal((len(self.ids), shape.dim), np.float32))
        self._cores = jax.tree.map(jnp.array, self.cores)  # those that are trained
        self._core_slots = tt.tt_init_slots(FUSED, self._cores)
        self._table: jax.Array | None = None
        self._slots: Any = None
        self._step = jax.jit(functools.partial(train, shape), donate_argnums=(0, 1))
        self._plain = jax.jit(train_plain, donate_argnums=(0, 1))

    def program(self, backward: bool, contraction: Any = None, implementation: Any = None) -> Callable[[], Any]:
        """Forward, or forward and backward, as a callable."""
        bag = functools.partial(
            tt.tt_embedding_bag, shape=self.shape, contraction=contraction, implementation=implementation
        )

        @jax.jit
        def forward(cores: Any, ids: jax.Array, _: jax.Array) -> Any:
            return bag(cores, ids=ids)

        @jax.jit
        def both(cores: Any, ids: jax.Array, gradient: jax.Array) -> Any:
            out, transpose = jax.vjp(functools.partial(bag, ids=ids), cores)
            return out, transpose(gradient)[0]

        return lambda: (both if backward else forward)(self.cores, self.ids, self.gradient)

    def step(self) -> Any:
        """One training step of the cores."""
        self._cores, self._core_slots = self._step(self._cores, self._core_slots, self.ids, self.gradient)
        return self._cores

    def plain_step(self) -> Any:
        """One training step of the uncompressed table."""
        if self._table is None:
            self._table = jnp.zeros((self.shape.rows, self.shape.dim))
            self._slots = PLAIN.init(self._table)
        self._table, self._slots = self._plain(self._table, self._slots, self.ids, self.gradient)
        return self._table


def train(shape: tt.TTShape, cores: Any, slots: Any, ids: jax.Array, targets: jax.Array) -> Any:
    """Forward, backward and the fused update of a tensor-train table."""
    activations, residuals = tt.tt_lookup(cores, shape, ops.Bags(ids=ids))
    return tt.tt_apply_gradients(FUSED, cores, slots, shape, residuals, activations - targets)


def train_plain(table: jax.Array, slots: Any, ids: jax.Array, targets: jax.Array) -> Any:
    """The same of an uncompressed table with row-wise Adagrad."""
    activations, residuals = ops.lookup({"table": table}, {"table": ops.Bags(ids=ids)})
    return ops.casted_update(PLAIN, table, slots, residuals["table"].cast, activations["table"] - targets)
