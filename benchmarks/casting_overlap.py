"""Tensor Casting hidden (Figures 4, 12, 13): whole steps of RM1 to RM4, the cast on idle cores, in the step, or none.

The paper casts on a GPU while the CPU looks up. Here a loader thread casts the next batches on a core of its own while
the step runs on another: one process, whose compute threads stay on one core and whose loader stays on the last one.
All sides run the same lookup, MLPs, SGD and loader, on the same native kernels and radix sort; their backward passes
through the embeddings differ. Losses are compared before anything is timed, and sides alternate in blocks of steps.
Freed memory is kept (`harness.keep_memory`), as `jrec train` and PyTorch's caching allocators keep it. Otherwise the
system would zero the pages of RM1's 420 MB of expanded gradients at every step, more than half of the baseline's.

    step, cast ahead         the loader packs and casts; the step does a fused casted update (ours, as `jrec train`)
    step, cast in the step   the loader packs; the step casts, then the same update
    step, no casting         the loader packs; the step expands, sorts, accumulates and scatters (the baseline)
    step, cast given         batches and casts were made beforehand: the step with nothing to hide

    cast exposed             by how much "ahead" takes longer than "given", a median over pairs of blocks: packing,
                             and sharing memory with a busy core, count too
    cast hidden              100 % less the exposed time by the cast's; where the cast is below 5 % of the step, noise
                             is as large and the line is left out

The embeddings' shares of the baseline's step are Figure 4's, of the times of single primitives (``benchmarks.casting``)
and of the MLPs with the interaction. Near-memory processing (the paper's NMP) needs hardware that does not exist here.

Examples:
  python -m benchmarks.casting_overlap
  python -m benchmarks.casting_overlap --batch 1024 4096 8192 16384 32768   # Figure 16
  python -m benchmarks.casting_overlap --dim 32 128 256                     # Figure 17
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import casting, harness, models, train_step, workloads
from jrec import ops
from jrec.batch import Batch
from jrec.data.packing import CastPlace, pack_batch
from jrec.native import host
from jrec.nn import DLRM, binary_cross_entropy

AHEAD, GIVEN, IN_STEP, NONE = "cast ahead", "cast given", "cast in the step", "no casting"
SIDES = (AHEAD, IN_STEP, NONE, GIVEN)
BATCHES, QUICK_BATCH, QUICK_ROWS = (2048,), 256, 20_000
NUM_BATCHES = 4
BLOCK_SECONDS = 0.5
LEARNING_RATE = 0.01
LEAST_SHARE = 0.05  # of a step; a shorter cast cannot be told from noise
TOLERANCE = 1e-4  # relative, of losses; sums of float32 in different orders
DENSE = "MLPs and interaction"
State = Any


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    if arguments.measure:
        harness.keep_memory()
        chosen = arguments.model[0], arguments.batch[0], arguments.dim[0]
        print(json.dumps(measure(*chosen, arguments.seconds, quick=arguments.quick)))
        return
    with harness.Report(arguments, "casting_overlap") as report:
        for model in arguments.model or (casting.MODELS[:1] if report.quick else casting.MODELS):
            for batch in arguments.batch or ((QUICK_BATCH,) if report.quick else BATCHES):
                for dim in arguments.dim or (casting.DIM,):
                    _report(report, _in_process(model, batch, dim, report.seconds, quick=report.quick))


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=casting.MODELS)
    parser.add_argument("--batch", nargs="+", type=int, help=f"default: {' '.join(map(str, BATCHES))}")
    parser.add_argument("--dim", nargs="+", type=int, help=f"default: {casting.DIM}")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser


def _in_process(model: str, batch: int, dim: int, seconds: float, *, quick: bool) -> dict[str, Any]:
    """``measure`` in a process of its own: XLA makes its threads for the cores that it finds when it starts."""
    command = [sys.executable, "-m", "benchmarks.casting_overlap", "--measure", "--model", model, "--batch", str(batch)]
    command += ["--dim", str(dim), "--seconds", str(seconds), *(["--quick"] if quick else [])]
    done = subprocess.run(command, cwd=harness.ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, batch: int, dim: int, seconds: float, *, quick: bool) -> dict[str, Any]:
    """Milliseconds of all sides' steps, of the cast, of single primitives and of the MLPs; see the module.

    Raises:
      SystemExit: With less than two cores, or where the sides' losses differ.
    """
    step_core, loader_core = _cores()
    os.sched_setaffinity(0, {step_core})
    cap = QUICK_ROWS if quick else train_step.TABLE_ROWS[model]
    workload = workloads.WORKLOADS[model].with_rows_capped(cap).with_batch(batch).with_dim(dim)
    point = casting.measure(workload, casting.QUICK_SECONDS if quick else casting.SECONDS)
    run = Run(workload)
    with futures.ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {loader_core})) as loader:
        run.compare_losses()
        seconds_of = run.alternate(loader, seconds, rounds=2 if quick else 3)
        cast = loader.submit(run.cast_seconds).result()
    return {
        "case": f"{model}, batch {batch:,}, dim {workload.dim}, tables of {cap:,} rows",
        "steps": {side: 1e3 * statistics.median(times) for side, times in seconds_of.items()},
        "speedups": {
            side: statistics.median(base / own for base, own in zip(seconds_of[NONE], times, strict=True))
            for side, times in seconds_of.items()
        },
        "exposed": 1e3
        * statistics.median(ahead - ready for ahead, ready in zip(seconds_of[AHEAD], seconds_of[GIVEN], strict=True)),
        "cast": 1e3 * cast,
        "primitives": {**point.milliseconds, DENSE: 1e3 * run.dense_seconds()},
    }


def _cores() -> tuple[int, int]:
    """The step's core and the loader's."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else [0]
    if len(cores) < 2:
        raise SystemExit("casting_overlap needs Linux and two cores: the step has one, and the loader the other")
    return cores[0], cores[-1]


class Run:
    """A model with its batches, and a compiled step a side, all of them on one state.

    Args:
      workload: Every table has as many rows and ids a bag as the others.
    """

    def __init__(self, workload: workloads.Workload) -> None:
        self._workload, self._layout = workload, models.layout(workload)
        model = DLRM(models.dense_part(workload), self._layout, rngs=nnx.Rngs(params=0))
        (self._stack,) = model.embeddings.arrays()
        model.embeddings.set_arrays({self._stack: jnp.asarray(models.table_stack(workload, seed=0))})
        optimizer = nnx.Optimizer(model, optax.sgd(LEARNING_RATE), wrt=nnx.Param)
        self._graph, self._state = nnx.split((model, optimizer))
        self._columns = [models.columns(workload, seed=i) for i in range(NUM_BATCHES)]
        self._unique = max(self._unique_rows(number) for number in range(NUM_BATCHES))
        self._steps = {side: jax.jit(self._step(side), donate_argnums=0) for side in SIDES}
        self._given: list[Batch] = []

    def packed(self, number: int, cast: CastPlace) -> Batch:
        """What the loader makes of a batch, in JAX arrays."""
        columns, names = self._columns[number % NUM_BATCHES], models.dense_names(self._workload)
        return models.on_device(pack_batch(self._layout, columns, dense=names, cast=cast))

    def _unique_rows(self, number: int) -> int:
        ids = (self._columns[number][f"t{t:03d}"] for t in range(self._workload.num_tables))
        return sum(len(np.unique(column)) for column in ids)

    def _step(self, side: str) -> Callable[[State, Batch], tuple[State, jax.Array]]:
        """A training step of SGD; the sides differ in ``new_table``."""

        def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
            model, optimizer = nnx.merge(self._graph, state)
            table, bags = model.embeddings.arrays()[self._stack], batch.bags[self._stack]
            activations = {self._stack: ops.gather_reduce(table, bags.ids)}
            loss, (dense, sparse) = _gradients(model, activations, batch)
            new = _new_table(side, table, bags, sparse[self._stack], self._unique)
            optimizer.update(model, dense)
            model.embeddings.set_arrays({self._stack: new})
            return nnx.state((model, optimizer)), loss

        return step

    def compare_losses(self) -> None:
        """Raises SystemExit unless the second step's losses of all sides agree, from the same weights."""
        losses = {}
        for side in SIDES:
            state = jax.tree.map(jnp.copy, self._state)
            for number in range(2):
                state, loss = self._steps[side](state, self.packed(number, _cast_of(side)))
            losses[side] = float(loss)
        if not np.allclose(list(losses.values()), losses[NONE], rtol=TOLERANCE):
            raise SystemExit(f"{self._workload.name}: the sides' losses differ after an update: {losses}")

    def alternate(self, loader: futures.Executor, seconds: float, *, rounds: int) -> dict[str, list[float]]:
        """Seconds a step by side, a figure a block; blocks of all sides alternate, in rounds of changing order."""
        self._given = [self.packed(number, "host") for number in range(NUM_BATCHES)]
        blocks: dict[str, list[float]] = {side: [] for side in SIDES}
        steps = max(2, math.ceil(BLOCK_SECONDS / self._block(GIVEN, loader, 1)))
        deadline = time.perf_counter() + seconds
        while len(blocks[NONE]) < rounds or time.perf_counter() < deadline:
            for side in SIDES if len(blocks[NONE]) % 2 == 0 else reversed(SIDES):
                blocks[side].append(self._block(side, loader, steps))
        return blocks

    def _block(self, side: str, loader: futures.Executor, steps: int) -> float:
        """Seconds a step over ``steps`` steps, after one that fills the pipeline: a batch is made ahead."""
        coming = collections.deque([loader.submit(self._made, 0, side)])
        start = 0.0
        for number in range(1, steps + 2):
            batch = coming.popleft().result()
            coming.append(loader.submit(self._made, number, side))
            self._state, loss = self._steps[side](self._state, batch)
            loss.block_until_ready()
            start = start or time.perf_counter()
        taken = (time.perf_counter() - start) / steps
        coming.pop().result()
        return taken

    def _made(self, number: int, side: str) -> Batch:
        return self._given[number % NUM_BATCHES] if side == GIVEN else self.packed(number, _cast_of(side))

    def cast_seconds(self) -> float:
        """Seconds of a batch's cast in the calling thread, with nothing else at work."""
        ids, rows = np.asarray(self._given[0].bags[self._stack].ids), sum(self._workload.rows)
        return harness.alternate(
            lambda: _seconds(lambda: host.tensor_cast(ids, num_rows=rows)), seconds=1.0, min_pairs=3
        ).median

    def dense_seconds(self) -> float:
        """Seconds of the MLPs and the interaction, forward and backward, on given activations."""
        batch = self._given[0]
        shape = batch.bags[self._stack].ids.shape[0], self._workload.dim
        activations = {self._stack: jnp.ones(shape, jnp.float32)}

        @jax.jit
        def dense(state: State, activations: Mapping[str, jax.Array], batch: Batch) -> Any:
            return _gradients(nnx.merge(self._graph, state)[0], activations, batch)

        return harness.alternate(
            harness.timed(lambda: dense(self._state, activations, batch)), seconds=1.0, min_pairs=3
        ).median


def _cast_of(side: str) -> CastPlace:
    return "host" if side in (AHEAD, GIVEN) else "none"


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _gradients(model: DLRM, activations: Mapping[str, jax.Array], batch: Batch) -> tuple[jax.Array, tuple[Any, Any]]:
    """The loss, and the gradients of dense parameters and activations."""

    def loss(model: DLRM, activations: Mapping[str, jax.Array]) -> jax.Array:
        return binary_cross_entropy(model.logits(batch.dense, activations, batch.bags), batch)

    return nnx.value_and_grad(loss, argnums=(nnx.DiffState(0, nnx.Param), 1))(model, activations)


def _new_table(side: str, table: jax.Array, bags: ops.Bags, gradients: jax.Array, unique: int) -> jax.Array:
    """The table after SGD's step, by fused casted update or by expand, coalesce and scatter (Algorithm 1)."""
    sgd = ops.SGD(learning_rate=LEARNING_RATE)
    cast = bags.cast
    if cast is None:
        cast = ops.tensor_cast(bags.ids, num_rows=table.shape[0], unique_capacity=unique)
    if side != NONE:
        return ops.casted_update(sgd, table, {}, cast, gradients)[0]
    bag_of_lookup = jnp.arange(bags.ids.size, dtype=jnp.int32) // jnp.int32(bags.ids.shape[1])
    expanded = ops.gather_reduce(gradients, bag_of_lookup[:, None])
    coalesced = ops.gather_reduce(expanded, cast.positions, cast.offsets)
    return ops.row_update(sgd, table, {}, cast.rows, coalesced)[0]


def _report(report: harness.Report, measured: dict[str, Any]) -> None:
    case, steps, primitives = measured["case"], measured["steps"], measured["primitives"]
    for side in SIDES:
        peer = None if side == NONE else NONE
        ratio = None if side == NONE else measured["speedups"][side]
        report.add(case, f"step, {side}", steps[side], "ms", peer=peer, ratio=ratio)
    report.add(case, "cast, alone", measured["cast"], "ms")
    report.add(case, "cast exposed", measured["exposed"], "ms")
    if measured["cast"] > LEAST_SHARE * steps[GIVEN]:
        report.add(case, "cast hidden", 100 * (1 - measured["exposed"] / measured["cast"]), "%")
    for name, value in primitives.items():
        report.add(case, f"{name}, time", value, "ms")
    backward = sum(primitives[name] for name in casting.BASELINE)
    forward = primitives["gather-reduce"]
    whole = forward + backward + primitives[DENSE]
    report.add(case, f"{NONE}: embeddings' backward pass", 100 * backward / whole, "% of the step")
    report.add(case, f"{NONE}: embeddings, forward and backward", 100 * (forward + backward) / whole, "% of the step")


if __name__ == "__main__":
    main()
