"""A process that keeps what it frees, so that pages are mapped once, and looks for no garbage while it starts."""

import gc
import os
import platform
import subprocess
import sys

import pytest

from jrec import cli, memory

FAULTS = """
import resource, sys, threading
import numpy as np
from jrec.memory import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(3)

def steps():
    for _ in range(20):
        np.empty(25_000_000, np.uint8).fill(1)
        np.empty(100_000_000, np.uint8).fill(1)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

np.empty(100_000_000, np.uint8).fill(1)
before = faults()
thread = threading.Thread(target=steps)  # as XLA's are: threads have heaps of their own by default
thread.start()
thread.join()
print(faults() - before)
"""


def faults(way):
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, way],
        capture_output=True, text=True, env={"NUMPY_MADVISE_HUGEPAGE": "0"}, timeout=120,
    )  # fmt: skip
    if done.returncode == 3:
        pytest.skip("this system's C library has no mallopt")
    return int(done.stdout)


PROGRAM = """
import resource
import jax, jax.numpy as jnp, optax
from flax import nnx
import jrec

layout = jrec.EmbeddingLayout.build(
    [jrec.TableConfig(name="item", rows=100, dim=16)], [jrec.FeatureConfig(name="item", table="item")]
)
config = jrec.nn.DLRMConfig(num_dense=1, bottom_mlp=(16,), top_mlp=(1,))
model = jrec.nn.DLRM(config, layout, rngs=nnx.Rngs(0))
optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.SGD(learning_rate=0.1))
run = jrec.distribute(model, optimizer)

@jax.jit
def step(x):
    return [jnp.cumsum(x * k).at[::7].add(1.0) for k in range(4)]  # large arrays, made anew in every step

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

x = jnp.ones(5_000_000)
for _ in range(3):
    jax.block_until_ready(step(x))
before = faults()
for _ in range(10):
    jax.block_until_ready(step(x))
print(faults() - before)
"""


def faults_of_program(**environment):
    """Page faults of ten steps of a program as in the README."""
    kept = {name: value for name, value in os.environ.items() if name != memory.KEEP_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=300,
        env={**kept, "JAX_PLATFORMS": "cpu", "NUMPY_MADVISE_HUGEPAGE": "0", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this system's C library has no mallopt")
def test_a_program_with_a_model_keeps_memory_unless_it_is_told_otherwise():
    assert faults_of_program() < faults_of_program(JREC_KEEP_MEMORY="0") / 2


def test_freed_memory_is_found_again():
    kept, given_back = faults("kept"), faults("default")
    assert given_back > 20 * 100_000_000 // 4096 // 2
    assert kept < given_back / 10


@pytest.mark.parametrize(("platforms", "driver", "cpu"), [("", False, True), ("", True, False), ("cpu", True, True)])
def test_the_command_expects_cpus_where_there_is_no_gpu_to_use(platforms, driver, cpu, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(memory, "_NVIDIA", tmp_path if driver else tmp_path / "none")
    assert memory.expects_cpu() is cpu


@pytest.mark.parametrize(("said", "cpu", "keeps"), [(None, True, True), ("0", True, False), (None, False, False)])
def test_memory_is_kept_by_default_on_cpus(said, cpu, keeps, monkeypatch):
    kept = []
    monkeypatch.setattr(memory, "expects_cpu", lambda: cpu)
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.delenv(memory.KEEP_VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(memory.KEEP_VARIABLE, said)
    memory.keep_by_default()
    assert bool(kept) is keeps


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize(("command", "compiles"), [("train", True), ("prepare", False)])
def test_commands_that_run_steps_keep_memory_on_cpus(command, compiles, cpu, monkeypatch, capsys):
    kept = []
    monkeypatch.setattr(memory, "expects_cpu", lambda: cpu)
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(sys, "argv", ["jrec", command, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert kept == []  # where nothing runs
    monkeypatch.delenv(memory.KEEP_VARIABLE, raising=False)
    monkeypatch.setattr(
        sys,
        "argv",
        ["jrec", command, *{"train": ["nowhere"], "prepare": ["avazu", "--input", "no", "--out", "x"]}[command]],
    )
    assert cli.main() == 2
    assert bool(kept) is (compiles and cpu)
    assert capsys.readouterr().err.startswith("jrec: error: ")


@pytest.fixture
def collects():
    yield
    gc.unfreeze()
    assert gc.isenabled()


def test_garbage_is_collected_once_the_start_is_over(collects):
    with memory.starting():
        assert not gc.isenabled()
        memory.started()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    with pytest.raises(ZeroDivisionError), memory.starting():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_who_collects_no_garbage_is_left_alone(collects):
    gc.disable()
    try:
        with memory.starting():
            pass
        memory.started()
        assert not gc.isenabled()
    finally:
        gc.enable()
