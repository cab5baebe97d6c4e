"""What a report says of tables that grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MUCH = 0.01  # of a table's lookups: evictions beyond it say that there are too few rows


def growing_lines(growing: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines for the terminal: all growing tables together, and the one that gives most rows away.

    Args:
      growing: By table (``GrowingTables.sections``).
    """
    if not growing:
        return []
    total = {name: sum(table[name] for table in growing.values()) for name in ("keys", "admitted", "evicted")}
    lookups = max(1, sum(table["lookups"] for table in growing.values()))
    share = sum(table["oov_lookups"] for table in growing.values()) / lookups
    lines = [
        f"{len(growing)} table(s) that grow: {total['keys']:,} values have rows, {total['admitted']:,} were admitted,"
        f" {total['evicted']:,} evicted; {share:.1%} of lookups read row 0"
    ]
    name, most = max(growing.items(), key=lambda entry: entry[1]["evicted"] / max(1, entry[1]["lookups"]))
    if most["evicted"] > _MUCH * most["lookups"]:
        lines.append(
            f"table {name!r} gave {most['evicted']:,} rows of {most['capacity']:,} to others in {most['lookups']:,}"
            f" lookups; give it more by tables.overrides.{name}.capacity"
        )
    return lines
