"""Planning anew while most rows stay where an older plan has them."""

from __future__ import annotations

import numpy as np

from jrec.sharding.balance import assign, loads_of, polish
from jrec.sharding.errors import PlanError
from jrec.sharding.pieces import SHARDED, Pieces
from jrec.sharding.plans import Plan
from jrec.sharding.problem import Problem

_ROUNDS = 4  # times the exchanges of a fresh plan: the pieces are smaller and start further from balance


def stay(
    problem: Problem, pieces: Pieces, plan: Plan, *, reserved: np.ndarray, exchanges: int
) -> tuple[Pieces, np.ndarray] | None:
    """Keeps the owners of an older plan, places what had none, and exchanges pieces until they are balanced.

    Args:
      problem: The problem under present accesses.
      pieces: The pieces of a partition under these.
      plan: The older plan, of the same tables and devices.
      reserved: (devices,) bytes that are taken already.
      exchanges: How many exchanges a fresh plan would get.

    Returns:
      Finer pieces and their owners; None if the old owners' memory does not suffice any more.
    """
    pieces, owner = _cut_by_owner(problem, pieces, plan)
    known = owner >= 0
    kept, kept_owner = pieces.take(known), owner[known]
    loads = loads_of(problem, kept, kept_owner, reserved)
    if (loads.memory > loads.budget).any():
        return None
    try:
        loose, loose_owner = assign(problem, pieces.take(~known), loads=loads)
    except PlanError:
        return None
    joined = Pieces.of(
        problem,
        np.concatenate([kept.table, loose.table]),
        np.concatenate([kept.start, loose.start]),
        np.concatenate([kept.stop, loose.stop]),
    )
    owner = np.concatenate([kept_owner, loose_owner])
    return joined, polish(problem, joined, owner, reserved=reserved, rounds=_ROUNDS * exchanges)


def _cut_by_owner(problem: Problem, pieces: Pieces, plan: Plan) -> tuple[Pieces, np.ndarray]:
    """Pieces cut where the older plan's owner changes, and those owners; -1 where a row was not sharded."""
    tables, starts, stops, owners = [], [], [], []
    for t, ranked in enumerate(problem.ranked):
        own = np.flatnonzero(pieces.table == t)
        if not own.size:
            continue
        own = own[np.argsort(pieces.start[own])]
        first, last = int(pieces.start[own[0]]), int(pieces.stop[own[-1]])
        old = plan.start[plan.first[t] : plan.first[t + 1]]
        jump = ranked.first_row[1:] != ranked.first_row[:-1] + np.diff(ranked.starts)[:-1]
        ranks = np.unique(np.concatenate([pieces.start[own], ranked.rank_of(old), ranked.starts[1:-1][jump]]))
        ranks = ranks[(ranks >= first) & (ranks < last)]
        run = np.searchsorted(ranked.starts, ranks, side="right") - 1
        segment = plan.segments_of(t, ranked.first_row[run] + ranks - ranked.starts[run])
        owner = np.where(plan.tier[segment] == SHARDED, plan.owner[segment], -1).astype(np.int64)
        piece = np.searchsorted(pieces.start[own], ranks, side="right")
        fresh = np.append(True, (np.diff(owner) != 0) | (np.diff(piece) != 0))
        bounds = np.append(ranks[fresh], last)
        tables.append(np.full(len(bounds) - 1, t))
        starts.append(bounds[:-1])
        stops.append(bounds[1:])
        owners.append(owner[fresh])
    cut = Pieces.of(problem, np.concatenate(tables), np.concatenate(starts), np.concatenate(stops))
    return cut, np.concatenate(owners)
