"""How often the caches of tensor-train tables are hit in training: between two log records, and in the whole run.

The counts are part of the state on the device, where every step raises them; they are read when a log record is
written, and never in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jrec.json_values import JsonObject
from jrec.ops.layout import EmbeddingLayout
from jrec.tiers.cores import COUNTERS, counted


class HitRates:
    """Hit rates of the tables with a cache, by table.

    Args:
      layout: The tables' layout.
      state: Returns the run's current state.
    """

    def __init__(self, layout: EmbeddingLayout, state: Callable[[], Any]):
        self._state = state
        slots = state()[1].get("slots", {})  # a state has no place for what is empty, as slots of SGD are
        self._stacks = {
            stack.tables[0].name: stack.name
            for stack in layout.members
            if stack.compressed and COUNTERS[0] in slots.get(stack.name, {})
        }
        self._logged: dict[str, dict[str, int]] = {}

    def record(self) -> dict[str, float | None]:
        """The hit rates since the last log record, as "cache_hit_rate.TABLE"; None without lookups."""
        total = self._read()
        since = {
            table: {name: counts[name] - self._logged.get(table, {}).get(name, 0) for name in counts}
            for table, counts in total.items()
        }
        self._logged = total
        return {f"cache_hit_rate.{table}": _rate(counts) for table, counts in since.items()}

    def sections(self) -> JsonObject:
        """The section "caches" of the report: hits, lookups and hit rate of tables with a cache."""
        caches = {table: {**counts, "hit_rate": _rate(counts)} for table, counts in self._read().items()}
        return {"caches": caches} if caches else {}

    def position(self) -> dict[str, dict[str, int]]:
        """The counts at the last log record, for a checkpoint, in JSON types."""
        return self._logged

    def restore(self, position: Mapping[str, Mapping[str, int]]) -> None:
        """Continues from a ``position()``."""
        self._logged = {table: dict(counts) for table, counts in position.items()}

    def _read(self) -> dict[str, dict[str, int]]:
        if not self._stacks:
            return {}
        state = self._state()
        slots = {table: state[1]["slots"][stack] for table, stack in self._stacks.items()}
        return {table: {name: counted(counters[name][...]) for name in COUNTERS} for table, counters in slots.items()}


def _rate(counts: Mapping[str, int]) -> float | None:
    return counts["hits"] / counts["lookups"] if counts["lookups"] else None
