"""A step against the number of rows: ``jrec.Table`` and ``jrec.optax``, beside ``table[ids]`` and optax.

One table of 16 elements, means of 4,096 bags of 20 skewed ids, a linear head, Adagrad; compiled, with the state
donated. The gradient of ``table[ids]`` is as large as the table, and optax updates all of it; that of a ``jrec.Table``
is the rows that were read. Losses are compared before anything is timed. The other side is left out where its table,
slots and gradient would not fit the machine's memory (``--peer-rows``).

    step                jrec, beside table[ids] and optax
    step, two phases    jrec, beside jrec's own two-phase step (``jrec.lookup``, ``jrec.apply_gradients``): the same
                        program to the last operation, but JAX dispatches one with types of its own by Python
    dispatch            how long a call keeps the host, while the step before computes; and that of the two-phase step

Examples:
  python -m benchmarks.sparse_gradients
  python -m benchmarks.sparse_gradients --rows 100000 1600000 --out results.json
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrec
from benchmarks import harness

ROWS, QUICK_ROWS = (100_000, 400_000, 1_600_000, 6_400_000, 25_600_000, 64_000_000), (20_000,)
PEER_ROWS = 25_600_000
DIM, BAGS, LENGTH, RATE = 16, 4096, 20, 0.05
SLOTS: dict[str, Any] = {"initial_accumulator": 0.1, "eps": 1e-7}  # as optax
PEER, PHASES = "table[ids] and optax", "jrec.lookup and apply_gradients"
COMPARED_STEPS, TOLERANCE, DISPATCHES = 4, 1e-4, 200
Step = Callable[[], jax.Array]


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", nargs="+", type=int, help="rows of the table (default: 100,000 to 64 million)")
    parser.add_argument("--peer-rows", type=int, default=PEER_ROWS, help=f"the most for optax (default: {PEER_ROWS:,})")
    arguments = parser.parse_args()
    harness.keep_memory()
    with harness.Report(arguments, "sparse_gradients") as report:
        for rows in arguments.rows or (QUICK_ROWS if report.quick else ROWS):
            measure(report, rows, with_peer=rows <= arguments.peer_rows)
            gc.collect()


def measure(report: harness.Report, rows: int, *, with_peer: bool) -> None:
    """Times the steps on a table of ``rows`` rows by turns, after comparing their losses."""
    case = f"{rows:,} rows x {DIM}, {BAGS:,} bags of {LENGTH}, adagrad"
    batches = [batch(rows, seed) for seed in range(4)]
    for metric, peer, make in (("step", PEER, dense_step), ("step, two phases", PHASES, two_phase_step)):
        ours = row_step(rows, batches)
        if not with_peer:
            report.compare(case, metric, harness.timed(ours))
            return
        theirs = make(rows, batches)
        for number in range(COMPARED_STEPS):
            own, other = float(ours()), float(theirs())
            if not np.isclose(own, other, rtol=TOLERANCE):
                raise SystemExit(f"{case}: step {number} has loss {own}, but {other} with {peer}")
        report.compare(case, metric, harness.timed(ours), peer=peer, theirs=harness.timed(theirs))
        if make is two_phase_step:
            report.add(case, "dispatch", 1e3 * _dispatch(ours), "ms")
            report.add(case, "dispatch, two phases", 1e3 * _dispatch(theirs), "ms")
        del ours, theirs
        gc.collect()


def _dispatch(step: Step) -> float:
    """Seconds until a call returns, median."""
    seconds = []
    for _ in range(DISPATCHES):
        begin = time.perf_counter()
        value = step()
        seconds.append(time.perf_counter() - begin)
        value.block_until_ready()
    return statistics.median(seconds)


def batch(rows: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Ids, (bags, length) int32, and labels, (bags,) float32."""
    draw = np.random.default_rng(seed)
    ids = draw.zipf(1.2, (BAGS, LENGTH)) * 2_654_435_761 % rows  # spread over the table
    return jnp.asarray(ids.astype(np.int32)), jnp.asarray(draw.integers(0, 2, BAGS).astype(np.float32))


def row_step(rows: int, batches: list[Any]) -> Step:
    """A step by row gradients."""
    tx = jrec.optax.partition(rows=jrec.optax.adagrad(RATE, **SLOTS), dense=optax.adagrad(RATE))

    def pool(table: Any, ids: jax.Array) -> jax.Array:
        return jrec.embedding_bag(table, ids, weights=_mean_weights())

    return _stepped(tx, {"table": jrec.Table(_table(rows)), **_head()}, batches, pool, jrec.optax.apply_updates)


def dense_step(rows: int, batches: list[Any]) -> Step:
    """A step of plain JAX and optax."""

    def pool(table: jax.Array, ids: jax.Array) -> jax.Array:
        return table[ids].mean(axis=1)

    params = {"table": _table(rows), **_head()}
    return _stepped(optax.adagrad(RATE), params, batches, pool, optax.apply_updates)


def _stepped(tx: Any, params: Any, batches: list[Any], pool: Any, apply_updates: Any) -> Step:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, ids: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return _loss(pool(params["table"], ids), params["w"], params["b"], labels)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return apply_updates(params, updates), state, value

    return _repeated(step, (params, tx.init(params)), batches)


def two_phase_step(rows: int, batches: list[Any]) -> Step:
    """A step by ``jrec.lookup`` and ``jrec.apply_gradients``."""
    optimizer, tx = jrec.ops.Adagrad(learning_rate=RATE, **SLOTS), optax.adagrad(RATE)
    tables, head = {"table": _table(rows)}, _head()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, ids: jax.Array, labels: jax.Array) -> Any:
        (tables, head), (slots, dense) = params, state
        bags = {"table": jrec.Bags(ids=ids, weights=_mean_weights())}
        activations, residuals = jrec.lookup(tables, bags)

        def loss(head: Any, vectors: jax.Array) -> jax.Array:
            return _loss(vectors, head["w"], head["b"], labels)

        value, (of_head, gradient) = jax.value_and_grad(loss, argnums=(0, 1))(head, activations["table"])
        tables, slots = jrec.apply_gradients(optimizer, tables, slots, residuals, {"table": gradient})
        updates, dense = tx.update(of_head, dense, head)
        return (tables, optax.apply_updates(head, updates)), (slots, dense), value

    state = (jrec.init_slots(optimizer, tables), tx.init(head))
    return _repeated(step, ((tables, head), state), batches)


def _repeated(step: Any, state: tuple[Any, Any], batches: list[Any]) -> Step:
    upcoming = itertools.cycle(batches)

    def run() -> jax.Array:
        nonlocal state
        params, own, value = step(*state, *next(upcoming))
        state = (params, own)
        return value

    return run


def _mean_weights() -> jax.Array:
    return jnp.full((BAGS, LENGTH), 1 / LENGTH, jnp.float32)


def _table(rows: int) -> jax.Array:
    return jax.random.uniform(jax.random.key(0), (rows, DIM), minval=-0.05, maxval=0.05)


def _head() -> dict[str, jax.Array]:
    return {"w": jax.random.normal(jax.random.key(1), (DIM,)), "b": jnp.zeros(())}


def _loss(vectors: jax.Array, w: jax.Array, b: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(vectors @ w + b, labels).mean()


if __name__ == "__main__":
    main()
