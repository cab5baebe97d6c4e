"""Processes of a run that cannot start together: each ends within seconds, with one line."""

import os
import re
import socket
import subprocess
import sys

import pytest
from small_run import CONFIG

from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

QUIET_SECONDS = 60  # that a busy machine may take for what takes one


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Two of the same shape."""
    folders = [tmp_path_factory.mktemp("data") / name for name in ("one", "other")]
    for seed, folder in enumerate(folders):
        synthesize(shape_like("quickstart"), folder, SynthOptions(rows=838, seed=seed))
    return folders


@pytest.fixture
def endings(tmp_path, datasets):
    """Starts processes with overrides of their own; gives what each said."""
    (tmp_path / "run.toml").write_text(CONFIG)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]

    def start(*own, port=port):
        processes = []
        for number, overrides in enumerate(own):
            given = [f"data.path={datasets[0]}", f"out={tmp_path / 'run'}", f"mesh.devices={len(own)}", *overrides]
            command = [sys.executable, "-m", "jrec", "train", str(tmp_path / "run.toml"), *given]
            command += ["--coordinator", f"localhost:{port}", "--processes", str(len(own)), "--process", str(number)]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            processes.append(subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE))
        said = [process.communicate(timeout=QUIET_SECONDS)[1] for process in processes]
        assert [process.returncode for process in processes] == [2] * len(own), said
        assert all(len(text.splitlines()) == 1 for text in said), said
        assert not (tmp_path / "run" / "config.toml").exists()
        return said

    return start


def test_processes_of_another_configuration(endings):
    keys = {"optimizer.embedding.learning_rate": (0.01, 0.02), "seed": (0, 1), "checkpoint.every_steps": (10, 0)}
    for said in endings(*([f"{key}={values[number]}" for key, values in keys.items()] for number in range(2))):
        for key, values in keys.items():
            assert f"{key} is {values[0]} in process 0 and {values[1]} in process 1" in said


def test_processes_of_another_dataset(endings, datasets):
    for said in endings([], [f"data.path={datasets[1]}"]):
        assert re.search(r"the dataset's digest of examples is \w{16} in process 0 and \w{16} in process 1", said)


def test_processes_may_differ_in_how_they_load_and_show_but_not_in_going_on(endings):
    for said in endings(["--resume"], ["data.workers=1", "log.every_steps=7", "--overwrite"]):
        assert "--resume is true in process 0 and false in process 1; --overwrite is false" in said
        assert "workers" not in said


def test_a_process_that_cannot_start_ends_the_others_with_its_reason(endings):
    first, second = endings([], ["data.path=/absent"])
    assert "process 1 of 2 cannot start: /absent is not a finished dataset" in first
    assert second.startswith("jrec: error: /absent is not a finished dataset")


def test_a_coordinator_port_in_use_is_said_to_be(endings):
    with socket.create_server(("", 0)) as other:
        (said,) = endings(["mesh.devices=2"], port=other.getsockname()[1])
    assert "another program uses that port; choose another port, the same for all processes" in said
