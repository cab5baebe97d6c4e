"""Target means: what the labels of training examples with the same values were, as dense features of every example.

With K[i] the key of example i, y[i] its label and J the examples that count, its mean is
(sum of y[j] + smoothing * prior) / (|J| + smoothing), its count log(1 + |J|), and prior the mean label in training. J
has the training examples of key K[i], of which a training example takes

- those that are not in its fold, which its number draws; or
- those that are earlier than it, and with a window at most so much earlier. Examples of one moment do not count for
  each other.

Where J has fewer than ``min_count`` examples it counts as empty, for training examples as for all others: a count has
one meaning everywhere.

Sums are of whole numbers, so that no order of adding changes them: labels of 0 and 1 as they are, labels that are
numbers in multiples of a power of two, by which the sum of all takes 62 bits.

So no training example counts its own label. All other examples count every training example, with a window those in the
last window of training: ``means/NAME.npy`` has their sums and counts by key, by which raw values get the same features
in predictions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jrec.data.keys import crossed_keys, mix64
from jrec.data.moments import duration_seconds
from jrec.data.schema import DatasetError, DenseFeature, Schema, Statistic
from jrec.files import sha256_of
from jrec.kernel_cache import compiled
from jrec.outputs import link
from jrec.prepare.ingest import TIME, dense_name, keys_name, label_name
from jrec.prepare.readers.dense import apply
from jrec.prepare.readers.log_format import LogFormat, TargetMean
from jrec.prepare.spill import BUCKET_ROWS, PlainColumn, Spill, mapped
from jrec.progress import Advance

FOLDS = 20
"""By default: the more there are, the more nearly a training example counts what all others do."""
_KEY, _AT, _MOMENT, _TARGET, _SUM, _COUNT = "key", "at", "moment", "target", "sum", "count"
_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)
_RECORD = np.dtype([(_KEY, "<i8"), (_SUM, "<f8"), (_COUNT, "<i8")])
_UNKNOWN = -(2**63)  # a label that is not known
_SUM_BITS = 62  # of int64, with room for what rounding adds
_READ_ROWS = 1 << 18
_FOLD_SEED = np.uint64(0x2545F4914F6CDD1D)
_AGAIN = "copy it again, or prepare the dataset again"


@dataclasses.dataclass(frozen=True)
class LabelCounts:
    """Labels' sums and counts in training by key; takes 24 bytes of memory for each key.

    Attributes:
      keys: (keys,) int64, ascending: the bits of uint64 keys.
      sums: (keys,) int64, or float64 of labels that are numbers.
      counts: (keys,) int64.
    """

    keys: np.ndarray
    sums: np.ndarray
    counts: np.ndarray

    @classmethod
    def load(cls, folder: pathlib.Path, schema: Schema, file: str) -> LabelCounts:
        """Reads a file that the schema names.

        Raises:
          DatasetError: If it is missing or damaged.
        """
        path = schema.check_file(folder, file)
        try:
            read = np.load(path, mmap_mode="r", allow_pickle=False)  # so that copies take no more than the file has
        except (OSError, ValueError) as error:
            raise DatasetError(f"{path} cannot be read ({error}); {_AGAIN}") from error
        of_numbers = read.dtype == _RECORD and read.ndim == 1
        if not of_numbers and (read.dtype != _INT64 or read.ndim != 2 or len(read) != 3):
            raise DatasetError(
                f"{path} holds {read.dtype}{list(read.shape)}, neither int64[3, keys] nor records of key, sum and"
                f" count; {_AGAIN}"
            )
        keys, sums, counts = map(np.array, [read[name] for name in (_KEY, _SUM, _COUNT)] if of_numbers else read)
        possible = (np.isfinite(sums) & (counts > 0)) if of_numbers else ((sums >= 0) & (sums <= counts))
        if (keys[1:] <= keys[:-1]).any() or not possible.all():
            raise DatasetError(f"{path} does not hold ascending keys with sums of labels and their counts; {_AGAIN}")
        return cls(keys, sums, counts)

    def look_up(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) sums and (n,) counts of (n,) uint64 keys, 0 for those that are not there."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        # As they are sorted in the file: the order of the bits as int64, in which texts' keys are negative.
        wanted = keys.view(np.int64)
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        known = self.keys[places] == wanted
        return np.where(known, self.sums[places], 0), np.where(known, self.counts[places], 0)


def raw_values(statistic: Statistic, sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(n,) float64 raw values of a feature from (n,) sums of labels and counts."""
    if statistic.kind == "count":
        return np.log1p(counts)
    return (sums + statistic.smoothing * statistic.prior) / (counts + statistic.smoothing)


def values_by_keys(
    features: Iterable[DenseFeature], keys: Mapping[str, np.ndarray], counts: Callable[[str], LabelCounts]
) -> dict[str, np.ndarray]:
    """(n,) float32 of every dense feature that is a statistic, by its name.

    Args:
      features: Dense features.
      keys: By categorical feature, (n,) uint64 keys.
      counts: Reads a file of ``Statistic.file``.
    """
    known: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    values = {}
    for feature in features:
        if (statistic := feature.statistic) is None:
            continue
        if statistic.file not in known:
            known[statistic.file] = counts(statistic.file).look_up(_combined(statistic.features, keys.__getitem__))
        values[feature.name] = apply(feature, raw_values(statistic, *known[statistic.file]))
    return values


def _combined(features: tuple[str, ...], keys: Callable[[str], np.ndarray]) -> np.ndarray:
    """(n,) uint64 keys of the combinations of features' values."""
    # One feature's own keys, as its column in the log; only combinations are hashed.
    columns = [keys(name) for name in features]
    return columns[0] if len(columns) == 1 else crossed_keys(columns)


def write_target_means(
    source: LogFormat,
    spill: Spill,
    work: pathlib.Path,
    folder: pathlib.Path,
    *,
    train_rows: int,
    split_by: str,
    earlier: Schema | None = None,
    advance: Advance = lambda done: None,
    bucket_rows: int = BUCKET_ROWS,
) -> LogFormat:
    """Adds the columns of a log's target means to its examples: raw values, or an earlier dataset's.

    Takes the memory of two external sorts, ``bucket_rows`` examples of one column each, and 24 bytes for each key that
    is written. Disk takes 60 bytes for each training example while the work goes on.

    Args:
      source: The log's format.
      spill: All examples, each split's in order of time; gets the columns.
      work: For files.
      folder: The dataset, which gets ``means/NAME.npy``.
      train_rows: How many examples are for training, the first ones.
      split_by: How they were chosen (``PrepareOptions``).
      earlier: The dataset whose sums and counts all examples get.
      advance: Told how many target means are done.
      bucket_rows: Examples that are sorted at a time.

    Returns:
      The format, whose features know what they are made of.

    Raises:
      DatasetError: If a target mean does not go with the options.
    """
    if not source.target_means:
        return source
    (folder / "means").mkdir()
    if earlier is not None:
        assert earlier.folder is not None
        for file in earlier.statistic_files:
            try:
                link(earlier.folder / file, folder / file)
            except FileNotFoundError as error:
                raise DatasetError(f"{earlier.folder / file} is missing; copy the dataset again") from error
            _append(spill, work, source.dense, LabelCounts.load(earlier.folder, earlier, file), file, None, 0)
        return source
    known: dict[str, DenseFeature] = {}
    for number, mean in enumerate(source.target_means):
        if source.labels == "none":
            raise DatasetError(
                f"--no-labels, but [[target_mean]] of {list(mean.of)} is of labels; leave it out of the schema"
            )
        sorting = work / f"means-{number:04d}"
        sorting.mkdir()
        labels = _Labels.of(source, mean, spill, train_rows)
        trained = _sorted(source, mean, spill, labels, sorting, train_rows, bucket_rows)
        own, by_key = _counted(
            trained,
            labels,
            sorting,
            folds=_folds(mean, timed=source.timed, split_by=split_by),
            window=(duration_seconds(mean.window) or 0) * source.ticks,
            min_count=mean.min_count,
            bucket_rows=bucket_rows,
        )
        file = f"means/{mean.title}.npy"
        _save(by_key, folder / file)
        features = _features(mean, file, sha256_of(folder / file), _prior(labels, train_rows))
        known |= {feature.name: feature for feature in features}
        read = [by_key.plain(name).read(0, by_key.rows) for name in (_KEY, _SUM, _COUNT)]
        _append(spill, work, features, LabelCounts(*read), file, own, train_rows)
        for column in (*own.columns.values(), *by_key.columns.values(), *trained.columns.values()):
            column.remove()
        advance(number + 1)
    return source.fitted(known, {})


def _folds(mean: TargetMean, *, timed: bool, split_by: str) -> int:
    """How many folds there are, 0 for what is earlier."""
    earlier = mean.folds == 0 or bool(mean.window)
    if earlier and split_by == "random":
        key = f"window = {mean.window!r}" if mean.window else "folds = 0"
        raise DatasetError(
            f"--split-by random, but [[target_mean]] of {list(mean.of)} has {key}, which needs training examples that"
            " are earlier than all others; leave one of them out"
        )
    if mean.folds is None:
        return 0 if earlier or (timed and split_by != "random") else FOLDS
    return mean.folds


def _features(mean: TargetMean, file: str, digest: str, prior: float) -> tuple[DenseFeature, DenseFeature]:
    made = Statistic(kind="mean", features=mean.of, file=file, digest=digest, prior=prior, smoothing=mean.smoothing)
    kinds = zip(mean.features, (made, dataclasses.replace(made, kind="count")), strict=True)
    first, second = (DenseFeature(name=name, transform="standardize", statistic=one) for name, one in kinds)
    return first, second


@dataclasses.dataclass(frozen=True)
class _Labels:
    """The column of a label, read as whole numbers, of which int64 holds any sum.

    Attributes:
      column: The labels of all examples.
      unit: The power of two in whose multiples labels that are numbers are added up; None of labels of 0 and 1. Labels
        are rounded to it: a million of float32 are exact down to 1e-5 of the largest, others to 1e-12 of it.
    """

    column: PlainColumn
    unit: float | None

    @classmethod
    def of(cls, source: LogFormat, mean: TargetMean, spill: Spill, rows: int) -> _Labels:
        """The label of a target mean, of which the first ``rows`` are added up."""
        column = spill.plain(label_name(source, mean.label))
        if (mean.label or next(iter(source.tasks), "")) not in source.numeric_labels:
            return cls(column, None)
        starts = range(0, rows, _READ_ROWS)
        largest = 0.0
        for start in starts:
            sizes = np.abs(column.read(start, min(start + _READ_ROWS, rows)))
            largest = max(largest, float(sizes[~np.isnan(sizes)].max(initial=0.0)))  # NaN is not known
        # The sum of all is below 2^62 units, so that int64 holds every partial sum, in any order.
        return cls(column, math.ldexp(1.0, math.frexp(largest * rows)[1] - _SUM_BITS))

    def read(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) int64 labels in units; ``_UNKNOWN`` where they are not known."""
        labels = self.column.read(start, stop).astype(np.float64)
        unknown, whole = (labels < 0, labels) if self.unit is None else (np.isnan(labels), np.rint(labels / self.unit))
        return np.where(unknown, _UNKNOWN, np.where(unknown, 0, whole).astype(np.int64))

    def sums(self, sums: np.ndarray) -> np.ndarray:
        """Sums of labels from int64 sums of units: int64, or float64 of numbers."""
        return sums if self.unit is None else sums * self.unit


def _sorted(
    source: LogFormat,
    mean: TargetMean,
    spill: Spill,
    labels: _Labels,
    folder: pathlib.Path,
    train_rows: int,
    step: int,
) -> Spill:
    """The training examples key by key, each key's in their order."""
    columns = {_KEY: _INT64, _AT: _INT64, _MOMENT: _INT64, _TARGET: _INT64}
    trained = Spill(folder / "trained", columns, {})
    for start in range(0, train_rows, step):
        stop = min(start + step, train_rows)
        at = np.arange(start, stop)
        keys = _combined(mean.of, lambda name, a=start, b=stop: spill.plain(keys_name(name)).read(a, b)).view(np.int64)
        # Without times the order of the log is the time, and no two lines are of one moment.
        moments = spill.plain(TIME).read(start, stop) if source.timed else at
        order = np.argsort(keys, kind="stable")
        read = {_KEY: keys, _AT: at, _MOMENT: moments, _TARGET: labels.read(start, stop)}
        trained.append({name: column[order] for name, column in read.items()})
    trained.finish()
    return trained.sorted_by_time(folder / "by_key", _KEY, step)


def _prior(labels: _Labels, rows: int) -> float:
    """The mean of the labels that are known; 0 where none is."""
    total = count = 0
    for start in range(0, rows, _READ_ROWS):
        read = labels.read(start, min(start + _READ_ROWS, rows))
        known = read[read != _UNKNOWN]
        total, count = total + int(known.sum()), count + len(known)
    return total * (labels.unit or 1) / count if count else 0.0


def _counted(
    trained: Spill,
    labels: _Labels,
    folder: pathlib.Path,
    *,
    folds: int,
    window: int,
    min_count: int,
    bucket_rows: int,
) -> tuple[Spill, Spill]:
    """Sums and counts for every training example, in their order, and for every key, in ascending order."""
    sums = _INT64 if labels.unit is None else _FLOAT64
    own = Spill(folder / "own", {_AT: _INT64, _SUM: sums, _COUNT: _INT64}, {})
    by_key = Spill(folder / "keys", {_KEY: _INT64, _SUM: sums, _COUNT: _INT64}, {})
    ordered, moments, targets, places = (mapped(trained.plain(name)) for name in (_KEY, _MOMENT, _TARGET, _AT))
    latest = max(int(moments[at : at + bucket_rows].max()) for at in range(0, trained.rows, bucket_rows))
    state, folded = np.zeros(7, np.int64), np.zeros((max(folds, 1), 2), np.int64)
    for start in range(0, trained.rows, bucket_rows):
        stop = min(start + bucket_rows, trained.rows)
        counted, groups = np.empty((2, stop - start), np.int64), np.empty((3, stop - start), np.int64)
        sizes = start, stop, folds, window, latest, min_count
        num_keys = _count(ordered, moments, targets, places, *sizes, state, folded, counted, groups)
        at = trained.plain(_AT).read(start, stop)
        order = np.argsort(at)
        own.append({_AT: at[order], _SUM: labels.sums(counted[0, order]), _COUNT: counted[1, order]})
        keys, totals, counts = groups[:, :num_keys]
        by_key.append({_KEY: keys, _SUM: labels.sums(totals), _COUNT: counts})
    for spill in (own, by_key):
        spill.finish()
    return own.sorted_by_time(folder / "in_order", _AT, bucket_rows), by_key


@compiled
def _count(keys, moments, labels, at, start, stop, folds, window, latest, min_count, state, folded, counted, groups):
    """Sums and counts of the examples ``start`` to ``stop``, and of the keys that begin there; returns how many do.

    All columns are of (n,) examples ordered by key, then by time, and read one after another, so that memory need not
    hold them.

    Args:
      keys, moments, labels, at: The columns; a label that is ``_UNKNOWN`` counts nowhere.
      start: The first example, where the call before this one stopped.
      stop: Behind the last one.
      folds: How many folds there are; 0 for what is earlier.
      window: How much earlier an example may be; 0 without a window.
      latest: The last moment of all.
      min_count: Fewer labels, at least 1, count as none.
      state: (7,) int64, zeros at first, between calls: the end of the present key, the first example in the window, the
        first one that is not earlier, sum and count of what lies between, and of the present key.
      folded: (folds or 1, 2) int64, zeros at first: the present key's sum and count by fold.
      counted: (2, stop - start) int64, gets sums and counts.
      groups: (3, stop - start) int64, gets keys, sums and counts.
    """
    num_keys = 0
    for i in range(start, stop):
        if i >= state[0]:
            folded[:] = 0
            end, total, count = i, 0, 0
            # The whole key is read ahead, past ``stop`` where it goes on there: folds need its total before its first
            # example.
            while end < keys.shape[0] and keys[end] == keys[i]:
                if labels[end] != _UNKNOWN:
                    fold = np.int64(mix64(np.uint64(at[end]) ^ _FOLD_SEED) % np.uint64(folds)) if folds > 0 else 0
                    folded[fold, 0] += labels[end]
                    folded[fold, 1] += 1
                    if window == 0 or moments[end] > latest - window:
                        total += labels[end]
                        count += 1
                end += 1
            state[0], state[1], state[2], state[3], state[4] = end, i, i, 0, 0
            state[5], state[6] = folded[:, 0].sum(), folded[:, 1].sum()
            if count >= min_count:
                groups[0, num_keys], groups[1, num_keys], groups[2, num_keys] = keys[i], total, count
                num_keys += 1
        if folds > 0:
            # The same draw as above, from the example's number in the log: an example is never counted for its own
            # fold.
            fold = np.int64(mix64(np.uint64(at[i]) ^ _FOLD_SEED) % np.uint64(folds))
            counted[0, i - start], counted[1, i - start] = state[5] - folded[fold, 0], state[6] - folded[fold, 1]
        else:
            # Ends at ``i`` itself at the latest; moments ascend within a key.
            while moments[state[2]] < moments[i]:
                if labels[state[2]] != _UNKNOWN:
                    state[3] += labels[state[2]]
                    state[4] += 1
                state[2] += 1
            while window > 0 and moments[state[1]] < moments[i] - window:
                if labels[state[1]] != _UNKNOWN:
                    state[3] -= labels[state[1]]
                    state[4] -= 1
                state[1] += 1
            counted[0, i - start], counted[1, i - start] = state[3], state[4]
        if counted[1, i - start] < min_count:
            # As a key that training does not know, whose mean is the prior.
            counted[0, i - start], counted[1, i - start] = 0, 0
    return num_keys


def _save(by_key: Spill, path: pathlib.Path) -> None:
    """Writes keys, sums and counts as one array: (3, keys) int64, or (keys,) records where sums are float64."""
    starts = range(0, by_key.rows, _READ_ROWS)
    of_numbers = by_key.plain(_SUM).dtype == _FLOAT64
    descr, shape = (_RECORD.descr, (by_key.rows,)) if of_numbers else ("<i8", (3, by_key.rows))
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        if not of_numbers:
            for name, start in itertools.product(by_key.columns, starts):
                file.write(by_key.plain(name).read(start, start + _READ_ROWS).data)
            return
        for start in starts:
            records = np.empty(min(_READ_ROWS, by_key.rows - start), _RECORD)
            for name in by_key.columns:
                records[name] = by_key.plain(name).read(start, start + _READ_ROWS)
            file.write(records.data)


def _append(
    spill: Spill,
    work: pathlib.Path,
    features: Iterable[DenseFeature],
    counts: LabelCounts,
    file: str,
    own: Spill | None,
    own_rows: int,
) -> None:
    """Adds the columns of the features of a file: for the first ``own_rows`` examples of their own sums and counts."""
    for feature in features:
        if (statistic := feature.statistic) is None or statistic.file != file:
            continue
        # Raw values wait for their mean and deviation (``fit``); an earlier dataset's features have theirs.
        dtype = np.dtype(np.float64 if feature.unfitted else np.float32)
        name = dense_name(feature.name)
        spill.columns[name] = column = PlainColumn(work / f"{pathlib.Path(file).stem}-{statistic.kind}", dtype)
        edges = [*range(0, own_rows, _READ_ROWS), *range(own_rows, spill.rows, _READ_ROWS), spill.rows]
        for start, stop in itertools.pairwise(edges):
            if own is not None and start < own_rows:
                read = own.plain(_SUM).read(start, stop), own.plain(_COUNT).read(start, stop)
            else:
                keys = _combined(statistic.features, lambda n, a=start, b=stop: spill.plain(keys_name(n)).read(a, b))
                read = counts.look_up(keys)
            values = raw_values(statistic, *read)
            column.append(values if feature.unfitted else apply(feature, values))
        column.finish()
