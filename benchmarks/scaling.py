"""Training steps on 1 to 8 devices: bytes of every link, counted and expected.

    python -m benchmarks.scaling                 # virtual CPU devices, which share this machine's cores
    python -m benchmarks.scaling --quick

Two parts. "steps" trains a DLRM of Criteo Kaggle's tables, capped, with as many examples on every device, in one
process for each number of devices, and counts what its routes fetch over each link beside the cost model. "links" does
so for the full Kaggle and Terabyte tables, where only routes are made, and for RM1 to RM4 in the forms retrieve, send
and memory-centric (half of the devices keep tables, the other half compute); what their training steps, compiled for 8
virtual devices, move in the first two, padding told apart.
"""

from __future__ import annotations

import numpy as np

from benchmarks import harness, scaling_bytes, scaling_step, workloads
from benchmarks.scaling_forms import report_forms
from benchmarks.scaling_modes import modes, tensor_train
from jrec.sharding.hardware import load_hardware

DEVICES = (1, 2, 4, 8)
LINK_CASES = ("kaggle", "terabyte")


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=("steps", "links"), help="parts to run")
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), help="of the parts steps and links")
    parser.add_argument("--examples", type=int, help="of each device (default 2048; 256 with --quick)")
    arguments = parser.parse_args()
    chosen = arguments.only or ("steps", "links")
    with harness.Report(arguments, "scaling") as report:
        examples = arguments.examples or (256 if report.quick else 2048)
        if "steps" in chosen:
            steps(report, arguments.devices, examples)
        if "links" in chosen:
            links(report, [d for d in arguments.devices if d > 1], examples)


def steps(report: harness.Report, devices: list[int], examples: int) -> None:
    """Real steps."""
    rows, count = (5_000, 3) if report.quick else (100_000, 9)
    for number in devices:
        measured = run_worker(number, rows=rows, examples=examples, steps=count)
        case = f"kaggle capped at {rows:,} rows, {number} devices, {examples:,} examples each"
        report.add(case, "step, median", 1e3 * measured["seconds"], "ms")
        report.add(case, "loss after the steps", measured["losses"][-1], "")
        if number == 1:
            continue
        _links(report, case, np.array(measured["counted"]), np.array(measured["expected"]))
        report.add(case, "sent by a device, all collectives, without padding", measured["real"] / 1e3, "kB")
        report.add(case, "sent by a device, all collectives", measured["moved"] / 1e3, "kB")


def run_worker(devices: int, *, rows: int, examples: int, steps: int) -> dict:
    """``benchmarks.scaling_worker`` with ``devices`` virtual CPU devices."""
    sizes = {"devices": devices, "rows": rows, "examples": examples, "steps": steps}
    return harness.on_virtual_devices(devices, "benchmarks.scaling_worker", *(f"--{k}={v}" for k, v in sizes.items()))


def links(report: harness.Report, devices: list[int], examples: int) -> None:
    """Counted and expected bytes of full tables, and of the forms of the lookup."""
    for name in LINK_CASES[:1] if report.quick else LINK_CASES:
        for number in devices:
            workload = workloads.WORKLOADS[name].with_batch(examples * number)
            setup = scaling_step.planned(workload, load_hardware("h200x8", devices=number))
            counted = scaling_bytes.link_bytes(
                setup, scaling_step.lookups_of(setup, scaling_step.partitioned_of(setup, seed=0))
            )
            case = f"{name}, full tables, {number} devices, {examples:,} examples each"
            _links(report, case, counted, setup.cost.link_bytes)
    names = ["rm1"] if report.quick else ["rm1", "rm2", "rm3", "rm4"]
    for name in names:
        modes(report, name, examples=min(examples, 512))
    report_forms(report, names, examples=min(examples, 256))
    tensor_train(report, examples=examples)


def _links(report: harness.Report, case: str, counted: np.ndarray, expected: np.ndarray) -> None:
    away = ~np.eye(len(counted), dtype=bool)
    for statistic in ("max", "mean", "min"):
        ours, theirs = (float(getattr(a[away], statistic)()) / 1e3 for a in (counted, expected))
        report.add(case, f"fetched over a link, {statistic}", ours, "kB", peer="cost model", ratio=theirs / ours)


if __name__ == "__main__":
    main()
