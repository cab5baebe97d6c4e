"""The ``[fae]`` section: how the Shuffle Scheduler interleaves hot and cold batches (FAE, section III-C)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, override

from jrec.errors import ConfigError
from jrec.train.config.typed_toml import Range, Section

Count = Annotated[int, Range(minimum=0)]
Positive = Annotated[int, Range(minimum=1)]
Percent = Annotated[int, Range(minimum=1, maximum=100)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FAEConfig(Section):
    """``[fae]``, which counts where ``schedule`` is "fae"; see ``jrec.train.shuffle_scheduler``.

    Attributes:
      initial_rate: Per cent of an epoch's cold batches in the first schedule, before the same share of the hot ones.
      least_rate, greatest_rate: Bounds of the rate. At a rate of 1 hot and cold batches alternate one by one.
      patience: The number of successive falls of the loss after which the rate is doubled; the paper's u.
      split: The split whose loss decides. The paper takes its test set; the default keeps the test split for the final
        result.
      batches: How many evaluation batches of the split are read after each schedule; 0 for all.
    """

    initial_rate: Percent = 50
    least_rate: Percent = 1
    greatest_rate: Percent = 100
    patience: Positive = 4
    split: Literal["valid", "test"] = "valid"
    batches: Count = 20

    @override
    def check(self) -> None:
        if not self.least_rate <= self.initial_rate <= self.greatest_rate:
            raise ConfigError(
                f"fae.initial_rate is {self.initial_rate}, outside of fae.least_rate = {self.least_rate} to"
                f" fae.greatest_rate = {self.greatest_rate}"
            )
