"""``tables.overrides.NAME.initial_rows``: pretrained vectors become rows by value, whatever file they come in."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import shop_logs

from jrec import cli
from jrec.app.config import load_config
from jrec.app.evaluate import restore_run
from jrec.app.initial_rows import check_initial_rows
from jrec.data.bijection import load_orders
from jrec.data.schema import Schema
from jrec.data.vocabulary_file import table_values
from jrec.errors import ConfigError

DIM = 8
FROZEN = "optimizer.embedding.tables.item.frozen=true"
FORMS = ("list", "columns", "feather", "json lines", "text", "text with a header")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    shop_logs.write_log(folder / "log.csv", 600)
    return shop_logs.prepare(folder, folder / "log.csv", "data")


def words(count=80):
    """Values, some of which training lacks, and their vectors, eighths, which every form keeps."""
    values = [f"i{n}" for n in range(count)]
    return values, np.random.default_rng(0).integers(-8, 8, (count, DIM)).astype(np.float32) / 8


def written(folder, form, values=None, vectors=None):
    """A file of vectors in a form; returns its path."""
    if values is None:
        values, vectors = words()
    path = folder / f"{form.replace(' ', '_')}.vectors"
    table = pa.table({"item": pa.array(values), "vector": pa.array([*map(list, vectors)], pa.list_(pa.float64()))})
    if form == "list":
        pq.write_table(table, path)
    elif form == "columns":
        columns = {"word": pa.array(values)} | {f"d{k}": pa.array(vectors[:, k]) for k in range(DIM)}
        pq.write_table(pa.table(columns), path)
    elif form == "feather":
        pyarrow.feather.write_feather(table, str(path))
    elif form == "json lines":
        path.write_text("".join(json.dumps(line) + "\n" for line in table.to_pylist()))
    else:
        lines = [" ".join([value, *map(repr, vector.tolist())]) for value, vector in zip(values, vectors, strict=True)]
        header = [f"{len(values)} {DIM}"] if form == "text with a header" else []
        path.write_text("\n".join(header + lines) + "\n")
    return path


def trained(folder, dataset, path, *overrides, **options):
    key = f"tables.overrides.item.initial_rows={str(path)!r}"
    return shop_logs.trained(folder, dataset, key, FROZEN, "max_steps=2", *overrides, **options)


def check_rows(run, dataset, *, expected=None, start=0):
    """The rows of values with vectors are these; those of the others are not."""
    values, vectors = words()
    schema = Schema.load(dataset)
    own = table_values(dataset, schema, schema.table("item")).to_pylist()
    rows = restore_run(run).run.table("item")
    known = [row for row, value in enumerate(own) if value is not None and value in values]
    assert 30 < len(known) < len(own)
    expected = vectors if expected is None else expected
    at = [values.index(own[row]) for row in known]
    np.testing.assert_array_equal(rows[known, start : start + DIM], expected[at])
    others = np.delete(rows, known, axis=0)
    assert (np.abs(others) <= 1 / np.sqrt(len(own)) + 1e-6).all()
    return len(known)


@pytest.mark.parametrize("form", FORMS)
def test_rows_begin_as_a_file_has_them_by_value(dataset, tmp_path, form, capsys):
    run = trained(tmp_path, dataset, path := written(tmp_path, form))
    known = check_rows(run, dataset)
    rows, said = Schema.load(dataset).table("item").rows, capsys.readouterr().err
    assert f"jrec: {known} of the {rows} rows of table 'item' begin as {path} has them" in said
    assert f"; {80 - known} of its vectors are of values that training lacks" in said


@pytest.mark.parametrize(
    "overrides",
    [("tables.tier='host'",), ("mesh.devices=4", "tables.tier='sharded'"), ("model.wide=true", "model.members=3")],
)
def test_in_every_place_and_in_every_member(dataset, tmp_path, overrides):
    run = trained(tmp_path, dataset, written(tmp_path, "list"), *overrides)
    for member in range(3 if "model.wide=true" in overrides else 1):
        check_rows(run, dataset, start=member * (DIM + 1))


def test_a_run_that_goes_on_keeps_what_it_learnt(dataset, tmp_path):
    path = written(tmp_path, "list")
    key = f"tables.overrides.item.initial_rows={str(path)!r}"
    first = shop_logs.trained(tmp_path, dataset, key, "max_steps=3", "checkpoint.every_steps=2")
    path.unlink()
    shop_logs.trained(tmp_path, dataset, key, "max_steps=6", "checkpoint.every_steps=2", resume=True)
    path = written(tmp_path, "list")
    whole = shop_logs.trained(tmp_path, dataset, key, "max_steps=6", out="whole")
    np.testing.assert_array_equal(restore_run(first).run.table("item"), restore_run(whole).run.table("item"))


def test_rows_of_a_reordered_table(tmp_path):
    shop_logs.write_log(tmp_path / "log.csv", 600)
    dataset = shop_logs.prepare(tmp_path, tmp_path / "log.csv", "data")
    path = written(tmp_path, "list")
    plain = trained(tmp_path, dataset, path, out="plain")
    scores = restore_run(plain).run.table("item")
    assert cli.main(["reorder", str(dataset), "--tables", "item", "--always", "--quiet"]) == 0
    run = trained(tmp_path, dataset, path, out="reordered")
    order = load_orders(dataset, Schema.load(dataset), ["item"])["item"]
    known = np.flatnonzero((np.abs(scores) * 8 % 1 == 0).all(axis=1))  # those with vectors
    assert known.size > 30
    np.testing.assert_array_equal(restore_run(run).run.table("item")[order[known]], scores[known])


@pytest.mark.parametrize(
    ("values", "vectors", "message"),
    [
        (["i1", "i2", "i1"], np.ones((3, DIM)), "'i1' is there twice"),
        (["i1", None], np.ones((2, DIM)), "a value is null; leave out the line"),
        (["i1", "i2"], [[1.0] * DIM, [np.nan] * DIM], "the vector of row .* of table 'item' is not finite"),
        (["i1", "i2"], [[1.0] * DIM, [1.0] * 4], r"the vector of i2 \(line 2\) has 4 elements, but the first has 8"),
        (["i1", "i2"], [[1.0] * DIM, [1.0] * 7 + [None]], "lines 1 to 2 is null"),
        (["1", "2"], np.ones((2, DIM)), "none of the 2 values, such as '1', is one of the table's in"),
    ],
)
def test_what_is_wrong_with_a_file_ends_the_run(dataset, tmp_path, values, vectors, message):
    path = written(tmp_path, "list", values, vectors)
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path, dataset, path)


def config_of(dataset, path, *overrides):
    keys = [f"data.path={str(dataset)!r}", f"tables.overrides.item.initial_rows={str(path)!r}"]
    (file := path.parent / "run.toml").write_text(shop_logs.CONFIG)
    return load_config(file, [*keys, *overrides])


def test_what_cannot_be_is_said_before_anything_is_compiled(dataset, tmp_path):
    schema, path = Schema.load(dataset), written(tmp_path, "list")
    check_initial_rows(config_of(dataset, path), schema)
    with pytest.raises(ConfigError, match=r"vectors of 8 elements, but model.embedding_dim is 16; set .*dim=8"):
        check_initial_rows(config_of(dataset, path, "model.embedding_dim=16", "model.bottom_mlp=[16]"), schema)
    with pytest.raises(ConfigError, match="init_from = 'runs/x' brings rows"):
        check_initial_rows(config_of(dataset, path, "init_from='runs/x'"), schema)
    with pytest.raises(ConfigError, match=r"nowhere\.parquet is no file"):
        check_initial_rows(config_of(dataset, tmp_path / "nowhere.parquet"), schema)
    (tmp_path / "notes.txt").write_text("nothing, really\n")
    with pytest.raises(ConfigError, match="neither Parquet, Arrow nor JSON lines, nor word2vec's text format"):
        check_initial_rows(config_of(dataset, tmp_path / "notes.txt"), schema)
    pq.write_table(pa.table({"a": ["x"], "b": ["y"], "v": [[1.0]]}), tmp_path / "two.parquet")
    with pytest.raises(ConfigError, match="has the columns a, b, v; give one column of values"):
        check_initial_rows(config_of(dataset, tmp_path / "two.parquet"), schema)


@pytest.mark.parametrize(("option", "message"), [("--max-rows", "has no vocabulary"), ("--growing", "grows: its rows")])
def test_values_without_a_row_of_their_own_are_refused(tmp_path, option, message):
    shop_logs.write_log(tmp_path / "log.csv", 300)
    dataset = shop_logs.prepare(tmp_path, tmp_path / "log.csv", "data", option, "20" if "max" in option else "item")
    with pytest.raises(ConfigError, match=message):
        check_initial_rows(config_of(dataset, written(tmp_path, "list")), Schema.load(dataset))


def test_a_line_of_text_that_is_none(dataset, tmp_path):
    path = written(tmp_path, "text")
    path.write_text(path.read_text() + "i99 1.0 2.0\n")
    with pytest.raises(ConfigError, match="line 81 is no value with 8 numbers behind it"):
        trained(tmp_path, dataset, path)
