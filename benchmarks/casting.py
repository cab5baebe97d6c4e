"""Tensor Casting's Figures 5, 6, 12, 16 and 17: the baseline's expand and coalesce against the casted backward pass.

One table of each model RM1 to RM4 is measured and its figures times the model's tables are reported; tables of a model
are alike. Both sides run on the same native kernels on the same threads, write to the same warm arrays, and sort with
the same radix sort, so the ratio shows what the algorithm does and nothing else. Optimizer: SGD, as in the paper.

    forward       gather-reduce
    baseline      expand, coalesce (sort), coalesce (accumulate), scatter
    casted        cast, casted gather-reduce, scatter; or cast and fused update, which never writes coalesced gradients

Bytes count each primitive's loads and stores (Figure 6): every gathered row, every stored row, indices, and the sort's
passes over 8-byte pairs; sums are held in registers, so accumulating reads each gradient once. "Sums reread" counts
what Algorithm 1 writes down: in the baseline each lookup also reads the running sum that its gradient is added to.

Cases that begin with "counted" have no times: the paper's 10 ids a bag on a table of Criteo Kaggle's largest size,
drawn by a power law and uniformly, with the gradient's size before and after expanding and coalescing (Figure 5) and
the traffic's ratios. Amazon's, MovieLens's and Taobao's histograms, the paper's other tables, are not at hand. Whole
steps, and the cast hidden, are in ``benchmarks.casting_overlap``.

Examples:
  python -m benchmarks.casting
  python -m benchmarks.casting --model rm1 --batch 2048 --dim 64
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import harness, workloads
from jrec import ops
from jrec.native import host

MODELS = ("rm1", "rm2", "rm3", "rm4")
BATCHES = (1024, 2048, 4096, 8192, 16384, 32768)
DIMS = (32, 64, 128, 256)
BATCH, DIM = 2048, 64  # the paper's middle default batch, and its default dim
BASELINE = ("expand", "coalesce (sort)", "coalesce (accumulate)", "scatter")
CASTED = ("cast", "casted gather-reduce", "scatter")
FUSED = ("cast", "fused update")
SORT_DIGIT_BITS = 11
COUNTED_GATHERS = 10  # Figures 5 and 6
LAWS = {"power law 1.05": 1.05, "uniform": 0.0}
SECONDS, QUICK_SECONDS = 1.0, 0.2
SGD = ops.SGD(learning_rate=0.01)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Milliseconds and bytes of every primitive at one model, batch and dim, all tables together."""

    model: str
    batch: int
    dim: int
    milliseconds: dict[str, float]
    size: dict[str, float]

    def total(self, primitives: tuple[str, ...]) -> float:
        """Milliseconds of some primitives together."""
        return sum(self.milliseconds[p] for p in primitives)

    @property
    def backward_speedup(self) -> float:
        """Baseline backward by cast and fused update."""
        return self.total(BASELINE) / self.total(FUSED)

    @property
    def coalesce_speedup(self) -> float:
        """Expand and coalesce by cast and casted gather-reduce: Figure 12's right axis."""
        return self.total(BASELINE[:3]) / self.total(CASTED[:2])


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    models = arguments.model or (MODELS[:1] if arguments.quick else MODELS)
    batches = arguments.batch or ((BATCH,) if arguments.quick else BATCHES)
    dims = arguments.dim or ((DIM,) if arguments.quick else DIMS)
    wanted = {(b, DIM if DIM in dims else dims[0]) for b in batches}
    wanted |= {(BATCH if BATCH in batches else batches[0], d) for d in dims}
    with harness.Report(arguments, "casting") as report:
        for model in () if arguments.counted else models:
            for batch, dim in sorted(wanted):
                workload = dataclasses.replace(workloads.WORKLOADS[model], dim=dim, bottom=(), batch=batch)
                _report(report, measure(workload, QUICK_SECONDS if report.quick else SECONDS))
        for batch in sorted({b for b, _ in wanted}):
            for law, exponent in LAWS.items():
                _count(report, law, exponent, batch)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS)
    parser.add_argument("--batch", nargs="+", type=int, help=f"default: {' '.join(map(str, BATCHES))}")
    parser.add_argument("--dim", nargs="+", type=int, help=f"default: {' '.join(map(str, DIMS))}")
    parser.add_argument("--counted", action="store_true", help="only what needs no time: sizes and traffic, counted")
    return parser


def measure(workload: workloads.Workload, seconds: float) -> Point:
    """Times every primitive on one table of the workload, for ``seconds`` each, on the threads of this process.

    Raises:
      SystemExit: If the casted gather-reduce differs from expand and coalesce.
    """
    model, batch, dim = workload.name, workload.batch, workload.dim
    rows, length = workload.rows[0], workload.ids_per_bag[0]
    rng = np.random.default_rng(0)
    ids = workloads.zipf_ids(rng, rows, batch * length, workload.zipf).reshape(batch, length)
    table = workloads.initial_table(workload, 0, seed=0)
    gradients = rng.standard_normal((batch, dim), dtype=np.float32)
    bags = np.repeat(np.arange(batch, dtype=np.int32), length)[:, None]
    cast: Any = host.tensor_cast(ids, num_rows=rows)
    unique = int(cast.num_unique)
    unique_rows, offsets = cast.rows[:unique], cast.offsets[: unique + 1]
    expanded = host.gather_reduce(gradients, bags)
    coalesced = host.gather_reduce(expanded, cast.positions, offsets)
    if not np.array_equal(coalesced, host.gather_reduce(gradients, cast.sources, offsets)):
        raise SystemExit(f"{model}: the casted gather-reduce differs from expand and coalesce")

    output, buffer = np.empty_like(gradients), np.empty_like(coalesced)
    steps: dict[str, Callable[[], Any]] = {
        "gather-reduce": lambda: host.gather_reduce(table, ids, out=output),
        "expand": lambda: host.gather_reduce(gradients, bags, out=expanded),
        "coalesce (accumulate)": lambda: host.gather_reduce(expanded, cast.positions, offsets, out=buffer),
        "scatter": lambda: host.row_update(SGD, table, {}, unique_rows, coalesced),
        "cast": lambda: host.tensor_cast(ids, num_rows=rows),
        "casted gather-reduce": lambda: host.gather_reduce(gradients, cast.sources, offsets, out=buffer),
        "fused update": lambda: host.casted_update(SGD, table, {}, cast, gradients),
    }
    times = {
        name: harness.alternate(harness.timed(step), seconds=seconds, warmup=1, min_pairs=3).median
        for name, step in steps.items()
    }
    times["coalesce (sort)"] = times["cast"]
    size = _bytes(lookups=ids.size, bags=batch, unique=unique, rows=rows, row=4 * dim)
    tables = workload.num_tables
    return Point(
        model=model,
        batch=batch,
        dim=dim,
        milliseconds={name: 1e3 * tables * time for name, time in times.items()},
        size={name: float(tables * count) for name, count in size.items()},
    )


def _count(report: harness.Report, law: str, exponent: float, batch: int) -> None:
    """Figures 5 and 6 as the paper draws them: sizes of gradients and ratios of traffic, by counting."""
    rows, lookups = max(workloads.CRITEO_KAGGLE_ROWS), COUNTED_GATHERS * batch
    ids = workloads.zipf_ids(np.random.default_rng(0), rows, lookups, exponent)
    unique = len(np.unique(ids))
    size = _bytes(lookups=lookups, bags=batch, unique=unique, rows=rows, row=4 * DIM)
    case = f"counted: {law} over {rows:,} rows, {COUNTED_GATHERS} ids a bag, batch {batch:,}, dim {DIM}"
    baseline = size["expand"] + size["coalesce (accumulate)"]
    for metric, value in (
        ("gradient, expanded", lookups / batch),
        ("gradient, coalesced", unique / batch),
    ):
        report.add(case, metric, value, "rows by bags")
    reread = baseline + 4 * DIM * lookups
    casted = size["casted gather-reduce"]
    report.add(case, "traffic, expand and coalesce", baseline / size["gather-reduce"], "by gather-reduce")
    report.add(case, "traffic, expand and coalesce, sums reread", reread / size["gather-reduce"], "by gather-reduce")
    report.add(case, "traffic, casted gather-reduce", casted / baseline, "by expand and coalesce")
    report.add(case, "traffic, casted gather-reduce, sums reread", casted / reread, "by expand and coalesce")


def _bytes(*, lookups: int, bags: int, unique: int, rows: int, row: int) -> dict[str, int]:
    """Loads and stores of each primitive; ``row`` is the bytes of a row."""
    passes = -(-rows.bit_length() // SORT_DIGIT_BITS)
    sort = 4 * lookups + passes * 16 * lookups + 8 * lookups + 8 * unique
    return {
        "gather-reduce": lookups * (row + 4) + bags * row,
        "expand": lookups * (row + 4) + bags * row,
        "coalesce (sort)": sort,
        "coalesce (accumulate)": lookups * (row + 4) + unique * (row + 4),
        "scatter": unique * (3 * row + 4),
        "cast": sort,
        "casted gather-reduce": lookups * (row + 4) + unique * (row + 4),
        "fused update": lookups * (row + 4) + unique * (2 * row + 8),
    }


def _report(report: harness.Report, point: Point) -> None:
    case = f"{point.model}, batch {point.batch:,}, dim {point.dim}"
    for name, time in point.milliseconds.items():
        report.add(case, f"{name}, time", time, "ms")
        report.add(case, f"{name}, traffic", point.size[name] / 1e6, "MB")
    baseline = "expand-coalesce"
    report.add(
        case,
        "cast + casted gather-reduce",
        point.total(CASTED[:2]),
        "ms",
        peer=baseline,
        ratio=point.coalesce_speedup,
    )
    report.add(
        case, "cast + fused update", point.total(FUSED), "ms", peer=f"{baseline}-scatter", ratio=point.backward_speedup
    )


if __name__ == "__main__":
    main()
