"""Plans for devices of which some keep the tables and the others compute (Tensor Casting, section IV-C).

The devices that keep tables are planned as if there were no others: tiers, pieces, balance and refinement are OPER's.
No row is replicated. A replica would save the lookups of one row at the price of memory that the dense model could
have, of a row update on devices that otherwise make none, and of an all-reduce in every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jrec.sharding.pieces import SHARDED, Placement
from jrec.sharding.plans import Plan
from jrec.sharding.problem import Problem


def keepers_problem(problem: Problem) -> Problem:
    """Only the devices that keep tables, each with the accesses of a device that computes."""
    hardware = problem.hardware
    keepers = hardware.tables_on
    return problem.on_devices(hardware.only(keepers, hardware.name), problem.num_compute_devices, extra_memory=0.0)


def on_all(problem: Problem, placement: Placement) -> Placement:
    """A placement on the devices that keep tables, without copies, as one on all devices."""
    keepers = np.array(problem.hardware.tables_on)
    source = placement.path[:, 0]  # the same for all, since there are no copies
    kept = source >= 0
    owner = np.where(kept, keepers[np.maximum(source, 0)], -1).astype(np.int16)
    return dataclasses.replace(
        placement,
        tier=np.where(kept, np.uint8(SHARDED), placement.tier),
        owner=owner,
        path=np.repeat(owner[:, None], problem.devices, axis=1),
    )


def among_keepers(problem: Problem, plan: Plan) -> Plan:
    """What a plan for all devices says of those that keep tables, for planning anew; other owners' rows have none."""
    number = np.full(problem.devices + 1, -1, np.int16)  # one more for rows without an owner
    number[np.array(problem.hardware.tables_on)] = np.arange(len(problem.hardware.tables_on))
    return dataclasses.replace(plan, owner=number[plan.owner], computes=None)


def placed_by(problem: Problem, strategy: Callable[[Problem], Placement]) -> Placement:
    """What a strategy makes of a problem, on the devices that keep tables where some do nothing else."""
    if problem.computes is None:
        return strategy(problem)
    return on_all(problem, strategy(keepers_problem(problem)))


def device_ranges(numbers: tuple[int, ...]) -> str:
    """``0-3, 6``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
