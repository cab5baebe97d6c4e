"""Numba kernels of synthetic data. All randomness is a hash of (seed, example or row, purpose): nothing is stored, any
example can be made on its own, and neither chunks nor threads change a value.
"""

from __future__ import annotations

import math

import numpy as np

from jrec.kernel_cache import compiled

LATENT = 2  # elements of a row's planted vector
CLUSTERS = 8
POWER, HOUR, WEEKDAY, PARENT, HISTORY = 0, 1, 2, 3, 4  # where ids come from

_CORRELATED = 0.5  # share of the ids that follow the example's cluster
_ROTATING = 5  # every fifth rank takes part in the drift
_LOYAL = 0.3  # share of examples whose history knows the target


@compiled
def mix(a, b):
    """A hash of two 64-bit numbers: SplitMix64's finalizer."""
    z = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(b) + np.uint64(0x632BE59BD9B4E019)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def uniform(bits):
    """A number in [0, 1) from 64 random bits."""
    return np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def normal(bits):
    """A nearly normal number, mean 0 and variance 1: four 16-bit uniforms added up."""
    mask = np.uint64(0xFFFF)
    total = np.float64(bits & mask) + np.float64((bits >> np.uint64(16)) & mask)
    total += np.float64((bits >> np.uint64(32)) & mask) + np.float64(bits >> np.uint64(48))
    return (total / 65536.0 - 2.0) * 1.7320508075688772


@compiled
def power_rank(u, rows, exponent):
    """The rank in [0, rows) at quantile ``u`` of a power law."""
    if abs(exponent - 1.0) < 1e-9:
        x = math.exp(u * math.log(rows + 1.0))
    else:
        p = 1.0 - exponent
        x = (u * ((rows + 1.0) ** p - 1.0) + 1.0) ** (1.0 / p)
    return min(max(np.int64(x) - 1, 0), rows - 1)


@compiled
def draw_clusters(seed, numbers, out):
    """The latent cluster of each example; popular ones come first."""
    for k in range(numbers.size):
        out[k] = power_rank(uniform(mix(seed, numbers[k])), CLUSTERS, 0.7)


@compiled
def draw_lengths(seed, numbers, max_length, out_offsets):
    """Offsets of lists of 0 to ``max_length`` ids, short ones being more common."""
    out_offsets[0] = 0
    for k in range(numbers.size):
        u = uniform(mix(seed, numbers[k]))
        out_offsets[k + 1] = out_offsets[k] + np.int64(u * u * (max_length + 1))


@compiled
def draw_ids(seed, numbers, offsets, origin, rows, exponent, total, days, drift, clusters, parents, out):
    """The items of a feature, numbered by their popularity before drift.

    Args:
      seed: The feature's seed.
      numbers: (n,) int64, the examples' places in the log.
      offsets: (n + 1,) int64, where the items of each go.
      origin, rows, exponent: The feature's origin, its table's rows, and the exponent of its power law.
      total, days: Length of the log in examples and in days.
      drift: Whether popularity drifts.
      clusters: (n,) the examples' clusters.
      parents: Items of the parent feature: as many as ``out`` for ``origin`` PARENT, one an example for HISTORY.
      out: (offsets[-1],) uint32.
    """
    rotating = rows // _ROTATING
    shift = np.int64(mix(seed, 1) % np.uint64(CLUSTERS))
    for k in range(numbers.size):
        day = numbers[k] * days // total
        if origin in (HOUR, WEEKDAY):
            value = numbers[k] * days * 24 // total % 24 if origin == HOUR else day % 7
            out[offsets[k]] = value % rows
            continue
        if origin == PARENT:
            for j in range(offsets[k], offsets[k + 1]):
                out[j] = power_rank(uniform(mix(seed, parents[j])), rows, exponent)
            continue
        key = mix(seed, numbers[k])
        again = 0.0
        if origin == HISTORY:
            loyalty = uniform(mix(key, 1 << 20))
            again = loyalty / _LOYAL if loyalty < _LOYAL else 0.0
        for j in range(offsets[k], offsets[k + 1]):
            bits = mix(key, j - offsets[k])
            if origin == HISTORY and uniform(mix(bits, 3)) < again:
                out[j] = parents[k]
                continue
            rank = power_rank(uniform(bits), rows, exponent)
            if (bits & np.uint64(1023)) < np.uint64(1024 * _CORRELATED):
                # The cluster's own rank among its neighbours: ids of one cluster go together over all features.
                own = rank - rank % CLUSTERS + (clusters[k] + shift) % CLUSTERS
                if own < rows:
                    rank = own
            if drift and rotating > 1 and rank % _ROTATING == _ROTATING - 1:
                # Each day the first of the rotating ranks goes to the end and the others move up one.
                rank = (rank // _ROTATING + day) % rotating * _ROTATING + _ROTATING - 1
            out[j] = rank


@compiled
def draw_weights(seed, numbers, offsets, out):
    """Weights of ids, in (0.5, 1.5)."""
    for k in range(numbers.size):
        key = mix(seed, numbers[k])
        for j in range(offsets[k], offsets[k + 1]):
            out[j] = 0.5 + uniform(mix(key, j - offsets[k]))


@compiled
def draw_dense(seed, numbers, clusters, out):
    """log1p of counts, (n, features) float32: log-normal with a mean by cluster, and many zeros."""
    for k in range(numbers.size):
        key = mix(seed, numbers[k])
        for j in range(out.shape[1]):
            column = mix(seed, 7 + j)
            center = 0.5 + 3.0 * uniform(mix(column, 1))
            spread = 0.7 + 0.8 * uniform(mix(column, 2))
            zeros = 0.4 * uniform(mix(column, 3))
            own = 0.5 * normal(mix(mix(column, 4), clusters[k]))
            bits = mix(key, j)
            count = math.floor(math.exp(center + spread * (own + 0.85 * normal(bits))))
            out[k, j] = 0.0 if uniform(mix(bits, 5)) < zeros else math.log1p(count)


@compiled
def add_rows(seed, offsets, items, weights, strength, head, first_order, sums, squares):
    """Adds a feature's planted effects: a scalar a row to ``first_order``, a vector a row to the interaction's sums.

    A factorization machine: interactions of all pairs of features are (|sums|^2 - squares) / 2. An item's effect fades
    with its rank, and faster in interactions, because a model cannot learn what it hardly ever sees.
    """
    vector = np.empty(LATENT)
    for k in range(offsets.size - 1):
        n = offsets[k + 1] - offsets[k]
        if n == 0:
            continue
        vector[:] = 0.0
        scalar = 0.0
        for j in range(offsets[k], offsets[k + 1]):
            fade = 1.0 / (1.0 + items[j] / head)
            scale = strength * (weights[j] if weights.size else 1.0) / math.sqrt(n)
            key = mix(seed, items[j])
            scalar += scale * math.sqrt(fade) * normal(key)
            for d in range(LATENT):
                vector[d] += scale * fade * normal(mix(key, d))
        first_order[k] += scalar
        for d in range(LATENT):
            sums[k, d] += vector[d]
            squares[k] += vector[d] * vector[d]


@compiled
def add_dense(seed, dense, means, deviations, effect, sums, squares):
    """Adds the dense features' planted effects: bends of their own, and one vector of the interaction."""
    vector = np.empty(LATENT)
    for k in range(dense.shape[0]):
        vector[:] = 0.0
        for j in range(dense.shape[1]):
            t = min(max((dense[k, j] - means[j]) / deviations[j], -3.0), 3.0)
            key = mix(seed, j)
            effect[k] += normal(mix(key, 1)) * t + 0.5 * normal(mix(key, 2)) * (t * t - 1.0)
            for d in range(LATENT):
                vector[d] += t * normal(mix(key, 8 + d)) / math.sqrt(dense.shape[1])
        for d in range(LATENT):
            sums[k, d] += vector[d]
            squares[k] += vector[d] * vector[d]


@compiled
def add_matches(target, offsets, items, effect):
    """Adds how much of a history, (offsets[-1],), is as its target, (n,): the last step counts 1, that before 1/2 …"""
    for k in range(target.size):
        for j in range(offsets[k], offsets[k + 1]):
            if items[j] == target[k]:
                effect[k] += 1.0 / (offsets[k + 1] - j)


@compiled
def draw_labels(seed, numbers, logits, out):
    """A click with the probability that the teacher gives it."""
    for k in range(numbers.size):
        out[k] = 1.0 if uniform(mix(seed, numbers[k])) < 1.0 / (1.0 + math.exp(-logits[k])) else 0.0


@compiled
def count_items(items, counts):
    """``counts[item] += 1``."""
    for item in items:
        counts[item] += 1


@compiled
def count_scores(logits, labels, low, high, positives, negatives):
    """Histograms of clicks and others by logit; what lies outside goes to the ends."""
    scale = positives.size / (high - low)
    for k in range(logits.size):
        place = min(max(np.int64((logits[k] - low) * scale), 0), positives.size - 1)
        if labels[k] > 0.5:
            positives[place] += 1
        else:
            negatives[place] += 1
