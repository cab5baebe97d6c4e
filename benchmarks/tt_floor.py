"""A tensor-train training step on a CPU beside its floor: its multiply-adds and bytes at this machine's rates.

Phases of the step of ``benchmarks.tt``: forward, backward and Adagrad's update of three cores, one id a bag.

    cast       the sort of the ids, which an uncompressed table's step needs as well; the floor takes it as measured
    index      unique prefixes, and which row every lookup has
    products   of the first two cores, for every unique prefix
    rows       of all cores, for every unique row, and pooling
    loss       the activations' gradient; the floor takes it as measured, too
    backward   gradients of unique rows, of the products below and of the cores, and the update of cores and slots,
               which needs no gradient of a whole core in memory

A floor is the greater of the multiply-adds by the peak rate, of the kernels' own register tile on operands in L1 or of
a large product by XLA, whichever is greater, and the bytes by the bandwidth of a copy between arrays that are together
as large as all that the step touches: every array is read or written once, and all reuse is in the caches. What needs
all of what came before has a floor of its own: rows are made before they are pooled, gradients of rows are summed
before the last core's, and those of prefixes are whole before the core before it.
Phases are timed as programs that end with them, less the ones before. In a turn every program and every rate has some
runs, of which the first are left out, without the pauses that no training run makes and after which cores are slow. A
virtual machine's cores change for seconds at a time: they run at half their rate, or come to lie on two chiplets. So a
turn is short, its phases are compared with the floors at its own rates, and the lines give medians over turns, which
need not add up. Freed memory is kept, as `jrec train` keeps it.

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
from collections.abc import Callable, Mapping, Sequence
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
SETTLING, RUNS, RATE_RUNS = 10, 20, 5  # runs of a program's turn that do not count, those that do, and a rate's
LEAST_TURNS = 5  # of a case
PRODUCT = 768  # rows of the square matrices that XLA multiplies
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
    """What has to be done at least: multiply-adds, and bytes read and written."""

    products: int
    bytes: int

    def seconds(self, rates: Rates) -> float:
        """The floor."""
        return max(self.products / rates.products, self.bytes / rates.bandwidth)


def work_of(shape: tt.TTShape, traffic: tt.TTTraffic) -> dict[str, list[Work]]:
    """The work of every phase but those of ``MEASURED``, for one id a bag.

    Works of a phase follow each other: each needs all of what the one before made.

    Example:
      >>> shape = tt.TTShape(rows=8, dim=8, row_factors=(2, 2, 2), dim_factors=(2, 2, 2), ranks=(4, 4))
      >>> work_of(shape, tt.TTTraffic(lookups=6, entries=(3, 5), pairs=6))["products"]
      [Work(products=192, bytes=512)]
    """
    lookups, entries = traffic.lookups, traffic.entries
    sizes = [math.prod(core) for core in shape.core_shapes]
    made = _floats_of_levels(shape, traffic)
    of_levels = [each * left for each, (_, left, _, _) in zip(made, shape.core_shapes[1:], strict=True)]
    pooled = lookups * (shape.dim + 1)  # and the rows' places
    index = 2 * entries[-1] + sum(4 * count for count in entries) + 2 * lookups
    levels = list(zip(of_levels, [sizes[0], *made[:-1]], made, sizes[1:], strict=True))
    forward = [Work(products=each, bytes=4 * (below + own + core)) for each, below, own, core in levels]
    # Gradients of the level are read, products below and gradients of these, core and slots are read or written.
    backward = [Work(products=2 * each, bytes=4 * (own + 2 * below + 4 * core)) for each, below, own, core in levels]
    pool = Work(products=0, bytes=4 * (made[-1] + pooled))
    return {
        "index": [Work(products=0, bytes=4 * index)],
        "products": forward[:-1],
        "rows": [forward[-1], pool],
        "backward": [pool, *reversed(backward), Work(products=0, bytes=4 * 3 * sizes[0])],
    }


def _floats_of_levels(shape: tt.TTShape, traffic: tt.TTTraffic) -> list[int]:
    """Floats of all entries of every level; each is a sum over the rank before it, so as many multiply-adds a rank."""
    rows, floats = shape.dim_factors[0], []
    for count, (_, _, n, right) in zip(traffic.entries, shape.core_shapes[1:], strict=True):
        rows *= n
        floats.append(count * rows * right)
    return floats


_product = jax.jit(jnp.dot)


def _product_rate() -> float:
    # Not NumPy's: OpenBLAS's threads look for more work for 0.1 s, on the cores of what is measured next.
    square = jnp.ones((PRODUCT, PRODUCT))
    return PRODUCT**3 / harness.timed(lambda: _product(square, square))()


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What was measured within a fraction of a second.

    Attributes:
      seconds: Of every phase.
      floors: Their floors at the rates of this turn.
      rates: What the machine reached.
    """

    seconds: Mapping[str, float]
    floors: Mapping[str, float]
    rates: Rates


def turns_of(
    programs: Mapping[str, Callable[[], Any]], work: Mapping[str, Sequence[Work]], floats: int, *, seconds: float
) -> list[Turn]:
    """Turns of all programs and of the machine's rates, until ``seconds`` have passed.

    A phase's time is its program's median, less that of the one before, so they add up to the last program's. The loss
    has a program of its own, which the next phase's lacks.
    """
    runs = {name: harness.timed(program) for name, program in programs.items()}
    copy = functools.partial(tt_floor_kernel.copy_rate, floats // 2)
    rates = {"tile": tt_floor_kernel.tile_rate, "product": _product_rate, "copy": copy}
    for run in (*runs.values(), *rates.values()):
        run()  # compiles, and touches its memory
    turns: list[Turn] = []
    deadline = time.perf_counter() + seconds
    while len(turns) < LEAST_TURNS or time.perf_counter() < deadline:
        ends = {
            name: statistics.median([run() for _ in range(SETTLING + RUNS)][SETTLING:]) for name, run in runs.items()
        }
        ends["loss"] += ends["rows"]
        measured = dict(zip(ends, np.diff([0.0, *ends.values()]).tolist(), strict=True))
        found = {name: statistics.median(run() for _ in range(RATE_RUNS)) for name, run in rates.items()}
        reached = Rates(products=max(found["tile"], found["product"]), bandwidth=found["copy"])
        floors = {name: sum(each.seconds(reached) for each in works) for name, works in work.items()}
        floors |= {phase: measured[phase] for phase in MEASURED}
        turns.append(Turn(seconds=measured, floors=floors, rates=reached))
    return turns


def beside_floor(turns: Sequence[Turn], phases: Sequence[str]) -> tuple[float, float, float | None]:
    """Medians over turns: the seconds of ``phases`` together, those of their floors, and the floors by the seconds.

    The last is None where phases took no time, as the difference of two programs may come out.

    Example:
      >>> slow = Turn(seconds={"rows": 4.0}, floors={"rows": 2.0}, rates=Rates(products=1, bandwidth=1))
      >>> quick = dataclasses.replace(slow, seconds={"rows": 1.0}, floors={"rows": 0.8})
      >>> beside_floor([slow, quick, quick], ["rows"])
      (1.0, 0.8, 0.8)
    """
    sums = [(sum(turn.seconds[p] for p in phases), sum(turn.floors[p] for p in phases)) for turn in turns]
    measured, floor = (statistics.median(values) for values in zip(*sums, strict=True))
    ratios = [least / taken for taken, least in sums if taken > 0]
    return measured, floor, statistics.median(ratios) if len(ratios) == len(sums) else None


def report_case(report: harness.Report, side: Side, *, seconds: float) -> None:
    """Measures a step by phases, and reports each beside its floor."""
    case = describe(side.shape, side.ids.size)
    traffic = tt.TTTraffic.of(side.shape, side.ids)
    work, floats = work_of(side.shape, traffic), floats_of(side.shape, traffic)
    turns = turns_of(programs_of(side), work, floats, seconds=seconds)
    report.add(case, "multiply-adds", statistics.median(turn.rates.products for turn in turns) / 1e9, "G/s")
    report.add(case, "bandwidth of a copy", statistics.median(turn.rates.bandwidth for turn in turns) / 1e9, "GB/s")
    sums = {phase: [phase] for phase in PHASES}
    sums |= {"step": list(PHASES), "step, cast ahead": [phase for phase in PHASES if phase != "cast"]}
    for metric, phases in sums.items():
        measured, floor, ratio = beside_floor(turns, phases)
        report.add(case, metric, 1e3 * measured, "ms", peer="floor", ratio=ratio)
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
