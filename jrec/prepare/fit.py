"""What preparation learns of numbers from the training examples: means and deviations, and boundaries of quantiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from jrec.data.schema import DenseFeature
from jrec.prepare.ingest import dense_name, keys_name
from jrec.prepare.readers.dense import apply, bucket_keys, raw_of
from jrec.prepare.readers.log_format import LogFormat
from jrec.prepare.spill import PlainColumn, Spill

_READ_ROWS = 1 << 18
_TOP_BIT = np.uint64(1 << 63)
_DIGITS, _DIGIT_BITS = 256, 8
# Numbers that differ by less than this share of the greatest are one number in float64: 45 of its last bits.
_ROUNDING = 1e-14
_Chunks = Callable[[], Iterator[np.ndarray]]


def fit(source: LogFormat, spill: Spill, train_rows: int) -> LogFormat:
    """Learns what the log's features need to know of the first ``train_rows`` examples.

    Columns of raw numbers in the spill become transformed ones, and keys of buckets. Holds a few chunks in memory.

    Args:
      source: The log's format.
      spill: All examples.
      train_rows: How many of them are for training.

    Returns:
      The format with what was learned; ``source`` itself where there is nothing to learn.
    """
    dense: dict[str, DenseFeature] = {}
    boundaries: dict[str, tuple[float, ...]] = {}
    for feature in source.dense:
        if feature.unfitted:
            name = dense_name(feature.name)
            mean, deviation = moments(_chunks(spill.plain(name), train_rows))
            known = dataclasses.replace(feature, mean=mean, deviation=deviation)
            dense[feature.name] = feature = known
            _replace(spill, name, np.dtype(np.float32), lambda values, known=known: apply(known, values))
        # Not known from the schema, since no line of training may lack it: learnt for requests, which may.
        if feature.name in source.complete and feature.missing is None and train_rows:
            mean = feature.mean
            if mean is None:
                mean, _ = moments(_chunks(spill.plain(dense_name(feature.name)), train_rows))
            dense[feature.name] = dataclasses.replace(feature, missing=raw_of(feature, mean))
    for spec in source.categorical:
        if spec.unfitted:
            name = keys_name(spec.name)
            bounds = quantiles(_chunks(spill.plain(name), train_rows), spec.quantiles)
            boundaries[spec.name] = bounds
            _replace(spill, name, np.dtype(np.uint64), lambda values, bounds=bounds: bucket_keys(bounds, values))
    return source.fitted(dense, boundaries) if dense or boundaries else source


def moments(chunks: _Chunks) -> tuple[float, float]:
    """Mean and standard deviation, in float64; 1 where values differ by rounding alone, so that constants become 0."""
    count, mean, squares = 0, 0.0, 0.0
    least, greatest = math.inf, -math.inf
    for values in chunks():
        if not len(values):
            continue
        least, greatest = min(least, float(values.min())), max(greatest, float(values.max()))
        own = float(values.mean())
        total = count + len(values)
        squares += float(np.square(values - own).sum()) + (own - mean) ** 2 * count * len(values) / total
        mean += (own - mean) * len(values) / total
        count = total
    # The mean of many 0.1 is not 0.1, and target means of one share differ in their last bits: a deviation of 1e-17
    # would make 1e16 of another value in a later log.
    if least == greatest:
        return least, 1.0
    deviation = math.sqrt(squares / count) if count else 0.0
    return mean, deviation if deviation > _ROUNDING * max(-least, greatest) else 1.0


def quantiles(chunks: _Chunks, count: int) -> tuple[float, ...]:
    """Exact quantiles: boundaries between ``count`` buckets of about as many values each.

    Values are selected digit by digit, in a pass over the column each, so that memory does not grow with it.

    Args:
      chunks: Iterates float64 values; NaN, a missing value, has no bucket.
      count: How many buckets are wanted; values that are frequent make them fewer.

    Returns:
      Ascending values, fewer than ``count``. A value is in the bucket of as many boundaries as are not above it.
    """

    def ordered() -> Iterator[np.ndarray]:
        for values in chunks():
            bits = (values[~np.isnan(values)] + 0.0).view(np.uint64)  # adding 0 makes -0 the same as 0
            # The bits of floats as integers that ascend as the floats do: negative ones reversed, positive ones behind
            # them.
            yield np.where(bits & _TOP_BIT, ~bits, bits | _TOP_BIT)

    total = sum(len(values) for values in ordered())
    if not total:
        return ()
    ranks = np.arange(1, count) * total // count
    prefixes = np.zeros(len(ranks), np.uint64)
    # Radix selection of all ranks at once, in 8 passes over the column; 256 counts for each prefix that is left.
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        known, place = np.unique(prefixes, return_inverse=True)
        counts = np.zeros(len(known) * _DIGITS, np.int64)
        for values in ordered():
            pieces = values >> np.uint64(shift)
            above = pieces >> np.uint64(_DIGIT_BITS)
            at = np.minimum(np.searchsorted(known, above), len(known) - 1)
            own = known[at] == above
            digits = (pieces[own] & np.uint64(_DIGITS - 1)).astype(np.int64)
            counts += np.bincount(at[own] * _DIGITS + digits, minlength=len(counts))
        ends = np.cumsum(counts.reshape(-1, _DIGITS), axis=1)[place]
        digits = np.count_nonzero(ends <= ranks[:, None], axis=1)
        ranks = ranks - np.where(digits > 0, np.take_along_axis(ends, np.maximum(digits - 1, 0)[:, None], 1)[:, 0], 0)
        prefixes = (prefixes << np.uint64(_DIGIT_BITS)) | digits.astype(np.uint64)
    bits = np.where(prefixes & _TOP_BIT, prefixes ^ _TOP_BIT, ~prefixes)
    return tuple(np.unique(bits.view(np.float64)).tolist())


def _chunks(column: PlainColumn, rows: int) -> _Chunks:
    return lambda: (column.read(at, min(at + _READ_ROWS, rows)) for at in range(0, rows, _READ_ROWS))


def _replace(spill: Spill, name: str, dtype: np.dtype, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Puts a changed column into the place of one of the spill's."""
    column = spill.plain(name)
    changed = PlainColumn(column.path.with_name(f"{column.path.name}.fitted"), dtype)
    for values in _chunks(column, spill.rows)():
        changed.append(change(values))
    changed.finish()
    column.remove()
    spill.columns[name] = changed
