"""OPER's planner: tiers, replicas, balanced model parallelism with threshold refinement, copies for inference."""

from __future__ import annotations

import dataclasses
import time
from typing import Literal

import numpy as np

from jrec.errors import ConfigError
from jrec.sharding.balance import assign, loads_of, polish
from jrec.sharding.cost import Cost, degree_of_balance, evaluate
from jrec.sharding.errors import PlanError
from jrec.sharding.inference import copy_for_inference
from jrec.sharding.memory_centric import among_keepers, keepers_problem, on_all
from jrec.sharding.partition import partition, span
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED, TT, Pieces, Placement, join
from jrec.sharding.plans import Plan
from jrec.sharding.problem import Problem
from jrec.sharding.replicate import RULES, FrequencyRule, replicated_ranks
from jrec.sharding.tiers import Marginal, Tiers, TTOption, choose_tiers, cuts_of

DEFAULT_THRESHOLD = 0.001
_WORTH_MOVING = 0.01  # in degree of balance, for which nearly all rows change their device
_INHERITED_ROUNDS = 4  # times the exchanges of a fresh plan: the pieces are smaller and start further from balance
_PROGRESS = 1e-3  # two rounds that gain less end the refinement: single rows are too hot for any threshold


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How hard to try, and what is allowed.

    Attributes:
      threshold: The first threshold of partitioning (OPER §4.1), a share of memory and of accesses.
      target: The degree of balance at which refinement ends.
      refinements: How often the threshold may be halved.
      exchanges: Pairs of pieces that may change places after the greedy assignment; 0 is the paper's algorithm.
      rule: Which rows are worth an all-reduce in training: "oper", the paper's rule (§4.3), "per-device" (see
        ``jrec.sharding.replicate.pays``), or "cheapest", the one of them whose plan costs less.
      host: Whether rows may live in host memory where they do not fit.
      tt: Tables that may live as tensor-train cores.
    """

    threshold: float = DEFAULT_THRESHOLD
    target: float = 0.995
    refinements: int = 5
    exchanges: int = 400
    rule: FrequencyRule | Literal["cheapest"] = "cheapest"
    host: bool = True
    tt: tuple[TTOption, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold is {self.threshold}; give a share above 0, up to 1")
        if not 0 <= self.target <= 1:
            raise ConfigError(f"target is {self.target}; a degree of balance lies between 0 and 1")
        for name in ("refinements", "exchanges"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.rule not in ("cheapest", *RULES):
            raise ConfigError(f"rule is {self.rule!r}; choose cheapest, {' or '.join(RULES)}")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A placement and how it came about.

    Attributes:
      placement: Where every row lives.
      cost: What it costs.
      tiers: What was chosen where memory was short.
      rule: The rule of replication that was taken; in inference and on devices that only keep tables it has no effect.
      threshold: The threshold at which refinement ended.
      tried: (threshold, degree of balance) of every round.
      seconds: How long planning took.
    """

    placement: Placement
    cost: Cost
    tiers: Tiers
    rule: FrequencyRule
    threshold: float
    tried: tuple[tuple[float, float], ...]
    seconds: float


def plan_placement(problem: Problem, options: PlanOptions | None = None, *, previous: Plan | None = None) -> Planned:
    """Plans.

    The paper balances all rows and replicates afterwards. For training, replicas are set apart here first, since
    taking the hottest rows out of a balanced placement leaves the fetches of the others unbalanced.

    Where the hardware has ``tables_on``, these devices keep all rows (``jrec.sharding.memory_centric``).

    Args:
      problem: Tables, accesses, devices, purpose.
      options: None for the defaults.
      previous: An older plan of the same tables and devices whose rows stay where they are as far as balance allows;
        where that misses the target by more than a hundredth, planning begins anew.

    Returns:
      The best round's placement; with the rule "cheapest", of the rule whose step costs less.

    Raises:
      PlanError: If the tables do not fit.
    """
    options = PlanOptions() if options is None else options
    if problem.computes is not None:
        return _on_keepers(problem, options, previous)
    if options.rule != "cheapest":
        return _by_rule(problem, options, options.rule, previous)
    if problem.purpose != "training" or problem.devices == 1:
        return _by_rule(problem, options, "oper", previous)
    planned, errors = [], []
    for rule in RULES:
        try:
            planned.append(_by_rule(problem, options, rule, previous))
        except PlanError as error:  # what one rule replicates may leave the others' pieces too little room
            errors.append(error)
    if not planned:
        raise errors[0]
    best = min(planned, key=lambda one: one.cost.seconds)
    return dataclasses.replace(best, seconds=sum(one.seconds for one in planned))


def _by_rule(problem: Problem, options: PlanOptions, rule: FrequencyRule, previous: Plan | None) -> Planned:
    """Plans, with replicas by one rule."""
    began = time.perf_counter()
    tiers = choose_tiers(problem, options.tt, host=options.host, rule=rule)
    # Cores hold rows from a number on, not the coldest ones: ranks must not mix the two.
    problem = problem.cut(cuts_of(tiers.tt))
    training = problem.purpose == "training"
    hot = replicated_ranks(problem, tiers.kept, tiers.extra, rule)
    none = np.zeros_like(hot)
    apart = _apart(problem, tiers, hot if training else none)
    # Rows that inference will copy are balanced for themselves: a device that owned more of them would fetch less.
    groups = [(hot, tiers.kept)] if training else [(none, hot), (hot, tiers.kept)]
    reserved = np.full(problem.devices, float(tiers.core_bytes))
    if training:
        # Replicated rows are on every device before any row is dealt out.
        reserved += float((hot * problem.memory_bytes).sum())
    # Halving the threshold may make the balance worse, since the greedy assignment sees other pieces: keep the best.
    best: tuple[float, float, Placement] | None = None
    tried, threshold = [], options.threshold
    for _ in range(options.refinements + 1):
        placed = _balanced(problem, options, threshold, groups, reserved, previous)
        balance = balance_of(problem, placed, groups[-1][0], reserved)
        tried.append((threshold, balance))
        if best is None or balance > best[0]:
            best = (balance, threshold, placed)
        stuck = len(tried) > 2 and best[0] < tried[-3][1] + _PROGRESS
        if best[0] >= options.target or stuck or bool((placed.pieces.stop - placed.pieces.start <= 1).all()):
            break
        threshold /= 2
    assert best is not None
    # Rows that stay save moving them, unless the old owners keep the balance from its target by much.
    if previous is not None and best[0] < options.target:
        fresh = _by_rule(problem, options, rule, None)
        if max(balance for _, balance in fresh.tried) > best[0] + _WORTH_MOVING:
            return fresh
    placement = join([*apart, best[2]], core_bytes=tiers.core_bytes, core_seconds=tiers.core_seconds)
    placement = dataclasses.replace(placement, cuts=problem.cuts)
    if not training:
        # Copies for inference are made last, of what the balanced
        # placement leaves free: nothing has to be summed for them.
        used = placement.pieces.memory @ placement.holders() + tiers.core_bytes
        room = np.minimum(tiers.extra / problem.devices, np.array(problem.hardware.memory) - used)
        placement = copy_for_inference(problem, placement, np.maximum(room, 0.0))
    return Planned(
        placement=placement,
        cost=evaluate(problem, placement),
        tiers=tiers,
        rule=rule,
        threshold=best[1],
        tried=tuple(tried),
        seconds=time.perf_counter() - began,
    )


def _on_keepers(problem: Problem, options: PlanOptions, previous: Plan | None) -> Planned:
    """The plan of the devices that keep tables, by what all of them cost together."""
    before = None if previous is None else among_keepers(problem, previous)
    planned = plan_placement(keepers_problem(problem), options, previous=before)
    placement, tiers = on_all(problem, planned.placement), planned.tiers
    if not tiers.host_bytes:
        effect = "buys nothing: all rows fit, and devices that compute keep no copies"
        tiers = dataclasses.replace(tiers, marginal=Marginal(seconds_per_byte=0.0, effect=effect))
    return dataclasses.replace(planned, placement=placement, cost=evaluate(problem, placement), tiers=tiers)


def balance_of(problem: Problem, placed: Placement, first: np.ndarray, reserved: np.ndarray) -> float:
    """The lesser degree of balance of lookups of sharded ranks and of memory.

    Args:
      problem: Tables and devices.
      placed: Sharded rows.
      first: (tables,) ranks before these are replicated or about to be copied, so that their owner matters only to
        memory.
      reserved: (devices,) bytes taken otherwise.
    """
    pieces = placed.pieces
    memory = loads_of(problem, pieces, placed.owner).memory + reserved
    cold = pieces.start >= first[pieces.table]
    lookup = loads_of(problem, pieces.take(cold), placed.owner[cold]).lookup
    return min(degree_of_balance(lookup), degree_of_balance(memory / np.array(problem.hardware.memory)))


def _balanced(
    problem: Problem,
    options: PlanOptions,
    threshold: float,
    groups: list[tuple[np.ndarray, np.ndarray]],
    reserved: np.ndarray,
    previous: Plan | None,
) -> Placement:
    """One round of §4.1 and §4.2 for each group of ranks."""
    placements: list[Placement] = []
    for first, last in groups:
        pieces = partition(problem, threshold, first, last)
        if not len(pieces):
            continue
        kept = None
        if previous is not None:
            kept = _stay(problem, pieces, previous, reserved=reserved, exchanges=options.exchanges)
        if kept is None:
            pieces, owner = assign(problem, pieces, reserved=reserved)
            kept = pieces, polish(problem, pieces, owner, reserved=reserved, rounds=options.exchanges)
        pieces, owner = kept
        reserved = reserved + np.bincount(owner, pieces.memory, problem.devices)
        placements.append(Placement.owned(pieces, owner, problem.devices))
    if not placements:
        none = np.empty(0)
        return Placement.owned(Pieces.of(problem, none, none, none), none, problem.devices)
    return join(placements)


def _apart(problem: Problem, tiers: Tiers, near: np.ndarray) -> list[Placement]:
    """The rows that no single device owns."""
    rows = np.array([t.rows for t in problem.tables], np.int64)
    ranges = (
        (REPLICATED, np.zeros_like(near), near),
        (HOST, tiers.kept, tiers.tt_from),
        (TT, tiers.tt_from, rows),
    )
    return [
        Placement.everywhere(span(problem, first, last), tier, problem.devices)
        for tier, first, last in ranges
        if (last > first).any()
    ]


def _stay(
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
    return joined, polish(problem, joined, owner, reserved=reserved, rounds=_INHERITED_ROUNDS * exchanges)


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
