"""Access profiles: how often every row of every table was accessed, as runs of rows with equal counts.

Rows descend by their frequency in the training split, so an exact profile of it has one run a distinct count, some
thousands for tables of millions of rows. A sampled profile is in row order too, but its counts need not descend.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from jrec.access.container import check_arrays, read_container, write_container
from jrec.data.identity import Identity
from jrec.data.schema import Schema
from jrec.errors import JrecError
from jrec.files import decode

KIND, VERSION = "jrec-access", 2
_CHUNK = 1 << 22
_MOST_ACCESSES = 2.0**63  # of a row: counts are int64
_REMEDY = "count the dataset again with `jrec access`"


class ProfileError(JrecError):
    """An access profile that is damaged or does not belong to what it is used with."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TableProfile:
    """The accesses of one table's rows.

    Attributes:
      name: The table's name.
      starts: (runs + 1,) int64 ascending from 0 to the table's rows; run ``i`` is rows ``starts[i]`` to
        ``starts[i + 1]``.
      counts: (runs,) float64, accesses of each row of a run; finite and not negative.
    """

    name: str
    starts: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        starts = np.asarray(self.starts, np.int64)
        counts = np.asarray(self.counts, np.float64)
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "counts", counts)
        if starts.ndim != 1 or counts.shape != (len(starts) - 1,) or len(counts) == 0:
            raise ProfileError(f"table {self.name!r}: {starts.shape} starts do not go with {counts.shape} counts")
        if starts[0] != 0 or (np.diff(starts) <= 0).any():
            raise ProfileError(f"table {self.name!r}: starts of runs do not ascend from 0")
        if not ((counts >= 0) & (counts <= _MOST_ACCESSES)).all():  # NaN is neither; sums of products stay finite
            raise ProfileError(f"table {self.name!r}: counts are negative, not finite or above 2^63")

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return int(self.starts[-1])

    @property
    def accesses(self) -> float:
        """The accesses of all rows together."""
        return float(np.diff(self.starts) @ self.counts)

    @property
    def descending(self) -> bool:
        """Whether no row is accessed more often than the one before it."""
        return bool((np.diff(self.counts) <= 0).all())

    @staticmethod
    def from_counts(name: str, counts: np.ndarray) -> TableProfile:
        """From the (rows,) counts of single rows, which may be a memory-mapped file."""
        if counts.ndim != 1 or len(counts) == 0:
            raise ProfileError(f"table {name!r}: counts have shape {counts.shape}, but should be one for every row")
        changes = [np.zeros(1, np.int64)]
        for at in range(0, len(counts) - 1, _CHUNK):
            # One more than the step, so that a change between two chunks is seen.
            chunk = counts[at : at + _CHUNK + 1]
            changes.append(np.flatnonzero(chunk[1:] != chunk[:-1]) + (at + 1))
        starts = np.concatenate([*changes, [len(counts)]])
        return TableProfile(name=name, starts=starts, counts=counts[starts[:-1]].astype(np.float64))

    @staticmethod
    def uniform(name: str, rows: int, accesses: float) -> TableProfile:
        """The profile of a table whose rows share its accesses equally."""
        return TableProfile(name=name, starts=np.array([0, rows]), counts=np.array([accesses / rows]))

    @staticmethod
    def from_sparse(name: str, rows: int, ids: np.ndarray, counts: np.ndarray) -> TableProfile:
        """From ascending distinct (n,) ids and their (n,) counts; all other rows were not accessed."""
        if len(ids) and not 0 <= ids[0] <= ids[-1] < rows:
            raise ProfileError(f"table {name!r} of {rows:,} rows was accessed at rows {ids[0]} to {ids[-1]}")
        ids = ids.astype(np.int64)
        edges = np.stack([ids, ids + 1], axis=1).reshape(-1)
        values = np.stack([counts.astype(np.float64), np.zeros(len(ids))], axis=1).reshape(-1)
        edges, values = np.concatenate([[0], edges]), np.concatenate([[0.0], values])
        last = np.append(edges[1:] != edges[:-1], True)  # where two begin at one row, the later one holds
        edges, values = edges[last], values[last]
        inside = edges < rows
        edges, values = edges[inside], values[inside]
        fresh = np.append(True, values[1:] != values[:-1])
        return TableProfile(name=name, starts=np.append(edges[fresh], rows), counts=values[fresh])

    def count_of(self, rows: np.ndarray) -> np.ndarray:
        """The counts of (n,) rows."""
        return self.counts[np.searchsorted(self.starts, rows, side="right") - 1]

    def head(self, rows: int) -> TableProfile:
        """Profile of only the first ``rows`` rows."""
        # From the left: a run that begins at ``rows`` is left out.
        runs = int(np.searchsorted(self.starts, rows, side="left"))
        return TableProfile(name=self.name, starts=np.append(self.starts[:runs], rows), counts=self.counts[:runs])

    def dense(self) -> np.ndarray:
        """The (rows,) float64 counts of single rows."""
        return np.repeat(self.counts, np.diff(self.starts))

    def smoothed(self, *, hit: float = 1.0, min_hits: int = 64, ratio: float = 1.05) -> TableProfile:
        """A sampled profile without most of its noise: rows hit rarely get the mean of their neighbourhood.

        Rows hit at least ``min_hits`` times keep their own count. The others are averaged over blocks whose bounds grow
        by ``ratio``; as rows descend by frequency in training, a block's rows are nearly equally frequent there.

        Args:
          hit: The count that one sampled access stands for.
          min_hits: Hits from which a row's count is trusted; 64 mean a standard error of 1/8.
          ratio: The ratio of the bounds of successive blocks.
        """
        edges = _block_edges(self.rows, ratio)
        frequent = self.counts >= hit * min_hits
        lengths = np.diff(self.starts)
        mass = np.append(0.0, np.cumsum(np.where(frequent, 0.0, self.counts * lengths)))
        size = np.append(0, np.cumsum(np.where(frequent, 0, lengths)))
        return _averaged(
            self.name,
            edges,
            mass=np.diff(np.interp(edges, self.starts, mass)),
            size=np.diff(np.interp(edges, self.starts, size.astype(np.float64))),
            starts=self.starts[:-1][frequent],
            stops=self.starts[1:][frequent],
            counts=self.counts[frequent],
        )

    @staticmethod
    def smoothed_from_sparse(
        name: str, rows: int, ids: np.ndarray, counts: np.ndarray, *, min_hits: int = 64, ratio: float = 1.05
    ) -> TableProfile:
        """``from_sparse(name, rows, ids, counts).smoothed()``, without a run for every row that was hit."""
        if len(ids) and not 0 <= ids[0] <= ids[-1] < rows:
            raise ProfileError(f"table {name!r} of {rows:,} rows was accessed at rows {ids[0]} to {ids[-1]}")
        edges = _block_edges(rows, ratio)
        frequent = counts >= min_hits
        kept = ids[frequent]
        mass = np.append(0, np.cumsum(np.where(frequent, 0, counts)))[np.searchsorted(ids, edges)]
        size = edges - np.searchsorted(kept, edges)
        return _averaged(
            name,
            edges,
            mass=np.diff(mass).astype(np.float64),
            size=np.diff(size).astype(np.float64),
            starts=kept,
            stops=kept + 1,
            counts=counts[frequent].astype(np.float64),
        )


def _block_edges(rows: int, ratio: float) -> np.ndarray:
    """Bounds of the blocks in which neighbours are averaged: each is longer than the one before by ``ratio``."""
    edges = np.geomspace(1, rows + 1, 2 + int(np.log(rows + 1) / np.log(ratio))).astype(np.int64) - 1
    return np.unique(np.append(edges, rows))


def _averaged(
    name: str,
    edges: np.ndarray,
    *,
    mass: np.ndarray,
    size: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    counts: np.ndarray,
) -> TableProfile:
    """Blocks at their mean, ``mass / size``, but for runs of rows that keep their own counts."""
    # A block may have only rows that keep their own counts.
    mean = np.divide(mass, size, out=np.zeros_like(mass), where=size > 0)
    bounds = np.unique(np.concatenate([edges, starts, stops]))
    block = np.searchsorted(edges, bounds[:-1], side="right") - 1
    averaged = mean[block]
    if len(starts):
        run = np.searchsorted(starts, bounds[:-1], side="right") - 1
        own = (run >= 0) & (bounds[:-1] < stops[run])
        averaged[own] = counts[run[own]]
    return TableProfile(name=name, starts=bounds, counts=averaged)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AccessProfile:
    """The accesses of all tables of a dataset.

    Attributes:
      tables: One a table of the dataset.
      examples: How many examples made these accesses; counts divided by it are accesses per example.
      source: How it was counted, for people.
      dataset: The dataset's identity; None where the profile belongs to no dataset.
    """

    tables: tuple[TableProfile, ...]
    examples: float
    source: str = ""
    dataset: Identity | None = None

    def __post_init__(self) -> None:
        if not self.examples > 0:
            raise ProfileError(f"an access profile of {self.examples} examples says nothing; count at least one")

    def table(self, name: str) -> TableProfile:
        """The profile of a table.

        Raises:
          ProfileError: If there is none.
        """
        for table in self.tables:
            if table.name == name:
                return table
        raise ProfileError(f"the access profile has no table {name!r}; it has {', '.join(t.name for t in self.tables)}")

    def check_dataset(self, schema: Schema) -> None:
        """Refuses to be used with another dataset than the one counted.

        Args:
          schema: The dataset, with the capacities of tables that grow (``Schema.with_capacities``).

        Raises:
          ProfileError: Naming the difference.
        """
        rows = {t.name: t.rows for t in self.tables}
        for table in schema.tables:
            if table.growing and table.name in rows and rows[table.name] != table.rows:
                raise ProfileError(
                    f"the access profile has {rows[table.name]:,} rows of table {table.name!r}, which grows, but its"
                    f" capacity is {table.rows:,}; give both the same tables.growth.capacity (jrec plan --config)"
                )
            if rows.get(table.name) != table.rows:
                counted = f"{rows[table.name]:,} rows" if table.name in rows else "no such table"
                raise ProfileError(
                    f"the access profile has {counted} where dataset {schema.name!r} has table {table.name!r} of"
                    f" {table.rows:,} rows; {_REMEDY}"
                )
        if self.dataset is not None:
            self.dataset.check(schema.identity, subject="the access profile", remedy=_REMEDY, error=ProfileError)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a versioned, checksummed file."""
        header = _Header(
            examples=self.examples, source=self.source, dataset=self.dataset, tables=tuple(t.name for t in self.tables)
        )
        arrays = {}
        for number, table in enumerate(self.tables):
            arrays[f"lengths/{number}"] = np.diff(table.starts)
            arrays[f"counts/{number}"] = table.counts
        write_container(path, kind=KIND, version=VERSION, header=dataclasses.asdict(header), arrays=arrays)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> AccessProfile:
        """Reads a file of ``save``.

        Raises:
          ProfileError: If it is damaged or no access profile.
        """
        content, arrays = read_container(path, kind=KIND, version=VERSION, error=ProfileError, remedy=_REMEDY)
        header = decode(content, _Header, where=str(path), error=ProfileError, remedy=_REMEDY)
        names = [f"{field}/{number}" for number in range(len(header.tables)) for field in ("lengths", "counts")]
        check_arrays(path, arrays, names, error=ProfileError, remedy=_REMEDY)
        try:
            tables = tuple(
                TableProfile(name=name, starts=_starts(arrays[f"lengths/{k}"]), counts=arrays[f"counts/{k}"])
                for k, name in enumerate(header.tables)
            )
            return AccessProfile(tables=tables, examples=header.examples, source=header.source, dataset=header.dataset)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}; {_REMEDY}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Header:
    """What a file says besides its arrays."""

    examples: float
    source: str
    dataset: Identity | None
    tables: tuple[str, ...]


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where runs of these lengths start, and where the last one ends."""
    if lengths.dtype.kind not in "iu" or (lengths < 1).any() or float(np.sum(lengths, dtype=np.float64)) >= 2.0**62:
        raise ProfileError("the lengths of runs are not positive integers")
    return np.append(0, np.cumsum(lengths))
