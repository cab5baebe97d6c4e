"""The exact optimum of small instances by mixed-integer programming (scipy's HiGHS), to measure the heuristics by."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from jrec.errors import ConfigError
from jrec.sharding.cost import evaluate, replicated_seconds
from jrec.sharding.pieces import REPLICATED, Pieces, Placement, join
from jrec.sharding.problem import Problem
from jrec.sharding.replicate import FrequencyRule


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """What the solver found.

    Attributes:
      placement: The best one, None if there is none in the time given.
      objective: Its seconds, infinite without a placement.
      bound: No placement of these pieces takes fewer seconds.
      optimal: Whether that is proved.
      seconds: How long solving took.
    """

    placement: Placement | None
    objective: float
    bound: float
    optimal: bool
    seconds: float

    @property
    def gap(self) -> float:
        """How far the placement may be from the optimum, relative to the bound."""
        return self.objective / self.bound - 1 if self.bound > 0 else float(self.objective > 0)


def objective(problem: Problem, placement: Placement, rule: FrequencyRule = "oper") -> float:
    """What is minimized: the seconds of the device that others fetch from longest and, in training, of the all-reduce.

    That is w max_j sum_i C_ij + T_dup / 2, Equations 3 and 5; half, as Equation 3 is the forward pass of two. The
    weight w of the fetches is what the frequency rule implies: the paper's Equation 4 adds up the fetches of all rows
    as if one device served them, which in a balanced placement is M times what each serves, so "oper" has w = M in
    training. Otherwise w is 1.
    """
    cost = evaluate(problem, placement)
    return _weight(problem, rule) * float(cost.links.sum(axis=0).max()) + cost.all_reduce / 2


def _weight(problem: Problem, rule: FrequencyRule) -> int:
    return problem.devices if rule == "oper" and problem.purpose == "training" else 1


def solve(
    problem: Problem,
    pieces: Pieces,
    *,
    seconds: float = 60.0,
    gap: float = 1e-4,
    memory_slack: float | None = None,
    rule: FrequencyRule = "oper",
) -> Solved:
    """The placement of given pieces with the least ``objective``.

    In training a piece has one owner, or all devices have it. In inference every device may fetch any piece from any
    holder (OPER's full P). Copies fit the extra memory, and budgets are kept, in both.

    Args:
      problem: Tables, devices, purpose, extra memory.
      pieces: indivisible.
      seconds: How long the solver may take.
      gap: Relative, at which it may stop.
      memory_slack: Beside copies each device may use at most ``(1 + memory_slack)`` times its even share of the rows;
        None asks for no balance of memory.
      rule: See ``objective``.

    Raises:
      ConfigError: If the instance is so large that it would not end.
    """
    from scipy.optimize import Bounds, milp

    count, devices = len(pieces), problem.devices
    pairs = count * devices if problem.purpose == "training" else count * devices * devices
    if pairs > 200_000:
        raise ConfigError(
            f"{count:,} pieces on {devices} devices are {pairs:,} binary variables; partition with a greater threshold"
        )
    began = time.perf_counter()
    make = _training if problem.purpose == "training" else _inference
    scale = max(float(pieces.fetched.sum()) * float(problem.hardware.L.max()), 1e-300)
    c, constraints, binaries, read = make(problem, pieces, memory_slack, scale, rule)
    integrality = np.zeros(len(c))
    integrality[:binaries] = 1
    upper = np.full(len(c), np.inf)
    upper[:binaries] = 1
    result = milp(
        c,
        integrality=integrality,
        bounds=Bounds(np.zeros(len(c)), upper),  # pyright: ignore[reportArgumentType]
        constraints=constraints,
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    took = time.perf_counter() - began
    bound = float(getattr(result, "mip_dual_bound", None) or 0.0) * scale
    if result.x is None:
        return Solved(placement=None, objective=float("inf"), bound=bound, optimal=False, seconds=took)
    placement = read(np.round(result.x[:binaries]).astype(np.int64))
    value = objective(problem, placement, rule)
    return Solved(
        placement=placement, objective=value, bound=min(bound, value), optimal=result.status == 0, seconds=took
    )


class _Rows:
    """Linear constraints over ``columns`` variables, from coordinates."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self.made: list[Any] = []

    def add(self, row: Any, column: Any, value: Any, low: Any, high: Any) -> None:
        """``low <= A x <= high``, A given by its entries."""
        from scipy.optimize import LinearConstraint
        from scipy.sparse import coo_array

        low, high = np.atleast_1d(low), np.atleast_1d(high)
        matrix = coo_array((value, (row, column)), shape=(len(high), self._columns)).tocsr()
        self.made.append(LinearConstraint(matrix, low, high))  # pyright: ignore[reportArgumentType]


def _training(problem: Problem, pieces: Pieces, memory_slack: float | None, scale: float, rule: FrequencyRule):
    """Variables: own[p, j], all[p], then z, what the busiest source serves, in units of ``scale``."""
    count, devices = len(pieces), problem.devices
    own = np.arange(count * devices).reshape(count, devices)
    every = count * devices + np.arange(count)
    z = count * (devices + 1)
    budget = np.array(problem.hardware.memory, np.float64)
    total = max(float(pieces.memory.sum()), 1.0)
    none = np.full(devices, -np.inf)
    rows = _Rows(z + 1)
    place = np.concatenate([np.repeat(np.arange(count), devices), np.arange(count)])
    rows.add(place, np.concatenate([own.reshape(-1), every]), np.ones(len(place)), np.ones(count), np.ones(count))
    j, p = np.divmod(np.arange(devices * count), count)
    memory = pieces.memory[p] / total
    rows.add(np.tile(j, 2), np.concatenate([own[p, j], every[p]]), np.tile(memory, 2), none, budget / total)
    if memory_slack is not None:
        rows.add(j, own[p, j], memory, none, budget / budget.sum() * (1 + memory_slack))
    if devices > 1:
        serving = np.where(problem.hardware.remote, problem.hardware.L, 0.0).sum(axis=0)
        rows.add(
            np.append(j, np.arange(devices)), np.append(own[p, j], np.full(devices, z)),
            np.append(pieces.fetched[p] * serving[j] / scale, -np.ones(devices)), none, np.zeros(devices),
        )  # fmt: skip
        extra = problem.extra_memory * problem.total_bytes / (devices - 1) / total
        rows.add(np.zeros(count, int), every, pieces.memory / total, -np.inf, extra)
    size = (pieces.stop - pieces.start) * problem.row_bytes[pieces.table]
    c = np.zeros(z + 1)
    c[every] = np.asarray(replicated_seconds(problem, size.astype(np.float64))) / 2 / scale
    c[z] = _weight(problem, rule)

    def read(x: np.ndarray) -> Placement:
        replicated = x[every].astype(bool)
        owner = x[own].argmax(axis=1)
        return join(
            [
                Placement.everywhere(pieces.take(replicated), REPLICATED, devices),
                Placement.owned(pieces.take(~replicated), owner[~replicated], devices),
            ]
        )

    return c, rows.made, z, read


def _inference(problem: Problem, pieces: Pieces, memory_slack: float | None, scale: float, rule: FrequencyRule):
    """Variables: P[p, i, j], hold[p, j], then z."""
    count, devices = len(pieces), problem.devices
    fetch = np.arange(count * devices * devices).reshape(count, devices, devices)
    hold = fetch.size + np.arange(count * devices).reshape(count, devices)
    z = fetch.size + hold.size
    budget = np.array(problem.hardware.memory, np.float64)
    if memory_slack is not None:
        share = budget / budget.sum() * problem.total_bytes
        budget = np.minimum(budget, share * (1 + problem.extra_memory + memory_slack))
    total = max(float(pieces.memory.sum()), 1.0)
    rows = _Rows(z + 1)
    ones = np.ones(count * devices)
    rows.add(np.arange(fetch.size) // devices, fetch.reshape(-1), np.ones(fetch.size), ones, ones)
    # A source holds what is fetched from it, and a holder fetches from himself.
    p, _, j = np.unravel_index(np.arange(fetch.size), fetch.shape)
    rows.add(
        np.tile(np.arange(fetch.size), 2), np.concatenate([fetch.reshape(-1), hold[p, j]]),
        np.concatenate([np.ones(fetch.size), -np.ones(fetch.size)]),
        np.full(fetch.size, -np.inf), np.zeros(fetch.size),
    )  # fmt: skip
    p, j = np.divmod(np.arange(hold.size), devices)
    rows.add(
        np.tile(np.arange(hold.size), 2), np.concatenate([fetch[p, j, j], hold.reshape(-1)]),
        np.concatenate([ones, -ones]), np.zeros(hold.size), np.zeros(hold.size),
    )  # fmt: skip
    memory = pieces.memory[p] / total
    rows.add(j, hold.reshape(-1), memory, np.full(devices, -np.inf), budget / total)
    most = 1 + problem.extra_memory * problem.total_bytes / total
    rows.add(np.zeros(hold.size, int), hold.reshape(-1), memory, -np.inf, most)
    if devices > 1:
        p, i, j = np.unravel_index(np.arange(fetch.size), fetch.shape)
        load = np.where(i != j, pieces.fetched[p] * problem.hardware.L[i, j] / scale, 0.0)
        rows.add(
            np.append(j, np.arange(devices)), np.append(fetch.reshape(-1), np.full(devices, z)),
            np.append(load, -np.ones(devices)), np.full(devices, -np.inf), np.zeros(devices),
        )  # fmt: skip
    c = np.zeros(z + 1)
    c[z] = _weight(problem, rule)

    def read(x: np.ndarray) -> Placement:
        placed = Placement.owned(pieces, x[hold].argmax(axis=1), devices)
        return dataclasses.replace(placed, path=x[fetch].argmax(axis=2).astype(np.int16))

    return c, rows.made, z, read
