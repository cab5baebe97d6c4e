"""What a calibration found, and its file: a header in JSON, and the hot rows."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping

import numpy as np

from jrec.access.container import read_container, write_container
from jrec.data.fae.manifest import HotSet, is_row_list
from jrec.data.identity import Identity
from jrec.data.schema import Schema
from jrec.errors import JrecError
from jrec.files import decode
from jrec.json_values import JsonMapping, JsonObject

KIND, VERSION = "jrec-fae-calibration", 4
_REMEDY = "make it again with `jrec fae calibrate`"


class CalibrationError(JrecError):
    """A calibration that is damaged or does not belong to what it is used with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableResult:
    """The hot rows of one table.

    Attributes:
      name, rows: The table's name and number of rows.
      large: Whether the threshold holds for it; smaller tables are hot as a whole.
      hot: How many of its rows are hot.
    """

    name: str
    rows: int
    large: bool
    hot: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HotInputs:
    """The expected share of inputs that are hot.

    Attributes:
      share: The expectation.
      error: Its standard error over blocks; None of a single block, which does not tell it.
      inputs: How many inputs it was estimated on.
    """

    share: float
    error: float | None
    inputs: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Which rows are hot, without the rows themselves.

    Attributes:
      name, dataset: The dataset's name and identity.
      options: As asked for, JSON types.
      source: How accesses were counted.
      inputs, counted_inputs: How many inputs the training split has, and how many of them were counted.
      threshold: A row of a large table is hot that at least this share of the inputs accesses; 0 where all rows are
        hot, None where no row of a large table is.
      cutoff: The same as counted accesses: threshold x counted_inputs (Equation 1).
      row_bytes: The bytes of a row with its optimizer's slots.
      tables: One result for each table of the dataset, in order.
      hot_inputs: How many inputs will be hot.
    """

    name: str
    dataset: Identity
    options: JsonMapping
    source: str
    inputs: int
    counted_inputs: int
    threshold: float | None
    cutoff: float | None
    row_bytes: int
    tables: tuple[TableResult, ...]
    hot_inputs: HotInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration(Summary):
    """Which rows are hot.

    Attributes:
      rows: Hot rows of every table, uint32 ascending, numbered as the dataset's loader yields them.
    """

    rows: Mapping[str, np.ndarray] = dataclasses.field(repr=False, compare=False)

    @property
    def hot_bytes(self) -> int:
        """Bytes of all hot rows with their slots."""
        return self.row_bytes * sum(t.hot for t in self.tables)

    def summary(self) -> JsonObject:
        """All but the rows, JSON types."""
        content = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rows"}
        plain = json.loads(json.dumps(content, default=dataclasses.asdict, allow_nan=False))
        return {**plain, "hot_bytes": self.hot_bytes}

    def hot_set(self) -> HotSet:
        """What ``jrec.prepare.fae_pack.pack`` takes."""
        return HotSet(rows=self.rows, dataset=self.dataset, threshold=self.threshold, calibration=self.summary())

    def check_dataset(self, schema: Schema) -> None:
        """Refuses to be used with another dataset than the one calibrated, or after its rows were reordered.

        Raises:
          CalibrationError: If it is another.
        """
        self.dataset.check(schema.identity, subject="the calibration", remedy=_REMEDY, error=CalibrationError)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file of ``jrec.access.container``: the summary as its header, and the rows."""
        steps = {name: np.diff(rows, prepend=np.uint32(0)) for name, rows in self.rows.items()}  # these compress
        write_container(path, kind=KIND, version=VERSION, header=self.summary(), arrays=steps)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Reads a file of ``save``.

        Raises:
          CalibrationError: If it is damaged, or no calibration.
        """
        content, steps = read_container(path, kind=KIND, version=VERSION, error=CalibrationError, remedy=_REMEDY)
        hot_bytes = content.pop("hot_bytes", None)
        summary = decode(content, Summary, where=str(path), error=CalibrationError, remedy=_REMEDY)
        rows = {name: np.cumsum(values, dtype=np.uint32) for name, values in steps.items()}
        good = [t.name for t in summary.tables] == list(rows) and all(
            steps[t.name].dtype == np.uint32 and is_row_list(rows[t.name], t.rows) and len(rows[t.name]) == t.hot
            for t in summary.tables
        )
        calibration = Calibration(**{f.name: getattr(summary, f.name) for f in dataclasses.fields(summary)}, rows=rows)
        if not good or hot_bytes != calibration.hot_bytes:
            raise CalibrationError(f"{path} does not hold the hot rows that its header counts; {_REMEDY}")
        return calibration
