"""The GPU kernels against the memory: each as a fraction of its byte floor, beside XLA's own lowering and PyTorch.

First the bandwidth of a large copy is measured. A kernel's *floor* is the time that bandwidth takes for each distinct
input byte once and each output byte once: rows that several lookups share count once, although only a cache can make
that true. Ids differ from call to call, and outputs and updated tables of XLA and Pallas are compared before anything
is timed.

    forward            gather-reduce of the batch
    update             casted gather-reduce and optimizer in one program, the cast made beforehand
    cast and update    the same with the cast on the device

Examples:
  python -m benchmarks.gpu --out results.json
  python -m benchmarks.gpu --quick --case dynamicemb
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, workloads
from jrec import ops
from jrec.ops.dispatch import Implementation

BATCH = 65_536
BATCHES = 3  # sets of ids in rotation
MAX_TABLE_BYTES = 40 << 30  # tables and element-wise slots of every case fit a 141 GB GPU beside PyTorch's
COPY_BYTES = 4 << 30
CALLS = 10  # per timed run, so that the time to launch a program hides behind the one before
_CAPPED = {name: dataclasses.replace(workloads.WORKLOADS[name], batch=BATCH) for name in ("kaggle", "terabyte")}
CASES: dict[str, tuple[workloads.Workload, ops.RowOptimizer]] = {
    "cpu": (workloads.WORKLOADS["cpu"], ops.RowWiseAdagrad(learning_rate=0.01)),
    **{name: (workload, ops.RowWiseAdagrad(learning_rate=0.01)) for name, workload in _CAPPED.items()},
    **{
        name: (dataclasses.replace(workloads.WORKLOADS[name], batch=8192), ops.RowWiseAdagrad(learning_rate=0.01))
        for name in ("mlperf", "rm1", "rm2", "rm3", "rm4")
    },
    "dynamicemb": (workloads.WORKLOADS["dynamicemb"], ops.Adam(learning_rate=0.01)),
}
QUICK_CASES = ("cpu", "dynamicemb")
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """Bytes that must move: each distinct input byte once, each output byte once."""

    read: int
    written: int

    def seconds(self, bandwidth: float) -> float:
        """Time at ``bandwidth`` bytes per second, reads and writes together."""
        return (self.read + self.written) / bandwidth


def forward_floor(ids: np.ndarray, *, bags: int, dim: int, itemsize: int, weighted: bool = False) -> Floor:
    """Of a gather-reduce: ids (and weights), distinct rows, and float32 sums."""
    rows = np.unique(ids[ids >= 0]).size
    return Floor(read=ids.size * (8 if weighted else 4) + rows * dim * itemsize, written=bags * dim * 4)


def update_floor(ids: np.ndarray, *, bags: int, dim: int, itemsize: int, optimizer: ops.RowOptimizer) -> Floor:
    """Of a casted update: the cast, bag gradients, and the touched rows and slots, in and out."""
    flat = ids[ids >= 0]
    rows = np.unique(flat).size
    slots = sum(dim if kind == "element" else 1 for kind in optimizer.slots.values()) * 4
    touched = rows * (dim * itemsize + slots)
    return Floor(read=flat.size * 4 + rows * 8 + bags * dim * 4 + touched, written=touched)


def capped(workload: workloads.Workload, limit: int = MAX_TABLE_BYTES) -> workloads.Workload:
    """The workload with its largest tables cut until they fit ``limit`` bytes together."""
    cap = max(workload.rows)
    while sum(min(r, cap) for r in workload.rows) * workload.dim * 4 > limit:
        cap = cap * 9 // 10
    return workload.with_rows_capped(cap)


def stacked_ids(workload: workloads.Workload, *, seed: int) -> np.ndarray:
    """Addresses of one batch in the stack of all tables, feature-major: (bags, length), or (lookups,) with offsets."""
    bases = np.cumsum([0, *workload.rows[:-1]])
    ids = [i + np.int32(b) for i, b in zip(workloads.table_ids(workload, seed=seed), bases, strict=True)]
    if len(set(workload.ids_per_bag)) == 1:
        return np.concatenate(ids)
    return np.concatenate([i.reshape(-1) for i in ids])


def stacked_offsets(workload: workloads.Workload) -> np.ndarray | None:
    """Where bags begin, (bags + 1,) int32, for tables with different numbers of ids; else None."""
    if len(set(workload.ids_per_bag)) == 1:
        return None
    lengths = np.repeat(workload.ids_per_bag, workload.batch)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(rows: int, dim: int) -> jax.Array:
    """(rows, dim) float32 in [-1, 1), made in one pass without temporaries."""
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, (rows, dim), axis) for axis in (0, 1))
    mixed = (row * jnp.uint32(0x9E3779B1) ^ column * jnp.uint32(0x85EBCA6B)) * jnp.uint32(0x27D4EB2F)
    return (mixed >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - jnp.float32(1)


class Side:
    """A case's tables, batches, and the compiled programs of one implementation over them."""

    def __init__(self, workload: workloads.Workload, optimizer: ops.RowOptimizer, name: Implementation) -> None:
        rows, offsets = sum(workload.rows), stacked_offsets(workload)
        self.table = _filled(rows, workload.dim)
        self.slots = optimizer.init(self.table)
        self.bags = workload.batch * workload.num_tables
        self.gradients = _filled(self.bags, workload.dim)
        self.offsets = None if offsets is None else jnp.asarray(offsets)
        self.ids = [jnp.asarray(stacked_ids(workload, seed=s)) for s in range(BATCHES)]
        cast = jax.jit(functools.partial(ops.tensor_cast, num_rows=rows, implementation="xla"))
        self.casts = [cast(ids, self.offsets) for ids in self.ids]
        self._turn = itertools.cycle(range(BATCHES))

        def update(table: Any, slots: Any, cast: Any, gradients: Any) -> Any:
            return ops.casted_update(optimizer, table, slots, cast, gradients, implementation=name)

        def cast_and_update(table: Any, slots: Any, ids: Any, offsets: Any, gradients: Any) -> Any:
            made = ops.tensor_cast(ids, offsets, num_rows=rows, implementation="xla")
            return update(table, slots, made, gradients)

        self._forward = jax.jit(functools.partial(ops.gather_reduce, implementation=name))
        self._update = jax.jit(update, donate_argnums=(0, 1))
        self._cast_and_update = jax.jit(cast_and_update, donate_argnums=(0, 1))

    def forward(self, batch: int | None = None) -> jax.Array:
        """Sums of the next batch, or of the given one."""
        ids = self.ids[next(self._turn) if batch is None else batch]
        return self._forward(self.table, ids, self.offsets)

    def update(self, batch: int | None = None) -> jax.Array:
        """One step along the bag gradients."""
        cast = self.casts[next(self._turn) if batch is None else batch]
        self.table, self.slots = self._update(self.table, self.slots, cast, self.gradients)
        return self.table

    def cast_and_update(self) -> jax.Array:
        """The same, casting first."""
        ids = self.ids[next(self._turn)]
        self.table, self.slots = self._cast_and_update(self.table, self.slots, ids, self.offsets, self.gradients)
        return self.table


def copy_bandwidth(size: int = COPY_BYTES) -> float:
    """Bytes read and written per second by a large copy."""
    source = _filled(size // 4096, 1024)
    copy = jax.jit(lambda x: x + 1)
    measured = harness.alternate(harness.timed(lambda: copy(source), calls=CALLS), seconds=2.0)
    return 2 * source.nbytes / measured.median


def torch_runs(workload: workloads.Workload) -> dict[str, harness.Run] | None:
    """PyTorch's EmbeddingBag forward, and sparse backward with Adagrad, on the same GPU; None where it is missing."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    offsets = stacked_offsets(workload)
    bag = torch.nn.EmbeddingBag(sum(workload.rows), workload.dim, mode="sum", sparse=True, device="cuda")
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.01)
    ids = [torch.as_tensor(stacked_ids(workload, seed=s), device="cuda") for s in range(BATCHES)]
    starts = None if offsets is None else torch.as_tensor(offsets[:-1], device="cuda")
    gradient = torch.randn(workload.batch * workload.num_tables, workload.dim, device="cuda")
    turn = itertools.cycle(ids)

    def timed(call: Callable[[], Any]) -> harness.Run:
        def run() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / CALLS

        return run

    def step() -> None:
        out = bag(next(turn), starts)
        optimizer.zero_grad()
        out.backward(gradient)
        optimizer.step()

    def forward() -> Any:
        with torch.no_grad():
            return bag(next(turn), starts)

    return {"forward": timed(forward), "forward, backward and Adagrad": timed(step)}


def _agree(sides: dict[str, Side]) -> None:
    """Compares outputs and updated tables of the implementations; raises where they differ by more than rounding."""
    xla, pallas = sides["xla"], sides["pallas"]
    for what, got, want in (
        ("forward", pallas.forward(0), xla.forward(0)),
        ("update", pallas.update(0), xla.update(0)),
    ):
        error = float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))
        if not error < 1e-4:  # NaN fails too
            raise SystemExit(f"benchmarks.gpu: {what} of pallas and xla differ by {error:.1e} of the largest value")


def run_case(report: harness.Report, name: str, bandwidth: float) -> None:
    """Compares and times one case."""
    workload, optimizer = CASES[name]
    workload = capped(workload)
    sides = {i: Side(workload, optimizer, i) for i in IMPLEMENTATIONS}
    _agree(sides)
    ids = np.asarray(sides["xla"].ids[0])
    common: dict[str, Any] = {"bags": sides["xla"].bags, "dim": workload.dim, "itemsize": 4}
    floors = {
        "forward": forward_floor(ids, **common),
        "update": update_floor(ids, **common, optimizer=optimizer),
        "cast_and_update": update_floor(ids, **common, optimizer=optimizer),
    }
    for metric, floor in floors.items():
        ours, theirs = (harness.timed(getattr(sides[i], metric), calls=CALLS) for i in ("pallas", "xla"))
        label = metric.replace("_", " ")
        measured = report.compare(name, label, ours, peer="xla", theirs=theirs, seconds=report.seconds / 4)
        report.add(name, f"{label}, fraction of floor", floor.seconds(bandwidth) / measured.median, "")
    del sides, ours, theirs
    for metric, run in (torch_runs(workload) or {}).items():
        measured = harness.alternate(run, seconds=report.seconds / 4)
        report.add(name, f"{metric}, torch", 1e3 * measured.median, "ms")


def main() -> None:
    """Runs the cases that were asked for."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), help="only these cases")
    arguments = parser.parse_args()
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # before JAX's backend starts: PyTorch shares the GPU
    with harness.Report(arguments, "gpu") as report:
        if jax.default_backend() != "gpu":
            report.note("skipped: there is no NVIDIA GPU that JAX can use; install jrec[cuda] on a machine with one")
            return
        bandwidth = copy_bandwidth()
        report.add("copy", "bandwidth", bandwidth / 1e9, "GB/s")
        for name in arguments.case or (QUICK_CASES if arguments.quick else CASES):
            run_case(report, name, bandwidth)


if __name__ == "__main__":
    main()
