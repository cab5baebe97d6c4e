"""What a feed of a run is told; ``Run.feed`` says what each means."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import numpy as np

from jrec.batch import Batch
from jrec.data.blocks import LABEL
from jrec.data.packing import OnBadId
from jrec.data.value_rows import AnyVocabulary
from jrec.errors import ConfigError
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


_ELSEWHERE = {
    "cast": "jrec.distribute(cast=...) says where batches are cast",
    "label": "predictions need no labels: leave it out",
}


def check_packing(method: str, packing: PackingOptions) -> None:
    """Refuses keyword arguments that ``method`` of a run does not have.

    Raises:
      TypeError: Naming one, and those that ``method`` has beside its own.
    """
    if unknown := sorted(packing.keys() - PackingOptions.__annotations__.keys()):
        remedy = _ELSEWHERE.get(unknown[0], f"of pack_batch's it takes {', '.join(PackingOptions.__annotations__)}")
        raise TypeError(f"Run.{method} has no argument {unknown[0]!r}; {remedy}")


def check_least(least: int, **values: object) -> None:
    """Refuses numbers below ``least``; None is left alone.

    Raises:
      ConfigError: Naming one and its value.
    """
    for name, value in values.items():
        if value is not None and not (isinstance(value, int | np.integer) and value >= least):
            raise ConfigError(f"{name} is {value!r}, but must be an integer of at least {least}")


def check_iterable(method: str, batches: object) -> None:
    """Refuses columns in place of an iterable of them, whose names would be taken for batches.

    Raises:
      TypeError: If it is a mapping, a DataFrame, an Arrow table or a packed batch.
    """
    if isinstance(batches, Mapping | Batch) or hasattr(batches, "__dataframe__"):
        kind = type(batches).__name__
        raise TypeError(f"Run.{method} takes an iterable of batches, but got one {kind}; put it in a list")


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

    def __post_init__(self) -> None:
        check_packing("feed", self.packing)
        check_least(0, workers=self.workers, prefetch=self.prefetch, total=self.total)
        check_least(1, batch_size=self.batch_size, steps=None if callable(self.steps) else self.steps)
