"""Logistic regression by FTRL-Proximal: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from jrec.app.baselines.examples import Examples
from jrec.kernel_cache import compiled
from jrec.metrics import ScoreAccumulator, Scores, log_loss

EPOCHS = 20
"""Passes at most; small logs take them, if the log loss falls so long."""
_LEAST_EPOCHS = 5
_BETA = 1.0
_GRID = ((0.03, 1.0), (0.1, 4.0), (0.3, 4.0), (0.03, 100.0), (0.3, 20.0), (0.01, 300.0), (0.1, 60.0))
"""Learning rates (alpha) and strengths of L2 that are tried, the likeliest first."""
_VISITS = 1 << 30
"""Visits of a feature in an example, about 10 ns each, that the tries after the first may take together."""
_KEPT = 1 << 25
"""Features of examples that are kept in memory, at 8 bytes; of more, blocks are read again in every epoch."""

BlocksOf = Callable[[int], Iterable[Examples]]
"""The training blocks of an epoch, in its order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logistic:
    """A fitted logistic regression.

    Attributes:
      state: (slots, 2) float32, FTRL's z and n.
      alpha, l2: The learning rate and the strength of L2 that were best on the examples for choosing.
      epochs: Passes over the training examples that were best there.
      loss: Log loss there.
    """

    state: np.ndarray
    alpha: float
    l2: float
    epochs: int
    loss: float

    def scores(self, blocks: Iterable[Examples]) -> Scores:
        """Logits and labels of all examples, in their order."""
        return _scores(self.state, self.alpha, self.l2, blocks)


def fit(slots: int, training: BlocksOf, choosing: list[Examples], *, visits: int, seed: int = 0) -> Logistic:
    """Fits on the training examples; learning rate, L2 and epochs are the best on others.

    Args:
      slots: How many weights there are.
      training: The training blocks, by epoch.
      choosing: The examples to choose by.
      visits: Features of all training examples, summed.
      seed: The seed of the order of examples within a block.
    """
    best: Logistic | None = None
    epochs = min(EPOCHS, max(_LEAST_EPOCHS, _VISITS // max(1, visits)))
    tries = 1 + min(len(_GRID) - 1, _VISITS // max(1, epochs * visits))
    for alpha, l2 in _GRID[:tries]:
        fitted = _fit(slots, training, choosing, alpha, l2, epochs, seed)
        if best is None or fitted.loss < best.loss:
            best = fitted
    assert best is not None
    return best


def _fit(
    slots: int, training: BlocksOf, choosing: list[Examples], alpha: float, l2: float, epochs: int, seed: int
) -> Logistic:
    state = np.zeros((slots, 2), np.float32)
    random, best = np.random.default_rng(seed), None
    for epoch in range(epochs):
        for block in training(epoch):
            order = random.permutation(len(block.labels))
            _train(
                block.offsets, block.slots, block.values, block.labels, block.weights, order, state, alpha, _BETA, l2
            )
        scores = _scores(state, alpha, l2, choosing)
        loss = log_loss(scores.logits, scores.labels, weights=scores.weights)
        if best is not None and loss >= best.loss:
            break
        best = Logistic(state=state.copy(), alpha=alpha, l2=l2, epochs=epoch + 1, loss=loss)
    assert best is not None
    return best


def _scores(state: np.ndarray, alpha: float, l2: float, blocks: Iterable[Examples]) -> Scores:
    accumulated = ScoreAccumulator()
    for block in blocks:
        logits = np.empty(len(block.labels), np.float32)
        _predict(block.offsets, block.slots, block.values, state, alpha, _BETA, l2, logits)
        accumulated.update(logits, block.labels, block.weights)
    return accumulated.scores()


@compiled
def _weight(z, n, alpha, beta, l2):
    return -z / ((beta + np.sqrt(n)) / alpha + l2)


@compiled
def _train(offsets, slots, values, labels, weights, order, state, alpha, beta, l2):
    """Algorithm 1 of the paper without L1, one example after the other; an example's gradients by its weight."""
    for i in order:
        logit = 0.0
        for k in range(offsets[i], offsets[i + 1]):
            z, n = state[slots[k]]
            # Slot 0 is the bias, which L2 does not pull towards a rate of one half.
            logit += values[k] * _weight(z, n, alpha, beta, 0.0 if slots[k] == 0 else l2)
        error = weights[i] * (1.0 / (1.0 + np.exp(-logit)) - (1.0 if labels[i] else 0.0))
        for k in range(offsets[i], offsets[i + 1]):
            z, n = state[slots[k]]
            weight = _weight(z, n, alpha, beta, 0.0 if slots[k] == 0 else l2)
            gradient = error * values[k]
            more = n + gradient * gradient
            state[slots[k], 0] = z + gradient - (np.sqrt(more) - np.sqrt(n)) / alpha * weight
            state[slots[k], 1] = more


@compiled
def _predict(offsets, slots, values, state, alpha, beta, l2, logits):
    for i in range(logits.size):
        logit = 0.0
        for k in range(offsets[i], offsets[i + 1]):
            z, n = state[slots[k]]
            logit += values[k] * _weight(z, n, alpha, beta, 0.0 if slots[k] == 0 else l2)
        logits[i] = logit


class TrainingBlocks:
    """The training blocks of each epoch, in an order of its own; kept in memory where they are small.

    Args:
      count: How many blocks there are.
      read: Reads one.
      visits: Features of all their examples, summed.
      seed: The seed of the order.
    """

    def __init__(self, count: int, read: Callable[[int], Examples], *, visits: int, seed: int = 0):
        self._count, self._read, self._seed = count, read, seed
        self._kept: dict[int, Examples] | None = {} if visits <= _KEPT else None

    def __call__(self, epoch: int) -> Iterable[Examples]:
        """The blocks of an epoch, in its order."""
        for block in np.random.default_rng((self._seed, epoch)).permutation(self._count).tolist():
            if self._kept is None:
                yield self._read(block)
            else:
                if block not in self._kept:
                    self._kept[block] = self._read(block)
                yield self._kept[block]
