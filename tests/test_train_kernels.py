"""``jrec train`` checks its model's GPU kernels before it starts, once, and its report says what was chosen."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from jrec import cli
from jrec.app.build import build_layout
from jrec.app.commands import kernel_check
from jrec.app.config import load_config
from jrec.app.dataset import open_data
from jrec.environment import CACHE_VARIABLE
from jrec.errors import ConfigError
from jrec.ops import verdicts
from jrec.ops.verdicts import KernelClass, Verdict
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.selfcheck import check
from jrec.selfcheck.check import SelfCheckError

MACHINE = "NVIDIA Test GPU, driver 580.1"
FAST, WRONG = Verdict(right=True, ratio=0.5), Verdict(right=False, why="wrong: row 3")
GATHER = KernelClass(kernel="gather_reduce", dtype="float32", dim=8)
UPDATE = KernelClass(kernel="casted_update", dtype="float32", dim=8, optimizer="RowWiseAdagrad")
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
def gpu(tmp_path, monkeypatch):
    """A machine with a GPU, as far as the choice goes, with a cache folder of the test's own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE, raising=False)
    for module in (kernel_check, verdicts):
        monkeypatch.setattr(module, "local_machine", lambda: MACHINE)
    monkeypatch.setattr(kernel_check.jax, "default_backend", lambda: "gpu")
    verdicts.reread()
    yield
    verdicts.agree(None)
    verdicts.reread()


@pytest.fixture
def checked(gpu, monkeypatch):
    """What checks were asked for; they find that updates are wrong."""
    asked = {}

    def run(wanted, **options):
        asked.update(wanted)
        return MACHINE, {of: WRONG if of == UPDATE else FAST for of in wanted}

    monkeypatch.setattr(check, "run_child", run)
    return asked


def prepare(config_file, out, *overrides, resume=False):
    """Does what ``jrec train`` does about kernels, and no more."""
    config = load_config(config_file, [f"out={str(out)!r}", *overrides])
    data = open_data(config)
    layout = build_layout(data.config, data.schema)
    kernel_check.prepare_kernels(config, layout, resume=resume, overwrite=False)


def test_a_run_checks_once_and_reports(checked, config_file, tmp_path, monkeypatch, capsys):
    arguments = [f"out={str(tmp_path / 'run')!r}", "max_steps=2"]
    assert cli.main(["train", str(config_file), "--overwrite", *arguments]) == 0
    assert {(of.kernel, of.optimizer) for of in checked} == {
        ("tensor_cast", None),
        ("gather_reduce", None),
        ("casted_update", "RowWiseAdagrad"),
        ("row_update", "RowWiseAdagrad"),
    }
    assert checked[GATHER].bags % 256 == 0
    out = capsys.readouterr()
    assert "checking 4 GPU kernels on NVIDIA Test GPU, driver 580.1 before their first use" in out.err
    assert "3 of 4 are right and faster than XLA; casted_update float32 8 RowWiseAdagrad: wrong: row 3" in out.err
    reported = json.loads((tmp_path / "run/report/metrics.json").read_text())["kernels"]
    assert reported[str(GATHER)] == {"chosen": "pallas", "right": True, "ratio": 0.5, "why": ""}
    assert reported[str(UPDATE)] == {"chosen": "xla", "right": False, "ratio": None, "why": "wrong: row 3"}
    assert "GPU kernels, XLA's: casted_update float32 8 RowWiseAdagrad (wrong: row 3)" in out.out
    assert "gather_reduce float32 8 (0.50 of XLA's time)" in out.out
    checked.clear()
    prepare(config_file, tmp_path / "other")
    assert not checked


def test_nothing_is_checked_where_the_choice_is_made(checked, config_file, tmp_path, monkeypatch):
    prepare(config_file, tmp_path / "run", "tables.implementation=xla")
    for mode in ("xla", "pallas"):
        monkeypatch.setenv(verdicts.KERNELS_VARIABLE, mode)
        prepare(config_file, tmp_path / "run")
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE)
    monkeypatch.setattr(kernel_check.jax, "default_backend", lambda: "cpu")
    prepare(config_file, tmp_path / "run")
    assert not checked
    assert not (tmp_path / "run").exists()


def test_an_amd_gpu_is_told_of_at_the_start(checked, config_file, tmp_path, monkeypatch, capsys):
    amd = types.SimpleNamespace(device_kind="AMD Instinct MI300X", compute_capability="gfx942")
    monkeypatch.setattr(kernel_check.jax, "local_devices", lambda: [amd])
    prepare(config_file, tmp_path / "run")
    assert "AMD Instinct MI300X is an AMD GPU: XLA computes everything on it" in capsys.readouterr().err
    assert not checked


def test_a_driver_of_no_known_version_runs_no_kernel(checked, config_file, tmp_path, monkeypatch, capsys):
    for module in (kernel_check, verdicts):
        monkeypatch.setattr(module, "local_machine", lambda: None)
    prepare(config_file, tmp_path / "run")
    assert "GPU kernels are not used, since no version of NVIDIA's driver is known" in capsys.readouterr().err
    assert not checked
    assert verdicts.gpu_choice(GATHER) == "xla"


def test_a_resumed_run_keeps_its_kernels(gpu, config_file, tmp_path, monkeypatch, capsys):
    """A verdict that came later lets no kernel in; one that turned against a kernel of the run is said."""
    monkeypatch.setattr(kernel_check, "_check", lambda wanted: None)

    def begin(gather, update, *, resume):
        verdicts.keep_verdicts(MACHINE, {GATHER: gather, UPDATE: update})
        verdicts.agree(None)
        prepare(config_file, tmp_path / "run", resume=resume)
        return [verdicts.gpu_choice(of) for of in (GATHER, UPDATE)], capsys.readouterr().err

    slow = Verdict(right=True, ratio=2.0)
    assert begin(FAST, slow, resume=False) == (["pallas", "xla"], "")
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")  # it came to a first line
    assert begin(FAST, FAST, resume=True) == (["pallas", "xla"], "")
    assert begin(FAST, FAST, resume=False) == (["pallas", "pallas"], "")  # will be refused: nothing is lost
    chosen, said = begin(WRONG, FAST, resume=True)
    assert chosen == ["xla", "xla"]
    assert "began with GPU kernels that are not the choice here: gather_reduce float32 8. XLA computes" in said
    (tmp_path / "run/kernels.json").write_text("{")
    with pytest.raises(ConfigError, match=r"kernels.json is damaged .* delete it"):
        begin(FAST, FAST, resume=True)


@pytest.mark.parametrize("error", [SelfCheckError("the GPU is gone"), OSError("the GPU is gone")])
def test_a_check_that_fails_stops_no_run(checked, config_file, tmp_path, monkeypatch, capsys, error):
    def broken(wanted, **options):
        raise error

    monkeypatch.setattr(check, "run_child", broken)
    prepare(config_file, tmp_path / "run")
    assert "GPU kernels could not be checked, so XLA computes: the GPU is gone" in capsys.readouterr().err
    assert verdicts.gpu_choice(GATHER) == "xla"


def test_processes_agree_on_what_all_of_them_chose(gpu, monkeypatch):
    classes = [dataclasses.replace(GATHER, dim=dim) for dim in (16, 32, 64)]
    verdicts.keep_verdicts(MACHINE, dict.fromkeys(classes[:2], FAST))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    others = [False, True, True]

    def gathered(mine):
        return np.stack([mine, others])

    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gathered)
    kernel_check._agree(classes)
    assert [verdicts.gpu_choice(of) for of in classes] == ["xla", "pallas", "xla"]
