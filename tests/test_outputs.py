"""What jrec writes appears whole or not at all, has one writer at a time, and never replaces what it is made of."""

import argparse
import contextlib
import dataclasses
import errno
import importlib
import multiprocessing
import os
import pathlib
import re
import shutil
import stat
import time

import numpy as np
import pytest

from jrec import Run, outputs
from jrec.access.profile import AccessProfile
from jrec.app import ray
from jrec.app.compress import Selection, compress_run
from jrec.app.config import load_config, save_config
from jrec.app.export import export_run
from jrec.app.models.scored import Scored
from jrec.app.predict import write_pieces
from jrec.app.report import write_report
from jrec.app.report.logs import MetricLog
from jrec.app.run_folder import LOCK_FILE, open_run_folder
from jrec.checkpoint import Checkpoints
from jrec.cli import COMMANDS, command_parser, main
from jrec.data.blocks import ShardWriter
from jrec.data.schema import Schema
from jrec.errors import OutputError
from jrec.host.memory import allocate
from jrec.host.timeline import Timeline
from jrec.prepare.prepare import prepare
from jrec.prepare.readers.delimited import Delimited
from jrec.prepare.readers.delimited_schema import load_schema
from jrec.prepare.reorder import reorder
from jrec.prepare.synth import SynthOptions, shape_like, synthesize

OLD, NEW = b"old" * 1000, b"new" * 1000


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "deep" / "file"
    with outputs.new_file(path) as partial:
        partial.write_bytes(NEW)
        assert not path.exists()
    assert path.read_bytes() == NEW
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_an_error_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(OLD)

    def write():
        with outputs.new_file(path) as partial:
            partial.write_bytes(NEW)
            raise error

    with pytest.raises((RuntimeError, KeyboardInterrupt, OutputError)):
        write()
    assert path.read_bytes() == OLD
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_of_the_system_names_the_file(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    path.write_bytes(OLD)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if call == "fsync" else pathlib.Path, call, fail)
    with pytest.raises(OutputError, match=f"no room left to write {path} .*free some, or choose another --out"):
        outputs.write_file(path, NEW)
    assert path.read_bytes() == OLD
    assert names(tmp_path) == ["file"]


def test_an_error_about_an_input_stays_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="no_such_log"), outputs.new_file(tmp_path / "file"):
        (tmp_path / "no_such_log").read_bytes()


def test_what_a_killed_process_left_is_reused(tmp_path):
    (tmp_path / "file.partial").write_bytes(b"half")
    (tmp_path / ".file.lock").touch()
    outputs.write_file(tmp_path / "file", NEW)
    assert names(tmp_path) == ["file"]


def test_a_second_writer_is_refused_until_the_first_ends(tmp_path):
    first = outputs.NewFile(tmp_path / "file")
    first.partial.write_bytes(NEW)
    with pytest.raises(OutputError, match=f"another process is writing {tmp_path / 'file'}; wait for it"):
        outputs.write_file(tmp_path / "file", OLD)
    first.commit()
    with pytest.raises(OutputError, match="exists; replace it with --overwrite"):
        outputs.NewFile(tmp_path / "file", overwrite=False)
    outputs.write_file(tmp_path / "file", OLD)
    assert (tmp_path / "file").read_bytes() == OLD


def test_devices_and_folders_are_no_files(tmp_path):
    for path in ("/dev/null", tmp_path):
        with pytest.raises(OutputError, match="exists and is not a file"):
            outputs.write_file(path, NEW)


# Where another user may write to the folder, links can stand where jrec makes files of its own.


@pytest.fixture
def target(tmp_path):
    """A file that links lead to."""
    path = tmp_path / "elsewhere" / "target"
    path.parent.mkdir()
    path.write_bytes(OLD)
    return path


@pytest.mark.parametrize(
    ("name", "ours"),
    [("out", True), ("out/a", True), ("out.partial/a", True), ("out.replaced", True), (".out.lock", True),
     ("out.csv", False), ("output/a", False)],
)  # fmt: skip
def test_errors_of_other_files_with_a_like_name_stay_as_they_are(tmp_path, name, ours):
    with pytest.raises(OutputError if ours else FileNotFoundError), outputs.writing(tmp_path / "out"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / name))


def test_a_lock_follows_no_link_and_empties_no_file(tmp_path, target):
    lock = tmp_path / ".file.lock"
    lock.symlink_to(target)
    with pytest.raises(OutputError, match=f"cannot write {tmp_path}/file: .*remove it.*{re.escape(str(lock))}"):
        outputs.write_file(tmp_path / "file", NEW)
    assert target.read_bytes() == OLD
    lock.unlink()
    os.link(target, lock)
    outputs.write_file(tmp_path / "file", NEW)
    assert target.read_bytes() == OLD


def test_a_link_in_the_place_of_a_partial_file_gives_way(tmp_path, target):
    for linked in (target, tmp_path / "nowhere"):
        (tmp_path / "file.partial").symlink_to(linked)
        outputs.write_file(tmp_path / "file", NEW)
        assert not (tmp_path / "file").is_symlink()
    os.link(target, tmp_path / "file.partial")
    outputs.write_file(tmp_path / "file", NEW)
    assert target.read_bytes() == OLD
    assert names(tmp_path) == ["elsewhere", "file"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("suffix", ["partial", "replaced"])
def test_a_link_in_the_place_of_a_partial_folder_is_refused(tmp_path, suffix, resume):
    """Its content would be discarded, or become the output."""
    other = tmp_path / "other"
    folder(other, 1)
    (other / outputs.MANIFEST).write_text('{"value": 2}')
    before = content(other)
    (tmp_path / f"out.{suffix}").symlink_to(other)
    making = outputs.new_folder(tmp_path / "out", {"value": 2}, kind="dataset", resume=resume)
    with pytest.raises(OutputError, match=rf"out\.{suffix} is a link.*remove it"), making:
        pass
    assert content(other) == before


def test_a_link_in_the_place_of_a_partial_checkpoint_gives_way(tmp_path, target):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "1.partial").symlink_to(target.parent)
    with contextlib.closing(Checkpoints(tmp_path / "run")) as checkpoints:
        checkpoints.save(1, arrays={"a": np.zeros(3, np.float32)})
    assert names(tmp_path / "run") == ["1"]
    assert target.read_bytes() == OLD


def test_of_many_siblings_one_tells_that_they_are_no_checkpoints(tmp_path, monkeypatch):
    """A run that follows files makes thousands of numbered datasets beside each other."""
    looked = []
    for number in range(20):
        (tmp_path / f"{number:06}").mkdir()
        (tmp_path / f"{number:06}" / "schema.json").write_text('{"format": "jrec-dataset"}')
    kind_of = outputs.kind_of
    monkeypatch.setattr(outputs, "kind_of", lambda folder: looked.append(folder) or kind_of(folder))
    outputs.check_output(tmp_path / "000020")
    assert len([folder for folder in looked if folder.parent == tmp_path]) == 1


def test_a_lock_of_a_run_follows_no_link(world, tmp_path, target, capsys):
    run = shutil.copytree(world / "run", tmp_path / "run")
    (run / LOCK_FILE).unlink(missing_ok=True)
    (run / LOCK_FILE).symlink_to(target)
    assert main(["train", "quickstart", f"data.path={world}/data", f"out={run}", "max_steps=2", "--overwrite"]) == 2
    assert f"{run / LOCK_FILE}" in capsys.readouterr().err
    assert target.read_bytes() == OLD


# What is replaced keeps its mode: a file that only its owner reads stays one.


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o664])
def test_a_replaced_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    path.chmod(mode)
    with outputs.new_file(path) as partial:
        partial.write_bytes(NEW)
        assert not partial.stat().st_mode & 0o077
    assert path.read_bytes() == NEW
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o777])
def test_a_replaced_folder_keeps_its_mode(tmp_path, mode):
    folder(tmp_path / "out", 1)
    (tmp_path / "out").chmod(mode)
    folder(tmp_path / "out", 2)
    assert content(tmp_path / "out")["0"] == bytes([2]) * 1000
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == mode


def test_a_new_file_and_a_new_folder_have_the_modes_of_any(tmp_path):
    (tmp_path / "any").write_bytes(OLD)
    (tmp_path / "anywhere").mkdir()
    outputs.write_file(tmp_path / "file", NEW)
    folder(tmp_path / "out", 1)
    for name, any_name in (("file", "any"), ("out", "anywhere")):
        assert (tmp_path / name).stat().st_mode == (tmp_path / any_name).stat().st_mode


# Two processes write the same output at the same time.


def scores(path, value):
    logits = np.full(1000, value, np.float32)
    pieces = (Scored(split="", first=first, logits=logits, labels=None) for first in range(0, 3000, 1000))
    nothing = Scored(split="", first=0, logits=logits[:0], labels=None)
    write_pieces(path, pieces, nothing, splits=False, overwrite=True)


def folder(path, value):
    with outputs.new_folder(path, {"value": value}, kind="dataset", overwrite=True) as partial:
        for number in range(20):
            (partial / f"{number}").write_bytes(bytes([value]) * 1000)
        outputs.write_file(partial / "schema.json", '{"format": "jrec-dataset"}')


def content(path):
    path = pathlib.Path(path)
    return path.read_bytes() if path.is_file() else {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def shard(path, value):
    with ShardWriter(path, 100) as writer:
        writer.write({"label": np.full(1000, value, np.uint8)})


WRITERS = {
    "shard": (shard, "shard"),
    "file": (lambda path, value: outputs.write_file(path, bytes([value]) * 3_000_000), "file"),
    "scores": (scores, "scores.parquet"),
    "csv": (scores, "scores.csv"),
    "profile": (lambda path, value: AccessProfile(examples=value, source="", tables=()).save(path), "profile"),
    "folder": (folder, "folder"),
}


def answer(kind, path, value):
    """What a writer is told: nothing, or why it is refused."""
    try:
        WRITERS[kind][0](path, value)
    except OutputError as error:
        return str(error)
    return ""


def serve(barrier, asked, said):
    """A process that writes what it is asked to, when the other one does."""
    while (work := asked.get()) is not None:
        kind, path, delay = work
        barrier.wait()
        time.sleep(delay)
        said.put(answer(kind, path, 2))


@pytest.fixture(scope="module")
def writers():
    """Has this process and another one write at once, the other some seconds later; returns what they are told."""
    process = multiprocessing.get_context("spawn")
    barrier, said, asked = process.Barrier(2), process.Queue(), process.Queue()
    other = process.Process(target=serve, args=(barrier, asked, said), daemon=True)
    other.start()

    def write(kind, path, delay):
        asked.put((kind, path, delay))
        barrier.wait()
        return [answer(kind, path, 1), said.get(timeout=120)]

    yield write
    asked.put(None)
    other.join(60)


@pytest.mark.parametrize("kind", WRITERS)
def test_of_two_writers_one_wins_whole_or_is_refused(tmp_path, writers, kind):
    """In 20 of 20 timings what is there afterwards is what one of them wrote, and who was refused was told so."""
    write_one, name = WRITERS[kind]
    alone = []
    for value in (1, 2):
        (tmp_path / f"{value}").mkdir()
        write_one(tmp_path / f"{value}" / name, value)
        alone.append(content(tmp_path / f"{value}" / name))
    for number in range(20):
        target = tmp_path / f"{number}_both"
        target.mkdir()
        answers = writers(kind, target / name, number * 4e-4)
        assert content(target / name) in alone
        assert "" in answers
        assert all("another process is writing" in answer for answer in answers if answer)
        assert names(target) == [name]


# What is made of an input never replaces it, and no work of jrec's gets a foreign file.


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A dataset, an access profile, a run of two steps and its export."""
    root = tmp_path_factory.mktemp("world")
    assert main(["synth", "--like", "quickstart", "--rows", "600", "--out", f"{root}/data", "--quiet"]) == 0
    assert main(["access", f"{root}/data", "--out", f"{root}/profile", "--quiet"]) == 0
    (root / "machine.toml").write_text('devices=2\nmemory="1GB"\nlookup=1e12\nwithin=1e11\nall_reduce=1e10\n')
    run = ["train", "quickstart", f"data.path={root}/data", f"out={root}/run", "max_steps=2", "log.progress=off"]
    assert main([*run, "evaluate.final_splits=[]", "evaluate.baselines=off"]) == 0
    assert main(["export", f"{root}/run", "--out", f"{root}/export", "--quiet"]) == 0
    (root / "log.csv").write_text("label,a\n" + "".join(f"{i % 2},{i}\n" for i in range(50)))
    (root / "columns.toml").write_text('[label]\ncolumn = "label"\n[[categorical]]\ncolumn = "a"\n')
    return root


CLASHES = {
    "a profile over the dataset": ("access ROOT/data --out ROOT/data", "data is an input, which would be lost"),
    "a profile in the dataset": ("access ROOT/data --out ROOT/data/profile", "profile lies inside the dataset"),
    "a calibration in the dataset": ("fae calibrate ROOT/data --out ROOT/data/f", "lies inside the dataset"),
    "a pack over the dataset": ("fae pack ROOT/data --out ROOT/data --overwrite", "data is an input"),
    "a dataset over its log": (
        "prepare csv --schema ROOT/columns.toml --input ROOT/log.csv --out ROOT/log.csv --overwrite",
        "log.csv is an input",
    ),
    "a dataset around its log": (
        "prepare csv --schema ROOT/columns.toml --input ROOT/log.csv --out ROOT --overwrite", "holds .*, an input",
    ),
    "a dataset over its schema": (
        "prepare csv --schema ROOT/columns.toml --input ROOT/log.csv --out ROOT/columns.toml", "toml is an input",
    ),
    "a dataset in a dataset": ("synth --like quickstart --rows 600 --out ROOT/data/x", "x lies inside the dataset"),
    "a plan over its profile": (
        "plan ROOT/data --hardware ROOT/machine.toml --profile ROOT/profile --dim 8 --out ROOT/profile",
        "profile is an input",
    ),
    "a plan over its hardware": (
        "plan ROOT/data --hardware ROOT/machine.toml --dim 8 --out ROOT/machine.toml", "machine.toml is an input",
    ),
    "a configuration in the dataset": ("init ROOT/data --out ROOT/data/c.toml --quick", "lies inside the dataset"),
    "a delta over its base": (
        "export ROOT/run --since ROOT/export --out ROOT/export --overwrite", "export is an input"
    ),
    "an export over its run": ("export ROOT/run --out ROOT/run --overwrite", "run is an input"),
    "an export among checkpoints": ("export ROOT/run --out ROOT/run/checkpoints/99", "taken for one of the check"),
    "an export in an export": ("export ROOT/run --out ROOT/export/x", "lies inside the export"),
    "scores over their log": ("predict ROOT/run ROOT/log.csv --out ROOT/log.csv --overwrite", "log.csv is an input"),
    "scores in their run": ("predict ROOT/run ROOT/data --out ROOT/run/scores.csv", "lies inside the run"),
    "a compressed run over its source": (
        "compress ROOT/run --out ROOT/run --rank 2 --largest 1 --overwrite", "run is an input"
    ),
    "a run over an export": ("train quickstart data.path=ROOT/data out=ROOT/export", "is a finished export"),
    "a run over a dataset": ("train quickstart data.path=ROOT/data out=ROOT/data", "is a finished dataset"),
    "a run in a dataset": ("train quickstart data.path=ROOT/data out=ROOT/data/r", "lies inside the dataset"),
}  # fmt: skip


@pytest.mark.parametrize("clash", CLASHES)
def test_no_command_destroys_its_input(world, capsys, clash):
    command, message = CLASHES[clash]
    before = content(world)
    assert main([word.replace("ROOT", str(world)) for word in command.split()]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert content(world) == before


# A URI is no path: pathlib takes "s3://bucket/x" for the folder "s3:" in the current one.

URI_COMMANDS = {
    "prepare": "criteo-kaggle --input none",
    "synth": "--like quickstart --rows 600",
    "reorder": "none",
    "access": "none",
    "fae calibrate": "none",
    "fae pack": "none",
    "links": "",
    "plan": "none --hardware none",
    "replan": "none none",
    "init": "none",
    "follow": "none --input .",
    "prove": "none",
    "eval": "none none",
    "predict": "none none",
    "export": "none",
    "import-dlrm": "none none",
    "compress": "none",
}


@pytest.mark.parametrize("command", URI_COMMANDS)
def test_no_command_takes_a_uri_for_a_folder(tmp_path, monkeypatch, capsys, command):
    """Before it reads anything: there are no inputs here."""
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), *URI_COMMANDS[command].split(), "--out", "s3://bucket/x.toml"]) == 2
    said = capsys.readouterr().err
    assert "s3://bucket/x.toml is a URI" in said
    assert "copy what is written there, such as by `aws s3 cp --recursive`" in said
    assert not names(tmp_path)


def test_every_command_with_an_output_is_asked_for_a_uri():
    def writes(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    yield from (f"{name}{more}" for more in writes(inner))
            elif "--out" in action.option_strings:
                yield ""

    found = set()
    for command in COMMANDS:
        parser = command_parser(command, importlib.import_module(command.module))
        found |= {f"{command.name} {one}".strip() for one in writes(parser)}
    found = {name if name.startswith("fae") else name.split()[0] for name in found}  # prepare's formats are one
    assert found == set(URI_COMMANDS)


def test_no_run_takes_a_uri_for_a_folder(world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", f"data.path={world}/data", "out=gs://bucket/run", "max_steps=1"]) == 2
    assert "gs://bucket/run is a URI" in capsys.readouterr().err
    plan = ["plan", f"{world}/data", "--hardware", f"{world}/machine.toml", "--dim", "8", "--out", "plan"]
    assert main([*plan, "--figure", "gs://bucket/plan.svg"]) == 2
    assert "gs://bucket/plan.svg is a URI" in capsys.readouterr().err
    assert not names(tmp_path)


def library_writers(world):
    """What a library's user writes by, each with a place to write to."""
    shape, schema = shape_like("quickstart", table_rows=600), Schema.load(world / "data")
    config = load_config("quickstart", [f"data.path={world}/data"])
    scored = Scored(split="", first=0, logits=np.zeros(2, np.float32), labels=None)
    log, columns = str(world / "log.csv"), str(world / "columns.toml")
    return {
        "synthesize": lambda out: synthesize(shape, out, SynthOptions(rows=600)),
        "prepare": lambda out: prepare(Delimited(load_schema(columns)), log, out),
        "reorder": lambda out: reorder(world / "data", out=out),
        "profile": AccessProfile(examples=1, source="", tables=()).save,
        "checkpoints": Checkpoints,
        "run": object.__new__(Run).save,  # before it looks at the run
        "ray": lambda out: ray.fit("quickstart", [f"out={out}"], workers=1),
        "configuration": lambda out: save_config(config, out),
        "export": lambda out: export_run(world / "run", out),
        "compress": lambda out: compress_run(world / "run", out, Selection(rank=2, largest=1)),
        "run folder": lambda out: enter(
            open_run_folder(dataclasses.replace(config, out=out), resume=False, overwrite=False)
        ),
        "report": lambda out: write_report(out, config=config, schema=schema, scores={}, parameters={}, steps=0),
        "log": lambda out: MetricLog(out, tensorboard=False),
        "scores": lambda out: write_pieces(pathlib.Path(out), [scored], scored, splits=False),
        "shard": lambda out: ShardWriter(out, 100),
        "trace": lambda out: Timeline().write_trace(out),
        "host tier": lambda out: allocate((4, 4), np.dtype(np.float32), name="t", folder=out),
    }


def enter(context):
    with context:
        pass


def test_no_function_takes_a_uri_for_a_folder(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, write in library_writers(world).items():
        with pytest.raises(OutputError, match=r"hdfs://host/x\.parquet is a URI.* `hdfs dfs -put`"):
            write("hdfs://host/x.parquet")
        assert not names(tmp_path), name


def test_a_file_uri_is_answered_by_its_path(tmp_path):
    with pytest.raises(OutputError, match=f"file://{tmp_path}/x is a URI; give the path, such as {tmp_path}/x"):
        outputs.write_file(f"file://{tmp_path}/x", NEW)
    outputs.write_file(tmp_path / "a:b", NEW)  # a colon alone makes no URI
    assert names(tmp_path) == ["a:b"]


@pytest.mark.parametrize("swaps", [True, False])
def test_a_folder_is_replaced_in_one_step_or_comes_back(tmp_path, monkeypatch, swaps):
    """Where the system swaps two names, there is the old folder or the new one at any time; elsewhere it comes back."""
    if not swaps:
        monkeypatch.setattr(outputs, "_swapped", lambda one, other: False)
    elif not outputs._swapped(tmp_path, tmp_path):
        pytest.skip("this file system does not swap names in one step")
    folder(tmp_path / "out", 1)
    before = content(tmp_path / "out")

    def fails(self, target, rename=pathlib.Path.rename):
        rename(self, target)
        if pathlib.Path(target).name == "out.replaced":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", fails)
        if swaps:
            folder(tmp_path / "out", 2)
        else:
            with pytest.raises(KeyboardInterrupt):
                folder(tmp_path / "out", 2)
    assert (content(tmp_path / "out") == before) != swaps
    folder(tmp_path / "out", 3)
    assert content(tmp_path / "out")["0"] == bytes([3]) * 1000
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("swaps", [True, False])
def test_a_kill_while_the_old_folder_is_removed_blocks_no_later_run(tmp_path, monkeypatch, swaps):
    if not swaps:
        monkeypatch.setattr(outputs, "_swapped", lambda one, other: False)
    folder(tmp_path / "out", 1)
    (tmp_path / "out" / "tail").write_text("removed behind the old folder's mark")

    class Killed(BaseException):
        """Nothing after it runs, as after a signal."""

    def unlink(self, missing_ok=False, remove=pathlib.Path.unlink):
        remove(self, missing_ok=missing_ok)
        if self.name == "schema.json":  # the old folder's mark is gone, some of its files are there
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "unlink", unlink)
        patch.setattr(outputs, "_remove", _without_the_last_file(outputs._remove))
        with pytest.raises(Killed):
            folder(tmp_path / "out", 2)
    left = [name for name in names(tmp_path) if name != "out" and not name.startswith(".")]
    assert left in (["out.partial"], ["out.replaced"])
    (tmp_path / left[0] / "schema.json").unlink(missing_ok=True)
    folder(tmp_path / "out", 3)
    assert content(tmp_path / "out")["0"] == bytes([3]) * 1000
    assert names(tmp_path) == ["out"]


def _without_the_last_file(remove):
    """Removes a folder, and then is not asked again: as the clean-up of a killed process."""
    calls = []

    def once(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            remove(*args, **options)

    return once


def test_a_folder_beside_the_output_that_is_not_ours_stays(tmp_path):
    folder(tmp_path / "out", 1)
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "thesis.txt").write_text("chapter")
    with pytest.raises(OutputError, match=r"out\.replaced is in the way.* move it away"):
        folder(tmp_path / "out", 2)
    assert (tmp_path / "out.replaced" / "thesis.txt").read_text() == "chapter"
    assert content(tmp_path / "out")["0"] == bytes([1]) * 1000
