"""Several processes (gloo on the CPU) grow, score and stop together, and end when one of them dies."""

import json
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from checkpoint_state import flatten
from child_processes import with_devices
from hosts import two_hosts
from skewed_log import skewed_dataset

from jrec.app.build import build_layout, build_model, build_optimizer
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint, restore_run
from jrec.app.report.logs import read_records
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.regroup import gathered
from jrec.data.schema import Schema
from jrec.errors import LostProcessError
from jrec.metrics import evaluate
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.run.step import compile_run

pytestmark = pytest.mark.slow

CONFIG = """
seed = 3
epochs = 5
[data]
batch_size = 64
eval_batch_size = 256
window_blocks = 2
workers = 1
[model]
embedding_dim = 4
bottom_mlp = [8, 4]
top_mlp = [8, 1]
[optimizer]
learning_rate = 0.05
[optimizer.embedding]
name = "adagrad"
learning_rate = 0.05
[checkpoint]
every_steps = 10
keep = 3
[log]
every_steps = 1
tensorboard = false
progress = "off"
"""
TIMEOUT = 600  # seconds, of machines with as few cores as there are processes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """670 training examples: 11 batches an epoch, of which the last is not full."""
    folder = tmp_path_factory.mktemp("data") / "quickstart"
    synthesize(shape_like("quickstart"), folder, SynthOptions(rows=838, seed=1))
    return folder


@pytest.fixture
def run(tmp_path, dataset):
    """Starts the processes of a run; gives what waits for them."""
    (tmp_path / "run.toml").write_text(CONFIG)
    started = []

    def start(processes, *overrides, devices=None, resume=False, out="many", script=None, hosts=None):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        devices = processes if devices is None else devices
        environment = with_devices(devices // processes)
        options = [f"data.path={dataset}", f"out={tmp_path / out}", f"mesh.devices={devices}", *overrides]
        command = [sys.executable, "-m", "jrec", "train", str(tmp_path / "run.toml"), *options]
        command += ["--resume"] if resume else []
        command = command if script is None else [sys.executable, "-c", script, *overrides]
        if processes > 1:
            first = "localhost" if hosts is None else "first"
            command += ["--coordinator", f"{first}:{port}", "--processes", str(processes)]
        for number in range(processes):
            own = [*command, "--process", str(number)] if processes > 1 else command
            # Dealt out in turn: of three the last is on the first one's host.
            own = own if hosts is None else [*hosts.on(number % 2), *own]
            stdout = subprocess.PIPE if script else subprocess.DEVNULL
            started.append(subprocess.Popen(own, env=environment, text=True, stdout=stdout, stderr=subprocess.PIPE))
        return started[-processes:]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def hosts():
    with two_hosts() as made:
        if made is None:
            pytest.skip("no network namespaces here, which stand for hosts: they take Linux, iproute2 and root")
        yield made


@pytest.fixture
def config(tmp_path, dataset, run):
    return load_config(tmp_path / "run.toml", [f"data.path={str(dataset)!r}", f"out={str(tmp_path / 'one')!r}"])


def finish(processes):
    """What each of them wrote."""
    written = []
    for process in processes:
        found, said = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, said[-3000:]
        written.append(found)
    return written


def wait_for_checkpoint(folder, processes):
    """Returns when the run has written its first."""
    deadline = time.monotonic() + TIMEOUT
    while not any(p.name.isdigit() for p in (folder / "checkpoints").glob("*")):
        assert time.monotonic() < deadline, "no checkpoint was written"
        assert all(p.poll() is None for p in processes), processes[0].communicate()[1][-3000:]
        time.sleep(0.05)


def on_one_device(config, shares):
    """Losses and final arrays of one device on the batches of so many processes."""
    schema = Schema.load(config.data.path)
    layout = build_layout(config, schema)
    each = LoaderConfig(batch_size=config.data.batch_size // shares, seed=config.seed, window_blocks=2)
    loaders = [
        make_loader(
            config.data.path, schema, layout, "train", each, epochs=config.epochs, process_index=p, process_count=shares
        )
        for p in range(shares)
    ]
    model = build_model(config, schema, layout)
    state, compiled = compile_run(model, build_optimizer(config, model, loaders[0].total_batches or 0))
    losses = []
    for parts in zip(*loaders, strict=True):
        batch = gathered(layout, [(part, 0, len(part.labels)) for part in parts])
        state, loss, _ = compiled.step(state, batch)
        losses.append(float(loss))
    return losses, {path: np.asarray(leaf) for path, leaf in flatten(state).items()}


def test_processes_take_windows_together_like_a_run_that_had_room(run, tmp_path):
    """Later batches of both processes read many more rows than the first four."""
    data = skewed_dataset(tmp_path)
    rules = (f"data.path={data}", "data.window_blocks=0", "epochs=1", "mesh.form=send")
    for name, headroom in (("small", 1), ("large", 50)):
        finish(run(2, *rules, f"mesh.headroom={headroom}", out=name))
    small, large = (tmp_path / name for name in ("small", "large"))
    losses = [[r["loss"] for r in read_records(f / "metrics.jsonl") if "loss" in r] for f in (small, large)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    one, other = (flatten(restore_run(folder, slots=True).state) for folder in (small, large))
    for path, leaf in one.items():
        np.testing.assert_allclose(np.asarray(other[path]), np.asarray(leaf), rtol=1e-5, atol=1e-6, err_msg=path)


EVALUATING = """
import sys
import jax
import numpy as np
from jrec.cli import main
assert main(["eval", *sys.argv[1:]]) == 0
from jrec.app.evaluate import evaluate_checkpoint
run, data = sys.argv[1:3]
for limit in (0, 3):
    found = evaluate_checkpoint(run, data, split="test", devices=jax.device_count(), limit=limit)
    np.savez(f"{run}/{jax.process_index()}-{limit}", logits=found.scores.logits, labels=found.scores.labels)
"""


@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (3, 3)])
def test_processes_share_an_evaluation_and_score_as_one_device(run, dataset, tmp_path, processes, devices):
    """In the order of time, in every process; last batches are uneven, and more are read than agree at once."""
    finish(run(1, "max_steps=3", "data.eval_batch_size=6", devices=1))
    folder = tmp_path / "many"
    said = finish(
        run(processes, str(folder), str(dataset), "--devices", str(devices), devices=devices, script=EVALUATING)
    )
    one = {limit: evaluate_checkpoint(folder, dataset, split="test", limit=limit).scores for limit in (0, 3)}
    # gloo says on standard output that it is there.
    metrics, *others = ([json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said)
    assert not any(others)
    (metrics,) = metrics
    expected = evaluate(one[0]).to_dict()
    assert metrics["examples"] == expected["examples"] == Schema.load(dataset).splits["test"].examples
    for name in ("auc", "log_loss", "accuracy", "calibration"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)
    for limit, scores in one.items():
        for process in range(processes):
            found = np.load(folder / f"{process}-{limit}.npz")
            np.testing.assert_array_equal(found["labels"][: scores.labels.size], scores.labels)
            np.testing.assert_allclose(found["logits"][: scores.labels.size], scores.logits, rtol=1e-5, atol=1e-6)
            # A mesh's batch is a multiple of its devices.
            assert found["labels"].size == (scores.labels.size if limit == 0 else limit * -(-6 // devices) * devices)


def assert_one_line(said, what):
    """One line of jrec's, and none of C++'s or of a trace."""
    assert [line for line in said.splitlines() if what in line and line.startswith("jrec: error: ")], said[-3000:]
    assert len([line for line in said.splitlines() if not line.startswith("[Gloo]")]) == 1, said[-3000:]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_ends_the_others_with_one_line(run, tmp_path, stopped):
    processes = run(2, "epochs=200", "max_steps=2000")
    wait_for_checkpoint(tmp_path / "many", processes)
    processes[stopped].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    _, said = processes[1 - stopped].communicate(timeout=90)
    assert 25 < time.monotonic() - began < 60
    assert processes[1 - stopped].returncode == LostProcessError.exit_code
    assert_one_line(said, f"process {stopped} of 2 has not answered for 30 s")
    processes[stopped].send_signal(signal.SIGCONT)
    _, said = processes[stopped].communicate(timeout=60)
    assert processes[stopped].returncode != 0


PLACES = pytest.mark.parametrize("place", ["device", "host"])


@PLACES
def test_a_killed_process_ends_the_others_and_the_run_goes_on_with_fewer(run, tmp_path, place):
    folder, where = tmp_path / "many", f"tables.tier={place}"
    processes = run(2, "epochs=200", "max_steps=2000", where)
    wait_for_checkpoint(folder, processes)
    processes[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    _, said = processes[0].communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert processes[0].returncode == LostProcessError.exit_code
    assert_one_line(said, "process 1 of 2 has not answered for")
    steps = [int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()]
    # One process, one device: the same batches, each of them whole.
    last = max(steps) + 5
    finish(run(1, "epochs=200", f"max_steps={last}", where, devices=1, resume=True))
    assert restore_run(folder).saved.step == last


@PLACES
def test_a_signal_to_one_process_stops_all_at_one_step_and_the_run_goes_on_to_the_same_bits(run, tmp_path, place):
    rules = ("epochs=40", "max_steps=120", "checkpoint.every_steps=20", f"tables.tier={place}")
    stopped = run(2, *rules, out="stopped")
    wait_for_checkpoint(tmp_path / "stopped", stopped)
    stopped[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=TIMEOUT)[1] for process in stopped]
    assert [process.returncode for process in stopped] == [130, 130], said
    steps = {int(step) for text in said for step in re.findall(r"stopped after step (\d+)", text)}
    (step,) = steps
    assert step < 120
    assert (tmp_path / "stopped" / "checkpoints" / str(step)).is_dir()
    finish(run(2, *rules, out="stopped", resume=True))
    finish(run(2, *rules, out="whole"))
    one, other = (flatten(restore_run(tmp_path / out, slots=True).state) for out in ("whole", "stopped"))
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(np.asarray(other[path]), np.asarray(leaf), err_msg=path)
    logs = [(tmp_path / out / "metrics.jsonl").read_bytes() for out in ("whole", "stopped")]
    assert logs[0] == logs[1]


@PLACES
def test_processes_on_two_hosts_train_to_the_bits_of_those_on_one(run, hosts, tmp_path, place):
    """Each host's name leads to 127.0.1.1 on itself; by that address no process of the other would be reached."""
    rules = ("max_steps=20", "data.batch_size=60", f"tables.tier={place}")
    finish(run(3, *rules, out="one"))
    finish(run(3, *rules, out="two", hosts=hosts))
    one, two = (flatten(restore_run(tmp_path / out, slots=True).state) for out in ("one", "two"))
    assert one.keys() == two.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(np.asarray(two[path]), np.asarray(leaf), err_msg=path)


def test_a_cut_cable_ends_the_processes_of_both_hosts(run, hosts, tmp_path):
    processes = run(2, "epochs=200", "max_steps=20000", hosts=hosts)
    wait_for_checkpoint(tmp_path / "many", processes)
    hosts.cut()
    began = time.monotonic()
    for number, process in enumerate(processes):
        _, said = process.communicate(timeout=90)
        assert process.returncode == LostProcessError.exit_code, said[-3000:]
        assert_one_line(said, f"process {1 - number} of 2 has not answered for 30 s")
    assert time.monotonic() - began < 60


def test_processes_end_early_together_and_score_the_best_step(run, tmp_path):
    early = ("evaluate.every_steps=5", "evaluate.early_stopping.patience=2", "checkpoint.keep_best=true")
    finish(run(2, "epochs=40", "optimizer.embedding.learning_rate=0.3", *early))
    folder = tmp_path / "many"
    training = json.loads((folder / "report" / "metrics.json").read_text())["training"]
    values = {r["step"]: r["auc"] for r in read_records(folder / "metrics.jsonl") if r["split"] == "valid"}
    best = max(values, key=lambda step: values[step])
    assert training["stopped_early"]
    assert (training["scored_step"], training["steps"]) == (best, best + 10)
    assert {best, best + 10} <= {int(p.name) for p in (folder / "checkpoints").iterdir()}


def test_a_resumed_run_of_fewer_processes_takes_the_same_batches(run, config, tmp_path):
    finish(run(2, "max_steps=20"))
    finish(run(1, "max_steps=40", devices=2, resume=True))
    losses, _ = on_one_device(config, 2)
    logged = (tmp_path / "many" / "metrics.jsonl").read_text()
    found = [float(x) for x in re.findall(r'"loss": ([0-9.e-]+)', logged)]
    np.testing.assert_allclose(found, losses[:40], rtol=2e-4)
