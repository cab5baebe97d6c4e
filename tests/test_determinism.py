"""The key ``deterministic``: XLA's flag before JAX starts, an error after it, and what a report promises."""

import json
import os
import subprocess
import sys

import jax
import pytest

from jrec import cli
from jrec.app import determinism
from jrec.app.config import DataConfig, TrainConfig
from jrec.data.schema import DatasetError
from jrec.errors import ConfigError
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

FLAG = "--xla_gpu_deterministic_ops"


@pytest.fixture
def flags(monkeypatch):
    """Sets XLA_FLAGS and the platform that JAX has started, and returns a function that reads the flags."""

    jax.devices()  # now, by the flags of all tests: what this one sets is not for JAX

    def start(flags, platform):
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setattr(determinism, "_started_platform", lambda: platform)
        return lambda: os.environ["XLA_FLAGS"].split()

    return start


def test_the_flag_is_added_to_those_that_are_set(flags):
    read = flags("--xla_dump_to=x", None)
    assert not determinism.is_requested()
    determinism.request()
    determinism.request()
    assert read() == ["--xla_dump_to=x", f"{FLAG}=true"]
    assert determinism.is_requested()


@pytest.mark.parametrize(("flag", "on"), [(FLAG, True), (f"{FLAG}=1", True), (f"{FLAG}=false", False)])
def test_how_the_flag_is_read(flag, on, flags):
    flags(flag, None)
    assert determinism.is_requested() is on


def test_after_gpus_have_started_it_is_an_error_with_the_remedy(flags):
    read = flags("", "gpu")
    with pytest.raises(ConfigError, match=f"set that variable|XLA_FLAGS={FLAG}=true"):
        determinism.request()
    determinism.request(required=False)
    assert read() == []
    flags(f"{FLAG}=true", "gpu")
    determinism.request()


def test_on_a_cpu_that_has_started_there_is_nothing_to_do(flags):
    read = flags("", "cpu")
    determinism.request()
    assert read() == []


def test_the_platform_is_known_once_jax_has_started_and_not_before():
    program = (
        "import sys; from jrec.app import determinism as d; found = [d._started_platform(), 'jax' in sys.modules];"
        "import jax; found.append(d._started_platform()); jax.devices(); found.append(d._started_platform());"
        "import json; print(json.dumps(found))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [None, False, None, "cpu"]


def test_what_is_promised(flags):
    flags("", None)
    assert determinism.promise("cpu") == "the same bits every time"
    assert "deterministic=true" in determinism.promise("gpu")
    flags(f"{FLAG}=true", None)
    assert "deterministic is true" in determinism.promise("gpu")


@pytest.mark.parametrize("key", [True, False])
def test_a_run_asks_before_it_reads_anything(key, flags, tmp_path):
    from jrec.app.loop import train

    read = flags("", None)
    data = DataConfig(path=str(tmp_path / "absent"))
    with pytest.raises(DatasetError):
        train(TrainConfig(data=data, out=str(tmp_path / "run"), deterministic=key))
    assert (read() == [f"{FLAG}=true"]) is key


def test_the_command_asks_before_it_joins_others_or_trains(flags, tmp_path, monkeypatch):
    read, seen = flags("", None), []

    def train(config, **_):
        seen.append((config.deterministic, read()))
        raise ConfigError("enough")

    monkeypatch.setattr("jrec.app.reported_run.train", train)
    synthesize(shape_like("quickstart"), tmp_path / "data", SynthOptions(rows=200, seed=1))
    config = tmp_path / "run.toml"
    config.write_text(f'deterministic = true\n[data]\npath = "{tmp_path}/data"\nbatch_size = 16\n')
    assert cli.main(["train", str(config), f"out={tmp_path}/run"]) != 0
    assert seen == [(True, [f"{FLAG}=true"])]
