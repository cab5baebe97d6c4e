"""Tensor-train tables on a GPU: TT-Rec's algorithm, XLA's contractions, the Pallas kernels, the uncompressed table.

One id a bag, hashed, by a power law of exponent 1.05 over the rows; all sides take the same ids and cores. Outputs and
core gradients of every side are compared with the naive ones before it is timed, by loops inside one program
(``gpu_timing``).

    forward                 pooled rows
    forward and backward    those and the cores' gradients
    step                    forward, backward and Adagrad on the cores; the uncompressed table's takes row-wise Adagrad

    naive           one product of gathered slices a lookup, in XLA (TT-Rec, Algorithms 1 and 2)
    unique, dense   XLA's contractions; see ``jrec.ops.tt.explain``
    pallas          the kernels, with the last product fused with pooling or not, as the cost model says
    pallas, fused / pallas, unfused     either
    uncompressed    the plain table's kernels

Examples:
  python -m benchmarks.gpu_tt --out results.json
  python -m benchmarks.gpu_tt --quick --case kaggle
  python -m benchmarks.gpu_tt --out results.json --earlier results.json.partial
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_cases, gpu_run, gpu_sides, gpu_timing, harness, resume, workloads
from jrec import ops
from jrec.ops import tt
from jrec.ops.dispatch import Implementation

EXPONENT = 1.05
SETS = 3  # of ids in rotation
TOLERANCE = 1e-4  # of the greatest value: sides add up in different orders
PLAIN = ops.RowWiseAdagrad(learning_rate=0.01, initial_accumulator=0.1)
FUSED = ops.Adagrad(learning_rate=0.01, initial_accumulator=0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A table and a batch."""

    rows: int
    dim: int
    rank: int
    lookups: int

    @property
    def shape(self) -> tt.TTShape:
        """Of the table, with three cores."""
        return tt.TTShape.search(self.rows, self.dim, ranks=self.rank)


KAGGLE_ROWS = 10_131_227
CASES: dict[str, Case] = {
    "kaggle": Case(rows=KAGGLE_ROWS, dim=16, rank=32, lookups=16_384),
    "kaggle 65,536": Case(rows=KAGGLE_ROWS, dim=16, rank=32, lookups=65_536),
    "rank 8": Case(rows=KAGGLE_ROWS, dim=16, rank=8, lookups=16_384),
    "rank 128": Case(rows=KAGGLE_ROWS, dim=16, rank=128, lookups=16_384),
    "dim 64": Case(rows=KAGGLE_ROWS, dim=64, rank=32, lookups=16_384),
    "terabyte": Case(rows=40_000_000, dim=128, rank=32, lookups=16_384),
}
QUICK_CASES = ("kaggle",)
TINY = Case(rows=60, dim=8, rank=4, lookups=12)
METRICS = ("forward", "forward and backward", "step")
UNCOMPRESSED = "uncompressed"
EXPECTED_SECONDS = 2e-4  # of one call, which decides how many calls a dispatch makes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How a lookup is computed; ``fused`` says whether kernels fuse pooling, None for what the cost model says."""

    contraction: Any
    implementation: Implementation
    fused: bool | None = None

    def arguments(self, shape: tt.TTShape) -> dict[str, Any]:
        """Of ``tt_embedding_bag``, ``tt_lookup`` and ``tt_core_gradients``."""
        chosen: dict[str, Any] = {"contraction": self.contraction, "implementation": self.implementation}
        if self.fused is not None:
            entries = (1,) * (shape.num_cores - 1)
            chosen["traffic"] = tt.TTTraffic(lookups=1 if self.fused else 2**30, entries=entries, pairs=1)
        return chosen


WAYS: dict[str, Way] = {
    "naive": Way(contraction="naive", implementation="xla"),
    "unique": Way(contraction="unique", implementation="xla"),
    "dense": Way(contraction="dense", implementation="xla"),
    "pallas": Way(contraction="unique", implementation="pallas"),
    "pallas, fused": Way(contraction="unique", implementation="pallas", fused=True),
    "pallas, unfused": Way(contraction="unique", implementation="pallas", fused=False),
}


class Side:
    """One way's programs over a case: ids in rotation."""

    def __init__(self, case: Case, way: Way) -> None:
        self.shape = shape = case.shape
        self.cores = tt.tt_init(shape, jax.random.key(0))
        self.ids = [jnp.asarray(ids) for ids in drawn_ids(case)]
        self.gradient = jnp.asarray(np.random.default_rng(1).standard_normal((case.lookups, shape.dim), np.float32))
        self._arguments = way.arguments(shape)

    def forward(self, cores: Any, state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        """A ``gpu_timing.Step``: pooled rows."""
        return state, tt.tt_embedding_bag(cores, self.shape, ids, **self._arguments)

    def both(self, cores: Any, state: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        """A ``Step``: pooled rows and the cores' gradients."""
        ids, gradient = batch
        out, transpose = jax.vjp(lambda cores: self.forward(cores, None, ids)[1], cores)
        return state, (out, transpose(gradient)[0])

    def step(self, _: Any, state: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        """A ``Step``: forward, backward and Adagrad; the state is the cores and their slots."""
        cores, slots = state
        _, (_, gradients) = self.both(cores, None, batch)
        updated = [_step(*x) for x in zip(cores, slots, gradients, strict=True)]
        return (tuple(c for c, _ in updated), tuple(s for _, s in updated)), None

    def outputs(self) -> list[np.ndarray]:
        """Pooled rows and core gradients of the first batch, on the host."""
        made = jax.jit(lambda cores, batch: self.both(cores, None, batch)[1])(self.cores, (self.ids[0], self.gradient))
        return [np.asarray(x) for x in jax.tree.leaves(made)]

    def loop(self, metric: str, *, rounds: int) -> gpu_timing.Loop:
        """The loop that times ``metric``."""
        batches: list[Any] = [(ids, self.gradient) for ids in self.ids]
        if metric == "forward":
            return gpu_timing.Loop(self.forward, self.cores, None, self.ids, rounds=rounds)
        if metric == "forward and backward":
            return gpu_timing.Loop(self.both, self.cores, None, batches, rounds=rounds)
        state = jax.tree.map(jnp.array, (self.cores, tt.tt_init_slots(FUSED, self.cores)))
        return gpu_timing.Loop(self.step, None, state, batches, rounds=rounds)


def drawn_ids(case: Case) -> list[np.ndarray]:
    """Hashed ids of each batch, (lookups, 1) int32."""
    rng = np.random.default_rng(0)
    drawn = [workloads.zipf_ids(rng, case.rows, case.lookups, EXPONENT) for _ in range(SETS)]
    return [workloads.hashed_ids(ids, case.rows).reshape(-1, 1) for ids in drawn]


def _step(core: jax.Array, slots: Any, gradient: jax.Array) -> tuple[jax.Array, Any]:
    """Adagrad on every slice, which is a row."""
    rows = jnp.arange(core.shape[0], dtype=jnp.int32)
    flat, values = core.reshape(core.shape[0], -1), gradient.reshape(core.shape[0], -1)
    table, new = ops.row_update(FUSED, flat, slots, rows, values, implementation="xla")
    return table.reshape(core.shape), new


class Uncompressed:
    """The plain table of a case: forward, and forward with the cast and the update."""

    def __init__(self, case: Case, name: Implementation) -> None:
        one_hot = workloads.Workload(
            name="plain", rows=(case.rows,), dim=case.dim, ids_per_bag=(1,), batch=case.lookups, zipf=EXPONENT
        )
        plain = gpu_cases.Case(stacks=(one_hot,), optimizer=PLAIN)
        self.side = gpu_sides.Side(plain, gpu_sides.Batches.of(plain, SETS), name)

    def step(self, _: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        """A ``Step``: forward, cast and update."""
        _, sums = self.side.forward(state[0], None, batch[0])
        return self.side.cast_and_update(None, state, batch)[0], sums

    def loop(self, metric: str, *, rounds: int) -> gpu_timing.Loop:
        """The loop that times ``metric``, "forward" or "step"."""
        if metric == "forward":
            return self.side.loop(gpu_cases.FORWARD, rounds=rounds)
        made, tables = self.side.batches, self.side.tables()
        inputs: list[Any] = list(zip(made.bags, made.gradients, strict=True))
        return gpu_timing.Loop(self.step, None, (tables, self.side.slots(tables)), inputs, rounds=rounds)


def agree(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    """Raises ``SidesDifferError`` where ``Side.outputs`` of two sides differ by more than rounding."""
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        error = float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))
        if not error < TOLERANCE:  # NaN fails too
            compared = "output" if number == 0 else f"gradient of core {number - 1}"
            raise gpu_sides.SidesDifferError(f"the {compared} differs by {error:.1e} of the largest value")


class Measured:
    """The cases of a run, one for every table and way, and what their lines are compared with."""

    def __init__(self, report: harness.Report, *, seconds: float, rounds: int) -> None:
        self._report, self._seconds, self._rounds = report, seconds, rounds
        self._naive = functools.cache(lambda case: Side(case, WAYS["naive"]).outputs())
        self._times: dict[tuple[str, str], float] = {}

    def cases(self, tables: dict[str, Case], ways: Sequence[str]) -> dict[str, Callable[[], None]]:
        """What ``resume.Cases`` runs, by key."""
        made: dict[str, Callable[[], None]] = {}
        for name, case in tables.items():
            made |= {f"{name}: {way}": functools.partial(self._way, name, case, way) for way in WAYS if way in ways}
            if UNCOMPRESSED in ways:
                made[f"{name}: {UNCOMPRESSED}"] = functools.partial(self._uncompressed, name, case)
        return made

    def _way(self, name: str, case: Case, way: str) -> None:
        side = Side(case, WAYS[way])
        if way == "naive":
            self._report.note(f"{name}: {tt.explain(case.shape, case.lookups, platform='gpu')}")
        else:
            agree(side.outputs(), self._naive(case))
        for metric in METRICS:
            self._time(name, metric, way, side)

    def _uncompressed(self, name: str, case: Case) -> None:
        plain = Uncompressed(case, "pallas")
        for metric in ("forward", "step"):
            self._time(name, metric, UNCOMPRESSED, plain)

    def _time(self, name: str, metric: str, way: str, side: Side | Uncompressed) -> None:
        least = 1 if self._seconds == 0 else 3
        timing = side.loop(metric, rounds=self._rounds).time(seconds=self._seconds, least=least)
        if way == "naive":
            self._times[name, metric] = timing.seconds
        naive = None if way == "naive" else self._times.get((name, metric))
        self._report.add(
            name, f"{metric}, {way}", 1e6 * timing.seconds, "us",
            peer=None if naive is None else "naive", ratio=None if naive is None else naive / timing.seconds,
            details=timing.details(),
        )  # fmt: skip


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Runs the cases that were asked for."""
    names = arguments.case or (QUICK_CASES if arguments.quick else CASES)
    tables = {"tiny": TINY} if arguments.tiny else {name: CASES[name] for name in names}
    rounds = 1 if arguments.tiny else gpu_timing.rounds_for(EXPECTED_SECONDS, SETS)
    measured = Measured(report, seconds=0.0 if arguments.tiny else 0.15 if arguments.quick else 0.5, rounds=rounds)
    cases.run(measured.cases(tables, arguments.way))


def main() -> None:
    """Runs the cases that were asked for."""
    parser = gpu_run.parser(__doc__)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), help="only these cases")
    parser.add_argument("--way", nargs="+", choices=[*WAYS, UNCOMPRESSED], default=[*WAYS, UNCOMPRESSED],
                        help="only these ways (default: all)")  # fmt: skip
    arguments = parser.parse_args()
    gpu_run.run(arguments, "gpu_tt", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
