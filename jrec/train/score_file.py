"""Scores on disk, as Parquet or CSV, written as they come; the file appears when it is whole."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrec.errors import ConfigError
from jrec.outputs import new_file
from jrec.train.predict import Scored

FORMATS = (".parquet", ".csv")


@contextlib.contextmanager
def score_file(path: pathlib.Path, *, splits: bool, overwrite: bool) -> Iterator[ScoreFile]:
    """A file of scores that appears when the block ends without an exception.

    Args:
      path: Where; its ending says the format.
      splits: Whether the examples are of a dataset's splits.
      overwrite: Whether a file there is replaced.

    Raises:
      ConfigError: If the ending is another.
      OutputError: If the file may not or cannot be written.
    """
    check_format(path)
    with new_file(path, overwrite=overwrite) as partial:
        file = ScoreFile(partial, path.suffix, splits=splits)
        try:
            yield file
        finally:
            file.close()


def check_format(path: pathlib.Path) -> None:
    """Refuses a file of another ending; see ``score_file``."""
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"--out {path} ends in {path.suffix or 'nothing'}; scores are written to {' or '.join(FORMATS)}"
        )


class ScoreFile:
    """Columns split (of a dataset's examples), row (an example's number, from 0), label (where known), score, logit."""

    def __init__(self, path: pathlib.Path, suffix: str, *, splits: bool):
        self._path, self._suffix, self._splits = path, suffix, splits
        self._writer: Any = None
        self._labelled = False

    def write(self, scored: Scored) -> None:
        """Appends scores."""
        import pyarrow as pa

        if self._writer is None:
            self._labelled = scored.labels is not None
        columns: dict[str, Any] = {}
        if self._splits:
            codes = pa.array(np.zeros(scored.logits.size, np.int8))
            columns["split"] = pa.DictionaryArray.from_arrays(codes, pa.array([scored.split]))
        columns["row"] = np.arange(scored.first, scored.first + scored.logits.size, dtype=np.int64)
        if self._labelled:
            assert scored.labels is not None  # all examples of an input have labels, or none
            columns["label"] = scored.labels
        table = pa.table({**columns, "score": scored.probabilities, "logit": scored.logits})
        if self._suffix == ".csv" and self._splits:
            table = table.set_column(0, "split", table.column("split").cast(pa.string()))
        if self._writer is None:
            self._writer = self._opened(table.schema)
        self._writer.write_table(table)

    def _opened(self, schema: Any) -> Any:
        if self._suffix == ".parquet":
            import pyarrow.parquet as pq

            return pq.ParquetWriter(self._path, schema, write_page_checksum=True)
        import pyarrow.csv

        return pyarrow.csv.CSVWriter(self._path, schema)

    def close(self) -> None:
        """Ends the file, which has no example where none was written."""
        import pyarrow as pa

        if self._writer is None:
            fields = [("split", pa.string())] if self._splits else []
            fields += [("row", pa.int64()), ("score", pa.float32()), ("logit", pa.float32())]
            self._writer = self._opened(pa.schema(fields))
        self._writer.close()
