"""What a GPU's results are worth knowing beside: the driver, clocks, memory, and which packages are there."""

from __future__ import annotations

import functools
import importlib.util
import subprocess

QUERY = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit")
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "numpy", "numba", "scipy", "hypothesis", "pytest", "xdist", "pytest_timeout",
    "rich", "torch", "triton", "fbgemm_gpu", "grain", "array_record",
)  # fmt: skip


@functools.cache
def smi() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; {} where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(", ") if done.stdout else []
    return dict(zip(QUERY, values, strict=False))


def driver() -> str:
    """The driver's version, or "none"."""
    return smi().get("driver_version", "none")


def missing_packages() -> list[str]:
    """Which of ``PACKAGES`` cannot be imported here."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]
