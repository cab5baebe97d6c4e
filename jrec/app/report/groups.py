"""AUC and log loss within groups of examples, such as each user's own: GAUC.

Zhu et al., "Optimized Cost per Click in Taobao Display Advertising", 2017, section 4.1: the AUC of every group that has
both labels, weighted by its examples. It tells how well a model ranks what one user sees, which AUC over all users'
examples mixes with how likely each user is to click.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jrec.metrics import Scores

BINS = 20
LEAST = 10
"""Examples that a group has at least, to be among the best or the worst."""
_SHOWN = 5  # of each


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupScores:
    """The groups of some examples. All arrays are (groups,), in the order of ``groups``.

    Attributes:
      groups: The groups' numbers, ascending.
      examples: int64 counts.
      weights: Sums of the examples' weights, float64, or the counts where they have none.
      positives: The same of examples whose label is 1.
      auc: float64; NaN where a group has only one label.
      log_loss: float64, the mean over the group's examples.
      defined: bool, whether the group has both labels.
    """

    groups: np.ndarray
    examples: np.ndarray
    weights: np.ndarray
    positives: np.ndarray
    auc: np.ndarray
    log_loss: np.ndarray
    defined: np.ndarray

    @property
    def gauc(self) -> float | None:
        """The mean AUC of the groups that have both labels, weighted by their examples; None without any."""
        chosen = self.defined
        return float(np.average(self.auc[chosen], weights=self.weights[chosen])) if chosen.any() else None


def score_groups(scores: Scores, groups: np.ndarray) -> GroupScores:
    """Scores every group.

    Args:
      scores: Logits and labels of the examples.
      groups: (examples,) integers.

    Raises:
      ValueError: If there are not as many groups as examples.
    """
    if groups.shape != scores.labels.shape:
        raise ValueError(f"groups have shape {groups.shape}, but there are {scores.labels.size:,} scores")
    logits = scores.logits.astype(np.float64)
    numbers, group = np.unique(groups, return_inverse=True)
    losses = np.logaddexp(0.0, np.where(scores.labels, -logits, logits))
    examples = np.bincount(group, minlength=len(numbers))
    # Counts are integers, and AUC by them exact.
    each = np.ones(group.size, np.int64) if scores.weights is None else scores.weights.astype(np.float64)
    clicks = np.bincount(group, scores.labels, len(numbers))
    order = np.lexsort((logits, group))
    group, logits = group[order], logits[order]
    labels, misses = (np.where(chosen, each, 0)[order] for chosen in (scores.labels, ~scores.labels))
    new = np.ones(len(group), bool)  # the first example of each distinct score of a group
    new[1:] = (group[1:] != group[:-1]) | (logits[1:] != logits[:-1])
    starts = np.flatnonzero(new)
    tied, negatives = (np.add.reduceat(some, starts) if starts.size else some for some in (labels, misses))
    owner = group[starts]
    before = np.cumsum(negatives) - negatives
    first = np.searchsorted(owner, np.arange(len(numbers)))
    below = before - before[first][owner] if starts.size else before
    twice_wins, positives, not_clicked = (np.zeros(len(numbers), each.dtype) for _ in range(3))
    for sums, some in ((twice_wins, tied * (2 * below + negatives)), (positives, tied), (not_clicked, negatives)):
        np.add.at(sums, owner, some)
    pairs = positives * not_clicked
    return GroupScores(
        groups=numbers,
        examples=examples,
        weights=positives + not_clicked,
        positives=positives,
        auc=np.where(pairs > 0, twice_wins / np.where(pairs > 0, 2 * pairs, 1), np.nan),
        log_loss=np.bincount(np.searchsorted(numbers, groups), losses * each, len(numbers)) / (positives + not_clicked),
        defined=(clicks > 0) & (clicks < examples),
    )


def describe_groups(
    scores: Scores, groups: np.ndarray, names: Callable[[Sequence[int]], Sequence[str]], *, none: int | None = None
) -> dict[str, Any]:
    """The groups of a split for the report, in JSON types.

    Args:
      scores: Logits and labels of the examples.
      groups: (examples,) integers.
      names: What texts call some groups.
      none: A number that is no group: of values that the dataset does not tell apart. None where all are groups.
    """
    known = np.ones(groups.size, bool) if none is None else groups != none
    by_group = score_groups(scores.cut(known), groups[known])
    chosen = by_group.defined
    weights = by_group.weights[chosen].astype(float)
    total = groups.size if scores.weights is None else scores.weights.sum(dtype=np.float64)
    histogram = np.histogram(by_group.auc[chosen], BINS, (0, 1), weights=weights)[0]
    shown = np.flatnonzero(chosen & (by_group.examples >= LEAST))
    shown = shown[np.lexsort((-by_group.examples[shown], by_group.auc[shown]))]
    worst, best = shown[:_SHOWN], shown[::-1][:_SHOWN]
    return {
        "groups": int(chosen.sum()),
        "groups_of_one_label": int(len(by_group.groups) - chosen.sum()),
        "coverage": float(weights.sum() / total) if groups.size else 0.0,
        "gauc": by_group.gauc,
        "mean_auc": float(by_group.auc[chosen].mean()) if chosen.any() else None,
        "mean_log_loss": float(by_group.log_loss.mean()) if by_group.log_loss.size else None,
        "histogram": histogram.tolist(),
        "best": list(_table(by_group, best, names)),
        "worst": list(_table(by_group, worst, names)),
    }


def _table(
    by_group: GroupScores, chosen: np.ndarray, names: Callable[[Sequence[int]], Sequence[str]]
) -> Iterator[dict[str, Any]]:
    for at, name in zip(chosen.tolist(), names(by_group.groups[chosen].tolist()), strict=True):
        yield {
            "group": name,
            "examples": int(by_group.examples[at]),
            "positives": by_group.positives[at].item(),
            "auc": float(by_group.auc[at]),
            "log_loss": float(by_group.log_loss[at]),
        }
