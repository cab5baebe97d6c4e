"""What the folder of an export holds, and how exports and deltas follow each other.

    DIR/
      manifest.json            this module; written last
      model.jax_export         the dense part: StableHLO by ``jax.export``, of any batch size, for CPUs and CUDA GPUs
      model.onnx               if asked for: the same for onnxruntime
      tables/TABLE.npy         (rows, dim) floats, or (rows,) quantized rows (``jrec.serving.quantize``)
      tables/TABLE.core-K.npy  instead, of a tensor-train table: its cores
      keys/TABLE.npy           (rows in use,) uint64, of a table that grows: the key of each row but row 0
      schema.json, vocabulary/, buckets/, reorder/   how raw values become rows, as in the dataset

A delta holds, of the tables, ``tables/TABLE.changed.npy``, the (n,) int64 rows that changed, beside their new values in
``tables/TABLE.npy``, or the whole table where that is smaller; whole cores, keys, and a whole model. It names the
export or delta that it follows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from jrec.errors import JrecError
from jrec.files import decode, load_json, save_json, sha256_of
from jrec.outputs import MANIFEST as UNFINISHED

MANIFEST = "manifest.json"
MODEL, ONNX = "model.jax_export", "model.onnx"
FORMAT, VERSION = "jrec-export", 1
Dtype = Literal["float32", "bfloat16", "float16", "int8", "int4"]
_REMEDY = "export the run again"


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
      dtype: Of the file "TABLE.npy"; of cores, the cores' own.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All about an export.

    Attributes:
      id: SHA-256 of what the export is: its parent, its files, its tables.
      parent: The ``id`` of what a delta follows; "" of a whole export.
      jrec: The version that made it.
      run: The run's name.
      step: Steps taken before its checkpoint.
      rows: What rows mean: the ``rows`` digest of the dataset's identity.
      dtype: Of rows; tensor-train cores keep their own.
      dense: Names of dense features in the model's order.
      features: In the model's order.
      tables: Parts by table.
      files: SHA-256 of every file but the manifest, by path.
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

    @property
    def follows(self) -> bool:
        """Whether it is a delta."""
        return bool(self.parent)


def keys_file(table: str) -> str:
    """Where the keys of a table that grows are, relative to the folder."""
    return f"keys/{table}.npy"


def identity(content: Mapping[str, Any]) -> str:
    """The ``id`` of a manifest's content."""
    kept = {key: value for key, value in content.items() if key not in ("id", "jrec")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def save_manifest(folder: pathlib.Path, manifest: Manifest) -> Manifest:
    """Completes a folder: digests of its files, and the manifest, whose ``id`` is returned in it."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in (MANIFEST, UNFINISHED))
    files = {p.relative_to(folder).as_posix(): sha256_of(p) for p in paths}
    manifest = dataclasses.replace(manifest, files=files)
    manifest = dataclasses.replace(manifest, id=identity(json.loads(json.dumps(dataclasses.asdict(manifest)))))
    save_json(folder / MANIFEST, dataclasses.asdict(manifest), kind=FORMAT, version=VERSION, sealed=True)
    return manifest


def load_manifest(folder: pathlib.Path) -> Manifest:
    """Reads a manifest.

    Raises:
      ExportError: If there is none, it is damaged, or of another version.
    """
    if not folder.is_dir():
        raise ExportError(f"{folder} is not a folder; give one that `jrec export` made")
    content = load_json(folder / MANIFEST, kind=FORMAT, version=VERSION, error=ExportError, remedy=_REMEDY, sealed=True)
    return decode(content, Manifest, where=str(folder / MANIFEST), error=ExportError, remedy=_REMEDY)


def check_order(folders: Sequence[pathlib.Path], manifests: Sequence[Manifest]) -> None:
    """Refuses what is not an export and the deltas that follow it, each the one before.

    Raises:
      ExportError: If one is missing in between, or the first is a delta.
    """
    if manifests[0].follows:
        raise ExportError(f"{folders[0]} is a delta; give the export that it follows, and the deltas in their order")
    known = {manifest.id: folder for folder, manifest in zip(folders, manifests, strict=True)}
    for before, folder, manifest in zip(manifests, folders[1:], manifests[1:], strict=False):
        check_follows(before, folder, manifest, known)


def check_follows(
    before: Manifest, folder: pathlib.Path, delta: Manifest, known: Mapping[str, pathlib.Path] | None = None
) -> None:
    """Refuses a delta that does not follow ``before``.

    Raises:
      ExportError: If it follows another export or delta, or none.
    """
    if not delta.follows:
        raise ExportError(f"{folder} is a whole export, not a delta; load it by itself")
    if delta.parent != before.id:
        parent = (known or {}).get(delta.parent)
        named = f"{parent}, which" if parent is not None else f"{delta.parent[:12]}, which is another one and"
        raise ExportError(
            f"{folder} (step {delta.step:,}) is a delta of {named} does not come right before it (that is"
            f" {before.id[:12]}, step {before.step:,}); apply all deltas in the order in which they were made"
        )


def verify(folder: pathlib.Path, manifest: Manifest, paths: Iterable[str] | None = None) -> None:
    """Reads files of an export for their checksums; ``paths`` None for all.

    Raises:
      ExportError: If one is missing or damaged.
    """
    for path in manifest.files if paths is None else paths:
        if not (folder / path).is_file():
            raise ExportError(f"{folder / path} is missing; copy the export again")
        if sha256_of(folder / path) != manifest.files[path]:
            raise ExportError(f"{folder / path} is damaged: its checksum does not fit; copy the export again")
