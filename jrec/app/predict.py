"""Scores of examples with or without labels: a dataset's, a raw log's, or columns in memory."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jrec.app.evaluate import RestoredRun, restore_run
from jrec.app.importance import REPEATS, SAMPLE, ImportanceOptions
from jrec.app.kept_columns import KeptColumns
from jrec.app.loaders import eval_batch_size, eval_loader
from jrec.app.models.best import Best, RankingPredictor
from jrec.app.models.predictor import Piece, Predictor
from jrec.batch import Batch
from jrec.data.blocks import EXAMPLE_WEIGHT, ShardReader
from jrec.data.encoded_columns import EncodedColumns, of_size
from jrec.data.schema import SCHEMA_FILE, DatasetError
from jrec.data.unknown import UnknownValues
from jrec.errors import ConfigError
from jrec.json_values import JsonObject
from jrec.ops.layout import layout_shown
from jrec.outputs import new_file
from jrec.prepare.encoder import Encoder
from jrec.prepare.readers.streams import InputLike, read_names
from jrec.prepare.readers.tables import column_types, is_table, read_batches
from jrec.serving.model import predictions
from jrec.shown import Shown

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.app.why import Explainer

SPLITS = ("train", "valid", "test")
SCORE_FORMATS = (".parquet", ".csv")


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

    Batches are as large as in ``jrec eval`` (the run's data.eval_batch_size): the same examples in the same
    batches have the same scores to the bit.

    Attributes:
      restored: The run, as its checkpoint has it.
    """

    def __init__(self, restored: RestoredRun):
        self.restored = restored

    def __repr__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()

    def _shown(self) -> Shown:
        run, layout = self.restored, layout_shown(self.restored.layout)
        head = f"LoadedRun of {run.folder}: model.kind {run.config.model.kind!r}, step {run.saved.step:,}"
        return Shown((head, *layout.heads), layout.rows)

    @functools.cached_property
    def _predictor(self) -> Predictor[Any]:
        return self.restored.config.model.of_kind.predictor(self.restored)

    @property
    def encoder(self) -> Encoder:
        """Gives raw values their rows, as ``predict`` or ``best`` takes them."""
        return self._predictor.encoder

    def _unknown(self) -> UnknownValues:
        schema, growing = self.restored.schema, self._predictor.growing
        unknown = UnknownValues(schema, {name: keys.rows for name, keys in growing.items()})
        for feature in schema.categorical:
            if feature.table in growing and feature.name in unknown.features:  # the dataset cannot say it, the run can
                unknown.features[feature.name].trained = growing[feature.table].vocabulary.oov_share
        return unknown

    @functools.cached_property
    def unknown(self) -> UnknownValues:
        """By feature, how many values that ``predict``, ``logits`` and ``best`` were given training did not see."""
        return self._unknown()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels where the run has several; else ()."""
        return self.restored.config.model.multi_task.tasks

    @property
    def batch_size(self) -> int:
        """Examples that are predicted at once."""
        return eval_batch_size(self.restored.config)

    def predict(self, columns: object, *, max_unknown: float | None = None) -> Any:
        """Probabilities, (examples,) float32, of raw columns; of a run with several labels a dictionary by task.

        Values that training did not see are counted in ``unknown``. Where they are many more than in training, an
        ``UnknownValuesWarning`` names some of them, once a feature.

        Args:
          columns: By name, as the raw log has them: NumPy arrays, lists, Arrow or polars columns; ragged lists for
            features of several ids (``jrec.data.Encoder.columns``). Labels and other columns are not read.
          max_unknown: The largest share of a feature's values, 0 to 1, that training may not have seen; None for any.

        Raises:
          DatasetError: If a column is missing, or a value is none that a log may have; names column, example, value.
            If more values are unknown than may be; names feature, share and some of the values.
        """
        return predictions(self.logits(columns, max_unknown=max_unknown), self.restored.config.model.numbers_by_label)

    def logits(self, columns: object, *, max_unknown: float | None = None) -> Any:
        """Logits, (examples,) float32 or a dictionary by task, of raw columns; see ``predict``.

        Raises:
          ConfigError: If the model ranks items; use ``best``.
        """
        predictor = self._predictor.at(None)  # whose k is no more than there are items
        return predictor.logits(self._of_columns(predictor, columns, max_unknown))

    def _of_columns[Outputs](
        self, predictor: Predictor[Outputs], columns: object, max_unknown: float | None
    ) -> Outputs:
        # Counted apart from earlier calls, so that ``max_unknown`` judges this one alone.
        unknown = self._unknown()
        encoded = predictor.encoder.columns(columns, unknown=unknown)
        self.unknown.take(unknown, max_unknown)
        return predictor.of_encoded(encoded, self.batch_size)

    def best(
        self, columns: object, k: int | None = None, *, max_unknown: float | None = None
    ) -> tuple[np.ndarray, list[list[str | int | None]]]:
        """The k best items of users, by a model that ranks items.

        Args:
          columns: Of a model of sequences the column of the history by name: ragged lists of raw values, oldest first,
            of which the last count. Of two towers the columns of the user's features, as the raw log has them.
          k: How many; None for 10, or all where there are fewer.
          max_unknown: As of ``predict``.

        Returns:
          Cosines, (examples, k) float32, the best first, and by example the items' values; of a table without a
          vocabulary rows. Where fewer than k items are left, -inf and None.

        Raises:
          ConfigError: If the model does not rank items, or has fewer than k.
          DatasetError: If a column is missing, or is none that a log may have, or if more values are unknown than may
            be.
        """
        predictor = self._predictor.at(k)
        piece = predictor.piece(self._of_columns(predictor, columns, max_unknown))
        assert isinstance(piece, Best)  # as ``at`` has checked
        return piece.scores, [piece.items(line).to_pylist() for line in range(piece.examples)]

    def candidate_scores(self, columns: object, *, max_unknown: float | None = None) -> list[list[float | None]]:
        """Scores of the items that each row names, by a model that ranks items: what a reranker asks for.

        Args:
          columns: As of ``best``, and "candidates": by example a list of items' values, of any length.
          max_unknown: As of ``predict``.

        Returns:
          A cosine for each candidate, in their order, whether or not it is in the history; None of one that the model
          does not rank.

        Raises:
          ConfigError: If the model does not rank items.
          DatasetError: As of ``best``, and if there are no candidates.
        """
        predictor = self._predictor.at(1)
        assert isinstance(predictor, RankingPredictor)  # as ``at`` has checked
        unknown = self._unknown()
        encoded = predictor.encoder.columns(columns, unknown=unknown)
        candidates = predictor.candidates(columns, encoded.examples, unknown)
        self.unknown.take(unknown, max_unknown)
        return predictor.candidate_scores(encoded, candidates, self.batch_size)

    def of_log(
        self,
        inputs: InputLike | Sequence[InputLike],
        *,
        k: int | None = None,
        joined: Mapping[str, str] | None = None,
        report: Callable[[str], None] = lambda message: None,
        max_unknown: float | None = None,
        why: int | None = None,
    ) -> Iterator[Piece]:
        """Predictions for a raw log of the format of the training data, in the order of its lines, in bounded memory.

        Of a model that ranks items, files need only the columns of ``best``, but for text of a model of sequences,
        which has all of the log. Where Parquet, Arrow or JSON lines files have a column "candidates" of lists, these
        items are scored, as by ``candidate_scores``.

        Args:
          inputs: As ``jrec.prepare.prepare`` takes them.
          k: Of a model that ranks items, how many of each line; 10 by default.
          joined: The paths of files that join the log, by name, where they are not where the training data had them.
          report: Takes messages for the user, at the end how many values training did not see.
          max_unknown: The largest share of a feature's values, 0 to 1, that training may not have seen; None for any.
          why: How many features to tell of each score, those on which it depends most (``why``); None for none.

        Yields:
          ``Scored``, or of a model that ranks items ``Best`` or ``CandidatePiece``.

        Raises:
          DatasetError: If the format makes examples of several lines, or a line is malformed; after the last one, if
            more values are unknown than may be.
          ConfigError: If ``k`` is given, but the model ranks no items, or fewer; if ``why`` is, but it reads fewer
            features; if either is, but files name candidates.
        """
        predictor, paths, unknown = self._predictor.at(k), read_names(inputs), self._unknown()
        if (pieces := predictor.of_candidates(paths, self.batch_size, unknown)) is None:
            explainer = None if why is None else predictor.explainer(why)
            pieces = self._predicted(predictor, self._pieces(predictor, paths, joined, report, unknown), explainer)
        elif k is not None or why is not None:
            name = "k" if k is not None else "why"
            raise ConfigError(f"{name} is of the best items, but {paths[0]} names candidates; leave {name} or them out")
        yield from pieces
        for remark in unknown.remarks():
            report(remark)
        unknown.check(max_unknown)

    def _predicted(
        self, predictor: Predictor[Any], pieces: Iterable[EncodedColumns], explainer: Explainer | None, split: str = ""
    ) -> Iterator[Piece]:
        """Predictions for examples that follow each other, and the reasons for them."""
        first = 0
        for encoded in pieces:
            outputs = predictor.of_encoded(encoded, self.batch_size)
            labels, weights = predictor.labels_of(encoded), encoded.tasks.get(EXAMPLE_WEIGHT)
            piece = predictor.piece(outputs, split=split, first=first, labels=labels, weights=weights)
            yield piece if explainer is None else explainer.explained(piece, encoded, self.batch_size)
            first += encoded.examples

    def _pieces(
        self,
        predictor: Predictor[Any],
        paths: Sequence[str],
        joined: Mapping[str, str] | None,
        report: Callable[[str], None],
        unknown: UnknownValues,
    ) -> Iterator[EncodedColumns]:
        """A raw log's examples, in its order."""
        if predictor.reads_every_parquet and all(is_table(path) for path in paths):
            return self._encoded_parquet(paths, predictor.encoder, unknown)
        reads_parquet = "schema" in self.restored.schema.provenance.get("format_options", {})  # the csv format
        if not reads_parquet and any(is_table(path) for path in paths):
            if joined:
                raise DatasetError(f"--join names {next(iter(joined))!r}, but {paths[0]} joins no files; leave it out")
            return self._encoded_parquet(paths, predictor.encoder, unknown)
        encoder = predictor.log_encoder
        return encoder.stream(paths, batch_size=self.batch_size, joined=joined, report=report, unknown=unknown)

    def kept(self, inputs: InputLike | Sequence[InputLike], names: Sequence[str]) -> KeptColumns:
        """Columns of a raw log, to be written beside its predictions (``write_pieces``); inputs as of ``of_log``.

        Raises:
          DatasetError: If an input lacks one of them, or can be read only once.
        """
        return KeptColumns(read_names(inputs), names, self._predictor.log_encoder.dialect)

    def of_dataset(
        self, splits: Sequence[str] = (), *, k: int | None = None, why: int | None = None
    ) -> Iterator[Piece]:
        """Predictions for the dataset's examples, in their order.

        Args:
          splits: Which; () for all that it has.
          k: As of ``of_log``, as what it yields.
          why: As of ``of_log``. A feature that is left out is what the dataset's vocabularies have for none.

        Raises:
          DatasetError: If it has no such split; if ``why`` is given, but it has no vocabularies.
          ConfigError: As ``of_log``.
        """
        predictor = self._predictor.at(k)
        if why is not None:
            explainer = predictor.explainer(why)
            for split in self._splits(splits):
                yield from self._predicted(predictor, self._stored(split), explainer, split)
            return
        for split, first, batch in self._batches(splits):
            labels = predictor.labels_of_batch(batch)
            yield predictor.piece(predictor.of_batch(batch), split=split, first=first, labels=labels)

    def importance(
        self,
        split: str = "test",
        *,
        repeats: int = REPEATS,
        groups: Sequence[Sequence[str]] = (),
        sample: int = SAMPLE,
    ) -> JsonObject:
        """By how much the run scores a split of its dataset worse when a feature's values go to other examples.

        Args:
          split: "train", "valid" or "test".
          repeats: Permutations of each feature.
          groups: Features that are permuted together, and not each by itself.
          sample: The most examples to score, a random sample of the split; 0 for all.

        Returns:
          "metrics" of the values as they are, and "features", the most important first; see
          ``jrec.app.importance.feature_importance``, which also says what is raised.
        """
        options = ImportanceOptions(repeats=repeats, groups=tuple(map(tuple, groups)), sample=sample)
        return self.restored.importance(split, options)

    def why(self, columns: object, k: int = 3) -> Any:
        """The ``k`` features on which each score of raw columns depends most: by example pairs of name and change.

        A change is the probability less what it is if the feature says nothing, and the others stay: a number is then
        training's mean or what the schema's ``missing`` says, a value a missing one, a list empty. Of a model that
        ranks items the score is the best item's cosine, and of a history its items are left out, one by one:
        "HISTORY=ITEM".

        Args:
          columns: As of ``predict``, whose scores these are.
          k: How many.

        Returns:
          A list of ``k`` (name, change) an example, the greatest change first, fewer where a user has fewer; of a run
          with several labels a dictionary of them by task.

        Raises:
          ConfigError: If the model reads fewer features.
          DatasetError: As ``predict``.
        """
        return self._predictor.explainer(k).of_columns(columns, self.batch_size)

    def nothing(self, *, why: int | None = None) -> Piece:
        """A piece without examples; ``why`` as of ``of_log``."""
        predictor = self._predictor
        piece = predictor.piece(predictor.nothing())
        return piece if why is None else predictor.explainer(why).explained(piece, None, self.batch_size)

    def _splits(self, splits: Sequence[str]) -> Sequence[str]:
        """The splits of the dataset to predict, of () all that it has."""
        run = self.restored
        there = run.schema.with_examples(SPLITS)
        if missing := [name for name in splits if name not in there]:
            raise DatasetError(
                f"{run.config.data.path} has no examples in split {missing[0]!r}, only in {', '.join(there)}"
            )
        return splits or there

    def _stored(self, split: str) -> Iterator[EncodedColumns]:
        """The examples of a split in the batches of ``_batches``, before they are packed."""
        run = self.restored
        readers = (ShardReader(run.config.data.path, shard) for shard in run.schema.splits[split].shards)
        blocks = (reader.read(block) for reader in readers for block in range(len(reader)))
        return of_size((EncodedColumns.of_block(block, run.schema) for block in blocks), self.batch_size)

    def _batches(self, splits: Sequence[str]) -> Iterator[tuple[str, int, Batch]]:
        """The dataset's batches, each with its split and the number of its first example there."""
        run = self.restored
        for split in self._splits(splits):
            first = 0
            growing = self._predictor.growing
            with eval_loader(run.config, run.schema, run.layout, split, growing=growing, weighted=False) as loader:
                for batch in loader:
                    yield split, first, batch
                    first += int(batch.mask.sum())

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


def check_score_file(path: pathlib.Path) -> None:
    """Refuses a file of scores that is neither Parquet nor CSV.

    Raises:
      ConfigError: If the path ends otherwise.
    """
    if path.suffix not in SCORE_FORMATS:
        raise ConfigError(
            f"--out {path} ends in {path.suffix or 'nothing'}; scores are written to {' or '.join(SCORE_FORMATS)}"
        )


def write_pieces(
    path: pathlib.Path,
    pieces: Iterable[Piece],
    nothing: Piece,
    *,
    splits: bool,
    overwrite: bool = False,
    kept: KeptColumns | None = None,
) -> int:
    """Writes predictions as they come to a Parquet or CSV file, which appears when it is whole.

    Columns: split (of a dataset's examples), row (an example's number, from 0), and the columns that the pieces have.

    Args:
      path: The file, whose ending says the format.
      pieces: The predictions.
      nothing: A piece without examples, for a file without lines.
      splits: Whether the examples are of a dataset's splits.
      overwrite: Whether a file there is replaced.
      kept: Columns of the log to write after row; None for none.

    Returns:
      How many lines there are.

    Raises:
      ConfigError: If the ending is another.
      OutputError: If the file may not or cannot be written.
      DatasetError: If ``kept`` has not as many lines as there are predictions.
    """
    import pyarrow.csv
    import pyarrow.parquet

    def table_of(piece: Piece) -> pa.Table:
        table = piece.table(splits=splits, csv=csv)
        return table if kept is None else kept.beside(table, piece)

    check_score_file(path)
    count, csv, first = 0, path.suffix == ".csv", iter(pieces)
    with new_file(path, overwrite=overwrite) as partial:
        # The first piece says which columns there are; of no line at all ``nothing`` has the same.
        table = table_of(next(first, nothing))
        if csv:
            writer = pyarrow.csv.CSVWriter(partial, table.schema)
        else:
            writer = pyarrow.parquet.ParquetWriter(partial, table.schema, write_page_checksum=True)
        with writer:
            for one in itertools.chain([table], map(table_of, first)):
                writer.write_table(one)
                count += len(one)
        # Within ``new_file``: where lines and predictions do not match, no file appears.
        if kept is not None:
            kept.finish()
    return count


def is_dataset(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a dataset's folder."""
    return (pathlib.Path(path) / SCHEMA_FILE).is_file()
