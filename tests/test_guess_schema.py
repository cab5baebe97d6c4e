"""Schemas guessed of a file's first lines: what is in them, and that they prepare the file."""

import os
import random

import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from prepare_reference import read_dataset, read_vocabulary

from jrec import cli
from jrec.data.schema import DatasetError
from jrec.prepare.readers import load_schema
from jrec.prepare.readers.guess import guess_schema, questions


def clicks(rows=400):
    draw = random.Random(1)
    lines = ["id,event_time,user_id,age,price,year,tags,place,clicked"]
    for i in range(rows):
        hour, age = draw.randrange(24), draw.choice(["NA", "", str(draw.randrange(18, 90))])
        tags = ";".join(draw.sample("abcd", draw.randrange(4)))
        lines.append(
            f"{i},2024-05-{1 + i // 100:02d} {hour:02d}:00:00,{draw.randrange(200)},{age},"
            f'{draw.lognormvariate(2, 2):.2f},{draw.randrange(1990, 2024)},{tags},"here, there",'
            f"{draw.choice(('yes', 'no'))}"
        )
    return "\n".join(lines) + "\n"


def guessed(folder, path):
    text = guess_schema(str(path))
    (folder / "guess.toml").write_text(text)
    return load_schema(str(folder / "guess.toml")), text


@pytest.mark.parametrize("parquet", [False, True])
def test_a_log_with_a_header(tmp_path, parquet):
    path = tmp_path / "log"
    path.write_text(clicks())
    if parquet:
        text_only = pyarrow.csv.ConvertOptions(column_types={"age": pyarrow.string()})
        pq.write_table(pyarrow.csv.read_csv(path, convert_options=text_only), path)
    schema, text = guessed(tmp_path, path)
    assert schema.label.column == "clicked"
    assert (schema.time.column, schema.time.format) == ("event_time", "iso")
    assert schema.missing_values == ("", "NA")
    dense = {d.column: (d.transform, d.missing is not None) for d in schema.dense}
    assert dense == {"age": ("standardize", True), "price": ("log1p", True), "year": ("standardize", True)}
    categorical = {c.feature: (c.part, c.separator) for c in schema.categorical}
    assert categorical == {
        "event_time_hour": ("hour", ""), "event_time_weekday": ("weekday", ""), "user_id": ("", ""), "tags": ("", ";"),
    }  # fmt: skip
    assert '"id" is left out: it numbers the lines' in text
    assert '"place" is left out: it has 1 value(s)' in text


def test_recbole(tmp_path):
    draw = random.Random(2)
    rows = [
        f"{draw.randrange(90)}\t{draw.randrange(50)}\t{draw.randrange(1, 6)}\t{874724710 + draw.randrange(9**8)}"
        f"\t{draw.choice('ab')} c\t.5 {i}"
        for i in range(300)
    ]
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\tgenre:token_seq\tvector:float_seq"
    (tmp_path / "ml.inter").write_text("\n".join([header, *rows]) + "\n")
    command = ["prepare", "csv", "--input", str(tmp_path / "ml.inter"), "--out", str(tmp_path / "out"), "--quiet"]
    assert cli.main(command) == 1
    assert not (tmp_path / "out").exists()
    schema = load_schema(str(tmp_path / "out.schema.toml"))
    assert (schema.delimiter, schema.label.positive_at_least, schema.time.format) == ("\t", 4, "seconds")
    assert cli.main([*command, "--schema", str(tmp_path / "out.schema.toml")]) == 0
    dataset, columns = read_dataset(tmp_path / "out")
    features = ["timestamp_hour", "timestamp_weekday", "user_id", "item_id", "genre"]
    assert [f.name for f in dataset.categorical] == features
    assert {len(one) for one in columns["genre"]} == {2}


def test_recbole_s_users_and_items_are_joined(tmp_path):
    draw = random.Random(4)
    rows = [f"{draw.randrange(60)}\t{draw.randrange(40)}\t{draw.randrange(1, 6)}\t{881250949 + i}" for i in range(300)]
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    (tmp_path / "ml.inter").write_text("\n".join([header, *rows]) + "\n")
    users = [f"{k}\t{18 + k % 50}\t{draw.choice('MF')}\t{draw.randrange(9)}" for k in range(55)]
    (tmp_path / "ml.user").write_text("\n".join(["user_id:token\tage:float\tgender:token\trating:token", *users]))
    items = [f'{k}\t"Film" {k}, part {k % 3}\t{draw.choice(("Drama", "Drama Crime", "Crime"))}\tx' for k in range(40)]
    names = "item_id:token\tmovie_title:token_seq\tclass:token_seq\tsame:token"
    (tmp_path / "ml.item").write_text("\n".join([names, *items]))
    command = ["prepare", "csv", "--input", str(tmp_path / "ml.inter"), "--out", str(tmp_path / "out"), "--quiet"]
    assert cli.main(command) == 1
    text = (tmp_path / "out.schema.toml").read_text()
    assert '# "same:token" is left out: it has 1 value(s).' in text
    assert cli.main([*command, "--schema", str(tmp_path / "out.schema.toml"), "--min-count", "1"]) == 0
    dataset, columns = read_dataset(tmp_path / "out")
    assert [(d.name, d.transform) for d in dataset.dense] == [("age", "standardize")]
    features = ["user_id", "item_id", "gender", "user_rating", "movie_title", "class"]
    assert [f.name for f in dataset.categorical][-6:] == features
    inter = [row.split("\t") for row in rows]
    for feature, side, at in (("gender", users, 2), ("user_rating", users, 3), ("movie_title", items, 1)):
        of = {line.split("\t")[0]: line.split("\t")[at] for line in side}
        wanted = [of.get(row[side is items], "") for row in inter][:240]
        values, _ = read_vocabulary(tmp_path / "out", dataset.table(feature))
        got = [" ".join(values[v] for v in (c if isinstance(c, list) else [c])) for c in columns[feature][:240]]
        assert got == wanted

    (tmp_path / "ml.user").write_text("user_id:token\n1\n")
    (tmp_path / "ml.item").write_text("id:token\tclass:token\n1\tDrama\n2\tCrime\n")
    schema, text = guessed(tmp_path, tmp_path / "ml.inter")
    assert not schema.join
    assert "ml.user is not joined: " in text
    assert "ml.item is not joined: it has no column of the log." in text


def test_features_are_not_called_as_none_can_be(tmp_path):
    """A column may have any name; a feature's is that of files, and not the label's."""
    header = ["label", "a/b", "a_b", ".hidden", "price:weight", "clicked"]
    rows = [[f"u{k % 7}", f"v{k % 3}", f"w{k % 5}", f"x{k % 4}", str(k / 8), str(k % 2)] for k in range(200)]
    (tmp_path / "log.csv").write_text("\n".join(map(",".join, [header, *rows])) + "\n")
    (tmp_path / "schema.toml").write_text(guess_schema(str(tmp_path / "log.csv"), labels=["clicked"]))
    schema = load_schema(str(tmp_path / "schema.toml"))
    names = {c.column: c.feature for c in (*schema.categorical, *schema.dense)}
    assert names == {
        "label": "label_", "a/b": "a_b_", "a_b": "a_b", ".hidden": "_hidden", "price:weight": "price:weight_"
    }  # fmt: skip


def test_what_is_already_there_is_kept(tmp_path, capsys):
    (tmp_path / "log").write_text(clicks())
    (tmp_path / "out.schema.toml").write_text("mine")
    assert cli.main(["prepare", "csv", "--input", str(tmp_path / "log"), "--out", str(tmp_path / "out")]) == 2
    assert "out.schema.toml exists; pass it as --schema, or remove it" in capsys.readouterr().err
    assert (tmp_path / "out.schema.toml").read_text() == "mine"


def test_a_log_without_header_or_label(tmp_path):
    draw = random.Random(3)
    lines = [f"{draw.randrange(5)}|{draw.random():.3f}|x{draw.randrange(30)}" for _ in range(300)]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    schema, text = guessed(tmp_path, tmp_path / "log")
    assert (schema.delimiter, schema.columns, schema.label, schema.time) == ("|", ("c0", "c1", "c2"), None, None)
    assert [d.column for d in schema.dense] == ["c1"]
    assert [c.column for c in schema.categorical] == ["c0", "c2"]
    assert questions(text)[0] == '"label": no column looks like one. Name it here, or prepare with --no-labels.'


def test_what_cannot_be_guessed(tmp_path):
    (tmp_path / "one").write_text("a\nb\nc\n")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("one", "no delimiter splits its first line, 'a'"),
        ("empty", "is empty"),
        ("pipe", "the pipe"),
    ):
        with pytest.raises(DatasetError, match=message):
            guess_schema(str(tmp_path / name))
