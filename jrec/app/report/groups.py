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
      examples, positives: int64 counts.
      auc: float64; NaN where a group has only one label.
      log_loss: float64, the mean over the group's examples.
    """

    groups: np.ndarray
    examples: np.ndarray
    positives: np.ndarray
    auc: np.ndarray
    log_loss: np.ndarray

    @property
    def defined(self) -> np.ndarray:
        """Which groups have both labels, (groups,) bool."""
        return (self.positives > 0) & (self.positives < self.examples)

    @property
    def gauc(self) -> float | None:
        """The mean AUC of the groups that have both labels, weighted by their examples; None without any."""
        chosen = self.defined
        return float(np.average(self.auc[chosen], weights=self.examples[chosen])) if chosen.any() else None


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
    positives = np.bincount(group, scores.labels, len(numbers)).astype(np.int64)
    order = np.lexsort((logits, group))
    group, logits, labels = group[order], logits[order], scores.labels[order].astype(np.int64)
    new = np.ones(len(group), bool)  # the first example of each distinct score of a group
    new[1:] = (group[1:] != group[:-1]) | (logits[1:] != logits[:-1])
    starts = np.flatnonzero(new)
    tied = np.add.reduceat(labels, starts) if starts.size else labels
    negatives = np.diff(np.append(starts, len(group))) - tied
    owner = group[starts]
    before = np.cumsum(negatives) - negatives
    first = np.searchsorted(owner, np.arange(len(numbers)))
    below = before - before[first][owner] if starts.size else before
    twice_wins = np.zeros(len(numbers), np.int64)
    np.add.at(twice_wins, owner, tied * (2 * below + negatives))
    pairs = positives * (examples - positives)
    return GroupScores(
        groups=numbers,
        examples=examples,
        positives=positives,
        auc=np.where(pairs > 0, twice_wins / np.maximum(2 * pairs, 1), np.nan),
        log_loss=np.bincount(np.searchsorted(numbers, groups), losses, len(numbers)) / np.maximum(examples, 1),
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
    by_group = score_groups(Scores(logits=scores.logits[known], labels=scores.labels[known]), groups[known])
    chosen = by_group.defined
    weights = by_group.examples[chosen].astype(float)
    histogram = np.histogram(by_group.auc[chosen], BINS, (0, 1), weights=weights)[0]
    shown = np.flatnonzero(chosen & (by_group.examples >= LEAST))
    shown = shown[np.lexsort((-by_group.examples[shown], by_group.auc[shown]))]
    worst, best = shown[:_SHOWN], shown[::-1][:_SHOWN]
    return {
        "groups": int(chosen.sum()),
        "groups_of_one_label": int(len(by_group.groups) - chosen.sum()),
        "coverage": float(weights.sum() / max(1, groups.size)),
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
            "positives": int(by_group.positives[at]),
            "auc": float(by_group.auc[at]),
            "log_loss": float(by_group.log_loss[at]),
        }
