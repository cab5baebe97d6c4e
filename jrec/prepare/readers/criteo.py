"""Criteo's display advertising logs: the Kaggle challenge's train.txt and the Terabyte's day files.

Tab-separated, no header: the label, 13 integer counts, 26 categoricals of 8 hexadecimal digits; blanks are missing.
"""

from __future__ import annotations

from jrec.data.schema import DenseFeature
from jrec.prepare.readers.dense import dense_column
from jrec.prepare.readers.lines import first_line
from jrec.prepare.readers.log_format import Chunk, LogFormat, labels_of, one_hot, reject_labels
from jrec.prepare.readers.parse import Dialect, Field, ParsedBlock

COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORICALS = tuple(f"C{i}" for i in range(1, 27))


class Criteo(LogFormat):
    """``criteo-kaggle`` and ``criteo-terabyte``: log1p of the counts, 26 one-hot features, time is the files' order."""

    dense = tuple(DenseFeature(name=n, transform="log1p") for n in COUNTS)
    categorical = one_hot(*CATEGORICALS)
    label = "label"

    def __init__(self, name: str):
        self.name = name

    def dialect(self, path: str) -> Dialect:
        """The same for every file, but for the label where files may lack it."""
        fields = self.raw_fields()
        label = Field(name="label", kind="number", blank=False)
        if self.labels == "required" or first_line(path).count(b"\t") >= len(fields):
            fields = (label if self.labels != "none" else Field(name="label", kind="skip"), *fields)
        return Dialect(
            delimiter="\t",
            fields=fields,
            hint=" (label, 13 counts, 26 categoricals, separated by tabs; the challenge's test files, of 39 fields,"
            " have no label and need --no-labels)",
        )

    def raw_fields(self) -> tuple[Field, ...]:
        """13 counts and 26 categoricals."""
        counts = (Field(name=n, kind="number") for n in COUNTS)
        return (*counts, *(Field(name=n, kind="hex") for n in CATEGORICALS))

    def convert(self, parsed: ParsedBlock) -> Chunk:
        """Labels, log-transformed counts, keys."""
        reject_labels(parsed, "label")
        return Chunk(
            labels=labels_of(parsed, "label"),
            dense={f.name: dense_column(parsed, f.name, f, 0.0) for f in self.dense},
            keys={n: parsed.columns[n] for n in CATEGORICALS},
        )
