"""What a run ran on: versions of the libraries that matter, the devices, and the user's cache folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess

PACKAGES = ("jrec", "jax", "jaxlib", "flax", "optax", "numpy", "numba", "grain")
CACHE_VARIABLE = "JREC_CACHE"


def cache_folder() -> pathlib.Path:
    """$JREC_CACHE, else $XDG_CACHE_HOME/jrec, else ~/.cache/jrec."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return pathlib.Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(chosen) / "jrec"
    return pathlib.Path("~/.cache/jrec").expanduser()


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str:
    """The installed version of a package; "not installed" where there is none, as of jrec run from a checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Installed versions by package, and Python's; imports nothing."""
    return {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}


def devices() -> dict[str, str | int]:
    """The platform, kind and number of JAX's devices, and the host's CPU threads; starts JAX's backend."""
    import jax

    all_devices = jax.devices()
    return {
        "platform": all_devices[0].platform,
        "kind": all_devices[0].device_kind,
        "count": len(all_devices),
        "processes": jax.process_count(),
        "host_cpu_threads": cores(),
    }


def commit() -> str:
    """The commit of this jrec, 12 digits: of a clone, "+" where files differ from it, or of the URL that pip took.

    "" where nothing says it.
    """
    folder = pathlib.Path(__file__).resolve().parents[1]
    if (folder / ".git").exists():
        command = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [*command, "--abbrev=12", "--dirty=+"], capture_output=True, text=True, check=True, timeout=10
            )
            return done.stdout.strip()
        return ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        url = importlib.metadata.distribution("jrec").read_text("direct_url.json")
        return str(json.loads(url or "{}")["vcs_info"]["commit_id"])[:12]
    return ""


def summary() -> str:
    """One line for people: "jrec 0.1.0 (commit 8d1f0c2ab34e), jax 0.11.2, Python 3.12.3, 2 x cpu (cpu)"."""
    installed, device = versions(), devices()
    known = f" (commit {made})" if (made := commit()) else ""
    return (
        f"jrec {installed['jrec']}{known}, jax {installed['jax']}, Python {installed['python']},"
        f" {device['count']} x {device['platform']} ({device['kind']})"
    )
