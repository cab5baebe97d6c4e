"""Crosses and target means: what preparation makes of them, against plain Python, and the same in predictions."""

import collections
import itertools
import json
import math
import pathlib
import random
import tempfile

import numpy as np
import pytest
import shop_logs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from prepare_reference import bounds, read_dataset, read_vocabulary
from test_prepare_workers import LostWorkers
from test_prepare_workspace import files
from test_serve import ask, running

import jrec
from jrec import cli, serving
from jrec.app.evaluate import restore_run
from jrec.app.pairs import proposal, telling_pairs
from jrec.data.canonical import canonical_text
from jrec.data.keys import crossed_keys, decode_keys, value_keys
from jrec.data.schema import DatasetError, Schema
from jrec.data.unknown import UnknownValues
from jrec.metrics import auc
from jrec.prepare import parts, target_means
from jrec.prepare.encoder import Encoder
from jrec.prepare.ingest import LABEL, TIME, dense_name, keys_name, new_spill
from jrec.prepare.joined import csv_source
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import load_schema
from jrec.regression import evaluate_numbers

USERS = ["", "u1", "u2", "a user with a long name", "123456789"]
ITEMS = ["i1", "i2", "", "an item with a long name"]
COLUMNS = """
[label]
column = "y"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
"""
TIMED = COLUMNS + '[time]\ncolumn = "at"\nformat = "seconds"\n'
MASK = 2**64 - 1


def source_of(folder, text):
    (folder / "schema.toml").write_text(text)
    return csv_source(load_schema(str(folder / "schema.toml")))


NUMBERS = ('column = "y"', 'column = "y"\nkind = "number"')


def log(seed, lines=300, numbers=False):
    draw = random.Random(seed)
    return [
        {
            "y": round(draw.gauss(-20, 300), 3) if numbers else draw.randrange(2), "user": draw.choice(USERS),
            "item": draw.choice(ITEMS), "at": draw.randrange(40),
        }
        for _ in range(lines)
    ]  # fmt: skip


def written(path, lines, names=("y", "user", "item", "at")):
    rows = [names, *([line[name] for name in names] for line in lines)]
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    return str(path)


def fold_of(number, folds):
    x = number ^ 0x2545F4914F6CDD1D
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) % folds


def counted(keys, labels, moments, train, *, folds=0, window=math.inf, least=1, numbers=False):
    """(sum, count) of every line by definition: of other folds or earlier lines; behind training of all or the last.

    A label below 0 is not known, unless labels are numbers.
    """
    lines = zip(keys[:train], labels[:train], moments[:train], range(train), strict=True)
    known = [line for line in lines if numbers or line[1] >= 0]
    latest = max(moments[:train], default=0)
    made = []
    for i, (key, now) in enumerate(zip(keys, moments, strict=True)):
        if i >= train:
            ys = [y for k, y, t, _ in known if k == key and t > latest - window]
        elif folds:
            ys = [y for k, y, _, j in known if k == key and fold_of(j, folds) != fold_of(i, folds)]
        else:
            ys = [y for k, y, t, _ in known if k == key and now - window <= t < now]
        made.append((math.fsum(ys), len(ys)) if len(ys) >= least else (0, 0))
    return np.array(made, np.float64 if numbers else np.int64).reshape(-1, 2)


def expected_features(counts, prior, train, smoothing=10.0):
    """(mean, count) as the dataset has them: standardized by training, where they differ by more than rounding."""
    columns = [(counts[:, 0] + smoothing * prior) / (counts[:, 1] + smoothing), np.log1p(counts[:, 1])]
    deviations = [c[:train].std() if np.ptp(c[:train]) > 1e-13 else 1 for c in columns]
    return [(c - c[:train].mean()) / deviation for c, deviation in zip(columns, deviations, strict=True)]


# Crosses


@given(st.lists(st.tuples(st.sampled_from(USERS), st.text("ab ", max_size=9)), max_size=30))
def test_combinations_have_keys_of_their_own_which_texts_give_back(pairs):
    import pyarrow as pa

    columns = [value_keys(pa.array(column, pa.large_string()), 0) for column in zip(*pairs, strict=True)] or [
        np.empty(0, np.uint64)
    ]
    keys = crossed_keys(columns)
    assert len(set(keys.tolist())) == len(set(pairs))
    offsets, content = decode_keys(keys, np.empty(0, np.int64), np.empty(0, np.uint8))
    texts = [content[a:b].tobytes().decode() for a, b in itertools.pairwise(offsets)]
    assert all(text.isdigit() and int(text) < 2**56 for text in texts)
    np.testing.assert_array_equal(value_keys(pa.array(texts, pa.large_string()), 0, canonical=True), keys)


@pytest.mark.parametrize("least", [None, 1, 9])
def test_a_cross_is_a_feature_of_the_pairs(tmp_path, least):
    own = "" if least is None else f"min_count = {least}"
    source = source_of(tmp_path, COLUMNS + f'[[cross]]\nof = ["user", "item"]\nname = "pair"\n{own}\n')
    lines = log(1)
    prepare(source, written(tmp_path / "log.csv", lines), tmp_path / "data", PrepareOptions(min_count=3))
    schema, columns = read_dataset(tmp_path / "data")
    pairs = [(line["user"], line["item"]) for line in lines]
    train = bounds(len(lines))[0]
    kept = {pair: n for pair, n in collections.Counter(pairs[:train]).items() if n >= (least or 3)}
    table = schema.table("pair")
    values, counts = read_vocabulary(tmp_path / "data", table)
    assert len(set(values)) == table.rows == len(kept) + 1
    row_of = {}
    for pair, row in zip(pairs, columns["pair"], strict=True):
        assert row_of.setdefault(pair if pair in kept else None, row) == row
    assert {pair: counts[row] for pair, row in row_of.items() if pair} == kept
    assert row_of.get(None, table.oov_row) == table.oov_row
    assert len(set(row_of.values())) == len(row_of)
    raw = {name: [line[name] for line in lines] for name in ("user", "item")}
    np.testing.assert_array_equal(Encoder(schema).columns(raw).ids["pair"], columns["pair"])


def test_the_order_of_features_and_their_number_make_other_values():
    a, b = np.arange(1, 9, dtype=np.uint64), np.arange(9, 17, dtype=np.uint64)
    keys = [crossed_keys(columns) for columns in ([a, b], [b, a], [a, b, a], [a, a])]
    assert len(np.unique(np.concatenate(keys))) == 32


# Target means


@pytest.mark.parametrize("seed", range(24))
def test_sums_and_counts_of_random_columns(tmp_path, seed):
    """Every mode, through chunks of a few lines, against the definition."""
    draw = np.random.default_rng(seed)
    rows, train = int(draw.integers(2, 150)), 0
    train = int(draw.integers(1, rows + 1))
    several, timed, numbers = seed // 4 == 1, seed % 4 < 3, seed // 4 >= 4
    folds, window = [(3, 0), (0, 0), (0, 7), (None, 0)][seed % 4]
    least = int(draw.integers(1, 4))
    mean = f'[[target_mean]]\nof = ["user", "item"]\nname = "pair"\nmin_count = {least}\nsmoothing = 2.5\n'
    mean += "" if folds is None else f"folds = {folds}\n"
    mean += f'window = "{window}s"\n' if window else ""
    mean += 'label = "late"\n' if several else ""
    label = '[[labels]]\ncolumn = "y"\n[[labels]]\ncolumn = "late"\n' if several else '[label]\ncolumn = "y"\n'
    text = (TIMED if timed else COLUMNS).replace('[label]\ncolumn = "y"\n', label) + mean
    source = source_of(tmp_path, text.replace(*NUMBERS) if numbers else text)
    labels = draw.integers(-1 if several else 0, 2, (2, rows)).astype(np.float32)
    if seed // 4 == 4:  # halves of stars, whose sums are exact
        labels = draw.integers(-3, 11, (2, rows)).astype(np.float32) / 2
    if seed // 4 == 5:  # sizes of every order, of which most are too small to be exact beside the largest
        labels = (draw.normal(size=(2, rows)) * 10.0 ** draw.integers(-30, 31, (2, rows))).astype(np.float32)
    users, items = draw.integers(0, 3, (2, rows)).astype(np.uint64) * np.uint64(2**62 + 5)
    times = np.concatenate([np.sort(draw.integers(-5, 20, n)) for n in (train, rows - train)]) * 1_000_000
    spill = new_spill(source, tmp_path / "spill")
    columns = {
        LABEL: labels[0],
        "task/late": labels[1],
        keys_name("user"): users,
        keys_name("item"): items,
        TIME: times,
    }
    spill.append({name: columns[name] for name in spill.columns})
    spill.finish()
    (tmp_path / "data").mkdir()
    made = target_means.write_target_means(
        source, spill, tmp_path, tmp_path / "data",
        train_rows=train, split_by="time", bucket_rows=int(draw.integers(1, 30)),
    )  # fmt: skip
    if folds is None:
        folds = 0 if timed else target_means.FOLDS
    of_label = labels[int(several)]
    keys = list(zip(users.tolist(), items.tolist(), strict=True))
    moments = times.tolist() if timed else list(range(rows))
    span = window * 1_000_000 if window else math.inf
    counts = counted(keys, of_label.tolist(), moments, train, folds=folds, window=span, least=least, numbers=numbers)
    known = [y for y in of_label[:train].tolist() if numbers or y >= 0]
    prior = math.fsum(known) / len(known) if known else 0
    exact = {"rtol": 0, "atol": 1e-12 * float(np.abs(of_label[:train]).max()) if seed // 4 == 5 else 0}
    np.testing.assert_allclose([f.statistic.prior for f in made.dense], [prior, prior], **exact)
    means = (counts[:, 0] + 2.5 * prior) / (counts[:, 1] + 2.5)
    np.testing.assert_allclose(spill.plain(dense_name("pair_mean")).read(0, rows), means, **exact)
    np.testing.assert_array_equal(spill.plain(dense_name("pair_count")).read(0, rows), np.log1p(counts[:, 1]))


MEANS = """
[[cross]]
of = ["user", "item"]
[[target_mean]]
of = ["user"]
[[target_mean]]
of = ["user_item"]
name = "pair"
min_count = 2
[[target_mean]]
of = ["user", "item"]
name = "folded"
folds = 4
"""


@pytest.mark.parametrize(("split_by", "numbers"), [("time", False), ("random", False), ("time", True)])
def test_a_dataset_has_the_features_that_raw_values_get(tmp_path, split_by, numbers):
    """Timed: what is earlier by default. A split by time: valid and test equal what columns and logs are encoded to."""
    source = source_of(tmp_path, (TIMED + MEANS).replace(*NUMBERS) if numbers else TIMED + MEANS)
    lines = sorted(log(2, numbers=numbers), key=lambda line: line["at"])
    path = written(tmp_path / "log.csv", lines)
    schema = prepare(source, path, tmp_path / "data", PrepareOptions(split_by=split_by, threads=1))
    _, columns = read_dataset(tmp_path / "data")
    train = schema.splits["train"].examples
    if split_by == "time":
        prior = np.mean([line["y"] for line in lines[:train]])
        moments, labels = [line["at"] for line in lines], [line["y"] for line in lines]
        for name, features, options in (
            ("user", ("user",), {}),
            ("pair", ("user", "item"), {"least": 2}),
            ("folded", ("user", "item"), {"folds": 4}),
        ):
            keys = [tuple(line[n] for n in features) for line in lines]
            counts = counted(keys, labels, moments, train, numbers=numbers, **options)
            for kind, expected in zip(("mean", "count"), expected_features(counts, prior, train), strict=True):
                np.testing.assert_allclose(columns[f"{name}_{kind}"], expected, rtol=1e-5, atol=1e-6)
    encoder = Encoder(schema)
    encoder.load_tables()
    raw = {name: [line[name] for line in lines] for name in ("user", "item")}
    of_columns = encoder.columns(raw)
    of_log = next(encoder.stream(path, batch_size=len(lines)))
    np.testing.assert_array_equal(of_log.dense, of_columns.dense)
    if split_by == "time":
        prepared = np.array([columns[name] for name in of_columns.dense_names], np.float32).T
        np.testing.assert_array_equal(of_columns.dense[train:], prepared[train:])
        for name, rows in of_columns.ids.items():
            np.testing.assert_array_equal(rows, columns[name])
    unknown = UnknownValues(schema)
    unseen = encoder.columns({"user": ["nobody", None], "item": ["nothing", None]}, unknown=unknown)
    assert {name: counts.unknown for name, counts in unknown.features.items()} == {"user": 1, "item": 1}
    priors = [f.statistic.prior if f.statistic.kind == "mean" else 0 for f in schema.dense]
    expected = [(p - f.mean) / f.deviation for p, f in zip(priors, schema.dense, strict=True)]
    np.testing.assert_allclose(unseen.dense[0], expected, rtol=1e-5)


VALUES = st.text("ab1.0é-", max_size=9)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), VALUES, VALUES), min_size=3, max_size=40), st.integers(1, 3))
def test_features_of_random_texts(lines, least):
    """Blank, repeated, long and unseen values, in forms that are one value, from a log and from raw columns."""
    train = bounds(len(lines), (0.6, 0.2, 0.2))[0]
    assume(len({label for label, *_ in lines[:train]}) > 1)
    text = COLUMNS + '[[cross]]\nof = ["user", "item"]\n[[target_mean]]\nof = ["item", "user"]\nfolds = 3\n'
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = written(folder / "log.csv", [dict(zip(("y", "user", "item"), line, strict=True)) for line in lines],
                       names=("y", "user", "item"))  # fmt: skip
        options = PrepareOptions(split=(0.6, 0.2, 0.2), min_count=least, threads=1)
        schema = prepare(source_of(folder, text), path, folder / "data", options)
        _, columns = read_dataset(folder / "data")
        encoded = Encoder(schema).columns({"user": [line[1] for line in lines], "item": [line[2] for line in lines]})
    pairs = [(canonical_text(user), canonical_text(item)) for _, user, item in lines]
    labels = [label for label, *_ in lines]
    counts = counted(pairs, labels, range(len(lines)), train, folds=3)
    expected = expected_features(counts, np.mean(labels[:train]), train)
    for kind, values in zip(("mean", "count"), expected, strict=True):
        np.testing.assert_allclose(columns[f"item_user_{kind}"], values, rtol=1e-4, atol=1e-5)
    prepared = np.array([columns[name] for name in encoded.dense_names], np.float32).T
    np.testing.assert_array_equal(encoded.dense[train:], prepared[train:])
    np.testing.assert_array_equal(encoded.ids["user_item"], columns["user_item"])
    often = {pair for pair, n in collections.Counter(pairs[:train]).items() if n >= least}
    rows = {pair if pair in often else None: row for pair, row in zip(pairs, columns["user_item"], strict=True)}
    assert len(set(rows.values())) == len(rows)


@pytest.mark.parametrize(("kind", "numbers"), [("workers", False), ("workers", True), ("threads", True)])
def test_how_the_work_is_divided_changes_nothing(tmp_path, monkeypatch, kind, numbers):
    monkeypatch.setattr(parts, "PART_BYTES", 1500)
    source = source_of(tmp_path, (TIMED + MEANS).replace(*NUMBERS) if numbers else TIMED + MEANS)
    path = written(tmp_path / "log.csv", log(3, numbers=numbers))
    prepare(source, path, tmp_path / "one", PrepareOptions(threads=1))
    workers = {"workers": LostWorkers()} if kind == "workers" else {}
    prepare(source, path, tmp_path / "two", PrepareOptions(threads=1 if workers else 3), **workers)
    one, two = ({n: c for n, c in files(tmp_path / n).items() if n != "schema.json"} for n in ("one", "two"))
    assert one == two
    assert "means/pair.npy" in one
    assert Schema.load(tmp_path / "one").identity == Schema.load(tmp_path / "two").identity


def test_a_later_log_takes_the_earlier_means(tmp_path):
    source = source_of(tmp_path, TIMED + MEANS)
    monday = prepare(source, written(tmp_path / "monday.csv", log(4)), tmp_path / "monday", PrepareOptions())
    lines = sorted(log(5), key=lambda line: line["at"])
    path, later = written(tmp_path / "tuesday.csv", lines), PrepareOptions(vocabulary_from=str(tmp_path / "monday"))
    tuesday = prepare(source, path, tmp_path / "tuesday", later)
    assert tuesday.identity.rows == monday.identity.rows
    _, columns = read_dataset(tmp_path / "tuesday")
    encoded = Encoder(monday).columns({name: [line[name] for line in lines] for name in ("user", "item")})
    prepared = np.array([columns[name] for name in encoded.dense_names], np.float32).T
    np.testing.assert_array_equal(encoded.dense, prepared)
    np.testing.assert_array_equal(Encoder(tuesday).columns({"user": ["u1"], "item": ["i2"]}).dense,
                                  Encoder(monday).columns({"user": ["u1"], "item": ["i2"]}).dense)  # fmt: skip
    other = source_of(tmp_path, TIMED + MEANS.replace("folds = 4", "folds = 4\nsmoothing = 3"))
    with pytest.raises(DatasetError, match="target_mean 'folded' has smoothing 3"):
        prepare(other, path, tmp_path / "other", later)


def test_features_of_joined_files_histories_and_growing_tables(tmp_path):
    """Crosses and means are of any feature of one value, and go beside everything else that a log has."""
    text = (
        TIMED
        + """
[[categorical]]
column = "seen"
separator = "|"
history = {by = "user", of = "item", length = 3}
[[categorical]]
column = "at"
part = "hour"
[[cross]]
of = ["user", "at_hour"]
[[cross]]
of = ["item", "colour", "user"]
[[target_mean]]
of = ["colour", "user_at_hour"]
[[join]]
file = "items.csv"
key = "item"
on = "name"
[[join.categorical]]
column = "colour"
"""
    )
    (tmp_path / "items.csv").write_text("name,colour\ni1,red\ni2,blue\nan item with a long name,a long red name\n")
    source, lines = source_of(tmp_path, text), sorted(log(7), key=lambda line: line["at"])
    colours = {"i1": "red", "i2": "blue", "an item with a long name": "a long red name", "": ""}
    options = PrepareOptions(growing=("item_colour_user",), min_count=1)
    schema = prepare(source, written(tmp_path / "log.csv", lines), tmp_path / "data", options)
    _, columns = read_dataset(tmp_path / "data")
    raw = {name: [line[name] for line in lines] for name in ("user", "item", "at")}
    raw |= {"colour": [colours[line["item"]] for line in lines], "seen": [[]] * len(lines)}
    encoded, train = Encoder(schema).columns(raw), schema.splits["train"].examples
    np.testing.assert_array_equal(encoded.ids["item_colour_user"], columns["item_colour_user"])
    assert len(set(columns["item_colour_user"])) == len({(line["user"], line["item"]) for line in lines})
    np.testing.assert_array_equal(encoded.ids["user_at_hour"], columns["user_at_hour"])
    prepared = np.array([columns[name] for name in encoded.dense_names], np.float32).T
    np.testing.assert_array_equal(encoded.dense[train:], prepared[train:])


def test_each_user_s_last_lines(tmp_path):
    text = TIMED + '[[categorical]]\ncolumn = "seen"\nhistory = {by = "user", of = "item", length = 3}\n'
    text += '[[target_mean]]\nof = ["item"]\n'
    path, options = written(tmp_path / "log.csv", log(8)), PrepareOptions(split_by="leave-one-out", min_count=1)
    schema = prepare(source_of(tmp_path, text), path, tmp_path / "data", options)
    counts = target_means.LabelCounts.load(tmp_path / "data", schema, "means/item.npy")
    assert counts.counts.sum() == schema.splits["train"].examples == len(USERS) - 1


@pytest.mark.parametrize("known", ["folds = 5", "folds = 20", "folds = 0"])
def test_shuffled_labels_leave_nothing_to_see(tmp_path, known):
    """Of labels that have nothing to do with the ids, means that counted a line's own label would know it."""
    draw = np.random.default_rng(0)
    rows = 20_000
    users, labels = draw.integers(0, 4_000, rows), draw.integers(0, 2, rows)
    lines = [
        {"y": y, "user": f"u{u}", "item": "i", "at": t} for t, (y, u) in enumerate(zip(labels, users, strict=True))
    ]
    source = source_of(tmp_path, TIMED + f'[[target_mean]]\nof = ["user"]\n{known}\n')
    schema = prepare(source, written(tmp_path / "log.csv", lines), tmp_path / "data", PrepareOptions())
    _, columns = read_dataset(tmp_path / "data")
    train = schema.splits["train"].examples
    mean = np.array(columns["user_mean"])
    assert auc(mean[:train], labels[:train]) == pytest.approx(0.5, abs=0.012)
    assert auc(mean[train:], labels[train:]) == pytest.approx(0.5, abs=0.025)
    # Raw values of the training lines get means that have counted these lines: they know.
    own = Encoder(schema).columns({"user": [f"u{u}" for u in users[:train]], "item": ["i"] * train})
    assert auc(own.dense[:, 0], labels[:train]) > 0.65


@pytest.mark.parametrize("known", ["folds = 5", "folds = 20", "folds = 0"])
def test_shuffled_numbers_leave_nothing_to_see(tmp_path, known):
    """A line fitted to training has no R2 on training, nor on valid, beyond the noise of one number."""
    draw = np.random.default_rng(0)
    rows = 20_000
    users, labels = draw.integers(0, 4_000, rows), draw.gamma(2, 50, rows).round(2)
    lines = [
        {"y": y, "user": f"u{u}", "item": "i", "at": t} for t, (y, u) in enumerate(zip(labels, users, strict=True))
    ]
    text = (TIMED + f'[[target_mean]]\nof = ["user"]\n{known}\n').replace(*NUMBERS)
    path, options = written(tmp_path / "log.csv", lines), PrepareOptions(split=(0.8, 0.1, 0.1))
    schema = prepare(source_of(tmp_path, text), path, tmp_path / "data", options)
    _, columns = read_dataset(tmp_path / "data")
    train = schema.splits["train"].examples
    mean = np.array(columns["user_mean"])

    def r2(feature, split):
        slope, offset = np.polyfit(feature[:train], labels[:train], 1)
        errors = labels[split] - slope * feature[split] - offset
        return 1 - np.mean(errors**2) / labels[split].var()

    assert r2(mean, slice(train)) < 0.001
    assert r2(mean, slice(train, rows)) < 0.001
    own = Encoder(schema).columns({"user": [f"u{u}" for u in users[:train]], "item": ["i"] * train})
    assert r2(own.dense[:, 0], slice(train)) > 0.1


REFUSED = {
    "cross of ['user']: of must name 2": '[[cross]]\nof = ["user"]',
    "none of them twice": '[[cross]]\nof = ["user", "user"]',
    "'nope' must be a": '[[cross]]\nof = ["user", "nope"]',
    "'price' must be a": '[[categorical]]\ncolumn = "price"\nquantiles = 4\n[[target_mean]]\nof = ["price"]',
    "'tags' must be a": '[[categorical]]\ncolumn = "tags"\nseparator = "|"\n[[cross]]\nof = ["user", "tags"]',
    "min_count is 0": '[[cross]]\nof = ["user", "item"]\nmin_count = 0',
    "user_item occur more than once": '[[cross]]\nof = ["user", "item"]\n[[cross]]\nof = ["user", "item"]',
    "is called as a table of other": (
        '[[categorical]]\ncolumn = "c"\ntable = "user_item"\n[[cross]]\nof = ["user", "item"]'
    ),
    "label is 'z'; leave it out": '[[target_mean]]\nof = ["user"]\nlabel = "z"',
    "smoothing is 0": '[[target_mean]]\nof = ["user"]\nsmoothing = 0',
    "folds is 1; it must be": '[[target_mean]]\nof = ["user"]\nfolds = 1',
    "window and folds": '[[target_mean]]\nof = ["user"]\nfolds = 2\nwindow = "7d"',
    "window is '7 days'": '[[target_mean]]\nof = ["user"]\nwindow = "7 days"',
    "target_mean of ['user', 'nope']": '[[target_mean]]\nof = ["user", "nope"]',
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_schema_that_cannot_be(tmp_path, words):
    with pytest.raises(DatasetError) as error:
        source_of(tmp_path, TIMED + REFUSED[words])
    assert words in str(error.value).replace("[[", "").replace("]]", "")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            'window = "7d"',
            {"split_by": "random"},
            "--split-by random, but [[target_mean]] of ['user'] has window = '7d'",
        ),
        ("folds = 0", {"split_by": "random"}, "has folds = 0"),
        ("", {"labels": False}, "--no-labels, but [[target_mean]] of ['user'] is of labels"),
    ],
)
def test_options_that_do_not_go_with_a_target_mean(tmp_path, text, options, words):
    source = source_of(tmp_path, TIMED + f'[[target_mean]]\nof = ["user"]\n{text}\n')
    with pytest.raises(DatasetError) as error:
        prepare(source, written(tmp_path / "log.csv", log(6)), tmp_path / "data", PrepareOptions(**options))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("time", "words"), [("", "there is no [time]; add one"), ('[time]\ncolumn = "at"\n', "[time] has no unit")]
)
def test_a_window_needs_times_in_a_unit(tmp_path, time, words):
    with pytest.raises(DatasetError) as error:
        source_of(tmp_path, COLUMNS + time + '[[target_mean]]\nof = ["user"]\nwindow = "7d"\n')
    assert words in str(error.value)


# Models


@pytest.mark.parametrize("numbers", [False, True])
def test_scores_are_the_same_whichever_way_the_values_come(tmp_path, numbers):
    """Dataset, log, columns, export: the first two to the bit."""
    log_of = pairs_with_means(2_000, numbers=numbers)
    path = written(tmp_path / "log.csv", log_of, names=("y", "user", "item"))
    later = pairs_with_means(300, seed=1, numbers=numbers)
    written(tmp_path / "later.csv", later, names=("y", "user", "item"))
    source = source_of(tmp_path, (COLUMNS + MEANS).replace(*NUMBERS) if numbers else COLUMNS + MEANS)
    data = tmp_path / "data"
    prepare(source, path, data, PrepareOptions())
    options = PrepareOptions(vocabulary_from=str(data), split=(0, 0, 1))
    prepare(source, str(tmp_path / "later.csv"), tmp_path / "tuesday", options)
    run = shop_logs.trained(tmp_path, data)
    attribute, column, called = ("predictions", "prediction", "__call__") if numbers else ("logits", "logit", "logits")
    want = getattr(restore_run(run, tmp_path / "tuesday").scores("test"), attribute)
    raw = {name: [line[name] for line in later] for name in ("user", "item")}
    loaded = jrec.load_run(run)
    np.testing.assert_array_equal(loaded.predict(raw) if numbers else loaded.logits(raw), want)
    assert (
        cli.main(["predict", str(run), str(tmp_path / "later.csv"), "--out", str(tmp_path / "p.csv"), "--quiet"]) == 0
    )
    read = np.genfromtxt(tmp_path / "p.csv", delimiter=",", names=True)
    np.testing.assert_array_equal(read[column].astype(np.float32), want)
    assert cli.main(["export", str(run), "--out", str(tmp_path / "export"), "--quiet"]) == 0
    assert "means/pair.npy" in json.loads((tmp_path / "export" / "manifest.json").read_text())["files"]
    served = getattr(serving.load(tmp_path / "export"), called)(raw)
    np.testing.assert_allclose(served, want, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_served_requests_have_the_scores_of_a_later_day_s_run(tmp_path):
    """Monday's export with Tuesday's delta, over HTTP, and Tuesday's run on Monday's rows."""
    source = source_of(tmp_path, COLUMNS + MEANS)
    days = [pairs_with_means(2_000, seed=seed) for seed in (0, 1)]
    paths = [written(tmp_path / f"{n}.csv", day, names=("y", "user", "item")) for n, day in enumerate(days)]
    prepare(source, paths[0], tmp_path / "monday", PrepareOptions())
    prepare(source, paths[1], tmp_path / "tuesday", PrepareOptions(vocabulary_from=str(tmp_path / "monday")))
    monday = shop_logs.trained(tmp_path, tmp_path / "monday", out="run-monday")
    tuesday = shop_logs.trained(tmp_path, tmp_path / "tuesday", f"init_from={monday}", out="run-tuesday")
    export, delta = tmp_path / "export", tmp_path / "deltas" / "tuesday"
    delta.parent.mkdir()
    assert cli.main(["export", str(monday), "--out", str(export), "--quiet"]) == 0
    assert cli.main(["export", str(tuesday), "--since", str(export), "--out", str(delta), "--quiet"]) == 0
    raw = {name: [line[name] for line in days[1][:40]] + ["somebody new"] for name in ("user", "item")}
    want = jrec.load_run(tuesday).predict(raw)
    np.testing.assert_allclose(serving.load(export, [delta])(raw), want, rtol=1e-5)
    with running(export, tmp_path / "deltas") as server:
        status, _, body = ask(server.port, content=json.dumps({"columns": raw}))
    assert status == 200
    np.testing.assert_allclose(json.loads(body)["scores"], want, rtol=1e-5)


@pytest.mark.slow
def test_two_towers_read_a_cross_whose_features_they_do_not(tmp_path):
    text = COLUMNS.replace('column = "item"', 'column = "item"\n[[categorical]]\ncolumn = "day"')
    lines = [line | {"day": f"d{number % 3}"} for number, line in enumerate(pairs_with_means(1_500))]
    path = written(tmp_path / "log.csv", lines, names=("y", "user", "item", "day"))
    text += '[[cross]]\nof = ["user", "day"]\n[[target_mean]]\nof = ["user_day"]\n'
    prepare(source_of(tmp_path, text), path, tmp_path / "data", PrepareOptions())
    towers = '{user = ["user_day", "user_day_mean"], item = ["item"], id = "item"}'
    (tmp_path / "run.toml").write_text(f'model = {{kind = "two_tower", two_tower = {towers}}}\n')
    run, set_on_top = tmp_path / "run", (f"data.path={tmp_path / 'data'}", "max_steps=5", "data.batch_size=64")
    assert cli.main(["train", str(tmp_path / "run.toml"), f"out={run}", *set_on_top]) == 0
    assert cli.main(["export", str(run), "--out", str(tmp_path / "export"), "--quiet"]) == 0
    raw = {name: [line[name] for line in lines[:20]] for name in ("user", "day")}
    model = serving.load(tmp_path / "export")
    assert model.raw_columns == ("user", "day")
    scores, items = jrec.load_run(run).best(raw, k=3)
    served = model.best(raw, k=3)
    np.testing.assert_allclose(served.scores, scores, rtol=1e-5)
    assert [list(one) for one in served.items] == items


def pairs_with_means(rows, seed=0, users=20, items=20, numbers=False):
    """Lines whose label depends on the pair of user and item, and on neither of them alone."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, users, rows), draw.integers(0, items, rows)
    chance = np.random.default_rng(99).choice([0.1, 0.9], (users, items))[user, item]
    labels = (500 + 100 * chance + draw.normal(0, 30, rows)).round(1) if numbers else draw.random(rows) < chance
    labels = labels if numbers else labels.astype(int)
    return [{"y": y, "user": f"u{u}", "item": f"i{i}"} for y, u, i in zip(labels, user, item, strict=True)]


@pytest.mark.parametrize("kind", ["pairs", "ids", "named", "pairs of numbers", "ids of numbers"])
def test_init_proposes_pairs_with_means_of_their_own(tmp_path, kind):
    numbers, kind = kind.endswith("numbers"), kind.split()[0]
    lines = pairs_with_means(9_000, numbers=numbers)
    if kind == "ids":  # the chances of users and items, the sums of which pairs do not change
        draw = np.random.default_rng(0)
        ids = [int(line["user"][1:]) + int(line["item"][1:]) for line in lines]
        labels = [round(total + 9 * draw.normal(), 1) if numbers else int(draw.random() < total / 40) for total in ids]
        lines = [line | {"y": y} for line, y in zip(lines, labels, strict=True)]
    text = '[[categorical]]\ncolumn = "day"\n' + ('[[cross]]\nof = ["item", "user"]\n' if kind == "named" else "")
    lines = [line | {"day": f"d{number % 7}"} for number, line in enumerate(lines)]
    path = written(tmp_path / "log.csv", lines, names=("y", "user", "item", "day"))
    text = (COLUMNS + text).replace(*NUMBERS) if numbers else COLUMNS + text
    schema = prepare(source_of(tmp_path, text), path, tmp_path / "data", PrepareOptions(split_by="random"))
    found = telling_pairs(tmp_path / "data", schema)
    assert [pair.features for pair in found] == [("user", "item")] * (kind == "pairs")
    if kind != "pairs":
        assert proposal(found, schema).lines == []
        return
    assert 0.2 < found[0].gain < 1
    assert source_of(tmp_path, text + proposal(found, schema).sections).target_means[0].of == ("user", "item")


def test_pairs_with_means_of_their_own_are_found(tmp_path):
    """Single ids say nothing of the labels, and products of 8 numbers an id little; a cross and a mean do."""
    path, reached = written(tmp_path / "log.csv", pairs_with_means(12_000), names=("y", "user", "item")), {}
    for name, made in (("ids", ""), ("cross", "[[cross]]"), ("mean", "[[target_mean]]")):
        source = source_of(tmp_path, COLUMNS + (made and f'{made}\nof = ["user", "item"]\n'))
        prepare(source, path, tmp_path / name, PrepareOptions(split_by="random"))
        scores = restore_run(shop_logs.trained(tmp_path, tmp_path / name, out=f"run-{name}"), tmp_path / name).scores(
            "test"
        )
        reached[name] = auc(scores.logits, scores.labels)
    # The chances are 0.1 and 0.9, so that whoever knows them has an AUC of 0.9.
    assert reached["ids"] < 0.75
    assert min(reached["cross"], reached["mean"]) > 0.87


def test_pairs_with_mean_numbers_of_their_own_are_found(tmp_path):
    """Whoever knows the pairs' means has an R2 of 0.64; of shuffled labels nobody has one."""
    lines, reached = pairs_with_means(12_000, numbers=True), {}
    shuffled = np.random.default_rng(1).permutation([line["y"] for line in lines]).tolist()
    for name, labels in (("ids", None), ("mean", None), ("shuffled", shuffled)):
        own = lines if labels is None else [line | {"y": y} for line, y in zip(lines, labels, strict=True)]
        made = "" if name == "ids" else '[[target_mean]]\nof = ["user", "item"]\n'
        source = source_of(tmp_path, (COLUMNS + made).replace(*NUMBERS))
        path = written(tmp_path / f"{name}.csv", own, names=("y", "user", "item"))
        prepare(source, path, tmp_path / name, PrepareOptions(split_by="random"))
        run = shop_logs.trained(tmp_path, tmp_path / name, out=f"run-{name}")
        reached[name] = evaluate_numbers(restore_run(run, tmp_path / name).scores("valid")).r2
    assert reached["ids"] < 0.2
    assert reached["mean"] > 0.55
    assert reached["shuffled"] < 0.01
