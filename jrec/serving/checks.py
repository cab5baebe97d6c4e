"""Reads manifests, and refuses exports and deltas that are damaged, inconsistent, or do not follow each other.

A checksum says that a manifest is as it was written, not that a sound program wrote it. So nothing that it says is
believed: it is checked that files lie in the folder, parts make up their tables, and sizes are the files' own.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from jrec.data.blocks import age_columns
from jrec.data.schema import MAX_LENGTH, SCHEMA_FILE, Schema
from jrec.data.vocabulary_file import buckets_file
from jrec.files import decode, load_json, save_json, sha256_of, stays_inside
from jrec.json_values import JsonObject
from jrec.serving.format import (
    FORMAT,
    IDS,
    ITEMS,
    MANIFEST,
    MODEL,
    VERSION,
    Dtype,
    ExportError,
    Feature,
    Manifest,
    Part,
    Retrieval,
    identity,
)

if TYPE_CHECKING:
    from jrec.ops.tt.shape import TTShape

MAX_ROWS = 2**31 - 1  # ids are int32
_MAX_DIM = 4096
_REMEDY = "export the run again"
_COPY = "copy the export again"
_FLOATS = ("float32", "bfloat16", "float16")
IDS_FORMAT = "jrec-export-ids"
_POOLINGS = ("sum", "mean", "sqrtn", "max", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Keying:
    key_seeds: Mapping[str, int]
    canonical: tuple[str, ...] = ()


def is_finished(folder: pathlib.Path) -> bool:
    """Whether a folder is an export or a delta, and none that is being written, or was until its writer was killed."""
    # ``new_folder`` gives it its name last, after the manifest and after all files are on the disk, which may take
    # seconds; what it replaces has a name of its own meanwhile, too.
    return not folder.name.endswith((".partial", ".replaced")) and (folder / MANIFEST).is_file()


def load_manifest(folder: pathlib.Path) -> Manifest:
    """Reads and checks a manifest, not the files that it names.

    Raises:
      ExportError: If there is none, it is damaged, of another version, inconsistent, or names files outside its folder.
    """
    manifest = read_manifest(folder)
    if (fault := next(faults(folder, manifest), None)) is not None:
        raise ExportError(f"{folder / MANIFEST}: {fault}; {_REMEDY}")
    return manifest


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Reads a manifest and checks that it is as it was written, not what it says; imports no JAX.

    Raises:
      ExportError: If there is none, it is damaged, or of another version.
    """
    if not folder.is_dir():
        raise ExportError(f"{folder} is not a folder; give one that `jrec export` made")
    path = folder / MANIFEST
    if not path.exists():
        raise ExportError(f"{folder} is no export: it has no {MANIFEST}; `jrec export RUN --out DIR` makes one")
    content = load_json(path, kind=FORMAT, version=VERSION, error=ExportError, remedy=_REMEDY, sealed=True)
    # What exports of earlier versions lack, with the meaning that its absence had.
    known = {"retrieval": None, "numbers": None, "task_numbers": {}, "widths": {}, **content}
    if isinstance(known["retrieval"], dict):
        known["retrieval"] = {"items": "", **known["retrieval"]}
    manifest = decode(known, Manifest, where=str(path), error=ExportError, remedy=_REMEDY)
    # Of the content as it stands in the file: the fields that were added above are no part of an older export's id.
    if manifest.id != identity(content):
        raise ExportError(f"{path} was edited: its id does not fit what it says; {_REMEDY}")
    return manifest


def verify(folder: pathlib.Path, manifest: Manifest, *, rows: bool = True) -> None:
    """Reads the files of an export for their checksums.

    Args:
      folder: The export's folder.
      manifest: Its manifest.
      rows: Whether the files of uncompressed rows are read as well.

    Raises:
      ExportError: If one is missing or damaged.
    """
    for file, digest in manifest.files.items():
        path = folder / file
        if not rows and file in manifest.row_files:
            continue
        try:
            if not path.is_file():
                raise ExportError(f"{path} is missing; {_COPY}")
            actual = sha256_of(path)
        except OSError as problem:
            raise ExportError(f"{path} cannot be read ({problem.strerror or problem}); {_COPY}") from problem
        if actual != digest:
            raise ExportError(f"{path} is damaged: its checksum does not fit; {_COPY}")


def load_schema(folder: pathlib.Path, manifest: Manifest) -> Schema:
    """Reads the schema of a whole export, by which raw values become rows.

    Raises:
      DatasetError: If it is damaged.
      ExportError: If its features and tables are not the manifest's, or it names files that the manifest lacks.
    """
    schema = Schema.load(folder, check_files=False)
    if (fault := next(schema_faults(folder, schema, manifest), None)) is not None:
        raise ExportError(f"{folder / SCHEMA_FILE}: {fault}; {_REMEDY}")
    return schema


def save_keying(folder: pathlib.Path, keying: Mapping[str, tuple[int, bool]]) -> None:
    """Writes ``ids.json`` of an export without a schema: by table that grows, how values become keys.

    Args:
      folder: The export's folder.
      keying: By table the seed of the hash of long texts, and whether texts are brought into one form.
    """
    content: JsonObject = {"key_seeds": {name: seed for name, (seed, _) in keying.items()}}
    if canonical := sorted(name for name, (_, one_form) in keying.items() if one_form):
        content["canonical"] = canonical
    save_json(folder / IDS, content, kind=IDS_FORMAT, version=VERSION)


def load_keying(folder: pathlib.Path, manifest: Manifest) -> dict[str, tuple[int, bool]]:
    """Reads what ``save_keying`` wrote.

    Raises:
      ExportError: If it is damaged, or names a table that the manifest lacks.
    """
    path = folder / IDS
    content = load_json(path, kind=IDS_FORMAT, version=VERSION, error=ExportError, remedy=_REMEDY)
    keying = decode(content, _Keying, where=str(path), error=ExportError, remedy=_REMEDY, partial=True)
    if unknown := sorted(keying.key_seeds.keys() - manifest.tables.keys()):
        raise ExportError(f"{path}: key_seeds names table {unknown[0]!r}, which is not there; {_REMEDY}")
    return {name: (seed, name in keying.canonical) for name, seed in keying.key_seeds.items()}


def load_chain(folders: Sequence[pathlib.Path], *, rows: bool = True) -> tuple[Manifest, ...]:
    """Reads an export and the deltas that follow it, in order, for their checksums; ``rows`` as of ``verify``.

    Raises:
      ExportError: If one is missing or damaged, or they do not follow each other.
    """
    manifests = tuple(load_manifest(folder) for folder in folders)
    for folder, manifest in zip(folders, manifests, strict=True):
        verify(folder, manifest, rows=rows)
    check_order(folders, manifests)
    return manifests


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
      ExportError: If it follows another export or delta, or none, or is of another model.
    """
    if not delta.follows:
        raise ExportError(f"{folder} is a whole export, not a delta; load it by itself")
    if delta.id == before.id:
        raise ExportError(f"{folder} (step {delta.step:,}) is what was taken last; each delta is applied once")
    if delta.parent != before.id:
        parent = (known or {}).get(delta.parent)
        named = f"{parent}, which" if parent is not None else f"{delta.parent[:12]}, which is another one and"
        raise ExportError(
            f"{folder} (step {delta.step:,}) is a delta of {named} does not come right before it (that is"
            f" {before.id[:12]}, step {before.step:,}); apply all deltas in the order in which they were made"
        )
    if (reason := difference(before, delta)) is not None:
        raise ExportError(
            f"{folder / MANIFEST} is of another model than what it follows: {reason}; make a whole export"
        )


def difference(before: Manifest, after: Manifest) -> str | None:
    """How two exports' models differ, in words; None where both are of one model."""
    for name in ("rows", "dtype", "dense", "widths", "features", "retrieval", "numbers", "task_numbers"):
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            return "rows mean other values (another dataset)" if name == "rows" else f"{name} is {now}, not {was}"
    for table in sorted({*before.tables, *after.tables}):
        was, now = ([_outline(part) for part in manifest.tables.get(table, ())] for manifest in (before, after))
        if was != now:
            return f"table {table!r} has parts {now}, not {was}"
    return None


def _outline(part: Part) -> tuple[str, int, int, int]:
    return "cores" if part.cores else "rows", part.first_row, part.rows, part.dim


def tt_shape(part: Part) -> TTShape:
    """The shape of a part's cores; ValueError where there is none."""
    from jrec.ops.tt.shape import TTShape

    return TTShape(
        rows=part.rows, dim=part.dim, row_factors=part.row_factors, dim_factors=part.dim_factors, ranks=part.ranks
    )


def faults(folder: pathlib.Path, manifest: Manifest) -> Iterator[str]:
    """What is wrong with a manifest. Each check relies on those before it: only the first fault counts."""
    yield from _file_faults(folder, manifest)
    if manifest.dtype not in get_args(Dtype):
        yield f"dtype is {manifest.dtype!r}, which is none of {', '.join(get_args(Dtype))}"
    if manifest.step < 0:
        yield f"step is {manifest.step:,}"
    for table, parts in manifest.tables.items():
        yield from (f"table {table!r} {fault}" for fault in _table_faults(parts, manifest))
    named = [file for parts in manifest.tables.values() for part in parts for file in part.files]
    yield from (f"tables name file {file!r} more than once" for file in _repeated(named))
    yield from (f"feature {name!r} is there more than once" for name in _repeated(_names(manifest)))
    for name, width in manifest.widths.items():
        if name not in manifest.dense or not 1 <= width <= MAX_LENGTH:
            yield f"widths has {width:,} numbers of {name!r}, which must be 1 to {MAX_LENGTH:,}, of a dense feature"
    for feature in manifest.features:
        yield from (f"feature {feature.name!r} {fault}" for fault in _feature_faults(feature, manifest))
    if manifest.retrieval is not None:
        yield from (f"retrieval {fault}" for fault in _retrieval_faults(manifest.retrieval, manifest))


def _file_faults(folder: pathlib.Path, manifest: Manifest) -> Iterator[str]:
    inside = os.path.realpath(folder)
    for file in manifest.files:
        if not stays_inside(file) or file == MANIFEST:
            yield f"files has {file!r}, which is no path inside the folder"
        # A path that is inside by its text may lead out by a link, and what it names would be served.
        elif not pathlib.Path(os.path.realpath(folder / file)).is_relative_to(inside):
            yield f"{file} is a link that leads out of the folder"
    inputs = IDS if IDS in manifest.files else SCHEMA_FILE
    for file in (MODEL,) if manifest.follows else (MODEL, inputs):
        if file not in manifest.files:
            yield f"files lacks {file}"
    if {IDS, SCHEMA_FILE} <= manifest.files.keys():
        yield f"files has both {IDS} and {SCHEMA_FILE}"


def _table_faults(parts: Sequence[Part], manifest: Manifest) -> Iterator[str]:
    if not parts:
        yield "has no parts"
    rows = 0
    for part in parts:
        if part.first_row != rows or part.rows < 1:
            yield f"has a part of {part.rows:,} rows from {part.first_row:,} on, but {rows:,} rows before it"
        rows += part.rows
        if not 1 <= part.dim <= _MAX_DIM or part.dim != parts[0].dim:
            yield f"has dim {part.dim}; it must be 1 to {_MAX_DIM}, the same in all parts"
        if lacking := [file for file in part.files if file not in manifest.files]:
            yield f"names {lacking[0]!r}, which is not in files"
        yield from _cores_faults(part) if part.cores else _rows_faults(part, manifest)
    if rows > MAX_ROWS:
        yield f"has {rows:,} rows; serving reads up to {MAX_ROWS:,}"


def _rows_faults(part: Part, manifest: Manifest) -> Iterator[str]:
    if not part.file:
        yield f"has neither rows nor cores from row {part.first_row:,} on"
    if part.dtype != manifest.dtype:
        yield f"has rows of {part.dtype!r}, but the export is of {manifest.dtype}"
    if part.row_factors or part.dim_factors or part.ranks or part.cached_ids or part.cached_rows:
        yield "has factors, ranks or cached rows without cores"
    if part.changed and not manifest.follows:
        yield f"has changed rows ({part.changed}), but the export is no delta"


def _cores_faults(part: Part) -> Iterator[str]:
    if part.file or part.changed:
        yield "has cores and rows in one part"
    if part.dtype not in _FLOATS:
        yield f"has cores of {part.dtype!r}; they are of {', '.join(_FLOATS)}"
    if bool(part.cached_ids) != bool(part.cached_rows):
        yield "has cached rows without their numbers, or the reverse"
    if len(part.cores) != len(part.row_factors):
        yield f"has {len(part.cores)} cores, but {len(part.row_factors)} row_factors"
    try:
        tt_shape(part)
    except ValueError as fault:
        yield f"is no tensor train: {fault}"


def _feature_faults(feature: Feature, manifest: Manifest) -> Iterator[str]:
    if feature.table not in manifest.tables:
        yield f"reads table {feature.table!r}, which is not there"
    elif feature.dim != (dim := manifest.tables[feature.table][0].dim):
        yield f"has dim {feature.dim}, but table {feature.table!r} has {dim}"
    if feature.pooling not in _POOLINGS:
        yield f"has pooling {feature.pooling!r}, which is none of {', '.join(_POOLINGS)}"
    if not 1 <= feature.max_length <= MAX_LENGTH:
        yield f"has max_length {feature.max_length:,}; it must be 1 to {MAX_LENGTH:,}"


def _retrieval_faults(retrieval: Retrieval, manifest: Manifest) -> Iterator[str]:
    history = next((feature for feature in manifest.features if feature.name == retrieval.history), None)
    if retrieval.items:
        if retrieval.history and (history is None or history.table != retrieval.items):
            yield f"has history {retrieval.history!r}, which is no feature of table {retrieval.items!r}"
        if retrieval.table not in manifest.tables or ITEMS not in manifest.files:
            yield f"ranks vectors of items, but table {retrieval.table!r} or {ITEMS} is not there"
    elif history is None or history.table != retrieval.table or history.pooling != "none":
        yield f"has history {retrieval.history!r}, which is no feature of table {retrieval.table!r} with pooling 'none'"
    rows = sum(part.rows for part in manifest.tables.get(retrieval.table, ()))
    if retrieval.left_out_row is not None and not 0 <= retrieval.left_out_row < rows:
        yield f"leaves out row {retrieval.left_out_row:,} of table {retrieval.table!r}, which has {rows:,} rows"


def schema_faults(folder: pathlib.Path, schema: Schema, manifest: Manifest) -> Iterator[str]:
    """How a schema and a manifest differ, and the files that may be read without a checksum."""
    ages = age_columns(schema)
    wide = {name: width for name, width in manifest.widths.items() if ages.get(name) == width}
    plain = tuple(name for name in manifest.dense if name not in wide)
    if (names := tuple(feature.name for feature in schema.dense)) != plain:
        yield f"dense features are {list(names)}, but the model has {list(plain)}"
    says = {f.name: (f.table, f.max_length, f.scaled) for f in schema.categorical}
    takes = {f.name: (f.table, f.max_length, f.weighted) for f in manifest.features}
    for name in sorted(says.keys() ^ takes.keys()):
        yield f"feature {name!r} is not of both the schema and the model"
    for name, model in takes.items():
        if says[name] != model:
            yield f"feature {name!r} has table, max_length, weights {says[name]}, but the model has {model}"
    for table in schema.tables:
        held = sum(part.rows for part in manifest.tables.get(table.name, ()))
        # A model that ranks has only the tables that requests read; one that grows has its capacity, whatever the
        # dataset had.
        if held != table.rows and held and not table.growing:
            yield f"table {table.name!r} has {table.rows:,} rows, but the model has {held:,}"
        # Found by name where they are there: one that was put into the folder afterwards would be read without a
        # checksum.
        named = (table.vocabulary, buckets_file(table.name), table.bijection and table.bijection.file)
        for file in named:
            if file and file not in manifest.files and (folder / file).exists():
                yield f"table {table.name!r} reads {file}, which the manifest does not list"
    for file in schema.statistic_files:
        if file not in manifest.files and (folder / file).exists():
            yield f"a dense feature reads {file}, which the manifest does not list"
    if schema.identity.rows != manifest.rows:
        yield "its features and tables mean other values than the model's (another dataset)"


def _names(manifest: Manifest) -> list[str]:
    return [*manifest.dense, *(feature.name for feature in manifest.features)]


def _repeated(names: Iterable[str]) -> list[str]:
    earlier: set[str] = set()
    return [name for name in names if name in earlier or earlier.add(name)]
