"""The sections of a run's report: each part of a run may give its own.

``pipeline``: work and traffic of the host pipeline's stages during training (``Timeline.summary``)
``in_place``: seconds of a run whose rows in host memory were pooled and updated in place (``InPlaceFeed``)
``forms``: how rows were looked up on a mesh, and the bytes that each form moves (``LookupModes.record``)
``fae``: schedules and bytes of a run on hot and cold batches (``HotColdFeed``)
``plan``: balance and cost of the run's plan under its accesses (``PlanMonitor.summary``)
``caches``: hits of tensor-train tables' caches in training (``HitRates``)
``growing``: rows that tables which grow gave to values and took away (``GrowingTables.sections``)
``evaluations``: how many took place during training, when, and their share of the time
``baselines``: metrics of logistic regression and of popularity (``jrec.train.baselines``), and the verdict in words
``groups``: AUC and log loss within the values of ``evaluate.group`` (``jrec.train.report.groups``)
``kernels``: by kernel class, the choice on the GPU and the verdict behind it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(*sections: Mapping[str, Any]) -> dict[str, Any]:
    """All sections in one mapping, in the order in which they are given.

    Raises:
      ValueError: If a section is given twice.
    """
    combined: dict[str, Any] = {}
    for some in sections:
        if twice := sorted(combined.keys() & some.keys()):
            raise ValueError(f"the report's section {twice[0]!r} is given twice; each has one source")
        combined |= some
    return combined
