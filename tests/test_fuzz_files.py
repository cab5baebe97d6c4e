"""Every file that jrec reads, damaged at random: it is refused by an error of jrec's own, or what is read is the same.

A format is a line of ``FORMATS``: the files that make it up, and how they are read. Raw mutations change bytes; where a
format has a checksum, structural ones change a value of its JSON and seal it again, as a program with a defect would.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import mutations
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoint_cases import chain_of_three
from checkpoint_state import contents
from prepared_logs import LOG, prepared
from run_cases import CONFIG

from jrec.access.calibrate import CalibrateOptions, calibrate
from jrec.access.calibrate.file import Calibration
from jrec.access.count import exact_profile
from jrec.access.profile import AccessProfile
from jrec.app.config import load_config
from jrec.app.models.catalogue import catalogue_of
from jrec.app.run_record import TrainedRun
from jrec.checkpoint import Checkpoints
from jrec.checkpoint.files import _checksum
from jrec.data.bijection import load_orders, save_order
from jrec.data.blocks import ShardReader
from jrec.data.columns import concatenate
from jrec.data.fae.examples import read_blocks
from jrec.data.schema import DatasetError, Schema
from jrec.errors import JrecError
from jrec.files import _seal
from jrec.prepare.fae_pack import pack, verify
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers.columnar import parse_rows
from jrec.prepare.readers.delimited import Delimited
from jrec.prepare.readers.delimited_schema import load_schema
from jrec.prepare.readers.parse import Dialect, Field
from jrec.prepare.readers.tables import column_types, read_rows
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.prepare.target_means import LabelCounts
from jrec.sharding import Problem, build_plan, load_plan, plan_placement, save_plan
from jrec.sharding.drift import describe, options_of_plan, problem_of_plan
from jrec.sharding.hardware import grid, load_hardware
from jrec.sharding.planner import PlanOptions
from jrec.sharding.problem import tables_of
from jrec.table_files import StoredTable, Tensors, write_overlay, write_tensors

DEFAULT, SLOW = 216, 2520  # mutations of all formats together
MANY = {"plan": 500}  # of a format, where it has more

HARDWARE_TOML = """
name = "small"
devices = 2
memory = "1GB"
lookup = "1TB/s"
within = 1e11
all_reduce = "20GB/s"
tables_on = "1"
"""
COLUMNS_TOML = """
delimiter = ","
[label]
column = "label"
[[categorical]]
column = "a"
[[categorical]]
column = "b"
separator = "|"
[[categorical]]
column = "c"
[[cross]]
of = ["a", "c"]
[[target_mean]]
of = ["a_c"]
smoothing = 2
"""
MEANS_TOML = """
label.column = "label"
[[categorical]]
column = "a"
[[target_mean]]
of = ["a"]
"""
ITEMS_TOML = """
[time]
column = "at"
[[dense]]
column = "price"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
[[categorical]]
column = "words"
separator = "|"
"""
TOWERS_TOML = """
[data]
path = "items"
[model]
kind = "two_tower"
two_tower = {user = ["user"], item = ["item", "words", "price"], id = "item"}
"""


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
      files: Patterns of paths below the world's folder; any of them is damaged.
      read: From the folder to a value that ``same`` compares, by the doors that commands use.
      sealed: Whether every damage is to be noticed; else files that are still valid are read as what they say.
      structure: How to change a value inside: "json", "container", "toml" or "" for bytes alone.
      naming: What every error is to hold besides a message, one of these or the path of the file; () for anything.
    """

    files: Sequence[str]
    read: Callable[[pathlib.Path], Any]
    sealed: bool = True
    structure: str = ""
    naming: Sequence[str] = ()


def read_table(folder):
    return [rows for _, rows in StoredTable(Tensors(folder / "tables"), "e.weight").chunks()]


def read_overlaid(folder):
    return StoredTable(Tensors(folder / "tables"), "e.weight", overlays=[folder / "edit.overlay"]).read(range(4))


def read_dataset(folder, name="data"):
    schema = Schema.load(folder / name)
    blocks = [
        read_blocks(ShardReader(folder / name, shard), schema, block, block + 1)
        for split in schema.splits.values()
        for shard in split.shards
        for block in range(shard.blocks)
    ]
    orders = load_orders(folder / name, schema, [t.name for t in schema.tables])
    return [dataclasses.replace(schema, folder=None), schema.identity, blocks, orders]


def read_counts(folder):
    return [t.counts for t in exact_profile(folder / "data").tables]


def read_label_counts(folder):
    read = [LabelCounts.load(f, Schema.load(f), "means/a.npy") for f in (folder / "means", folder / "number_means")]
    return [column for counts in read for column in (counts.keys, counts.sums, counts.counts)]


def read_vocabularies(folder):
    schema = Schema.load(folder / "csv")
    return [schema.check_file(folder / "csv", t.vocabulary).read_bytes() for t in schema.tables if t.vocabulary]


def read_bijections(folder):
    schema = Schema.load(folder / "ordered")
    return load_orders(folder / "ordered", schema, [t.name for t in schema.tables])


def read_profile(folder):
    profile = AccessProfile.load(folder / "access")
    profile.check_dataset(Schema.load(folder / "data", check_files=False))
    return (
        [(t.name, t.starts, t.counts, t.smoothed().counts) for t in profile.tables],
        profile.examples,
        profile.dataset,
    )


def read_plan(folder):
    plan = load_plan(folder / "plan", schema=Schema.load(folder / "data", check_files=False), devices=2)
    problem = problem_of_plan(plan, exact_profile(folder / "data"))
    located = [plan.locate(t.name, np.arange(t.rows)) for t in plan.tables]
    placed = plan.placement(problem)
    return [plan.tables, dict(plan.info), options_of_plan(plan), located, placed.owner, placed.core_bytes, plan.dataset]


def read_calibration(folder):
    found = Calibration.load(folder / "hot.fae")
    found.check_dataset(Schema.load(folder / "data", check_files=False))
    return found.summary(), found.hot_set().rows


def read_fae(folder):
    manifest = verify(folder / "fae")
    return dataclasses.asdict(manifest) | {"folder": ""}, manifest.hot_rows


def read_catalogue(folder, *, keep=False):
    config = load_config(folder / "towers.toml", [f"data.path={str(folder / 'items')!r}"])
    schema = config.model.of_kind.schema(config.model, Schema.load(folder / "items"))
    found = catalogue_of(folder / "towers", config, schema, schema.identity, keep=keep)
    assert found is not None
    return [found.rows, found.columns]


def read_checkpoint(folder):
    saved = Checkpoints(folder / "checkpoints").open(3)
    saved.verify()
    return contents(saved), saved.manifest


LOG_FIELDS = [
    Field(name=name, kind="texts" if name == "list" else "text")
    for name in ("int", "float", "text", "list", "uuid", "time", "few", "bool")
]


def write_parquet_logs(folder):
    """The same rows twice, in the two ways in which pages are written."""
    rng, rows = np.random.default_rng(0), 300
    table = pa.table({
        "int": pa.array(rng.integers(0, 10**12, rows)),
        "float": pa.array(rng.random(rows), pa.float32()),
        "text": pa.array([f"value {k % 40}" if k % 7 else None for k in range(rows)]),
        "list": pa.array([[f"t{j}" for j in range(k % 4)] for k in range(rows)]),
        "uuid": pa.array([rng.bytes(16) for _ in range(rows)], pa.uuid()),
        "time": pa.array(rng.integers(0, 10**9, rows), pa.timestamp("ms")),
        "few": pa.array(["a", "b", "c"] * (rows // 3)).dictionary_encode(),
        "bool": pa.array(rng.random(rows) < 0.5),
    })  # fmt: skip
    pages = {"write_page_checksum": True, "row_group_size": 130, "data_page_size": 512}
    pq.write_table(table, folder / "log.parquet", **pages)
    pq.write_table(
        table, folder / "log2.parquet", data_page_version="2.0", compression="zstd", use_dictionary=["few"], **pages
    )


def read_parquet_logs(folder):
    """The columns of every piece of rows.

    No checksum covers the footer. A flipped bit there that still makes sense is a column of another type (a time in
    another zone, say, in 3 of 26,000 mutations), which is refused here in place of whoever looks at the schema.
    """
    read = []
    for path in (str(folder / "log.parquet"), str(folder / "log2.parquet")):
        types = column_types(path)
        if [str(types.get(field.name)) for field in LOG_FIELDS] != LOG_TYPES:
            raise DatasetError(f"{path}: columns of other types")
        dialect = Dialect(fields=tuple(LOG_FIELDS), table=True)
        parsed = [parse_rows(rows, dialect, 0) for rows in read_rows(path, dialect)]
        read.append([one.columns for one in parsed])
    return read


LOG_TYPES = [
    "int64", "float", "string", "list<element: string>", "extension<arrow.uuid>", "timestamp[ms]",
    "dictionary<values=string, indices=int32, ordered=0>", "bool",
]  # fmt: skip
SHARD = "train-00000-of-00001.array_record"
FORMATS = {
    "shard": Format((f"data/{SHARD}", f"data/{SHARD.replace('train', 'test')}"), read_dataset),
    "schema": Format(("data/schema.json",), read_dataset, structure="json"),
    "counts": Format(("data/counts/*.npy",), read_counts),
    "labels' counts": Format(("means/means/a.npy", "number_means/means/a.npy"), read_label_counts),
    "vocabulary": Format(("csv/vocabulary/a.parquet",), read_vocabularies),
    "Parquet log": Format(("log.parquet", "log2.parquet"), read_parquet_logs),
    "bijection": Format(("ordered/reorder/*.npy",), read_bijections),
    "profile": Format(("access",), read_profile, structure="container"),
    "plan": Format(("plan",), read_plan, structure="container", naming=("the plan does not say",)),
    "calibration": Format(("hot.fae",), read_calibration, structure="container"),
    "FAE folder": Format(("fae/fae.json",), read_fae, structure="json"),
    "FAE parts": Format(("fae/hot/schema.json", "fae/cold/schema.json"), read_fae, structure="json"),
    "FAE files": Format(("fae/hot_rows/*.npy", f"fae/hot/{SHARD}", f"fae/cold/{SHARD}"), read_fae),
    "run's dataset": Format(("run/dataset.json",), lambda folder: TrainedRun(folder / "run").dataset, structure="json"),
    "catalogue": Format(("towers/catalogue",), read_catalogue, structure="container"),
    "checkpoint": Format(("checkpoints/3/manifest.json",), read_checkpoint, structure="json"),
    "checkpoint's files": Format(
        ("checkpoints/3/arrays", "checkpoints/3/tables/*/0000/*/c.*", "checkpoints/3/tables/*/0001/values/zarr.json"),
        read_checkpoint,
    ),
    "configuration": Format(("run.toml",), lambda f: load_config(f / "run.toml"), sealed=False, structure="toml"),
    "table files": Format(("tables/*.safetensors", "tables/*.json"), read_table, sealed=False, structure=""),
    "overlay": Format(("edit.overlay",), read_overlaid),
    "hardware": Format(("machine.toml",), lambda f: load_hardware(f / "machine.toml"), sealed=False, structure="toml"),
    "columns": Format(("columns.toml",), lambda f: load_schema(f"{f}/columns.toml"), sealed=False, structure="toml"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a file of each format, and for each what reading it gives."""
    folder = tmp_path_factory.mktemp("fuzz")
    data = folder / "data"
    synthesize(shape_like("quickstart"), data, SynthOptions(rows=700, seed=0, block_size=64, split=(0.8, 0.0, 0.2)))
    schema = Schema.load(data)
    prepared(folder, LOG, "csv")
    for name, label in (("means", ""), ("number_means", 'label.kind = "number"\n')):
        (folder / "means.toml").write_text(label + MEANS_TOML)
        means = Delimited(load_schema(f"{folder}/means.toml"))
        prepare(means, [str(folder / "csv.csv")], folder / name, PrepareOptions(threads=1))
    shutil.copytree(data, folder / "ordered")
    order = np.random.default_rng(0).permutation(schema.tables[0].rows).astype(np.uint32)
    entry = save_order(folder / "ordered", schema.tables[0].name, order)
    tables = (dataclasses.replace(schema.tables[0], bijection=entry), *schema.tables[1:])
    dataclasses.replace(schema, tables=tables).save(folder / "ordered")
    profile = exact_profile(data)
    profile.save(folder / "access")
    machine = grid("small", devices=2, memory=10**9, lookup=1e12, within=1e11, all_reduce=1e10)
    rows = [(t.name, t.rows) for t in schema.tables]
    problem = Problem(
        tables=tables_of(rows, 8, dtype="float32", slot_bytes=4), profile=profile, hardware=machine, batch_size=64
    )
    options = PlanOptions()
    planned = plan_placement(problem, options)
    plan = build_plan(problem, planned.placement, describe(problem, options, planned, data=schema.name))
    save_plan(plan, folder / "plan")
    calibration = calibrate(data, CalibrateOptions(budget=30_000, small_bytes=4_000))
    calibration.save(folder / "hot.fae")
    pack(data, folder / "fae", calibration.hot_set())
    chain_of_three(folder / "checkpoints")
    (folder / "run").mkdir()
    TrainedRun(folder / "run").keep_dataset(schema.identity)
    (folder / "items.toml").write_text(ITEMS_TOML)
    lines = "".join(f"u{k % 7},i{k % 11},a{k % 3}|b{k % 2},{k % 5},{k}\n" for k in range(200))
    (folder / "items.csv").write_text(f"user,item,words,price,at\n{lines}")
    source, options = Delimited(load_schema(f"{folder}/items.toml")), PrepareOptions(labels=False, threads=1)
    prepare(source, [str(folder / "items.csv")], folder / "items", options)
    (folder / "towers").mkdir()
    (folder / "towers.toml").write_text(TOWERS_TOML)
    read_catalogue(folder, keep=True)
    (folder / "run.toml").write_text(CONFIG.replace("[data]", '[data]\npath = "data"'))
    (folder / "machine.toml").write_text(HARDWARE_TOML)
    (folder / "columns.toml").write_text(COLUMNS_TOML)
    scaled = {"e.weight": np.arange(-32, 32, dtype=np.int8).reshape(4, 16), "e.scale": np.ones((4, 1), np.float32)}
    write_tensors(folder / "tables", scaled)
    table = StoredTable(Tensors(folder / "tables"), "e.weight")
    write_overlay(folder / "edit.overlay", np.ones((2, 16)), ids=np.array([1, 3]), like=table)
    write_parquet_logs(folder)
    return folder


def files_of(kind, folder):
    """The files of a format; of several that a pattern names the first."""
    return [sorted(folder.glob(pattern))[0] for pattern in FORMATS[kind].files]


def same(one, other):
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


# Mutations


def replace(rng, content, other):
    return other


def delete(rng, content, other):
    return None


def _raw(mutation):
    @functools.wraps(mutation)
    def mutate(rng, content, other):
        del other
        return mutation(rng, content)

    return mutate


RAW = (*map(_raw, mutations.RAW), replace, delete)
TOML_VALUES = (
    "4.5", "-1", "0", str(2**62), str(2**70), "1" * 5000, "1e400", "nan", "inf", "true", '""', '"x"', "[]", "{}",
    "[[[]]]", "[" * 5000, "{a = " * 3000, '"\\ud800"', "1979-05-27", "'''", "[1, 'a', {}]", "{x = 1}",
)  # fmt: skip
TOML_TABLES = ("[data.path]", "[[data]]", "[a.b.c]", "[[label]]", "[categorical]", "[model.features.x]")


def change_json(rng, content):
    tree = mutations.change(rng, json.loads(content))
    for key, seal in (("sha256", _seal), ("checksum", _checksum)):
        if key in tree and rng.random() < 0.9:
            del tree[key]
            with contextlib.suppress(ValueError, RecursionError):
                tree[key] = seal(tree)
    return mutations.as_json(tree)


def change_container(rng, content):
    """The header, a description of an array or an array's numbers, under a checksum that fits."""
    first, _, rest = content.partition(b"\n")
    (length,) = struct.unpack_from("<Q", rest)
    tree, arrays = json.loads(rest[8 : 8 + length]), rest[8 + length : -32]
    if rng.random() < 0.5:
        arrays = change_array(rng, tree["arrays"], arrays)
    else:
        tree = mutations.change(rng, tree)
    text = mutations.as_json(tree)
    whole = first + b"\n" + struct.pack("<Q", len(text)) + text + arrays
    return whole + hashlib.sha256(whole).digest()


def change_array(rng, entries, body):
    """The body with a number of an array changed, whose description gets its new size."""
    number = rng.choice([k for k, entry in enumerate(entries) if math.prod(entry["shape"])])
    at = sum(entry["bytes"] for entry in entries[:number])
    entry = entries[number]
    values = np.frombuffer(zlib.decompress(body[at : at + entry["bytes"]]), entry["dtype"]).copy()
    info = np.iinfo if values.dtype.kind in "iu" else np.finfo
    place, most = rng.randrange(values.size), info(values.dtype)
    changed = rng.choice((0, 1, most.min, most.max, values[rng.randrange(values.size)], values[place] // 2))
    values[place] = changed if values[place] != changed else changed ^ 1 if info is np.iinfo else 0.5
    packed = zlib.compress(values.tobytes())
    body = body[:at] + packed + body[at + entry["bytes"] :]
    entry["bytes"] = len(packed)
    return body


def change_toml(rng, content):
    lines = content.decode().splitlines()
    at = rng.choice([i for i, line in enumerate(lines) if line])
    key, equals, _ = lines[at].partition("=")
    what = rng.choice(("value", "value", "value", "delete", "double", "rename", "deep", "table"))
    if what == "value" and equals:
        lines[at] = f"{key}= {rng.choice(TOML_VALUES)}"
    elif what == "delete":
        del lines[at]
    elif what == "double":
        lines.insert(at, lines[at])
    elif what == "rename" and equals:
        lines[at] = f"{key.strip()}s = 1"
    elif what == "table":
        lines[at] = rng.choice(
            ("[data.path]", "[[data]]", "[a.b.c]", "[[label]]", "[categorical]", "[model.features.x]")
        )
    else:
        lines.insert(0, ".".join(["a"] * 3000) + " = 1")
    return "\n".join(lines).encode()


STRUCTURAL = {"json": change_json, "container": change_container, "toml": change_toml}


# The harness


def outcome(kind, folder, expected, *, must_equal):
    """None where the damage was refused or changed nothing; else what happened instead."""
    fmt = FORMATS[kind]
    try:
        with mutations.bounded():
            value = fmt.read(folder)
            equal = same(expected, value)
    except JrecError as error:
        naming = [*fmt.naming, *(str(folder / file) for file in fmt.files)] if fmt.naming else [""]
        named = any(name in str(error) for name in naming)
        return None if str(error).strip() and named else f"an error that names no file: {error}"
    except (Exception, RecursionError, MemoryError) as error:
        return f"{type(error).__module__}.{type(error).__name__}: {str(error)[:300]}"
    return None if equal or not must_equal else "another value was read"


def attack(kind, folder, count, seed):
    """The mutations that were neither refused nor harmless."""
    fmt, rng = FORMATS[kind], random.Random(f"{kind} {seed}")
    files = files_of(kind, folder)
    expected, bad = fmt.read(folder), []
    assert same(expected, fmt.read(folder))
    others = [p for p in folder.rglob("*") if p.is_file()]
    for number in range(count):
        path = rng.choice(files)
        content = path.read_bytes()
        structural = bool(fmt.structure) and rng.random() < 0.6
        mutate = STRUCTURAL[fmt.structure] if structural else rng.choice(RAW)
        if structural:
            damaged = mutate(rng, content)
        else:
            alike = [p for p in others if p.suffix == path.suffix and p != path] or others
            damaged = mutate(rng, content, rng.choice(alike).read_bytes())
        try:
            path.unlink()  # a link in a packed folder leads to the dataset's own file
            if damaged is not None:
                path.write_bytes(damaged)
            found = outcome(kind, folder, expected, must_equal=fmt.sealed and not structural)
            if found is not None:
                bad.append(f"{kind}, mutation {number} ({mutate.__name__}) of {path.name}: {found}")
        finally:
            path.write_bytes(content)
    return bad


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_are_refused_or_read_the_same(world, kind):
    bad = attack(kind, world, MANY.get(kind, -(-DEFAULT // len(FORMATS))), seed=0)
    assert not bad, "\n".join(bad)


def test_parquet_with_page_checksums_never_changes(tmp_path):
    write_parquet_logs(tmp_path)
    first, second = (
        [concatenate(parts) for parts in zip(*(one.values() for one in log), strict=True)]
        for log in read_parquet_logs(tmp_path)
    )
    assert same(first, second)
    bad = attack("Parquet log", tmp_path, 500, seed=0)
    assert not bad, "\n".join(bad)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_many_damaged_files_are_refused_or_read_the_same(world, kind):
    bad = attack(kind, world, -(-SLOW // len(FORMATS)), seed=1)
    assert not bad, "\n".join(bad)
