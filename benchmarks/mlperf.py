"""MLPerf's DLRM-DCNv2: what a step at full size takes of an H200's memory, and a step at a 64th against PyTorch.

    memory    the training step of 204,184,588 rows of 128 floats with row-wise Adagrad, compiled ahead of time for one
              H200 (141 GB) without one: the arguments, of which the tables with their slots are updated in place, and
              what XLA plans beside them. Needs .venv-aot; see benchmarks/ahead_of_time.py.
    step      tables of a 64th of the rows, on this machine's CPU, beside PyTorch (EmbeddingBag(sparse=True), torch's
              Adagrad and a row-wise Adagrad) from the same weights on the same batches; losses are compared first.

Examples:
  python -m benchmarks.mlperf --part step --batch 512 --out step.jsonl
  JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu .venv-aot/bin/python -m benchmarks.mlperf --part memory
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax
from flax import nnx

from benchmarks import ahead_of_time, harness, models, train_step, workloads
from benchmarks.peers import client
from jrec import ops
from jrec.nn import DLRM, SparseOptimizer
from jrec.run.step import StepBatch, compile_run

WORKLOAD = "mlperf-dcnv2"
LEARNING_RATE = 0.005
H200_BYTES = 141e9
QUICK_DIVISOR, QUICK_BATCH = 4096, 64


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=("memory", "step"), default=["step"])
    parser.add_argument("--batch", type=int, help="examples a step (default: 55,296 for memory, 512 for step)")
    parser.add_argument("--divisor", type=int, default=64, help="of the tables' rows in steps (default 64)")
    arguments = parser.parse_args()
    whole = workloads.WORKLOADS[WORKLOAD]
    with harness.Report(arguments, "mlperf") as report:
        if "memory" in arguments.part:
            measure_memory(report, whole.with_batch(arguments.batch or whole.batch))
        if "step" in arguments.part:
            divisor = QUICK_DIVISOR if report.quick else arguments.divisor
            batch = arguments.batch or (QUICK_BATCH if report.quick else 512)
            with client.start_or_skip("torch_dlrm") as peer:
                workload = whole.with_rows_divided(divisor).with_batch(batch)
                workload = dataclasses.replace(workload, name=f"{WORKLOAD} with tables of 1/{divisor} of the rows")
                train_step.measure(report, peer, workload, "rowwise_adagrad")


def measure_memory(report: harness.Report, workload: workloads.Workload) -> None:
    """Compiles the step for an H200 and reports its memory."""
    memory = step_memory(workload)
    case = f"{workload.name} on one H200, batch {workload.batch:,}, {sum(workload.rows):,} rows x {workload.dim}"
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    total -= memory.alias_size_in_bytes
    for metric, size in (
        ("tables", 4 * sum(workload.rows) * workload.dim),
        ("arguments: tables, slots, dense parameters, batch", memory.argument_size_in_bytes),
        ("arguments updated in place", memory.alias_size_in_bytes),
        ("temporary", memory.temp_size_in_bytes),
        ("all", total),
        ("free of 141 GB", H200_BYTES - total),
    ):
        report.add(case, metric, size / 1e9, "GB")


def step_memory(workload: workloads.Workload) -> Any:
    """XLA's ``memory_analysis`` of a training step with row-wise Adagrad on one H200."""

    def modules() -> tuple[DLRM, SparseOptimizer]:
        model = DLRM(models.dense_part(workload), models.layout(workload), rngs=nnx.Rngs(params=0))
        rows = ops.RowWiseAdagrad(learning_rate=LEARNING_RATE)
        return model, SparseOptimizer(model, dense=optax.adagrad(LEARNING_RATE), embedding=rows)

    state, run = compile_run(*nnx.eval_shape(modules))
    given = StepBatch(batch=models.batch(workload, seed=0))
    state, given = (jax.tree.map(lambda x: ahead_of_time.shape(x.shape, x.dtype), x) for x in (state, given))
    compiled = run.step_on.trace(state, {}, {}, given).lower(lowering_platforms=("cuda",)).compile()
    if (memory := compiled.memory_analysis()) is None:
        raise SystemExit("XLA does not say what memory the program takes")
    return memory


if __name__ == "__main__":
    main()
