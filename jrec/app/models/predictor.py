"""Predictions of a restored run, whatever its kind of model: pieces of them, in order, each of which makes a table."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import jax
import numpy as np

from jrec.app.evaluate import RestoredRun
from jrec.batch import Batch
from jrec.data.dataset_packer import pack_encoded
from jrec.data.encoded_columns import EncodedColumns
from jrec.data.growing import StoredKeys
from jrec.data.packers import AnyPacker
from jrec.data.unknown import UnknownValues
from jrec.errors import ConfigError
from jrec.prepare.encoder import Encoder
from jrec.serving.answers import ByTask

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.app.why import Explainer
    from jrec.data.dataset_packer import PackerOptions


class Piece(abc.ABC):
    """The predictions for some examples that follow each other.

    Attributes:
      split: Of a dataset, the split that they are in; "" otherwise.
      first: The number of the first of them, from 0: in its split, or in the log.
    """

    split: str
    first: int

    @property
    @abc.abstractmethod
    def examples(self) -> int:
        """How many there are."""

    @abc.abstractmethod
    def columns(self) -> tuple[np.ndarray, dict[str, np.ndarray | pa.Array]]:
        """The lines to write: of each its example, counted from ``first``, and further columns by name."""

    def table(self, *, splits: bool, csv: bool) -> pa.Table:
        """The lines, with the split where ``splits``; ``csv`` for texts in place of dictionaries."""
        import pyarrow as pa

        lines, own = self.columns()
        named = {}
        if splits:
            # One text for all lines, by codes of one byte.
            column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(lines), np.int8)), pa.array([self.split]))
            named["split"] = column.cast(pa.string()) if csv else column
        return pa.table({**named, "row": (lines + self.first).astype(np.int64), **own})


class Predictor[Outputs](abc.ABC):
    """What a kind of model predicts with a restored run: of a batch ``Outputs``, a tree of arrays.

    Args:
      run: The run.
    """

    def __init__(self, run: RestoredRun):
        self.run = run
        self.kind = run.config.model.of_kind

    @functools.cached_property
    def growing(self) -> Mapping[str, StoredKeys]:
        """The rows that keys of growing tables have, by table."""
        return self.run.run.growing_tables.rows_of_keys()

    @functools.cached_property
    def packer(self) -> AnyPacker:
        """What packs examples."""
        run = self.run
        options: PackerOptions = {"growing": self.growing} if self.growing else {}
        if run.schema.weighted:  # lines of weight 0 have predictions, too
            options["weighted"] = False
        return self.kind.packer(run.config, run.schema, run.layout, training=False, **options)

    @functools.cached_property
    def encoder(self) -> Encoder:
        """Turns the values of columns, in memory or in Parquet files, into rows."""
        return Encoder(self.run.schema)

    @property
    def log_encoder(self) -> Encoder:
        """Turns the values of a log in the training data's format into rows."""
        return self.encoder

    reads_every_parquet = False
    """Whether Parquet files need only the columns of ``encoder``, whatever the format of the training data."""

    def at(self, k: int | None) -> Self:
        """The same that ranks ``k`` items; None for this one.

        Raises:
          ConfigError: If the model does not rank, or there are fewer items.
        """
        if k is not None:
            raise ConfigError(f"the run's model.kind is {self.kind.name!r}, which ranks no items; ask for its scores")
        return self

    def of_candidates(self, paths: Sequence[str], batch_size: int, unknown: UnknownValues) -> Iterator[Piece] | None:
        """Scores of the items that the lines of files name, in place of the best of all; None where they name none."""
        del paths, batch_size, unknown

    def logits(self, outputs: Outputs) -> ByTask:
        """Outputs as logits.

        Raises:
          ConfigError: If the model has none.
        """
        del outputs
        raise ConfigError(
            f"the run's model.kind is {self.kind.name!r}, which has no probabilities; ask for its best items"
        )

    @abc.abstractmethod
    def explainer(self, k: int) -> Explainer:
        """Tells which ``k`` features a score depends on most.

        Raises:
          ConfigError: If the model reads fewer features.
        """

    def pack(self, encoded: EncodedColumns, batch_size: int) -> Batch:
        """A batch of up to ``batch_size`` examples."""
        return pack_encoded(self.packer, encoded, batch_size)

    @abc.abstractmethod
    def of_batch(self, batch: Batch) -> Outputs:
        """What the model says of the batch's examples: a tree of arrays whose first axis are these.

        Raises:
          DivergedError: If an output is NaN or infinite.
        """

    @abc.abstractmethod
    def nothing(self) -> Outputs:
        """The same of no example."""

    @abc.abstractmethod
    def piece(
        self,
        outputs: Outputs,
        *,
        split: str = "",
        first: int = 0,
        labels: ByTask | None = None,
        weights: np.ndarray | None = None,
    ) -> Piece:
        """Outputs as a piece; ``labels`` from one of the following, ``weights`` of a log, None for none."""

    def labels_of(self, encoded: EncodedColumns) -> ByTask | None:
        """The labels of encoded examples."""
        del encoded

    def labels_of_batch(self, batch: Batch) -> ByTask | None:
        """The labels of a dataset's batch."""
        del batch

    def of_encoded(self, encoded: EncodedColumns, batch_size: int) -> Outputs:
        """``of_batch`` of any number of examples, ``batch_size`` at a time."""
        # So that no example at all gives empty arrays in the right tree.
        parts = [self.nothing()]
        for begin in range(0, encoded.examples, batch_size):
            piece = encoded.cut(begin, min(begin + batch_size, encoded.examples))
            parts.append(self.of_batch(self.pack(piece, batch_size)))
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
