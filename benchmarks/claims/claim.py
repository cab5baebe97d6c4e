"""A paper's claim, where jrec's figures for it lie, and the rule that makes a verdict of them."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from benchmarks.page import Results

Verdict = Literal["holds", "beyond", "missed", "open until a GPU", "open"]
VERDICTS: tuple[Verdict, ...] = ("holds", "beyond", "missed", "open until a GPU", "open")
SAME = 0.05
"""A figure within 5 % of the paper's is the same: the rest is rounding, and which vocabulary was counted."""


class MissingLineError(LookupError):
    """No committed line, or none that fits, where a claim looks for its figure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One of jrec's figures, from committed lines.

    Attributes:
      file: The result's file, without ``.jsonl``.
      case: The pattern of the lines' cases; the figure is the least to the greatest where several match.
      metric: The lines' metric; several are added up.
      by: Metrics of the same case by whose sum the figure is divided; none for the value itself.
      ratio: Whether the lines' ratio, the peer's time by jrec's, is meant, not their value.
      peer: The pattern of the lines' peer.
      inverse: Whether one by the figure is meant.
      unit: What follows the figure.
      of: What the figure is of, for the reader.
    """

    file: str
    case: str
    metric: str | tuple[str, ...]
    of: str
    by: str | tuple[str, ...] = ()
    ratio: bool = False
    peer: str = ""
    inverse: bool = False
    unit: str = "×"

    def values(self, results: Mapping[str, Results]) -> list[float]:
        """The figure of every case that fits, in the lines' order.

        Raises:
          MissingLineError: No line fits.
        """
        if self.file not in results:
            raise MissingLineError(f"there is no {self.file}.jsonl")
        found = results[self.file]
        cases = [case for case in found.cases() if re.search(self.case, case)]
        values = [
            self._of(found, case) for case in cases if self._find(found, case, _names(self.metric)[0]) is not None
        ]
        if not values:
            raise MissingLineError(f"{self.file}.jsonl has no {self.metric!r} of a case like {self.case!r}")
        return [1 / value for value in values] if self.inverse else values

    def _of(self, results: Results, case: str) -> float:
        total = self._sum(results, case, _names(self.metric))
        return total / self._sum(results, case, _names(self.by)) if self.by else total

    def _sum(self, results: Results, case: str, metrics: Sequence[str]) -> float:
        total = 0.0
        for metric in metrics:
            line = self._find(results, case, metric)
            if line is None:
                raise MissingLineError(f"{self.file}.jsonl has no {metric!r} of {case!r}")
            value = line["ratio"] if self.ratio else line["value"]
            if value is None:
                raise MissingLineError(f"{self.file}.jsonl: {metric!r} of {case!r} has no ratio")
            total += value
        return total

    def _find(self, results: Results, case: str, metric: str) -> dict | None:
        return next(
            (
                line
                for line in results.lines
                if (line["case"], line["metric"]) == (case, metric) and re.search(self.peer, line["peer"] or "")
            ),
            None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Makes a verdict of a claim's first figure.

    Attributes:
      paper: The paper's figure.
      better: "more" or "less": which is better.
      of: Which of several values counts: the worst, the best, as where the paper says "up to", or the mean, as where it
        says "on average".
    """

    paper: float
    better: Literal["more", "less"] = "more"
    of: Literal["worst", "best", "mean"] = "worst"

    def advantage(self, values: Sequence[float]) -> float:
        """Jrec's figure by the paper's, above 1 where jrec's is better."""
        advantages = [v / self.paper if self.better == "more" else self.paper / v for v in values]
        return {"worst": min, "best": max, "mean": statistics.mean}[self.of](advantages)

    def verdict(self, values: Sequence[float]) -> Verdict:
        """By how far jrec's figure lies from the paper's."""
        advantage = self.advantage(values)
        return "missed" if advantage < 1 - SAME else "beyond" if advantage > 1 + SAME else "holds"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """The rule of an accuracy: the share lost must not pass what the paper calls negligible."""

    paper: float

    def verdict(self, values: Sequence[float]) -> Verdict:
        """Whether it holds."""
        return "holds" if max(values) <= self.paper else "missed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The rule of a ranking: the figure, one thing's by others', must be above 1 by more than a share that is noise."""

    noise: float

    def verdict(self, values: Sequence[float]) -> Verdict:
        """Whether it holds."""
        return "holds" if min(values) > 1 + self.noise else "missed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Open:
    """No verdict yet, with the reason."""

    why: Literal["open until a GPU", "open"]

    def verdict(self, values: Sequence[float]) -> Verdict:
        """Always ``why``."""
        del values
        return self.why


GPU = Open(why="open until a GPU")
OPEN = Open(why="open")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim.

    Attributes:
      where: Table or figure, or section.
      says: What the paper says.
      rule: Makes the verdict.
      difference: What differs between the two settings, or why there is no figure.
      figures: jrec's; the first decides. None only where the verdict is open.
    """

    where: str
    says: str
    rule: Rule | Lost | Best | Open
    difference: str
    figures: tuple[Figure, ...] = ()

    def __post_init__(self) -> None:
        if not self.figures and not isinstance(self.rule, Open):
            raise ValueError(f"{self.where}: a claim with a verdict needs a figure")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper's claims.

    Attributes:
      name: Its short name.
      title: Authors' title and venue.
      hardware: What it measured on.
      evaluation: Every table and figure of its evaluation; each is the ``where`` of a claim.
      claims: In the paper's order.
    """

    name: str
    title: str
    hardware: str
    evaluation: tuple[str, ...]
    claims: tuple[Claim, ...]


def _names(metric: str | tuple[str, ...]) -> tuple[str, ...]:
    return (metric,) if isinstance(metric, str) else metric
