"""Bytes that a device of a mesh sends in a step: as the cost model expects, as routes count, as the program moves them.

The cost model knows means over batches. A batch's lookups are of real rows. A compiled program moves arrays of static
size, so that lines of requests are as long as the longest, in buckets of a power of two or one and a half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.scaling_step import Setup, sizes_of
from jrec.run.placement.part_lookups import PartLookups
from jrec.run.step import StepBatch
from jrec.sharding.modes import expected_traffic
from jrec.sharding.pieces import REPLICATED
from jrec.sharding.problem import Ranked


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


def ledger(
    setup: Setup, parts: Sequence[PartLookups], batch: StepBatch, state: Any, *, counted: bool = False
) -> list[Entry]:
    """All traffic of a step with the local-aggregated all-reduce.

    Args:
      setup: workload, plan and costs; how rows are looked up and lines travel.
      parts: the lookups of one batch, of all devices.
      batch: the batch in static sizes, without further windows.
      state: of model and optimizer, whose dense gradients are summed; arrays or shapes.
      counted: Whether metrics count logits on the devices, as in a run, so that these do not travel.
    """
    devices, places = setup.devices, batch.places[setup.stack]
    others, ring = devices - 1, 2 * (devices - 1) / devices
    (table, *_) = setup.problem.tables
    replicas = [part.addresses[part.source == devices] for part in parts]
    touched, union = np.mean([of.size for of in replicas]), np.unique(np.concatenate(replicas)).size
    room = places.room.replicated
    copies = max(1, setup.plan.replicated_rows(table.stack))
    buffer = min(devices * room, copies)
    wide = 4 * table.dim
    seen, dense = 12 * setup.workload.batch * others / devices, ring * (_dense_bytes(state) + 8)
    return [
        *link_entries(setup, parts, batch),
        _entry("touched replicas", None, 4 * others * touched, 4 * others * room, f"room for {room:,} on a device"),
        _entry(
            "gradients of replicas", ring * wide * expected_rows(setup).union, ring * wide * union,
            ring * wide * buffer, f"room for {buffer:,} rows, of {copies:,} that are replicated",
        ),
        _entry("dense gradients", None, dense, dense, "nothing"),
        *([] if counted else [_entry("logits, labels, mask", None, seen, seen, "nothing")]),
    ]  # fmt: skip


def link_entries(setup: Setup, parts: Sequence[PartLookups], batch: StepBatch) -> list[Entry]:
    """The traffic of looking up other devices' rows, in the setup's form."""
    return (_sent if batch.places[setup.stack].sends else _retrieved)(setup, parts, batch)


def _retrieved(setup: Setup, parts: Sequence[PartLookups], batch: StepBatch) -> list[Entry]:
    (table, *_) = setup.problem.tables
    line, rows = batch.places[setup.stack].room.remote, expected_rows(setup).remote
    fetched, longest = _fetched(parts).sum(axis=1).mean(), _fetched(parts).max()
    padding = f"every line has room for {line:,} rows, the longest has {longest:,}"
    of = (line, rows, fetched, padding)
    return [
        _in_lines(setup, "requests", 4, *of),
        _in_lines(
            setup, "rows", setup.links.itemsize("rows", table.row_bytes // table.dim) * table.dim, *of, ragged=True
        ),
        _in_lines(setup, "gradients of rows", setup.links.itemsize("gradients", 4) * table.dim, *of, ragged=True),
    ]


def _sent(setup: Setup, parts: Sequence[PartLookups], batch: StepBatch) -> list[Entry]:
    (table, *_) = setup.problem.tables
    expected, room = expected_traffic(setup.problem, setup.plan), batch.places[setup.stack].room
    sending = sizes_of(setup).sending(setup.stack)
    lookups, bags = (np.array(of) for of in zip(*(part.sends(sending) for part in parts), strict=True))
    kinds = []
    for what, line, of, found in (
        ("lookups", room.lookups, expected.lookups, lookups),
        ("bags", room.bags, expected.bags, bags),
    ):
        padding = f"every line has room for {line:,} {what}, the longest has {found.max():,}"
        kinds.append((line, float(of.sum()) / setup.devices, found.sum(axis=1).mean(), padding))
    lookups, bags = kinds
    return [
        _in_lines(setup, "ids of lookups", 4, *lookups),
        _in_lines(setup, "starts of bags", 4, *bags),
        _in_lines(setup, "sums of bags", setup.links.itemsize("rows", 4) * table.dim, *bags, ragged=True),
        _in_lines(setup, "gradients of bags", setup.links.itemsize("gradients", 4) * table.dim, *bags, ragged=True),
    ]


def _in_lines(
    setup: Setup, name: str, size: int, room: int, expected: float, real: float, why: str, *, ragged: bool = False
) -> Entry:
    """Values of ``size`` bytes that travel in lines for ``room`` of them; without padding where that can be."""
    moved = (setup.devices - 1) * room
    if ragged and setup.exchange == "ragged":
        moved, why = real, "nothing"
    return _entry(name, size * expected, size * real, size * moved, why)


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


def link_bytes(setup: Setup, parts: Sequence[PartLookups]) -> np.ndarray:
    """(devices, devices) float64, as ``Cost.link_bytes``, of one batch: what device i fetches from j; diagonal 0."""
    (row_bytes,) = {int(b) for b in setup.problem.row_bytes}
    return _fetched(parts) * float(row_bytes)


def _fetched(parts: Sequence[PartLookups]) -> np.ndarray:
    """(devices, devices) int64, the rows that device i fetches from j where all are retrieved."""
    return np.array([np.bincount(part.owner[part.owner >= 0], minlength=part.devices) for part in parts])


def _dense_bytes(state: Any) -> int:
    """Of the dense parameters; ``state`` is that of (model, optimizer)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state[0]))
