"""Bytes that a device of a mesh sends in a step: as the cost model expects, as routes count, as the program moves them.

The cost model knows means over batches. A batch's routes hold real rows. A compiled program moves arrays of static
size, so that lines of requests are as long as the longest, in buckets of a power of two or one and a half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.scaling_step import Setup
from jrec.sharding.pieces import REPLICATED
from jrec.sharding.problem import Ranked
from jrec.train.mesh_arrays import MeshBatch
from jrec.train.mesh_batch import Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One kind of traffic.

    Attributes:
      name: what travels.
      expected: bytes a device sends by the cost model, the mean over devices; None where it has no such term.
      real: the same by a batch's routes, without padding.
      moved: what the program moves.
      why: what ``moved`` has more than ``real``.
    """

    name: str
    expected: float | None
    real: float
    moved: float
    why: str


def ledger(setup: Setup, parts: Sequence[Part], batch: MeshBatch, state: Any) -> list[Entry]:
    """All traffic of a step with the padded exchange and the local-aggregated all-reduce.

    Args:
      setup: workload, plan and costs.
      parts: of one batch, of all devices.
      batch: the parts in static sizes.
      state: of model and optimizer, whose dense gradients are summed; arrays or shapes.
    """
    devices, route = setup.devices, batch.routes[setup.stack]
    others, ring = devices - 1, 2 * (devices - 1) / devices
    (table, *_) = setup.problem.tables
    rows = expected_rows(setup)
    line = route.remote.rows.shape[-1]
    fetched = np.array([_remote(p, setup.stack, d, devices) for d, p in enumerate(parts)]).mean()
    touched = np.array([p.routes[setup.stack].of(devices)[0].size for p in parts]).mean()
    union = np.unique(np.concatenate([p.routes[setup.stack].of(devices)[0] for p in parts])).size
    room = route.replicated.rows.shape[-1]
    copies = max(1, setup.plan.replicated_rows(table.stack))
    buffer = min(devices * room, copies) if route.union is None else min(route.union, devices * room, copies)
    narrow, wide = table.row_bytes, 4 * table.dim  # gradients are float32 whatever the rows
    padding = f"every line has room for {line:,} rows, the longest has {_longest(parts, setup.stack, devices):,}"
    seen, dense = 12 * setup.workload.batch * others / devices, ring * (_dense_bytes(state) + 8)
    return [
        _entry("requests", 4 * rows.remote, 4 * fetched, 4 * others * line, padding),
        _entry("rows", narrow * rows.remote, narrow * fetched, narrow * others * line, padding),
        _entry("gradients of rows", wide * rows.remote, wide * fetched, wide * others * line, padding),
        _entry("touched replicas", None, 4 * others * touched, 4 * others * room, f"room for {room:,} on a device"),
        _entry(
            "gradients of replicas", ring * wide * rows.union, ring * wide * union, ring * wide * buffer,
            f"room for {buffer:,} rows, of {copies:,} that are replicated",
        ),
        _entry("dense gradients", None, dense, dense, "nothing"),
        _entry("logits, labels, mask", None, seen, seen, "nothing"),
    ]  # fmt: skip


def table_of(entries: Sequence[Entry]) -> str:
    """For people."""
    lines = [f"{'bytes a device sends in a step':32} {'cost model':>12} {'batch':>12} {'program':>12}"]
    for entry in entries:
        expected = "" if entry.expected is None else f"{entry.expected:,.0f}"
        lines.append(f"{entry.name:32} {expected:>12} {entry.real:12,.0f} {entry.moved:12,.0f}  {entry.why}")
    return "\n".join(lines)


def _entry(name: str, expected: float | None, real: float, moved: float, why: str) -> Entry:
    return Entry(name=name, expected=expected, real=float(real), moved=float(moved), why=why)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedRows:
    """Rows of a step by the cost model: fetched from other devices by one, and of the union of touched replicas."""

    remote: float
    union: float


def expected_rows(setup: Setup) -> ExpectedRows:
    """What the profile lets expect. With the problem's unique rows, A is the chance that a device reads a row."""
    plan, problem = setup.plan, setup.problem
    (row_bytes,) = {int(b) for b in problem.row_bytes}
    union = 0.0
    for t, ranked in enumerate(problem.by_row):
        anybody = 1 - (1 - ranked.access) ** plan.devices
        mass = np.append(0.0, np.cumsum(anybody * np.diff(ranked.starts)))
        seen = Ranked(starts=ranked.starts, access=anybody, first_row=ranked.first_row, mass=mass)
        of = slice(plan.first[t], plan.first[t + 1])
        per_segment = seen.mass_before(plan.stop[of]) - seen.mass_before(plan.start[of])
        union += float(per_segment[plan.tier[of] == REPLICATED].sum())
    return ExpectedRows(remote=float(setup.cost.link_bytes.sum(axis=1).mean()) / row_bytes, union=union)


def link_bytes(setup: Setup, parts: Sequence[Part]) -> np.ndarray:
    """(devices, devices) float64, as ``Cost.link_bytes``, of one batch: what device i fetches from j; diagonal 0."""
    (row_bytes,) = {int(b) for b in setup.problem.row_bytes}
    found = np.array([p.routes[setup.stack].counts[: setup.devices] for p in parts], np.float64) * row_bytes
    np.fill_diagonal(found, 0.0)
    return found


def _remote(part: Part, stack: str, device: int, devices: int) -> int:
    counts = part.routes[stack].counts[:devices]
    return int(counts.sum() - counts[device])


def _longest(parts: Sequence[Part], stack: str, devices: int) -> int:
    lines = np.array([p.routes[stack].counts[:devices] for p in parts])
    np.fill_diagonal(lines, 0)
    return int(lines.max())


def _dense_bytes(state: Any) -> int:
    """Of the dense parameters; ``state`` is that of (model, optimizer)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state[0]))
