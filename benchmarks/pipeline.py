"""Training on tables in host memory: the pipeline against one batch after the other, and against tables on the device.

The same model, batches and host tables in turn with a queue of ``--queue`` batches ("pipelined") and with one of 1
("sequential"); the tables are larger than what the runs touch, and rows come into being when they are first written. A
"plain" loop stands beside them: rows are pooled and updated on the host, pooled activations and their gradients travel,
nothing overlaps (the parameter-server mode of DLRM that EL-Rec compares with). On a CPU "in place" joins them, which
``jrec train`` does there by default (``jrec.run.feeds.in_place``). Then all tables are cut to a size that fits the
device, and the same batches' steps with tables on the device are compared with those on the host.

Batches lie in memory, cast, as a loader with cores of its own delivers them. ``overlap efficiency`` is the busiest
stage's time by the step's: on a CPU the stages share cores with the step, so that busy times contain waiting for cores.

Examples:
  python -m benchmarks.pipeline
  python -m benchmarks.pipeline --table-gb 19 --tables 1 --dim 128 --queue 4 --out results.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from benchmarks import harness, models, workloads
from jrec import ops
from jrec.batch import Batch
from jrec.host import HostTable
from jrec.host.pipeline import HostPipeline
from jrec.host.timeline import Timeline
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer, binary_cross_entropy
from jrec.ops.layout import EmbeddingLayout, Tier
from jrec.ops.types import Bags
from jrec.run.feeds.in_place import HostPooling
from jrec.run.step import CompiledRun, State, StepBatch, compile_run

LEARNING_RATE = 0.01
WARMUP = 8  # steps of every run before its clock starts: they fill the pipeline, and at first compile
Steps = Callable[[int], float]  # takes so many steps; seconds they took


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    with harness.Report(arguments, "pipeline") as report:
        gigabytes = arguments.table_gb or (0.5 if report.quick else 12.0)
        large = _workload(arguments, gigabytes)
        _pipelined_or_not(report, large, arguments)
        gc.collect()
        _host_or_device(report, _workload(arguments, min(gigabytes, arguments.device_gb)), arguments)
        report.add(_case(large), "peak memory of the process", _peak_bytes() / 1e9, "GB")


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--table-gb", type=float, help="all tables together, GB (default: 12, with --quick 0.5)")
    parser.add_argument("--device-gb", type=float, default=1.0, help="tables that fit the device, GB (default: 1)")
    parser.add_argument("--tables", type=int, default=8, help="how many (default: 8)")
    parser.add_argument("--dim", type=int, default=64, help="elements of a row (default: 64)")
    parser.add_argument("--ids", type=int, default=10, help="ids of an example per table (default: 10)")
    parser.add_argument("--batch", type=int, default=2048, help="examples a step (default: 2048)")
    parser.add_argument("--queue", type=int, default=3, help="of the pipelined run (default: 3)")
    return parser


def _workload(arguments: argparse.Namespace, gigabytes: float) -> workloads.Workload:
    rows = round(gigabytes * 1e9 / (4 * arguments.dim * arguments.tables))
    return workloads.Workload(
        name="host",
        rows=(rows,) * arguments.tables,
        dim=arguments.dim,
        ids_per_bag=(arguments.ids,) * arguments.tables,
        batch=arguments.batch,
        num_dense=13,
        bottom=(256, 128, arguments.dim),
        top=(256, 128, 1),
    )


def _case(workload: workloads.Workload) -> str:
    size = 4e-9 * sum(workload.rows) * workload.dim
    return f"{workload.num_tables} tables, {size:.1f} GB, dim {workload.dim}, batch {workload.batch:,}"


def _pipelined_or_not(report: harness.Report, workload: workloads.Workload, arguments: argparse.Namespace) -> None:
    batches = _batches(report, workload, "host")
    run = _HostRun(workload)
    timelines: list[dict[str, Any]] = []
    case, steps = _case(workload), 16 if report.quick else 48
    named: dict[str, Steps] = {
        "pipelined": lambda n: run.through_pipeline(batches, arguments.queue, n, timelines),
        "sequential": lambda n: run.through_pipeline(batches, 1, n, None),
        "plain": lambda n: run.plainly(batches, n),
    }
    if _on_cpu():
        named["in place"] = lambda n: run.in_place(batches, n)
    seconds = _alternate(named, steps, _rounds(report))
    for peer in ("sequential", "plain"):
        report.add(case, f"step, {peer}", 1e3 * statistics.median(seconds[peer]), "ms")
    _compare(report, case, seconds, "pipelined", ("sequential", "plain"))
    _compare(report, case, seconds, "in place", ("plain", "pipelined"))
    _add_timeline(report, case, timelines, steps)
    report.add(case, "rows in host memory", run.rows_made, "rows")


def _host_or_device(report: harness.Report, workload: workloads.Workload, arguments: argparse.Namespace) -> None:
    on_host, on_device = _batches(report, workload, "host"), _batches(report, workload, "sharded")
    host, device = _HostRun(workload), _DeviceRun(workload)
    named: dict[str, Steps] = {
        "pipelined": lambda n: host.through_pipeline(on_host, arguments.queue, n, None),
        "device only": lambda n: device.steps(on_device, n),
    }
    if _on_cpu():
        named["in place"] = lambda n: host.in_place(on_host, n)
    seconds, case = _alternate(named, 16 if report.quick else 48, _rounds(report)), _case(workload)
    report.add(case, "step, device only", 1e3 * statistics.median(seconds["device only"]), "ms")
    for way in ("pipelined", "in place"):
        _compare(report, case, seconds, way, ("device only",))


def _compare(
    report: harness.Report, case: str, seconds: dict[str, list[float]], way: str, peers: tuple[str, ...]
) -> None:
    """Adds the median seconds of ``way``, with the median ratio of each peer's to them, where it was run."""
    for peer in peers if way in seconds else ():
        ratio = statistics.median(p / o for o, p in zip(seconds[way], seconds[peer], strict=True))
        report.add(case, f"step, {way}", 1e3 * statistics.median(seconds[way]), "ms", peer=peer, ratio=ratio)


def _on_cpu() -> bool:
    """Whether rows in host memory can be read in place."""
    return jax.devices()[0].platform == "cpu"


def _rounds(report: harness.Report) -> int:
    return 2 if report.quick else 5


def _alternate(named: dict[str, Steps], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a step, by name, of rounds in which all take turns, each in the other order than the one before."""
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for number in range(rounds + 1):
        order = list(named) if number % 2 else list(reversed(named))
        for name in order:
            time.sleep(harness.PAUSE)
            taken = named[name](steps) / steps
            if number:  # the first round compiles
                seconds[name].append(taken)
    return seconds


def _batches(report: harness.Report, workload: workloads.Workload, tier: Tier) -> list[Batch]:
    return [models.batch(workload, seed=i, cast="host", tier=tier) for i in range(16 if report.quick else 48)]


def _add_timeline(report: harness.Report, case: str, timelines: list[dict[str, Any]], steps: int) -> None:
    """Medians over the rounds but the first."""
    timelines = timelines[1:]
    efficiency = statistics.median(t["overlap_efficiency"] for t in timelines)
    report.add(case, "overlap efficiency", efficiency, "of the step's time")
    for stage in timelines[0]["stages"]:
        busy = statistics.median(t["stages"][stage]["busy_seconds"] for t in timelines)
        report.add(case, f"busy, {stage}", 1e3 * busy / steps, "ms a step")
    for rows in timelines[-1]["rows"].values():
        report.add(case, "unique rows", rows["unique"] / steps, "rows a step")
        report.add(case, "unique rows found on the device", rows["hit_rate"], "of all")


class _HostRun:
    """A DLRM whose tables lie in host memory."""

    def __init__(self, workload: workloads.Workload):
        self._layout = models.layout(workload, tier="host")
        self._rows = ops.RowWiseAdagrad(learning_rate=LEARNING_RATE)
        self._state, self._run = _compiled(workload, self._layout, self._rows)
        key = nnx.Rngs(params=0).params()
        self._tables = {stack.name: HostTable(stack, self._rows, key) for stack in self._layout.members}
        self._pooling = HostPooling(self._tables)
        self._plain_state, self._plain_step = _plain_step(workload, self._layout)
        self._count = itertools.count()

    @property
    def rows_made(self) -> int:
        """Rows that memory holds."""
        return sum(table.num_made for table in self._tables.values())

    def through_pipeline(
        self, batches: list[Batch], queue: int, steps: int, timelines: list[dict[str, Any]] | None
    ) -> float:
        """Seconds of ``steps`` steps; appends what the stages did."""
        timeline = Timeline()
        source = ((batch, None) for batch in itertools.islice(itertools.cycle(batches), WARMUP + steps))
        with HostPipeline(source, self._layout, self._tables, queue=queue, timeline=timeline) as pipeline:
            for _ in range(WARMUP):
                self._step(pipeline)
            pipeline.flush()
            timeline.reset()
            start = time.perf_counter()
            for _ in range(steps):
                self._step(pipeline)
            pipeline.flush()
            seconds = time.perf_counter() - start
        if timelines is not None:
            timelines.append(timeline.summary(seconds))
        return seconds

    def _step(self, pipeline: HostPipeline) -> None:
        ready = pipeline.get()
        assert ready is not None, "the source yields enough"
        given = StepBatch(batch=ready.batch)
        self._state, _, rows, _ = self._run.step_on(self._state, {}, ready.tables, given)
        pipeline.put_back(ready, rows)

    def in_place(self, batches: list[Batch], steps: int) -> float:
        """Seconds of ``steps`` steps of a run that pools and updates its rows where they lie."""
        start = 0.0
        for number, batch in enumerate(itertools.islice(itertools.cycle(batches), WARMUP + steps)):
            if number == WARMUP:
                start = time.perf_counter()
            self._state, _, updates, _ = self._run.step_on(self._state, {}, {}, self._pooling.pooled(batch))
            self._pooling.update(batch, updates)
        return time.perf_counter() - start

    def plainly(self, batches: list[Batch], steps: int) -> float:
        """Seconds of ``steps`` steps that pool and update on the host, one after the other."""
        start = 0.0
        for number, batch in enumerate(itertools.islice(itertools.cycle(batches), WARMUP + steps)):
            if number == WARMUP:
                start = time.perf_counter()
            pooled = {name: table.gather_reduce(batch.bags[name], make=True) for name, table in self._tables.items()}
            self._plain_state, gradients = self._plain_step(self._plain_state, pooled, batch)
            for name, table in self._tables.items():
                bags: Bags = batch.bags[name]
                assert bags.cast is not None, "the batches are cast"
                table.casted_update(bags.cast, jax.device_get(gradients[name]), step=next(self._count))
        return time.perf_counter() - start


class _DeviceRun:
    """The same DLRM with its tables on the device."""

    def __init__(self, workload: workloads.Workload):
        rows = ops.RowWiseAdagrad(learning_rate=LEARNING_RATE)
        self._state, self._run = _compiled(workload, models.layout(workload), rows)

    def steps(self, batches: list[Batch], steps: int) -> float:
        """Seconds of ``steps`` steps."""
        start, loss = 0.0, None
        for number, batch in enumerate(itertools.islice(itertools.cycle(batches), WARMUP + steps)):
            if number == WARMUP:
                jax.block_until_ready(loss)
                start = time.perf_counter()
            self._state, loss, _ = self._run.step(self._state, batch)
        jax.block_until_ready(loss)
        return time.perf_counter() - start


def _model(workload: workloads.Workload, layout: EmbeddingLayout) -> DLRM:
    config = DLRMConfig(num_dense=workload.num_dense, bottom_mlp=workload.bottom, top_mlp=workload.top)
    return DLRM(config, layout, rngs=nnx.Rngs(params=0))


def _compiled(
    workload: workloads.Workload, layout: EmbeddingLayout, rows: ops.RowOptimizer
) -> tuple[State, CompiledRun]:
    model = _model(workload, layout)
    return compile_run(model, SparseOptimizer(model, dense=optax.adagrad(LEARNING_RATE), embedding=rows))


def _plain_step(workload: workloads.Workload, layout: EmbeddingLayout) -> tuple[State, Callable[..., Any]]:
    """Only the dense part: ``state, activations, batch -> state, gradients of the activations``."""
    model = _model(workload, layout)
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.adagrad(LEARNING_RATE), wrt=nnx.Param)))

    @jax.jit
    def step(state: State, activations: dict[str, jax.Array], batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        model, optimizer = nnx.merge(graph, state)

        def objective(model: DLRM, activations: dict[str, jax.Array]) -> jax.Array:
            return binary_cross_entropy(model.logits(batch.dense, activations, batch.bags), batch)

        gradient = nnx.grad(objective, argnums=(nnx.DiffState(0, nnx.Param), 1))
        of_dense, of_activations = gradient(model, activations)
        optimizer.update(model, of_dense)
        return nnx.state((model, optimizer)), of_activations

    return state, step


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
