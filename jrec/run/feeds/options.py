"""What a feed of a run is told; ``Run.feed`` says what each means."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from jrec.data.blocks import LABEL
from jrec.data.packing import OnBadId
from jrec.json_values import JsonMapping
from jrec.run.feeds.batches import Position

Steps = int | Callable[[int], int]
"""How many steps a dispatch takes, or a function of the batches before it to that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """The arguments of ``Run.feed`` beside the batches; ``packing`` are further arguments of ``pack_batch``."""

    dense: Sequence[str] = ()
    label: str | None = LABEL
    batch_size: int | None = None
    hot: bool = False
    on_bad_id: OnBadId = "raise"
    workers: int = 2
    prefetch: int = 2
    position: Position | None = None
    total: int | None = None
    steps: Steps = 1
    trace: pathlib.Path | None = None
    packing: JsonMapping = dataclasses.field(default_factory=dict)
