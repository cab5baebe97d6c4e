"""``jrec links`` measures the visible devices, and planning reads what it wrote."""

import jax
import numpy as np
import pytest

from jrec import cli
from jrec.errors import ConfigError
from jrec.sharding import links
from jrec.sharding.hardware import Hardware, load_hardware

QUICK = ("--message", "64KB", "--repeats", "1", "--quiet")


def test_file_is_hardware(tmp_path, capsys):
    path = tmp_path / "three.toml"
    assert cli.main(["links", "--devices", "3", "--memory", "2GB", "--out", str(path), *QUICK]) == 0
    assert "between devices" in capsys.readouterr().out
    hardware = load_hardware(path)
    assert (hardware.devices, hardware.memory, hardware.host) == (3, (2 * 10**9,) * 3, 0)
    assert hardware.name == "3 x cpu"
    assert (hardware.L < 1e-3).all()  # a kilobyte takes less than a second


def test_one_device_prints_its_file(tmp_path, capsys):
    assert cli.main(["links", "--devices", "1", "--name", 'a "b"', *QUICK]) == 0
    path = tmp_path / "one.toml"
    path.write_text(capsys.readouterr().out)
    hardware = load_hardware(path)
    assert (hardware.devices, hardware.name) == (1, 'a "b"')
    assert 0 < hardware.memory[0] < 2**50


def test_costs_are_seconds_by_bytes(monkeypatch):
    """A device that fetches twice as slowly costs twice as much."""
    made = iter([1.0, 4.0, 2.0, 1.0, 0.5])
    monkeypatch.setattr(links, "_seconds", lambda run, repeats: next(made))
    found = links.measure_hardware("two", jax.devices()[:2], memory=5, row_bytes=40, message=100, repeats=1)
    np.testing.assert_allclose(found.L, np.array([[1, 4], [2, 1]]) / 80)
    assert found.all_reduce == pytest.approx(100 / 0.5)  # 2 (N - 1) / N = 1 of the bytes goes over a link


def test_text_keeps_the_figures(tmp_path):
    hardware = Hardware(name="x", memory=(7, 8), fetch=((1e-12, 2.5e-11), (3e-11, 1e-12)), all_reduce=2e11, host=6e10)
    path = tmp_path / "x.toml"
    path.write_text(links.hardware_toml(hardware, "two\nlines"))
    assert load_hardware(path) == hardware


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "node.json"), "end in .toml"),
        (("--devices", "9"), "--devices is 9, but JAX sees 4 cpu device"),
        (("--row-bytes", "6"), "whole float32"),
    ],
)
def test_what_cannot_be_measured(arguments, message, capsys):
    assert cli.main(["links", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"without jax\.distributed"):
        links.measure_hardware("x", jax.devices())
