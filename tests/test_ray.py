"""Ray's workers prepare a log and train a run, and one of them is killed: the same bytes and bits as without."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from checkpoint_state import flatten
from test_mesh_processes import TIMEOUT, dataset, finish, run  # noqa: F401 (fixtures)
from test_prepare_workspace import files, make, write_log

from jrec import cli
from jrec.app.evaluate import restore_run
from jrec.errors import ConfigError
from jrec.prepare import ingest, parts

pytest.importorskip("ray", reason="needs the extra ray: pip install 'jrec[ray]'")
pytestmark = pytest.mark.slow

FIT = """
import sys
from jrec.app.ray import fit
if __name__ == "__main__":
    print("the run is in", fit(sys.argv[1], sys.argv[2:], workers=2, restarts=1))
"""


def read_part_and_die_once(source, part, folder, *others):
    """A worker that reads no first part is killed when it has written some of it."""
    mark = folder.parent / "died"
    if part.start and not mark.exists():
        mark.touch()
        append = ingest.Spill.append

        def deadly(spill, columns):
            append(spill, columns)
            spill.finish()
            os.kill(os.getpid(), signal.SIGKILL)

        ingest.Spill.append = deadly
    return parts._read_part(source, part, folder, *others)


@pytest.fixture
def workers():
    import ray

    from jrec.app.ray import RayExecutor, connected

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers do not see the tests
    with connected("local", cpus=2):
        yield RayExecutor()


def test_a_log_prepared_by_workers_of_which_one_is_killed(workers, tmp_path, monkeypatch):
    from jrec.prepare.prepare import prepare
    from jrec.prepare.prepare_options import PrepareOptions
    from jrec.prepare.readers import Criteo

    write_log(tmp_path / "log", 3000)
    make(tmp_path / "log", tmp_path / "one")
    monkeypatch.setattr(parts, "PART_BYTES", 100_000)
    read, died = parts._read_part, tmp_path / "many.partial" / "work" / "log" / "died"
    tasks = parts.Task
    monkeypatch.setattr(
        parts, "Task", lambda what, fn, args: tasks(what, read_part_and_die_once if fn is read else fn, args)
    )
    seen = []
    options = PrepareOptions(block_size=64, shard_examples=256)
    prepare(
        Criteo("criteo-kaggle"), [str(tmp_path / "log")], tmp_path / "many", options, workers=workers,
        progress=Watched(lambda: seen.append(died.exists())),
    )  # fmt: skip
    assert any(seen)
    assert files(tmp_path / "many") == files(tmp_path / "one")


class Watched:
    """Progress that calls a function whenever something is done."""

    def __init__(self, look):
        self._look = look

    def stage(self, name, total):
        return contextlib.nullcontext(lambda done: self._look())


def test_the_command_prepares_on_ray(tmp_path):
    write_log(tmp_path / "log", 500)
    common = ["prepare", "criteo-kaggle", "--input", str(tmp_path / "log"), "--quiet", "--block-size", "64", "--out"]
    assert cli.main([*common, str(tmp_path / "one")]) == 0
    subprocess.run(
        [sys.executable, "-m", "jrec", *common, tmp_path / "many", "--ray", "local"], check=True, timeout=300
    )
    one, many = files(tmp_path / "one"), files(tmp_path / "many")
    assert one.pop("schema.json") != many.pop("schema.json")  # which has the command
    assert many == one


def test_no_cluster_is_a_mistake(tmp_path):
    write_log(tmp_path / "log", 50)
    common = ["prepare", "criteo-kaggle", "--input", str(tmp_path / "log"), "--quiet", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "jrec", *common, "--ray", "auto"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "jrec: error: no Ray cluster at 'auto'" in done.stderr


def processes_of(out):
    """Process numbers by their number in the run."""
    found = {}
    for place in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "jrec.app.ray.worker" in words and f"out={out}" in words:
            found[int(words[words.index("--process") + 1])] = int(place.parent.name)
    return found


@pytest.mark.parametrize("killed", ["process", "worker"])
def test_a_run_of_which_a_worker_is_killed_ends_with_the_bits_of_one_that_was_not(killed, run, dataset, tmp_path):  # noqa: F811
    (tmp_path / "fit.py").write_text(FIT)
    rules = ("epochs=200", "max_steps=400", "checkpoint.every_steps=40")
    whole, out = tmp_path / "whole", tmp_path / "out"
    finish(run(2, *rules, out="whole"))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"}
    with (tmp_path / "said").open("w") as said:
        command = [sys.executable, tmp_path / "fit.py", tmp_path / "run.toml", f"data.path={dataset}", f"out={out}"]
        fit = subprocess.Popen([*command, *rules], stdout=said, stderr=said, env=environment)
    try:
        first = wait_for_checkpoint(fit, out)
        victim = first[1]
        if killed == "worker":  # Ray's, whose child must not go on without it
            victim = int(pathlib.Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(victim, signal.SIGKILL)
        assert fit.wait(TIMEOUT) == 0, (tmp_path / "said").read_text()[-3000:]
    finally:
        fit.terminate()
        fit.wait()
    assert processes_of(out) == {}
    said = (tmp_path / "said").read_text()
    assert f"the run is in {out}" in said
    assert "process 1 of 2 has not answered for" in said  # so that it was killed before it had finished
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    one, other = (flatten(restore_run(folder, slots=True).state) for folder in (whole, out))
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(np.asarray(other[path]), np.asarray(leaf), err_msg=path)


def wait_for_checkpoint(fit, out):
    """Returns the processes when the run has written its first checkpoint."""
    deadline = time.monotonic() + TIMEOUT
    while not any(p.name.isdigit() for p in (out / "checkpoints").glob("*")):
        assert time.monotonic() < deadline
        assert fit.poll() is None
        time.sleep(0.05)
    return processes_of(out)


def test_a_mistake_is_named_before_ray_is_started(tmp_path):
    from jrec.app.ray import fit

    with pytest.raises(ConfigError, match=r"mesh.devices is workers \* devices here; leave it out"):
        fit("quickstart", ["mesh.devices=3"], workers=2)
    with pytest.raises(ConfigError, match="nowhere"):
        fit("nowhere", workers=2)
