"""Histories that ``jrec prepare`` makes of a log, against plain Python."""

import collections
import random

import numpy as np
import pytest
from prepare_reference import read_dataset, read_vocabulary

from jrec.data.schema import DatasetError, Schema
from jrec.prepare.encoder import Encoder
from jrec.prepare.histories import last_lines, write_histories
from jrec.prepare.joined import csv_source
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import load_schema
from jrec.prepare.spill import BUCKET_ROWS, PlainColumn

SCHEMA = """
[label]
column = "label"

[time]
column = "at"

[[categorical]]
column = "user"

[[categorical]]
column = "item"

[[categorical]]
column = "history"
separator = "|"
history = {by = "user", of = "item", length = 3}
"""
AGED = SCHEMA.replace("length = 3}", 'length = 3, ages = "ages"}')
UNTIMED = SCHEMA.replace('[time]\ncolumn = "at"\n', "")


def reference(users, items, moments, length, missing="", item_of=lambda item: item):
    """Each line's items of earlier moments, the last ``length``; lines in order of time."""
    made, seen = [], collections.defaultdict(list)
    for user, item, moment in zip(users, items, moments, strict=True):
        earlier = [i for i, at in seen[user] if at < moment and item_of(i) != missing]
        made.append(earlier[-length:] if user != missing else [])
        seen[user].append((item, moment))
    return made


def log(seed, lines=200):
    """(label, user, item, time), with ties, repeated and missing values, long texts, in no order of time."""
    draw = random.Random(seed)
    items = ["", "a", "b", "c", "an item with a long name", "12345678"]
    return [
        (draw.randrange(2), draw.choice(["", "u1", "u2", "a user with a long name"]), draw.choice(items),
         draw.randrange(-20, 40)) for _ in range(lines)
    ]  # fmt: skip


def written(path, lines):
    path.write_text("label,user,item,at\n" + "".join(",".join(map(str, line)) + "\n" for line in lines))
    return str(path)


def source_of(folder, schema=SCHEMA):
    (folder / "schema.toml").write_text(schema)
    return csv_source(load_schema(str(folder / "schema.toml")))


def values_of(folder, schema, rows):
    """Lists of rows as lists of texts."""
    vocabulary, _ = read_vocabulary(folder, schema.table("item"))
    return [[vocabulary[row] for row in one] for one in rows]


def column(path, values, dtype):
    made = PlainColumn(path, np.dtype(dtype))
    made.append(np.array(values, dtype))
    made.finish()
    return made


def lists_of(column, rows):
    found = column.read(0, rows)
    assert column.rows == rows
    return [found.values[a:b].tolist() for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


@pytest.mark.parametrize("seed", range(12))
def test_histories_of_random_columns(tmp_path, seed):
    draw = np.random.default_rng(seed)
    rows, length = int(draw.integers(0, 120)), int(draw.integers(1, 6))
    users = draw.integers(0, 4, rows).astype(np.uint64) * np.uint64(2**62)  # 0 is the missing one
    items, moments = draw.integers(0, 5, rows).astype(np.uint64), np.sort(draw.integers(-5, 20, rows))
    timed, ticks = bool(seed % 3), (None, 1, 4)[seed % 3]
    made = write_histories(
        column(tmp_path / "users", users, np.uint64),
        column(tmp_path / "items", items, np.uint64),
        column(tmp_path / "moments", moments, np.int64) if timed else None,
        tmp_path / "work",
        rows=rows,
        length=length,
        ticks=ticks,
        bucket_rows=int(draw.integers(1, 30)),
    )
    lists = lists_of(made.items, rows)
    assert lists == reference(users.tolist(), items.tolist(), moments if timed else range(rows), length, missing=0)
    assert made.items.longest == max(map(len, lists), default=0)
    if ticks is None:
        assert made.ages is None
        return
    places = [(moment, item) for moment, item in zip(moments.tolist(), items.tolist(), strict=True)]
    expected = reference(users.tolist(), places, moments, length, missing=0, item_of=lambda place: place[1])
    ages = [[(now - then) / ticks for then, _ in one] for now, one in zip(moments.tolist(), expected, strict=True)]
    assert lists_of(made.ages, rows) == ages


@pytest.mark.parametrize("timed", [True, False])
def test_prepared_histories_hold_what_is_strictly_earlier(tmp_path, timed):
    lines = log(int(timed))
    files = [written(tmp_path / f"{k}.csv", lines[70 * k : 70 * (k + 1)]) for k in range(3)]
    prepare(
        source_of(tmp_path, SCHEMA if timed else UNTIMED), files, tmp_path / "out",
        PrepareOptions(min_count=1, block_size=16, split=(0.5, 0.2, 0.3), keep_order=True),
    )  # fmt: skip
    schema, columns = read_dataset(tmp_path / "out")
    ordered = sorted(lines, key=lambda line: line[3]) if timed else lines
    _, users, items, moments = zip(*ordered, strict=True)
    expected = reference(users, items, moments if timed else range(len(lines)), 3)
    vocabulary, _ = read_vocabulary(tmp_path / "out", schema.table("item"))
    known = set(vocabulary)
    expected = [[item if item in known else None for item in one] for one in expected]
    assert values_of(tmp_path / "out", schema, columns["history"]) == expected
    feature = next(f for f in schema.categorical if f.name == "history")
    assert (feature.table, feature.max_length, feature.fixed_length) == ("item", 3, False)
    assert [t.name for t in schema.tables] == ["user", "item"]


def last_reference(users, items, moments, missing=""):
    """Each line's split, 3 for none: the last of a user 2, the one before 1, the one before that 0; users; dropped."""
    lines = collections.defaultdict(list)
    for at, (user, item) in enumerate(zip(users, items, strict=True)):
        if missing not in (user, item):
            lines[user].append(at)
    splits, dropped = [3] * len(users), 0
    for own in lines.values():
        chosen = {own[-1]: 0} if len(own) < 3 else {own[-1]: 2, own[-2]: 1, own[-3]: 0}
        for at, split in chosen.items():
            if moments[at] > moments[own[0]]:
                splits[at] = split
            else:
                dropped += 1
    return splits, len(lines), dropped


@pytest.mark.parametrize("seed", range(20))
def test_the_last_lines_of_users(tmp_path, seed):
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(1, 60))
    users = draw.integers(0, int(draw.integers(2, 12)), rows).astype(np.uint64) * np.uint64(2**62 + 1)
    items, moments = draw.integers(0, 9, rows).astype(np.uint64), np.sort(draw.integers(0, 40, rows))
    timed = bool(seed % 3)
    found = last_lines(
        column(tmp_path / "users", users, np.uint64),
        column(tmp_path / "items", items, np.uint64),
        column(tmp_path / "moments", moments, np.int64) if timed else None,
        tmp_path / "work",
        rows=rows,
        bucket_rows=int(draw.integers(1, 20)),
    )
    expected = last_reference(users.tolist(), items.tolist(), moments if timed else range(rows), missing=0)
    assert (found.splits.read(0, rows).tolist(), found.users, found.without_history) == expected


@pytest.mark.parametrize("timed", [True, False])
def test_leave_one_out(tmp_path, monkeypatch, timed):
    monkeypatch.setattr("jrec.prepare.splits._READ_ROWS", 32)
    draw = random.Random(int(timed))
    lines = [
        (0, f"u{draw.randrange(40)}", draw.choice(["a", "b", "c", "d", ""]), draw.randrange(60)) for _ in range(150)
    ]
    said = []
    options = PrepareOptions(min_count=1, split_by="leave-one-out")
    path = written(tmp_path / "log.csv", lines)
    source = source_of(tmp_path, SCHEMA if timed else UNTIMED)
    prepare(source, [path], tmp_path / "out", options, report=said.append)
    schema, columns = read_dataset(tmp_path / "out")
    _, users, items, moments = zip(*(sorted(lines, key=lambda line: line[3]) if timed else lines), strict=True)
    at = moments if timed else range(len(lines))
    splits, count, dropped = last_reference(users, items, at)
    histories = reference(users, items, at, 3)
    order = [k for split in range(3) for k in range(len(lines)) if splits[k] == split]
    names, _ = read_vocabulary(tmp_path / "out", schema.table("user"))
    known = {users[k] for k in order if splits[k] == 0}
    assert [names[row] for row in columns["user"]] == [users[k] if users[k] in known else None for k in order]
    assert values_of(tmp_path / "out", schema, columns["history"]) == [histories[k] for k in order]
    assert values_of(tmp_path / "out", schema, [columns["item"]])[0] == [items[k] for k in order]
    sizes = [splits.count(split) for split in range(3)]
    assert [schema.splits[name].examples for name in ("train", "valid", "test")] == sizes
    assert all(sizes)
    assert dropped
    assert said[-1].startswith(f"{count:,} users of 150 lines: {sizes[0]} lines to train on")
    assert f"{dropped} lines had no earlier one" in said[-1]
    assert schema.provenance["options"]["split_by"] == "leave-one-out"
    assert "split" not in schema.provenance["options"]


def test_leave_one_out_needs_histories_of_one_user(tmp_path):
    options, path = PrepareOptions(split_by="leave-one-out"), written(tmp_path / "log.csv", log(0, 20))
    without = SCHEMA[: SCHEMA.rindex("[[categorical]]")]
    by_item = (
        SCHEMA
        + '[[categorical]]\ncolumn = "users"\nseparator = "|"\nhistory = {by = "item", of = "user", length = 3}\n'
    )
    for schema, message in ((without, "the schema has no history"), (by_item, "has histories by item, user")):
        with pytest.raises(DatasetError, match=message):
            prepare(source_of(tmp_path, schema), [path], tmp_path / "out", options)
    with pytest.raises(DatasetError, match="--split-by leave-one-out, which needs users of four lines or more"):
        prepare(source_of(tmp_path), [written(tmp_path / "few.csv", log(1, 20)[:1])], tmp_path / "out", options)
    with pytest.raises(DatasetError, match="leave --split out"):
        PrepareOptions(split_by="leave-one-out", split=(1, 0, 0))


def test_lines_of_one_moment_are_not_in_each_others_histories(tmp_path):
    lines = [(1, "u1", "a", 1), (1, "u1", "b", 1), (1, "u1", "a", 2), (0, "u1", "c", 3)]
    prepare(source_of(tmp_path), [written(tmp_path / "log.csv", lines)], tmp_path / "out",
            PrepareOptions(min_count=1, split=(1, 0, 0)))  # fmt: skip
    schema, columns = read_dataset(tmp_path / "out")
    assert values_of(tmp_path / "out", schema, columns["history"]) == [[], [], ["a", "b"], ["a", "b", "a"]]


@pytest.mark.parametrize(
    ("form", "moments", "expected"),
    [
        ("integer", ["1", "3", "10", "11"], [[], [2], [9, 7], [10, 8, 1]]),
        ("seconds", ["1.5", "2", "60", "60.5"], [[], [0.5], [58.5, 58], [59, 58.5, 0.5]]),
        (
            "iso",
            ["2024-01-01", "2024-01-02", "2024-01-02T06:00", "2024-01-02T06:01"],
            [[], [86_400], [108_000, 21_600], [108_060, 21_660, 60]],
        ),
    ],
)
@pytest.mark.parametrize("split_by", ["time", "leave-one-out"])
def test_ages_are_seconds_before_the_line(tmp_path, form, moments, expected, split_by):
    pairs = [*zip("abca", moments, strict=True)]
    lines = [(label, user, item, at) for label, user in enumerate(("u1", "u2")) for item, at in pairs]
    text = AGED.replace('column = "at"', f'column = "at"\nformat = "{form}"')
    split = {"split": (1, 0, 0)} if split_by == "time" else {}
    source, path = source_of(tmp_path, text), written(tmp_path / "log.csv", lines)
    prepare(source, [path], tmp_path / "out", PrepareOptions(min_count=1, split_by=split_by, **split))
    schema, columns = read_dataset(tmp_path / "out")
    # Leave-one-out leaves out lines with an empty history.
    wanted = [one for one in expected for _ in range(2)][0 if split_by == "time" else 2 :]
    assert columns["history:weight"] == wanted
    assert [len(one) for one in columns["history"]] == [len(one) for one in wanted]
    feature = next(f for f in schema.categorical if f.name == "history")
    assert (feature.weighted, feature.aged, feature.scaled) == (True, True, False)
    assert "aged" not in next(f for f in schema.categorical if f.name == "item").meaning


def test_lines_that_are_predicted_give_the_ages_of_their_histories(tmp_path):
    lines = [(1, "u1", "a", 1), (1, "u1", "b", 2), (0, "u2", "a", 3), (1, "u1", "a", 4)]
    prepare(source_of(tmp_path, AGED), [written(tmp_path / "log.csv", lines)], tmp_path / "out",
            PrepareOptions(min_count=1, split=(1, 0, 0)))  # fmt: skip
    encoder = Encoder(Schema.load(tmp_path / "out"))
    assert {"history", "ages"} <= set(encoder.raw_columns)
    raw = tmp_path / "new.csv"
    raw.write_text("user,item,history,ages\nu1,a,a|b|b|a,9|5|4|1\nu2,a,,\n")
    (piece,) = encoder.stream(str(raw), batch_size=8)
    assert piece.weights["history"].tolist() == [5, 4, 1]  # the last 3
    given = {"user": ["u1"], "item": ["a"], "history": [["a", "b", "b", "a"]], "ages": [[9, 5, 4, 1.5]]}
    assert encoder.columns(given).weights["history"].tolist() == [5, 4, 1.5]
    with pytest.raises(DatasetError, match="column 'ages' of example 0 is not one weight for each value of 'history'"):
        encoder.columns({**given, "ages": [[1]]})
    raw.write_text("user,item,history\nu1,a,a\n")
    with pytest.raises(DatasetError, match=r"lacks column\(s\) ages.*in 'ages' how many seconds ago each was"):
        list(encoder.stream(str(raw), batch_size=8))


def test_a_later_log_has_ages_where_the_earlier_one_has(tmp_path):
    lines, options = [(0, "u1", "a", 1), (1, "u1", "b", 2)], PrepareOptions(min_count=1, split=(1, 0, 0))
    prepare(source_of(tmp_path, AGED), [written(tmp_path / "log.csv", lines)], tmp_path / "out", options)
    later = written(tmp_path / "later.csv", [(1, "u1", "b", 5), (1, "u1", "a", 8)])
    options = PrepareOptions(vocabulary_from=str(tmp_path / "out"), split=(0, 0, 1))
    prepare(source_of(tmp_path, AGED), [later], tmp_path / "later", options)
    _, columns = read_dataset(tmp_path / "later")
    assert columns["history:weight"] == [[], [3]]
    with pytest.raises(DatasetError, match="categorical feature 'history' has weighted"):
        prepare(source_of(tmp_path), [later], tmp_path / "other", options)


def test_test_lines_hold_training_items_of_files_for_each_split(tmp_path, monkeypatch):
    train = written(tmp_path / "train.csv", [(1, "u1", "a", 1), (0, "u1", "b", 2)])
    test = written(tmp_path / "test.csv", [(1, "u1", "a", 3), (1, "u2", "b", 4)])
    options = PrepareOptions(min_count=1)
    prepare(source_of(tmp_path), {"train": [train], "test": [test]}, tmp_path / "out", options)
    schema, columns = read_dataset(tmp_path / "out")
    assert values_of(tmp_path / "out", schema, columns["history"]) == [[], ["a"], ["a", "b"], []]
    for rows in (BUCKET_ROWS, 2):  # of which the second piece begins with the test
        monkeypatch.setattr("jrec.prepare.histories.BUCKET_ROWS", rows)
        with pytest.raises(DatasetError, match=r"earlier than some of the split before.*--input"):
            prepare(source_of(tmp_path), {"train": [test], "test": [train]}, tmp_path / "other", options)


@pytest.mark.parametrize("joined", [False, True])
def test_lines_that_are_predicted_give_their_histories(tmp_path, joined):
    text = SCHEMA
    if joined:
        (tmp_path / "items.csv").write_text("item,maker\na,m\nb,n\n")
        text += '[[join]]\nfile = "items.csv"\nkey = "item"\n[[join.categorical]]\ncolumn = "maker"\n'
    lines = [(1, "u1", "a", 1), (1, "u1", "b", 2), (0, "u2", "a", 3), (1, "u1", "a", 4)]
    prepare(source_of(tmp_path, text), [written(tmp_path / "log.csv", lines)], tmp_path / "out",
            PrepareOptions(min_count=1, split=(1, 0, 0)))  # fmt: skip
    schema = Schema.load(tmp_path / "out")
    encoder = Encoder(schema)
    raw = tmp_path / "new.csv"
    raw.write_text("user,item,history\nu1,a,a|b|b|a\nstranger,b,\nu2,a,unseen\n")
    pieces = list(encoder.stream(str(raw), batch_size=8))
    lists = pieces[0].ids["history"]
    row, oov = {v: i for i, v in enumerate(read_vocabulary(tmp_path / "out", schema.table("item"))[0])}, None
    assert lists.offsets.tolist() == [0, 3, 3, 4]  # the last 3 of the first
    assert lists.values.tolist() == [row["b"], row["b"], row["a"], row[oov]]
    assert "history" in encoder.raw_columns
    raw.write_text("user,item\nu1,a\n")
    message = r"lacks column\(s\) history.*'history' is a history: give each line.*--vocabulary-from the training data"
    with pytest.raises(DatasetError, match=message):
        list(encoder.stream(str(raw), batch_size=8))


def test_a_file_without_a_header_gives_histories_in_its_last_column(tmp_path):
    text = 'columns = ["label", "user", "item", "at"]\n' + SCHEMA
    (tmp_path / "log.csv").write_text("1,u1,a,1\n0,u1,b,2\n1,u1,a,3\n")
    prepare(source_of(tmp_path, text), [str(tmp_path / "log.csv")], tmp_path / "out",
            PrepareOptions(min_count=1, split=(1, 0, 0)))  # fmt: skip
    schema = Schema.load(tmp_path / "out")
    (tmp_path / "new.csv").write_text("1,u1,a,4,b|a\n")
    (piece,) = Encoder(schema).stream(str(tmp_path / "new.csv"), batch_size=8)
    assert values_of(tmp_path / "out", schema, [piece.ids["history"].values]) == [["b", "a"]]


def test_a_later_log_begins_its_histories(tmp_path):
    lines, options = [(0, "u1", "a", 1), (1, "u1", "b", 2)], PrepareOptions(min_count=1, split=(1, 0, 0))
    prepare(source_of(tmp_path), [written(tmp_path / "log.csv", lines)], tmp_path / "out", options)
    later, said = written(tmp_path / "later.csv", [(1, "u1", "b", 5), (1, "u1", "a", 6)]), []
    options = PrepareOptions(vocabulary_from=str(tmp_path / "out"), split=(0, 0, 1))
    prepare(source_of(tmp_path), [later], tmp_path / "later", options, report=said.append)
    _, columns = read_dataset(tmp_path / "later")
    assert values_of(tmp_path / "out", Schema.load(tmp_path / "out"), columns["history"]) == [[], ["b"]]
    assert any("histories begin with this log" in message for message in said)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('by = "user"', 'by = "visitor"', "by = 'visitor'; it must be a .* one of user, item"),
        ('of = "item"', 'of = "history"', "of = 'history'; it must be a"),
        ("length = 3", "length = 0", "length 0; it must be 1 to"),
        ('separator = "|"', 'separator = "|"\nmax_length = 3', "leave out max_length"),
        ('separator = "|"', 'separator = "|"\ntoo_long = "last"', "leave out too_long"),
        ('separator = "|"', 'separator = "|"\ntable = "user"', "which has table 'item', but table is 'user'"),
        ('column = "history"', 'column = "at"\nname = "history"', "its column 'at'.* choose another name"),
        ("length = 3}", 'length = 3, ages = "at"}', "its column 'at'.* choose another name"),
        ("length = 3}", 'length = 3, ages = "history"}', "its column 'history'.* choose another name"),
        ('[time]\ncolumn = "at"', "", "has ages = 'ages', but there is no .time."),
    ],
)
def test_schemas_that_make_no_history_are_refused(tmp_path, old, new, message):
    schema = SCHEMA if "ages = 'ages'" not in message else AGED
    assert schema.count(old) == 1
    with pytest.raises(DatasetError, match=message):
        source_of(tmp_path, schema.replace(old, new))


def test_a_joined_file_has_no_history(tmp_path):
    text = SCHEMA + '[[join]]\nfile = "items.csv"\nkey = "item"\n[[join.categorical]]\ncolumn = "other"\n'
    with pytest.raises(DatasetError, match="'other' has a history, which is of the log's lines"):
        source_of(tmp_path, text + 'history = {by = "user", of = "item", length = 3}\n')


def test_logs_whose_histories_would_leak_or_are_there_are_refused(tmp_path):
    path = written(tmp_path / "log.csv", log(0, 20))
    with pytest.raises(DatasetError, match=r"--split-by random with the history 'history'.*leave --split-by out"):
        prepare(source_of(tmp_path), [path], tmp_path / "out", PrepareOptions(split_by="random"))
    (tmp_path / "has.csv").write_text("label,user,item,at,history\n1,u,i,1,a\n")
    with pytest.raises(DatasetError, match="has column 'history', but the schema makes 'history' of earlier lines"):
        prepare(source_of(tmp_path), [str(tmp_path / "has.csv")], tmp_path / "out")
    (tmp_path / "has.csv").write_text("label,user,item,at,ages\n1,u,i,1,3\n")
    with pytest.raises(DatasetError, match="has column 'ages', but the schema makes 'history' of earlier lines"):
        prepare(source_of(tmp_path, AGED), [str(tmp_path / "has.csv")], tmp_path / "out")
