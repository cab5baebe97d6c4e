"""Files that join a csv log: the dataset is, to the byte, that of a log which has their columns."""

import gzip
import json

import joined_logs
import numpy as np
import pytest
from dataset_files import content

from jrec import cli
from jrec.data.schema import DatasetError, Schema
from jrec.prepare import joined
from jrec.prepare.encoder import Encoder
from jrec.prepare.joined import csv_source
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import load_schema


def made(folder, kind, out="", *, log="", joined=None, report=lambda message: None, **options):
    """The dataset of log.csv with joined files, or of prejoined.csv."""
    source = csv_source(load_schema(str(folder / f"{kind}.toml"))).with_joined(joined or {})
    log = log or ("log.csv" if kind == "joined" else "prejoined.csv")
    settings = PrepareOptions(threads=2, block_size=64, shard_examples=256, **options)
    return prepare(source, [str(folder / log)], folder / (out or kind), settings, report=report)


@pytest.mark.parametrize("options", [{"min_count": 3}, {"max_rows": 20}, {"growing": ("all",), "split_by": "random"}])
def test_the_dataset_is_that_of_the_log_with_the_columns(tmp_path, options):
    joined_logs.write(tmp_path)
    schema, want = (made(tmp_path, kind, **options) for kind in ("joined", "prejoined"))
    assert schema.identity == want.identity
    assert (schema.dense, schema.categorical, schema.tables) == (want.dense, want.categorical, want.tables)
    assert content(tmp_path / "joined") == content(tmp_path / "prejoined")
    assert schema.dense[0].mean is not None
    assert len(schema.categorical[1].boundaries) == 3


def test_splits_of_their_own(tmp_path):
    joined_logs.write(tmp_path)
    said = []
    for kind, log in (("joined", "log.csv"), ("prejoined", "prejoined.csv")):
        header, *lines = (tmp_path / log).read_text().splitlines()
        groups = {"train": lines[:400], "test": lines[400:]}
        for name, part in groups.items():
            (tmp_path / f"{kind}_{name}.csv").write_text("\n".join([header, *part]) + "\n")
        inputs = {name: [str(tmp_path / f"{kind}_{name}.csv")] for name in groups}
        source = csv_source(load_schema(str(tmp_path / f"{kind}.toml")))
        prepare(source, inputs, tmp_path / kind, PrepareOptions(threads=1), report=said.append)
    assert content(tmp_path / "joined") == content(tmp_path / "prejoined")
    assert [message.split()[2] for message in said] == ["400", "400", "200", "200"]


def test_small_blocks_and_skipped_lines(tmp_path, monkeypatch):
    joined_logs.write(tmp_path)
    for name, width in (("log.csv", 4), ("prejoined.csv", 12)):
        lines = (tmp_path / name).read_text().splitlines()
        lines[7] = ",".join(["2", *lines[7].split(",")[1:]])
        lines[90] = "1," * (width + 3)
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("jrec.prepare.readers.lines.BLOCK_BYTES", 1000)
    for kind in ("joined", "prejoined"):
        assert made(tmp_path, kind, on_bad_line="skip").provenance["bad_lines"] == 2
    assert content(tmp_path / "joined") == content(tmp_path / "prejoined")


def test_keys_that_a_file_lacks_are_counted_and_files_are_inputs(tmp_path, monkeypatch):
    monkeypatch.setattr("jrec.prepare.readers.lines.BLOCK_BYTES", 1000)
    lines = joined_logs.write(tmp_path)
    said = []
    schema = made(tmp_path, "joined", report=said.append)
    lacking = [i for i, line in enumerate(lines) if line["user"] in ("ghost of a user", "NA")]
    share, first = f"{len(lacking):,} of 600 examples ({len(lacking) / 600:.1%})", lines[lacking[0]]["user"]
    users, items = tmp_path / "side/users.csv.gz", tmp_path / "items.parquet"
    assert said[0].startswith(
        f"{share} have a 'user' that {users} lacks, the first {first!r} at {tmp_path / 'log.csv'}:{lacking[0] + 2};"
    )
    assert str(items) in said[1]
    assert len(said) == 2
    inputs = [(one["file"], one["bytes"], one.get("join")) for one in schema.provenance["inputs"]]
    log = tmp_path / "log.csv"
    assert inputs == [
        (str(log), log.stat().st_size, None),
        (str(users), users.stat().st_size, "users"),
        (str(items), items.stat().st_size, "items.parquet"),
    ]
    assert [j["file"] for j in schema.provenance["format_options"]["schema"]["join"]] == [str(users), str(items)]

    joined_logs.write(tmp_path, absent=False)
    made(tmp_path, "joined", "again", report=said.append)
    assert len(said) == 2


def test_a_later_log_with_files_of_its_own(tmp_path):
    monday, tuesday = tmp_path / "monday", tmp_path / "tuesday"
    for folder, seed in ((monday, 0), (tuesday, 1)):
        folder.mkdir()
        joined_logs.write(folder, seed=seed)
    made(monday, "joined")
    later = {"vocabulary_from": str(monday / "joined"), "split": (0.0, 0.0, 1.0)}
    schema, want = (made(tuesday, kind, **later) for kind in ("joined", "prejoined"))
    assert schema.identity == want.identity
    files = {"users": str(tuesday / "side/users.csv.gz"), "items.parquet": str(tuesday / "items.parquet")}
    (monday / "log.csv").write_bytes((tuesday / "log.csv").read_bytes())
    assert made(monday, "joined", "later", joined=files, **later).identity == want.identity

    text = (
        (tuesday / "joined.toml")
        .read_text()
        .replace('column = "born"\nquantiles = 4', 'column = "born"\nquantiles = 5')
    )
    (tuesday / "joined.toml").write_text(text)
    with pytest.raises(DatasetError, match="feature 'born' has quantiles 5 in this log, but 4 in"):
        made(tuesday, "joined", "other", **later)


def test_the_encoder_streams_with_the_files_and_takes_columns_without(tmp_path):
    lines = joined_logs.write(tmp_path)
    made(tmp_path, "joined")
    made(tmp_path, "prejoined")
    encoder, plain = (Encoder(Schema.load(tmp_path / kind)) for kind in ("joined", "prejoined"))
    (want,) = plain.stream(str(tmp_path / "prejoined.csv"), batch_size=1000)
    said = []
    (got,) = encoder.stream(str(tmp_path / "log.csv"), batch_size=1000, report=said.append)
    assert len(said) == 2
    (tmp_path / "items.parquet").rename(tmp_path / "moved.parquet")
    joined = {"items.parquet": str(tmp_path / "moved.parquet")}
    (moved,) = encoder.stream(str(tmp_path / "log.csv"), batch_size=1000, joined=joined)
    names = {"strengths": "tags:weight"}
    columns = {names.get(name, name): [line[name] or None for line in lines] for name in lines[0] if name != "item"}
    columns["tags:weight"] = [[float(w) for w in line["strengths"].split("|") if w] for line in lines]
    columns["tags"] = [line["tags"].split("|") if line["tags"] else [] for line in lines]
    columns["related"] = [line["related"].split("|") if line["related"] else None for line in lines]
    assert set(encoder.raw_columns) <= set(columns)
    for one in (got, moved, encoder.columns(columns)):
        np.testing.assert_array_equal(one.dense, want.dense)
        by_name, wanted = one.by_name(), want.by_name()
        assert by_name.keys() == wanted.keys()
        for name, column in wanted.items():
            for a, b in zip(by_name[name], column, strict=True):
                np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(got.labels, want.labels)

    with pytest.raises(
        DatasetError, match=r"items.parquet does not exist; .* give its place with --join items.parquet="
    ):
        encoder.stream(str(tmp_path / "log.csv"), batch_size=1000)
    with pytest.raises(DatasetError, match="--join names 'item', but the joined files are users, items"):
        encoder.stream(str(tmp_path / "log.csv"), batch_size=1000, joined={"item": "x"})
    with pytest.raises(DatasetError, match="--join names 'users', but 'csv' has no joined files"):
        plain.stream(str(tmp_path / "prejoined.csv"), batch_size=1000, joined={"users": "x"})


SMALL = """
[label]
column = "click"
[[categorical]]
column = "item"
[[join]]
file = "users.csv"
key = "user"
missing
[[join.dense]]
column = "age"
[[join.categorical]]
column = "groups"
separator = "|"
max_length = 2
"""


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ("user,age,groups\nu,1,a\nlong user name,2,b\nv,3,\nlong user name,2,b\n",
         r"users.csv:5: column 'user' holds 'long user name', as line 3 does; a joined file has one row a key"),
        ("user,age,groups\nu,1,a\nu,1,a\n", r"users.csv:3: column 'user' holds 'u', as line 2 does"),
        ("user,age\nu,1\n", r"users.csv:1: the header lacks column\(s\) groups; it has user, age"),
        ("id,age,groups\nu,1,\n", r"users.csv:1: the header lacks column\(s\) user"),
        ("user,age,groups\nu,old,a\n",
         r"users.csv:2: field 'age' holds 'old', which is not a number. Fix the line of the joined file"),
        ("user,age,groups\nu,,a\n", r"users.csv:2: field 'age' is blank. Fix the line of the joined file, or take"),
        ("user,age,groups\nu,1e39,a\n", r"users.csv:2: field 'age' holds '1e39', which is too large for float32"),
        ("user,age,groups\nu,1,a|b|c\n", r"users.csv:2: field 'groups' holds 'a|b|c', which has more than max"),
        ("user,age,groups\n,1,a\n", r"users.csv:2: field 'user' holds '', which is a missing value, which no line"),
        ("user,age,groups\n", r"users.csv has no line but its header"),
        ("", r"users.csv is empty"),
        (None, r"users.csv does not exist; it is joined as 'users.csv'; give its place with --join users.csv=FILE"),
        ("user,age,groups\nu,1,a\n",
         r"log.csv:3: field 'user' holds 'v', which is not in .*users.csv, of which feature 'age' needs a value; add"
         r" the row, or set missing for the feature. Fix the line, or pass --on-bad-line skip"),
    ],
)  # fmt: skip
def test_bad_files_are_named(tmp_path, users, message):
    (tmp_path / "joined.toml").write_text(SMALL.replace("missing\n", "", 1))
    (tmp_path / "log.csv").write_text("click,user,item\n1,u,i\n0,v,i\n")
    if users is not None:
        (tmp_path / "users.csv").write_text(users)
    with pytest.raises(DatasetError, match=message) as error:
        made(tmp_path, "joined", min_count=1)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('file = "users.csv"', "", r"join\[0\]\.file is missing"),
        ('file = "users.csv"', 'file = ""', r"file of a \[\[join\]\] is ''; name the file to join"),
        ('key = "user"', 'key = "click"', "column 'click' is a key, which is compared as text"),
        ('key = "user"', 'key = "user"\non = "age"', "join 'users.csv': column 'age' is a key, which is compared"),
        ('column = "age"', 'column = "item"', "feature 'item' is called as a column of the log; set"),
        ('column = "age"', 'column = "user"\nname = "age"', "column 'user' is a key"),
        ('column = "age"', 'column = "groups"', r"column\(s\) groups are used more than once"),
        ('column = "age"', 'column = "age"\nname = "groups"', r"feature name\(s\) groups occur more than once"),
        ('column = "age"', 'column = "age"\ntransform = "log"', "transform of 'age' is 'log'; choose one of"),
        ('key = "user"', 'key = "user"\ncolumns = ["user", "age"]', r"column\(s\) groups are not among columns"),
        ('key = "user"', 'key = "user"\nkind = "left"', r"unknown key join\[0\].kind"),
        ('key = "user"', 'key = "user"\ndelimiter = "\\n"', r"delimiter is '\\n'; it must be without line ends"),
        ("[[join.dense]]", '[[join]]\nfile = "a/users.csv"\nkey = "user"\n[[join.dense]]', "is the name of several"),
        ("[[join.dense]]", '[[join]]\nfile = "b"\nkey = "user"\n[[join.dense]]', "'users.csv' has no feature; add a"),
    ],
)  # fmt: skip
def test_bad_schemas(tmp_path, old, new, message):
    (tmp_path / "joined.toml").write_text(SMALL.replace("missing\n", "", 1).replace(old, new, 1))
    with pytest.raises(DatasetError, match=message):
        load_schema(str(tmp_path / "joined.toml"))


def test_a_file_that_memory_does_not_hold(tmp_path, monkeypatch):
    joined_logs.write(tmp_path)
    monkeypatch.setattr(joined.os, "sysconf", lambda name: 64 if name == "SC_PAGE_SIZE" else 30)
    with pytest.raises(
        DatasetError, match=r"users.csv.gz takes about [\d,]+ bytes of memory .* machine has 1,920; leave"
    ):
        made(tmp_path, "joined")


def test_a_key_with_the_hash_of_another_is_an_error(tmp_path, monkeypatch):
    joined_logs.write(tmp_path)
    real = joined.LongTexts.joined

    def forged(pieces):
        texts = real(pieces)
        return texts._replace(fingerprints=texts.fingerprints ^ np.uint64(1))

    monkeypatch.setattr(joined.LongTexts, "joined", forged)
    with pytest.raises(DatasetError, match=r"'user number \d+' of column 'user' has the hash of another key of"):
        made(tmp_path, "joined")


def test_the_command_and_a_file_without_header(tmp_path, capsys):
    joined_logs.write(tmp_path)
    (tmp_path / "side/users.csv.gz").rename(tmp_path / "elsewhere.csv")
    text = gzip.decompress((tmp_path / "elsewhere.csv").read_bytes()).decode().partition("\n")
    (tmp_path / "elsewhere.csv").write_text(text[2].replace(",", "::"))
    lines = f'name = "users"\ndelimiter = "::"\ncolumns = {json.dumps(text[0].split(","))}\n'
    schema = tmp_path / "joined.toml"
    schema.write_text(schema.read_text().replace('name = "users"\n', lines))
    out = ["--out", str(tmp_path / "joined"), "--quiet", "--block-size", "64", "--shard-examples", "256"]
    command = ["prepare", "csv", "--schema", str(schema), "--input", str(tmp_path / "log.csv"), *out]
    assert cli.main(command) == 2
    assert "side/users.csv.gz does not exist" in capsys.readouterr().err
    guessing = ["prepare", "csv", "--input", str(tmp_path / "log.csv"), "--join", "users=x", *out]
    assert cli.main(guessing) == 2
    assert "--join names files that a schema joins; give it with --schema" in capsys.readouterr().err
    elsewhere = f"users={tmp_path / 'elsewhere.csv'}"
    assert cli.main([*command, "--join", elsewhere, "--join", elsewhere]) == 2
    assert "--join names 'users' more than once" in capsys.readouterr().err
    assert cli.main([*command, "--join", "users"]) == 2
    assert "--join is 'users', not NAME=FILE such as users=users.csv" in capsys.readouterr().err
    assert cli.main([*command, "--join", elsewhere]) == 0
    assert "have a 'user' that" in capsys.readouterr().err
    made(tmp_path, "prejoined")
    assert content(tmp_path / "joined") == content(tmp_path / "prejoined")
