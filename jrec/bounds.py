"""Bounds of a number, as a configuration and a hyperparameter state them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number, or of every number of an array: ``minimum <= x <= maximum``, and ``above < x < below``."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, x: float) -> bool:
        return (
            (self.minimum is None or x >= self.minimum)
            and (self.maximum is None or x <= self.maximum)
            and (self.above is None or x > self.above)
            and (self.below is None or x < self.below)
        )

    def __str__(self) -> str:
        bounds = (("at least", self.minimum), ("at most", self.maximum), ("above", self.above), ("below", self.below))
        return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
