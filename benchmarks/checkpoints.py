"""What checkpoints of a run write, and for how much of their time they hold its steps, by where its rows live.

Each place trains the same model by ``jrec.distribute``: on one device; on 4, their rows dealt in turn; and on 4 by a
plan with frequent rows on all of them and rare ones in host memory. Steps go on while a checkpoint is written, and the
next one begins some steps after it is complete. "held" is the time that steps waited for it by the time until it was
complete; "held and slower" adds what steps took longer than usual meanwhile.

Examples:
  python -m benchmarks.checkpoints
  python -m benchmarks.checkpoints --quick
"""

from __future__ import annotations

import itertools
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.run.placement.plan import default_plan, overlaid
from jrec.run.run import Run
from jrec.sharding.pieces import HOST, REPLICATED

TABLES, ROWS, DIM, BATCH = 8, 400_000, 8, 128
BEFORE, BETWEEN = 10, 50  # steps before the first checkpoint; at least, from one to the next
DEVICES = "--xla_force_host_platform_device_count=4"
PLACES = ("1 device", "4 devices", "4 devices by a plan")


def main() -> None:
    """Runs the benchmark."""
    arguments = harness.parser(__doc__).parse_args()
    if DEVICES not in (flags := os.environ.get("XLA_FLAGS", "")):  # which JAX reads at its first use
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICES}"
    rows = ROWS // 10 if arguments.quick else ROWS
    with harness.Report(arguments, "checkpoints") as report:
        for place in PLACES:
            with tempfile.TemporaryDirectory() as folder, _run(place, rows) as run:
                _measure(report, place, run, _columns(rows), pathlib.Path(folder))


def _run(place: str, rows: int) -> Run:
    names = [f"t{i}" for i in range(TABLES)]
    layout = EmbeddingLayout.build(
        [TableConfig(name=name, rows=rows, dim=DIM) for name in names],
        [FeatureConfig(name=name, table=name) for name in names],
        planned=place != PLACES[0],
    )
    model = DLRM(DLRMConfig(num_dense=1, bottom_mlp=(32, DIM), top_mlp=(32, 1)), layout, rngs=nnx.Rngs(0))
    optimizer = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.Adagrad(learning_rate=0.1))
    if not layout.planned:
        return jrec.distribute(model, optimizer)
    plan: Any = None
    if place == PLACES[2]:
        plan = overlaid(default_plan(layout, 4), {name: np.array([[rows // 2, rows]]) for name in names}, HOST)
        plan = overlaid(plan, {name: np.array([[0, rows // 100]]) for name in names}, REPLICATED)
    return jrec.distribute(model, optimizer, mesh=jax.make_mesh((4,), ("x",)), plan=plan)


def _columns(rows: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for _ in itertools.count():
        ids = {f"t{i}": (rng.zipf(1.2, BATCH) - 1) % rows for i in range(TABLES)}
        label = rng.integers(0, 2, BATCH).astype(np.float32)
        yield {"label": label, "x": rng.random(BATCH, dtype=np.float32), **ids}


def _measure(report: harness.Report, place: str, run: Run, columns: Iterator[dict[str, Any]], folder: Any) -> None:
    feed, step = run.feed(columns, dense=["x"]), run.compile()
    taken: list[float] = []
    for _ in range(BEFORE):
        jax.block_until_ready(step(next(feed)))
    first = 0
    for name in ("first", "second", "third"):
        begin = time.perf_counter()
        run.save(folder, wait=False)
        saving, written, during, number = time.perf_counter() - begin, None, 0, 0
        while written is None or number < BETWEEN:
            begin = time.perf_counter()
            jax.block_until_ready(step(next(feed)))
            taken.append(time.perf_counter() - begin)
            during, number = during + (written is None), number + 1
            written = written or run.written()
        meanwhile = taken[-number:][:during]
        slower = saving + sum(meanwhile) - during * statistics.median(taken)
        first = first or written.bytes
        case, details = f"{place}, {name} checkpoint", {"by_first": written.bytes / first, "rows": written.rows}
        report.add(case, "written", written.bytes / 1e6, "MB", details=details)
        report.add(case, "time", written.seconds, "s", details={"steps": during})
        report.add(case, "held", written.blocking_seconds / written.seconds, "of its time")
        report.add(case, "held and slower", slower / written.seconds, "of its time")


if __name__ == "__main__":
    main()
