"""What a JAX user would write without jrec: a DLRM on ``nnx.Embed`` and optax, beside jrec's step, in one run.

``nnx.Embed`` is differentiated like any other parameter, so its gradient is as large as the table, and optax updates
every row at every step; jrec touches only the rows that a batch reads. Tables of the Kaggle model's shape (26 of 16
elements, one id an example, Kaggle's MLPs, batch 2,048) with 100,000 and 1,000,000 rows each, Adagrad. Both sides start
from the same weights, run compiled with their state donated, and have their losses compared before anything is timed.

    step                    jrec casts inside the step
    step, cast in loader    the loader has cast, as in `jrec train`
    step, row gradients     the user's own model and step, with ``jrec.nn.Embed`` for ``nnx.Embed`` and ``jrec.optax``

glibc keeps freed arrays, for both sides, since this process imports jrec's models ("memory kept"). With
``JREC_KEEP_MEMORY=0`` in the environment it gives them back to the kernel, which zeroes the pages of every new dense
gradient: a user of plain JAX gets that, but it says less about the algorithms.

Examples:
  python -m benchmarks.plain_jax
  JREC_KEEP_MEMORY=0 python -m benchmarks.plain_jax --rows 100000 --out results.json
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness, models, workloads
from jrec.data.packing import CastPlace
from jrec.memory import KEEP_VARIABLE

ROWS, QUICK_ROWS = (100_000, 1_000_000), (20_000,)
LEARNING_RATE = 0.01
PEER = "nnx.Embed and optax"
COMPARED_STEPS = 3
TOLERANCE = 1e-4  # relative; both sum in float32, in different orders
Arrays = tuple[jax.Array, ...]
Layer = Callable[..., Any]
OPTAX_ADAGRAD: dict[str, Any] = {"initial_accumulator": 0.1, "eps": 1e-7}  # the defaults of ``optax.adagrad``


class PlainDLRM(nnx.Module):
    """A DLRM with dot products of all pairs, as one writes it in Flax: an ``nnx.Embed`` a table.

    Args:
      workload: A one-hot workload, whose initial weights are taken.
      seed: The initial weights' seed.
      layer: The class of the embedding layers.
    """

    def __init__(self, workload: workloads.Workload, seed: int, layer: Layer = nnx.Embed) -> None:
        tables = (workloads.initial_table(workload, t, seed=seed) for t in range(workload.num_tables))
        self.tables = nnx.List([_embed(table, layer) for table in tables])
        self.bottom = nnx.List([_linear(*layer) for layer in workloads.initial_mlp(workload, "bottom", seed=seed)])
        self.top = nnx.List([_linear(*layer) for layer in workloads.initial_mlp(workload, "top", seed=seed)])

    def __call__(self, dense: jax.Array, ids: jax.Array) -> jax.Array:
        """Logits, (batch,) float32, of dense (batch, num_dense) float32 and ids (batch, tables) int32."""
        bottom = dense
        for layer in self.bottom:
            bottom = jax.nn.relu(layer(bottom))
        rows = [table(column) for table, column in zip(self.tables, ids.T, strict=True)]
        vectors = jnp.stack([bottom, *rows], axis=1)
        pairs = np.tril_indices(vectors.shape[1], k=-1)
        top = jnp.concatenate([bottom, jnp.einsum("bid,bjd->bij", vectors, vectors)[:, *pairs]], axis=1)
        for number, layer in enumerate(self.top):
            top = layer(top if number == 0 else jax.nn.relu(top))
        return top[:, 0]


def _embed(table: np.ndarray, layer: Layer) -> Any:
    def initial(*_: Any) -> jax.Array:
        return jnp.asarray(table)

    return layer(*table.shape, embedding_init=initial, rngs=nnx.Rngs(0))


def _linear(kernel: np.ndarray, bias: np.ndarray) -> nnx.Linear:
    layer = nnx.Linear(*kernel.shape, rngs=nnx.Rngs(0))
    assert layer.bias is not None
    layer.kernel[...], layer.bias[...] = jnp.asarray(kernel), jnp.asarray(bias)
    return layer


def plain_step(
    workload: workloads.Workload, batches: list[Arrays], *, seed: int, row_gradients: bool = False
) -> Callable[[], jax.Array]:
    """A step of ``PlainDLRM`` with ``optax.adagrad`` on the next batch, (dense, labels, ids), which gives its loss.

    With ``row_gradients`` its layers are ``jrec.nn.Embed``, and ``jrec.optax`` steps their rows.
    """
    dense = optax.adagrad(LEARNING_RATE)
    if row_gradients:
        model = PlainDLRM(workload, seed, jrec.nn.Embed)
        rows = jrec.optax.adagrad(LEARNING_RATE, **OPTAX_ADAGRAD)
        optimizer = jrec.nn.Optimizer(model, jrec.optax.partition(rows=rows, dense=dense), wrt=nnx.Param)
    else:
        model = PlainDLRM(workload, seed)
        optimizer = nnx.Optimizer(model, dense, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    del model, optimizer

    @jax.jit(donate_argnums=0)
    def train(state: Any, dense: jax.Array, labels: jax.Array, ids: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)

        def loss_of(model: PlainDLRM) -> jax.Array:
            return optax.sigmoid_binary_cross_entropy(model(dense, ids), labels).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    upcoming = itertools.cycle(batches)

    def step() -> jax.Array:
        nonlocal state
        state, loss = train(state, *next(upcoming))
        return loss

    return step


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", nargs="+", type=int, help="of each of the 26 tables (default: 100000 1000000)")
    arguments = parser.parse_args()
    note = "" if os.environ.get(KEEP_VARIABLE) == "0" else ", memory kept"
    with harness.Report(arguments, "plain_jax") as report:
        for rows in arguments.rows or (QUICK_ROWS if report.quick else ROWS):
            measure(report, kaggle_like(rows), note=note)
            gc.collect()


def kaggle_like(rows: int) -> workloads.Workload:
    """The Kaggle model with ``rows`` rows in each of its tables."""
    kaggle = workloads.WORKLOADS["kaggle"]
    return dataclasses.replace(kaggle, name="Kaggle-like", rows=(rows,) * kaggle.num_tables)


def measure(report: harness.Report, workload: workloads.Workload, *, note: str = "") -> None:
    """Times both sides' steps by turns, after comparing their losses."""
    num_batches = 2 if report.quick else 8
    case = f"{workload.name}, adagrad, batch {workload.batch:,}, {workload.num_tables} tables of {workload.rows[0]:,}"
    case += f" rows x {workload.dim}{note}"
    plain_batches = [plain_batch(workload, seed=i) for i in range(num_batches)]
    plain = plain_step(workload, plain_batches, seed=0)
    state, run = models.training_run(workload, "adagrad", learning_rate=LEARNING_RATE, seed=0)
    places: tuple[tuple[str, CastPlace], ...] = (("step", "none"), ("step, cast in loader", "host"))
    for metric, cast in places:
        made = [models.on_device(models.batch(workload, seed=i, cast=cast)) for i in range(num_batches)]
        batches = itertools.cycle(made)

        def step() -> jax.Array:
            nonlocal state
            state, loss, _ = run.step(state, next(batches))  # noqa: B023, called in its own turn of the loop
            return loss

        if cast == "none":
            _compare_losses(step, plain, case)
        report.compare(case, metric, harness.timed(step), peer=PEER, theirs=harness.timed(plain))
    del state
    of_rows = plain_step(workload, plain_batches, seed=0, row_gradients=True)
    fresh = plain_step(workload, plain_batches, seed=0)
    _compare_losses(of_rows, fresh, f"{case}, row gradients")
    report.compare(case, "step, row gradients", harness.timed(of_rows), peer=PEER, theirs=harness.timed(fresh))


def plain_batch(workload: workloads.Workload, *, seed: int, hashed: bool = False) -> Arrays:
    """Dense features, labels and ids (batch, tables) of a batch; ``hashed`` as in ``workloads.hashed_ids``."""
    ids = workloads.table_ids(workload, seed=seed)
    if hashed:
        ids = [workloads.hashed_ids(i, rows) for i, rows in zip(ids, workload.rows, strict=True)]
    columns = np.concatenate(ids, axis=1)
    return tuple(jnp.asarray(array) for array in (*workloads.dense_batch(workload, seed=seed), columns))


def _compare_losses(ours: harness.Step, plain: harness.Step, case: str) -> None:
    """Raises SystemExit unless both sides' first steps have the same losses."""
    for number in range(COMPARED_STEPS):
        own, other = float(ours()), float(plain())
        if not np.isclose(own, other, rtol=TOLERANCE):
            raise SystemExit(f"{case}: step {number} has loss {own} in jrec, but {other} in plain JAX")


if __name__ == "__main__":
    main()
