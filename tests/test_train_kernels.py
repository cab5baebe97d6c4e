"""``jrec train`` checks its model's GPU kernels before it starts, once, and its report says what was chosen."""

import json
import subprocess
import sys
import textwrap

import pytest

from jrec import cli
from jrec.commands import kernel_check
from jrec.data.synth.generate import SynthOptions, synthesize
from jrec.data.synth.shapes import shape_like
from jrec.environment import CACHE_VARIABLE
from jrec.errors import ConfigError
from jrec.ops import verdicts
from jrec.ops.local_gpu import Gpu
from jrec.ops.verdicts import KernelClass, Machine, Verdict
from jrec.selfcheck import store
from jrec.selfcheck.runner import SelfCheckError
from jrec.train.config import load_config

pytestmark = pytest.mark.usefixtures("quick_compilation")

GPU = Gpu(kind="NVIDIA Test GPU", driver="580.1")
CONFIG = """
[data]
batch_size = 256
workers = 0
[model]
embedding_dim = 8
bottom_mlp = [8]
top_mlp = [1]
[optimizer.embedding]
name = "rowwise_adagrad"
[log]
tensorboard = false
"""


@pytest.fixture
def config_file(tmp_path):
    """A configuration, with its dataset beside it."""
    data = tmp_path / "data"
    synthesize(shape_like("quickstart"), data, SynthOptions(rows=2000, seed=1))
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG.replace("[data]", f"[data]\npath = {str(data)!r}"))
    return path


@pytest.fixture
def train(config_file, tmp_path, monkeypatch):
    """Runs ``jrec train`` for two steps on a machine with a GPU, as far as the check goes; counts what it checks."""
    checked = []

    def check(todo, how, *, deadline):
        assert how.device == GPU.kind
        for of in todo:
            checked.append(of)
            right = of.kernel != "casted_update"
            yield Verdict(kernel_class=of, right=right, reason="faster" if right else "wrong", detail="row 3")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr(kernel_check, "local_gpu", lambda: GPU)
    monkeypatch.setattr(verdicts, "local_gpu", lambda: GPU)
    monkeypatch.setattr(kernel_check.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr("jrec.selfcheck.ensure.run_checks", check)
    verdicts.reread()

    def run(*overrides):
        checked.clear()
        arguments = [f"out={str(tmp_path / 'run')!r}", "max_steps=2", *overrides]
        assert cli.main(["train", str(config_file), "--overwrite", *arguments]) == 0
        return tuple(checked), json.loads((tmp_path / "run/report/metrics.json").read_text()).get("kernels")

    yield run
    verdicts.reread()


def test_a_run_checks_once_and_reports(train, config_file, monkeypatch, capsys):
    checked, reported = train()
    assert {(of.kernel, of.optimizer) for of in checked} == {
        ("tensor_cast", None),
        ("gather_reduce", None),
        ("casted_update", "RowWiseAdagrad"),
        ("row_update", "RowWiseAdagrad"),
    }
    out = capsys.readouterr()
    assert f"checking {len(checked)} GPU kernels on this NVIDIA Test GPU before their first use" in out.err
    assert "3 of 4 kernel classes are right and faster than XLA; 1 wrong" in out.err
    assert reported["gather_reduce float32 8"]["chosen"] == "pallas"
    update = reported["casted_update float32 8 RowWiseAdagrad"]
    assert (update["chosen"], update["verdict"]["reason"], update["verdict"]["detail"]) == ("xla", "wrong", "row 3")
    assert "GPU kernels, XLA's: casted_update float32 8 RowWiseAdagrad (wrong)" in out.out
    checked, _ = train()
    assert checked == ()
    monkeypatch.setattr(kernel_check, "open_data", None)  # what follows must not get so far
    for mode in ("xla", "pallas"):
        monkeypatch.setenv(verdicts.KERNELS_VARIABLE, mode)
        assert kernel_check.check_before_training(load_config(config_file)) == ()
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE)
    assert kernel_check.check_before_training(load_config(config_file, ["tables.implementation=xla"])) == ()
    monkeypatch.setattr(kernel_check.xla_bridge, "backends_are_initialized", lambda: True)
    assert kernel_check.check_before_training(load_config(config_file)) == ()


def test_a_resumed_run_keeps_its_kernels(config_file, tmp_path, monkeypatch, capsys):
    """A verdict that came later lets no kernel in; one that turned against a kernel of the run is said."""
    gather = KernelClass(kernel="gather_reduce", dtype="float32", dim=8)
    update = KernelClass(kernel="row_update", dtype="float32", dim=8, optimizer="RowWiseAdagrad")
    config = load_config(config_file, [f"out={str(tmp_path / 'run')!r}"])
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr(verdicts, "local_gpu", lambda: GPU)

    def begin(*reasons, resume):
        found = [
            Verdict(kernel_class=of, right=reason != "wrong", reason=reason)
            for of, reason in zip((gather, update), reasons, strict=True)
        ]
        store.record(verdicts.verdict_file(), Machine.of(GPU), found)
        verdicts.agree(None)
        verdicts.reread()
        kernel_check.keep_kernels(config, (gather, update), resume=resume, overwrite=False)
        return [verdicts.gpu_choice(of) for of in (gather, update)], capsys.readouterr().err

    try:
        assert begin("faster", "slower", resume=False) == (["pallas", "xla"], "")
        (tmp_path / "run/metrics.jsonl").write_text("{}\n")  # it came to a first line
        assert begin("faster", "faster", resume=True) == (["pallas", "xla"], "")
        assert begin("faster", "faster", resume=False) == (["pallas", "pallas"], "")  # will be refused: nothing is lost
        chosen, said = begin("wrong", "faster", resume=True)
        assert chosen == ["xla", "xla"]
        assert "began with GPU kernels that are not the choice here: gather_reduce float32 8. XLA computes" in said
        (tmp_path / "run/kernels.json").write_text("{")
        with pytest.raises(ConfigError, match=r"kernels.json is damaged .* delete it"):
            begin("faster", "faster", resume=True)
    finally:
        verdicts.agree(None)
        verdicts.reread()


def test_a_check_that_fails_stops_no_run(train, monkeypatch, capsys):
    def broken(todo, how, *, deadline):
        raise SelfCheckError("the GPU is gone")
        yield

    monkeypatch.setattr("jrec.selfcheck.ensure.run_checks", broken)
    _, reported = train()
    assert "GPU kernels could not be checked, so XLA computes: the GPU is gone" in capsys.readouterr().err
    assert {entry["chosen"] for entry in reported.values()} == {"xla"}


def test_the_check_comes_before_jax_takes_the_gpu(config_file, tmp_path):
    """In a process of its own: neither reading the configuration and dataset nor the check starts a backend."""
    code = f"""
    import jrec.selfcheck.ensure as ensure
    from jax._src import xla_bridge
    from jrec.commands import kernel_check
    from jrec.ops.local_gpu import Gpu
    from jrec.ops.verdicts import KernelClass, Machine, Verdict
    from jrec.train.config import load_config

    def run(todo, how, *, deadline):
        for of in todo:
            yield Verdict(kernel_class=of, right=True, reason="faster")

    ensure.run_checks = run
    kernel_check.local_gpu = lambda: Gpu(kind="a", driver="b")
    assert not xla_bridge.backends_are_initialized()
    print(len(kernel_check.check_before_training(load_config({str(config_file)!r}))))
    assert not xla_bridge.backends_are_initialized()
    """
    environment = {CACHE_VARIABLE: str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4"
