"""Tables in host memory against FBGEMM's CPU tables: gather-reduce and fused update, in one run, alternating.

    gather    pooled outputs of a batch, in an array made beforehand, as the loader's cast allows
    update    casted gather-reduce and row-wise Adagrad in place, by the loader's cast (FBGEMM: its backward pass)
    both      one after the other: what a training step asks of the tables

Cases: the design's (8 tables x 2,048 bags x 20 ids x 64, Zipf 1.2), Criteo Kaggle's 26 tables one-hot, and RM2's 40
tables with 80 ids a bag, of 100,000 rows each so that both sides' tables fit in memory. Outputs and updated rows of
both sides are compared before anything is timed.

Bandwidth is the bytes that the algorithm moves (every lookup's row or bag gradient, every output, every touched row
and slot in and out) by the time it takes, as a fraction of two figures of the same run: a copy of arrays far larger
than the caches, and a gather of random rows from one. Rows that caches hold make fractions above 1 possible.

Examples:
  python -m benchmarks.host_table
  python -m benchmarks.host_table --quick --case cpu --out results.json
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from typing import Any

import jax
import numpy as np

from benchmarks import harness, models, workloads
from benchmarks.embedding import ADAGRAD, HEAD_ROWS, LEARNING_RATE, OUTPUT_TOLERANCE, UPDATE_TOLERANCE
from benchmarks.peers import client
from jrec import ops
from jrec.host import HostTable
from jrec.native import host, threads
from jrec.ops.types import Bags

RM2_ROWS = 100_000
CASES = {
    "cpu": workloads.WORKLOADS["cpu"],
    "kaggle": workloads.WORKLOADS["kaggle"],
    "rm2": workloads.WORKLOADS["rm2"].with_rows_capped(RM2_ROWS),
}
QUICK_CASES = ("cpu",)
OPTIMIZER = ops.RowWiseAdagrad(**ADAGRAD)
COPY_BYTES = 256 << 20  # eight times the last cache of the machines this ran on


class Side:
    """jrec's side: a host table with the workload's rows, its batch and cast."""

    def __init__(self, workload: workloads.Workload) -> None:
        (stack,) = models.layout(workload).stacks.values()
        self._workload, self._stack = workload, stack
        self.table = HostTable(stack, OPTIMIZER, jax.random.key(0, impl="threefry2x32"), huge_pages=True)
        for t, base in enumerate(stack.bases):
            self._fill(base, workloads.initial_table(workload, t, seed=0))
        ids: Any = np.concatenate(
            [i + np.int32(b) for i, b in zip(workloads.table_ids(workload, seed=0), stack.bases, strict=True)]
        )
        edges = np.arange(workload.num_tables + 1) * workload.batch
        segments = np.stack([edges, [*stack.bases, stack.rows]], axis=1)
        self.cast = host.tensor_cast(ids, num_rows=stack.rows, segments=segments)
        self.bags = Bags(ids=ids, cast=self.cast)
        gradient = workloads.output_gradient(workload, seed=0).reshape(workload.batch, workload.num_tables, -1)
        self.gradient = np.ascontiguousarray(gradient.swapaxes(0, 1)).reshape(-1, workload.dim)
        self._out = np.empty_like(self.gradient)

    def _fill(self, base: int, values: np.ndarray, step: int = 1 << 20) -> None:
        for begin in range(0, len(values), step):
            chunk = values[begin : begin + step]
            sums = np.full(len(chunk), OPTIMIZER.initial_accumulator, np.float32)
            self.table.store(np.arange(base + begin, base + begin + len(chunk), dtype=np.int32), chunk, {"sum": sums})

    def gather(self) -> np.ndarray:
        """Pooled outputs, feature-major."""
        return self.table.gather_reduce(self.bags, out=self._out)

    def update(self) -> None:
        """Reduces and updates, by the cast made beforehand."""
        self.table.casted_update(self.cast, self.gradient)

    def both(self) -> None:
        """A step."""
        self.gather()
        self.update()

    def outputs(self) -> np.ndarray:
        """Pooled outputs as the peer lays them out, (batch, tables * dim)."""
        w = self._workload
        return self.gather().reshape(w.num_tables, w.batch, w.dim).swapaxes(0, 1).reshape(w.batch, -1)

    def heads(self) -> list[np.ndarray]:
        """The first rows of every table."""
        sizes = zip(self._stack.bases, self._workload.rows, strict=True)
        return [self.table.read(np.arange(b, b + min(HEAD_ROWS, n), dtype=np.int32)) for b, n in sizes]

    def moved(self) -> tuple[int, int]:
        """Bytes that a gather and an update move, were there no caches."""
        lookups, row, unique = self.bags.ids.size, 4 * self._workload.dim, int(self.cast.num_unique)
        return lookups * (row + 4) + self._out.nbytes, lookups * (row + 4) + unique * (2 * row + 2 * 4 + 8)


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), help="default: all; with --quick the first one")
    parser.add_argument("--rows", type=int, help="cap on the rows of each table, for machines with little memory")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    names = arguments.case or (QUICK_CASES if arguments.quick else tuple(CASES))
    with harness.Report(arguments, "host_table") as report, client.start_or_skip("fbgemm_tbe") as peer:
        limits = _bandwidths(report)
        for name in names:
            workload = CASES[name] if arguments.rows is None else CASES[name].with_rows_capped(arguments.rows)
            _measure(report, dataclasses.replace(workload, bottom=(), top=()), peer, limits)
            gc.collect()


def _measure(
    report: harness.Report, workload: workloads.Workload, peer: client.Peer | None, limits: dict[str, float]
) -> None:
    side = Side(workload)
    case = f"{workload.name}, {workload.lookups:,} lookups, {sum(workload.rows):,} rows x {workload.dim}"
    options = {}
    if peer is not None:
        setup = {"optimizer": "rowwise_adagrad", "learning_rate": LEARNING_RATE, "seed": 0}
        peer.setup("fbgemm", {}, workload=workload.to_json(), **setup)
        _compare(side, peer, case)
        options = {"peer": f"FBGEMM {peer.versions['fbgemm_gpu-cpu']}", "peer_versions": peer.versions}
    gathered, updated = side.moved()
    for metric, ours, action, moved in (
        ("gather", side.gather, "forward", gathered),
        ("update", side.update, "backward", updated),
        ("both", side.both, "step", gathered + updated),
    ):
        theirs = None if peer is None else functools.partial(peer.run, action)
        measured = report.compare(case, metric, harness.timed(ours), theirs=theirs, **options)
        report.add(case, f"{metric}, bandwidth", moved / measured.median / 2**30, "GiB/s")
        for name, limit in limits.items():
            report.add(case, f"{metric}, bandwidth by {name}", moved / measured.median / limit, "")


def _bandwidths(report: harness.Report) -> dict[str, float]:
    """Bytes a second, in and out together, that this machine copies, and reads of random rows of 64 floats."""
    source = np.ones((COPY_BYTES // 256, 64), np.float32)
    target = np.zeros_like(source)
    count = threads.num_threads()
    every = np.arange(len(source), dtype=np.int32)[:, None]
    shuffled = np.random.default_rng(0).permutation(every)
    seconds = 1.0 if report.quick else 3.0
    limits = {}
    for name, ids in (("copy", every), ("random gather", shuffled)):
        run = harness.timed(functools.partial(host.gather_reduce, source, ids, out=target, threads=count))
        measured = harness.alternate(run, seconds=seconds, min_pairs=3)
        limits[name] = 2 * COPY_BYTES / measured.fastest
        report.add("memory", f"{name}, in and out", limits[name] / 2**30, "GiB/s")
    return limits


def _compare(side: Side, peer: client.Peer, case: str) -> None:
    """Raises SystemExit unless outputs, and the first rows after one update, agree."""
    pairs = [(side.outputs(), peer.call("outputs")["outputs"], OUTPUT_TOLERANCE)]
    side.update()
    peer.run("step")
    pairs += [
        (own, other, UPDATE_TOLERANCE) for own, other in zip(side.heads(), peer.call("heads").values(), strict=True)
    ]
    for own, other, tolerance in pairs:
        if not np.allclose(own, other, rtol=OUTPUT_TOLERANCE, atol=tolerance):
            raise SystemExit(f"{case}: jrec's numbers differ from the peer's by up to {np.abs(own - other).max()}")


if __name__ == "__main__":
    main()
