"""Whole training steps of DLRMs: jrec against PyTorch (EmbeddingBag(sparse=True), torch's optimizers), in one run.

Both sides start from the same weights and train on the same batches with the same MLPs, optimizer and batch size, on
all cores; their losses are compared before anything is timed. Batches lie in memory on both sides, and both keep the
memory that they free, as `jrec train` does. Two figures a model:

    step                    jrec casts inside the step, so the ratio compares all of the work
    step, cast in loader    the loader has cast, as in `jrec train` where its workers have cores of their own

Examples:
  python -m benchmarks.train_step --model kaggle
  python -m benchmarks.train_step --model rm1 rm2 rm3 rm4 --optimizer adagrad --out results.json
  python -m benchmarks.train_step --model rm1 --one-hot
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools

import jax
import numpy as np

from benchmarks import harness, models, workloads
from benchmarks.peers import client
from jrec.data.packing import CastPlace

# Caps that keep tables and Adagrad's accumulators of both sides together below 6 GB.
TABLE_ROWS = {"kaggle": 1_000_000, "rm1": 500_000, "rm2": 125_000, "rm3": 500_000, "rm4": 500_000}
QUICK_TABLE_ROWS = 50_000
OPTIMIZERS = ("adagrad", "rowwise_adagrad", "sgd")
LEARNING_RATE = 0.01
COMPARED_STEPS = 3
TOLERANCE = 1e-3  # relative; both sum in float32, in different orders


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    harness.keep_memory()
    with harness.Report(arguments, "train_step") as report, client.start_or_skip("torch_dlrm") as peer:
        for name in arguments.model:
            cap = arguments.table_rows or (QUICK_TABLE_ROWS if report.quick else TABLE_ROWS[name])
            workload = _capped(workloads.WORKLOADS[name], cap)
            if arguments.one_hot:
                one = (1,) * workload.num_tables
                workload = dataclasses.replace(workload, name=f"{workload.name}, one-hot", ids_per_bag=one)
            if arguments.batch:
                workload = workload.with_batch(arguments.batch)
            measure(report, peer, workload, arguments.optimizer)
            gc.collect()


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=tuple(TABLE_ROWS), default=["kaggle"])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--batch", type=int, help="examples a step (default: the model's own, 2048)")
    parser.add_argument("--one-hot", action="store_true", help="one id a bag, as Kaggle has it, in every model")
    parser.add_argument(
        "--table-rows",
        type=int,
        help="cap on the rows of a table (default: 1,000,000 for kaggle, 500,000 for rm1, rm3 and rm4, 125,000 for rm2,"
        " 50,000 with --quick). Uncapped, Kaggle's tables reach 10,131,227 rows and the others have 1,000,000 each",
    )
    return parser


def _capped(workload: workloads.Workload, rows: int) -> workloads.Workload:
    """The workload with no table above ``rows`` rows, and a name that says so where that changes it."""
    if rows >= max(workload.rows):
        return workload
    capped = workload.with_rows_capped(rows)
    return dataclasses.replace(capped, name=f"{workload.name} with tables capped at {rows:,} rows")


def measure(report: harness.Report, peer: client.Peer | None, workload: workloads.Workload, optimizer: str) -> None:
    """Times the steps of one workload, by turns with the peer's."""
    num_batches = 2 if report.quick else 8
    state, run = models.training_run(workload, optimizer, learning_rate=LEARNING_RATE, seed=0)
    if peer is not None:
        options = {"optimizer": optimizer, "learning_rate": LEARNING_RATE, "seed": 0, "batches": num_batches}
        peer.setup("dlrm", {}, workload=workload.to_json(), **options)
    case = f"{workload.name}, {optimizer}, batch {workload.batch:,}, {sum(workload.rows):,} rows x {workload.dim}"
    name = None if peer is None else f"torch {peer.versions['torch']}"
    places: tuple[tuple[str, CastPlace], ...] = (("step", "none"), ("step, cast in loader", "host"))
    for metric, cast in places:
        made = [models.on_device(models.batch(workload, seed=i, cast=cast)) for i in range(num_batches)]
        batches = itertools.cycle(made)

        def step() -> jax.Array:
            nonlocal state
            state, loss, _ = run.step(state, next(batches))  # noqa: B023, called in its own turn of the loop
            return loss

        if peer is not None and cast == "none":
            _compare_losses(step, peer, case)
        measured = report.compare(
            case,
            metric,
            harness.timed(step),
            peer=name,
            theirs=None if peer is None else (lambda: peer.run("step")),
            peer_versions=None if peer is None else peer.versions,
        )
        report.add(case, f"{metric}, throughput", workload.batch / measured.median, "examples/s")


def _compare_losses(step: harness.Step, peer: client.Peer, case: str) -> None:
    """Raises SystemExit unless both sides' first steps have the same losses."""
    for number in range(COMPARED_STEPS):
        own = float(step())
        peer.run("step")
        other = float(peer.call("loss")["loss"])
        if not np.isclose(own, other, rtol=TOLERANCE):
            raise SystemExit(f"{case}: step {number} has loss {own} in jrec, but {other} in PyTorch")


if __name__ == "__main__":
    main()
