"""`jrec follow`: files are scored, learnt once and in their order, whatever stops the run; deltas for serving."""

import contextlib
import datetime
import gzip
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import jrec
import jrec.serving
from jrec import cli
from jrec.app import follow as following
from jrec.app.export import export_run
from jrec.app.follow import FollowOptions, examples_folder, follow, follow_config
from jrec.app.report.logs import read_records
from jrec.checkpoint.saved import SavedTable
from jrec.data.schema import DatasetError
from jrec.data.unknown import UnknownValuesWarning
from jrec.errors import ConfigError
from jrec.serving import ExportError, checks

SCHEMA = """
[label]
column = "label"
[time]
column = "ts"
format = "iso"
[[dense]]
column = "price"
transform = "standardize"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
"""
CONFIG = """
[data]
batch_size = 64
eval_batch_size = 256
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [8, 1]
[optimizer]
name = "adam"
learning_rate = 0.01
[optimizer.embedding]
name = "rowwise_adagrad"
learning_rate = 0.1
[lr_schedule]
kind = "warmup_linear"
warmup_steps = 5
[evaluate]
baselines = "off"
[log]
tensorboard = false
"""
BASE, PART, PARTS = 1_200, 150, 6


def lines_of_log():
    """Lines of a log; users come anew as time goes on."""
    rng, rows = np.random.default_rng(2), BASE + PART * PARTS
    user = rng.integers(0, 20 + np.arange(rows) // 40)
    item, price = rng.integers(0, 15, rows), rng.random(rows).round(3)
    taste = np.random.default_rng(3).normal(size=15) * 2
    label = rng.random(rows) < 1 / (1 + np.exp(-taste[item]))
    begin = datetime.datetime(2024, 5, 1)
    times = [(begin + datetime.timedelta(minutes=int(m))).isoformat() for m in range(rows)]
    return [f"{int(a)},{t},{p},u{b},i{c}" for a, t, p, b, c in zip(label, times, price, user, item, strict=True)]


HEAD = "label,ts,price,user,item"


def write(path, lines):
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose tables grow (``run``), one whose do not (``fixed``), and files that come later (``input``)."""
    folder = tmp_path_factory.mktemp("follow")
    lines = lines_of_log()
    (folder / "schema.toml").write_text(SCHEMA)
    (folder / "run.toml").write_text(CONFIG)
    base = write(folder / "base.csv", lines[:BASE])
    (folder / "input").mkdir()
    for part in range(PARTS):
        start = BASE + PART * part
        write(folder / "input" / f"part-{part + 8}.csv", lines[start : start + PART])
    for name, options in (("run", ("--growing", "user,item")), ("fixed", ())):
        given = ["--schema", str(folder / "schema.toml"), "--input", str(base), "--min-count", "1", "--quiet"]
        assert cli.main(["prepare", "csv", *given, "--out", str(folder / f"data_{name}"), *options]) == 0
        growth = ["tables.growth.capacity=90"] if options else []
        arguments = [str(folder / "run.toml"), f"data.path={folder / f'data_{name}'}", f"out={folder / name}", *growth]
        with contextlib.redirect_stdout(io.StringIO()):
            assert cli.main(["train", *arguments]) == 0
    return folder


def followed(folder, out, *overrides, base="run", files="input", resume=False, **options):
    """Follows until there is no further file; returns what came of it, and the lines about files."""
    said = []
    config = follow_config(folder / base, str(folder / out), list(overrides), resume=resume)
    options = FollowOptions(**{"files": folder / files, "once": True, "settle": 0, "every": 0, **options})
    return follow(config, options, resume=resume, report=said.append), said


@pytest.fixture(scope="module")
def whole(folder):
    """A run that was never stopped."""
    return followed(folder, "whole", export=folder / "export", deltas=folder / "deltas")


def rows_of(run):
    restored = jrec.load_run(run).restored
    vocabularies = {name: one.keys.tolist() for name, one in restored.run.growing.items()}
    return {name: restored.run.table(name) for name in ("user", "item")}, vocabularies


def same_runs(one, other):
    (rows, keys), (other_rows, other_keys) = rows_of(one), rows_of(other)
    assert keys == other_keys
    for name, values in rows.items():
        np.testing.assert_array_equal(values, other_rows[name])
    assert (one / "metrics.jsonl").read_text() == (other / "metrics.jsonl").read_text()


def records(run):
    return [record for record in read_records(run / "metrics.jsonl") if record["split"] == "progressive"]


def test_files_are_learnt_in_the_order_of_their_numbers(folder, whole):
    outcome, said = whole
    assert (outcome.files, outcome.examples, outcome.step) == (PARTS, PARTS * PART, PARTS * 3)
    names = [f"part-{part + 8}.csv" for part in range(PARTS)]
    assert [record["file"] for record in records(folder / "whole")] == names
    assert [json.loads(line)["file"] for line in (folder / "whole" / "files.jsonl").read_text().splitlines()] == names
    assert [line.partition(":")[0] for line in said if "examples/s" in line] == names
    assert not list(examples_folder(folder / "whole").iterdir())
    train = [record for record in read_records(folder / "whole" / "metrics.jsonl") if record["split"] == "train"]
    assert [record["step"] for record in train] == [3 * part for part in range(1, PARTS + 1)]


def test_a_file_is_scored_by_the_model_before_it(folder, whole):
    """As `jrec eval` scores it by the run that was followed, where values that it does not know read row 0."""
    given = ["--schema", str(folder / "schema.toml"), "--input", str(folder / "input" / "part-8.csv"), "--quiet"]
    given += ["--vocabulary-from", str(folder / "data_run"), "--split", "0,0,1", "--out", str(folder / "first")]
    assert cli.main(["prepare", "csv", *given, "--overwrite"]) == 0
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["eval", str(folder / "run"), str(folder / "first"), "--split", "test", "--json"]) == 0
    expected = json.loads(out.getvalue())
    expected = expected.get("splits", expected).get("test", expected)
    first = records(folder / "whole")[0]
    for metric in ("examples", "positives", "auc", "log_loss", "mean_prediction"):
        assert first[metric] == expected[metric], metric


def test_a_file_is_scored_by_each_of_several_labels(folder, tmp_path):
    """Also one in which no line has the first of them."""
    labels = '[[labels]]\ncolumn = "label"\n[[labels]]\ncolumn = "bought"\n'
    (tmp_path / "schema.toml").write_text(SCHEMA.replace('[label]\ncolumn = "label"\n', labels))
    bought = np.random.default_rng(5).choice(["0", "1", ""], BASE + 200)
    lines = [f"{line},{label}" for line, label in zip(lines_of_log(), bought, strict=False)]
    (tmp_path / "input").mkdir()
    first, second = lines[BASE : BASE + 100], [line[1:] for line in lines[BASE + 100 :]]
    for path, some in (("base.csv", lines[:BASE]), ("input/1.csv", first), ("input/2.csv", second)):
        (tmp_path / path).write_text("\n".join([f"{HEAD},bought", *some]) + "\n")
    given = ["--schema", str(tmp_path / "schema.toml"), "--input", str(tmp_path / "base.csv"), "--quiet"]
    assert cli.main(["prepare", "csv", *given, "--out", str(tmp_path / "data")]) == 0
    with contextlib.redirect_stdout(io.StringIO()):
        given = [f"data.path={tmp_path / 'data'}", f"out={tmp_path / 'run'}"]
        assert cli.main(["train", str(folder / "run.toml"), *given]) == 0
    outcome, said = followed(tmp_path, "live", files="input")
    assert outcome.examples == 200
    assert any("2.csv: 100 examples, none of which has the first label;" in line for line in said)
    known = bought[BASE:].reshape(2, 100) != ""
    logged = [record for record in read_records(tmp_path / "live" / "metrics.jsonl") if "loss" not in record]
    assert [(record["file"], record["split"], record.get("examples")) for record in logged] == [
        ("1.csv", "progressive", 100),
        ("1.csv", "progressive/bought", known[0].sum()),
        ("2.csv", "progressive", None),
        ("2.csv", "progressive/bought", known[1].sum()),
    ]
    fields = np.array([line.split(",") for line in first])
    columns = {name: fields[:, place] for place, name in enumerate(HEAD.split(",")) if name not in ("label", "ts")}
    with pytest.warns(UnknownValuesWarning, match="'user'"):
        score = np.float64(jrec.load_run(tmp_path / "run").predict(columns)["bought"])[known[0]]
    loss = -np.log(np.where(bought[BASE : BASE + 100][known[0]] == "1", score, 1 - score)).mean()
    np.testing.assert_allclose(logged[1]["log_loss"], loss, rtol=1e-5)


def test_new_values_get_rows(folder, whole):
    before, after = (rows_of(folder / name)[1]["user"] for name in ("run", "whole"))
    assert len(after) > len(before)


def test_learning_helps(folder, whole):
    """At the constant rates of the configuration, and not at those with which training ended."""
    assert follow_config(folder / "run", "x", []).lr_schedule.kind == "constant"
    given = ["lr_schedule.kind=warmup_linear"]
    assert follow_config(folder / "run", "x", given).lr_schedule.kind == "warmup_linear"
    assert records(folder / "whole")[-1]["auc"] > 0.6


def test_tables_that_do_not_grow_read_the_row_of_unknown_values(folder):
    outcome, _ = followed(folder, "fixed_live", base="fixed")
    assert outcome.files == PARTS
    assert rows_of(folder / "fixed_live")[0]["user"].shape == rows_of(folder / "fixed")[0]["user"].shape


def test_a_run_that_ends_goes_on_with_the_same_bits(folder, whole, tmp_path):
    """Files come in two lots, the second while nobody looks, and the list ends in a torn line."""
    (tmp_path / "input").mkdir()
    for number in (8, 9, 10):
        shutil.copy(folder / "input" / f"part-{number}.csv", tmp_path / "input")
    config = follow_config(folder / "run", str(tmp_path / "live"), [])
    options = FollowOptions(files=tmp_path / "input", once=True, settle=0, every=1e6)
    assert follow(config, options).files == 3
    for number in (11, 12, 13):
        shutil.copy(folder / "input" / f"part-{number}.csv", tmp_path / "input")
    with (tmp_path / "live" / "files.jsonl").open("a") as file:
        file.write('{"file": "part-1')
    assert follow(config, options, resume=True).files == PARTS
    same_runs(folder / "whole", tmp_path / "live")
    assert follow(config, options, resume=True).examples == 0


@pytest.mark.parametrize("at", ["first step", "second step", "last step", "scored", "listed", "saving"])
def test_a_run_that_is_lost_goes_on_with_the_same_bits(folder, whole, tmp_path, monkeypatch, at):
    """What is behind the last checkpoint is learnt again, from the list and the examples that were left."""

    class LostError(Exception):
        pass

    calls = {"count": 0}

    def lost(function, when):
        def called(*args, **kwargs):
            calls["count"] += 1
            if calls["count"] == when:
                raise LostError
            return function(*args, **kwargs)

        return called

    config = follow_config(folder / "run", str(tmp_path / "live"), [])
    options = FollowOptions(files=folder / "input", once=True, settle=0, every=0)
    with monkeypatch.context() as patched:
        if at.endswith("step"):
            when = {"first step": 7, "second step": 8, "last step": 9}[at]  # of the third file
            patched.setattr(following.Recorder, "absorb", lost(following.Recorder.absorb, when))
        elif at == "scored":
            patched.setattr(following, "score_split", lost(following.score_split, 3))
        elif at == "listed":
            patched.setattr(following, "prepare", lost(following.prepare, 3))
        else:
            patched.setattr(following.Saver, "save", lost(following.Saver.save, 3))
        with pytest.raises(LostError):
            follow(config, options)
    assert len((tmp_path / "live" / "files.jsonl").read_text().splitlines()) < PARTS
    assert follow(config, options, resume=True).files == PARTS
    same_runs(folder / "whole", tmp_path / "live")


def test_a_run_goes_on_without_the_one_that_it_began_from(folder, whole, tmp_path):
    """With all that was given when it began, such as a schedule of its own."""
    files, begin = tmp_path / "input", tmp_path / "begin"
    files.mkdir()
    shutil.copytree(folder / "run", begin)
    write(files / "1.csv", lines_of_log()[:100])
    followed(folder, tmp_path / "live", "lr_schedule.warmup_steps=7", base=begin, files=files)
    shutil.rmtree(begin)
    write(files / "2.csv", lines_of_log()[100:200])
    outcome, _ = followed(folder, tmp_path / "live", base=tmp_path / "live", files=files, resume=True)
    assert (outcome.files, outcome.examples) == (2, 100)
    followed(folder, tmp_path / "whole", "lr_schedule.warmup_steps=7", files=files)
    same_runs(tmp_path / "whole", tmp_path / "live")


def test_the_run_to_begin_from_is_not_overwritten(folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    before = sorted(run.rglob("*"))
    for base in (run, run / "checkpoints" / "19"):
        config = follow_config(base, str(run), [])
        with pytest.raises(ConfigError, match=r"--overwrite would delete the run in .*run, from which this one is to"):
            follow(config, FollowOptions(files=folder / "input", once=True), overwrite=True)
    assert sorted(run.rglob("*")) == before


def signal_after(steps, monkeypatch):
    """Has SIGTERM come after so many steps."""
    absorb, counted = following.Recorder.absorb, itertools.count(1)

    def signalled(self, *results):
        if next(counted) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return absorb(self, *results)

    monkeypatch.setattr(following.Recorder, "absorb", signalled)


def test_a_signal_ends_a_file_between_two_steps(folder, whole, tmp_path, monkeypatch):
    shutil.copytree(folder / "input", tmp_path / "input")
    config = follow_config(folder / "run", str(tmp_path / "live"), [])
    options = FollowOptions(files=tmp_path / "input", once=True, settle=0, every=0)
    with monkeypatch.context() as patched:
        signal_after(4, patched)  # the first step of the second file
        outcome = follow(config, options)
    assert outcome.files == 1
    assert 3 < outcome.step < 6
    (tmp_path / "input" / "part-9.csv").unlink()  # its examples are kept until a checkpoint has all of them
    assert follow(config, options, resume=True).files == PARTS
    same_runs(folder / "whole", tmp_path / "live")


def test_deltas_bring_the_export_to_the_run(folder, whole):
    model = jrec.serving.load(folder / "export")
    names = sorted(path.name for path in (folder / "deltas").iterdir())
    assert names == [f"step-{3 * part:012d}" for part in range(1, PARTS + 1)]
    for name in names:
        model.apply(folder / "deltas" / name)
    columns = {"user": ["u1", "u30", "u49", "nobody"], "item": ["i1", "i2", "i3", "i4"], "price": [0.1, 0.2, 0.3, 0.4]}
    expected = jrec.load_run(folder / "whole").predict(columns)
    np.testing.assert_allclose(model(columns), expected, atol=1e-6)
    assert sum("a delta of " in line for line in whole[1]) == PARTS


def test_a_delta_reads_what_its_checkpoint_wrote(folder, tmp_path, monkeypatch):
    """Only the first one compares all rows, and only it reads what is before it; together they are the whole export."""
    read, verified = [0], [[]]
    rows_of, verify = SavedTable.read, checks.verify

    def counted(self, array, rows):
        read[-1] += rows.size
        return rows_of(self, array, rows)

    def noted(path, *args, **options):
        verified[-1].append(path.name)
        return verify(path, *args, **options)

    def exported(*args, **options):
        read.append(0)
        verified.append([])
        return export_run(*args, **options)

    monkeypatch.setattr(SavedTable, "read", counted)
    monkeypatch.setattr(checks, "verify", noted)
    monkeypatch.setattr(following, "export_run", exported)
    export, deltas = tmp_path / "export", tmp_path / "deltas"
    followed(folder, tmp_path / "live", export=export, deltas=deltas)
    _, whole, first, *others = read
    assert whole == first > 0
    # Of a table that a checkpoint wrote anew all rows are compared.
    assert sum(0 < rows < whole for rows in others) >= 2, read
    assert sum(map(bool, verified)) == 1
    export_run(tmp_path / "live", tmp_path / "again")
    again = jrec.serving.load(tmp_path / "again")
    model = jrec.serving.load(export, sorted(deltas.iterdir()))
    for table in again._loaded.tables.rows:
        count = again._loaded.tables.rows[table]
        np.testing.assert_array_equal(*(one._loaded.tables.rows_between(table, 0, count) for one in (model, again)))


def test_a_whole_export_in_the_place_of_another_is_followed(folder, tmp_path, monkeypatch):
    """Another command writes it between two deltas, and takes those away that it has."""
    export, deltas, written = tmp_path / "export", tmp_path / "deltas", []

    def exported(checkpoint, out, **options):
        manifest = export_run(checkpoint, out, **options)
        written.append(out)
        if len(written) == 4:
            shutil.rmtree(deltas)
            export_run(checkpoint, export, overwrite=True)
        return manifest

    monkeypatch.setattr(following, "export_run", exported)
    followed(folder, tmp_path / "live", export=export, deltas=deltas)
    left = sorted(deltas.iterdir())
    assert left == written[4:]
    model = jrec.serving.load(export, left)
    columns = {"user": ["u1", "u30"], "item": ["i1", "i2"], "price": [0.1, 0.2]}
    want = jrec.load_run(tmp_path / "live").predict(columns)
    np.testing.assert_allclose(model(columns), want, atol=1e-6)
    # And before the run goes on: its deltas of the steps until now follow what is there no longer.
    export_run(tmp_path / "live", export, overwrite=True)
    followed(folder, tmp_path / "live", export=export, deltas=deltas, resume=True)
    (last,) = following._chain(export, deltas)
    np.testing.assert_allclose(jrec.serving.load(export, [last])(columns), want, atol=1e-6)


def test_a_run_that_goes_on_writes_what_its_checkpoint_lacks(folder, whole, tmp_path):
    """The export that it is given only now, and the delta that a full disk ended, though there is no further file."""
    live, export, deltas = tmp_path / "live", tmp_path / "export", tmp_path / "deltas"
    shutil.copytree(folder / "whole", live)
    config = follow_config(folder / "run", str(live), [])
    options = FollowOptions(files=folder / "input", once=True, settle=0, every=0, export=export, deltas=deltas)
    assert follow(config, options, resume=True).examples == 0
    assert checks.load_manifest(export).step == whole[0].step
    assert not deltas.exists()
    for name in ("export", "deltas"):
        shutil.copytree(folder / name, tmp_path / name, dirs_exist_ok=True)
    (last,) = deltas.glob(f"step-*{whole[0].step}")
    before, said = checks.load_manifest(last), []
    shutil.rmtree(last)
    for lines in (1, 1):
        follow(config, options, resume=True, report=said.append)
        assert checks.load_manifest(last).tables == before.tables
        assert sum("a delta of" in line for line in said) == lines


def test_a_delta_is_written_once(folder, whole, tmp_path):
    """A run that was killed after a delta of a step, and came to the step again, goes on behind it."""
    for name in ("export", "deltas"):
        shutil.copytree(folder / name, tmp_path / name)
    config = follow_config(folder / "run", str(tmp_path / "live"), [])
    options = {"once": True, "settle": 0, "every": 0, "export": tmp_path / "export", "deltas": tmp_path / "deltas"}
    follow(config, FollowOptions(files=folder / "input", **options))
    assert len(list((tmp_path / "deltas").iterdir())) == PARTS


def test_deltas_of_any_name_are_followed_in_their_order(folder, tmp_path):
    """Somebody edits a row of what is served; the next delta goes on from there, and has the run's own row again."""
    files, export, deltas = tmp_path / "input", tmp_path / "export", tmp_path / "deltas"
    files.mkdir()
    write(files / "1.csv", lines_of_log()[:100])
    live = {"files": files, "export": export, "deltas": deltas}
    followed(folder, tmp_path / "live", **live)
    own = sorted(deltas.iterdir())
    edited = {"item": (np.array([3]), np.full((1, 4), 9, np.float32))}
    jrec.serving.write_delta(deltas / "edit-9", edited, since=[export, *own])
    shutil.copytree(export, deltas / "another")  # no delta
    write(files / "2.csv", lines_of_log()[100:200])
    followed(folder, tmp_path / "live", **live, resume=True)
    (last,) = (path for path in deltas.glob("step-*") if path not in own)
    model = jrec.serving.load(export, [*own, deltas / "edit-9", last])
    columns = {"user": ["u1"] * 15, "item": [f"i{n}" for n in range(15)], "price": [0.1] * 15}
    np.testing.assert_allclose(model(columns), jrec.load_run(tmp_path / "live").predict(columns), atol=1e-6)
    shutil.copytree(last, deltas / f"{last.name}.partial")  # of a kill
    write(files / "3.csv", lines_of_log()[200:300])
    followed(folder, tmp_path / "live", **live, resume=True)
    (after,) = (path for path in deltas.glob("step-*") if path not in (*own, last) and path.suffix != ".partial")
    assert checks.load_manifest(after).parent == checks.load_manifest(last).id
    shutil.copytree(last, deltas / "twin")
    write(files / "4.csv", lines_of_log()[:100])
    with pytest.raises(ExportError, match=r"step-.* and .*twin both follow .*; leave only one there"):
        followed(folder, tmp_path / "live", **live, resume=True)


def test_what_is_left_of_a_batch_is_learnt(folder, tmp_path):
    """A run that was trained without the rest of an epoch learns every line of a file, also of a small one."""
    files = tmp_path / "input"
    files.mkdir()
    write(files / "1.csv", lines_of_log()[:10])
    write(files / "2.csv", lines_of_log()[:100])
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("drop_remainder = false", "drop_remainder = true"))
    assert follow_config(run, "", ["data.drop_remainder=true"]).data.drop_remainder
    outcome, _ = followed(folder, tmp_path / "live", base=run, files=files)
    assert (outcome.examples, outcome.step) == (110, 3)


def test_files_that_are_not_finished_are_left_alone(folder, tmp_path):
    files = tmp_path / "input"
    files.mkdir()
    lines = lines_of_log()[:10]
    for name in (".hidden.csv", "_part.csv", "a.csv.tmp", "b.csv.part", "c.csv.partial", "young.csv", "old.csv"):
        write(files / name, lines)
    os.utime(files / "old.csv", (time.time() - 100,) * 2)
    (files / "folder").mkdir()
    os.utime(files / "folder", (time.time() - 100,) * 2)
    outcome, _ = followed(folder, tmp_path / "live", files=files, settle=50)
    assert outcome.files == 1
    assert [record["file"] for record in records(tmp_path / "live")] == ["old.csv"]


def test_files_without_lines_are_nothing(folder, tmp_path):
    files = tmp_path / "input"
    files.mkdir()
    (files / "1.csv").touch()
    write(files / "2.csv", [])
    write(files / "3.csv", lines_of_log()[:10])
    (files / "4.csv.gz").write_bytes(gzip.compress(b""))
    outcome, said = followed(folder, tmp_path / "live", files=files)
    assert (outcome.files, outcome.examples) == (4, 10)
    assert {f"{name}: empty" for name in ("1.csv", "2.csv", "4.csv.gz")} <= {*said}


def test_bad_lines_end_the_run_or_are_skipped(folder, tmp_path):
    files = tmp_path / "input"
    files.mkdir()
    write(files / "1.csv", ["1,2024-06-01T00:00:00,what,u1,i1", *lines_of_log()[:10]])
    with pytest.raises(DatasetError, match=r"1\.csv:2"):
        followed(folder, tmp_path / "live", files=files)
    outcome, said = followed(folder, tmp_path / "live", files=files, resume=True, on_bad_line="skip")
    assert outcome.examples == 10
    assert any("1.csv: skipped 1 bad line(s)" in line for line in said)
    kept = examples_folder(tmp_path / "live")
    assert [path.name for path in kept.iterdir()] == ["bad_lines"]
    assert "1,2024-06-01T00:00:00,what,u1,i1" in (kept / "bad_lines" / "000000.tsv").read_text()


def lost_before_its_checkpoint(folder, tmp_path, monkeypatch):
    """A file that was taken by a run that ended before anything of it was learnt."""
    files = tmp_path / "input"
    files.mkdir()
    path = write(files / "1.csv", lines_of_log()[:100])

    def lost(*_, **__):
        raise KeyError("lost")

    with monkeypatch.context() as patched:
        patched.setattr(following, "prepare", lost)
        with pytest.raises(KeyError, match="lost"):
            followed(folder, tmp_path / "live", files=files)
    return path


def test_a_file_that_must_be_learnt_again_has_to_be_there(folder, tmp_path, monkeypatch):
    path = lost_before_its_checkpoint(folder, tmp_path, monkeypatch)
    path.unlink()
    with pytest.raises(DatasetError, match=r"was taken with .* bytes.*but it is no longer there.*an empty file"):
        followed(folder, tmp_path / "live", files=path.parent, resume=True)
    path.touch()
    outcome, said = followed(folder, tmp_path / "live", files=path.parent, resume=True)
    assert (outcome.files, outcome.examples) == (1, 0)
    assert "1.csv: empty" in said


def test_a_file_that_was_written_again_before_its_checkpoint_is_learnt_as_it_is(folder, tmp_path, monkeypatch):
    path = lost_before_its_checkpoint(folder, tmp_path, monkeypatch)
    write(path, lines_of_log()[:101])
    for examples in (101, 0):
        outcome, said = followed(folder, tmp_path / "live", files=path.parent, resume=True)
        assert (outcome.files, outcome.examples) == (1, examples)
        assert any("written again" in line for line in said) == bool(examples)


def test_a_line_that_ended_the_run_may_be_mended(folder, tmp_path):
    """The message advises it, and the run goes on with all lines of the file."""
    files = tmp_path / "input"
    files.mkdir()
    lines = lines_of_log()[:10]
    write(files / "1.csv", ["1,2024-06-01T00:00:00,what,u1,i1", *lines])
    with pytest.raises(DatasetError, match=r"1\.csv:2.*Fix the line"):
        followed(folder, tmp_path / "live", files=files)
    write(files / "1.csv", ["1,2024-06-01T00:00:00,0.5,u1,i1", *lines])
    outcome, _ = followed(folder, tmp_path / "live", files=files, resume=True)
    assert outcome.examples == 11


@pytest.mark.parametrize("change", ["longer", "as long"])
def test_a_file_that_is_written_after_it_was_learnt_is_said_once(folder, tmp_path, change):
    """Nothing is learnt of it, as somebody may not expect who appends to one file."""
    files = tmp_path / "input"
    files.mkdir()
    path = write(files / "1.csv", lines_of_log()[:100])
    followed(folder, tmp_path / "live", files=files)
    write(path, lines_of_log()[: 101 if change == "longer" else 100])
    os.utime(path, (1e9, 1e9))
    for number in (2, 3):  # looks behind the first
        write(files / f"{number}.csv", lines_of_log()[:10])
    outcome, said = followed(folder, tmp_path / "live", files=files, resume=True)
    assert outcome.examples == 20
    assert sum("1.csv: written again after it was learnt, which changes nothing" in line for line in said) == 1


@pytest.mark.parametrize("change", ["gone", "longer"])
def test_a_file_whose_first_lines_are_in_a_checkpoint_has_to_be_the_same(folder, tmp_path, monkeypatch, change):
    files = tmp_path / "input"
    files.mkdir()
    path = write(files / "1.csv", lines_of_log()[:150])
    with monkeypatch.context() as patched:
        signal_after(1, patched)
        outcome, _ = followed(folder, tmp_path / "live", files=files)
    assert outcome.stopped
    shutil.rmtree(examples_folder(tmp_path / "live"))
    if change == "gone":
        path.unlink()
    else:
        write(path, lines_of_log()[:151])
    with pytest.raises(
        DatasetError, match=r"no checkpoint has all of it, but it (is no|has).*bring it back as it was$"
    ):
        followed(folder, tmp_path / "live", files=files, resume=True)


def test_a_file_without_a_good_line_is_kept_aside(folder, tmp_path):
    files = tmp_path / "input"
    files.mkdir()
    bad = write(files / "1.csv", ["what,2024-06-01T00:00:00,0.5,u1,i1"] * 3)
    write(files / "2.csv", lines_of_log()[:10])
    outcome, said = followed(folder, tmp_path / "live", files=files, on_bad_line="skip")
    assert (outcome.files, outcome.examples) == (2, 10)
    kept = examples_folder(tmp_path / "live") / "bad_lines" / "000000-1.csv"
    assert kept.read_bytes() == bad.read_bytes()
    assert any("1.csv: skipped 3 bad line(s)" in line for line in said)
    assert f"1.csv: no good line; nothing is learnt of it, and {kept} is a copy of it" in said


def test_what_cannot_be_followed_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="is no folder; make it first"):
        followed(folder, tmp_path / "live", files=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="deltas follow an export"):
        followed(folder, tmp_path / "live", deltas=tmp_path / "deltas")
    with pytest.raises(ConfigError, match="holds a run already"):
        followed(folder, "run")
    with pytest.raises(ConfigError, match=r"set data\.order"):
        followed(folder, tmp_path / "live", "data.order=shuffled", "evaluate.progressive=1d")


def test_the_command_follows_until_a_signal(folder, whole, tmp_path):
    """In a process of its own: files come while it runs, and SIGTERM ends it in order."""
    files = tmp_path / "input"
    files.mkdir()
    arguments = [
        "follow",
        folder / "run",
        "--input",
        files,
        "--out",
        tmp_path / "live",
        "--settle",
        "0",
        "--poll",
        "0.1",
    ]
    command = [sys.executable, "-m", "jrec", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert f"follows {files} from step 0 on, with 0 files learnt before" in process.stderr.readline()
        for number in (8, 9):
            shutil.copy(folder / "input" / f"part-{number}.csv", tmp_path)
            (tmp_path / f"part-{number}.csv").rename(files / f"part-{number}.csv")
            said = process.stderr.readline()
            assert f"part-{number}.csv: 150 examples, AUC " in said
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "step 6, 2 files learnt, 300 examples" in out
    assert records(tmp_path / "live") == records(folder / "whole")[:2]
