"""Tensor-train tables on a GPU: TT-Rec's algorithm, XLA's contractions, the Pallas kernels, the uncompressed table.

One id a bag, a power law of exponent 1.05 over the rows; the sides run in turn, on the same ids and cores. Outputs and
core gradients are compared before anything is timed.

    forward                 pooled rows
    forward and backward    those and the cores' gradients
    step                    forward, backward and Adagrad on the cores; the uncompressed table's takes row-wise Adagrad

    naive           one product of gathered slices a lookup, in XLA (TT-Rec, Algorithms 1 and 2)
    unique, dense   XLA's contractions; see ``jrec.ops.tt.explain``
    pallas          the kernels, with the last product fused with pooling or not, as the cost model says
    pallas, fused / pallas, unfused     either

Examples:
  python -m benchmarks.gpu_tt --out results.json
  python -m benchmarks.gpu_tt --quick --case kaggle
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu, harness, workloads
from jrec import ops
from jrec.ops import tt
from jrec.ops.dispatch import Implementation

EXPONENT = 1.05
SETS = 3  # of ids in rotation
TOLERANCE = 1e-4  # of the greatest value: sides add up in different orders
PLAIN = ops.RowWiseAdagrad(learning_rate=0.01)
FUSED = ops.Adagrad(learning_rate=0.01)


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
        rng = np.random.default_rng(0)
        ids = [workloads.zipf_ids(rng, shape.rows, case.lookups, EXPONENT).reshape(-1, 1) for _ in range(SETS)]
        self.ids = [jnp.asarray(i) for i in ids]
        self.gradient = jnp.asarray(rng.standard_normal((case.lookups, shape.dim), np.float32))
        self._turn = itertools.cycle(range(SETS))
        arguments = way.arguments(shape)

        def forward(cores: Any, ids: jax.Array) -> jax.Array:
            return tt.tt_embedding_bag(cores, shape, ids, **arguments)

        def both(cores: Any, ids: jax.Array, gradient: jax.Array) -> Any:
            out, transpose = jax.vjp(functools.partial(forward, ids=ids), cores)
            return out, transpose(gradient)[0]

        def step(cores: Any, slots: Any, ids: jax.Array, gradient: jax.Array) -> Any:
            _, gradients = both(cores, ids, gradient)
            updated = [_step(*x) for x in zip(cores, slots, gradients, strict=True)]
            return tuple(c for c, _ in updated), tuple(s for _, s in updated)

        self._forward, self._both = jax.jit(forward), jax.jit(both)
        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._trained = jax.tree.map(jnp.array, self.cores)
        self._slots = tt.tt_init_slots(FUSED, self.cores)

    def forward(self, batch: int | None = None) -> jax.Array:
        """Pooled rows of the next batch, or of the given one."""
        return self._forward(self.cores, self._batch(batch))

    def both(self, batch: int | None = None) -> Any:
        """Pooled rows and the cores' gradients."""
        return self._both(self.cores, self._batch(batch), self.gradient)

    def step(self) -> Any:
        """One training step of the cores."""
        self._trained, self._slots = self._step(self._trained, self._slots, self._batch(None), self.gradient)
        return self._trained

    def _batch(self, batch: int | None) -> jax.Array:
        return self.ids[next(self._turn) if batch is None else batch]


def _step(core: jax.Array, slots: Any, gradient: jax.Array) -> tuple[jax.Array, Any]:
    """Adagrad on every slice, which is a row."""
    rows = jnp.arange(core.shape[0], dtype=jnp.int32)
    flat, values = core.reshape(core.shape[0], -1), gradient.reshape(core.shape[0], -1)
    table, new = ops.row_update(FUSED, flat, slots, rows, values, implementation="xla")
    return table.reshape(core.shape), new


class Uncompressed:
    """The plain table of a case: forward, and the cast with the update."""

    def __init__(self, case: Case, name: Implementation) -> None:
        one_hot = workloads.Workload(
            name="plain", rows=(case.rows,), dim=case.dim, ids_per_bag=(1,), batch=case.lookups, num_dense=1,
            bottom=(case.dim,), top=(1,),
        )  # fmt: skip
        self.side = gpu.Side(one_hot, PLAIN, name)

    def forward(self) -> jax.Array:
        """Pooled rows."""
        return self.side.forward()

    def step(self) -> Any:
        """Forward, cast, backward and update."""
        return self.side.forward(), self.side.cast_and_update()


def agree(sides: dict[str, Side]) -> None:
    """Raises SystemExit where outputs or gradients differ by more than rounding."""
    want = jax.tree.leaves(sides["naive"].both(0))
    for name, side in sides.items():
        for number, (got, wanted) in enumerate(zip(jax.tree.leaves(side.both(0)), want, strict=True)):
            error = float(jnp.max(jnp.abs(got - wanted)) / jnp.max(jnp.abs(wanted)))
            if not error < TOLERANCE:  # NaN fails too
                what = "output" if number == 0 else f"gradient of core {number - 1}"
                raise SystemExit(f"benchmarks.gpu_tt: the {what} of {name} differs by {error:.1e} of the largest value")


def run_case(report: harness.Report, name: str, ways: dict[str, Way] = WAYS) -> None:
    """Compares and times one case."""
    case = CASES[name]
    report.note(f"{name}: {tt.explain(case.shape, case.lookups, platform='gpu')}")
    sides = {way: Side(case, how) for way, how in ways.items()}
    agree(sides)
    seconds = report.seconds / 8
    for metric, attribute in (("forward", "forward"), ("forward and backward", "both"), ("step", "step")):
        peer = harness.timed(getattr(sides["naive"], attribute), calls=gpu.CALLS)
        for way, side in sides.items():
            if way == "naive":
                continue
            ours = harness.timed(getattr(side, attribute), calls=gpu.CALLS)
            report.compare(name, f"{metric}, {way}", ours, peer="naive", theirs=peer, seconds=seconds)
    _against_plain(report, name, sides, seconds)


def _against_plain(report: harness.Report, name: str, sides: dict[str, Side], seconds: float) -> None:
    """Times every way against the uncompressed kernels."""
    plain = Uncompressed(CASES[name], "pallas")
    runs: dict[str, Callable[[Any], Any]] = {"forward": lambda side: side.forward, "step": lambda side: side.step}
    for metric, method in runs.items():
        theirs = harness.timed(method(plain), calls=gpu.CALLS)
        for way, side in sides.items():
            label = f"{metric}, {way}, by the uncompressed table"
            ours = harness.timed(method(side), calls=gpu.CALLS)
            report.compare(name, label, ours, peer="uncompressed", theirs=theirs, seconds=seconds)


def main() -> None:
    """Runs the cases that were asked for."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), help="only these cases")
    arguments = parser.parse_args()
    with harness.Report(arguments, "gpu_tt") as report:
        if jax.default_backend() != "gpu":
            report.note("skipped: there is no NVIDIA GPU that JAX can use; install jrec[cuda] on a machine with one")
            return
        for name in arguments.case or (QUICK_CASES if arguments.quick else CASES):
            run_case(report, name)


if __name__ == "__main__":
    main()
