"""Drift: what a plan made for yesterday's accesses costs under today's, and a new plan."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jrec.access.profile import AccessProfile
from jrec.errors import ConfigError
from jrec.json_values import JsonObject
from jrec.sharding.cost import Cost, evaluate
from jrec.sharding.errors import PlanError
from jrec.sharding.hardware import Hardware
from jrec.sharding.planner import Planned, PlanOptions, plan_placement
from jrec.sharding.plans import Plan, build_plan
from jrec.sharding.problem import Problem

_REMEDY = "count a dataset whose rows mean the same with `jrec access`"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Drift:
    """A plan under two access profiles, and the plan that the second one asks for.

    Attributes:
      then: The cost that the plan was made for; None where its profile was not given.
      now: The plan's cost under the present accesses.
      best: The cost of a new plan under them.
      planned: The new plan's placement.
      plan: The new plan.
      moved_rows, moved_bytes: The rows that change their device or tier, and their bytes with slots.
    """

    then: Cost | None
    now: Cost
    best: Cost
    planned: Planned
    plan: Plan
    moved_rows: int
    moved_bytes: int

    @property
    def gain(self) -> float:
        """Seconds of a step that the new plan saves."""
        # Equal plans whose terms are added in another order differ by some 1e-16.
        now, best = self.now.seconds, self.best.seconds
        return 0.0 if math.isclose(now, best, rel_tol=1e-12) else now - best

    @property
    def relative_gain(self) -> float:
        """The same as a share of the step's embedding work."""
        return self.gain / self.now.seconds if self.now.seconds > 0 else 0.0


def problem_of_plan(plan: Plan, profile: AccessProfile) -> Problem:
    """What a plan was made for, with another access profile.

    Raises:
      PlanError: If the plan does not say what it was made for.
      ProfileError: If the profile lacks a table.
    """
    try:
        info = plan.info
        hardware = Hardware(**info["hardware"])
        return Problem(
            tables=plan.tables,
            profile=profile,
            hardware=hardware,
            batch_size=info["batch_size"],
            purpose=plan.purpose,
            extra_memory=info["extra_memory"],
            dedup=info["dedup"],
        )
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"the plan does not say what it was made for ({error}); make it again with `jrec plan`"
        ) from error
    except ConfigError as error:
        raise PlanError(f"the plan and the access profile do not go together: {error}") from error


def describe(problem: Problem, options: PlanOptions, planned: Planned, **more: object) -> dict[str, object]:
    """What ``problem_of_plan``, ``options_of_plan`` and explanations need, for ``Plan.info``."""
    return {
        "hardware": problem.hardware.to_json(),
        "batch_size": problem.batch_size,
        "extra_memory": problem.extra_memory,
        "dedup": problem.dedup,
        "options": dataclasses.asdict(options),
        "rule": planned.rule,
        "profile": problem.profile.source,
        **more,
    }


def options_of_plan(plan: Plan) -> PlanOptions:
    """The options that a plan was made with.

    Raises:
      PlanError: If it does not say.
    """
    from jrec.sharding.tiers import TTOption

    try:
        options: JsonObject = dict(plan.info["options"])
        options["tt"] = tuple(TTOption(**o) for o in options["tt"])
        return PlanOptions(**options)
    except (KeyError, TypeError) as error:
        raise PlanError(f"the plan does not say how it was made ({error}); make it again with `jrec plan`") from error


def measure_drift(
    plan: Plan, profile: AccessProfile, *, before: AccessProfile | None = None, anew: bool = False
) -> Drift:
    """What present accesses do to a plan, and the plan they ask for, by the same options.

    Args:
      plan: The plan in force.
      profile: The profile of present accesses, for example an ``AccessMonitor``'s.
      before: The profile that the plan was made from.
      anew: Plan as if there were no plan in force, instead of moving as few rows as balance allows.

    Raises:
      PlanError: If the plan was not made by ``jrec plan``, contradicts itself, is of another dataset than a profile, or
        the tables do not fit.
      ProfileError: If a profile is of other tables.
    """
    for profiled in (profile, before):
        if plan.dataset is not None and profiled is not None and profiled.dataset is not None:
            plan.dataset.check(profiled.dataset, subject="the plan", remedy=_REMEDY, error=PlanError)
    problem, options = problem_of_plan(plan, profile), options_of_plan(plan)
    if problem.computes != plan.computes:
        raise PlanError(
            "the plan gives the tables to other devices than the hardware that it says it was made for; make it again"
            " with `jrec plan`"
        )
    then = None
    if before is not None:
        old = problem_of_plan(plan, before)
        then = evaluate(old, plan.placement(old))
    planned = plan_placement(problem, options, previous=None if anew else plan)
    new = dataclasses.replace(
        build_plan(problem, planned.placement, describe(problem, options, planned)), dataset=plan.dataset
    )
    rows, size = moved(plan, new)
    return Drift(
        then=then,
        now=evaluate(problem, plan.placement(problem)),
        best=planned.cost,
        planned=planned,
        plan=new,
        moved_rows=rows,
        moved_bytes=size,
    )


def moved(old: Plan, new: Plan) -> tuple[int, int]:
    """Rows whose tier or owner differs between two plans of the same tables, and their bytes with slots."""
    rows = size = 0
    for t, table in enumerate(old.tables):
        bounds = np.union1d(_starts(old, t), _starts(new, t))
        a, b = old.segments_of(t, bounds), new.segments_of(t, bounds)
        other = (old.tier[a] != new.tier[b]) | (old.owner[a] != new.owner[b])
        count = int(np.diff(np.append(bounds, table.rows))[other].sum())
        rows += count
        size += count * table.memory_bytes
    return rows, size


def _starts(plan: Plan, table: int) -> np.ndarray:
    return plan.start[plan.first[table] : plan.first[table + 1]]


def report(drift: Drift) -> str:
    """The drift for people."""
    from jrec.sharding.explain import balance_table, human_seconds
    from jrec.shown import human_bytes

    costs = {"planned for": drift.then} if drift.then is not None else {}
    costs |= {"plan now": drift.now, "new plan": drift.best}
    return "\n".join(
        (
            balance_table(costs),
            f"a new plan saves {human_seconds(max(drift.gain, 0.0))} of {human_seconds(drift.now.seconds)} a step"
            f" ({100 * drift.relative_gain:.1f} %) and moves {drift.moved_rows:,} rows,"
            f" {human_bytes(drift.moved_bytes)}",
        )
    )
