"""Scores of examples with or without labels: a dataset's, a raw log's, or columns in memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrec.batch import Batch
from jrec.data.dataset_packer import dataset_packer, pack_encoded
from jrec.data.encoder import EncodedColumns, Encoder
from jrec.data.growing import StoredKeys
from jrec.data.packing import Packer
from jrec.data.readers.streams import InputLike, read_names
from jrec.data.readers.tables import column_types, is_table, read_batches
from jrec.data.schema import SCHEMA_FILE, DatasetError
from jrec.errors import ConfigError
from jrec.outputs import new_file
from jrec.train.evaluate import RestoredRun, restore_run
from jrec.train.loaders import eval_loader
from jrec.train.report.metrics import check_finite

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = ("train", "valid", "test")
SCORE_FORMATS = (".parquet", ".csv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """The scores of some examples that follow each other.

    Attributes:
      split: Of a dataset, the split that they are in; "" otherwise.
      first: The number of the first of them, from 0: in its split, or in the log.
      logits: (n,) float32.
      labels: (n,) float32, or None where the examples have none.
    """

    split: str
    first: int
    logits: np.ndarray
    labels: np.ndarray | None

    @property
    def probabilities(self) -> np.ndarray:
        """(n,) float32."""
        return probabilities(self.logits)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """The probabilities of logits, float32."""
    return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


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

    @functools.cached_property
    def encoder(self) -> Encoder:
        """Gives raw values their rows."""
        return Encoder(self.restored.schema)

    @functools.cached_property
    def _packer(self) -> Packer:
        run = self.restored
        options: dict[str, Any] = {"on_bad_id": run.config.data.on_bad_id, "growing": self._growing}
        return dataset_packer(run.config.data.path, run.schema, run.layout, **options)

    @functools.cached_property
    def _growing(self) -> Mapping[str, StoredKeys]:
        """The rows that keys of growing tables have, by table."""
        return self.restored.run.growing_tables.rows_of_keys()

    @property
    def batch_size(self) -> int:
        """Examples that are predicted at once."""
        config = self.restored.config
        multiple = max(1, config.mesh.devices)
        return -(-config.data.eval_batch_size // multiple) * multiple

    def predict(self, columns: object) -> np.ndarray:
        """Probabilities, (examples,) float32, of raw columns.

        Args:
          columns: By name, as the raw log has them: NumPy arrays, lists, Arrow or polars columns; ragged lists for
            features of several ids (``jrec.data.Encoder.columns``). Labels and other columns are not read.

        Raises:
          DatasetError: If a column is missing, or a value is none that a log may have; names column, example, value.
        """
        return probabilities(self.logits(columns))

    def logits(self, columns: object) -> np.ndarray:
        """Logits, (examples,) float32, of raw columns; see ``predict``."""
        return self._logits(self.encoder.columns(columns))

    def of_log(
        self,
        inputs: InputLike | Sequence[InputLike],
        *,
        joined: Mapping[str, str] | None = None,
        report: Callable[[str], None] = lambda message: None,
    ) -> Iterator[Scored]:
        """Scores of a raw log of the format of the training data, in the order of its lines and in bounded memory.

        Args:
          inputs: As ``jrec.data.prepare`` takes them.
          joined: The paths of files that join the log, by name, where they are not those of the training data.
          report: Takes messages for the user.

        Raises:
          DatasetError: If the format makes examples of several lines, or a line is malformed.
        """
        paths, first = read_names(inputs), 0
        reads_parquet = "schema" in self.restored.schema.provenance.get("format_options", {})  # the csv format
        if not reads_parquet and any(is_table(path) for path in paths):
            if joined:
                raise DatasetError(f"--join names {next(iter(joined))!r}, but {paths[0]} joins no files; leave it out")
            pieces = self._encoded_parquet(paths)
        else:
            pieces = self.encoder.stream(paths, batch_size=self.batch_size, joined=joined, report=report)
        for encoded in pieces:
            yield Scored(split="", first=first, logits=self._logits(encoded), labels=encoded.labels)
            first += encoded.examples

    def of_dataset(self, splits: Sequence[str] = ()) -> Iterator[Scored]:
        """Scores of the dataset's examples, in their order.

        Args:
          splits: Which; () for all that it has.

        Raises:
          DatasetError: If it has no such split.
        """
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
                    count = int(batch.mask.sum())
                    logits = self._of_batch(batch, count)
                    labels = np.asarray(batch.labels)[:count] if run.schema.labels else None
                    yield Scored(split=split, first=first, logits=logits, labels=labels)
                    first += count

    def _encoded_parquet(self, paths: Sequence[str]) -> Iterator[EncodedColumns]:
        """The columns of Parquet files of a format that is text otherwise, without labels."""
        for path in paths:
            types = column_types(path)
            wanted = [name for name in self.encoder.raw_columns if name in types]
            for batch in read_batches(path, wanted, self.batch_size):
                try:
                    yield self.encoder.columns(batch)
                except (DatasetError, ValueError) as error:  # a ValueError is about a column's type
                    raise DatasetError(f"{path}: {error}") from error

    def _logits(self, encoded: EncodedColumns) -> np.ndarray:
        parts = [np.zeros(0, np.float32)]
        for begin in range(0, encoded.examples, self.batch_size):
            piece = encoded.cut(begin, min(begin + self.batch_size, encoded.examples))
            parts.append(self._of_batch(pack_encoded(self._packer, piece, self.batch_size), piece.examples))
        return np.concatenate(parts)

    def _of_batch(self, batch: Batch, count: int) -> np.ndarray:
        logits = np.asarray(jax.device_get(self.restored.run.predictions.of_batch(batch)))[:count]
        check_finite(logits)
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


def write_scores(path: pathlib.Path, pieces: Iterable[Scored], *, splits: bool, overwrite: bool = False) -> int:
    """Writes scores as they come to a Parquet or CSV file, which appears when it is whole.

    Columns: split (of a dataset's examples), row (an example's number, from 0), label (where known), score, logit.

    Args:
      path: The file, whose ending says the format.
      pieces: The scores.
      splits: Whether the examples are of a dataset's splits.
      overwrite: Whether a file there is replaced.

    Returns:
      How many scores there are.

    Raises:
      ConfigError: If the ending is another.
      OutputError: If the file may not or cannot be written.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    check_score_file(path)
    count, tables = 0, (_table(one, splits=splits, csv=path.suffix == ".csv") for one in pieces)
    with new_file(path, overwrite=overwrite) as partial:
        if (table := next(tables, None)) is None:
            fields = [("split", pa.string())] if splits else []
            fields += [("row", pa.int64()), ("score", pa.float32()), ("logit", pa.float32())]
            table = pa.schema(fields).empty_table()
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

    size, columns = scored.logits.size, dict[str, Any]()
    if splits:
        split = pa.DictionaryArray.from_arrays(pa.array(np.zeros(size, np.int8)), pa.array([scored.split]))
        columns["split"] = split.cast(pa.string()) if csv else split
    columns["row"] = np.arange(scored.first, scored.first + size, dtype=np.int64)
    if scored.labels is not None:  # all examples of an input have labels, or none
        columns["label"] = scored.labels
    return pa.table({**columns, "score": scored.probabilities, "logit": scored.logits})


def is_dataset(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a dataset's folder."""
    return (pathlib.Path(path) / SCHEMA_FILE).is_file()
