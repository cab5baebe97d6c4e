"""A plan's cost under the accesses of the run that trains with it, measured in bounded memory and time."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import numpy as np

from jrec.access.monitor import AccessMonitor
from jrec.batch import Batch
from jrec.json_values import JsonObject
from jrec.ops.layout import EmbeddingLayout
from jrec.sharding import Plan, evaluate
from jrec.sharding.drift import problem_of_plan

PROFILE = "access"
_EVERY = 16  # steps: one batch in 16 is counted


class PlanMonitor:
    """Counts the accesses of some of a run's batches.

    Args:
      layout: The batches' layout.
      plan: The plan of their planned tables, with the information from ``jrec plan`` about what it was made from.
      whole: The plan with all its tables, some of which this run may keep elsewhere.
    """

    def __init__(self, layout: EmbeddingLayout, plan: Plan, whole: Plan):
        self._stacks, self._plan, self._dataset = layout.members, plan, whole.dataset
        self._monitor = AccessMonitor({t.name: t.rows for t in whole.tables})
        self._batches = 0

    def observe(self, batch: Batch) -> None:
        """Counts one batch in ``_EVERY``, NumPy arrays whose ids are addresses."""
        self._batches += 1
        if self._batches % _EVERY != 1:
            return
        ids: dict[str, list[np.ndarray]] = {}
        for stack in self._stacks:
            lookups = np.asarray(batch.bags[stack.name].ids).reshape(-1)
            # Sorted once, so that each table's lookups are a slice.
            lookups = np.sort(lookups[lookups >= 0])
            bounds = np.searchsorted(lookups, [*stack.bases, stack.rows])
            for table, base, low, high in zip(stack.tables, stack.bases, bounds[:-1], bounds[1:], strict=True):
                ids.setdefault(table.name, []).append(lookups[low:high] - base + table.first_row)
        rows = {name: np.concatenate(pieces) for name, pieces in ids.items()}
        self._monitor.observe(rows, examples=int(np.count_nonzero(batch.mask)))

    def summary(self, folder: pathlib.Path) -> JsonObject | None:
        """The plan's current balance and cost, in JSON types; its profile goes to FOLDER/access, for ``jrec replan``.

        None if no batch was counted. Where the run keeps rows in host memory, but the plan's hardware does not say how
        fast that is, ``step_seconds`` is without the time that they take.
        """
        if not self._monitor.examples:
            return None
        profile = self._monitor.profile(dataset=self._dataset)
        profile.save(folder / PROFILE)
        held = tuple(profile.table(t.name).head(t.rows) for t in self._plan.tables)  # of parts, the uncompressed rows
        problem = problem_of_plan(self._plan, dataclasses.replace(profile, tables=held))
        timed = problem.hardware.host > 0 or not self._plan.rows_in("host")
        if not timed:
            hardware = dataclasses.replace(problem.hardware, host=sys.float_info.max)
            problem = dataclasses.replace(problem, hardware=hardware)
        cost = evaluate(problem, self._plan.placement(problem))
        return {
            "profile": str(folder / PROFILE),
            "examples": self._monitor.examples,
            "step_seconds": cost.seconds,
            "includes_host_memory": timed,
            "memory_balance": cost.memory_balance,
            "lookup_balance": cost.lookup_balance,
            "communication_balance": cost.communication_balance,
        }


def monitor_of(layout: EmbeddingLayout, held: Plan, whole: Plan) -> PlanMonitor | None:
    """The monitor of a plan that ``jrec plan`` made; None for other plans, which do not name their hardware.

    Args:
      layout: The run's layout.
      held: The part of the plan that the run uses.
      whole: The whole plan.
    """
    if "hardware" not in whole.info:
        return None
    return PlanMonitor(layout, dataclasses.replace(held, info=whole.info), whole)
