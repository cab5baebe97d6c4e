"""A tensor-train training step on a CPU beside its floor: its multiply-adds and bytes at this machine's rates.

Phases of the step of ``benchmarks.tt``: forward, backward and Adagrad's update of three cores, one id a bag.

    cast       the sort of the ids, which an uncompressed table's step needs as well; the floor takes it as measured
    index      unique prefixes, and which row every lookup has
    products   of the first two cores, for every unique prefix
    rows       of all cores, for every unique row, and pooling
    loss       the activations' gradient; the floor takes it as measured, too
    backward   gradients of unique rows, of the products below and of the cores, and the update of cores and slots,
               which needs no gradient of a whole core in memory

A phase's floor is the greater of its multiply-adds by the peak rate, of the kernels' own register tile on operands in
L1 or of a large BLAS product, whichever is greater, and its bytes by the bandwidth of a copy between arrays that are
together as large as all that the step touches: every array is read or written once, and all reuse is in the caches.
Phases are timed as programs that end with them, less the ones before. Programs and rates take turns of many runs,
of which the first are left out, without the pauses that no training run makes and after which cores are slow; medians
of both are compared. Freed memory is kept, as `jrec train` keeps it.

No phase keeps prefix products for later steps: the step that makes one updates both of its slices, so it is stale at
the step's end.

Examples:
  python -m benchmarks.tt_floor --ranks 32
  python -m benchmarks.tt_floor --quick
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, tt_floor_kernel
from benchmarks.tt_side import FUSED, KAGGLE_ROWS, Side, describe, shape_of, train
from jrec import ops
from jrec.ops import tt
from jrec.ops.tensor_cast import tensor_cast
from jrec.ops.tt import contract
from jrec.ops.tt.index import tt_index

LOOKUPS = 32768
RANKS = (8, 16, 32, 64)
OTHER_DIMS, OTHER_ROWS, OTHER_RANK = (32, 64), 2_500_000, 32  # the uncompressed table must fit beside
SETTLING, RUNS, RATE_RUNS = 20, 60, 10  # runs of a program's turn that do not count, those that do, and a rate's
PHASES = ("cast", "index", "products", "rows", "loss", "backward")
MEASURED = ("cast", "loss")  # phases of an uncompressed table's step as well


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What this machine can do with all its cores.

    Attributes:
      products: Multiply-adds a second.
      bandwidth: Bytes a second, read and written.
    """

    products: float
    bandwidth: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a phase has to do at least: multiply-adds, and bytes read and written."""

    products: int
    bytes: int

    def seconds(self, rates: Rates) -> float:
        """The floor."""
        return max(self.products / rates.products, self.bytes / rates.bandwidth)


def work_of(shape: tt.TTShape, traffic: tt.TTTraffic) -> dict[str, Work]:
    """The work of every phase but those of ``MEASURED``, for one id a bag.

    Example:
      >>> shape = tt.TTShape(rows=8, dim=8, row_factors=(2, 2, 2), dim_factors=(2, 2, 2), ranks=(4, 4))
      >>> work_of(shape, tt.TTTraffic(lookups=6, entries=(3, 5), pairs=6))["products"]
      Work(products=192, bytes=688)
    """
    lookups, entries = traffic.lookups, traffic.entries
    sizes = [math.prod(core) for core in shape.core_shapes]
    floats = _floats_of_levels(shape, traffic)
    of_levels = [each * left for each, (_, left, _, _) in zip(floats, shape.core_shapes[1:], strict=True)]
    prefixes, unique = sum(floats[:-1]), floats[-1]
    pooled = lookups * shape.dim
    index = 2 * entries[-1] + sum(4 * count for count in entries) + 2 * lookups
    return {
        "index": Work(products=0, bytes=4 * index),
        "products": Work(products=sum(of_levels[:-1]), bytes=4 * (sum(sizes[:-1]) + prefixes)),
        "rows": Work(products=of_levels[-1], bytes=4 * (floats[-2] + sizes[-1] + 2 * unique + pooled + lookups)),
        # Gradients of rows and of products are written and read, the products read; cores and slots both.
        "backward": Work(
            products=2 * sum(of_levels), bytes=4 * (pooled + lookups + 2 * unique + 3 * prefixes + 4 * sum(sizes))
        ),
    }


def _floats_of_levels(shape: tt.TTShape, traffic: tt.TTTraffic) -> list[int]:
    """Floats of all entries of every level; each is a sum over the rank before it, so as many multiply-adds a rank."""
    rows, floats = shape.dim_factors[0], []
    for count, (_, _, n, right) in zip(traffic.entries, shape.core_shapes[1:], strict=True):
        rows *= n
        floats.append(count * rows * right)
    return floats


def _blas_rate() -> float:
    size = 768
    square = np.ones((size, size), np.float32)
    start = time.perf_counter()
    np.dot(square, square)
    return size**3 / (time.perf_counter() - start)


def programs_of(side: Side) -> dict[str, Callable[[], Any]]:
    """A program that ends with each phase, by phase, in order; only the loss stands alone."""
    shape = side.shape

    def cast(ids: jax.Array) -> Any:
        return tensor_cast(ids, None, num_rows=shape.rows)

    def index(ids: jax.Array) -> Any:
        return tt_index(shape, ids)

    def products(cores: Any, ids: jax.Array) -> Any:
        made = tt_index(shape, ids)
        way = {"method": "grouped", "implementation": None}
        return made, contract.unique_rows(cores, shape, made.levels[:-1], **way)[0]

    def rows(cores: Any, ids: jax.Array) -> Any:
        return tt.tt_lookup(cores, shape, ops.Bags(ids=ids), contraction="unique")

    def loss(activations: jax.Array, targets: jax.Array) -> Any:
        return activations - targets

    jitted = {f.__name__: jax.jit(f) for f in (cast, index, products, rows, loss)}
    step = jax.jit(functools.partial(train, shape), donate_argnums=(0, 1))
    state = [jax.tree.map(jnp.array, side.cores), tt.tt_init_slots(FUSED, side.cores)]

    def backward() -> Any:
        state[:] = step(*state, side.ids, side.gradient)
        return state

    return {
        "cast": lambda: jitted["cast"](side.ids),
        "index": lambda: jitted["index"](side.ids),
        "products": lambda: jitted["products"](side.cores, side.ids),
        "rows": lambda: jitted["rows"](side.cores, side.ids),
        "loss": lambda: jitted["loss"](side.gradient, side.gradient),
        "backward": backward,
    }


def floats_of(shape: tt.TTShape, traffic: tt.TTTraffic) -> int:
    """Of all that a step touches: cores and slots; products, rows and their gradients; activations and such."""
    entries = sum(_floats_of_levels(shape, traffic))
    return 2 * shape.num_parameters + 2 * entries + 3 * traffic.lookups * shape.dim


def phase_seconds(
    programs: Mapping[str, Callable[[], Any]], floats: int, *, seconds: float
) -> tuple[dict[str, float], Rates]:
    """Median seconds of every phase: of its program, less the one before. They add up to the last program's.

    The loss has a program of its own, which the next phase's lacks. The machine's rates are measured in between, since
    they change with what else it does.
    """
    runs = {name: harness.timed(program) for name, program in programs.items()}
    copy = functools.partial(tt_floor_kernel.copy_rate, floats // 2)
    rates = {"tile": tt_floor_kernel.tile_rate, "blas": _blas_rate, "copy": copy}
    samples: dict[str, list[float]] = {name: [] for name in (*runs, *rates)}
    for run in (*runs.values(), *rates.values()):
        run()  # compiles, and touches its memory
    deadline = time.perf_counter() + seconds
    while len(samples["cast"]) < 5 or time.perf_counter() < deadline:
        for name, run in runs.items():
            samples[name] += [run() for _ in range(SETTLING + RUNS)][SETTLING:]
        for name, run in rates.items():
            samples[name] += [run() for _ in range(RATE_RUNS)]
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ends = {name: medians[name] for name in runs}
    ends["loss"] += ends["rows"]
    phases = dict(zip(ends, np.diff([0.0, *ends.values()]).tolist(), strict=True))
    return phases, Rates(products=max(medians["tile"], medians["blas"]), bandwidth=medians["copy"])


def report_case(report: harness.Report, side: Side, *, seconds: float) -> None:
    """Measures a step by phases, and reports each beside its floor."""
    case = describe(side.shape, side.ids.size)
    traffic = tt.TTTraffic.of(side.shape, side.ids)
    measured, rates = phase_seconds(programs_of(side), floats_of(side.shape, traffic), seconds=seconds)
    report.add(case, "multiply-adds", rates.products / 1e9, "G/s")
    report.add(case, "bandwidth of a copy", rates.bandwidth / 1e9, "GB/s")
    floors = {name: work.seconds(rates) for name, work in work_of(side.shape, traffic).items()}
    floors |= {phase: measured[phase] for phase in MEASURED}
    for phase in PHASES:
        _line(report, case, phase, measured[phase], floors[phase])
    _line(report, case, "step", sum(measured.values()), sum(floors.values()))
    own = [phase for phase in PHASES if phase != "cast"]
    _line(report, case, "step, cast ahead", sum(measured[p] for p in own), sum(floors[p] for p in own))


def _line(report: harness.Report, case: str, metric: str, seconds: float, floor: float) -> None:
    report.add(case, metric, 1e3 * seconds, "ms", peer="floor", ratio=floor / seconds if seconds > 0 else None)
    report.add(case, f"{metric}, floor", 1e3 * floor, "ms")


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="of rows of 16; default: %(default)s")
    parser.add_argument("--lookups", type=int, default=LOOKUPS, help="default: %(default)s")
    arguments = parser.parse_args()
    harness.keep_memory()
    jax.config.update("jax_platforms", "cpu")
    cases = [(KAGGLE_ROWS, 16, rank) for rank in arguments.ranks]
    cases += [(OTHER_ROWS, dim, OTHER_RANK) for dim in OTHER_DIMS]
    with harness.Report(arguments, "tt_floor") as report:
        for rows, dim, rank in cases[:1] if report.quick else cases:
            side = Side(shape_of(rows, dim, rank), arguments.lookups)
            report_case(report, side, seconds=report.seconds)


if __name__ == "__main__":
    main()
