"""jrec's side of a workload: its layout, its batches, and a training run from the workload's initial weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import workloads
from jrec import ops
from jrec.batch import Batch
from jrec.data.packing import CastPlace, pack_batch
from jrec.nn import DLRM, MLP, DLRMConfig, SparseOptimizer
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig, Tier
from jrec.run.step import CompiledRun, State, compile_run


def layout(workload: workloads.Workload, *, tier: Tier = "sharded", planned: bool = False) -> EmbeddingLayout:
    """Tables t000, t001, … in one stack, each read by a feature of its name."""
    names = [f"t{t:03d}" for t in range(workload.num_tables)]
    return EmbeddingLayout.build(
        [TableConfig(name=n, rows=r, dim=workload.dim, tier=tier) for n, r in zip(names, workload.rows, strict=True)],
        [
            FeatureConfig(
                name=n, table=n, max_length=length, fixed_length=True, pooling="sum" if workload.pooled else "none"
            )
            for n, length in zip(names, workload.ids_per_bag, strict=True)
        ],
        planned=planned,
    )


def batch(
    workload: workloads.Workload,
    *,
    seed: int,
    cast: CastPlace = "none",
    tier: Tier = "sharded",
    planned: bool = False,
    hashed: bool = False,
) -> Batch:
    """The batch of ``seed`` as the loader would make it, in NumPy arrays; ``hashed`` as in ``workloads.hashed_ids``."""
    drawn = columns(workload, seed=seed, hashed=hashed)
    return pack_batch(layout(workload, tier=tier, planned=planned), drawn, dense=dense_names(workload), cast=cast)


def columns(workload: workloads.Workload, *, seed: int, hashed: bool = False) -> dict[str, np.ndarray]:
    """The columns of the batch of ``seed``, which ``pack_batch`` takes with ``dense_names``."""
    dense, labels = workloads.dense_batch(workload, seed=seed)
    ids = workloads.table_ids(workload, seed=seed)
    if hashed:
        ids = [workloads.hashed_ids(i, rows) for i, rows in zip(ids, workload.rows, strict=True)]
    made = {"label": labels} | {name: dense[:, i] for i, name in enumerate(dense_names(workload))}
    return made | {f"t{t:03d}": table_ids for t, table_ids in enumerate(ids)}


def dense_names(workload: workloads.Workload) -> list[str]:
    """The dense columns' names, in the model's order."""
    return [f"d{i}" for i in range(workload.num_dense)]


def table_stack(workload: workloads.Workload, *, seed: int) -> np.ndarray:
    """All tables of the workload, one below the other: (rows, dim) float32."""
    stack = np.empty((sum(workload.rows), workload.dim), np.float32)
    base = 0
    for table, rows in enumerate(workload.rows):
        stack[base : base + rows] = workloads.initial_table(workload, table, seed=seed)
        base += rows
    return stack


def dense_part(workload: workloads.Workload, compute_dtype: str = "float32") -> DLRMConfig:
    """The workload's MLPs and interaction, computed in ``compute_dtype``."""
    config = DLRMConfig(
        num_dense=workload.num_dense, bottom_mlp=workload.bottom, top_mlp=workload.top, compute_dtype=compute_dtype
    )
    if not workload.cross_layers:
        return config
    crosses = {"cross_layers": workload.cross_layers, "cross_rank": workload.cross_rank}
    return dataclasses.replace(config, interaction="dcn", **crosses)


def modules(
    workload: workloads.Workload,
    *,
    dtype: str = "float32",
    implementation: Implementation | None = None,
    tables: EmbeddingLayout | None = None,
    embedding: ops.RowOptimizer | None = None,
) -> tuple[DLRM, SparseOptimizer]:
    """The workload's DLRM with first weights, and its optimizer: Adagrad of the dense layers and of rows.

    Args:
      workload: The model.
      dtype: The dense layers'.
      implementation: The embedding ops'; None for the platform's default.
      tables: The layout; None for that of ``layout``.
      embedding: The rows' optimizer; None for row-wise Adagrad.
    """
    tables = layout(workload) if tables is None else tables
    model = DLRM(dense_part(workload, dtype), tables, implementation=implementation, rngs=nnx.Rngs(params=0))
    rows = ops.RowWiseAdagrad(learning_rate=0.01) if embedding is None else embedding
    return model, SparseOptimizer(model, dense=optax.adagrad(0.01), embedding=rows)


def training_run(
    workload: workloads.Workload,
    optimizer: str,
    *,
    learning_rate: float,
    seed: int,
    implementation: Implementation | None = None,
    compute_dtype: str = "float32",
) -> tuple[State, CompiledRun]:
    """A DLRM with the workload's initial weights, and its compiled step, as ``jrec train`` compiles it.

    ``implementation`` is the embedding ops'; None takes the platform's default. ``compute_dtype`` is the dense layers'.
    """
    model = DLRM(
        dense_part(workload, compute_dtype), layout(workload), implementation=implementation, rngs=nnx.Rngs(params=seed)
    )
    (name,) = model.embeddings.arrays()
    model.embeddings.set_arrays({name: jnp.asarray(table_stack(workload, seed=seed))})
    for which, mlp in (("bottom", model.bottom), ("top", model.top)):
        assert isinstance(mlp, MLP)
        for layer, (kernel, bias) in zip(mlp.layers, workloads.initial_mlp(workload, which, seed=seed), strict=True):
            assert layer.bias is not None
            layer.kernel[...] = jnp.asarray(kernel)
            layer.bias[...] = jnp.asarray(bias)
    if (cross := model.cross) is not None:
        for number, (down, up, bias) in enumerate(workloads.initial_cross(workload, seed=seed)):
            layer = cross.layers[number]
            assert layer.bias is not None
            cross.down[number].kernel[...] = jnp.asarray(down)
            layer.kernel[...] = jnp.asarray(up)
            layer.bias[...] = jnp.asarray(bias)
    dense, rows = _optimizers(optimizer, learning_rate)
    return compile_run(model, SparseOptimizer(model, dense=dense, embedding=rows))


def _optimizers(name: str, learning_rate: float) -> tuple[optax.GradientTransformation, ops.RowOptimizer]:
    if name == "sgd":
        return optax.sgd(learning_rate), ops.SGD(learning_rate=learning_rate)
    kind = {"adagrad": ops.Adagrad, "rowwise_adagrad": ops.RowWiseAdagrad}[name]
    rows = kind(learning_rate=learning_rate, initial_accumulator=0.1, eps=1e-7)  # as optax, and as the peers
    return optax.adagrad(learning_rate), rows


def on_device(made: Batch) -> Batch:
    """The batch in JAX arrays."""
    return jax.tree.map(jnp.asarray, made)
