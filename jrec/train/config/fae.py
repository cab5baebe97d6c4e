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
      initial_rate: per cent of an epoch's cold batches in the first schedule, before the same share of the hot ones.
      least_rate, greatest_rate: bounds of the rate. At a rate of 1 hot and cold batches alternate one by one.
      patience: after so many successive falls of the loss the rate is doubled; the paper's u.
      split: whose loss decides. The paper's is its test set; the default keeps the test split for the final result.
      batches: how many evaluation batches of it are read after each schedule; 0 for all.
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
