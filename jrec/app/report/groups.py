"""How well examples are told apart within groups, such as each user's own: GAUC of clicks, XGAUC of numbers.

Zhu et al., "Optimized Cost per Click in Taobao Display Advertising", 2017, section 4.1: the AUC of every group that has
both labels, weighted by its examples. It tells how well a model ranks what one user sees, which AUC over all users'
examples mixes with how likely each user is to click. Of labels that are numbers XAUC (``jrec.concordance``) is in the
place of AUC, and RMSE in that of log loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jrec.app.report.content import Section
from jrec.concordance import ordered_pairs
from jrec.json_values import JsonObject
from jrec.metrics import LabelScores, Scores

BINS = 20
LEAST = 10
"""Examples that a group has at least, to be among the best or the worst."""
_SHOWN = 5  # of each


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupWords:
    """What reports call the figures of groups, of clicks or of numbers.

    Attributes:
      mean: The key of the mean within groups; its upper case is the name.
      ranking: The key of a group's own, likewise.
      error: The key of a group's error.
      level: The key of how large a group's labels are.
      units: Of the columns of a table of groups: by name the unit, in the order of ``cells``.
      enough: What the groups have that are counted.
    """

    mean: str
    ranking: str
    error: str
    level: str
    units: Mapping[str, str]
    enough: str

    def cells(self, row: Section) -> list[int | float]:
        """A group's figures."""
        return [row[key] for key in ("examples", self.level, self.ranking, self.error)]


_CLICKS = GroupWords(
    mean="gauc",
    ranking="auc",
    error="log_loss",
    level="positives",
    units={"examples": "count", "clicks": "count", "AUC": "0 to 1", "log loss": "nats per example"},
    enough="both labels",
)
_NUMBERS = GroupWords(
    mean="xgauc",
    ranking="xauc",
    error="rmse",
    level="mean_label",
    units={"examples": "count", "mean label": "unit of the label", "XAUC": "0 to 1", "RMSE": "unit of the label"},
    enough="unlike labels",
)


def words(described: Section) -> GroupWords:
    """The words for what ``describe_groups`` gave."""
    return _NUMBERS if _NUMBERS.mean in described else _CLICKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupScores:
    """The groups of some examples. All arrays are (groups,), in the order of ``groups``.

    Attributes:
      groups: The groups' numbers, ascending.
      examples: int64 counts.
      weights: Sums of the examples' weights, float64, or the counts where they have none.
      level: The same of examples whose label is 1; of labels that are numbers their mean.
      ranking: float64, AUC or XAUC; NaN where all labels of a group are alike.
      error: float64, log loss or RMSE of the group's examples.
      defined: bool, whether the group has unlike labels.
    """

    groups: np.ndarray
    examples: np.ndarray
    weights: np.ndarray
    level: np.ndarray
    ranking: np.ndarray
    error: np.ndarray
    defined: np.ndarray

    @property
    def mean(self) -> float | None:
        """GAUC or XGAUC: the mean of the groups that have unlike labels, weighted by their examples; None without."""
        chosen = self.defined
        return float(np.average(self.ranking[chosen], weights=self.weights[chosen])) if chosen.any() else None


def score_groups(scores: LabelScores, groups: np.ndarray) -> GroupScores:
    """Scores every group.

    Args:
      scores: Predictions and labels of the examples.
      groups: (examples,) integers.

    Raises:
      ValueError: If there are not as many groups as examples.
    """
    labels = scores.labels
    if groups.shape != labels.shape:
        raise ValueError(f"groups have shape {groups.shape}, but there are {labels.size:,} scores")
    # Counts are integers, and AUC by them exact.
    each = np.ones(groups.size, np.int64) if scores.weights is None else scores.weights.astype(np.float64)
    numbers, group = np.unique(groups, return_inverse=True)

    def sums(values: np.ndarray) -> np.ndarray:
        totals = np.zeros(len(numbers), values.dtype)
        np.add.at(totals, group, values)
        return totals

    weights = sums(each)
    if isinstance(scores, Scores):
        predictions = scores.logits.astype(np.float64)
        error = sums(np.logaddexp(0.0, np.where(labels, -predictions, predictions)) * each) / weights
        level = sums(np.where(labels, each, 0))
    else:
        predictions = scores.predictions.astype(np.float64)
        error = np.sqrt(sums((predictions - labels) ** 2 * each) / weights)
        level = sums(labels * each.astype(np.float64)) / weights
    twice_ordered, pairs = ordered_pairs(predictions, labels, group, each)
    defined = pairs > 0
    return GroupScores(
        groups=numbers,
        examples=sums(np.ones(groups.size, np.int64)),
        weights=weights,
        level=level,
        ranking=np.where(defined, twice_ordered / np.where(defined, 2 * pairs, 1), np.nan),
        error=error,
        defined=defined,
    )


def describe_groups(
    scores: LabelScores, groups: np.ndarray, names: Callable[[Sequence[int]], Sequence[str]], *, none: int | None = None
) -> JsonObject:
    """The groups of a split for the report, in JSON types.

    Args:
      scores: Predictions and labels of the examples.
      groups: (examples,) integers.
      names: What texts call some groups.
      none: A number that is no group: of values that the dataset does not tell apart. None where all are groups.
    """
    keys = _CLICKS if isinstance(scores, Scores) else _NUMBERS
    known = np.ones(groups.size, bool) if none is None else groups != none
    by_group = score_groups(scores.cut(known), groups[known])
    chosen = by_group.defined
    weights = by_group.weights[chosen].astype(float)
    total = groups.size if scores.weights is None else scores.weights.sum(dtype=np.float64)
    histogram = np.histogram(by_group.ranking[chosen], BINS, (0, 1), weights=weights)[0]
    shown = np.flatnonzero(chosen & (by_group.examples >= LEAST))
    shown = shown[np.lexsort((-by_group.examples[shown], by_group.ranking[shown]))]
    worst, best = shown[:_SHOWN], shown[::-1][:_SHOWN]
    return {
        "groups": int(chosen.sum()),
        "groups_of_one_label": int(len(by_group.groups) - chosen.sum()),
        "coverage": float(weights.sum() / total) if groups.size else 0.0,
        keys.mean: by_group.mean,
        f"mean_{keys.ranking}": float(by_group.ranking[chosen].mean()) if chosen.any() else None,
        f"mean_{keys.error}": float(by_group.error.mean()) if by_group.error.size else None,
        "histogram": histogram.tolist(),
        "best": list(_table(by_group, keys, best, names)),
        "worst": list(_table(by_group, keys, worst, names)),
    }


def ends(one: JsonObject) -> dict[str, list[JsonObject]]:
    """The best and the worst groups of a section's split, as far as there are any; where these are the same, once."""
    best, worst = one["best"], one["worst"]
    tables = {"only": best} if best == worst[::-1] else {"best": best, "worst": worst}
    return {kind: rows for kind, rows in tables.items() if rows}


def _table(
    by_group: GroupScores, keys: GroupWords, chosen: np.ndarray, names: Callable[[Sequence[int]], Sequence[str]]
) -> Iterator[JsonObject]:
    for at, name in zip(chosen.tolist(), names(by_group.groups[chosen].tolist()), strict=True):
        yield {
            "group": name,
            "examples": int(by_group.examples[at]),
            keys.level: by_group.level[at].item(),
            keys.ranking: float(by_group.ranking[at]),
            keys.error: float(by_group.error[at]),
        }
