"""Histories of one user and length leave out the same lines, in training, in logs to predict and in requests."""

import collections
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from prepare_reference import read_dataset, read_vocabulary
from test_din import MODEL, TWO_HISTORIES
from test_histories import column, lists_of
from test_histories import reference as histories_reference
from test_importance_kinds import prepared

import jrec
from jrec import cli
from jrec.data.columns import ListColumn
from jrec.data.schema import DatasetError, Schema
from jrec.prepare.encoder import Encoder
from jrec.prepare.histories import write_histories
from jrec.prepare.joined import csv_source
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import load_schema

LENGTH = 5
NAMES = {"past": 1, "past_kinds": 2}  # by history the place of its value in a line
AGED = TWO_HISTORIES.replace('of = "kind", length = 5', 'of = "kind", length = 5, ages = "ages"')
JOINED = TWO_HISTORIES.replace('[[categorical]]\ncolumn = "kind"\n', "") + (
    '[[join]]\nfile = "items.csv"\nkey = "item"\n[[join.categorical]]\ncolumn = "kind"\n'
)


def log(seed, lines=150):
    """(user, item, kind, time, click) in order of time, with ties and blanks."""
    draw = random.Random(seed)
    users, items = ["", *(f"u{k}" for k in range(12))], ["", "a", "b", "c"]
    drawn = [
        (draw.choice(users), draw.choice(items), draw.choice(["", "k", "l"]), draw.randrange(90), draw.randrange(2))
        for _ in range(lines)
    ]
    return sorted(drawn, key=lambda line: line[3])


def steps_of(lines):
    """By line the earlier lines of its user that have an item or a kind, the last ``LENGTH``."""
    made, seen = [], collections.defaultdict(list)
    for line in lines:
        earlier = [one for one in seen[line[0]] if one[3] < line[3] and (one[1] or one[2])]
        made.append(earlier[-LENGTH:] if line[0] else [])
        seen[line[0]].append(line)
    return made


def written(path, lines, header="user,item,kind,at,click"):
    path.write_text(header + "\n" + "".join(",".join(map(str, line)) + "\n" for line in lines))
    return path


def source_of(folder, text=TWO_HISTORIES):
    (folder / "schema.toml").write_text(text)
    return csv_source(load_schema(str(folder / "schema.toml")))


def dataset(folder, lines, text=TWO_HISTORIES, **options):
    options = PrepareOptions(**{"min_count": 1, "split": (1, 0, 0), "block_size": 32, **options})
    prepare(source_of(folder, text), [str(written(folder / "log.csv", lines))], folder / "data", options)
    return read_dataset(folder / "data")


def texts_of(folder, schema, name, lists):
    feature = next(f for f in schema.categorical if f.name == name)
    vocabulary, _ = read_vocabulary(folder / "data", schema.table(feature.table))
    if isinstance(lists, ListColumn):
        lists = [lists.values[a:b] for a, b in zip(lists.offsets[:-1], lists.offsets[1:], strict=True)]
    return [[vocabulary[row] for row in one] for one in lists]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("text", [TWO_HISTORIES, AGED])
def test_values_of_one_place_are_of_one_line(tmp_path, seed, text):
    lines = log(seed)
    schema, columns = dataset(tmp_path, lines, text)
    steps = steps_of(lines)
    for name, place in NAMES.items():
        assert texts_of(tmp_path, schema, name, columns[name]) == [[line[place] for line in own] for own in steps]
    if text == AGED:
        ages = [[now[3] - line[3] for line in own] for now, own in zip(lines, steps, strict=True)]
        assert columns["past_kinds:weight"] == ages


@pytest.mark.parametrize("seed", range(8))
def test_steps_of_random_columns_whatever_is_sorted_at_a_time(tmp_path, seed):
    draw = np.random.default_rng(seed)
    rows, length = int(draw.integers(0, 120)), int(draw.integers(1, 6))
    users, *values = (draw.integers(0, 3, rows).astype(np.uint64) for _ in range(4))  # 0 is the missing one
    moments = np.sort(draw.integers(-5, 20, rows))
    columns = [column(tmp_path / f"of-{k}", one, np.uint64) for k, one in enumerate(values)]
    steps = [*zip(*(one.tolist() for one in values), strict=True)]
    expected = histories_reference(users.tolist(), steps, moments.tolist(), length, missing=0, item_of=any)
    for k, own in enumerate(columns):
        made = write_histories(
            column(tmp_path / f"users-{k}", users, np.uint64),
            own,
            column(tmp_path / f"moments-{k}", moments, np.int64),
            tmp_path / f"work-{k}",
            rows=rows,
            length=length,
            in_step=columns,
            bucket_rows=int(draw.integers(1, 30)),
        )
        assert lists_of(made.items, rows) == [[step[k] for step in one] for one in expected]


def test_leave_one_out_and_joined_files_keep_in_step(tmp_path):
    kinds = {"a": "k", "b": "", "c": "l"}
    (tmp_path / "items.csv").write_text("item,kind\n" + "".join(f"{i},{k}\n" for i, k in kinds.items()))
    lines = [(user, item, kinds.get(item, ""), at, click) for user, item, _, at, click in log(3) if user and item]
    path = written(tmp_path / "log.csv", [line[:2] + line[3:] for line in lines], "user,item,at,click")
    source, options = source_of(tmp_path, JOINED), PrepareOptions(min_count=1, split_by="leave-one-out")
    prepare(source, [str(path)], tmp_path / "data", options)
    schema, columns = read_dataset(tmp_path / "data")
    last = {line[0]: own for line, own in zip(lines, steps_of(lines), strict=True)}  # of each user's last line
    names, _ = read_vocabulary(tmp_path / "data", schema.table("user"))
    for name, place in NAMES.items():
        own = texts_of(tmp_path, schema, name, columns[name])[-len(last) :]
        users = [names[row] for row in columns["user"][-len(last) :]]
        assert own == [[line[place] for line in last[user]] for user in users]
    given = {"user": ["u1"], "item": ["a"], "kind": ["k"], "past": [["b"]], "past_kinds": [[None]]}
    assert lengths_of(tmp_path, given) == [1]


def schema_at(folder):
    return Schema.load(folder / "data")


def lengths_of(folder, columns):
    """How many kinds the rows of a request have."""
    lists = Encoder(schema_at(folder)).columns(columns).ids["past_kinds"]
    assert isinstance(lists, ListColumn)
    return np.diff(lists.offsets).tolist()


def test_logs_to_predict_and_requests_mean_what_training_had(tmp_path):
    lines, text = log(7), AGED.replace('column = "past', 'separator = "|"\ncolumn = "past')
    schema, _ = dataset(tmp_path, lines, text)
    assert any(len(own) == 1 and not own[0][2] for own in steps_of(lines))  # a kind that is a list's only blank
    steps = steps_of(lines)
    lists = {name: [[line[place] for line in own] for own in steps] for name, place in NAMES.items()}
    ages = [[now[3] - line[3] for line in own] for now, own in zip(lines, steps, strict=True)]
    single = {name: [line[k] for line in lines] for k, name in enumerate(("user", "item", "kind"))}
    rows = [
        (*line[:3], *("|".join(lists[name][k]) for name in NAMES), "|".join(map(str, ages[k])))
        for k, line in enumerate(lines)
    ]
    log_file = written(tmp_path / "new.csv", rows, "user,item,kind,past,past_kinds,ages")
    missing = {name: [[value or None for value in one] for one in own] for name, own in lists.items()}
    pyarrow.parquet.write_table(pa.table(single | missing | {"ages": ages}), tmp_path / "new.parquet")
    objects = [dict(zip(("user", "item", "kind", *NAMES), row, strict=False)) for row in rows]
    for k, one in enumerate(objects):
        one |= {name: missing[name][k] for name in NAMES} | {"ages": ages[k]}
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(one) + "\n" for one in objects))
    encoder = Encoder(schema_at(tmp_path))
    doors = [next(encoder.stream(str(path), batch_size=999)) for path in (
        log_file, tmp_path / "new.parquet", tmp_path / "new.jsonl")]  # fmt: skip
    doors += [encoder.columns(single | given | {"ages": ages}) for given in (lists, missing)]
    for encoded in doors:
        for name in NAMES:
            assert texts_of(tmp_path, schema, name, encoded.ids[name]) == lists[name]
        assert encoded.weights["past_kinds"].tolist() == [age for own in ages for age in own]


def test_columns_of_unlike_lengths_are_refused(tmp_path):
    dataset(tmp_path, log(1))
    given = {"user": ["u1"], "item": ["a"], "kind": ["k"], "past": [["b", "a"]], "past_kinds": [["k"]]}
    with pytest.raises(DatasetError, match=r"'past_kinds' of example 0 has not as many values as 'past'.*give a blank"):
        Encoder(schema_at(tmp_path)).columns(given)


def test_datasets_without_steps_go_on_as_they_were(tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr("jrec.prepare.readers.delimited._steps", lambda histories: ())
        schema, _ = dataset(tmp_path, log(1))
    assert "steps" not in schema.provenance["format_options"]
    later = [line for line in log(2) if line[0]]
    options = PrepareOptions(split=(0, 0, 1), vocabulary_from=str(tmp_path / "data"))
    prepare(source_of(tmp_path), [str(written(tmp_path / "later.csv", later))], tmp_path / "later", options)
    made, columns = read_dataset(tmp_path / "later")
    assert "steps" not in made.provenance["format_options"]
    assert [*map(len, columns["past"])] != [*map(len, columns["past_kinds"])]
    given = {"user": ["u1"], "item": ["a"], "kind": ["k"], "past": [["b"]], "past_kinds": [[""]]}
    assert lengths_of(tmp_path, given) == [0]


def test_a_log_without_blanks_is_the_dataset_that_it_was(tmp_path, monkeypatch):
    lines = [line for line in log(5) if line[0] and line[1] and line[2]]
    identities = []
    for name in ("now", "earlier"):
        (tmp_path / name).mkdir()
        if name == "earlier":
            monkeypatch.setattr("jrec.prepare.readers.delimited._steps", lambda histories: ())
        schema, _ = dataset(tmp_path / name, lines)
        identities.append(schema.identity.digests)
    assert identities[0] == identities[1]


def test_histories_of_other_lengths_or_users_leave_out_lines_by_themselves(tmp_path):
    lines = log(4)
    schema, columns = dataset(tmp_path, lines, TWO_HISTORIES.replace('"kind", length = 5', '"kind", length = 4'))
    assert "steps" not in schema.provenance["format_options"]
    assert "" not in {value for one in texts_of(tmp_path, schema, "past", columns["past"]) for value in one}


def test_din_of_a_log_with_blanks_from_the_command_to_the_export(tmp_path, capsys):
    lines = [line for line in log(9, 300) if line[0]]
    path = written(tmp_path / "log.csv", lines)
    prepared(tmp_path, TWO_HISTORIES, path)
    (tmp_path / "run.toml").write_text(MODEL)
    run = tmp_path / "run"
    places = [f"data.path={tmp_path / 'data'}", f"out={run}"]
    assert cli.main(["train", str(tmp_path / "run.toml"), *places, "log.progress=off"]) == 0
    steps = steps_of(lines)
    assert any(len(own) == 1 and not own[0][2] for own in steps)
    # Without a separator in the schema columns of histories are lists as JSON prints them.
    given = [
        (*line, *('"' + json.dumps([one[place] for one in own]).replace('"', '""') + '"' for place in NAMES.values()))
        for line, own in zip(lines, steps, strict=True)
    ]
    written(tmp_path / "new.csv", given, "user,item,kind,at,click,past,past_kinds")
    assert cli.main(["predict", str(run), str(tmp_path / "new.csv"), "--out", str(tmp_path / "raw.parquet")]) == 0
    scores = []
    for split in ("train", "valid", "test"):
        out = tmp_path / f"{split}.parquet"
        assert cli.main(["predict", str(run), str(tmp_path / "data"), "--split", split, "--out", str(out)]) == 0
        scores += pyarrow.parquet.read_table(out)["score"].to_pylist()
    raw = pyarrow.parquet.read_table(tmp_path / "raw.parquet")["score"].to_pylist()
    np.testing.assert_allclose(raw, scores, rtol=1e-5)
    assert cli.main(["export", str(run), "--out", str(tmp_path / "export")]) == 0
    model = jrec.serving.load(tmp_path / "export")
    request = {name: [line[k] for line in lines] for k, name in enumerate(("user", "item", "kind"))}
    request |= {name: [[one[place] or None for one in own] for own in steps] for name, place in NAMES.items()}
    np.testing.assert_allclose(model(request), scores, rtol=1e-4, atol=1e-5)
    capsys.readouterr()
