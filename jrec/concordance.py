"""How often predictions order two examples as their labels do: the AUC of labels 0 and 1, XAUC of labels of any value.

XAUC is what predictions of watch time are judged by (Zhan et al., "Deconfounding Duration Bias in Watch-time Prediction
for Video Recommendation", KDD 2022), and Harrell's index of concordance. Everything is counted on the host.
"""

from __future__ import annotations

import numpy as np


def ordered_pairs(
    predictions: np.ndarray, labels: np.ndarray, groups: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Counts, in O(n log n), the pairs of each group's examples whose labels differ.

    Args:
      predictions: (n,) floats, none NaN.
      labels: (n,), none NaN.
      groups: (n,) integers from 0, each there.
      weights: (n,); a pair counts by the product of its two. Of integers the counts are exact.

    Returns:
      By group, of the type of ``weights``: twice the pairs that predictions order as labels do, where equal
      predictions are half of one, and the pairs.
    """
    distinct, ranks = np.unique(labels, return_inverse=True)
    order = np.lexsort((predictions, groups))
    groups, predictions, ranks, weights = (some[order] for some in (groups, predictions, ranks, weights))
    twice_ordered, pairs = np.zeros((2, groups.max(initial=-1) + 1), weights.dtype)
    blocks = groups
    # Two ranks differ first in one bit. So each pair counts once, in the block of the group's examples whose higher
    # bits are the same and as if that bit were the label. Blocks are parted stably, and keep the order of predictions.
    for bit in reversed(range(max(0, distinct.size - 1).bit_length())):
        upper = (ranks >> bit) % 2 == 1
        starts, twice, both = _of_two_labels(predictions, upper, blocks, weights)
        np.add.at(twice_ordered, groups[starts], twice)
        np.add.at(pairs, groups[starts], both)
        if bit:
            blocks = 2 * blocks + upper
            order = np.argsort(blocks, kind="stable")
            groups, blocks, predictions, ranks, weights = (
                some[order] for some in (groups, blocks, predictions, ranks, weights)
            )
    return twice_ordered, pairs


def _of_two_labels(
    predictions: np.ndarray, positive: np.ndarray, blocks: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each block begins, and of its examples, sorted by block and prediction, what ``ordered_pairs`` returns."""
    first = np.concatenate([[True], blocks[1:] != blocks[:-1]])
    starts = np.flatnonzero(first)
    ties = np.flatnonzero(first | np.concatenate([[True], predictions[1:] != predictions[:-1]]))
    positives, negatives = (np.add.reduceat(np.where(chosen, weights, 0), ties) for chosen in (positive, ~positive))
    block_of = np.searchsorted(ties, starts)  # of ties, the first of each block
    before = np.cumsum(negatives) - negatives
    below = before - np.repeat(before[block_of], np.diff(block_of, append=ties.size))
    twice, up, down = (
        np.add.reduceat(some, block_of) for some in (positives * (2 * below + negatives), positives, negatives)
    )
    return starts, twice, up * down


def concordance(predictions: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """The share of pairs of examples with unlike labels that predictions order as labels do, ties counting half.

    Args:
      predictions: (n,) floats, none NaN; n at least 1.
      labels: (n,), none NaN.
      weights: (n,); a pair counts by the product of its two. None for 1.

    Returns:
      From 0 to 1, or None where all labels are alike.
    """
    each = np.ones(labels.size, np.int64) if weights is None else weights
    (twice,), (pairs,) = ordered_pairs(predictions, labels, np.zeros(labels.size, np.int64), each)
    return twice.item() / (2 * pairs.item()) if pairs else None
