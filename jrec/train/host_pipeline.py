"""Whether a configured run's rows in host memory travel through the pipeline, or stay in place."""

from __future__ import annotations

from typing import Any

from jrec.ops.layout import EmbeddingLayout
from jrec.run import in_place_feed
from jrec.train.config import TrainConfig


def reads_in_place(config: TrainConfig, layout: EmbeddingLayout) -> bool:
    """See ``jrec.run.in_place_feed.reads_in_place``."""
    return in_place_feed.reads_in_place(layout, config.tables.host, **_options(config))


def check_pipeline(config: TrainConfig) -> None:
    """See ``jrec.run.in_place_feed.check_pipeline``."""
    in_place_feed.check_pipeline(config.tables.host, **_options(config))


def _options(config: TrainConfig) -> dict[str, Any]:
    named = config.tables.implementation
    implementation = None if named == "auto" else named
    return {"planned": config.planned, "implementation": implementation, "key": "tables.host.pipeline"}
