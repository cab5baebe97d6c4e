"""RM1 to RM4 on 8 devices in the forms of a lookup (retrieve, send, memory-centric), and tensor-train cores on some."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from benchmarks import harness, scaling_step, workloads
from jrec.ops.tt import TTShape
from jrec.sharding.hardware import load_hardware
from jrec.sharding.locator import Locator
from jrec.sharding.modes import Traffic, expected_traffic, traffic
from jrec.sharding.pieces import SHARDED
from jrec.sharding.plans import Plan
from jrec.sharding.problem import Problem

DEVICES = 8
APART = dataclasses.replace(load_hardware("h200x8"), tables_on=(0, 1, 2, 3))  # the others compute


def modes(report: harness.Report, name: str, *, examples: int) -> None:
    """Bytes of a step over all links, counted from a batch beside the cost model, in every form.

    Args:
      report: to add to.
      name: of the workload.
      examples: of a device, where all of them compute; the batch is the same in every form.
    """
    workload = workloads.WORKLOADS[name].with_batch(examples * DEVICES)
    ids = workloads.table_ids(workload, seed=0)
    for hardware, names in (
        (load_hardware("h200x8"), {"retrieve": "retrieve", "send": "send"}),
        (APART, {"send": "memory-centric"}),
    ):
        setup = scaling_step.planned(workload, hardware, extra_memory=0.0)
        expected = expected_traffic(setup.problem, setup.plan)
        counted = counted_traffic(setup.problem, setup.plan, ids)
        for mode, shown in names.items():
            ours, theirs = (getattr(of, mode).sum() / 1e6 for of in (counted, expected))
            case = f"{name}, {DEVICES} devices, batch {workload.batch:,}, {shown}"
            report.add(case, "bytes over all links", ours, "MB", peer="cost model", ratio=theirs / ours)


def tensor_train(report: harness.Report, *, examples: int, rank: int = 32, dim: int = 16) -> None:
    """What a device sends so that all make the same step of a tensor-train table's cores, in either way to do it.

    Training all-reduces the gradients of the cores: a few megabytes whatever the batch and the number of devices, 10 us
    within a node, of which each device makes its own part. Gathering everybody's row gradients is less on few devices
    with small batches, but grows with both, and every device would repeat the work of all.
    """
    workload = workloads.WORKLOADS["kaggle"].with_batch(examples)
    rows, ids = max(zip(workload.rows, workloads.table_ids(workload, seed=0), strict=True), key=lambda pair: pair[0])
    cores = 4 * sum(math.prod(core) for core in TTShape.search(rows, dim, ranks=rank).core_shapes)
    for devices in (2, DEVICES, 64):
        case = f"tensor-train table {rows:,} x {dim}, rank {rank}, {devices} devices, {examples:,} examples each"
        reduced, gathered = 2 * (devices - 1) / devices * cores, (devices - 1) * np.unique(ids).size * 4 * (dim + 1)
        report.add(case, "core gradients, all-reduced", reduced / 1e3, "kB", peer="gathered", ratio=gathered / reduced)
        report.add(case, "row gradients, gathered", gathered / 1e3, "kB")


def counted_traffic(problem: Problem, plan: Plan, ids: Sequence[np.ndarray]) -> Traffic:
    """What the devices that compute ask for in one batch, of which each has an equal part.

    Args:
      problem: tables.
      plan: where rows live.
      ids: (batch, length) of every table.
    """
    locator, devices, asking = Locator(plan), plan.devices, plan.compute_devices
    found = np.zeros((3, len(ids), devices, devices))
    for t, of_table in enumerate(ids):
        for device, part in zip(asking, np.array_split(of_table, len(asking)), strict=True):
            place = locator.locate(plan.tables[t].name, part.reshape(-1))
            sharded = place.tier == SHARDED
            owner, offset = place.owner[sharded].astype(np.int64), place.offset[sharded]
            bag = np.repeat(np.arange(part.shape[0]), part.shape[1])[sharded]
            found[0, t, device] = np.bincount(owner, minlength=devices)
            for kind, of in ((1, offset), (2, bag)):
                unique = np.unique(owner << 40 | of)
                found[kind, t, device] = np.bincount(unique >> 40, minlength=devices)
    return traffic(
        lookups=found[0],
        rows=found[1],
        bags=found[2],
        row_bytes=problem.row_bytes,
        dims=np.array([t.dim for t in problem.tables]),
    )
