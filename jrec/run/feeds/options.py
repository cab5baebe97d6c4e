"""What a feed of a run is told; ``Run.feed`` says what each means."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import numpy as np

from jrec.data.blocks import LABEL
from jrec.data.packing import OnBadId
from jrec.data.value_rows import AnyVocabulary
from jrec.run.feeds.batches import Position

Steps = int | Callable[[int], int]
"""How many steps a dispatch takes, or a function of the batches before it to that."""


class PackingOptions(TypedDict, total=False):
    """Further arguments of ``jrec.data.pack_batch``, which says what they mean; where casts are made, a run says."""

    weight: str | None
    extras: Sequence[str]
    oov_rows: Mapping[str, int | None] | None
    orders: Mapping[str, np.ndarray] | None
    vocabularies: Mapping[str, AnyVocabulary] | None


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
    packing: PackingOptions = dataclasses.field(default_factory=PackingOptions)
