"""Splits other than by time: files of each split, and examples drawn at random."""

import numpy as np
import pyarrow.csv as pa_csv
import pytest
from prepare_reference import provenance, read_dataset, read_vocabulary

from jrec import cli
from jrec.data.schema import DatasetError
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Delimited, MovieLens, MovieLensOptions, load_schema
from jrec.prepare.splits import split_bounds

SCHEMA = """
columns = ["y", "at", "x", "c", "l"]
label.column = "y"
time.column = "at"
[[dense]]
column = "x"
[[categorical]]
column = "c"
[[categorical]]
column = "l"
separator = "|"
"""


def source(folder):
    (folder / "schema.toml").write_text(SCHEMA)
    return Delimited(load_schema(str(folder / "schema.toml")))


def log(path, rows, seed):
    """Writes a log in no order; returns its dense values in order of time."""
    rng = np.random.default_rng(seed)
    times = rng.permutation(rows)
    values = [f"v{seed}", "common"]
    lines = [f"{i % 2},{t},{1000 * seed + t},{values[i % 2]},{'|'.join('abc'[: i % 4])}" for i, t in enumerate(times)]
    path.write_text("\n".join(lines) + "\n")
    return [1000 * seed + t for t in range(rows)]


def test_files_of_each_split(tmp_path):
    expected = [
        log(tmp_path / f"{name}.csv", rows, k) for k, (name, rows) in enumerate((("a", 50), ("b", 30), ("c", 20)))
    ]
    a, b, c = (str(tmp_path / f"{name}.csv") for name in "abc")
    source(tmp_path)
    arguments = ["prepare", "csv", "--schema", str(tmp_path / "schema.toml"), "--quiet", "--min-count", "1"]
    assert cli.main([*arguments, "--out", str(tmp_path / "out"), "--train", a, "--valid", b, "--test", c]) == 0
    schema, columns = read_dataset(tmp_path / "out")
    assert [schema.splits[name].examples for name in ("train", "valid", "test")] == [50, 30, 20]
    assert columns["x"] == [x for one in expected for x in one]
    values, counts = read_vocabulary(tmp_path / "out", schema.table("c"))
    assert sorted(filter(None, values)) == ["common", "v0"]
    assert sum(counts) == 50
    assert [one["split"] for one in provenance(tmp_path / "out")["inputs"]] == ["train", "valid", "test"]
    assert "split" not in provenance(tmp_path / "out")["options"]
    assert cli.main([*arguments, "--out", str(tmp_path / "two"), "--train", a, b, "--test", c]) == 0
    schema, columns = read_dataset(tmp_path / "two")
    assert [schema.splits[name].examples for name in ("train", "valid", "test")] == [80, 0, 20]
    assert columns["x"][:80] == sorted(expected[0] + expected[1], key=lambda x: (x % 1000, x))


def test_drawn_splits(tmp_path, monkeypatch):
    monkeypatch.setattr("jrec.prepare.splits._READ_ROWS", 64)
    expected = log(tmp_path / "log", 3000, 1)

    def made(name, **options):
        settings = PrepareOptions(split=(0.6, 0.3, 0.1), split_by="random", **options)
        prepare(source(tmp_path), [str(tmp_path / "log")], tmp_path / name, settings)
        schema, columns = read_dataset(tmp_path / name)
        ends = np.cumsum([schema.splits[split].examples for split in ("train", "valid", "test")])
        return [list(map(int, one)) for one in np.split(np.array(columns["x"]), ends[:-1])], columns

    splits, columns = made("out")
    assert sorted(x for one in splits for x in one) == expected
    assert all(one == sorted(one) for one in splits)
    np.testing.assert_allclose([len(one) / 3000 for one in splits], (0.6, 0.3, 0.1), atol=0.03)
    assert np.corrcoef(np.isin(expected, splits[0]), expected)[0, 1] == pytest.approx(0, abs=0.06)
    _, by_time = made("again")
    assert by_time == columns
    assert made("other", split_seed=1)[0] != splits
    lengths = dict(zip(columns["x"], map(len, columns["l"]), strict=True))
    prepare(source(tmp_path), [str(tmp_path / "log")], tmp_path / "time", PrepareOptions())
    of_time = read_dataset(tmp_path / "time")[1]
    assert lengths == dict(zip(of_time["x"], map(len, of_time["l"]), strict=True))


def test_fractions_of_none(tmp_path):
    log(tmp_path / "log", 500, 1)
    for number, split in enumerate([(1.0, 0.0, 0.0), (0.7, 0.3, 0.0), (0.9, 0.0, 0.1)]):
        options = PrepareOptions(split=split, split_by="random")
        schema = prepare(source(tmp_path), [str(tmp_path / "log")], tmp_path / f"out{number}", options)
        found = [schema.splits[name].examples > 0 for name in ("train", "valid", "test")]
        assert found == [fraction > 0 for fraction in split]
    assert split_bounds(15, (0.5, 0.3, 0.2)) == (7, 12, 15)  # ends are rounded, not each split's size


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"train": ["a"], "test": ["a"]}, {}, r"input\(s\) .*a given for more than one split"),
        ({"train": ["a"], "test": ["link"]}, {}, r"input\(s\) .*a, .*link given for more than one split"),
        ({"train": ["b", "./b"], "test": ["a"]}, {}, r"input\(s\) .*b, .*b given more than once"),
        ({"test": ["a"]}, {}, "there is no file to train on; give --train"),
        ({"train": ["a"], "test": ["b"]}, {"split": (1, 0, 0)}, "--split and --split-by split one log"),
        ({"train": ["a"], "test": ["b"]}, {"split_by": "random"}, "--split and --split-by split one log"),
        ({"train": ["a"], "test": ["empty"]}, {}, "empty is empty; leave it out"),
    ],
)
def test_inputs_that_make_no_dataset(tmp_path, inputs, options, message):
    for name in "ab":
        log(tmp_path / name, 10, 0)
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("a")
    files = {split: [f"{tmp_path}/{name}" for name in names] for split, names in inputs.items()}
    with pytest.raises(DatasetError, match=message):
        prepare(source(tmp_path), files, tmp_path / "out", PrepareOptions(**options))
    assert not (tmp_path / "out").exists()


def test_tables_of_one_kind_for_each_split(tmp_path):
    for name, rows in (("a", 30), ("b", 7)):
        log(tmp_path / name, rows, 0)
    options = PrepareOptions(min_count=1)
    prepare(source(tmp_path), {"train": [tmp_path / "a"], "test": [tmp_path / "b"]}, tmp_path / "files", options)
    names = pa_csv.ReadOptions(column_names=["y", "at", "x", "c", "l"])
    tables = {split: [pa_csv.read_csv(tmp_path / name, names)] for split, name in (("train", "a"), ("test", "b"))}
    made = prepare(source(tmp_path), tables, tmp_path / "tables", options)
    assert [made.splits[name].examples for name in ("train", "valid", "test")] == [30, 0, 7]
    assert read_dataset(tmp_path / "tables")[1] == read_dataset(tmp_path / "files")[1]
    named = [one["file"] for one in made.provenance["inputs"]]
    assert named == ["table 1 of train (pyarrow.Table)", "table 1 of test (pyarrow.Table)"]


def test_formats_and_arguments_that_are_refused(tmp_path, capsys):
    (tmp_path / "a").write_text("1::1::5::1\n")
    (tmp_path / "b").write_text("1::1::5::1\n")
    files = {"train": [str(tmp_path / "a")], "test": [str(tmp_path / "b")]}
    with pytest.raises(DatasetError, match="movielens makes examples of several lines"):
        prepare(MovieLens(MovieLensOptions(), 0), files, tmp_path / "out")
    with pytest.raises(DatasetError, match="--split-by is 'user'; choose time, random or leave-one-out"):
        PrepareOptions(split_by="user")
    for inputs in ([], ["--input", "a", "--train", "b"]):
        assert cli.main(["prepare", "avazu", *inputs, "--out", str(tmp_path / "out")]) != 0
        assert "give either --input, a log to split, or the files of each split" in capsys.readouterr().err
