"""What ``jrec.distribute`` costs a program beside a step split by hand, and whether a step grows with a table's rows.

Overhead: the steps of ``Run.compile`` on batches of ``Run.feed`` against one ``jax.jit`` on a split state, which it is
given to overwrite, on the same packed batches; few examples and a small model leave little else to measure. The peer
is the step by hand: a ratio of 0.83 is an overhead of 1.2. Copies: what a feed copies of the columns of 2,048 examples
before it reads the next ones, beside the packing of a batch, the copy aside, and beside a step. Feed: the time of
``next`` on a mesh of one device, whose feed works ahead, after a step that was waited for. Growth: the same
lookups in a table of more rows; the detail "by_fewest" is the time by that of the fewest rows. Updates in place touch
only the looked-up rows, whose cache misses grow with the table; "scan" draws the same 4,096 rows from every table, so
that caches are alike.

Examples:
  python -m benchmarks.library_step
  python -m benchmarks.library_step --quick
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness
from jrec.batch import Batch
from jrec.data.packing import Packer
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer, train_step
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

TABLES, DIM, NUM_DENSE = 8, 16, 4
GROWTH_ROWS = (100_000, 1_000_000, 10_000_000)
LOOKUPS = {"26 ids, 13 numbers": (26, 1, 13), "20 ids of one feature": (1, 20, 1)}  # features, ids of each, numbers
IN_A_BLOCK = 8  # steps timed together, so that a thread that prepares the next batch is part of it


def main() -> None:
    """Runs the benchmark."""
    arguments = harness.parser(__doc__).parse_args()
    with harness.Report(arguments, "library_step") as report:
        for batch in (16, 256, 2048):
            _overhead(report, batch)
        for lookups in LOOKUPS:
            _copies(report, lookups)
        _next_batch(report)
        for kind in ("scan", "uniform"):
            fewest: float | None = None
            for rows in GROWTH_ROWS[:2] if arguments.quick else GROWTH_ROWS:
                seconds = _growth(report, rows, kind)
                fewest = fewest or seconds
                details = {"by_fewest": seconds / fewest}
                report.add(f"{rows:,} rows, {kind}", "step", 1e3 * seconds, "ms", details=details)


def _modules(rows: int, tables: int, *, length: int = 1, num_dense: int = NUM_DENSE) -> tuple[Any, SparseOptimizer]:
    names = [f"t{i}" for i in range(tables)]
    layout = EmbeddingLayout.build(
        [TableConfig(name=name, rows=rows, dim=DIM) for name in names],
        [FeatureConfig(name=name, table=name, max_length=length) for name in names],
    )
    config = DLRMConfig(num_dense=num_dense, bottom_mlp=(32, DIM), top_mlp=(32, 1))
    model = DLRM(config, layout, rngs=nnx.Rngs(0))
    return model, SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.Adagrad(learning_rate=0.1))


def _batches(layout: EmbeddingLayout, rows: int, batch: int, *, span: int | None = None) -> list[Batch]:
    """Packed batches; with ``span`` ids are so many rows, spread evenly over the table."""
    rng, dense = np.random.default_rng(0), [f"d{i}" for i in range(NUM_DENSE)]

    def columns() -> dict[str, Any]:
        found: dict[str, Any] = {"label": rng.integers(0, 2, batch).astype(np.float32)}
        found |= {name: rng.random(batch, dtype=np.float32) for name in dense}
        for feature in layout.order:
            found[feature] = rng.integers(0, rows, batch) if span is None else rng.integers(0, span, batch)
        return found

    return [jrec.data.pack_batch(layout, columns(), dense=dense, cast="host") for _ in range(16)]


def _overhead(report: harness.Report, batch: int) -> None:
    model, optimizer = _modules(10_000, TABLES)
    batches = _batches(model.embeddings.layout, 10_000, batch)
    graph, state = nnx.split((model, optimizer))

    @jax.jit(donate_argnums=0)
    def by_hand(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, _ = train_step(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    run = jrec.distribute(*_modules(10_000, TABLES))
    step, feed, cycle = run.compile(), run.feed(itertools.cycle(batches)), itertools.cycle(batches)

    def ours() -> Any:
        for _ in range(IN_A_BLOCK):
            loss, _ = step(next(feed))
        return loss

    def theirs() -> Any:
        nonlocal state
        for _ in range(IN_A_BLOCK):
            state, loss = by_hand(state, next(cycle))
        return loss

    report.compare(
        f"batch {batch:,}", f"{IN_A_BLOCK} steps", harness.timed(ours), peer="by hand", theirs=harness.timed(theirs)
    )
    run.close()


def _copies(report: harness.Report, lookups: str) -> None:
    features, length, numbers = LOOKUPS[lookups]
    model, optimizer = _modules(10_000, features, length=length, num_dense=numbers)
    rng, dense = np.random.default_rng(0), [f"d{i}" for i in range(numbers)]
    columns: dict[str, Any] = {"label": rng.integers(0, 2, 2048).astype(np.float32)}
    columns |= {name: rng.random(2048, dtype=np.float32) for name in dense}
    shape = 2048 if length == 1 else (2048, length)
    columns |= {name: rng.integers(0, 10_000, shape) for name in model.embeddings.layout.order}
    packer = Packer(model.embeddings.layout, dense=dense, cast="host")

    def packed() -> Batch:
        return packer.pack(packer.prepare(columns), 2048)

    run = jrec.distribute(model, optimizer)
    step, feed = run.compile(), run.feed(itertools.repeat(columns), dense=dense)
    sides = {
        "read": harness.timed(lambda: packer.read(columns), calls=20),
        "read and copied": harness.timed(lambda: packer.read(columns, copy=True), calls=20),
        "packing": harness.timed(packed),
        "step, fed": harness.timed(lambda: step(next(feed))[0], calls=IN_A_BLOCK),
    }
    for metric, side in sides.items():
        seconds = harness.alternate(side, seconds=report.seconds / 3).median
        report.add(f"2,048 examples, {lookups}", metric, 1e6 * seconds, "µs")
    run.close()


def _next_batch(report: harness.Report) -> None:
    run = jrec.distribute(*_modules(10_000, 26), mesh=jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]))
    step, feed = run.compile(), run.feed(itertools.cycle(_batches(run.layout, 10_000, 6912)))
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        batch = next(feed)
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready(step(batch)[0])
    report.add("6,912 examples, 26 ids, a mesh of one", "next batch", 1e6 * float(np.median(seconds[10:])), "µs")
    run.close()


def _growth(report: harness.Report, rows: int, kind: str) -> float:
    run = jrec.distribute(*_modules(rows, 1))
    batches = _batches(run.layout, rows, 2048, span=4096 if kind == "scan" else None)
    step, feed = run.compile(), run.feed(itertools.cycle(batches))

    def steps() -> Any:
        for _ in range(IN_A_BLOCK):
            loss, _ = step(next(feed))
        return loss

    seconds = harness.alternate(harness.timed(steps), seconds=report.seconds / 2).median / IN_A_BLOCK
    run.close()
    return seconds


if __name__ == "__main__":
    main()
