"""What a dataset folder holds: ``schema.json``, ArrayRecord shards of columnar blocks, per-row counts, vocabularies.

    DATASET/
      schema.json                        this module; written last, so its presence means the dataset is whole
      train-00000-of-00004.array_record  one record = one block of examples (``jrec.data.blocks``)
      valid-…, test-…
      counts/TABLE.npy                   (rows,) int64, accesses of every row in the training split
      vocabulary/TABLE.parquet           value, row, count; absent for synthetic data and hashed tables
      reorder/TABLE-CHECKSUM.npy         (rows,) uint32, the new row of every stored one (`jrec reorder`)

Rows of a table descend by frequency, so row 0 is the most accessed. Shards, counts, vocabularies and ``oov_row`` speak
of these stored rows, also where a bijection renumbers what the loader yields.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jrec.errors import JrecError
from jrec.files import load_json, save_json

FORMAT = "jrec-dataset"
VERSION = 1
SCHEMA_FILE = "schema.json"


class DatasetError(JrecError):
    """A dataset that cannot be used as it is: the message says which file, what is wrong and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseFeature:
    """A float feature. ``transform`` names what preparation did to the raw value ("log1p", "none")."""

    name: str
    transform: str = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CategoricalFeature:
    """Ids of ``table``: one an example, or up to ``max_length``; exactly that many where ``fixed_length``."""

    name: str
    table: str
    max_length: int = 1
    fixed_length: bool = False
    weighted: bool = False

    @property
    def one_hot(self) -> bool:
        """Whether every example has exactly one unweighted id, stored as a plain column."""
        return self.max_length == 1 and self.fixed_length and not self.weighted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bijection:
    """A file that renumbers a table's rows (``jrec.data.reorder_file``), and the SHA-256 of its bytes."""

    file: str
    sha256: str
    version: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """An id space of ``rows`` rows. ``oov_row`` is where values outside the vocabulary went, if anywhere.

    Where there is a ``bijection``, the loader applies it to every id.
    """

    name: str
    rows: int
    oov_row: int | None = None
    counts: str | None = None
    vocabulary: str | None = None
    bijection: Bijection | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One ArrayRecord file: its name, how many blocks and examples it holds, its size in bytes."""

    file: str
    blocks: int
    examples: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of "train", "valid" or "test", in time order. Every block but a shard's last is full."""

    shards: tuple[Shard, ...]

    @property
    def examples(self) -> int:
        """Examples in all shards."""
        return sum(s.examples for s in self.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """The description of a dataset.

    Attributes:
      name: what it was made from, e.g. "criteo-kaggle".
      block_size: examples in a full block.
      dense, categorical: the features, in column order.
      tables: the id spaces, in order.
      splits: by name.
      provenance: how it was made: command, inputs with sizes, options, jrec version, bad lines skipped.
      ceiling: for synthetic data, the planted teacher's own metrics on each split, e.g. {"test": {"auc": 0.81}}.
    """

    name: str
    block_size: int
    dense: tuple[DenseFeature, ...]
    categorical: tuple[CategoricalFeature, ...]
    tables: tuple[Table, ...]
    splits: Mapping[str, Split]
    provenance: Mapping[str, Any]
    ceiling: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [t.name for t in self.tables]
        for feature in self.categorical:
            if feature.table not in names:
                raise DatasetError(f"feature {feature.name!r} reads table {feature.table!r}, which the schema lacks")
        for kind, all_names in (("feature", self.feature_names), ("table", names)):
            if repeated := sorted({n for n in all_names if all_names.count(n) > 1}):
                raise DatasetError(f"{kind} name(s) {', '.join(repeated)} occur more than once in the schema")

    @property
    def feature_names(self) -> list[str]:
        """Dense, then categorical feature names."""
        return [f.name for f in self.dense] + [f.name for f in self.categorical]

    def table(self, name: str) -> Table:
        """The table called ``name``."""
        return next(t for t in self.tables if t.name == name)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``schema.json`` atomically."""
        path = pathlib.Path(folder) / SCHEMA_FILE
        save_json(path, dataclasses.asdict(self), kind=FORMAT, version=VERSION)

    @staticmethod
    def load(folder: str | os.PathLike[str], *, check_files: bool = True) -> Schema:
        """Reads and checks a dataset's schema, and that every shard is there in its full size.

        Raises:
          DatasetError: if the folder is no finished dataset, is of another format version, or a shard is missing or
            truncated.
        """
        folder = pathlib.Path(folder)
        path = folder / SCHEMA_FILE
        if not path.is_file():
            raise DatasetError(
                f"{folder} is not a finished dataset: it has no {SCHEMA_FILE}. Make one with `jrec prepare` or"
                " `jrec synth`; if one was interrupted, run the same command again"
            )
        content = load_json(path, kind=FORMAT, version=VERSION, error=DatasetError, remedy="prepare the dataset again")
        try:
            schema = _from_json(content)
        except (TypeError, KeyError) as error:
            raise DatasetError(f"{path} does not describe a dataset ({error}); prepare it again") from error
        if check_files:
            _check_shards(folder, schema)
        return schema


def _from_json(content: dict[str, Any]) -> Schema:
    return Schema(
        name=content.pop("name"),
        block_size=content.pop("block_size"),
        dense=tuple(DenseFeature(**f) for f in content.pop("dense")),
        categorical=tuple(CategoricalFeature(**f) for f in content.pop("categorical")),
        tables=tuple(map(_table, content.pop("tables"))),
        splits={
            name: Split(shards=tuple(Shard(**s) for s in split["shards"]))
            for name, split in content.pop("splits").items()
        },
        **content,
    )


def _table(content: dict[str, Any]) -> Table:
    bijection = content.pop("bijection", None)
    return Table(**content, bijection=None if bijection is None else Bijection(**bijection))


def _check_shards(folder: pathlib.Path, schema: Schema) -> None:
    for name, split in schema.splits.items():
        for shard in split.shards:
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                what = "is missing" if size is None else f"has {size:,} bytes"
                raise DatasetError(
                    f"{path} ({name} split) {what}, but the schema says {shard.bytes:,}; copy it again or prepare anew"
                )
            if shard.blocks != math.ceil(shard.examples / schema.block_size):
                raise DatasetError(
                    f"{path} claims {shard.examples:,} examples in {shard.blocks:,} blocks of {schema.block_size:,}"
                )
