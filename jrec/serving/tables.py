"""Tables of an export in host memory: memory-mapped rows, tensor trains, rows that deltas changed."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from jrec.native.batched_lookup import Lookup, TableRows, lookup_beside, lookup_many, table_rows
from jrec.serving.arrays import BFLOAT16, loaded, mapped, row_array
from jrec.serving.checks import tt_shape
from jrec.serving.format import ExportError, Feature, Manifest, Part
from jrec.serving.ids import ABSENT, Ids, checked_features


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Write:
    """New values of some rows of a mapped file, and what was there.

    Attributes:
      values: The mapped rows.
      rows: (n,) int64, ascending.
      new, old: Their values.
    """

    values: np.ndarray
    rows: np.ndarray
    new: np.ndarray
    old: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """A delta, read and checked, that is to be applied.

    Attributes:
      tables: The tables after it. They share the mapped rows that are changed in place with those before it, so that
        both give new values once ``write`` was called.
    """

    tables: ServedTables
    _writes: Sequence[_Write]

    def write(self) -> None:
        """Writes the changed rows: nothing is read, checked or allocated anymore."""
        for one in self._writes:
            one.values[one.rows] = one.new

    def undo(self) -> None:
        """Puts back what was there before ``write``, also where that was interrupted."""
        for one in self._writes:
            one.values[one.rows] = one.old


class _Rows:
    """Rows of a part: a file that is mapped into memory; changed rows are private copies of its pages."""

    def __init__(self, part: Part, values: np.ndarray):
        self.part, self.values, self._rows = part, values, table_rows(values, part.dim)

    def of(self, ids: np.ndarray) -> tuple[TableRows, np.ndarray]:
        return self._rows, ids

    def write(self, folder: pathlib.Path, part: Part) -> _Write:
        """What a delta's changed rows are to become."""
        rows = loaded(folder / part.changed, np.int64, (None,))
        if rows.size and (rows[0] < 0 or rows[-1] >= part.rows or (rows[1:] <= rows[:-1]).any()):
            raise ExportError(
                f"{folder / part.changed} does not hold ascending rows below {part.rows:,}; export the run again"
            )
        new = loaded(folder / part.file, *row_array(part.dtype, rows.size, part.dim))
        return _Write(values=self.values, rows=rows, new=new, old=self.values[rows])


class _Train:
    """Rows of a tensor train, made of its cores for the distinct ids of a batch."""

    def __init__(self, folder: pathlib.Path, part: Part):
        self.part, shapes = part, tt_shape(part).core_shapes
        dtype = BFLOAT16 if part.dtype == "bfloat16" else np.dtype(part.dtype)
        files = zip(part.cores, shapes, strict=True)
        self._cores = [loaded(folder / file, dtype, shape).astype(np.float32) for file, shape in files]
        self._cached = None
        if part.cached_ids:
            numbers = loaded(folder / part.cached_ids, np.int32, (None,))
            if numbers.size and (numbers.min() < 0 or numbers.max() > part.rows):  # an empty place has number ``rows``
                raise ExportError(
                    f"{folder / part.cached_ids} does not hold rows up to {part.rows:,}; export the run again"
                )
            rows = loaded(folder / part.cached_rows, np.float32, (numbers.size, part.dim))
            order = np.argsort(numbers, kind="stable")
            self._cached = numbers[order], rows[order]

    def of(self, ids: np.ndarray) -> tuple[TableRows, np.ndarray]:
        held = ids >= 0
        wanted, inverse = np.unique(ids[held], return_inverse=True)
        local = np.full(ids.shape, ABSENT, np.int32)
        local[held] = inverse
        return table_rows(self._rows(wanted), self.part.dim), local

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
            product = product @ slices.reshape(n, rank, dims * after)
            product = product.reshape(n, product.shape[1] * dims, after)
        values = product.reshape(rows.size, self.part.dim)
        if self._cached is not None:
            numbers, changed = self._cached
            at = np.minimum(np.searchsorted(numbers, rows), max(numbers.size - 1, 0))
            known = numbers[at] == rows if numbers.size else np.zeros(rows.size, bool)
            values[known] = changed[at[known]]
        return np.ascontiguousarray(values)


_Part = _Rows | _Train


class ServedTables:
    """The tables of an export, for lookups by feature.

    Args:
      features: The model's features.
      parts: By table, its parts in the order of its rows.
    """

    def __init__(self, features: Sequence[Feature], parts: Mapping[str, Sequence[_Part]]):
        self._features, self._parts = features, parts
        self._rows = {table: sum(held.part.rows for held in of_table) for table, of_table in parts.items()}
        # Whether each vector is what one lookup gives.
        self._sums_only = all(f.pooling not in ("none", "max") and len(parts[f.table]) == 1 for f in features)

    @staticmethod
    def load(folder: pathlib.Path, manifest: Manifest) -> ServedTables:
        """Opens the tables of a whole export.

        Raises:
          ExportError: If a file cannot be read, or is of another shape, dtype or size than the manifest says.
        """
        parts = {table: [_opened(folder, part) for part in of_table] for table, of_table in manifest.tables.items()}
        return ServedTables(manifest.features, parts)

    def change(self, folder: pathlib.Path, delta: Manifest) -> Change:
        """Reads a delta of these tables (``check_follows``), of which nothing has changed yet.

        Raises:
          ExportError: For the same reasons as ``load``, or if changed rows are not ascending rows of their part.
        """
        parts: dict[str, list[_Part]] = {}
        writes = []
        for table, of_table in delta.tables.items():
            parts[table] = []
            for held, part in zip(self._parts[table], of_table, strict=True):
                if part.changed and isinstance(held, _Rows):
                    writes.append(held.write(folder, part))
                    # The same object: lookups find the new rows in the mapping that they read already.
                    parts[table].append(held)
                else:
                    parts[table].append(_opened(folder, part))
        return Change(tables=ServedTables(self._features, parts), _writes=writes)

    def stored(self, table: str, part: Part) -> np.ndarray:
        """The rows, as they are stored, of such a part of a table.

        Raises:
          ExportError: If the table has no such rows.
        """
        for held in self._parts.get(table, ()):
            if isinstance(held, _Rows) and (held.part.first_row, held.part.rows) == (part.first_row, part.rows):
                return held.values
        raise ExportError(
            f"table {table!r} has no {part.rows:,} rows from {part.first_row:,} on there; make a whole export"
        )

    @property
    def rows(self) -> Mapping[str, int]:
        """How many rows each table has."""
        return self._rows

    def rows_between(self, table: str, begin: int, stop: int) -> np.ndarray:
        """(stop - begin, dim) float32: rows of a table, as lookups give them."""
        return self.rows_of(table, np.arange(begin, stop, dtype=np.int32))

    def rows_of(self, table: str, ids: np.ndarray, *, threads: int | None = None) -> np.ndarray:
        """(n, dim) float32: rows of a table by (n,) int32 numbers, zeros for -1, as lookups give them."""
        rows, one_each = self._rows[table], ids[:, None]
        parts = [Lookup(*held.of(_within(one_each, held.part, rows))) for held in self._parts[table]]
        return functools.reduce(np.add, lookup_many(parts, threads=threads))

    def vectors(
        self, ids: Mapping[str, Ids], *, examples: int | None = None, threads: int | None = None
    ) -> dict[str, np.ndarray]:
        """Vectors by feature, (examples, dim) float32, of pooling "none" (examples, max_length, dim).

        Args:
          ids: By feature, of all features.
          examples: How many examples there must be; None for any number, the same in all features.
          threads: None for all.

        Raises:
          ValueError: If a feature is missing or unknown, or its ids or weights are not as ``Ids`` says, or past its
            table.
        """
        ids = checked_features(ids, self._features, self._rows, examples)
        looked_up = iter(lookup_many(self._lookups(ids), threads=threads))
        vectors = {}
        for feature in self._features:
            sums = functools.reduce(np.add, (next(looked_up) for _ in self._parts[feature.table]))
            vectors[feature.name] = _pooled(feature, ids[feature.name], sums)
        return vectors

    def fill(self, out: np.ndarray, ids: Mapping[str, Ids], *, threads: int | None = None) -> None:
        """Writes the vectors of all features side by side.

        Args:
          out: (examples, elements of the vectors of all features) float32, of which each row lies together.
          ids: See ``vectors``, which raises the same errors.
          threads: How many threads to use; None for all.
        """
        if self._sums_only:
            ids = checked_features(ids, self._features, self._rows, len(out))
            lookup_beside(self._lookups(ids), out, threads=threads)
            return
        begin = 0
        for vectors in self.vectors(ids, examples=len(out), threads=threads).values():
            end = begin + math.prod(vectors.shape[1:])
            out[:, begin:end] = vectors.reshape(len(out), end - begin)
            begin = end

    def _lookups(self, ids: Mapping[str, Ids]) -> list[Lookup]:
        """The lookups of checked ids: one for each part of the table of each feature."""
        lookups = []
        for feature in self._features:
            bags = _bags(feature, ids[feature.name])
            for held in self._parts[feature.table]:
                rows, local = held.of(_within(bags.values, held.part, self._rows[feature.table]))
                lookups.append(Lookup(rows, local, bags.offsets, bags.weights))
        return lookups


def _opened(folder: pathlib.Path, part: Part) -> _Part:
    if part.cores:
        return _Train(folder, part)
    return _Rows(part, mapped(folder / part.file, *row_array(part.dtype, part.rows, part.dim)))


def _bags(feature: Feature, ids: Ids) -> Ids:
    """The bags of a feature's lookups, whose sums ``_pooled`` takes."""
    if feature.pooling in ("none", "max"):
        values, weights = ids.padded(feature.max_length)
        return Ids(values=values.reshape(-1, 1), weights=None if weights is None else weights.reshape(-1, 1))
    if feature.pooling == "sum":
        return ids
    return Ids(values=ids.values, offsets=ids.offsets, weights=_averaging(ids, root=feature.pooling == "sqrtn"))


def _within(ids: np.ndarray, part: Part, rows: int) -> np.ndarray:
    """Ids as numbers within a part, absent where it has no such row of the table's ``rows``."""
    # A table of one part, as nearly all are: its ids are copied nowhere.
    if part.rows == rows:
        return ids
    if part.first_row == 0:
        return np.where(ids < part.rows, ids, ABSENT)
    local = ids - np.int32(part.first_row)
    return np.where((local >= 0) & (local < part.rows), local, ABSENT)


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
        # Entries behind the last offset are padding, which belongs to no example.
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
