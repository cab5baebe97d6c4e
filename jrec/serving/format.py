"""What the folder of an export holds, and how exports and deltas follow each other.

    DIR/
      manifest.json            this module; written last
      model.jax_export         the dense part: StableHLO by ``jax.export``, of any batch size, for CPUs and CUDA GPUs
      parameters.safetensors   the arrays that it takes first, by name; older exports have them inside the program
      append.jax_export        of HSTU and SASRec: goes on from what was computed of a history's begin
      model.onnx               if asked for: the same for onnxruntime
      tables/TABLE.npy         (rows, dim) floats, or (rows,) quantized rows (``jrec.serving.quantize``)
      tables/TABLE.core-K.npy  instead, of a tensor-train table: its cores
      keys/TABLE.npy           (rows in use,) uint64, of a table that grows: the key of each row but row 0
      items.npy                of two towers: (items,) int64, the row of each row of the table of items' vectors
      schema.json, vocabulary/, buckets/, reorder/   how raw values become rows, as in the dataset
      ids.json                 instead, where requests have row numbers (``Run.export`` without a schema)

A delta holds, of the tables, ``tables/TABLE.changed.npy``, the (n,) int64 rows that changed, beside their new values in
``tables/TABLE.npy``, or the whole table where that is smaller; whole cores, keys, and a whole model. It names the
export or delta that it follows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal

from jrec.errors import JrecError
from jrec.files import save_json, sha256_of
from jrec.outputs import MANIFEST as UNFINISHED
from jrec.outputs import Place
from jrec.regression import Numbers

MANIFEST = "manifest.json"
MODEL, PARAMETERS, APPEND, ONNX = "model.jax_export", "parameters.safetensors", "append.jax_export", "model.onnx"
IDS, ITEMS = "ids.json", "items.npy"
WHOLE = (MODEL, PARAMETERS, APPEND, ONNX, ITEMS)
"""The files, as far as there are any, that a delta has whole."""
FORMAT, VERSION = "jrec-export", 1
Dtype = Literal["float32", "bfloat16", "float16", "int8", "int4"]


def folders_of(places: Place | Sequence[Place]) -> list[pathlib.Path]:
    """The paths of folders; of a single one, too."""
    return [*map(pathlib.Path, [places] if isinstance(places, (str, os.PathLike)) else places)]


class ExportError(JrecError):
    """An export that cannot be made or used; the message names the file, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """A categorical feature, as the model takes it.

    Attributes:
      name, table: Its name, and the table that it reads.
      pooling: "sum", "mean", "sqrtn", "max", or "none": ``max_length`` vectors and a mask.
      max_length: The most ids of an example.
      dim: Elements of a vector.
      weighted: Whether each id has a weight.
    """

    name: str
    table: str
    pooling: str
    max_length: int
    dim: int
    weighted: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Some rows of a table, in files of one kind.

    Attributes:
      first_row: The table's row that is the first of them.
      rows, dim: Their shape.
      dtype: The dtype of the file "TABLE.npy", or of a tensor train's cores.
      file: The rows; "" of a tensor train.
      changed: The rows' numbers within the part, of a delta; "" where all rows are in the file.
      cores: The files of a tensor train's cores.
      row_factors, dim_factors, ranks: Its shape (``jrec.TTShape``).
      cached_ids, cached_rows: Rows that stand beside the cores and count instead of theirs; "" for none.
    """

    first_row: int
    rows: int
    dim: int
    dtype: str
    file: str = ""
    changed: str = ""
    cores: tuple[str, ...] = ()
    row_factors: tuple[int, ...] = ()
    dim_factors: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    cached_ids: str = ""
    cached_rows: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """All its files."""
        named = (self.file, self.changed, *self.cores, self.cached_ids, self.cached_rows)
        return tuple(file for file in named if file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval:
    """How a model that ranks items is asked: by a user's vector, which its program gives, against the rows of a table.

    Attributes:
      history: The feature with a user's items; "" for none.
      table: The table whose rows are ranked: the items' own, or vectors that a tower made of them.
      leaves_out_history: Whether the items of the history are left out.
      left_out_row: The row of items that the dataset does not tell apart, which is never among the best; None for none.
      items: The items' own table where ``table`` has vectors of them, of the rows in ``items.npy``; else "".
    """

    history: str
    table: str
    leaves_out_history: bool
    left_out_row: int | None
    items: str = ""

    @property
    def item_table(self) -> str:
        """The items' own table."""
        return self.items or self.table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All about an export.

    Attributes:
      id: SHA-256 of what the export is: its parent, its files, its tables.
      parent: The ``id`` of what a delta follows; "" of a whole export.
      jrec: The version that made it.
      run: The run's name.
      step: Steps taken before its checkpoint.
      rows: What rows mean: the ``rows`` digest of the dataset's identity; without a schema, of the tables.
      dtype: The dtype of rows; tensor-train cores keep their own.
      dense: Names of dense features in the model's order.
      widths: How many numbers an example has, of dense features that have several.
      features: In the model's order.
      tables: Parts by table.
      files: SHA-256 of every file but the manifest, by path.
      retrieval: How the model ranks items; None for a model that does not.
      numbers: How outputs are numbers, of a model of one label that is a number; None of others.
      task_numbers: The same of several labels, by task whose label is a number.
    """

    id: str
    parent: str
    jrec: str
    run: str
    step: int
    rows: str
    dtype: str
    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    tables: Mapping[str, tuple[Part, ...]]
    files: Mapping[str, str]
    retrieval: Retrieval | None = None
    widths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    numbers: Numbers | None = None
    task_numbers: Mapping[str, Numbers] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        # Short, since every answer has one, and people print answers.
        return f"Manifest(id={self.id[:12]!r}, run={self.run!r}, step={self.step})"

    @property
    def numbers_by_label(self) -> Mapping[str, Numbers]:
        """How outputs are numbers, by task whose label is one; under "" where there is one label."""
        return self.task_numbers if self.numbers is None else {"": self.numbers}

    @functools.cached_property
    def dense_columns(self) -> tuple[str, ...]:
        """A name for each of the dense numbers of an example."""
        return tuple(
            f"{name}[{number}]" if name in self.widths else name
            for name in self.dense
            for number in range(self.widths.get(name, 1))
        )

    @property
    def follows(self) -> bool:
        """Whether it is a delta."""
        return bool(self.parent)

    @property
    def row_files(self) -> frozenset[str]:
        """The files of uncompressed rows, which are mapped into memory and may be large."""
        return frozenset(part.file for parts in self.tables.values() for part in parts if part.file)


def keys_file(table: str) -> str:
    """Where the keys of a table that grows are, relative to the folder."""
    return f"keys/{table}.npy"


def identity(content: Mapping[str, object]) -> str:
    """The ``id`` of a manifest's content."""
    # Without the version of jrec: what another one wrote of the same model is the same export, and its deltas follow.
    kept = {key: value for key, value in content.items() if key not in ("id", "jrec")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def save_manifest(folder: pathlib.Path, manifest: Manifest) -> Manifest:
    """Completes a folder: digests of its files, and the manifest, whose ``id`` is returned in it."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in (MANIFEST, UNFINISHED))
    files = {p.relative_to(folder).as_posix(): sha256_of(p) for p in paths}
    manifest = dataclasses.replace(manifest, files=files)
    manifest = dataclasses.replace(manifest, id=identity(json.loads(json.dumps(_content(manifest)))))
    save_json(folder / MANIFEST, _content(manifest), kind=FORMAT, version=VERSION, sealed=True)
    return manifest


def _content(manifest: Manifest) -> dict[str, object]:
    """A manifest in JSON types, without what older ones lack where it says nothing."""
    content = dataclasses.asdict(manifest)
    if not manifest.widths:
        del content["widths"]
    if manifest.numbers is None:
        del content["numbers"]
    if not manifest.task_numbers:
        del content["task_numbers"]
    if manifest.retrieval is None:
        del content["retrieval"]
    elif not manifest.retrieval.items:
        del content["retrieval"]["items"]
    return content
