"""Tables of an export in host memory: memory-mapped rows, tensor trains, rows that deltas changed."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from jrec.native.batched_lookup import Lookup, lookup_many
from jrec.serving.format import ExportError, Feature, Manifest, Part

_ABSENT = np.int32(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids:
    """The ids of a feature for some examples, rows of its table.

    Attributes:
      values: int32, (examples, length) or, with ``offsets``, (capacity,). Negative ones are absent.
      offsets: (examples + 1,) int32, ascending from 0, or None.
      weights: float32 of the shape of ``values``, or None.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None

    def padded(self, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids and weights, (examples, length), absent ones -1; ids past the length raise ValueError."""
        if self.offsets is None:
            values, weights = self.values, self.weights
            if (more := values.shape[1] - length) > 0:
                if (values[:, length:] >= 0).any():
                    raise ValueError(f"an example has more than {length} ids")
                return values[:, :length], None if weights is None else weights[:, :length]
            width = ((0, 0), (0, -more))
            return np.pad(values, width, constant_values=_ABSENT), None if weights is None else np.pad(weights, width)
        lengths = np.diff(self.offsets)
        if lengths.size and lengths.max() > length:
            raise ValueError(f"an example has {lengths.max()} ids, but at most {length} fit")
        values = np.full((lengths.size, length), _ABSENT, np.int32)
        held = np.arange(length) < lengths[:, None]
        values[held] = self.values[self.offsets[0] : self.offsets[-1]]
        if self.weights is None:
            return values, None
        weights = np.zeros(values.shape, np.float32)
        weights[held] = self.weights[self.offsets[0] : self.offsets[-1]]
        return values, weights


class _Rows:
    """Rows of a part: a file that is mapped into memory; changed rows are private copies of its pages."""

    def __init__(self, folder: pathlib.Path, part: Part):
        self.part = part
        self.values = _mapped(folder / part.file)

    def apply(self, folder: pathlib.Path, part: Part) -> None:
        if part.changed:
            self.values[np.load(folder / part.changed, allow_pickle=False)] = _loaded(folder / part.file)
        else:
            self.values = _mapped(folder / part.file)

    def of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.values, ids


class _Train:
    """Rows of a tensor train, made of its cores for the distinct ids of a batch."""

    def __init__(self, folder: pathlib.Path, part: Part):
        self.apply(folder, part)

    def apply(self, folder: pathlib.Path, part: Part) -> None:
        self.part = part
        self._cores = [_loaded(folder / file).astype(np.float32) for file in part.cores]
        self._cached = None
        if part.cached_ids:
            numbers = np.load(folder / part.cached_ids, allow_pickle=False)
            order = np.argsort(numbers, kind="stable")
            self._cached = numbers[order], _loaded(folder / part.cached_rows).astype(np.float32)[order]

    def of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        held = ids >= 0
        wanted, inverse = np.unique(ids[held], return_inverse=True)
        local = np.full(ids.shape, _ABSENT, np.int32)
        local[held] = inverse
        return self._rows(wanted), local

    def _rows(self, rows: np.ndarray) -> np.ndarray:
        """(n, dim) float32 of n distinct rows, ascending."""
        digits, rest = [], rows.astype(np.int64)
        for factor in reversed(self.part.row_factors):
            digits.append(rest % factor)
            rest = rest // factor
        product = np.ones((rows.size, 1, 1), np.float32)
        for core, digit in zip(self._cores, reversed(digits), strict=True):
            slices = core[digit]  # (n, rank, dims, next rank)
            n, rank, dims, after = slices.shape
            product = (product @ slices.reshape(n, rank, dims * after)).reshape(n, -1, after)
        values = product.reshape(rows.size, self.part.dim)
        if self._cached is not None:
            numbers, changed = self._cached
            at = np.minimum(np.searchsorted(numbers, rows), max(numbers.size - 1, 0))
            known = numbers[at] == rows if numbers.size else np.zeros(rows.size, bool)
            values[known] = changed[at[known]]
        return np.ascontiguousarray(values)


class ServedTables:
    """The tables of an export, for lookups by feature.

    Args:
      folder: The export's folder.
      manifest: Its manifest.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest):
        self._features = manifest.features
        self._parts: dict[str, list[_Rows | _Train]] = {
            table: [_Train(folder, part) if part.cores else _Rows(folder, part) for part in parts]
            for table, parts in manifest.tables.items()
        }

    def apply(self, folder: pathlib.Path, delta: Manifest) -> None:
        """Takes the rows of a delta."""
        for table, parts in delta.tables.items():
            for held, part in zip(self._parts[table], parts, strict=True):
                held.apply(folder, part)

    def stored(self, table: str, first_row: int) -> np.ndarray:
        """The rows, as they are stored, of the part of a table that begins at a row."""
        (held,) = [held for held in self._parts[table] if held.part.first_row == first_row]
        assert isinstance(held, _Rows)  # whoever asks knows its kind
        return held.values

    def rows_of(self, table: str) -> int:
        """How many rows a table has."""
        return sum(held.part.rows for held in self._parts[table])

    def vectors(self, ids: Mapping[str, Ids], *, threads: int | None = None) -> dict[str, np.ndarray]:
        """Vectors by feature, (examples, dim) float32, of pooling "none" (examples, max_length, dim).

        Args:
          ids: By feature.
          threads: None for all.

        Raises:
          ValueError: If an id is past its table, or an example has more ids than its feature.
        """
        lookups, placed = [], []
        for feature in self._features:
            bags = self._bags(feature, ids[feature.name])
            for held in self._parts[feature.table]:
                values, local = held.of(_within(bags.values, held.part, self.rows_of(feature.table)))
                one = Lookup(rows=values, dim=feature.dim, ids=local, offsets=bags.offsets, weights=bags.weights)
                lookups.append(one)
                placed.append(feature.name)
        sums: dict[str, np.ndarray] = {}
        for name, looked_up in zip(placed, lookup_many(lookups, threads=threads), strict=True):
            sums[name] = looked_up if name not in sums else sums[name] + looked_up
        return {feature.name: _pooled(feature, ids[feature.name], sums[feature.name]) for feature in self._features}

    def _bags(self, feature: Feature, ids: Ids) -> Ids:
        """The bags of a feature's lookups, whose sums ``_pooled`` takes."""
        rows = self.rows_of(feature.table)
        if ids.values.size and ids.values.max() >= rows:
            raise ValueError(
                f"feature {feature.name!r} has id {ids.values.max():,}, but table {feature.table!r} has {rows:,} rows"
            )
        if feature.pooling in ("none", "max"):
            values, weights = ids.padded(feature.max_length)
            return Ids(values=values.reshape(-1, 1), weights=None if weights is None else weights.reshape(-1, 1))
        if feature.pooling == "sum":
            return ids
        return Ids(values=ids.values, offsets=ids.offsets, weights=_averaging(ids, root=feature.pooling == "sqrtn"))


def _within(ids: np.ndarray, part: Part, rows: int) -> np.ndarray:
    """Ids as numbers within a part, absent where it has no such row of the table's ``rows``."""
    if part.rows == rows:
        return ids
    if part.first_row == 0:
        return np.where(ids < part.rows, ids, _ABSENT)
    local = ids - np.int32(part.first_row)
    return np.where((local >= 0) & (local < part.rows), local, _ABSENT)


def _averaging(ids: Ids, *, root: bool) -> np.ndarray:
    """Weights divided by the number of ids of the example, or its root."""
    real = ids.values >= 0
    if ids.offsets is None:
        count = np.broadcast_to(real.sum(axis=1, keepdims=True, dtype=np.float32), real.shape)
    else:
        lengths = np.diff(ids.offsets)
        of_entry = np.repeat(np.arange(lengths.size), lengths)
        of_bag = np.bincount(of_entry, weights=real[: of_entry.size], minlength=lengths.size).astype(np.float32)
        count = np.zeros(real.shape, np.float32)
        count[: of_entry.size] = of_bag[of_entry]
    norm = np.maximum(count, np.float32(1))
    norm = np.sqrt(norm) if root else norm
    return (1 / norm if ids.weights is None else ids.weights / norm).astype(np.float32)


def _pooled(feature: Feature, ids: Ids, sums: np.ndarray) -> np.ndarray:
    """What the model takes of a feature, from the sums of its bags."""
    if feature.pooling not in ("none", "max"):
        return sums
    rows = sums.reshape(-1, feature.max_length, feature.dim)
    if feature.pooling == "none":
        return rows
    present = ids.padded(feature.max_length)[0] >= 0
    highest = np.where(present[:, :, None], rows, -np.inf).max(axis=1, initial=-np.inf)
    return np.where(present.any(axis=1)[:, None], highest, np.float32(0)).astype(np.float32)


def masks(features: Sequence[Feature], ids: Mapping[str, Ids]) -> dict[str, np.ndarray]:
    """Which positions of the features of pooling "none" hold an id, (examples, max_length) bool by feature."""
    return {f.name: ids[f.name].padded(f.max_length)[0] >= 0 for f in features if f.pooling == "none"}


def _mapped(path: pathlib.Path) -> np.ndarray:
    """A file's array, mapped into memory: writes stay in this process."""
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise ExportError(f"{path} cannot be read ({problem}); copy the export again") from problem
    return _bfloat16(array)


def _loaded(path: pathlib.Path) -> np.ndarray:
    try:
        return _bfloat16(np.load(path, allow_pickle=False))
    except (OSError, ValueError) as problem:
        raise ExportError(f"{path} cannot be read ({problem}); copy the export again") from problem


def _bfloat16(array: np.ndarray) -> np.ndarray:
    """bfloat16 has no name in NumPy's files, which call it two bytes."""
    if array.dtype != np.dtype("V2"):
        return array
    import ml_dtypes

    return array.view(ml_dtypes.bfloat16)
