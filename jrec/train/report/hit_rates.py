"""How often the caches of tensor-train tables are hit in training: between two log records, and in the whole run.

The counts are part of the state on the device, where every step raises them; they are read when a log record is
written, and never in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jrec.ops.layout import EmbeddingLayout
from jrec.tiers.cores import COUNTERS
from jrec.tiers.counter import counted


class HitRates:
    """Hit rates of the tables with a cache, by table.

    Args:
      layout: of the tables.
      state: Gives the run's state as it is now.
    """

    def __init__(self, layout: EmbeddingLayout, state: Callable[[], Any]):
        self._state = state
        slots = state()[1].get("slots", {})  # a state has no place for what is empty, as slots of SGD are
        self._stacks = {
            stack.tables[0].name: stack.name
            for stack in layout.members
            if stack.tier == "tt" and COUNTERS[0] in slots.get(stack.name, {})
        }
        self._logged: dict[str, dict[str, int]] = {}

    def record(self) -> dict[str, float | None]:
        """What a log record says of the lookups since the one before: "cache_hit_rate.TABLE"; None without lookups."""
        found = self._read()
        since = {table: {n: of[n] - self._logged.get(table, {}).get(n, 0) for n in of} for table, of in found.items()}
        self._logged = found
        return {f"cache_hit_rate.{table}": _rate(of) for table, of in since.items()}

    def sections(self) -> dict[str, Any]:
        """For the report, see ``jrec.train.report.sections``: hits, lookups and hit rate of tables with a cache."""
        found = {table: {**counts, "hit_rate": _rate(counts)} for table, counts in self._read().items()}
        return {"caches": found} if found else {}

    def position(self) -> dict[str, dict[str, int]]:
        """The counts at the last log record, for a checkpoint; JSON."""
        return self._logged

    def restore(self, position: Mapping[str, Mapping[str, int]]) -> None:
        """Takes over a ``position()``."""
        self._logged = {table: dict(of) for table, of in position.items()}

    def _read(self) -> dict[str, dict[str, int]]:
        if not self._stacks:
            return {}
        state = self._state()
        of = {table: state[1]["slots"][stack] for table, stack in self._stacks.items()}
        return {table: {name: counted(counters[name][...]) for name in COUNTERS} for table, counters in of.items()}


def _rate(of: Mapping[str, int]) -> float | None:
    return of["hits"] / of["lookups"] if of["lookups"] else None
