"""Predicts the time of jrec's GPU kernels beside their floors, without a GPU.

Registers, loops and launches come from the code compiled for an H200 (``benchmarks.gpu_facts``); steps are those that
each warp makes at a batch's real segments with hashed ids; bandwidths and latencies are assumptions, which
``--assumptions`` lists. So every time here is a PREDICTION. Two floors are printed: every distinct byte once at the
bandwidth of device memory ("distinct"); and that, or at L2's bandwidth each row once for each multiprocessor that adds
it up, whichever takes longer ("levels"). The goals, an update within 1.4 times its floor and a forward pass at 85 % of
its own, are judged against "levels".

Examples:
  python -m benchmarks.gpu_model
  python -m benchmarks.gpu_model --case cpu kaggle --gpu h200 --json
  python -m benchmarks.gpu_model --sweep
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

from benchmarks import gpu_facts, gpu_predict
from benchmarks.gpu_chip import CHIPS, SOURCES, Chip
from benchmarks.gpu_model_cases import CASES, SWEEP, Case
from benchmarks.gpu_trips import Segments
from jrec.pallas.tuning import TuningConfig

GOALS = {"update": 1.4, "forward": 1 / 0.85}  # times the floor


@functools.cache
def segments_of(name: str) -> Segments:
    """The segments of the named case's batch."""
    by_name = {case.name: case for case, _ in SWEEP} | CASES
    return Segments.of(by_name[name].ids)


def lines_of(case: Case, facts: dict[str, gpu_facts.Facts], chip: Chip) -> list[dict[str, Any]]:
    """One line for each launch of a case's forward pass and update, and a line for each pass and for the cast."""
    cast_segments = segments_of(case.name)
    floors = gpu_predict.floors(case, cast_segments, chip)
    lines: list[dict[str, Any]] = []
    passes: list[tuple[str, Any, Any]] = [
        ("forward", gpu_predict.forward, case.forward_config()),
        ("cast", gpu_predict.cast, None),
        ("update", gpu_predict.update, case.update_config()),
    ]
    for direction, predict, config in passes:
        program = facts[gpu_facts.key(case, direction, config)]
        launches = predict(case, cast_segments, program, config, chip)
        common = {"case": case.name, "gpu": chip.name, "what": direction}
        lines += [
            common | {"launch": one.name} | dataclasses.asdict(one) | {"seconds": one.seconds, "bound": one.bound}
            for one in launches
        ]
        seconds = sum(one.seconds for one in launches)
        # XLA's kernels of a cast belong to its sort, which is not predicted.
        gaps = len(launches) + (len(program.others) if direction == "update" else 0)
        floor = floors[direction]
        lines.append(
            common
            | {
                "seconds": seconds,
                "launches": gaps,
                "gaps": gaps * chip.launch_gap,
                "floor_distinct": floor.distinct,
                "floor_levels": floor.levels,
                "of_distinct": seconds / floor.distinct,
                "of_levels": seconds / floor.levels,
                "goal_met": seconds <= GOALS[direction] * floor.levels if direction in GOALS else None,
            }
        )
    return lines


def sweep(facts: dict[str, gpu_facts.Facts], chip: Chip) -> list[dict[str, Any]]:
    """Predicted seconds of each config's update."""
    lines = []
    for case, configs in SWEEP:
        cast_segments = segments_of(case.name)
        for config in configs:
            lines += _swept(case, cast_segments, facts, config, chip)
    return lines


def _swept(
    case: Case, cast_segments: Segments, facts: dict[str, gpu_facts.Facts], config: TuningConfig, chip: Chip
) -> list[dict[str, Any]]:
    program = facts[gpu_facts.key(case, "update", config)]
    launches = gpu_predict.update(case, cast_segments, program, config, chip)
    floor = gpu_predict.floors(case, cast_segments, chip)["update"]
    return [
        {
            "case": case.name,
            "dim": case.dim,
            "split": config.split,
            "chunks": config.chunks,
            "unroll": config.unroll,
            "registers": [one.registers for one in launches],
            "spills": sum(kernel.spills for kernel in program.kernels),
            "seconds": sum(one.seconds for one in launches),
            "launches": [one.seconds for one in launches],
            "bounds": [one.bound for one in launches],
            "of_levels": sum(one.seconds for one in launches) / floor.levels,
        }
    ]


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def _print_lines(lines: list[dict[str, Any]]) -> None:
    print(f"{'launch':34} regs warps  blocks waves  KB/mp steps  most |   HBM    L2 issue  wait | predicted us")
    for line in lines:
        if "launch" in line:
            steps = f"{line['mean_steps']:5.1f} {line['most_steps']:5}"
            print(
                f"  {line['launch'][:32]:32} {line['registers']:4} {line['warps']:5} {line['blocks']:7}"
                f" {line['waves']:5.1f} {line['in_flight'] / 1024:6.0f} {steps} |"
                f" {_us(line['hbm']):>5} {_us(line['l2']):>5} {_us(line['issue']):>5} {_us(line['latency']):>5} |"
                f" {_us(line['seconds'])} ({line['bound']})"
            )
            continue
        goal = {True: ", within the goal", False: ", MISSES the goal", None: ""}[line["goal_met"]]
        print(
            f"{line['case']} {line['what']}: {_us(line['seconds'])} us predicted; floor {_us(line['floor_levels'])} us"
            f" (x{line['of_levels']:.2f}, {100 / line['of_levels']:.0f} %{goal}), distinct bytes alone"
            f" {_us(line['floor_distinct'])} us (x{line['of_distinct']:.2f}); and {line['launches']} launches, gaps of"
            f" about {_us(line['gaps'])} us\n"
        )


def _print_sweep(lines: list[dict[str, Any]]) -> None:
    print("case       dim split chunks unroll registers      | us by launch            bound          | us    x floor")
    for line in sorted(lines, key=lambda line: (line["case"], line["seconds"])):
        print(
            f"{line['case']:10} {line['dim']:3} {line['split']:5} {line['chunks']:6} {line['unroll']:6}"
            f" {'/'.join(map(str, line['registers'])):14} | {' '.join(map(_us, line['launches'])):22}"
            f" {'/'.join(line['bounds']):22} | {_us(line['seconds']):6} {line['of_levels']:.2f}"
            + (f" SPILLS {line['spills']}" if line["spills"] else "")
        )


def main() -> None:
    """Prints the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=list(CASES), help="only these cases")
    parser.add_argument("--gpu", choices=sorted(CHIPS), default="h100", help="whose constants (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of tables, times in seconds")
    parser.add_argument("--sweep", action="store_true", help="updates of several configs instead of the cases")
    parser.add_argument("--assumptions", action="store_true", help="only list the constants and where they are from")
    parser.add_argument("--facts", type=pathlib.Path, default=gpu_facts.PATH, help="facts (default: %(default)s)")
    arguments = parser.parse_args()
    chip = CHIPS[arguments.gpu]
    if arguments.assumptions:
        for name, source in SOURCES.items():
            print(f"{name:16} {getattr(chip, name):<12.4g} {source}")
        return
    facts = gpu_facts.load(arguments.facts)
    print(f"PREDICTIONS for one {chip.name}, not measurements", file=sys.stderr)
    if arguments.sweep:
        lines = sweep(facts, chip)
    else:
        lines = []
        for name in arguments.case:
            print(f"segments of {CASES[name].summary}", file=sys.stderr, flush=True)
            lines += lines_of(CASES[name], facts, chip)
    if arguments.json:
        print("\n".join(json.dumps(line) for line in lines))
    else:
        (_print_sweep if arguments.sweep else _print_lines)(lines)


if __name__ == "__main__":
    main()
