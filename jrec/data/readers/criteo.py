"""Criteo's display advertising logs: the Kaggle challenge's train.txt and the Terabyte's day files.

Tab-separated, no header: the label, 13 integer counts, 26 categoricals of 8 hexadecimal digits; blanks are missing.
"""

from __future__ import annotations

from jrec.data.readers.dense import dense_column
from jrec.data.readers.parse import Dialect, Field, ParsedBlock
from jrec.data.readers.source import Chunk, Source, one_hot, reject_labels
from jrec.data.schema import DenseFeature

COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORICALS = tuple(f"C{i}" for i in range(1, 27))


class Criteo(Source):
    """``criteo-kaggle`` and ``criteo-terabyte``: log1p of the counts, 26 one-hot features, time is the files' order."""

    dense = tuple(DenseFeature(name=n, transform="log1p") for n in COUNTS)
    categorical = one_hot(*CATEGORICALS)

    def __init__(self, name: str):
        self.name = name

    def dialect(self, path: str) -> Dialect:
        """The same for every file."""
        return Dialect(
            delimiter="\t",
            fields=(
                Field(name="label", kind="number", blank=False),
                *(Field(name=n, kind="number") for n in COUNTS),
                *(Field(name=n, kind="hex") for n in CATEGORICALS),
            ),
            hint=" (label, 13 counts, 26 categoricals, separated by tabs; the challenge's test files, of 39 fields,"
            " have no label and cannot be prepared)",
        )

    def convert(self, parsed: ParsedBlock) -> Chunk:
        """Labels, log-transformed counts, keys."""
        reject_labels(parsed, "label")
        return Chunk(
            labels=parsed.numbers("label").astype("float32"),
            dense={n: dense_column(parsed, n, "log1p", 0.0) for n in COUNTS},
            keys={n: parsed.columns[n] for n in CATEGORICALS},
        )
