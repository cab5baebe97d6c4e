"""Prepare appears whole or not at all: kills, reruns, replacement, full disks, and the command itself."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from grids import some_of

from jrec import cli
from jrec.data.blocks import ShardWriter
from jrec.data.schema import DatasetError, Schema
from jrec.errors import OutputError
from jrec.outputs import MANIFEST, new_folder
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Criteo

OPTIONS = PrepareOptions(block_size=64, shard_examples=256)


def write_log(path, rows, first=0):
    values = random.Random(first)
    lines = (
        "\t".join(
            [str(values.randrange(2)), *(str(values.randrange(9)) for _ in range(13))]
            + [f"{values.randrange(50):08x}" for _ in range(26)]
        )
        for _ in range(rows)
    )
    path.write_text("".join(f"{line}\n" for line in lines))


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def make(log, out, **options):
    options = {"block_size": 64, "shard_examples": 256, **options}
    return prepare(Criteo("criteo-kaggle"), [str(log)], out, PrepareOptions(**options))


def test_a_finished_dataset_is_not_overwritten(tmp_path):
    write_log(tmp_path / "log", 50)
    make(tmp_path / "log", tmp_path / "out")
    before = files(tmp_path / "out")
    write_log(tmp_path / "log", 60, first=1)
    with pytest.raises(OutputError, match="is a finished dataset; pass --overwrite"):
        make(tmp_path / "log", tmp_path / "out")
    assert files(tmp_path / "out") == before
    make(tmp_path / "log", tmp_path / "out", overwrite=True)
    assert sum(s.examples for s in Schema.load(tmp_path / "out").splits.values()) == 60
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "out"]


def test_a_failing_run_leaves_the_old_dataset(tmp_path):
    write_log(tmp_path / "log", 50)
    make(tmp_path / "log", tmp_path / "out")
    before = files(tmp_path / "out")
    with (tmp_path / "log").open("a") as file:
        file.write("rubbish\n")
    with pytest.raises(DatasetError, match="log:51: the line has 1 field"):
        make(tmp_path / "log", tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "out"]


def test_foreign_folders_are_left_alone(tmp_path):
    write_log(tmp_path / "log", 50)
    (tmp_path / "out").mkdir()
    make(tmp_path / "log", tmp_path / "out")  # an empty folder is as good as none
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="holds something else than a jrec dataset"):
            make(tmp_path / "log", tmp_path / "other", overwrite=overwrite)
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="holds something that jrec did not make; move it away"):
        make(tmp_path / "log", tmp_path / "new")
    assert (tmp_path / "other" / "thesis.txt").exists()
    assert (tmp_path / "new.partial" / "thesis.txt").exists()
    with pytest.raises(OutputError, match="log is an input, which would be lost"):
        make(tmp_path / "log", tmp_path / "log")
    (tmp_path / "file").write_text("years of work")
    with pytest.raises(OutputError, match="exists and is not a folder"):
        make(tmp_path / "log", tmp_path / "file", overwrite=True)


def test_what_an_interrupted_run_left_is_discarded(tmp_path):
    write_log(tmp_path / "log", 50)
    (tmp_path / "out.partial" / "work").mkdir(parents=True)
    (tmp_path / "out.partial" / MANIFEST).write_text("{}")
    (tmp_path / "out.partial" / "work" / "half").write_text("half")
    messages = []
    prepare(Criteo("criteo-kaggle"), [str(tmp_path / "log")], tmp_path / "out", OPTIONS, report=messages.append)
    assert messages == [f"starting anew: discarding what an interrupted run left in {tmp_path / 'out.partial'}"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "out"]
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert not (tmp_path / "out" / "work").exists()


def test_a_replacement_interrupted_between_its_renames_is_undone(tmp_path):
    write_log(tmp_path / "log", 50)
    make(tmp_path / "log", tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.replaced")
    with pytest.raises(OutputError, match="is a finished dataset"):
        make(tmp_path / "log", tmp_path / "out")
    assert Schema.load(tmp_path / "out").splits["train"].examples == 40


def test_two_runs_do_not_meet(tmp_path):
    write_log(tmp_path / "log", 50)
    with new_folder(tmp_path / "out", {}, kind="dataset") as folder:
        (folder / "mine").touch()
        with pytest.raises(OutputError, match="another process is writing"):
            make(tmp_path / "log", tmp_path / "out")
        assert (folder / "mine").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "out"]


def command(*arguments, child=("import sys; from jrec.cli import main; sys.exit(main(sys.argv[1:]))",), **options):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-c", *child, "prepare", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
    )  # fmt: skip


# Runs the command, and dies without a word at the n-th call of a function.
KILLED = """
import importlib, os, signal, sys
owner, name, calls = importlib.import_module(sys.argv[1]), sys.argv[2].split("."), int(sys.argv[3])
for part in name[:-1]:
    owner = getattr(owner, part)
original = getattr(owner, name[-1])
def deadly(*args, **kwargs):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
setattr(owner, name[-1], deadly)
from jrec.cli import main
sys.exit(main(sys.argv[4:]))
"""
PLACES = {
    "starting": ("jrec.prepare.prepare", "new_spill", 1),
    "reading": ("jrec.prepare.spill", "Spill.append", 2),
    "encoding": ("jrec.prepare.table_parts", "save_table", 20),
    "writing": ("jrec.data.blocks", "ShardWriter.close", 5),
    "describing": ("jrec.data.schema", "Schema.save", 1),
    "renaming": ("jrec.outputs", "_exchange", 1),
}


def check_after_a_kill(tmp_path):
    """Nothing that looks finished is there, and a rerun makes what an undisturbed run makes."""
    assert not (tmp_path / "out").exists()
    messages = []
    prepare(Criteo("criteo-kaggle"), [str(tmp_path / "log")], tmp_path / "out", OPTIONS, report=messages.append)
    assert len(messages) == 1
    assert "starting anew: discarding what an interrupted run left" in messages[0]
    left = [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")]
    assert sorted(left) == ["log", "out"]
    make(tmp_path / "log", tmp_path / "undisturbed")
    again, undisturbed = files(tmp_path / "out"), files(tmp_path / "undisturbed")
    again.pop("schema.json"), undisturbed.pop("schema.json")
    assert again == undisturbed


@pytest.mark.parametrize("place", some_of(PLACES, "reading", "writing", "renaming"))
def test_killed_runs(tmp_path, place):
    write_log(tmp_path / "log", 20_000 if place == "reading" else 2000)
    arguments = ("criteo-kaggle", "--input", tmp_path / "log", "--out", tmp_path / "out", "--block-size", 64)
    arguments += ("--shard-examples", 256)
    child = command(*arguments, child=(KILLED, *map(str, PLACES[place])))
    _, err = child.communicate()
    assert child.returncode == -signal.SIGKILL, err
    check_after_a_kill(tmp_path)


@pytest.mark.slow
def test_runs_killed_at_random_moments(tmp_path):
    write_log(tmp_path / "log", 20_000)
    arguments = ("criteo-kaggle", "--input", tmp_path / "log", "--out", tmp_path / "out", "--block-size", 64)
    arguments += ("--shard-examples", 256)
    start = time.monotonic()
    command(*arguments).communicate()
    whole = time.monotonic() - start
    moments = random.Random(5)
    for _ in range(10):
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "undisturbed", ignore_errors=True)
        child = command(*arguments)
        while not (tmp_path / "out.partial").exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, whole / 2))
        child.kill()
        child.communicate()
        if not (tmp_path / "out").exists():
            check_after_a_kill(tmp_path)
        assert Schema.load(tmp_path / "out").splits["train"].examples == 16_000


# Runs the command where no file can grow beyond 6,000 bytes.
LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
from jrec.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_no_room(tmp_path):
    """A limit on the size of files stands for a full disk: the system's answer to a write is an error all the same."""
    write_log(tmp_path / "log", 3000)
    make(tmp_path / "log", tmp_path / "out")
    before = files(tmp_path / "out")

    child = command(
        "criteo-kaggle", "--input", tmp_path / "log", "--out", tmp_path / "out", "--overwrite", child=(LIMITED,)
    )
    _, err = child.communicate()
    assert child.returncode == 2
    assert "jrec: error: no room left to write" in err
    assert "Traceback" not in err
    assert files(tmp_path / "out") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "out"]


def test_no_room_for_a_shard(tmp_path, monkeypatch):
    def fail(self, columns):
        raise OSError(28, "No space left on device")

    write_log(tmp_path / "log", 300)
    monkeypatch.setattr(ShardWriter, "write", fail)
    with pytest.raises(OutputError, match=r"no room left to write .*free some, or choose another --out"):
        make(tmp_path / "log", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_the_command(tmp_path, capsys):
    write_log(tmp_path / "log", 100)
    with (tmp_path / "log").open("a") as file:
        file.write("rubbish\n")
    out = tmp_path / "deep" / "out"
    arguments = ["prepare", "criteo-kaggle", "--input", str(tmp_path / "log"), "--out", str(out)]
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err
    assert f"jrec: error: {tmp_path / 'log'}:101: the line has 1 field(s) where 40 are expected" in message
    assert not out.exists()
    assert cli.main([*arguments, "--on-bad-line", "skip", "--split", "0.5,0.25,0.25", "--block-size", "7"]) == 0
    captured = capsys.readouterr()
    assert "train 50, valid 25, test 25 examples; 26 tables of" in captured.out
    assert "skipped 1 bad line(s), kept aside in bad_lines.tsv; the first is" in captured.err
    schema = Schema.load(out)
    assert schema.provenance["bad_lines"] == 1
    assert schema.provenance["options"]["split"] == [0.5, 0.25, 0.25]
    assert schema.provenance["inputs"] == [{"file": str(tmp_path / "log"), "bytes": (tmp_path / "log").stat().st_size}]
    assert json.loads((out / "schema.json").read_text())["provenance"] == schema.provenance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "0.5,0.6,0.1"], "three fractions that add up to 1"),
        (["--split", "0,0.5,0.5"], "leaves nothing to train on"),
        (["--split-seed", "4"], "--split-seed is of --split-by random, but the log is split by time"),
        (["--shard-examples", "100"], "--shard-examples is 100; it must be a positive multiple"),
    ],
)
def test_options_are_checked(tmp_path, capsys, arguments, message):
    write_log(tmp_path / "log", 10)
    given = ["prepare", "criteo-kaggle", "--input", str(tmp_path / "log"), "--out", str(tmp_path / "out"), *arguments]
    assert cli.main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_count": 0}, "--min-count is 0; it must be at least 1"),
        ({"max_rows": 0}, "--max-rows is 0; it must be at least 1"),
        ({"key_seed": -1}, "--key-seed is -1; it must be at least 0"),
        ({"key_seed": 2**64}, r"--key-seed is 18446744073709551616; it must be below 2\^64"),
    ],
)
def test_options_of_the_library_are_checked(options, message):
    with pytest.raises(DatasetError, match=message):
        PrepareOptions(**options)


def test_a_log_of_one_line(tmp_path):
    write_log(tmp_path / "log", 1)
    with pytest.raises(DatasetError, match=r"1 example\(s\) leave none to train on"):
        make(tmp_path / "log", tmp_path / "out")
    schema = make(tmp_path / "log", tmp_path / "out", split=(1, 0, 0))
    assert schema.splits["train"].examples == 1
    assert pathlib.Path(tmp_path / "out" / "train-00000-of-00001.array_record").exists()
