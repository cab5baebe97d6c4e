"""Which NVIDIA GPU this process computes on, or will, told without starting JAX's backend.

Starting the backend takes most of the GPU's memory, so whoever only wants to know the device's name asks here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import subprocess

import jax
from jax._src import xla_bridge

PROC = pathlib.Path("/proc/driver/nvidia")
_SMI_SECONDS = 20
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU under a driver.

    Attributes:
      kind: The device's name, as ``jax.Device.device_kind`` has it ("NVIDIA H100 80GB HBM3").
      driver: The version of NVIDIA's kernel driver ("580.95.05"), or "unknown".
    """

    kind: str
    driver: str


def local_gpu() -> Gpu | None:
    """The GPU that JAX runs on in this process, or would run on once started; None without one.

    Where JAX's backend runs, its device counts. Where it does not, it stays unstarted, and the driver's own list
    counts, as far as ``JAX_PLATFORMS``, ``CUDA_VISIBLE_DEVICES`` and the installed packages leave it to JAX.
    """
    return _of_backend() if xla_bridge.backends_are_initialized() else expected_gpu()


@functools.cache
def _of_backend() -> Gpu | None:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX runs on other platforms only
        return None
    return Gpu(kind=devices[0].device_kind, driver=driver_version()) if devices else None


@functools.cache
def expected_gpu() -> Gpu | None:
    """The GPU that JAX would start on here; None where it would find none. Starts nothing."""
    if not jax_may_use_cuda():
        return None
    kinds = _visible(_kinds())
    return Gpu(kind=kinds[0], driver=driver_version()) if kinds else None


def jax_may_use_cuda() -> bool:
    """Whether JAX's platforms include CUDA: it is installed and nobody asked for other platforms only."""
    asked = jax.config.jax_platforms
    if asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return False
    return any(importlib.util.find_spec(plugin) is not None for plugin in _PLUGINS)


@functools.cache
def driver_version() -> str:
    """The version of NVIDIA's kernel driver, or "unknown": from /proc, else from nvidia-smi."""
    try:
        # NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ...
        match = re.search(r"\s(\d+\.\d[\d.]*)\s", (PROC / "version").read_text())
    except OSError:
        match = None
    if match:
        return match[1]
    lines = _ask_smi("driver_version")
    return lines[0] if lines else "unknown"


def _kinds() -> list[str]:
    """Names of the host's GPUs, by their number."""
    names = []
    for path in sorted(PROC.glob("gpus/*/information")):
        try:
            name = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        names += [name[1]] if name else []
    return names or _ask_smi("name")


def _visible(kinds: list[str]) -> list[str]:
    """The host's GPUs that CUDA_VISIBLE_DEVICES leaves; all of them where it does not name them by number."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return kinds
    names = [name.strip() for name in chosen.split(",")]
    if names[0] in ("", "-1"):
        return []
    if not all(name.isdecimal() for name in names):
        return kinds
    return [kinds[int(name)] for name in names if int(name) < len(kinds)]


def _ask_smi(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
