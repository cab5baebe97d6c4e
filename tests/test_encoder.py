"""Raw values encoded without a dataset equal the log that is prepared with --vocabulary-from, batch for batch."""

import dataclasses
import gzip
import itertools
import os
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import pyarrow as pa
import pytest

from jrec.data.bijection import save_order
from jrec.data.blocks import ListColumn
from jrec.data.dataset_packer import dataset_packer, pack_encoded
from jrec.data.fae import FaeManifest
from jrec.data.fae.manifest import HotSet
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.schema import DatasetError, Schema
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.prepare.encoder import Encoder
from jrec.prepare.fae_pack import pack
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Avazu, Criteo, Delimited, MovieLens, MovieLensOptions, Taobao, load_schema

COLUMNS = """
time.column = "at"
[label]
column = "bought"
[[dense]]
column = "price"
transform = "log1p"
missing = 2
[[dense]]
column = "age"
[[categorical]]
column = "user"
[[categorical]]
column = "items"
table = "item"
separator = "|"
max_length = 3
too_long = "last"
weights = "strengths"
[[categorical]]
column = "tags"
separator = "; "
"""
NAMES = ("at", "bought", "price", "age", "user", "items", "strengths", "tags", "other")


def lines_of(seed, rows=230):
    """A log in order of time, whose values are of every kind, some of them missing."""
    rng, lines = np.random.default_rng(seed), []
    for at in range(rows):
        length, user = int(rng.integers(5)), int(rng.integers(20))
        lines.append([str(at), str(rng.integers(2)), ["", f"{rng.random():.3f}"][at % 5 > 0], str(rng.integers(9)),
                      ["", f"u{user}", f"a user of a long name {user}", str(10**9 + user)][user % 4],
                      "|".join(f"item{rng.integers(12)}" for _ in range(length)),
                      "|".join(f"{rng.random():.2f}" for _ in range(length)),
                      "; ".join(f"tag {rng.integers(4)}" for _ in range(rng.integers(3))), "x"])  # fmt: skip
    return lines


def written(path, lines, names=NAMES):
    path.write_text("\n".join(",".join(line) for line in [names, *lines]) + "\n")
    return str(path)


def layout_of(schema):
    features = [FeatureConfig(name=f.name, table=f.table, max_length=f.max_length, fixed_length=f.fixed_length,
                              weighted=f.weighted) for f in schema.categorical]  # fmt: skip
    return EmbeddingLayout.build([TableConfig(name=t.name, rows=t.rows, dim=4) for t in schema.tables], features)


def assert_equal_batches(schema, pieces, size):
    """What the loader makes of a dataset's test split, and what is packed of encoded pieces."""
    layout = layout_of(schema)
    packer = dataset_packer(schema.folder, schema, layout, cast="host")
    order = LoaderConfig(batch_size=size, shuffle=False, workers=0, cast="host")
    loader = make_loader(schema.folder, schema, layout, "test", order)
    for expected, piece in itertools.zip_longest(loader, pieces):
        jax.tree.map(np.testing.assert_array_equal, pack_encoded(packer, piece, size), expected)


def later(schema, source, inputs, out, **options):
    options = PrepareOptions(vocabulary_from=str(schema.folder), split=(0, 0, 1), block_size=64, shard_examples=128,
                             threads=1, **options)  # fmt: skip
    return prepare(source, inputs, out, options)


def without(schema, folder):
    """The same schema in a folder that holds what an encoder needs, and no more."""
    folder.mkdir()
    for name in ("schema.json", "vocabulary", "buckets", "reorder"):
        if (path := schema.folder / name).exists():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / name)
    return Schema.load(folder, check_files=False)


@pytest.fixture
def shop(tmp_path):
    """Prepared clicks, one table of them reordered; the format."""
    (tmp_path / "columns.toml").write_text(COLUMNS)
    source = Delimited(load_schema(str(tmp_path / "columns.toml")))
    schema = prepare(source, [written(tmp_path / "first.csv", lines_of(0))], tmp_path / "shop", PrepareOptions())
    order = np.random.default_rng(1).permutation(schema.tables[1].rows).astype(np.uint32)
    tables = [
        schema.tables[0],
        dataclasses.replace(schema.tables[1], bijection=save_order(tmp_path / "shop", "item", order)),
    ]
    dataclasses.replace(schema, tables=(*tables, *schema.tables[2:])).save(tmp_path / "shop")
    return Schema.load(tmp_path / "shop"), source


def as_columns(lines, form):
    raw = dict(zip(NAMES, zip(*lines, strict=True), strict=True))
    if form == "texts":
        return raw
    raw["price"] = [float(v) if v else None for v in raw["price"]]
    raw["age"] = np.array(raw["age"], np.int64)
    raw["user"] = [v or None for v in raw["user"]]
    raw["items"] = [v.split("|") if v else [] for v in raw["items"]]
    raw["strengths"] = [[float(w) for w in v.split("|")] if v else [] for v in raw["strengths"]]
    raw["tags"] = [v.split("; ") if v else None for v in raw["tags"]]
    return raw if form == "lists" else pa.table(raw)


@pytest.mark.parametrize("form", ["texts", "lists", "arrow"])
def test_columns_equal_the_prepared_log(tmp_path, shop, form):
    schema, source = shop
    lines = lines_of(1)
    made = later(schema, source, [written(tmp_path / "second.csv", lines)], tmp_path / "second")
    encoder = Encoder(without(schema, tmp_path / "bare"))
    assert encoder.raw_columns == ("price", "age", "user", "items", "tags", "strengths")
    assert list(encoder.orders) == ["item"]
    columns = as_columns(lines, form)
    whole = encoder.columns(columns)
    assert whole.labels is None
    whole = dataclasses.replace(whole, labels=np.array([float(line[1]) for line in lines], np.float32))
    assert_equal_batches(made, [whole.cut(start, min(start + 50, 230)) for start in range(0, 230, 50)], 50)


def test_what_is_encoded_stays_when_the_columns_are_written_over(shop):
    encoder, rng = Encoder(shop[0]), np.random.default_rng(0)
    offsets, numbers = np.array([0, 2, 3]), np.arange(3)
    columns = {
        "price": rng.random(2),
        "age": rng.random(2, np.float32),
        "user": 10**9 + np.arange(2),
        "items": ListColumn(offsets, numbers),
        "strengths": ListColumn(offsets, rng.random(3, np.float32)),
        "tags": ListColumn(offsets, numbers),
    }
    encoded = encoder.columns(columns)
    copied = jax.tree.map(np.copy, encoded.by_name())
    for leaf in jax.tree.leaves(columns):
        leaf[:] = 0
    jax.tree.map(np.testing.assert_array_equal, encoded.by_name(), copied)


@pytest.mark.parametrize("kind", ["plain", "gzip", "pipe", "several"])
def test_a_streamed_log_equals_the_prepared_one(tmp_path, shop, kind, monkeypatch):
    schema, source = shop
    monkeypatch.setattr("jrec.prepare.readers.lines.BLOCK_BYTES", 900)
    lines = lines_of(1)
    path = written(tmp_path / "second.csv", lines)
    made = later(schema, source, [path], tmp_path / "second")
    inputs = [path]
    if kind == "several":
        inputs = [written(tmp_path / f"{i}.csv", part) for i, part in enumerate((lines[:90], lines[90:]))]
    elif kind == "gzip":
        (tmp_path / "packed").write_bytes(gzip.compress((tmp_path / "second.csv").read_bytes()))
        inputs = str(tmp_path / "packed")
    elif kind == "pipe":
        os.mkfifo(tmp_path / "pipe")
        content = (tmp_path / "second.csv").read_bytes()
        threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(content)).start()
        inputs = str(tmp_path / "pipe")
    pieces = list(Encoder(schema).stream(inputs, batch_size=50))
    assert [piece.examples for piece in pieces] == [50, 50, 50, 50, 30]
    assert_equal_batches(made, pieces, 50)


def test_lines_keep_their_order_and_need_no_labels(tmp_path, shop):
    schema, _ = shop
    lines = lines_of(1)[::-1]
    (piece,) = Encoder(schema).stream(written(tmp_path / "backwards.csv", lines), batch_size=1000)
    assert piece.labels.tolist() == [float(line[1]) for line in lines]
    np.testing.assert_array_equal(piece.by_name()["age"], [float(line[3]) for line in lines])
    names = [name for name in NAMES if name != "bought"]
    unlabelled = written(tmp_path / "unlabelled.csv", [[*line[:1], *line[2:]] for line in lines], names)
    (other,) = Encoder(schema).stream(unlabelled, batch_size=1000)
    assert other.labels is None
    jax.tree.map(np.testing.assert_array_equal, other.by_name(), piece.by_name())
    packer = dataset_packer(schema.folder, schema, layout_of(schema))
    assert not pack_encoded(packer, other).labels.any()


FORMATS = {
    "criteo": (lambda: Criteo("criteo-terabyte"), "criteo_terabyte_1k.tsv.gz", "\t", 0),
    "avazu": (Avazu, "avazu_9k.csv.gz", ",", 1),
}


@pytest.mark.parametrize("name", FORMATS)
def test_published_formats(tmp_path, shared_data, name):
    """Streamed, without labels, and as columns; with tables that are hashed with a seed of their own."""
    make, file, delimiter, label = FORMATS[name]
    with gzip.open(shared_data / file, "rt") as text:
        lines = list(itertools.islice(text, 1000))
    header, first, second = lines[:1] if name == "avazu" else [], lines[-800:-300], lines[-300:]
    for part, content in (("first", first), ("second", second)):
        (tmp_path / part).write_text("".join([*header, *content]))
    options = PrepareOptions(max_rows=20, key_seed=5, block_size=64, shard_examples=128)
    schema = prepare(make(), [str(tmp_path / "first")], tmp_path / "data", options)
    assert {table.vocabulary is None for table in schema.tables} == {True, False}
    made = later(schema, make(), [str(tmp_path / "second")], tmp_path / "later")
    pieces = list(Encoder(schema).stream(str(tmp_path / "second"), batch_size=64))
    assert_equal_batches(made, pieces, 64)
    rows = [line.rstrip("\n").split(delimiter) for line in [*header, *second]]
    if name == "criteo":
        names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    else:
        names, *rows = rows
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    assert any(columns.pop(names[label]))
    if name == "criteo":  # digits of either case
        columns["C3"] = [value.upper() for value in columns["C3"]]
    whole = Encoder(schema).columns(columns)
    assert whole.examples == 300
    for piece, start in zip(pieces, range(0, 300, 64), strict=True):
        jax.tree.map(np.testing.assert_array_equal, whole.cut(start, start + 64).by_name(), piece.by_name())
    blank, missing = Encoder(schema).blank(), {key: [None, None] for key in columns if key != "hour"}
    assert blank.examples == 1
    others = Encoder(schema).columns(missing | ({"hour": columns["hour"][:2]} if name == "avazu" else {}))
    for own, ids in blank.ids.items():
        if own not in ("hour_of_day", "weekday"):  # of a time that may not be missing
            np.testing.assert_array_equal(ids, others.ids[own][:1])
    np.testing.assert_array_equal(blank.dense, others.dense[:1])
    bare = [*(["C1"] if name == "criteo" else ["hour"])]
    with pytest.raises(DatasetError, match=rf"column\(s\) {bare[0]} are missing; .* Give every column"):
        Encoder(schema).columns({k: v for k, v in columns.items() if k not in bare})


def test_the_parts_that_fae_packs_encode_as_their_dataset(tmp_path, shared_data):
    with gzip.open(shared_data / "criteo_terabyte_1k.tsv.gz", "rt") as file:
        lines = file.readlines()
    for name, part in (("first", lines[:600]), ("second", lines[600:])):
        (tmp_path / name).write_text("".join(part))
    options = PrepareOptions(max_rows=20, key_seed=5, block_size=64, shard_examples=128)
    schema = prepare(Criteo("criteo-terabyte"), [str(tmp_path / "first")], tmp_path / "data", options)
    assert any(table.vocabulary is None for table in schema.tables)
    hot = HotSet(rows={table.name: np.arange(3, dtype=np.uint32) for table in schema.tables})
    pack(tmp_path / "data", tmp_path / "packed", hot)
    cold = Schema.load(FaeManifest.load(tmp_path / "packed").cold_folder)
    for of_part, of_whole in zip(*(Encoder(s).stream(str(tmp_path / "second"), batch_size=99) for s in (cold, schema)),
                                 strict=True):  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, of_part.by_name(), of_whole.by_name())
    made = later(cold, Criteo("criteo-terabyte"), [str(tmp_path / "second")], tmp_path / "later")
    assert made.identity.rows == schema.identity.rows


def test_formats_that_make_examples_take_columns_of_features(tmp_path):
    lines = "".join(f"{i % 9 + 1}::{i % 7 + 1}::{i % 5 + 1}::{i}\n" for i in range(100))
    (tmp_path / "ratings.dat").write_text(lines)
    (tmp_path / "movies.dat").write_text(
        "".join(f"{i}::A film ({1980 + i})::Drama|{'War' * (i % 2)}\n" for i in range(1, 8))
    )
    source = MovieLens(MovieLensOptions(movies=str(tmp_path / "movies.dat")))
    schema = prepare(source, [str(tmp_path / "ratings.dat")], tmp_path / "data", PrepareOptions(min_count=1))
    encoder = Encoder(schema)
    with pytest.raises(DatasetError, match="prepare the log with --vocabulary-from, and predict that dataset"):
        encoder.stream(str(tmp_path / "ratings.dat"), batch_size=8)
    assert encoder.raw_columns == ("user_id", "movie_id", "genres", "year")
    asked = {"user_id": [3, 77], "movie_id": ["2", "2"], "genres": [["Drama", "Opera"], []], "year": [1982, None]}
    encoded = encoder.columns(asked)
    rows = {}
    for table in schema.tables:
        content = pa.parquet.read_table(schema.folder / table.vocabulary).to_pydict()
        rows[table.name] = dict(zip(content["value"], content["row"], strict=True))
    oov = {table.name: table.oov_row for table in schema.tables}
    assert encoded.ids["user_id"].tolist() == [rows["user_id"]["3"], oov["user_id"]]
    assert encoded.ids["year"].tolist() == [rows["year"]["1982"], oov["year"]]
    assert encoded.ids["genres"].values.tolist() == [rows["genres"]["Drama"], oov["genres"]]
    assert encoded.ids["genres"].offsets.tolist() == [0, 2, 2]
    with pytest.raises(DatasetError, match="'genres' has 3 values in example 0, but may have up to 2"):
        encoder.columns({**asked, "genres": [["a", "b", "c"], []]})


def test_events_of_taobao_are_streamed(tmp_path):
    kinds = ("pv", "buy", "cart", "fav")
    lines = "".join(f"{i % 9},{i % 7},{i % 3},{kinds[i % 4]},{1511600000 + 977 * i}\n" for i in range(100))
    (tmp_path / "log.csv").write_text(lines)
    schema = prepare(Taobao(), [str(tmp_path / "log.csv")], tmp_path / "data", PrepareOptions(min_count=1))
    made = later(schema, Taobao(), [str(tmp_path / "log.csv")], tmp_path / "later")
    assert_equal_batches(made, list(Encoder(schema).stream(str(tmp_path / "log.csv"), batch_size=32)), 32)


ROW = {"price": [1.0], "age": [2], "user": ["u1"], "items": [["a"]], "strengths": [[0.5]], "tags": [[]]}


def test_nothing_but_missing_values(shop):
    encoder = Encoder(shop[0])
    texts = encoder.columns({**dict.fromkeys(ROW, [""] * 2), "age": ["3", "4"]})
    assert texts.ids["items"].offsets.tolist() == [0, 0, 0]
    for missing in ([None, None], pa.nulls(2), pa.nulls(2, pa.string())):
        encoded = encoder.columns({**dict.fromkeys(ROW, missing), "age": [3, 4]})
        jax.tree.map(np.testing.assert_array_equal, encoded.by_name(), texts.by_name())
    none = encoder.columns({name: [] for name in ROW})
    assert none.examples == 0
    assert none.ids["tags"].offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("strengths", [[0.5, None]], "column 'strengths' holds 'no value' in example 0, which is missing; give one"),
        ("age", ["old"], "column 'age' holds 'old' in example 0, which is not a finite number"),
        ("age", [np.inf], "column 'age' holds .*inf.* in example 0, which is not a finite number"),
        ("age", [1e39], "column 'age' of example 0 is too large for float32"),
        ("user", [["u1"]], "column 'user' holds lists, but it has one value an example"),
        ("items", [3], "column 'items' holds one int64 an example, but lists are wanted"),
        ("strengths", [[0.5, 1]], "column 'strengths' of example 0 is not one weight for each value of 'items'"),
    ],
)
def test_bad_values_are_named(shop, column, value, message):
    encoder = Encoder(shop[0])
    assert encoder.columns(ROW).examples == 1
    with pytest.raises(DatasetError, match=message):
        encoder.columns({**ROW, column: value})


def test_bad_lines_and_inputs_are_named(tmp_path, shop):
    encoder, lines = Encoder(shop[0]), lines_of(1)
    lines[7][3] = "old"
    path = written(tmp_path / "bad.csv", lines)
    with pytest.raises(DatasetError, match=r"bad.csv:9: field 'age' holds 'old', .*every line gets a prediction"):
        list(encoder.stream(path, batch_size=8))
    with pytest.raises(DatasetError, match=r"absent.csv does not exist"):
        encoder.stream(str(tmp_path / "absent.csv"), batch_size=8)
    with pytest.raises(DatasetError, match="was not read from a folder"):
        Encoder(dataclasses.replace(shop[0], folder=None))


def test_encoding_columns_loads_no_jax(tmp_path, shop):
    script = (
        "import sys; from jrec.prepare.encoder import Encoder; from jrec.data.schema import Schema;"
        f"e = Encoder(Schema.load({str(shop[0].folder)!r}, check_files=False));"
        f"r = {ROW!r}; assert isinstance(e.columns(r).ids['user'][0].item(), int); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
