"""What hundreds of tables cost: building layout and model, packing batches, compiling and taking a step.

Tables of 10,000 rows by 16, each read by a feature of its own with one id an example; 26 tables, as Criteo has, and
500. The detail "by_fewest" is the time of 500 tables divided by 26 tables', which is 19 where time grows with the
tables. Dot interactions grow with the pairs, 125,250 against 351, so features are concatenated unless --interaction
asks for dot.

Examples:
  python -m benchmarks.many_tables
  python -m benchmarks.many_tables --tables 26 100 500 --interaction dot --batch 512
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks import harness
from jrec import ops
from jrec.data.packing import Packer
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.run.step import compile_run

ROWS, DIM, NUM_DENSE = 10_000, 16, 13


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tables", nargs="+", type=int, default=[26, 500], help="numbers of tables (default 26 500)")
    parser.add_argument("--interaction", choices=("concat", "dot"), default="concat")
    parser.add_argument("--batch", type=int, default=2048, help="examples of a step (default 2048; 256 with --quick)")
    arguments = parser.parse_args()
    batch = 256 if arguments.quick else arguments.batch
    with harness.Report(arguments, "many_tables") as report:
        few: dict[str, float] = {}
        for tables in arguments.tables:
            figures = _measured(report, tables, batch, arguments.interaction)
            few = few or figures
            case = f"{tables} tables, {arguments.interaction}, batch {batch:,}"
            for metric, seconds in figures.items():
                growth = {"by_fewest": seconds / few[metric]} if figures is not few else None
                report.add(case, metric, 1e3 * seconds, "ms", details=growth)


def _measured(report: harness.Report, tables: int, batch_size: int, interaction: Any) -> dict[str, float]:
    """Seconds by metric: the first time of what a run does once, the median of what it does for every batch."""
    figures: dict[str, float] = {}
    names = [f"t{i}" for i in range(tables)]

    def once(metric: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = jax.block_until_ready(function())
        figures[metric] = time.perf_counter() - start
        return result

    def again(metric: str, function: Callable[[], Any]) -> None:
        figures[metric] = harness.alternate(harness.timed(function), seconds=report.seconds / 2).median

    layout = once("layout", lambda: _layout(names))
    config = DLRMConfig(num_dense=NUM_DENSE, bottom_mlp=(64, DIM), top_mlp=(64, 1), interaction=interaction)
    model = once("model", lambda: DLRM(config, layout, rngs=nnx.Rngs(params=0)))
    optimizer = SparseOptimizer(model, dense=optax.adagrad(0.1), embedding=ops.Adagrad(learning_rate=0.1))
    state, run = compile_run(model, optimizer)
    dense = [f"d{i}" for i in range(NUM_DENSE)]
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"label": np.zeros(batch_size, np.float32)}
    columns |= {name: rng.random(batch_size, dtype=np.float32) for name in dense}
    columns |= {name: rng.integers(0, ROWS, batch_size, np.int32) for name in names}
    packer = once("packer", lambda: Packer(layout, dense=dense, cast="host"))
    prepared = packer.prepare(columns)
    batch = packer.pack(prepared, batch_size)
    again("pack and cast a batch", lambda: packer.pack(prepared, batch_size))

    def step() -> jax.Array:
        nonlocal state
        state, loss, _ = run.step(state, batch)
        return loss

    once("first step, with compilation", step)
    again("step", step)
    return figures


def _layout(names: list[str]) -> EmbeddingLayout:
    return EmbeddingLayout.build(
        [TableConfig(name=name, rows=ROWS, dim=DIM) for name in names],
        [FeatureConfig(name=name, table=name, fixed_length=True) for name in names],
    )


if __name__ == "__main__":
    main()
