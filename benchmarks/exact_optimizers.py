"""What exact optimizers cost beside lazy ones, and how far both end from optax on the whole table.

Step: a step of a DLRM as `jrec train` takes it, casts made by the host, rows drawn by a power law of exponent 1.05; the
peer is the lazy optimizer of the same model, so that a ratio of 0.8 is a cost of 1.25. The tables of "kaggle" have a
tenth of Criteo's rows (``--divide``); "no MLPs" is the same lookups with next to no dense model, the worst there is.
Distance: one table of 20,000 rows, 256 touched in each of 1,000 steps: the Euclidean distance of all rows from optax's,
by how far those moved.

Examples:
  python -m benchmarks.exact_optimizers
  python -m benchmarks.exact_optimizers --quick
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness, models, workloads
from jrec import ops
from jrec.nn import DLRM, SparseOptimizer
from jrec.ops.current_rows import current

RATE = 0.002
PAIRS: dict[str, tuple[type[ops.RowOptimizer], type[ops.RowOptimizer], Callable[[float], Any]]] = {
    "adam": (ops.ExactAdam, ops.Adam, optax.adam),
    "momentum": (ops.ExactMomentum, ops.Momentum, functools.partial(optax.sgd, momentum=0.9)),
    "rmsprop": (ops.ExactRMSProp, ops.RMSProp, functools.partial(optax.rmsprop, eps=1e-14)),
}
ROWS, DIM, TOUCHED, STEPS, EXPONENT = 20_000, 16, 256, 1_000, 1.05


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--divide", type=int, default=10, help="tables have this share of the rows (default: 10)")
    arguments = parser.parse_args()
    harness.keep_memory()
    with harness.Report(arguments, "exact_optimizers") as report:
        kaggle = workloads.WORKLOADS["kaggle"].with_rows_divided(1000 if report.quick else arguments.divide)
        bare = dataclasses.replace(kaggle, bottom=(kaggle.dim,), top=(1,))
        for case, workload in (("kaggle", kaggle), ("kaggle, no MLPs", bare)):
            for name in ("adam",) if report.quick else PAIRS:
                _step(report, f"{case}, {workload.batch:,} examples, {name}", workload, name)
        for name in PAIRS:
            _distance(report, name, 20 if report.quick else STEPS)


def _step(report: harness.Report, case: str, workload: workloads.Workload, name: str) -> None:
    exact, lazy, _ = PAIRS[name]
    batches = [models.batch(workload, seed=seed, cast="host") for seed in range(16)]
    runs = [_run(workload, kind(learning_rate=RATE)) for kind in (exact, lazy)]
    sides = [harness.timed(_stepped(run, batches), calls=4) for run in runs]
    report.compare(case, "step", sides[0], peer="lazy", theirs=sides[1])
    for run in runs:
        run.close()


def _run(workload: workloads.Workload, rows: ops.RowOptimizer) -> jrec.Run:
    model = DLRM(models.dense_part(workload), models.layout(workload), rngs=nnx.Rngs(0))
    return jrec.distribute(model, SparseOptimizer(model, dense=optax.adam(RATE), embedding=rows))


def _stepped(run: jrec.Run, batches: list[Any]) -> harness.Step:
    step, feed = run.compile(), run.feed(itertools.cycle(batches))
    return lambda: step(next(feed))[0]


def _distance(report: harness.Report, name: str, steps: int) -> None:
    exact, lazy, dense = PAIRS[name]
    first = 0.05 * jax.random.normal(jax.random.key(0), (ROWS, DIM))
    tx, case = dense(RATE), f"{ROWS:,} rows x {DIM}, {TOUCHED} ids a step, {steps:,} steps, {name}"
    ids = [_touched(seed) for seed in range(steps)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def whole(table: jax.Array, state: Any, rows: jax.Array, number: jax.Array) -> Any:
        gradients = _gradients(table.at[rows].get(mode="fill", fill_value=0), number)
        gradients = jnp.zeros_like(table).at[rows].set(gradients, mode="drop")
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(gradients, state, table)
        return optax.apply_updates(table, updates), state

    expected, state = first + 0, tx.init(first)
    for number, rows in enumerate(ids):
        expected, state = whole(expected, state, rows, jnp.int32(number))
    moved = jnp.linalg.norm(expected - first)
    for kind in (exact, lazy):
        optimizer = kind(learning_rate=RATE)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def sparse(table: Any, slots: Any, rows: Any, number: Any, optimizer: ops.RowOptimizer = optimizer) -> Any:
            def of_rows(array: jax.Array) -> jax.Array:
                return array.at[rows].get(mode="fill", fill_value=0)

            now = current(optimizer, of_rows(table), {name: of_rows(slot) for name, slot in slots.items()}, number)
            return ops.row_update(optimizer, table, slots, rows, _gradients(now, number), step=number)

        table, slots = first + 0, optimizer.init(first)
        for number, rows in enumerate(ids):
            table, slots = sparse(table, slots, rows, jnp.int32(number))
        away = jnp.linalg.norm(current(optimizer, table, slots, steps) - expected) / moved
        metric = f"distance from optax, {'exact' if kind is exact else 'lazy'}"
        report.add(case, metric, float(away), "of the distance moved")


def _touched(seed: int) -> jax.Array:
    """(TOUCHED,) int32: distinct rows of a batch, padded by ``ROWS``."""
    rows = np.unique(workloads.zipf_ids(np.random.default_rng(seed), ROWS, TOUCHED, EXPONENT))
    return jnp.asarray(np.pad(rows, (0, TOUCHED - rows.size), constant_values=ROWS))


def _gradients(rows: jax.Array, number: jax.Array) -> jax.Array:
    """Of touched rows: a pull, and noise, without which Adam's steps near a minimum are those of rounding errors."""
    key = jax.random.fold_in(jax.random.key(7), number)
    return 0.1 * rows + jax.random.normal(key, rows.shape, jnp.float32)


if __name__ == "__main__":
    main()
