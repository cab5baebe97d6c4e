"""What a model remembers of histories that were asked before, so that an event more costs little.

A layer's keys and values of a position do not change when items follow it. So they are kept, by the items themselves: a
request whose history begins as an earlier one ended pays for the items that are new, whoever sends it, and nobody has
to name a user. The last item is always computed anew, since what is asked for after it, the request's own moment,
changes.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jrec.serving.format import APPEND, ExportError, Feature, Manifest
from jrec.serving.loaded_program import compiled_once, read_bytes, read_program, taken

if TYPE_CHECKING:
    import jax
    from jax.export import Exported

FEW = (2, 16)
"""Items that are appended at once, beside whole histories: each size is a compiled program."""
_SMALLEST, _APART = 32, 4  # of the sizes that histories are padded to, and how far they lie apart
_ROUNDING = 2.0**-22  # of an age in float32, twice, as a share of the oldest one's


@dataclasses.dataclass
class HistoryCounts:
    """What came of the items of requests' histories, since a model was loaded.

    Attributes:
      kept: Items whose keys and values were kept.
      computed: Items that were computed.
    """

    kept: int = 0
    computed: int = 0


class _Kept(NamedTuple):
    """A history that was asked before, but its last item.

    Attributes:
      ids: (items,) int32.
      times: (items + 1,) float64, seconds from the first item on, the last item's included; empty without times.
      arrays: (positions, ...) each, keys and values by layer; more positions than items.
    """

    ids: np.ndarray
    times: np.ndarray
    arrays: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.times.nbytes + sum(array.nbytes for array in self.arrays)


class Asked(NamedTuple):
    """A history that is asked for.

    Attributes:
      ids: (items,) int32.
      times: (items + 1,) float64, seconds from the first item on, and the request's moment; empty without times.
      kept: What is kept of it, or None.
      rows: (items that are new, dim) float32.
    """

    ids: np.ndarray
    times: np.ndarray
    kept: _Kept | None
    rows: np.ndarray


class _Compiled:
    """A jitted program that goes on from a history, which does not depend on parameters.

    Attributes:
      exported: What ``jax.export`` wrote.
      shapes: What it keeps of a position.
      program: The program.
      warm: Whether it is compiled for all sizes.
    """

    def __init__(self, folder: pathlib.Path, feature: Feature, timed: bool, content: bytes):
        import jax

        self.exported = read_program(folder / APPEND, content)
        self.shapes = _checked(folder, feature, timed, self.exported)
        self.program, self.warm = jax.jit(self.exported.call), False


class Histories:
    """Computes a model's outputs of histories, by what is kept of them.

    Args:
      folder: The export or delta.
      manifest: Its manifest.
      limit: The most bytes that are kept; those that were not asked for the longest go.
      counts: What is counted.
      parameters: Arrays by name, of which its program takes some.

    Attributes:
      nbytes: Bytes that are kept.

    Raises:
      ExportError: If its program cannot be read, or takes other histories than the manifest says.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        manifest: Manifest,
        limit: int,
        counts: HistoryCounts,
        parameters: Mapping[str, jax.Array],
    ):
        (feature,) = manifest.features
        self._feature, self._limit, self._counts = feature, limit, counts
        self._timed = bool(manifest.dense_columns)
        content = read_bytes(folder / APPEND)
        made_of = content, APPEND, manifest.features, manifest.dense_columns
        self._compiled = compiled_once(made_of, lambda: _Compiled(folder, feature, self._timed, content))
        self._taken = taken(folder / APPEND, self._compiled.exported, 1, parameters)
        self._sizes = sorted(_sizes(feature.max_length))
        # An odd number a position, unknown to clients: prefixes are found by sums of products, all of them at once.
        self._factors = np.random.default_rng().integers(0, 2**63, feature.max_length, np.uint64) * np.uint64(2) + 1
        self._kept: collections.OrderedDict[int, _Kept] = collections.OrderedDict()
        self._lock = threading.Lock()  # of what is kept, and of the counts
        self.nbytes = 0

    def __len__(self) -> int:
        """How many histories are kept."""
        return len(self._kept)

    def asked(
        self, dense: np.ndarray, ids: np.ndarray, rows_of: Callable[[np.ndarray], np.ndarray]
    ) -> list[Asked] | None:
        """What is to be computed, of the version of the rows that ``rows_of`` reads; None if there are gaps.

        Args:
          dense: (examples, max_length) float32, how many seconds before the example's moment each item was; of no
            columns without times.
          ids: (examples, max_length) int32, -1 behind a history's end.
          rows_of: (n, dim) float32 rows of (n,) int32 numbers.
        """
        counts = (ids >= 0).sum(axis=1)
        if ((ids >= 0) != (np.arange(ids.shape[1]) < counts[:, None])).any():
            return None
        asked = []
        for line, ages, count in zip(ids, dense.astype(np.float64), counts.tolist(), strict=True):
            times = np.append(ages[:1] - ages[:count], ages[:1]) if self._timed and count else ages[:0]
            kept = self._longest(line[:count], times)
            asked.append(Asked(line[:count], times, kept, line[0 if kept is None else len(kept.ids) : count]))
        rows = rows_of(np.concatenate([np.zeros(0, np.int32), *(one.rows for one in asked)]))
        bounds = np.cumsum([len(one.rows) for one in asked])[:-1]
        return [one._replace(rows=own) for one, own in zip(asked, np.split(rows, bounds), strict=True)]

    def outputs(self, asked: Sequence[Asked]) -> list[list[np.ndarray]]:
        """The leaves of the model's outputs, each of one example: (1, ...)."""
        return [self._computed(one) for one in asked]

    def warm_up(self) -> None:
        """Compiles the programs of all sizes, if they are not."""
        for size in () if self._compiled.warm else self._sizes:
            for queries in sorted({*(few for few in FEW if few < size), size}):
                self._call(queries, size, np.zeros((0, self._feature.dim), np.float32), np.zeros(0), None)
        self._compiled.warm = True

    def _longest(self, ids: np.ndarray, times: np.ndarray) -> _Kept | None:
        """What is kept of the longest begin of a history, without its last item."""
        sums = np.cumsum((ids[:-1].astype(np.uint64) + 1) * self._factors[: max(len(ids) - 1, 0)]).tolist()
        with self._lock:
            for place in reversed(range(len(sums))):
                kept = self._kept.get(sums[place])
                # By the items themselves, whatever their sum; by their times, too, since ages are rounded.
                if kept is not None and np.array_equal(kept.ids, ids[: place + 1]):
                    wanted = times[: len(kept.times)]
                    if (np.abs(kept.times - wanted) <= _ROUNDING * np.abs(times).max(initial=0)).all():
                        self._kept.move_to_end(sums[place])
                        return kept
        return None

    def _computed(self, one: Asked) -> list[np.ndarray]:
        count, first = len(one.ids), 0 if one.kept is None else len(one.kept.ids)
        size = _at_least(count, self._sizes)
        queries = _at_least(count - first, [*(few for few in FEW if few < size), size])
        leaves, own = self._call(queries, size, one.rows, one.times, one.kept)
        with self._lock:
            self._counts.kept += first
            self._counts.computed += count - first
        # Nothing is new to keep where only the last item, which is never kept, was computed.
        if count - 1 > first:
            before = self._empty(0) if one.kept is None else one.kept.arrays
            arrays = tuple(
                _with(array, first, new[: count - 1 - first], size) for array, new in zip(before, own, strict=True)
            )
            self._keep(_Kept(one.ids[:-1].copy(), one.times[:-1].copy(), arrays), one.kept)
        return leaves

    def _call(
        self, queries: int, size: int, rows: np.ndarray, times: np.ndarray, kept: _Kept | None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The leaves of the outputs, and (queries, ...) keys and values by layer."""
        import jax

        first = 0 if kept is None else len(kept.ids)
        inputs: dict[str, np.ndarray | list[np.ndarray]] = {
            "rows": _grown(rows, queries)[None],
            "first": np.array([first], np.int32),
            "count": np.array([len(rows)], np.int32),
            "before": [_grown(array, size)[None] for array in (self._empty(size) if kept is None else kept.arrays)],
        }
        if self._timed:
            inputs["times"] = _grown(times[:-1].astype(np.float32), size)[None]
            inputs["asked"] = _grown(times[first + 1 :].astype(np.float32), queries)[None]
        outputs, own = self._compiled.program(*self._taken, inputs)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(outputs)], [np.asarray(array)[0] for array in own]

    def _empty(self, size: int) -> Iterator[np.ndarray]:
        return (np.zeros((size, *shape), dtype) for shape, dtype in self._compiled.shapes)

    def _keep(self, kept: _Kept, before: _Kept | None) -> None:
        """Keeps a history in the place of the one that it goes on from."""
        with self._lock:
            if before is not None:
                self._forget(self._sum(before.ids))
            key = self._sum(kept.ids)
            self._forget(key)
            self._kept[key] = kept
            self.nbytes += kept.nbytes
            # The one that was just kept goes, too, where it alone is larger than the limit.
            while self.nbytes > self._limit:
                self._forget(next(iter(self._kept)))

    def _forget(self, key: int) -> None:
        if (old := self._kept.pop(key, None)) is not None:
            self.nbytes -= old.nbytes

    def _sum(self, ids: np.ndarray) -> int:
        return int(((ids.astype(np.uint64) + 1) * self._factors[: len(ids)]).sum())


def _checked(
    folder: pathlib.Path, feature: Feature, timed: bool, exported: Exported
) -> list[tuple[tuple[int, ...], np.dtype]]:
    """What a program keeps of a position, as shapes and dtypes.

    Raises:
      ExportError: If it takes or returns something else.
    """
    import jax

    names = ("rows", "first", "count", *(("times", "asked") if timed else ()))
    parameters = jax.tree.unflatten(exported.in_tree, exported.in_avals)[0][:-1][:1]
    depth = exported.in_tree.num_leaves - len(names) - len(jax.tree.leaves(parameters))
    wanted: Mapping[str, object] = dict.fromkeys(names, 0) | {"before": [0] * depth}
    fault = f"{folder / APPEND} is no program of the feature {feature.name!r} with dim {feature.dim}"
    remedy = "; export the run again"
    if depth < 1 or exported.in_tree != jax.tree.structure(((*parameters, wanted), {})):
        raise ExportError(f"{fault}: it takes {exported.in_tree}{remedy}")
    inputs = jax.tree.unflatten(exported.in_tree, exported.in_avals)[0][-1]
    _, own = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    kept = [(tuple(x.shape[2:]), np.dtype(x.dtype)) for x in inputs["before"]]
    returned = [(tuple(x.shape[2:]), np.dtype(x.dtype)) for x in jax.tree.leaves(own)]
    sizes = [size for shape, _ in kept for size in shape]
    if inputs["rows"].shape[2:] != (feature.dim,) or kept != returned or any(type(size) is not int for size in sizes):
        raise ExportError(f"{fault}: it takes {exported.in_avals} and returns {exported.out_avals}{remedy}")
    return kept


def _sizes(length: int) -> Iterator[int]:
    """What histories are padded to: the most items, and a few sizes below, so that short ones cost less."""
    yield length
    while (length := length // _APART) >= _SMALLEST:
        yield length


def _at_least(count: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= count)


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    """(size, ...): the array with zeros behind it, or itself."""
    return array if len(array) == size else _with(array, len(array), array[:0], size)


def _with(array: np.ndarray, first: int, new: np.ndarray, size: int) -> np.ndarray:
    """(size, ...): the first ones of an array, new ones after them, and zeros."""
    out = np.zeros((size, *array.shape[1:]), array.dtype)
    out[:first] = array[:first]
    out[first : first + len(new)] = new
    return out
