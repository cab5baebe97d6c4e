"""Which GPU there is, from what the driver tells, without starting JAX's backend."""

import stat

import jax
import pytest

from jrec.ops import local_gpu
from jrec.ops.local_gpu import Gpu

VERSION = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)  Tue Sep 23
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
SMI = """\
#!/bin/sh
case "$1" in
  --query-gpu=driver_version) echo 570.86.15; echo 570.86.15;;
  --query-gpu=name) echo NVIDIA H200; echo NVIDIA L4;;
  *) exit 1;;
esac
"""


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine whose driver tells nothing, with JAX for CUDA installed."""
    bins = tmp_path / "bin"
    bins.mkdir()
    monkeypatch.setenv("PATH", str(bins))
    monkeypatch.setattr(local_gpu, "PROC", tmp_path / "proc")
    monkeypatch.setattr(local_gpu, "_PLUGINS", ("json",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    jax.devices()  # so that what the tests say of platforms starts none
    platforms = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    _forget()
    yield tmp_path
    _forget()
    jax.config.update("jax_platforms", platforms)


def _forget():
    local_gpu.expected_gpu.cache_clear()
    local_gpu.driver_version.cache_clear()
    local_gpu._of_backend.cache_clear()


def add_proc(root, *models):
    (root / "proc").mkdir()
    (root / "proc/version").write_text(VERSION)
    for i, model in enumerate(models):
        folder = root / f"proc/gpus/0000:{i:02}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 0\n")


def add_smi(root):
    path = root / "bin/nvidia-smi"
    path.write_text(SMI)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_no_driver(machine):
    assert local_gpu.expected_gpu() is None
    assert local_gpu.driver_version() == "unknown"


def test_the_kernel_tells(machine):
    add_proc(machine, "NVIDIA H100 80GB HBM3", "NVIDIA L4")
    assert local_gpu.expected_gpu() == Gpu(kind="NVIDIA H100 80GB HBM3", driver="580.95.05")


def test_nvidia_smi_tells_where_the_kernel_does_not(machine):
    add_smi(machine)
    assert local_gpu.expected_gpu() == Gpu(kind="NVIDIA H200", driver="570.86.15")


def test_a_broken_nvidia_smi_is_no_gpu(machine):
    add_smi(machine)
    (machine / "bin/nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert local_gpu.expected_gpu() is None


@pytest.mark.parametrize(
    ("chosen", "kind"),
    [("1", "NVIDIA L4"), ("1,0", "NVIDIA L4"), ("", None), ("-1", None), ("7", None), ("GPU-8932f937", "NVIDIA H200")],
)
def test_only_visible_gpus_count(machine, monkeypatch, chosen, kind):
    add_smi(machine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = local_gpu.expected_gpu()
    assert (None if found is None else found.kind) == kind


@pytest.mark.parametrize(("platforms", "there"), [("cpu", False), ("cuda,cpu", True), ("gpu", True), ("tpu", False)])
def test_jax_platforms_counts(machine, platforms, there):
    add_smi(machine)
    jax.config.update("jax_platforms", platforms)
    assert (local_gpu.expected_gpu() is not None) == there


def test_jax_without_cuda_uses_no_gpu(machine, monkeypatch):
    add_smi(machine)
    monkeypatch.setattr(local_gpu, "_PLUGINS", ("jax_cuda_that_is_not_there",))
    assert local_gpu.expected_gpu() is None


def test_a_backend_that_runs_counts_for_itself(machine):
    add_smi(machine)
    assert local_gpu.local_gpu() is None


def test_the_devices_of_a_backend_tell_their_kind(machine, monkeypatch):
    class Device:
        device_kind = "NVIDIA H200 MIG 1g.18gb"

    add_proc(machine)
    monkeypatch.setattr(jax, "local_devices", lambda *, backend: [Device()] if backend == "cuda" else [])
    assert local_gpu.local_gpu() == Gpu(kind="NVIDIA H200 MIG 1g.18gb", driver="580.95.05")
