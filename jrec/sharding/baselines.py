"""What others do, behind the planner's interface (OPER §6.4): a function from a problem to a placement.

None of them looks at budgets; ``Cost.memory`` against ``Cost.budget`` shows which plans would not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from jrec.sharding.partition import span, whole
from jrec.sharding.pieces import REPLICATED, Pieces, Placement, join
from jrec.sharding.problem import Problem
from jrec.sharding.replicate import runs_of

_ONE_BY_ONE = 64  # shorter runs are dealt row by row


def memory_greedy(problem: Problem) -> Placement:
    """Equal bytes for every device: the tables, one after the other, are cut into as many equal parts as devices."""
    rows = np.array([t.rows for t in problem.tables], np.int64)
    share = np.array(problem.hardware.memory, np.float64)
    ends = np.cumsum(share / share.sum()) * problem.total_bytes
    below = np.append(0, np.cumsum(rows * problem.memory_bytes))
    tables, starts, stops, owners = [], [], [], []
    for t, row in enumerate(problem.memory_bytes.tolist()):
        bounds = np.clip(np.rint((ends - below[t]) / row).astype(np.int64), 0, rows[t])
        bounds[-1] = rows[t]
        bounds = np.append(0, bounds)
        used = np.flatnonzero(np.diff(bounds) > 0)
        tables.append(np.full(len(used), t))
        starts.append(bounds[used])
        stops.append(bounds[used + 1])
        owners.append(used)
    pieces = Pieces.of(problem, np.concatenate(tables), np.concatenate(starts), np.concatenate(stops))
    return Placement.owned(pieces, np.concatenate(owners), problem.devices)


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
    """Every table in as many equal ranges of rows as there are devices.

    Rows descend by frequency in jrec's datasets, so that the first range is the hot one; systems whose rows are in no
    order spread them better.
    """
    return _row_wise(problem, np.arange(len(problem.tables)))


def row_cyclic(problem: Problem, *, piece: int = 1 << 10) -> Placement:
    """Every table dealt out in short ranges, which is how row-wise parallelism does on rows in no order.

    The first ``piece`` rows are dealt one by one, later ones in ranges of a 64th of the rows before them.
    """
    tables, starts, stops, owners = [], [], [], []
    for t, table in enumerate(problem.tables):
        bounds = list(range(min(piece, table.rows) + 1))
        while bounds[-1] < table.rows:
            bounds.append(min(table.rows, bounds[-1] + max(1, bounds[-1] // 64)))
        count = len(bounds) - 1
        tables.append(np.full(count, t))
        starts.append(np.array(bounds[:-1]))
        stops.append(np.array(bounds[1:]))
        owners.append((np.arange(count) + t) % problem.devices)
    pieces = Pieces.of(problem, np.concatenate(tables), np.concatenate(starts), np.concatenate(stops))
    return Placement.owned(pieces, np.concatenate(owners), problem.devices)


def torchrec_mix(problem: Problem) -> Placement:
    """A mix like TorchRec's: small tables on every device, large ones row-wise, the others table-wise by lookups.

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
    placements.append(_row_wise(problem, np.flatnonzero(large)))
    middle = _tables(problem, np.flatnonzero(~copies & ~large))
    owner, load = np.zeros(len(middle), np.int64), np.zeros(devices)
    for p in np.argsort(-middle.fetched, kind="stable"):
        owner[p] = int(load.argmin())
        load[owner[p]] += middle.fetched[p]
    placements.append(Placement.owned(middle, owner, devices))
    return join(placements)


def _tables(problem: Problem, which: np.ndarray) -> Pieces:
    return span(problem, *whole(problem)).take(which)


def _row_wise(problem: Problem, which: np.ndarray) -> Placement:
    devices = problem.devices
    rows = np.array([problem.tables[t].rows for t in which], np.int64)
    bounds = rows[:, None] * np.arange(devices + 1) // devices
    table = np.repeat(which, devices)
    owner = np.tile(np.arange(devices), len(which))
    start, stop = bounds[:, :-1].reshape(-1), bounds[:, 1:].reshape(-1)
    used = stop > start
    return Placement.owned(Pieces.of(problem, table[used], start[used], stop[used]), owner[used], devices)


BASELINES: Mapping[str, Callable[[Problem], Placement]] = {
    "memory-greedy": memory_greedy,
    "access-greedy": access_greedy,
    "table-wise": table_wise,
    "row-wise": row_wise,
    "row-cyclic": row_cyclic,
    "torchrec": torchrec_mix,
}
