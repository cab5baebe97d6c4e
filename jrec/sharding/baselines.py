"""What others do, behind the planner's interface (OPER §6.4): a function from a problem to a placement.

Systems that cut tables by row numbers have rows in no order, while rows descend by frequency in jrec's datasets: the
first range would have all the hot ones. So wherever a strategy cuts a table, its rows are dealt here.

None of them looks at budgets; ``Cost.memory`` against ``Cost.budget`` shows which plans would not run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jrec.sharding.partition import span, whole
from jrec.sharding.pieces import REPLICATED, Pieces, Placement, join
from jrec.sharding.problem import Problem
from jrec.sharding.replicate import runs_of

_ONE_BY_ONE = 64  # shorter runs are dealt row by row


def memory_greedy(problem: Problem) -> Placement:
    """Equal bytes for every device: one device after the other is filled with tables, the last of them in part."""
    rows = np.array([t.rows for t in problem.tables], np.int64)
    share = np.array(problem.hardware.memory, np.float64)
    ends = np.cumsum(share / share.sum()) * problem.total_bytes
    below = np.append(0, np.cumsum(rows * problem.memory_bytes))
    bounds = np.clip(
        np.rint((ends - below[:-1, None]) / problem.memory_bytes[:, None]).astype(np.int64), 0, rows[:, None]
    )
    bounds[:, -1] = rows
    return join([_dealt(problem, t, np.diff(of_table, prepend=0)) for t, of_table in enumerate(bounds)])


def access_greedy(problem: Problem) -> Placement:
    """From the most accessed row on, each row to the device with the least lookups so far.

    A long run of equally accessed rows is dealt at once, to the loads that dealing row by row arrives at.
    """
    from jrec.sharding.deal import deal_rows

    runs = runs_of(problem, whole(problem)[1])
    runs = runs.take(np.argsort(-runs.access * problem.row_bytes[runs.table], kind="stable"))
    devices = problem.devices
    taken = np.zeros((len(runs.table), devices), np.int64)
    per_byte = np.diag(problem.hardware.L) * devices
    fetched = runs.access * problem.row_bytes[runs.table]
    deal_rows(runs.length, fetched, per_byte, _ONE_BY_ONE, np.zeros(devices), taken)
    run, owner = np.nonzero(taken)
    stop = (runs.first[:, None] + np.cumsum(taken, axis=1))[run, owner]
    pieces = Pieces.of(problem, runs.table[run], stop - taken[run, owner], stop)
    return Placement.owned(pieces, owner, devices)


def table_wise(problem: Problem) -> Placement:
    """Whole tables, as many on each device as on any other, in their given order (DLRM, HugeCTR)."""
    pieces = span(problem, *whole(problem))
    owner = np.arange(len(pieces)) * problem.devices // len(pieces)
    return Placement.owned(pieces, owner, problem.devices)


def row_wise(problem: Problem) -> Placement:
    """Every table's rows on all devices in equal numbers."""
    return _row_wise(problem, range(len(problem.tables)))


def torchrec_like(problem: Problem) -> Placement:
    """A mix such as TorchRec's planner makes; that planner itself is not run here.

    Small tables are on every device, large ones row-wise, the others table-wise by lookups.

    Tables are copied from the smallest on as long as the copies fit the extra memory, and no table of more than a
    thousandth of all bytes is; tables above a device's even share of the memory are cut row-wise; each of the others
    goes to the device with the least lookups so far, the most accessed first.
    """
    size = np.array([t.rows for t in problem.tables], np.float64) * problem.memory_bytes
    devices = problem.devices
    copies = np.zeros(len(size), bool)
    left = problem.extra_memory * problem.total_bytes
    for t in np.argsort(size, kind="stable"):
        left -= size[t] * (devices - 1)
        if left < 0 or size[t] > problem.total_bytes / 1000:
            break
        copies[t] = True
    large = ~copies & (size > problem.total_bytes / devices)
    placements = [Placement.everywhere(_tables(problem, np.flatnonzero(copies)), REPLICATED, devices)]
    placements.append(_row_wise(problem, np.flatnonzero(large).tolist()))
    middle = _tables(problem, np.flatnonzero(~copies & ~large))
    owner, load = np.zeros(len(middle), np.int64), np.zeros(devices)
    for p in np.argsort(-middle.fetched, kind="stable"):
        owner[p] = int(load.argmin())
        load[owner[p]] += middle.fetched[p]
    placements.append(Placement.owned(middle, owner, devices))
    return join(placements)


def _tables(problem: Problem, which: np.ndarray) -> Pieces:
    return span(problem, *whole(problem)).take(which)


def _row_wise(problem: Problem, which: Sequence[int]) -> Placement:
    """Rows of some tables dealt in turn, in short ranges where they are cold."""
    tables, starts, stops, owners = [np.empty(0, np.int64)], [], [], []
    for t in which:
        bounds = _bounds(problem.tables[t].rows)
        count = len(bounds) - 1
        tables.append(np.full(count, t))
        starts.append(bounds[:-1])
        stops.append(bounds[1:])
        owners.append((np.arange(count) + t) % problem.devices)
    pieces = Pieces.of(problem, *(np.concatenate([tables[0], *one]) for one in (tables[1:], starts, stops)))
    return Placement.owned(pieces, np.concatenate([tables[0], *owners]), problem.devices)


def _dealt(problem: Problem, t: int, wanted: np.ndarray) -> Placement:
    """A table's rows dealt to devices, ``wanted[d]`` to device d.

    Each range goes to the device that has the least of its share so far.
    """
    bounds = _bounds(int(wanted.sum()))
    taken, start, stop, owner = np.zeros(len(wanted), np.int64), [], [], []
    share = np.maximum(wanted, 1)
    for begin, end in itertools.pairwise(bounds.tolist()):
        while begin < end:
            device = int(np.where(taken < wanted, taken / share, np.inf).argmin())
            rows = min(end - begin, int(wanted[device] - taken[device]))
            start.append(begin)
            stop.append(begin + rows)
            owner.append(device)
            taken[device] += rows
            begin += rows
    pieces = Pieces.of(problem, np.full(len(start), t), np.array(start), np.array(stop))
    return Placement.owned(pieces, np.array(owner, np.int64), problem.devices)


def _bounds(rows: int, single: int = 1 << 10) -> np.ndarray:
    """Where ranges of ranks begin and end: first rows by themselves, later ones in 64ths of the rows before them."""
    bounds = list(range(min(single, rows) + 1))
    while bounds[-1] < rows:
        bounds.append(min(rows, bounds[-1] + max(1, bounds[-1] // 64)))
    return np.array(bounds)


BASELINES: Mapping[str, Callable[[Problem], Placement]] = {
    "memory-greedy": memory_greedy,
    "access-greedy": access_greedy,
    "table-wise": table_wise,
    "row-wise": row_wise,
    "TorchRec-like": torchrec_like,
}
