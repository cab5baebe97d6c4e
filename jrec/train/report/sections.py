"""The sections of a run's report: whatever takes part in a run may have one, and says it by itself.

``pipeline``: what the stages of the host pipeline did during training (``Timeline.summary``)
``forms``: how rows were looked up on a mesh, and what each way moves (``Forms.record``)
``fae``: schedules and bytes of a run on hot and cold batches (``HotColdFeed``)
``plan``: balance and cost of the run's plan under its accesses (``PlanMonitor.summary``)
``caches``: hits of tensor-train tables' caches in training (``HitRates``)
``kernels``: by kernel class, what was chosen on the GPU and the verdict behind it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(*sections: Mapping[str, Any]) -> dict[str, Any]:
    """All sections in one mapping, in the order in which they are given.

    Raises:
      ValueError: If a section is given twice.
    """
    found: dict[str, Any] = {}
    for some in sections:
        if twice := sorted(found.keys() & some.keys()):
            raise ValueError(f"the report's section {twice[0]!r} is given twice; each has one source")
        found |= some
    return found
