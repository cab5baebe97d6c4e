"""Losses of retrieval and ranking: softmax over sampled or in-batch rows, pairs, focal and weighted cross entropy.

Negatives are rows that a batch looks up like any others, so that their gradients reach the tables by the ordinary
sparse update. Functions named after a loss give the losses of examples or positions, for ``masked_mean``; those that
return a ``Loss`` are for ``Run.compile`` or ``train_step``.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.errors import ConfigError
from jrec.mesh.route import AXIS
from jrec.nn.optimizer import Loss
from jrec.regression import Numbers


class SliceSums:
    """The sums over a batch that a loss asks for while it sees one slice, in the order in which it asks.

    Args:
      whole: What they are over all slices and devices; None while they are only collected, from each slice.

    Attributes:
      asked: The terms of this slice.
    """

    def __init__(self, whole: Sequence[jax.Array] | None):
        self._whole = whole
        self.asked: list[jax.Array] = []

    def total(self, term: jax.Array) -> jax.Array:
        """The sum that this slice's term is of; the term itself while sums are collected."""
        self.asked.append(term)
        return term if self._whole is None else self._whole[len(self.asked) - 1]


_SLICES: contextvars.ContextVar[SliceSums | None] = contextvars.ContextVar("_SLICES", default=None)


@contextlib.contextmanager
def in_slices(sums: SliceSums | None) -> Iterator[None]:
    """Within it a loss sees a slice of the batch, and ``all_examples`` raises; None for a whole batch."""
    token = _SLICES.set(sums)
    try:
        yield
    finally:
        _SLICES.reset(token)


def all_examples(values: jax.Array) -> jax.Array:
    """(batch, ...): the values of all devices' examples, in a step on a mesh; on one device as they are.

    Inside a loss or a model's ``logits`` each device has its part of the batch, (examples, ...). Gradients go back to
    the devices that the values come from. Under a plan that keeps tables on devices of their own (``computes``) a step
    with this is refused.

    Raises:
      ConfigError: In a step in ``micro_batches``, of which each has only some examples.
    """
    if _SLICES.get() is not None:
        raise ConfigError(
            "the loss or the model asks for all examples of the batch (jrec.nn.all_examples), as losses with negatives"
            " from the batch do, but micro_batches show them only some at a time; leave micro_batches out"
        )
    return _of_all_devices(values)


def _of_all_devices(values: jax.Array) -> jax.Array:
    try:
        jax.lax.axis_size(AXIS)
    except NameError:
        return values
    # Tiled: parts in the devices' order are the batch in its own order.
    return jax.lax.all_gather(values, AXIS, tiled=True)


def over_devices(term: jax.Array) -> jax.Array:
    """The sum of all devices' terms, () each, in a step on a mesh; on one device the term."""
    return jnp.sum(_of_all_devices(term[None]))


def _over_batch(term: jax.Array) -> jax.Array:
    """The sum of the terms of all parts of a batch: of devices, and of slices where a step shows it in slices."""
    slices = _SLICES.get()
    return over_devices(term) if slices is None else slices.total(term)


def masked_mean(losses: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of the losses of a batch's real examples by their weights, () float32.

    Args:
      losses: (batch,) float32.
      mask: (batch,), the examples' weights; 0 for examples that pad the batch.
    """
    mask = mask.astype(losses.dtype)
    return jnp.sum(losses * mask) / nonzero(jnp.sum(mask))


def nonzero(total: jax.Array) -> jax.Array:
    """A sum of weights to divide by: itself, and 1 where nothing counts."""
    return jnp.where(total > 0, total, 1)


def mean_of_positions(losses: jax.Array, counts: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of a loss over the positions of histories, () float32, of the whole batch.

    A step adds the losses of devices and of ``micro_batches`` by their shares of the examples; histories of one part
    may be longer than of another, so here each part's sum is divided by the positions that it would have were they
    alike.

    Args:
      losses: (batch, length) float32.
      counts: (batch, length), 0 or False for positions that do not count.
      mask: (batch,), the examples' weights; 0 for examples that pad the batch.
    """
    weights = counts.astype(losses.dtype) * mask.astype(losses.dtype)[:, None]
    # Chosen and not only multiplied: the loss of a position that is none may be NaN, and 0 times NaN is NaN.
    own = jnp.sum(jnp.where(weights > 0, losses * weights, 0))
    examples = jnp.sum(mask.astype(losses.dtype))
    every_example, positions = nonzero(_over_batch(examples)), nonzero(_over_batch(jnp.sum(weights)))
    # A step multiplies each part's loss by the part's examples over all examples; this takes that factor out
    # beforehand.
    return own * (every_example / nonzero(examples)) / positions


def sampled_softmax(
    queries: jax.Array,
    positives: jax.Array,
    negatives: jax.Array,
    *,
    positive_ids: jax.Array,
    negative_ids: jax.Array,
    positive_log_q: jax.Array | None = None,
    negative_log_q: jax.Array | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Cross entropy of each query's own row against sampled rows (Jean et al. 2015): the same for all, or each's own.

    A negative that is a query's own row, an accidental hit, does not count for it.

    Args:
      queries: (n, dim), such as users, or positions of histories.
      positives: (n, dim), the row that each query should find.
      negatives: (m, dim), rows to tell it from, looked up as a feature of the batch; or (n, m, dim), each query's own.
      positive_ids: (n,) integers that tell rows apart, such as their numbers.
      negative_ids: (m,) integers, or (n, m); negative ones are absent.
      positive_log_q: (n,) float32, the logarithm of how often a row is expected among the negatives, which is taken off
        its score: without it, frequent rows are pushed away for being drawn often. None where all rows are drawn
        alike.
      negative_log_q: (m,) float32, or (n, m), the same of the negatives.
      temperature: What scores are divided by.

    Returns:
      (n,) float32.

    Raises:
      ValueError: If only one of the two corrections is given.

    Example:
      >>> rows, ids = jnp.eye(3), jnp.arange(3)
      >>> sampled_softmax(rows, rows, rows, positive_ids=ids, negative_ids=ids).round(3)  # 1 against 0 and 0
      Array([0.551, 0.551, 0.551], dtype=float32)
    """
    if (positive_log_q is None) != (negative_log_q is None):
        raise ValueError("give positive_log_q and negative_log_q, or neither: scores are compared with each other")
    own = jnp.sum(queries * positives, axis=-1, dtype=jnp.float32) / temperature
    of_all = negatives.ndim == 2
    products = "nd,md->nm" if of_all else "nd,nmd->nm"
    against = jnp.einsum(products, queries, negatives, preferred_element_type=jnp.float32) / temperature
    negative_ids = negative_ids[None, :] if of_all else negative_ids
    if positive_log_q is not None and negative_log_q is not None:
        own, against = own - positive_log_q, against - (negative_log_q[None, :] if of_all else negative_log_q)
    # A query's own row among the negatives would be pushed away and pulled at once.
    absent = (negative_ids == positive_ids[:, None]) | (negative_ids < 0)
    against = jnp.where(absent, -jnp.inf, against)
    return jax.nn.logsumexp(jnp.concatenate([own[:, None], against], axis=1), axis=1) - own


def in_batch_softmax(
    queries: jax.Array,
    rows: jax.Array,
    *,
    ids: jax.Array,
    mask: jax.Array,
    log_q: jax.Array | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Cross entropy of each example's own row against the rows of all other examples of the batch, on all devices.

    So any number of devices gives the loss of one device. Examples with the same row are no negatives of each other.

    Args:
      queries: (examples, dim).
      rows: (examples, dim).
      ids: (examples,) integers that tell rows apart; not below 0 where ``mask`` is not 0.
      mask: (examples,), 0 for examples that pad the batch.
      log_q: (examples,) float32, the logarithm of the share that each row has in the log, which is taken off its scores
        (Yi et al. 2019); None for no correction.
      temperature: What scores are divided by.

    Returns:
      (examples,) float32.
    """
    return sampled_softmax(
        queries,
        rows,
        all_examples(rows),
        positive_ids=ids,
        # Padding is absent by its number: its rows would count among the negatives of all examples.
        negative_ids=all_examples(jnp.where(mask > 0, ids, -1)),
        positive_log_q=log_q,
        negative_log_q=None if log_q is None else all_examples(log_q),
        temperature=temperature,
    )


def bpr(positive_scores: jax.Array, negative_scores: jax.Array) -> jax.Array:
    """Bayesian personalized ranking (Rendle et al. 2009): the log loss of a positive's score above a negative's.

    Args:
      positive_scores: (...) float32.
      negative_scores: (...) float32, one for each.
    """
    return jax.nn.softplus(negative_scores - positive_scores)


def binary_cross_entropy(logits: jax.Array, batch: Batch, *, label_smoothing: float = 0.0) -> jax.Array:
    """Mean log loss of the batch's real examples, () float32; of a model with members the mean of theirs.

    Args:
      logits: (batch,) float32, or (batch, members), each trained by its own loss.
      batch: The batch, with its labels.
      label_smoothing: As of ``smoothed_labels``; ``functools.partial`` makes a ``Loss`` with it.
    """
    losses = of_members(optax.sigmoid_binary_cross_entropy, logits, smoothed_labels(batch.labels, label_smoothing))
    return masked_mean(losses, batch.mask)


def smoothed_labels(labels: jax.Array, amount: float) -> jax.Array:
    """Labels that are moved towards one half: ``labels * (1 - amount) + amount / 2`` (Szegedy et al. 2016, section 7).

    The loss is then least at a probability of ``1 - amount / 2`` of what happened, and not at an endless logit.

    Args:
      labels: (...) float32 in {0, 1}.
      amount: From 0, for the labels as they are, to less than 1.

    Raises:
      ValueError: If ``amount`` is not in that range.

    Example:
      >>> smoothed_labels(jnp.array([0.0, 1.0]), 0.1)
      Array([0.05, 0.95], dtype=float32)
    """
    if not 0 <= amount < 1:
        raise ValueError(f"label smoothing is {amount}; it must be at least 0 and below 1")
    return labels * (1 - amount) + amount / 2 if amount else labels


def of_members(
    function: Callable[[jax.Array, jax.Array], jax.Array], logits: jax.Array, labels: jax.Array
) -> jax.Array:
    """(batch,), the losses by the labels; of (batch, members) logits the mean of the members' losses.

    The gradients are the sum's: rates and weight decay then mean to each member what they mean to a single model.
    """
    if logits.ndim == 1:
        return function(logits, labels)
    losses = function(logits, labels[:, None])
    total = jnp.sum(losses, axis=1)
    return total + jax.lax.stop_gradient(jnp.mean(losses, axis=1) - total)


def squared_error(outputs: jax.Array, batch: Batch) -> jax.Array:
    """Mean squared error of the batch's real examples, () float32; of members the mean of theirs.

    Args:
      outputs: (batch,) float32, or (batch, members), each trained by its own loss.
      batch: The batch, whose labels are numbers.
    """
    return masked_mean(of_members(lambda numbers, labels: (numbers - labels) ** 2, outputs, batch.labels), batch.mask)


def huber(*, delta: float = 1.0) -> Loss:
    """Huber's loss (1964): half the squared error up to an error of ``delta``, and linear beyond.

    A few labels that are far off then have no more weight than those that are ``delta`` off.

    Args:
      delta: In the labels' unit, above 0.

    Raises:
      ValueError: If ``delta`` is not above 0.
    """
    if not 0 < delta < float("inf"):
        raise ValueError(f"{delta=} must be above 0")

    def loss(outputs: jax.Array, batch: Batch) -> jax.Array:
        own = functools.partial(optax.huber_loss, delta=delta)
        return masked_mean(of_members(own, outputs, batch.labels), batch.mask)

    return loss


def poisson(outputs: jax.Array, batch: Batch) -> jax.Array:
    """Mean of ``exp(output) - label * output``: Poisson's negative log-likelihood but for a term without outputs.

    Args:
      outputs: (batch,) float32, logarithms of expected counts, or (batch, members), each trained by its own loss.
      batch: The batch, whose labels are counts, or other numbers of at least 0.
    """

    def own(outputs: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.exp(outputs) - labels * outputs

    return masked_mean(of_members(own, outputs, batch.labels), batch.mask)


def of_numbers(loss: Loss, numbers: Numbers) -> Loss:
    """A loss by labels as they are before location and scale, so that outputs are about 1 in size."""

    def scaled(outputs: PyTree, batch: Batch) -> jax.Array:
        return loss(outputs, dataclasses.replace(batch, labels=numbers.targets(batch.labels)))

    return scaled


def focal(*, gamma: float = 2.0, positive_share: float | None = None) -> Loss:
    """Focal loss (Lin et al. 2017): binary cross entropy that counts examples less, the surer the model is of them.

    Args:
      gamma: The power of one less the probability of the label; 0 for plain cross entropy.
      positive_share: The weight of positives, from 0 to 1, where negatives have the rest; None for equal weights.

    Raises:
      ValueError: If ``gamma`` is negative or the share is not within 0 and 1.
    """
    if gamma < 0 or not (positive_share is None or 0 <= positive_share <= 1):
        raise ValueError(f"{gamma=} must not be negative, and {positive_share=} must lie within 0 and 1, or be None")

    def loss(logits: jax.Array, batch: Batch) -> jax.Array:
        own = functools.partial(optax.sigmoid_focal_loss, alpha=positive_share, gamma=gamma)
        return masked_mean(of_members(own, logits, batch.labels), batch.mask)

    return loss


def weighted_binary_cross_entropy(column: str) -> Loss:
    """Binary cross entropy with a weight for each example; the mean is over examples, not over weights.

    Args:
      column: The weights' column, which batches carry as one of ``extras``.
    """

    def loss(logits: jax.Array, batch: Batch) -> jax.Array:
        losses = of_members(optax.sigmoid_binary_cross_entropy, logits, batch.labels)
        return masked_mean(losses * batch.extras[column], batch.mask)

    return loss
