"""OPER's tables and figures that a cost model can show: Tables 2 and 3, Figures 8, 9 (b) and 10.

    partitions  accesses and memory of access-bound pieces (Section 4.2)
    table2      extra memory against communication
    table3      threshold against time and balance
    milp        distance to the exact optimum
    figure10    memory, lookups and links of every strategy, and a step beside OPER's
    rules       replicas by the paper's rule and per device, on one node and several; links of unequal speed (Figure 8)
    all_reduce  bytes of the three ways to sum gradients of replicated rows (Figure 9 b), 5 % extra memory, 4 x 4 A100
    rows        planning from the counts of single rows

    python -m benchmarks.oper                         # everything, with power-law accesses
    python -m benchmarks.oper --quick
    python -m benchmarks.oper --only table3 --dataset kaggle --milp-seconds 300
    python -m benchmarks.oper --kaggle-sample FILE --avazu-sample FILE --figures DIR

DGX-A100, 16,384 examples a device and step (which gives the paper's 3.25, 13.0 and 2.5 MiB a link without copies).
Units are the paper's: what a link fetches in a forward pass, and the variance over links in MiB squared. With samples
of the real logs their counts are planned too; a sample of 80,000 lines knows a fraction of the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import resource
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks import harness, workloads
from benchmarks.studies import milp
from jrec.access.count import exact_profile
from jrec.access.power_law import power_law_profile
from jrec.access.profile import AccessProfile, TableProfile
from jrec.prepare.synth import shape_like
from jrec.sharding.balance import assign, loads_of, polish
from jrec.sharding.baselines import BASELINES
from jrec.sharding.cost import Cost, degree_of_balance, evaluate, replicated_seconds
from jrec.sharding.figure import draw_balance
from jrec.sharding.hardware import PRESETS, load_hardware
from jrec.sharding.locator import Locator
from jrec.sharding.partition import access_bound, partition, whole
from jrec.sharding.pieces import REPLICATED, Placement
from jrec.sharding.planner import PlanOptions, plan_placement
from jrec.sharding.plans import build_plan
from jrec.sharding.problem import Problem, Purpose, tables_of
from jrec.sharding.replicate import FrequencyRule

EXTRA = (0.0, 0.01, 0.02, 0.05, 0.10, 0.15, 0.20)
THRESHOLDS = (0.05, 0.01, 0.005, 0.001, 0.0005)
PER_DEVICE = 16_384
MIB = 2**20
PARTS = ("partitions", "table2", "table3", "milp", "figure10", "rules", "node_copies", "all_reduce", "rows")
CLUSTERS = {"kaggle": ("dgx-a100", "a100-4x4"), "terabyte": ("h200x8", "h200-2x8", "a100-4x4")}
PAPER_TABLE2 = {  # mean MiB a link
    "avazu": (2.50, 0.16, 0.15, 0.13, 0.12, 0.10, 0.10),
    "terabyte": (13.0, 0.95, 0.84, 0.73, 0.66, 0.57, 0.52),
    "kaggle": (3.25, 0.46, 0.30, 0.24, 0.20, 0.19, 0.18),
}
PAPER_TABLE3 = ((15.8, 71.6), (28.4, 80.1), (41.5, 88.3), (120.3, 99.1), (235.2, 99.1))  # seconds, degree of balance


PAPERS = PlanOptions(rule="oper")
MILP_CASES: tuple[tuple[int, Purpose, FrequencyRule, float], ...] = (
    (2, "training", "oper", 0.1),
    (2, "training", "oper", 0.002),
    (2, "training", "per-device", 0.1),
    (4, "training", "oper", 0.2),
    (4, "training", "per-device", 0.2),
    (8, "training", "oper", 0.05),
    (2, "inference", "oper", 0.2),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """A click log: table sizes, row length and examples."""

    name: str
    rows: dict[str, int]
    dim: int
    examples: int


def _numbered(rows: tuple[int, ...]) -> dict[str, int]:
    return {f"C{i + 1}": n for i, n in enumerate(rows)}


def logs() -> dict[str, Log]:
    """The three logs of the paper, at the published numbers of examples."""
    avazu = dict(shape_like("avazu").rows)
    made = (
        Log(name="kaggle", rows=_numbered(workloads.CRITEO_KAGGLE_ROWS), dim=16, examples=45_840_617),
        Log(name="avazu", rows=avazu, dim=16, examples=40_428_967),
        Log(name="terabyte", rows=_numbered(workloads.CRITEO_TERABYTE_ROWS), dim=64, examples=4_373_472_329),
    )
    return {log.name: log for log in made}


def problem_of(log: Log, profile: AccessProfile, preset: str = "dgx-a100", **options: Any) -> Problem:
    """Planning a log on a DGX-A100, or other hardware."""
    hardware = PRESETS[preset].with_memory(200 * 10**9)  # no tier but full rows: their budgets are not the subject
    options.setdefault("batch_size", PER_DEVICE * hardware.devices)
    return Problem(tables=tables_of(log.rows.items(), log.dim), profile=profile, hardware=hardware, **options)


def partitions(report: harness.Report, log: Log, profile: AccessProfile, case: str) -> None:
    """What share of accesses and of memory the pieces have that are balanced by their accesses."""
    problem = problem_of(log, profile)
    for threshold in THRESHOLDS:
        pieces = partition(problem, threshold, *whole(problem))
        bound, label = access_bound(pieces), f"{case}, threshold {100 * threshold:g} %"
        for name, sizes in (("accesses", pieces.fetched), ("memory", pieces.memory)):
            report.add(label, f"partitions: {name} of access-bound pieces", 100 * sizes[bound].sum() / sizes.sum(), "%")


def table2(report: harness.Report, log: Log, profile: AccessProfile, case: str) -> None:
    """Communication over extra memory, for inference (Algorithm 1) and training (frequency rule)."""
    for purpose in ("inference", "training"):
        first = None
        for place, extra in enumerate(EXTRA):
            problem = problem_of(log, profile, purpose=purpose, extra_memory=extra)
            planned = plan_placement(problem, PAPERS)
            cost = planned.cost
            remote = cost.remote_bytes / MIB
            first = float(remote.mean()) if first is None else first
            name = f"{case}, {purpose}, extra {100 * extra:g} %"
            report.add(name, "table 2: mean a link", remote.mean(), "MiB", peer="0 %", ratio=first / remote.mean())
            report.add(name, "table 2: variance over links", remote.var(), "MiB^2")
            report.add(name, "table 2: copies", 100 * cost.copies / problem.total_bytes, "% of tables")
            report.add(name, "table 2: degree of balance, links", 100 * cost.communication_balance, "%")
            if purpose == "training":
                report.add(name, "table 2: all-reduce", 1e6 * cost.all_reduce, "us")
            if purpose == "inference" and "sample" not in log.name:
                report.add(name, "table 2: mean a link, the paper's", PAPER_TABLE2[log.name][place], "MiB")


def table3(report: harness.Report, log: Log, profile: AccessProfile, case: str) -> None:
    """Threshold against time and balance: the paper's algorithm, then with exchanges."""
    for threshold, (paper_seconds, paper_balance) in zip(THRESHOLDS, PAPER_TABLE3, strict=True):
        for name, exchanges in (("greedy", 0), ("oper", PlanOptions.exchanges)):
            options = dataclasses.replace(PAPERS, threshold=threshold, refinements=0, exchanges=exchanges)
            problem = problem_of(log, profile)
            problem.ranked  # noqa: B018 - counted below, in `rows`
            planned = plan_placement(problem, options)
            cost = planned.cost
            remote = cost.remote_seconds
            label = f"{case}, {name}, threshold {100 * threshold:g} %"
            report.add(label, "table 3: time", planned.seconds, "s")
            report.add(label, "table 3: max link", 1e6 * remote.max(), "us")
            report.add(label, "table 3: min link", 1e6 * remote.min(), "us")
            report.add(label, "table 3: degree of balance, links", 100 * cost.communication_balance, "%")
            report.add(label, "table 3: degree of balance, lookups", 100 * cost.lookup_balance, "%")
            report.add(label, "table 3: degree of balance, memory", 100 * cost.memory_balance, "%")
            if log.name == "kaggle":
                report.add(label, "table 3: time, the paper's", paper_seconds, "s")
                report.add(label, "table 3: degree of balance, links, the paper's", paper_balance, "%")


def table3_milp(report: harness.Report, log: Log, profile: AccessProfile, case: str, seconds: float) -> None:
    """The exact optimum beside the planner, which cuts finer pieces, and beside greedy on the very same pieces."""
    for devices, purpose, rule, threshold in MILP_CASES:
        hardware = load_hardware("dgx-a100", devices=devices).with_memory(10**12)
        batch = PER_DEVICE * devices
        problem = dataclasses.replace(problem_of(log, profile, purpose=purpose, batch_size=batch), hardware=hardware)
        pieces = partition(problem, threshold, *whole(problem))
        label = f"{case}, {devices} devices, {purpose} ({rule}), {100 * threshold:g} %, {len(pieces)} pieces"
        solved = milp.solve(problem, pieces, seconds=seconds, rule=rule)
        report.add(label, f"milp: {'proved optimal' if solved.optimal else 'out of time'}", solved.seconds, "s")
        planned = plan_placement(problem, PlanOptions(rule=rule))
        ours = milp.objective(problem, planned.placement, rule)
        report.add(label, "milp: planner's time", planned.seconds, "s")
        if solved.placement is not None:
            cost = evaluate(problem, solved.placement)
            report.add(label, "milp: objective", 1e6 * solved.objective, "us")
            report.add(label, "milp: degree of balance, links", 100 * cost.communication_balance, "%")
            report.add(label, "milp: planner above the solver's best", 100 * (ours / solved.objective - 1), "%")
    for devices, threshold in ((2, 0.05), (2, 0.01), (4, 0.05), (8, 0.05)):
        _model_parallel_milp(report, log, profile, case, devices, threshold, seconds)


def _model_parallel_milp(
    report: harness.Report, log: Log, profile: AccessProfile, case: str, devices: int, threshold: float, seconds: float
) -> None:
    """Without copies, on the very same pieces: how far greedy and exchanges are from the best split of the lookups."""
    hardware = load_hardware("dgx-a100", devices=devices).with_memory(10**12)
    problem = dataclasses.replace(problem_of(log, profile, extra_memory=0.0), hardware=hardware)
    pieces = partition(problem, threshold, *whole(problem))
    label = f"{case}, {devices} devices, no copies, same {len(pieces)} pieces"
    solved = milp.solve(problem, pieces, seconds=seconds)
    report.add(label, f"milp: {'proved optimal' if solved.optimal else 'out of time'}", solved.seconds, "s")
    same, greedy = assign(problem, pieces)
    for name, owner in (("greedy", greedy), ("greedy and exchanges", polish(problem, same, greedy))):
        value = milp.objective(problem, Placement.owned(same, owner, devices))
        report.add(label, f"milp: {name} above the solver's best", 100 * (value / solved.objective - 1), "%")
        report.add(label, f"milp: {name} above the solver's bound", 100 * (value / solved.bound - 1), "%")
        balance = degree_of_balance(loads_of(problem, same, owner).memory)
        report.add(label, f"milp: {name}, degree of balance, memory", 100 * balance, "%")
    if solved.placement is not None:
        balance = degree_of_balance(evaluate(problem, solved.placement).memory)
        report.add(label, "milp: degree of balance, memory", 100 * balance, "%")


def figure10(report: harness.Report, log: Log, profile: AccessProfile, case: str, folder: pathlib.Path | None) -> None:
    """Memory, lookups and communication of every strategy."""
    problem = problem_of(log, profile)
    costs: dict[str, Cost] = {"oper": plan_placement(problem, PAPERS).cost}
    costs["oper, per-device rule"] = plan_placement(problem, PlanOptions(rule="per-device")).cost
    costs |= {name: evaluate(problem, place(problem)) for name, place in BASELINES.items()}
    for name, cost in costs.items():
        label = f"{case}, {name}"
        for quantity, values, unit in (
            ("memory", cost.memory / 1e9, "GB"),
            ("lookup", 1e3 * cost.lookup, "ms"),
            ("link", cost.remote_bytes / MIB, "MiB"),
        ):
            for statistic in ("max", "mean", "min"):
                report.add(label, f"figure 10: {quantity}, {statistic}", float(getattr(values, statistic)()), unit)
        ours = costs["oper"].seconds
        report.add(
            label, "figure 10: a step, nothing overlapped", 1e3 * cost.seconds, "ms", peer="oper",
            ratio=ours / cost.seconds,
        )  # fmt: skip
        report.add(label, "figure 10: a step by OPER's", cost.seconds / ours, "x")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw_balance(costs, folder / f"figure10_{log.name}.svg", title=f"{case} on DGX-A100, training")


RULES: tuple[tuple[str, float, FrequencyRule], ...] = (
    ("no replicas", 0.0, "oper"),
    ("the paper's rule", 0.05, "oper"),
    ("per-device rule", 0.05, "per-device"),
)


def rules(report: harness.Report, log: Log, profile: AccessProfile, case: str) -> None:
    """Replicas by both rules, on one node and over several; and how far apart links of unequal speed end."""
    for preset in CLUSTERS.get(log.name, ()):
        for name, extra, rule in RULES:
            problem = problem_of(log, profile, preset, purpose="training", extra_memory=extra)
            cost = plan_placement(problem, PlanOptions(rule=rule)).cost
            report.add(f"{case}, {preset}", f"rules: a step with {name}", 1e6 * cost.seconds, "us")
        problem = problem_of(log, profile, preset, purpose="inference", extra_memory=0.05)
        remote = plan_placement(problem).cost.remote_seconds
        speeds = problem.hardware.L[problem.hardware.remote]
        report.add(
            f"{case}, {preset}", "rules: slowest link by the fastest, per byte", speeds.max() / speeds.min(), "x"
        )
        report.add(f"{case}, {preset}", "rules: costliest link by the cheapest", remote.max() / remote.min(), "x")


def node_copies(report: harness.Report, log: Log, profile: AccessProfile, case: str) -> None:
    """What a copy of a row in every node could gain, were its memory free: the least possible cost of each row.

    A row has one owner; or one in every node, which fetch within it, and whose sums of gradients (of devices that read
    the row) cross between nodes; or a copy on each device, whose gradients a dense all-reduce sums. Seconds are of a
    device's links where fetches are spread evenly.
    """
    for preset in CLUSTERS.get(log.name, ()):
        problem = problem_of(log, profile, preset, purpose="training", dedup=True)
        costs = problem.hardware.L
        within = costs[0] == costs[0, 1]
        within[0] = True
        nodes = len(within) // within.sum()
        if nodes == 1:
            continue
        remote = costs[0] * (np.arange(len(within)) > 0)
        near, between = remote[within].sum() / within.sum(), costs[0].max()
        totals, copied = np.zeros(2), 0.0
        for table, ranked in zip(problem.tables, problem.ranked, strict=True):
            rows, probability, size = np.diff(ranked.starts), ranked.access, table.row_bytes
            one_owner = 2 * probability * size * remote.mean()
            in_node = -np.expm1(within.sum() * np.log1p(-np.minimum(probability, 1 - 1e-12)))
            sums = 2 * (nodes - 1) / nodes * in_node * size / within.sum() * between
            by_node = 2 * probability * size * near + sums
            everywhere = np.full(len(rows), float(replicated_seconds(problem, size)))
            today = np.minimum(one_owner, everywhere)
            totals += [rows @ today, rows @ np.minimum(today, by_node)]
            copied += float(rows @ (by_node < today)) * table.memory_bytes * (nodes - 1)
        label = f"{case}, {preset}"
        report.add(label, "node copies: links of a step without them, at least", 1e6 * totals[0], "us")
        report.add(label, "node copies: links of a step with them, at least", 1e6 * totals[1], "us")
        report.add(label, "node copies: without by with, at most", totals[0] / totals[1], "x")
        report.add(label, "node copies: memory of them", 100 * copied / problem.total_bytes, "% of tables")


def all_reduce(report: harness.Report, log: Log, profile: AccessProfile, case: str) -> None:
    """Bytes that a device sends to sum the gradients of replicated rows: of all, gathered by device, or of the union.

    A ring's all-reduce of n bytes sends 2 (M - 1) / M n; an all-gather sends M - 1 times what a device has touched.
    """
    problem = problem_of(log, profile, "a100-4x4", purpose="training", extra_memory=0.05)
    pieces = plan_placement(problem, PAPERS).placement
    replicated = pieces.tier == REPLICATED
    devices = problem.devices
    rows = touched = union = 0.0
    for t, ranked in enumerate(problem.ranked):
        size = float(problem.row_bytes[t])
        own = replicated & (pieces.pieces.table == t)
        for start, stop in zip(pieces.pieces.start[own].tolist(), pieces.pieces.stop[own].tolist(), strict=True):
            access = ranked.access_at(np.arange(start, stop))
            rows += size * (stop - start)
            touched += (size + 4) * float(-np.expm1(-access).sum())  # with the row's number
            union += size * float(-np.expm1(-access * devices).sum())
    ring = 2 * (devices - 1) / devices
    ways = {
        "dense": ring * rows,
        "gathered": (devices - 1) * touched,
        "local-aggregated": ring * union,
    }
    for name, sent in ways.items():
        report.add(case, f"all-reduce: {name}, sent by a device", sent / MIB, "MiB")
    for name in ("dense", "gathered"):
        report.add(case, f"all-reduce: {name} by local-aggregated", ways[name] / ways["local-aggregated"], "x")


def from_rows(report: harness.Report, log: Log, exponent: float) -> None:
    """All of planning from the counts of single rows, as a dataset holds them: one table in memory at a time."""
    law = power_law_profile(log.rows, examples=log.examples, exponent=exponent)
    counting, tables = 0.0, []
    for table in law.tables:
        counts = table.dense().astype(np.int64)
        start = time.perf_counter()
        tables.append(TableProfile.from_counts(table.name, counts))
        counting += time.perf_counter() - start
        del counts
    start = time.perf_counter()
    problem = problem_of(log, dataclasses.replace(law, tables=tuple(tables)))
    planned = plan_placement(problem)
    plan = build_plan(problem, planned.placement)
    seconds = counting + time.perf_counter() - start
    case = f"{log.name}, {sum(log.rows.values()):,} rows"
    report.add(case, "plan from row counts: time", seconds, "s")
    report.add(case, "plan from row counts: of it, reading counts", counting, "s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.add(case, "plan from row counts: peak memory of the benchmark", peak / 1e9, "GB")
    report.add(case, "plan from row counts: degree of balance, all three", 100 * planned.cost.balance, "%")
    report.add(case, "plan from row counts: ranges", len(plan.start), "")
    largest = max(plan.tables, key=lambda t: t.rows)
    random = np.random.default_rng(0).integers(0, largest.rows, 1_000_000)
    skewed = workloads.zipf_ids(np.random.default_rng(0), largest.rows, 1_000_000, exponent)
    for name, locate in (("NumPy", plan.locate), ("compiled", Locator(plan).locate)):
        for which, rows in (("random", random), ("power-law", skewed)):
            locate(largest.name, rows)
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                locate(largest.name, rows)
                seconds.append(time.perf_counter() - start)
            report.add(case, f"addresses of {which} rows, {name}", 1e-6 * len(rows) / min(seconds), "M/s")


def real_counts(kind: str, sample: pathlib.Path, folder: pathlib.Path) -> tuple[Log, AccessProfile]:
    """Prepares a sample of a real log and takes its counts."""
    from jrec.prepare.prepare import prepare
    from jrec.prepare.prepare_options import PrepareOptions
    from jrec.prepare.readers import Avazu, Criteo

    out = folder / kind
    reader = Avazu() if kind == "avazu" else Criteo("criteo-kaggle")
    schema = prepare(reader, [str(sample)], str(out), PrepareOptions(min_count=1))
    rows = {t.name: t.rows for t in schema.tables}
    profile = exact_profile(out, schema)
    known = logs()[kind]
    return dataclasses.replace(known, name=f"{kind}_sample", rows=rows, examples=int(profile.examples)), profile


def _arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--dataset", nargs="+", choices=tuple(logs()), help="default all; with --quick Kaggle alone")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default all")
    parser.add_argument("--exponent", type=float, default=1.05, help="of the power law (default 1.05)")
    parser.add_argument("--milp-seconds", type=float, help="for each exact solution (default 60, with --quick 2)")
    parser.add_argument("--kaggle-sample", type=pathlib.Path, metavar="FILE", help="lines of the real train.txt")
    parser.add_argument("--avazu-sample", type=pathlib.Path, metavar="FILE", help="lines of the real train.csv")
    parser.add_argument("--figures", type=pathlib.Path, metavar="DIR", help="draw Figure 10 there")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    arguments = _arguments()
    chosen = arguments.only or PARTS
    names = arguments.dataset or (("kaggle",) if arguments.quick else tuple(logs()))
    seconds = arguments.milp_seconds or (2.0 if arguments.quick else 60.0)
    with harness.Report(arguments, "oper") as report, tempfile.TemporaryDirectory() as folder:
        cases: list[tuple[Log, AccessProfile, str]] = []
        for name in names:
            log = logs()[name]
            law = power_law_profile(log.rows, examples=log.examples, exponent=arguments.exponent)
            cases.append((log, law, f"{name}, power law {arguments.exponent:g}"))
        for kind, sample in (("kaggle", arguments.kaggle_sample), ("avazu", arguments.avazu_sample)):
            if sample is not None:
                log, profile = real_counts(kind, sample, pathlib.Path(folder))
                cases.append((log, profile, f"{kind}, real sample"))
        for log, profile, case in cases:
            if "partitions" in chosen:
                partitions(report, log, profile, case)
            if "table2" in chosen:
                table2(report, log, profile, case)
            if "table3" in chosen:
                table3(report, log, profile, case)
            if "milp" in chosen and log.name == "kaggle":
                table3_milp(report, log, profile, case, seconds)
            if "figure10" in chosen:
                figure10(report, log, profile, case, arguments.figures)
            if "rules" in chosen:
                rules(report, log, profile, case)
            if "node_copies" in chosen:
                node_copies(report, log, profile, case)
            if "all_reduce" in chosen:
                all_reduce(report, log, profile, case)
            if "rows" in chosen and "sample" not in log.name:
                from_rows(report, log, arguments.exponent)


if __name__ == "__main__":
    main()
