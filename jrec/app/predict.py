"""Scores of examples with or without labels: a dataset's, a raw log's, or columns in memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrec.app.evaluate import RestoredRun, restore_run
from jrec.app.loaders import eval_loader, ranking_packer
from jrec.app.models.model_schema import item_table, request_schema
from jrec.app.models.next_items import SEEN
from jrec.app.models.rank_items import ItemRanker
from jrec.app.report.metrics import check_finite
from jrec.batch import Batch
from jrec.data.dataset_packer import dataset_packer, pack_encoded
from jrec.data.encoded_columns import EncodedColumns
from jrec.data.growing import StoredKeys
from jrec.data.packers import AnyPacker
from jrec.data.schema import SCHEMA_FILE, DatasetError
from jrec.data.unknown import UnknownValues, UnknownValuesWarning
from jrec.data.vocabulary_file import table_values
from jrec.errors import ConfigError
from jrec.outputs import new_file
from jrec.prepare.encoder import Encoder
from jrec.prepare.readers.streams import InputLike, read_names
from jrec.prepare.readers.tables import column_types, is_table, read_batches
from jrec.serving.model import probabilities

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = ("train", "valid", "test")
SCORE_FORMATS = (".parquet", ".csv")
ByTask = np.ndarray | Mapping[str, np.ndarray]
"""Numbers of examples, (n,) float32; by task where a run has several labels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """The scores of some examples that follow each other.

    Attributes:
      split: Of a dataset, the split that they are in; "" otherwise.
      first: The number of the first of them, from 0: in its split, or in the log.
      logits: (n,) float32, by task where there are several labels.
      labels: Of the same form, or None where the examples have none; of several labels -1 is one that is not known.
    """

    split: str
    first: int
    logits: ByTask
    labels: ByTask | None

    @property
    def examples(self) -> int:
        """How many there are."""
        return len(next(iter(self.logits.values())) if isinstance(self.logits, Mapping) else self.logits)

    @property
    def probabilities(self) -> ByTask:
        """(n,) float32, by task where there are several labels."""
        return probabilities(self.logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The best items for some examples that follow each other.

    Attributes:
      split, first: As of ``Scored``.
      scores: (n, k) float32, the best first; -inf where fewer items are left.
      rows: (n, k) integers, the items' rows; -1 there.
    """

    split: str
    first: int
    scores: np.ndarray
    rows: np.ndarray

    @property
    def examples(self) -> int:
        """How many there are."""
        return len(self.rows)


def load_run(
    checkpoint: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    devices: int = 1,
    plan: str = "",
) -> LoadedRun:
    """Loads a trained run for predictions.

    Args:
      checkpoint: A run folder (its best checkpoint where it keeps one, else the latest), or one checkpoint in it.
      data: A dataset whose rows mean the same as the training data's, if that has moved; its vocabularies are used.
      devices: How many devices predict, however many trained.
      plan: The file of a plan for these devices; "" for none.

    Raises:
      CheckpointError: If there is no such checkpoint, or its model is for a dataset whose rows mean other values.
      DatasetError: If the dataset cannot be used.

    Example:
      >>> run = jrec.load_run("runs/clicks")  # doctest: +SKIP
      >>> run.predict({"user": ["u17"], "item": ["i2"], "price": [3.5]})  # doctest: +SKIP
      array([0.0312], dtype=float32)
    """
    return LoadedRun(restore_run(checkpoint, data, devices=devices, plan=plan))


class LoadedRun:
    """A trained run that predicts; ``jrec.load_run`` makes it. With several processes each makes the same calls.

    Batches are as large as those of ``jrec eval``, data.eval_batch_size of the run: the same examples in the same
    batches have the same scores to the bit.

    Attributes:
      restored: The run, as its checkpoint has it.
    """

    def __init__(self, restored: RestoredRun):
        self.restored = restored
        self._warned = set[str]()

    @functools.cached_property
    def encoder(self) -> Encoder:
        """Gives raw values their rows."""
        return Encoder(self.restored.schema)

    def _unknown(self) -> UnknownValues:
        growing = {name: own.rows for name, own in self._growing.items()}
        return UnknownValues(self.restored.schema, growing)

    @functools.cached_property
    def unknown(self) -> UnknownValues:
        """By feature, how many values that ``predict``, ``logits`` and ``best`` were given training did not see."""
        return self._unknown()

    @functools.cached_property
    def _packer(self) -> AnyPacker:
        run = self.restored
        if run.config.model.ranks:
            return ranking_packer(run.config, run.schema, run.layout, training=False)
        options: dict[str, Any] = {"on_bad_id": run.config.data.on_bad_id, "growing": self._growing}
        return dataset_packer(run.config.data.path, run.schema, run.layout, **options)

    @functools.cached_property
    def _growing(self) -> Mapping[str, StoredKeys]:
        """The rows that keys of growing tables have, by table."""
        return self.restored.run.growing_tables.rows_of_keys()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels where the run has several; else ()."""
        return self.restored.config.model.multi_task.tasks

    @property
    def batch_size(self) -> int:
        """Examples that are predicted at once."""
        config = self.restored.config
        multiple = max(1, config.mesh.devices)
        return -(-config.data.eval_batch_size // multiple) * multiple

    def predict(self, columns: object) -> Any:
        """Probabilities, (examples,) float32, of raw columns; of a run with several labels a dictionary by task.

        Args:
          columns: By name, as the raw log has them: NumPy arrays, lists, Arrow or polars columns; ragged lists for
            features of several ids (``jrec.data.Encoder.columns``). Labels and other columns are not read.

        Raises:
          DatasetError: If a column is missing, or a value is none that a log may have; names column, example, value.
        """
        return probabilities(self.logits(columns))

    def logits(self, columns: object) -> Any:
        """Logits, (examples,) float32 or a dictionary by task, of raw columns; see ``predict``.

        Raises:
          ConfigError: If the model ranks items; use ``best``.
        """
        self._check_clicks()
        encoded = self.encoder.columns(columns, unknown=self.unknown)
        self._warn()
        return self._logits(encoded)

    def _warn(self) -> None:
        """Warns, once a feature, where many more values are unknown than in training."""
        for name, counts in self.unknown.features.items():
            if counts.is_much and name not in self._warned:
                self._warned.add(name)
                warnings.warn(counts.remark(name), UnknownValuesWarning, stacklevel=4)

    def best(self, columns: object, k: int = 10) -> tuple[np.ndarray, list[list[Any]]]:
        """The k best items of users, by a model that ranks items.

        Args:
          columns: Of a model of sequences the column of the history by name: ragged lists of raw values, oldest first,
            of which the last count. Of two towers the columns of the user's features, as the raw log has them.
          k: How many.

        Returns:
          Cosines, (examples, k) float32, the best first, and by example the items' values; of a table without a
          vocabulary rows. Where fewer than k items are left, -inf and None.

        Raises:
          ConfigError: If the model does not rank items, or has fewer than k.
          DatasetError: If a column is missing, or is none that a log may have.
        """
        ranker = self._checked_ranker(k)
        encoded = self._request_encoder.columns(columns, unknown=self.unknown)
        self._warn()
        scores, rows = self._best_of(ranker, encoded, k)
        return scores, [self.items(line).to_pylist() for line in rows]

    def items(self, rows: np.ndarray) -> pa.Array:
        """The values of rows of the items' table, (n,) integers, null for -1; rows where it has no vocabulary."""
        import pyarrow as pa

        chosen = pa.array(rows, mask=rows < 0)
        return chosen if self._values is None else self._values.take(chosen)

    @functools.cached_property
    def _values(self) -> pa.Array | None:
        config, schema = self.restored.config, self.restored.schema
        return table_values(pathlib.Path(config.data.path), schema, item_table(config.model, schema))

    @functools.cached_property
    def _ranker(self) -> ItemRanker:
        run = self.restored
        return ItemRanker(run.run, run.config, run.schema, run.catalogue)

    @functools.cached_property
    def _request_encoder(self) -> Encoder:
        return Encoder(request_schema(self.restored.config.model, self.restored.schema))

    def _check_clicks(self) -> None:
        if (model := self.restored.config.model).ranks:
            raise ConfigError(
                f"the run's model.kind is {model.kind!r}, which has no probabilities; ask for its best items"
            )

    def _checked_ranker(self, k: int) -> ItemRanker:
        model = self.restored.config.model
        if not model.ranks:
            raise ConfigError(f"the run's model.kind is {model.kind!r}, which ranks no items; ask for its scores")
        if not 1 <= k <= (most := self._ranker.candidates):
            raise ConfigError(f"k is {k}, but must be between 1 and the {most:,} items that the run ranks")
        return self._ranker

    def of_log(
        self,
        inputs: InputLike | Sequence[InputLike],
        *,
        joined: Mapping[str, str] | None = None,
        report: Callable[[str], None] = lambda message: None,
        max_unknown: float | None = None,
    ) -> Iterator[Scored]:
        """Scores of a raw log of the format of the training data, in the order of its lines and in bounded memory.

        Args:
          inputs: As ``jrec.prepare.prepare`` takes them.
          joined: The paths of files that join the log, by name, where they are not those of the training data.
          report: Takes messages for the user, at the end how many values training did not see.
          max_unknown: The largest share of a feature's values, 0 to 1, that training may not have seen; None for any.

        Raises:
          DatasetError: If the format makes examples of several lines, or a line is malformed; after the last score, if
            more values are unknown than may be.
          ConfigError: If the model ranks items; use ``best_of_log``.
        """
        self._check_clicks()
        first = 0
        for encoded in self._encoded(inputs, joined, report, max_unknown):
            labels: ByTask | None = encoded.labels
            if self.tasks and encoded.labels is not None:
                labels = {self.tasks[0]: encoded.labels, **encoded.tasks}
            yield Scored(split="", first=first, logits=self._logits(encoded), labels=labels)
            first += encoded.examples

    def best_of_log(
        self,
        inputs: InputLike | Sequence[InputLike],
        k: int,
        *,
        joined: Mapping[str, str] | None = None,
        report: Callable[[str], None] = lambda message: None,
        max_unknown: float | None = None,
    ) -> Iterator[Best]:
        """The k best items of each line of a raw log; arguments and errors as of ``of_log``.

        Files need the columns of ``best`` alone, but for text of a model of sequences, which has all of the log.
        """
        ranker, first = self._checked_ranker(k), 0
        for encoded in self._encoded(inputs, joined, report, max_unknown):
            scores, rows = self._best_of(ranker, encoded, k)
            yield Best(split="", first=first, scores=scores, rows=rows)
            first += encoded.examples

    def _encoded(
        self,
        inputs: InputLike | Sequence[InputLike],
        joined: Mapping[str, str] | None,
        report: Callable[[str], None],
        max_unknown: float | None,
    ) -> Iterator[EncodedColumns]:
        """A raw log's examples, in its order, and what is to be said of their values."""
        unknown = self._unknown()
        yield from self._pieces(inputs, joined, report, unknown)
        for remark in unknown.remarks():
            report(remark)
        unknown.check(max_unknown)

    def _pieces(
        self,
        inputs: InputLike | Sequence[InputLike],
        joined: Mapping[str, str] | None,
        report: Callable[[str], None],
        unknown: UnknownValues,
    ) -> Iterator[EncodedColumns]:
        paths = read_names(inputs)
        encoder = self.encoder
        if self.restored.config.model.ranks:
            if all(is_table(path) for path in paths):
                return self._encoded_parquet(paths, self._request_encoder, unknown)
            encoder = self._request_encoder if self._request_encoder.streams else encoder
        reads_parquet = "schema" in self.restored.schema.provenance.get("format_options", {})  # the csv format
        if not reads_parquet and any(is_table(path) for path in paths):
            if joined:
                raise DatasetError(f"--join names {next(iter(joined))!r}, but {paths[0]} joins no files; leave it out")
            return self._encoded_parquet(paths, self.encoder, unknown)
        return encoder.stream(paths, batch_size=self.batch_size, joined=joined, report=report, unknown=unknown)

    def of_dataset(self, splits: Sequence[str] = ()) -> Iterator[Scored]:
        """Scores of the dataset's examples, in their order.

        Args:
          splits: Which; () for all that it has.

        Raises:
          DatasetError: If it has no such split.
          ConfigError: If the model ranks items; use ``best_of_dataset``.
        """
        self._check_clicks()
        labelled = self.restored.schema.labels
        for split, first, batch in self._batches(splits):
            count = int(batch.mask.sum())
            labels: ByTask | None = np.asarray(batch.labels)[:count] if labelled else None
            if self.tasks and labels is not None:
                others = {task: np.asarray(batch.extras[task])[:count] for task in self.tasks[1:]}
                labels = {self.tasks[0]: np.asarray(labels), **others}
            yield Scored(split=split, first=first, logits=self._of_batch(batch, count), labels=labels)

    def best_of_dataset(self, k: int, splits: Sequence[str] = ()) -> Iterator[Best]:
        """The k best items of each of the dataset's examples; ``splits`` and errors as of ``of_dataset``."""
        ranker = self._checked_ranker(k)
        for split, first, batch in self._batches(splits):
            scores, rows = self._best_of_batch(ranker, batch, k)
            yield Best(split=split, first=first, scores=scores, rows=rows)

    def _batches(self, splits: Sequence[str]) -> Iterator[tuple[str, int, Batch]]:
        """The dataset's batches, each with its split and the number of its first example there."""
        run = self.restored
        there = [name for name in SPLITS if name in run.schema.splits and run.schema.splits[name].examples]
        if missing := [name for name in splits if name not in there]:
            raise DatasetError(
                f"{run.config.data.path} has no examples in split {missing[0]!r}, only in {', '.join(there)}"
            )
        for split in splits or there:
            first = 0
            with eval_loader(run.config, run.schema, run.layout, split, growing=self._growing) as loader:
                for batch in loader:
                    yield split, first, batch
                    first += int(batch.mask.sum())

    def _best_of(self, ranker: ItemRanker, encoded: EncodedColumns, k: int) -> tuple[np.ndarray, np.ndarray]:
        found = [(np.zeros((0, k), np.float32), np.zeros((0, k), np.int32))]
        for begin in range(0, encoded.examples, self.batch_size):
            piece = encoded.cut(begin, min(begin + self.batch_size, encoded.examples))
            prepared = self._packer.prepare(piece.by_name())
            found.append(self._best_of_batch(ranker, self._packer.pack(prepared, self.batch_size), k))
        scores, rows = zip(*found, strict=True)
        return np.concatenate(scores), np.concatenate(rows)

    def _best_of_batch(self, ranker: ItemRanker, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray]:
        outputs: Any = self.restored.run.predictions.of_batch(batch)
        users, count = np.asarray(jax.device_get(outputs["user"])), int(batch.mask.sum())
        check_finite(users[:count])
        scores, rows = ranker.best(users, np.asarray(batch.extras[SEEN]), k)
        return scores[:count], rows[:count]

    def _encoded_parquet(
        self, paths: Sequence[str], encoder: Encoder, unknown: UnknownValues
    ) -> Iterator[EncodedColumns]:
        """The columns of Parquet files of a format that is text otherwise, without labels."""
        for path in paths:
            types = column_types(path)
            wanted = [name for name in encoder.raw_columns if name in types]
            for batch in read_batches(path, wanted, self.batch_size):
                try:
                    yield encoder.columns(batch, unknown=unknown)
                except (DatasetError, ValueError) as error:  # a ValueError is about a column's type
                    raise DatasetError(f"{path}: {error}") from error

    def _logits(self, encoded: EncodedColumns) -> ByTask:
        none = np.zeros(0, np.float32)
        parts: list[Any] = [dict.fromkeys(self.tasks, none) if self.tasks else none]
        for begin in range(0, encoded.examples, self.batch_size):
            piece = encoded.cut(begin, min(begin + self.batch_size, encoded.examples))
            parts.append(self._of_batch(pack_encoded(self._packer, piece, self.batch_size), piece.examples))
        if self.tasks:
            return {task: np.concatenate([part[task] for part in parts]) for task in self.tasks}
        return np.concatenate(parts)

    def _of_batch(self, batch: Batch, count: int) -> Any:
        found: Any = jax.device_get(self.restored.run.predictions.of_batch(batch))
        logits = jax.tree.map(lambda array: np.asarray(array)[:count], found)
        for one in jax.tree.leaves(logits):
            check_finite(one)
        return logits


def check_score_file(path: pathlib.Path) -> None:
    """Refuses a file of scores that is neither Parquet nor CSV.

    Raises:
      ConfigError: If the path ends otherwise.
    """
    if path.suffix not in SCORE_FORMATS:
        raise ConfigError(
            f"--out {path} ends in {path.suffix or 'nothing'}; scores are written to {' or '.join(SCORE_FORMATS)}"
        )


def write_best(
    path: pathlib.Path,
    pieces: Iterable[Best],
    items: Callable[[np.ndarray], pa.Array],
    *,
    splits: bool,
    overwrite: bool = False,
) -> int:
    """Writes the best items of examples as ``write_scores`` does scores, one a line.

    Columns: split (of a dataset's examples), row (an example's number, from 0), rank (from 1), item, score.

    Args:
      path: The file, whose ending says the format.
      pieces: The best items.
      items: The values of rows (``LoadedRun.items``).
      splits: Whether the examples are of a dataset's splits.
      overwrite: Whether a file there is replaced.

    Returns:
      How many lines there are.

    Raises:
      ConfigError: If the ending is another.
      OutputError: If the file may not or cannot be written.
    """
    csv = path.suffix == ".csv"
    nothing = Best(split="", first=0, scores=np.zeros((0, 1), np.float32), rows=np.zeros((0, 1), np.int32))
    tables = (_best_table(one, items, splits=splits, csv=csv) for one in pieces)
    return _write(path, tables, lambda: _best_table(nothing, items, splits=splits, csv=csv), overwrite=overwrite)


def _best_table(best: Best, items: Callable[[np.ndarray], pa.Array], *, splits: bool, csv: bool) -> pa.Table:
    import pyarrow as pa

    there = best.rows >= 0
    line, rank = np.nonzero(there)
    columns: dict[str, Any] = {"split": _split_column(best.split, len(line), csv=csv)} if splits else {}
    columns |= {"row": line + best.first, "rank": (rank + 1).astype(np.int32), "item": items(best.rows[there])}
    return pa.table({**columns, "score": best.scores[there]})


def write_scores(
    path: pathlib.Path,
    pieces: Iterable[Scored],
    *,
    splits: bool,
    tasks: Sequence[str] = (),
    overwrite: bool = False,
) -> int:
    """Writes scores as they come to a Parquet or CSV file, which appears when it is whole.

    Columns: split (of a dataset's examples), row (an example's number, from 0), label (where known), score, logit; of
    several tasks label_TASK (null where one is not known), score_TASK and logit_TASK of each.

    Args:
      path: The file, whose ending says the format.
      pieces: The scores.
      splits: Whether the examples are of a dataset's splits.
      tasks: The names of the labels where there are several.
      overwrite: Whether a file there is replaced.

    Returns:
      How many scores there are.

    Raises:
      ConfigError: If the ending is another.
      OutputError: If the file may not or cannot be written.
    """

    def nothing() -> pa.Table:
        import pyarrow as pa

        fields = [("split", pa.string())] if splits else []
        fields += [("row", pa.int64())]
        fields += [(f"{what}{end}", pa.float32()) for what in ("score", "logit") for end in _ends(tasks)]
        return pa.schema(fields).empty_table()

    tables = (_table(one, splits=splits, csv=path.suffix == ".csv") for one in pieces)
    return _write(path, tables, nothing, overwrite=overwrite)


def _write(path: pathlib.Path, tables: Iterator[pa.Table], nothing: Callable[[], pa.Table], *, overwrite: bool) -> int:
    """Writes tables of one schema, or ``nothing()`` where there are none; returns their lines."""
    import pyarrow.csv
    import pyarrow.parquet

    check_score_file(path)
    count = 0
    with new_file(path, overwrite=overwrite) as partial:
        if (table := next(tables, None)) is None:
            table = nothing()
        if path.suffix == ".csv":
            writer = pyarrow.csv.CSVWriter(partial, table.schema)
        else:
            writer = pyarrow.parquet.ParquetWriter(partial, table.schema, write_page_checksum=True)
        with writer:
            for one in itertools.chain([table], tables):
                writer.write_table(one)
                count += len(one)
    return count


def _table(scored: Scored, *, splits: bool, csv: bool) -> pa.Table:
    import pyarrow as pa

    size, columns = scored.examples, dict[str, Any]()
    if splits:
        columns["split"] = _split_column(scored.split, size, csv=csv)
    columns["row"] = np.arange(scored.first, scored.first + size, dtype=np.int64)
    for what, numbers in (("label", scored.labels), ("score", scored.probabilities), ("logit", scored.logits)):
        if isinstance(numbers, Mapping):
            for end, own in zip(_ends(tuple(numbers)), numbers.values(), strict=True):
                columns[what + end] = pa.array(own, mask=own < 0) if what == "label" else own
        elif numbers is not None:  # all examples of an input have labels, or none
            columns[what] = numbers
    return pa.table(columns)


def _ends(tasks: Sequence[str]) -> list[str]:
    """What the names of columns of labels, scores and logits end in."""
    return [f"_{task}" for task in tasks] or [""]


def _split_column(split: str, size: int, *, csv: bool) -> pa.Array:
    import pyarrow as pa

    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(size, np.int8)), pa.array([split]))
    return column.cast(pa.string()) if csv else column


def is_dataset(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a dataset's folder."""
    return (pathlib.Path(path) / SCHEMA_FILE).is_file()
