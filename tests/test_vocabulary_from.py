"""A later log on an earlier dataset's rows: the same values have the same rows, and all else is told."""

import dataclasses
import gzip
import itertools
import shutil

import numpy as np
import pytest
from prepare_reference import read_dataset, read_vocabulary

from jrec import cli
from jrec.data.bijection import load_order, save_order
from jrec.data.schema import DatasetError, Schema
from jrec.data.vocabulary_file import long_texts
from jrec.errors import OutputError
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Avazu, Criteo, Delimited, MovieLens, MovieLensOptions, load_schema

SMALL = PrepareOptions(block_size=64, shard_examples=512, threads=2)
LATER = {"block_size": 64, "shard_examples": 512, "threads": 2}
COLUMNS = """
[label]
column = "label"
[[dense]]
column = "price"
transform = "log1p"
missing = 0
[[categorical]]
column = "user"
[[categorical]]
column = "items"
table = "item"
separator = "|"
[[categorical]]
column = "item"
"""
NAMES = ("label", "price", "user", "items", "item")


def log(rng, rows, users, longest=3):
    """Lines of a log, and its raw columns; values of every kind of key, some of them blank."""
    lines = []
    for _ in range(rows):
        items = [f"item number {rng.integers(9)} of a shop" for _ in range(rng.integers(longest + 1))]
        user = int(rng.integers(users))
        lines.append([str(rng.integers(2)), str(rng.integers(50)), ["", f"u{user}", f"a user called {user}"][user % 3],
                      "|".join(items), str(10**9 + int(rng.integers(6)))])  # fmt: skip
    lines[0][3] = "|".join(["item number 0 of a shop"] * longest)
    return lines


def written(path, lines, names=NAMES):
    path.write_text("\n".join(",".join(line) for line in [names, *lines]) + "\n")
    return str(path)


def source(folder, text=COLUMNS):
    (folder / "columns.toml").write_text(text)
    return Delimited(load_schema(str(folder / "columns.toml")))


@pytest.fixture
def monday(tmp_path):
    lines = log(np.random.default_rng(0), 300, 30)
    prepare(source(tmp_path), [written(tmp_path / "monday.csv", lines)], tmp_path / "monday", SMALL)
    return tmp_path / "monday"


def after(folder, data, lines, text=COLUMNS, out="later", **options):
    options = {**LATER, "vocabulary_from": str(data), **options}
    inputs = [written(folder / "later.csv", lines)]
    return prepare(source(folder, text), inputs, folder / out, PrepareOptions(**options))


def files(folder, kind):
    return {p.name: p.read_bytes() for p in folder.rglob(kind)}


def test_values_have_their_rows_and_new_ones_the_oov_row(tmp_path, monday):
    lines = log(np.random.default_rng(1), 200, 40, longest=2)
    said = []
    schema = prepare(
        source(tmp_path), [written(tmp_path / "later.csv", lines)], tmp_path / "later",
        PrepareOptions(**LATER, vocabulary_from=str(monday)), report=said.append,
    )  # fmt: skip
    earlier = Schema.load(monday)
    assert schema.identity.rows == earlier.identity.rows
    assert schema.identity.examples != earlier.identity.examples
    assert schema.categorical == earlier.categorical
    _, columns = read_dataset(tmp_path / "later")
    seen = {"user": [], "item": []}
    for feature, table, at in (("user", "user", 2), ("items", "item", 3), ("item", "item", 4)):
        values, counts = read_vocabulary(tmp_path / "later", schema.table(table))
        assert values == read_vocabulary(monday, earlier.table(table))[0]
        oov = schema.table(table).oov_row
        row_of = {value: row for row, value in enumerate(values) if value is not None}
        raw = [line[at].split("|") if line[at] else [] for line in lines] if at == 3 else [[line[at]] for line in lines]
        rows = [[row_of.get(value, oov) for value in values] for values in raw]
        assert columns[feature] == (rows if at == 3 else [one[0] for one in rows])
        seen[table].append(rows)
    for table, features in seen.items():
        trained = [row for rows in features for one in rows[:160] for row in one]
        counts = np.load(tmp_path / "later" / schema.table(table).counts)
        np.testing.assert_array_equal(counts, np.bincount(trained, minlength=schema.table(table).rows))
        every = list(itertools.chain.from_iterable(itertools.chain(*features)))
        oov = every.count(schema.table(table).oov_row)
        assert schema.provenance["vocabulary"]["tables"][table] == {"accesses": len(every), "oov": oov}
        message = f"table {table!r}: {oov:,} of {len(every):,} accesses ({oov / len(every):.1%})"
        counts = np.load(monday / earlier.table(table).counts)
        before = f"; {counts[schema.table(table).oov_row] / counts.sum():.1%} in the training of {monday}"
        assert any(one.startswith(message) and one.endswith(before) for one in said) == (oov > 0)
    assert seen["user"][0].count([schema.table("user").oov_row]) > 0
    again = after(tmp_path, tmp_path / "later", lines, out="again")  # a later dataset serves as well
    assert again.identity == schema.identity
    with pytest.raises(OutputError, match="later is an input, which would be lost"):
        after(tmp_path, tmp_path / "later", lines, overwrite=True)


def test_the_log_itself_gives_the_same_bytes(tmp_path, shared_data):
    """Of tables with a vocabulary and of hashed ones; long values, joined files and times included."""
    movielens = MovieLensOptions(users=str(shared_data / "ml1m_users.dat.gz"),
                                 movies=str(shared_data / "ml1m_movies.dat.gz"))  # fmt: skip
    avazu, ratings = shared_data / "avazu_9k.csv.gz", tmp_path / "ratings.dat"
    ratings.write_text("".join(f"{i % 90 + 1}::{i * 7 % 80 + 1}::{i % 5 + 1}::{10**9 - i}\n" for i in range(2000)))
    for name, made, file in (("avazu", Avazu(), avazu), ("movielens", MovieLens(movielens, 7), ratings)):
        options = PrepareOptions(max_rows=60, key_seed=7, block_size=512, shard_examples=1024)
        prepare(made, [str(file)], tmp_path / name, options)
        later = PrepareOptions(vocabulary_from=str(tmp_path / name), block_size=512, shard_examples=1024)
        schema = prepare(made, [str(file)], tmp_path / f"{name}2", later)
        assert schema.identity == Schema.load(tmp_path / name).identity
        assert any(t.vocabulary is None for t in schema.tables)
        for kind in ("*.array_record", "*.npy", "*.parquet"):
            assert files(tmp_path / name, kind) == files(tmp_path / f"{name}2", kind)
        assert schema.provenance["options"]["key_seed"] == 7
        assert schema.provenance["options"]["max_rows"] == 60


def test_a_log_in_two_is_the_log_as_a_whole(tmp_path, shared_data):
    """Training on the first days and testing on the last ones: the same rows, and the same examples."""
    with gzip.open(shared_data / "criteo_terabyte_1k.tsv.gz", "rb") as file:
        lines = file.read().splitlines(keepends=True)
    for name, part in (("whole", lines), ("first", lines[:800]), ("last", lines[800:])):
        (tmp_path / name).write_bytes(b"".join(part))
    source, common = Criteo("criteo-terabyte"), {**LATER, "shard_examples": 1024}

    def made(name, **options):
        return prepare(source, [str(tmp_path / name)], tmp_path / f"{name}_data", PrepareOptions(**common, **options))

    whole = made("whole", split=(0.8, 0, 0.2), max_rows=300)
    first = made("first", split=(1, 0, 0), max_rows=300)
    last = made("last", split=(0, 0, 1), vocabulary_from=str(tmp_path / "first_data"))
    assert whole.identity.rows == first.identity.rows == last.identity.rows
    assert last.splits["test"].shards == whole.splits["test"].shards
    assert first.splits["train"].shards == whole.splits["train"].shards


def test_a_bijection_is_carried_over(tmp_path, monday):
    schema = Schema.load(monday)
    tables = []
    for table in schema.tables:
        order = np.random.default_rng(2).permutation(table.rows).astype(np.uint32)
        tables.append(dataclasses.replace(table, bijection=save_order(monday, table.name, order)))
    dataclasses.replace(schema, tables=tuple(tables)).save(monday)
    later = after(tmp_path, monday, log(np.random.default_rng(1), 50, 40))
    assert later.identity.rows == Schema.load(monday).identity.rows != schema.identity.rows
    for table in later.tables:
        kept = load_order(tmp_path / "later", table)
        np.testing.assert_array_equal(kept, load_order(monday, Schema.load(monday).table(table.name)))


def test_no_example_for_training(tmp_path, monday):
    lines = log(np.random.default_rng(1), 50, 40)
    schema = after(tmp_path, monday, lines, split=(0, 0, 1))
    assert {name: split.examples for name, split in schema.splits.items()} == {"train": 0, "valid": 0, "test": 50}
    assert read_dataset(tmp_path / "later")[1]["label"] == [float(line[0]) for line in lines]
    assert not np.load(tmp_path / "later" / "counts" / "user.npy").any()


LONGER = COLUMNS.replace('separator = "|"', 'separator = "|"\nmax_length = 3\ntoo_long = "last"')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            COLUMNS.replace("log1p", "none"),
            r"dense feature 'price' has transform 'none' in this log, but 'log1p' in .*",
        ),
        (COLUMNS.replace("missing = 0", "missing = 1"), "feature 'price' has missing 1.0 in this log, but 0.0 in"),
        (COLUMNS.replace('table = "item"', 'table = "list"'), "categorical feature 'items' has table 'list' in this"),
        (LONGER.replace("= 3", "= 2"), "categorical feature 'items' has max_length 2 in this log, but 3 in"),
        (COLUMNS.replace('column = "price"', 'column = "price"\nname = "cost"'), "dense feature 'cost' is not in"),
        (COLUMNS.replace('[[categorical]]\ncolumn = "user"\n', ""), "this log has no categorical feature 'user'"),
        (COLUMNS.replace('column = "label"', 'column = "label"\npositive_at_least = 1'), "the label has positive_at"),
        (COLUMNS, "field 'items' holds .*, which has more than 3 values, the most .*set max_length = 3 and too_long"),
    ],
)
def test_another_log_is_refused_with_the_first_difference(tmp_path, monday, text, message):
    with pytest.raises(DatasetError, match=message):
        after(tmp_path, monday, log(np.random.default_rng(1), 50, 40, longest=4), text)
    assert not (tmp_path / "later").exists()


def test_longer_lists_are_cut_where_the_schema_says_so(tmp_path, monday):
    lines = log(np.random.default_rng(1), 50, 40, longest=4)
    schema = after(tmp_path, monday, lines, LONGER)
    assert schema.categorical[1].max_length == 3
    _, columns = read_dataset(tmp_path / "later")
    assert [len(one) for one in columns["items"]] == [
        min(len(line[3].split("|")), 3) if line[3] else 0 for line in lines
    ]


def test_what_the_vocabulary_decides_cannot_be_given(tmp_path, monday, capsys):
    common = ["prepare", "csv", "--schema", str(tmp_path / "columns.toml"), "--input", str(tmp_path / "monday.csv"),
              "--vocabulary-from", str(monday), "--out", str(tmp_path / "later"), "--quiet"]  # fmt: skip
    for option in ("--min-count=2", "--max-rows=9", "--key-seed=0"):
        assert cli.main([*common, option]) == 2
        assert f"{option.split('=')[0]} and --vocabulary-from cannot be given together" in capsys.readouterr().err
    with pytest.raises(DatasetError, match="--max-rows and --vocabulary-from cannot be given together"):
        PrepareOptions(max_rows=9, vocabulary_from=str(monday))
    assert cli.main([*common, "--split", "0,0,1"]) == 0
    assert "train 0, valid 0, test 300 examples" in capsys.readouterr().out
    with pytest.raises(DatasetError, match="unless rows come from --vocabulary-from"):
        PrepareOptions(split=(0, 0, 1))


def test_damaged_vocabularies_are_named(tmp_path, monday):
    lines = log(np.random.default_rng(1), 20, 9)
    shutil.copytree(monday, tmp_path / "other")
    (monday / "vocabulary" / "user.parquet").write_bytes((tmp_path / "other/vocabulary/item.parquet").read_bytes())
    with pytest.raises(DatasetError, match=r"vocabulary/user.parquet is damaged: its SHA-256 is"):
        after(tmp_path, monday, lines)
    (monday / "vocabulary" / "user.parquet").unlink()
    with pytest.raises(DatasetError, match=r"user.parquet cannot be read"):
        after(tmp_path, monday, lines)
    assert not (tmp_path / "later").exists()


def test_a_new_value_with_the_hash_of_a_known_one_is_an_error(tmp_path, monday, monkeypatch):
    """Two such texts cannot be found by trying, so the known ones get other second hashes."""

    def forged(*arguments):
        for texts in long_texts(*arguments):
            yield texts._replace(fingerprints=texts.fingerprints + np.uint64(1))

    monkeypatch.setattr("jrec.prepare.vocabulary_from.long_texts", forged)
    message = (
        "two values of table '(user|item)', .* have the same hash; prepare .*monday and this log again with another"
    )
    with pytest.raises(DatasetError, match=message):
        after(tmp_path, monday, log(np.random.default_rng(1), 20, 9))


def test_rows_of_another_format_or_seed_are_refused(tmp_path, monday, shared_data):
    file, out = str(shared_data / "criteo_terabyte_1k.tsv.gz"), tmp_path / "out"
    with pytest.raises(DatasetError, match="dense feature 'I1' is not in"):
        prepare(Criteo("criteo-terabyte"), [file], out, PrepareOptions(vocabulary_from=str(monday)))
    (tmp_path / "ratings.dat").write_text("1::1::5::9\n2::1::1::10\n" * 9)
    ratings = [str(tmp_path / "ratings.dat")]
    prepare(MovieLens(MovieLensOptions(), 3), ratings, tmp_path / "movies", PrepareOptions(key_seed=3))
    with pytest.raises(DatasetError, match=r"joined files were read with key seed 0, but .* was prepared with 3"):
        prepare(MovieLens(MovieLensOptions()), ratings, out, PrepareOptions(vocabulary_from=str(tmp_path / "movies")))
    assert not out.exists()
