"""Embedding forward, and backward with the optimizer's update: jrec inside jit against FBGEMM and PyTorch, in one run.

The design's CPU case (8 tables x 100,000 rows, 2,048 bags of 20 ids, dim 64, Zipf 1.2), and around it dims 16 and 128,
one-hot bags, and Zipf 1.05. Outputs and updated rows of all sides are compared before anything is timed. All sides keep
the memory that they free (`harness.keep_memory`), as `jrec train` does.

    forward                    pooled outputs of the batch: jrec's (tables, batch, dim), FBGEMM's (batch, tables * dim),
                               PyTorch's a list of (batch, dim) a table; no side joins or transposes them
    backward                   cast, casted gather-reduce and row-wise Adagrad (Adagrad against PyTorch), one program
    backward, cast in loader   the same without the cast

Examples:
  python -m benchmarks.embedding --device cpu
  python -m benchmarks.embedding --case cpu one-hot --out results.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, models, workloads
from benchmarks.peers import client
from jrec import ops

_CPU = workloads.WORKLOADS["cpu"]
CASES = {
    "cpu": _CPU,
    "dim 16": dataclasses.replace(_CPU, name="cpu, dim 16", dim=16),
    "dim 128": dataclasses.replace(_CPU, name="cpu, dim 128", dim=128),
    "one-hot": dataclasses.replace(_CPU, name="cpu, one-hot", ids_per_bag=(1,) * 8),
    "zipf 1.05": dataclasses.replace(_CPU, name="cpu, Zipf 1.05", zipf=1.05),
}
QUICK_CASES = ("cpu",)
LEARNING_RATE = 0.01
EPSILON = 1e-10  # as the peers', and so is the accumulator
INITIAL_ACCUMULATOR = 0.1
ADAGRAD = {"learning_rate": LEARNING_RATE, "eps": EPSILON, "initial_accumulator": INITIAL_ACCUMULATOR}
HEAD_ROWS = 64  # as in benchmarks.peers.embedding_actions
OUTPUT_TOLERANCE = 1e-5
UPDATE_TOLERANCE = 5e-3 * LEARNING_RATE  # a hot row sums tens of thousands of float32 terms, each side in its own order
MODULES = {"fbgemm": "fbgemm_tbe", "torch": "torch_embedding"}
PEERS = {"fbgemm": ("rowwise_adagrad", "fbgemm_gpu-cpu", "FBGEMM"), "torch": ("adagrad", "torch", "torch")}
OPTIMIZERS: dict[str, ops.RowOptimizer] = {
    "rowwise_adagrad": ops.RowWiseAdagrad(**ADAGRAD),
    "adagrad": ops.Adagrad(**ADAGRAD),
}


class Side:
    """jrec's side of a case: tables, slots and the jitted programs over them."""

    def __init__(self, workload: workloads.Workload, optimizer: ops.RowOptimizer) -> None:
        rows = sum(workload.rows)
        self._bases = np.cumsum([0, *workload.rows])
        ids = [i + np.int32(b) for i, b in zip(workloads.table_ids(workload, seed=0), self._bases, strict=False)]
        self._workload = workload
        self._ids = jnp.asarray(np.concatenate(ids))
        self._table = jnp.asarray(models.table_stack(workload, seed=0))
        self._slots = optimizer.init(self._table)
        tables, batch, dim = workload.num_tables, workload.batch, workload.dim
        gradient = workloads.output_gradient(workload, seed=0).reshape(batch, tables, dim)
        self._gradient = jnp.asarray(np.ascontiguousarray(gradient.swapaxes(0, 1)).reshape(-1, dim))

        def update(table: Any, slots: Any, cast: Any, gradient: Any) -> Any:
            return ops.casted_update(optimizer, table, slots, cast, gradient)

        def backward(table: Any, slots: Any, ids: Any, gradient: Any) -> Any:
            return update(table, slots, ops.tensor_cast(ids, num_rows=rows), gradient)

        self._forward = jax.jit(ops.gather_reduce)
        self._backward = jax.jit(backward, donate_argnums=(0, 1))
        self._update = jax.jit(update, donate_argnums=(0, 1))
        self._cast = ops.tensor_cast(self._ids, num_rows=rows)

    def forward(self) -> jax.Array:
        """Pooled outputs, feature-major."""
        return self._forward(self._table, self._ids)

    def backward(self) -> jax.Array:
        """Casts, reduces and updates."""
        self._table, self._slots = self._backward(self._table, self._slots, self._ids, self._gradient)
        return self._table

    def backward_with_cast(self) -> jax.Array:
        """Reduces and updates, by a cast made beforehand."""
        self._table, self._slots = self._update(self._table, self._slots, self._cast, self._gradient)
        return self._table

    def outputs(self) -> np.ndarray:
        """Pooled outputs as the peers lay them out, (batch, tables * dim)."""
        w = self._workload
        out = np.asarray(self.forward()).reshape(w.num_tables, w.batch, w.dim)
        return out.swapaxes(0, 1).reshape(w.batch, -1)

    def heads(self) -> list[np.ndarray]:
        """The first rows of every table."""
        table = np.asarray(self._table)
        return [table[base : base + HEAD_ROWS] for base in self._bases[:-1]]


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--device", choices=("cpu",), default="cpu", help="where to run; GPUs have benchmarks.gpu")
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), help="default: all; with --quick the first one")
    arguments = parser.parse_args()
    harness.keep_memory()
    jax.config.update("jax_platforms", arguments.device)
    names = arguments.case or (QUICK_CASES if arguments.quick else tuple(CASES))
    with harness.Report(arguments, "embedding") as report, contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(client.start_or_skip(module)) for name, module in MODULES.items()}
        for name in names:
            for kind, peer in peers.items():
                _measure(report, CASES[name], kind, peer)
                gc.collect()


def _measure(report: harness.Report, workload: workloads.Workload, kind: str, peer: client.Peer | None) -> None:
    optimizer, distribution, label = PEERS[kind]
    side = Side(workload, OPTIMIZERS[optimizer])
    case = f"{workload.name}, {optimizer}, {workload.lookups:,} lookups, {sum(workload.rows):,} rows x {workload.dim}"
    if peer is not None:
        options = {"optimizer": optimizer, "learning_rate": LEARNING_RATE, "seed": 0}
        peer.setup(kind, {}, workload=workload.to_json(), **options)
        _compare(side, peer, case)
        label = f"{label} {peer.versions[distribution]}"

    def against(metric: str, ours: Callable[[], Any], action: str) -> None:
        if peer is None:
            report.compare(case, metric, harness.timed(ours))
            return
        theirs = functools.partial(peer.run, action)
        report.compare(case, metric, harness.timed(ours), peer=label, theirs=theirs, peer_versions=peer.versions)

    against("forward", side.forward, "forward")
    against("backward", side.backward, "backward")
    against("backward, cast in loader", side.backward_with_cast, "backward")


def _compare(side: Side, peer: client.Peer, case: str) -> None:
    """Raises SystemExit unless outputs, and the first rows after one update, agree."""
    pairs = [(side.outputs(), peer.call("outputs")["outputs"], OUTPUT_TOLERANCE)]
    side.backward()
    peer.run("step")
    heads = zip(side.heads(), peer.call("heads").values(), strict=True)
    pairs += [(own, other, UPDATE_TOLERANCE) for own, other in heads]
    for own, other, tolerance in pairs:
        if not np.allclose(own, other, rtol=OUTPUT_TOLERANCE, atol=tolerance):
            raise SystemExit(f"{case}: jrec's numbers differ from the peer's by up to {np.abs(own - other).max()}")


if __name__ == "__main__":
    main()
