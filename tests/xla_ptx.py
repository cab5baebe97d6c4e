"""The PTX of kernels that XLA itself makes, which no option of XLA's dumps when it compiles without a device."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import re
import shlex
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def captured() -> Iterator[tuple[dict[str, object], dict[str, str]]]:
    """Yields compiler options, and a dict that afterwards holds the PTX of all kernels compiled with them, by name.

    XLA runs the ``ptxas`` of the CUDA folder that an option names: here one that keeps what it is given.
    """
    kernels: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        root, kept = pathlib.Path(folder) / "cuda", pathlib.Path(folder) / "kept"
        (root / "bin").mkdir(parents=True)
        kept.mkdir()
        cuda = _cuda_folder()
        for path in cuda.iterdir():
            if path.name != "bin":
                (root / path.name).symlink_to(path)
        for path in (cuda / "bin").iterdir():
            if path.name != "ptxas":
                (root / "bin" / path.name).symlink_to(path)
        wrapper = root / "bin" / "ptxas"
        real = shlex.quote(str(cuda / "bin" / "ptxas"))
        wrapper.write_text(f'#!/bin/sh\n[ -f "$1" ] && cp "$1" {shlex.quote(str(kept))}/$$\nexec {real} "$@"\n')
        wrapper.chmod(0o755)
        yield {"xla_gpu_cuda_data_dir": str(root)}, kernels
        for path in sorted(kept.iterdir(), key=lambda p: p.stat().st_mtime):
            for part in path.read_text().split(".visible .entry ")[1:]:
                kernels[part.split("(", 1)[0]] = part
    if not kernels:
        raise RuntimeError("XLA ran no ptxas: it took its kernels from a cache, or links them by a library now")


def float_atomics(ptx: str) -> list[str]:
    """Atomic additions of floats: their order, and so the last bits of sums, differs from run to run."""
    return re.findall(r"\b(?:atom|red)\.[\w.:]*\b(?:b?f16|f32|f64|bf16)\w*[\w.:]*", ptx)


def compare_and_swap(ptx: str) -> list[str]:
    """Compare-and-swap instructions: what an atomic becomes, in a loop, where XLA finds no instruction for it."""
    return re.findall(r"\batom\.[\w.:]*cas[\w.:]*", ptx)


def _cuda_folder() -> pathlib.Path:
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else []:
        for found in pathlib.Path(place).glob("cu*/bin/ptxas"):
            return found.parent.parent
    raise RuntimeError("no ptxas in an nvidia package: install jax[cuda13], as scripts/setup.sh does for .venv-aot")
