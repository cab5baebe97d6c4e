"""Names for what reports are made of, in JSON types; the type of a value follows from its key."""

from __future__ import annotations

from collections.abc import Sequence

from jrec.json_values import JsonMapping

Content = JsonMapping
"""The content of ``metrics.json``, of which ``jrec.app.report.writing`` names the sections."""
Section = JsonMapping
"""A section of it, or what a section has of one split, table, window or feature."""
Record = JsonMapping
"""A line of ``metrics.jsonl``: "step", "split", and metrics by name."""
Records = Sequence[Record]
