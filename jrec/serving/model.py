"""An exported model in memory: raw columns to probabilities."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from jrec.data.column_forms import by_name
from jrec.data.columns import ListColumn
from jrec.data.unknown import UnknownValues
from jrec.errors import JrecError
from jrec.regression import Numbers
from jrec.serving.answers import Answer, Best, CandidateScores, Scored, column_name
from jrec.serving.candidates import CANDIDATES, NoCandidatesError, checked, scores_of, unit_rows
from jrec.serving.checks import check_follows, load_manifest, verify
from jrec.serving.encode import (
    Column,
    RawValues,
    RowNumbers,
    RowsOfKeys,
    encoder_of,
    rows_of_keys,
)
from jrec.serving.format import APPEND, ExportError, Manifest, folders_of, keys_file
from jrec.serving.histories import Asked, Histories, HistoryCounts
from jrec.serving.ids import Ids, checked_dense, checked_features, masks
from jrec.serving.loaded_program import LoadedProgram
from jrec.serving.nearest import BLOCK, nearest, of_unit_length
from jrec.serving.ranked_items import RankedItems
from jrec.serving.tables import ServedTables

if TYPE_CHECKING:
    import jax
    import pyarrow as pa
    from jaxtyping import PyTree

    from jrec.serving.answers import ByTask

BATCH_SIZES = (1, 4, 16, 64, 256, 1024, 4096)
"""Sizes that batches are padded to, one compiled program each; larger ones are cut."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Loaded:
    """All that a delta changes, so that one assignment changes it.

    Attributes:
      export: The id of the whole export.
      manifest: The export's, or the last delta's.
      tables: The rows.
      program: The dense part.
      encoder: From a request's columns to rows.
      histories: What it remembers of histories; None where nothing is kept.
    """

    export: str
    manifest: Manifest
    tables: ServedTables
    program: LoadedProgram
    encoder: RawValues | RowNumbers
    histories: Histories | None


class HistoryCache(NamedTuple):
    """What a model remembers of histories (``load(history_cache=)``).

    Attributes:
      histories: How many.
      nbytes: Bytes that they take.
      kept: Items of requests since it was loaded whose keys and values were kept.
      computed: Those that were computed.
    """

    histories: int
    nbytes: int
    kept: int
    computed: int


class OutdatedError(JrecError):
    """What was encoded is of an earlier version of a model whose tables grow, or of another export."""


class Encoded(NamedTuple):
    """A request in the form in which rows are looked up.

    Attributes:
      loaded: What encoded it.
      dense: (examples, num_dense) float32: dense features.
      ids: By feature.
      candidates: By example the rows, in the table that is ranked, of the items that it names, -1 of unknown ones; None
        of requests that name none.
    """

    loaded: _Loaded
    dense: np.ndarray
    ids: Mapping[str, Ids]
    candidates: ListColumn | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        arrays = [array for ids in self.ids.values() for array in (ids.values, ids.offsets, ids.weights)]
        arrays += self.candidates or ()
        return self.dense.nbytes + sum(array.nbytes for array in arrays if array is not None)


class _Request(NamedTuple):
    """What of a request does not depend on rows anymore.

    Attributes:
      loaded: What the rows were looked up in, with the dense part that belongs to them.
      count: How many examples there are.
      numbers: (padded examples, n) float32: dense features, then vectors by feature, side by side.
      masks: By feature of pooling "none", (padded examples, max_length) bool.
      asked: In place of both, histories of which something may be kept.
    """

    loaded: _Loaded
    count: int
    numbers: np.ndarray
    masks: Mapping[str, np.ndarray]
    asked: Sequence[Asked] | None = None


class Model:
    """An exported model: ``model(columns)`` gives probabilities. Made by ``load``; any thread may call it.

    Rows are looked up in host memory, from memory-mapped files, whatever their number; the dense part runs on JAX's
    default device.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        manifest: Manifest,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        threads: int | None = None,
        history_cache: int = 0,
    ):
        self._sizes, self._threads = tuple(sorted(set(batch_sizes))), threads
        self._history_cache, self._history_counts = history_cache, HistoryCounts()
        if history_cache < 0:
            raise ValueError(f"history_cache is {history_cache:,} bytes; give 0 or more")
        if not self._sizes or self._sizes[0] < 1:
            raise ValueError(f"batch_sizes are {list(batch_sizes)}; give sizes of at least 1")
        encoder = encoder_of(folder, manifest)
        self._growing = encoder.growing
        program = LoadedProgram(folder, manifest)
        self._loaded = _Loaded(
            export=manifest.id,
            manifest=manifest,
            tables=ServedTables.load(folder, manifest),
            program=program,
            encoder=encoder.with_keys(self._keys(folder, manifest)),
            histories=self._histories(folder, manifest, program.parameters),
        )
        self._ranked = None if manifest.retrieval is None else RankedItems(folder, manifest, manifest.retrieval)
        self._applying = threading.Lock()  # held while a delta is read and applied, so that they come one by one
        self._rows_lock = threading.Lock()  # held while rows are looked up or written: both, or neither, of a delta

    @property
    def manifest(self) -> Manifest:
        """What is loaded: of the last delta, where some were applied."""
        return self._loaded.manifest

    @property
    def ranks(self) -> bool:
        """Whether the model ranks items: ``best`` gives them, and there are no probabilities."""
        return self._ranked is not None

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """The names of the columns that a request needs."""
        return self._loaded.encoder.raw_columns

    @property
    def unknown(self) -> UnknownValues | None:
        """How many values of requests training did not see, by feature; None of an export without a schema."""
        return self._loaded.encoder.unknown

    @property
    def history_cache(self) -> HistoryCache | None:
        """What is remembered of histories that were asked before; None where nothing is."""
        if (histories := self._loaded.histories) is None:
            return None
        return HistoryCache(histories=len(histories), nbytes=histories.nbytes, **vars(self._history_counts))

    @property
    def columns(self) -> dict[str, Column]:
        """What each of the ``raw_columns`` holds."""
        return self._loaded.encoder.columns

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels that the model scores; () of one without names."""
        return self._loaded.program.tasks

    def __call__(self, columns: object) -> Any:
        """Probabilities, (examples,) float32, of a model with one logit an example; of several tasks by task.

        A model of labels that are numbers gives numbers (``manifest.numbers_by_label``).

        Args:
          columns: Raw columns by name, as the log has them that the dataset was made of: NumPy arrays, lists, Arrow or
            polars columns; ragged lists for features of several ids. Unknown values read their table's row for them, as
            in ``jrec prepare``. Of an export without a schema, columns as ``run.predict`` takes them: row numbers.

        Raises:
          DatasetError: If a column is missing or holds what the feature cannot have; the message names it.
          ValueError: If a row number is past its table, or the model has other outputs than one logit an example, or
            a dictionary of such by task.
        """
        return self.scored(columns).scores

    def scored(self, columns: object) -> Scored:
        """Probabilities, and the manifest of what computed all of them; see ``__call__``."""
        while True:
            with contextlib.suppress(OutdatedError):
                # Again where a delta came in between and gave rows to other keys: it ends, since deltas come seconds
                # apart.
                return self.scored_of(self.encoded(columns))

    def encoded(self, columns: object) -> Encoded:
        """Raw columns checked and brought to what the model looks up; arguments and errors as of ``__call__``."""
        # Read once: encoder, manifest and tables are then of one version, whatever another thread takes over meanwhile.
        loaded = self._loaded
        dense, ids = loaded.encoder.inputs(columns)
        dense = checked_dense(dense, loaded.manifest.dense_columns)
        ids = checked_features(ids, loaded.manifest.features, loaded.tables.rows, len(dense))
        return Encoded(loaded, dense, ids, self._candidates(loaded, columns, len(dense)))

    @property
    def takes_candidates(self) -> bool:
        """Whether a request may name items to score: the model ranks items, and no feature has the column's name."""
        return self.ranks and CANDIDATES not in self.raw_columns

    def has_candidates(self, columns: object) -> bool:
        """Whether columns, or what was encoded of them, name items to score, in place of asking for the best."""
        if isinstance(columns, Encoded):
            return columns.candidates is not None
        return self.takes_candidates and CANDIDATES in by_name(columns)

    def _candidates(self, loaded: _Loaded, columns: object, examples: int) -> ListColumn | None:
        if (ranked := self._ranked) is None:
            return None
        rows = loaded.encoder.candidates(columns, ranked.retrieval.item_table)
        return None if rows is None else ranked.candidates(checked(rows, examples))

    def scored_of(self, request: Encoded) -> Scored:
        """Probabilities of what ``encoded`` made, and the manifest of what computed all of them.

        Raises:
          OutdatedError: If a delta has given rows of a table that grows to other keys since, or another export encoded
            it; encode again.
        """
        self.check_logits()
        with self._rows_lock:
            # Under the lock of the lookup: a delta between the two would look other keys' rows up.
            self._check_current(request)
            looked_up = self._look_up(request.dense, request.ids)
        # The dense part runs without the lock, by the program of the version that was looked up: neither lookups of
        # other threads nor a delta wait for the device.
        manifest = looked_up.loaded.manifest
        return Scored(predictions(self._scores(looked_up), manifest.numbers_by_label), manifest)

    def _check_current(self, request: Encoded) -> None:
        if request.loaded.export != self._loaded.export:
            raise OutdatedError("the server took over another export while the request waited; send it again")
        if self._growing and request.loaded is not self._loaded:
            raise OutdatedError("the model took over a delta while the request waited; send it again")

    def best(self, columns: object, k: int = 10) -> Best:
        """The k best items of users, by a model that ranks items; fewer where fewer are left.

        Args:
          columns: ``raw_columns``: of a model of sequences the history, ragged lists of raw values, oldest first, of
            which the last count; of two towers the user's features.
          k: How many, at least 1.

        Raises:
          DatasetError: If a column is missing or holds what the feature cannot have.
          ValueError: If the model does not rank items.
        """
        while True:
            with contextlib.suppress(OutdatedError):
                return self.best_of(self.encoded(columns), k)

    def best_of(self, encoded: Encoded, k: int = 10) -> Best:
        """The k best items for users, of what ``encoded`` made; errors as of ``best``."""
        ranked = self._check_ranks()
        if encoded.candidates is not None:
            raise ValueError(f"the columns have {CANDIDATES!r}; call candidate_scores, or leave them out")

        def nearest_to(users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            left_out = ranked.left_out(encoded.ids.get(ranked.retrieval.history), len(users))
            return self._nearest(users, ranked.retrieval.table, min(k, self.items), left_out=left_out, unit=True)

        (scores, rows), manifest = self._of_users(encoded, nearest_to)
        there = np.isfinite(scores)
        items = [ranked.named(line[kept]) for line, kept in zip(rows, there, strict=True)]
        kept = [line[kept].tolist() for line, kept in zip(scores, there, strict=True)]
        return Best(kept, items, manifest)

    def _of_users[T](self, encoded: Encoded, then: Callable[[np.ndarray], T]) -> tuple[T, Manifest]:
        """What ``then`` makes of users' vectors, and of items' rows of the same version, which no delta changes."""
        while True:
            self._check_current(encoded)
            request = self._looked_up(encoded.dense, encoded.ids)
            users = self._scores(request)["user"]
            with self._rows_lock:  # a delta in between would have users of one version and items of another
                self._check_current(encoded)
                if self._loaded is request.loaded:
                    return then(users), request.loaded.manifest

    def candidate_scores(self, columns: object) -> CandidateScores:
        """Scores of the items that each row names, by a model that ranks items: what a reranker asks for.

        Args:
          columns: As of ``best``, and "candidates": by example a list of items' values, of any length.

        Returns:
          A cosine for each candidate, in their order, whether or not it is in the history; None of one that the model
          does not rank.

        Raises:
          DatasetError: If a column is missing or holds what it cannot have.
          ValueError: If the model does not rank items.
        """
        while True:
            with contextlib.suppress(OutdatedError):
                return self.candidate_scores_of(self.encoded(columns))

    def candidate_scores_of(self, encoded: Encoded) -> CandidateScores:
        """Scores of the candidates of what ``encoded`` made; errors as of ``candidate_scores``."""
        table, candidates = self._check_ranks().retrieval.table, encoded.candidates
        if candidates is None:
            raise NoCandidatesError(self.raw_columns)

        def scored(users: np.ndarray) -> list[list[float | None]]:
            rows_of = functools.partial(self._loaded.tables.rows_of, table, threads=self._threads)
            return scores_of(unit_rows(rows_of), users, candidates)

        return CandidateScores(*self._of_users(encoded, scored))

    def user_vectors(self, columns: object) -> np.ndarray:
        """(examples, dim) float32: vectors whose products with ``item_vectors`` are the scores of ``best``.

        Args:
          columns: As of ``best``.

        Raises:
          DatasetError: As of ``best``.
          ValueError: If the model does not rank items.
        """
        self._check_ranks()
        return np.asarray(self._scores(self._request(columns))["user"])

    def item_vectors(self) -> pa.Table:
        """All items that are ranked and their vectors of length one, for an index of one's own (Faiss, pgvector, …).

        Returns:
          A column "item" of values, row numbers of a table without a vocabulary, and "vector" of (dim,) float32 lists;
          the manifest's id is the schema's metadata "version". Vectors of another version say nothing of its users.

        Raises:
          ValueError: If the model does not rank items.
        """
        import pyarrow as pa

        ranked = self._check_ranks()
        with self._rows_lock:  # all of one version
            tables, manifest = self._loaded.tables, self.manifest
            rows_of = functools.partial(tables.rows_between, ranked.retrieval.table)
            begins = range(0, self.items, BLOCK)
            blocks = [of_unit_length(rows_of(begin, min(begin + BLOCK, self.items))) for begin in begins]
        kept = ranked.ranked(self.items)
        vectors = np.concatenate(blocks)[kept]
        lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        table = pa.table({"item": pa.array(ranked.named(kept)), "vector": lists})
        return table.replace_schema_metadata({"version": manifest.id})

    def _check_ranks(self) -> RankedItems:
        if self._ranked is None:
            raise ValueError("the model ranks no items; call it for probabilities")
        return self._ranked

    @property
    def items(self) -> int:
        """How many items the model ranks; 0 of one that ranks none."""
        return 0 if self._ranked is None else self._loaded.tables.rows[self._ranked.retrieval.table]

    @property
    def outputs(self) -> dict[str, Column]:
        """What an answer holds, by name: scores, by task where there are several, a number, or the best items."""
        if self.ranks:
            return {"items": Column("BYTES", 2), "scores": Column("FP32", 2)}
        numbers = self.manifest.numbers_by_label
        return {column_name(task, numbers): Column("FP32", 1) for task in self.tasks or ("",)}

    def answer(self, encoded: Encoded, k: int) -> Answer:
        """``scored_of``, or of a model that ranks items ``candidate_scores_of`` or ``best_of``."""
        if encoded.candidates is not None:
            return self.candidate_scores_of(encoded)
        return self.best_of(encoded, k) if self.ranks else self.scored_of(encoded)

    def check_answers(self) -> None:
        """Raises ValueError where the model has other outputs than a request can be answered with."""
        if not self.ranks:
            self.check_logits()

    def check_logits(self) -> None:
        """Raises ValueError where the model has other outputs than one logit an example, or one a task."""
        if self.ranks:
            raise ValueError("the model ranks items, and has no probabilities; call Model.best or candidate_scores")
        self._loaded.program.check_logits()

    def logits(self, columns: object) -> PyTree:
        """Logits, (examples,) float32, or what else the model's ``logits`` returns; see ``__call__``."""
        return self._scores(self._request(columns))

    def encode(self, columns: object) -> tuple[np.ndarray, dict[str, Ids]]:
        """Dense features, (examples, num_dense) float32, and ids by feature, of raw columns.

        Ids of tables that grow are good until the next ``apply``, which may give their rows to other keys.
        """
        return self._loaded.encoder.inputs(columns)

    def logits_of(self, dense: np.ndarray, ids: Mapping[str, Ids]) -> PyTree:
        """Logits, (examples,) float32, of dense features and rows of tables; see ``logits``.

        Args:
          dense: (examples, num_dense) float32, finite, transformed.
          ids: By feature, of all features.

        Raises:
          ValueError: If shapes or dtypes do not fit, an id is past its table, or a number is not finite; the message
            names the feature.
        """
        return self._scores(self._looked_up(dense, ids))

    def vectors(self, ids: Mapping[str, Ids]) -> dict[str, np.ndarray]:
        """Vectors by feature, as the dense part takes them: (examples, dim) float32; see ``ServedTables.vectors``."""
        with self._rows_lock:
            return self._loaded.tables.vectors(ids, threads=self._threads)

    def top_k(
        self,
        queries: np.ndarray,
        table: str,
        k: int,
        *,
        left_out: np.ndarray | None = None,
        unit: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k rows of a table with the greatest products with each query, exactly, the best first.

        Rows are read a block at a time, as they are stored (INT8 ones are widened). Lookups of other threads, and
        deltas, wait meanwhile: all rows are of one version.

        Args:
          queries: (queries, dim) float32, what the model returns for users.
          table: The table.
          k: How many rows.
          left_out: (queries, length) integers, rows that a query leaves out; negative ones are absent.
          unit: Whether rows are scaled to length one first.

        Returns:
          Scores, (queries, k) float32, and numbers of rows, (queries, k) int64; -inf and -1 where fewer are left.

        Raises:
          ValueError: If there is no such table, shapes do not fit, or a query is not finite.
        """
        with self._rows_lock:
            return self._nearest(queries, table, k, left_out=left_out, unit=unit)

    def _nearest(
        self, queries: np.ndarray, table: str, k: int, *, left_out: np.ndarray | None, unit: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """See ``top_k``; the caller holds the rows' lock."""
        tables = self._loaded.tables
        if table not in tables.rows:
            raise ValueError(f"there is no table {table!r}; there are {', '.join(sorted(tables.rows))}")
        rows, dim = tables.rows[table], self.manifest.tables[table][0].dim
        queries = np.asarray(queries, np.float32)
        if queries.ndim != 2 or queries.shape[1] != dim or not np.isfinite(queries).all():
            raise ValueError(f"queries must be finite, of shape (queries, {dim}), but are of shape {queries.shape}")
        if not 1 <= k <= rows:
            raise ValueError(f"k={k} must be between 1 and the {rows} rows of table {table!r}")
        if left_out is not None:
            left_out = np.asarray(left_out)
            if left_out.ndim != 2 or len(left_out) != len(queries) or not np.issubdtype(left_out.dtype, np.integer):
                raise ValueError(
                    f"left_out must be integers of shape ({len(queries)}, length), but is"
                    f" {left_out.dtype}{left_out.shape}"
                )
        return nearest(functools.partial(tables.rows_between, table), rows, queries, k, left_out=left_out, unit=unit)

    def apply(self, delta: str | os.PathLike[str]) -> None:
        """Takes the next delta, while other threads go on: rows, their keys and the dense part change at once.

        A delta of the same run has the same program with other parameters: nothing is compiled. Of another program the
        sizes that were compiled are compiled first, so that no request waits for that. Whatever fails, nothing has
        changed then, and the same delta may be applied again.

        Raises:
          ExportError: If it does not follow what is loaded, or is damaged.
        """
        folder = pathlib.Path(delta)
        with self._applying:
            before = self._loaded
            manifest = load_manifest(folder)
            # Before ``verify`` reads the files, so that a delta of another model is refused at once.
            check_follows(before.manifest, folder, manifest)
            verify(folder, manifest)
            change = before.tables.change(folder, manifest)
            program = LoadedProgram(folder, manifest)
            after = _Loaded(
                export=before.export,
                manifest=manifest,
                tables=change.tables,
                program=program,
                encoder=before.encoder.with_keys(self._keys(folder, manifest)),
                # Empty ones: keys and values that other parameters computed say nothing of these.
                histories=self._histories(folder, manifest, program.parameters),
            )
            after.program.warm_up(before.program.sizes)
            if after.histories is not None:
                after.histories.warm_up()
            with self._rows_lock:
                try:
                    change.write()
                    self._loaded = after
                except BaseException:  # also an interrupt
                    change.undo()
                    self._loaded = before
                    raise

    def warm_up(self) -> None:
        """Compiles the program for every size of a batch, or history, and reads the vocabularies: no request waits."""
        self._loaded.encoder.warm_up()
        if (histories := self._loaded.histories) is not None:
            histories.warm_up()
            return
        for size in self._sizes:
            ids = {}
            for feature in self.manifest.features:
                # Absent ids: only the batch's size decides which program is compiled.
                weights = np.zeros((size, 1), np.float32) if feature.weighted else None
                ids[feature.name] = Ids(values=np.full((size, 1), -1, np.int32), weights=weights)
            self.logits_of(np.zeros((size, len(self.manifest.dense_columns)), np.float32), ids)

    def _keys(self, folder: pathlib.Path, manifest: Manifest) -> dict[str, RowsOfKeys]:
        rows = {table: sum(part.rows for part in manifest.tables[table]) for table in self._growing}
        for table in self._growing:
            if keys_file(table) not in manifest.files:
                raise ExportError(
                    f"{folder} has no {keys_file(table)}, but table {table!r} grows; export the run again"
                )
        return {table: rows_of_keys(folder, table, rows[table]) for table in self._growing}

    def _histories(
        self, folder: pathlib.Path, manifest: Manifest, parameters: Mapping[str, jax.Array]
    ) -> Histories | None:
        if not self._history_cache or APPEND not in manifest.files:
            return None
        return Histories(folder, manifest, self._history_cache, self._history_counts, parameters)

    def _request(self, columns: object) -> _Request:
        if not self._growing:
            return self._looked_up(*self.encode(columns))
        with self._rows_lock:  # a delta in between could give a row to another key
            return self._look_up(*self.encode(columns))

    def _looked_up(self, dense: np.ndarray, ids: Mapping[str, Ids]) -> _Request:
        with self._rows_lock:
            return self._look_up(dense, ids)

    def _look_up(self, dense: np.ndarray, ids: Mapping[str, Ids]) -> _Request:
        """Checks a request and looks up its rows; the caller holds the rows' lock."""
        now = self._loaded
        dense = checked_dense(dense, now.manifest.dense_columns)
        count, dense_width = dense.shape
        if now.histories is not None and (asked := self._asked(now, now.histories, dense, ids)) is not None:
            return _Request(now, count, dense, {}, asked)
        numbers = np.empty((self._padded(count), now.program.width), np.float32)
        numbers[:count, :dense_width] = dense
        now.tables.fill(numbers[:count, dense_width:], ids, threads=self._threads)
        numbers[count:] = 0
        held = {}
        for name, mask in masks(now.manifest.features, ids).items():
            held[name] = np.zeros((len(numbers), mask.shape[1]), bool)
            held[name][:count] = mask
        return _Request(now, count, numbers, held)

    def _asked(
        self, now: _Loaded, histories: Histories, dense: np.ndarray, ids: Mapping[str, Ids]
    ) -> Sequence[Asked] | None:
        (feature,) = now.manifest.features
        history = checked_features(ids, now.manifest.features, now.tables.rows, len(dense))[feature.name]
        rows_of = functools.partial(now.tables.rows_of, feature.table, threads=self._threads)
        return histories.asked(dense, history.padded(feature.max_length)[0], rows_of)

    def _padded(self, count: int) -> int:
        """The examples of whole batches and of the size that holds the rest."""
        rest = count % self._sizes[-1]
        return count - rest + next(size for size in (0, *self._sizes) if size >= rest)

    def _scores(self, request: _Request) -> PyTree:
        program, size, batches = request.loaded.program, self._sizes[-1], []
        if request.asked is not None and (histories := request.loaded.histories) is not None:
            return program.joined(histories.outputs(request.asked))
        for begin in range(0, request.count, size):
            held = {name: mask[begin : begin + size] for name, mask in request.masks.items()}
            leaves = program(request.numbers[begin : begin + size], held)
            batches.append([leaf[: request.count - begin] for leaf in leaves])
        return program.joined(batches)


@overload
def predictions(outputs: np.ndarray, numbers: Mapping[str, Numbers], task: str = "") -> np.ndarray: ...
@overload
def predictions(outputs: ByTask, numbers: Mapping[str, Numbers], task: str = "") -> ByTask: ...
def predictions(outputs: ByTask, numbers: Mapping[str, Numbers], task: str = "") -> ByTask:
    """What a model says of examples: float32 probabilities of logits, or numbers.

    Args:
      outputs: An array, or a mapping of them by task.
      numbers: How outputs are numbers, by task whose label is one; under "" where there is one label.
      task: Whose outputs they are, of an array.
    """
    if isinstance(outputs, Mapping):
        return {name: predictions(own, numbers, name) for name, own in outputs.items()}
    return numbers[task].predictions(outputs) if task in numbers else probabilities(outputs)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Float32 probabilities of logits."""
    with np.errstate(over="ignore"):  # 1 / infinity is 0
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def load(
    folder: str | os.PathLike[str],
    deltas: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    *,
    check: bool = True,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    threads: int | None = None,
    history_cache: int = 0,
) -> Model:
    """Loads what ``jrec export`` wrote.

    Args:
      folder: A whole export.
      deltas: The delta, or the deltas in order, that follow it.
      check: Whether all files are read for their checksums first. Without, the files of rows (``tables/TABLE.npy``) are
        not: only that each is an array of the right shape and dtype, and no byte longer, so that rows are read as they
        are looked up. Changed bytes in such a file, or another table's file of the same shape in its place, then give
        wrong scores without an error. All other files, and deltas, are read and checked anyway.
      batch_sizes: Sizes that batches are padded to: each costs a compilation at its first use (``Model.warm_up``).
      threads: Threads of lookups; None for all cores.
      history_cache: Bytes for what HSTU or SASRec remembers of histories: a request whose history goes on from an
        earlier one's then costs what is new, not the square of its length. Its outputs are the same up to the order of
        sums. 0 keeps nothing; models whose positions change with what follows keep nothing in any case.

    Raises:
      ExportError: If a folder is no export, is damaged, is of another version, or a delta is missing in between.
      DatasetError: If the schema of an export is damaged.

    Example:
      >>> model = jrec.serving.load("exports/clicks")  # doctest: +SKIP
      >>> model({"user": ["u1", "u2"], "item": ["i7", "i9"], "price": [1.5, 20.0]})  # doctest: +SKIP
      array([0.0312, 0.271], dtype=float32)
    """
    path = pathlib.Path(folder)
    manifest = load_manifest(path)
    if manifest.follows:
        raise ExportError(f"{path} is a delta; load the export that it follows, and give this one in deltas")
    verify(path, manifest, rows=check)
    model = Model(path, manifest, batch_sizes=batch_sizes, threads=threads, history_cache=history_cache)
    for delta in folders_of(deltas):
        model.apply(delta)
    return model
