"""Kernels by time, from a trace of ``jax.profiler``.

    with jax.profiler.trace(folder):
        run()
    for kernel in gpu_profile.kernels(folder):
        print(kernel.name, kernel.count, kernel.seconds)

On a GPU these are the events of its streams, as CUPTI saw them: kernels, copies, fills. On a CPU, where the parser is
tested, they are XLA's operations.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax

_DEVICE = "/device:GPU:"
_STREAM = "Stream #"  # other lines of a device repeat the same time by module, operation or step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """All launches of one kernel in a trace: how many, and their seconds together."""

    name: str
    count: int
    seconds: float


def kernels(folder: pathlib.Path) -> list[Kernel]:
    """Kernels of the newest trace below ``folder``, by time; [] where it holds none."""
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return summed(_events(jax.profiler.ProfileData.from_file(str(traces[-1])))) if traces else []


def summed(events: Iterator[tuple[str, float]]) -> list[Kernel]:
    """(name, seconds) of single launches added up by name, the slowest first."""
    totals: dict[str, tuple[int, float]] = {}
    for name, seconds in events:
        count, total = totals.get(name, (0, 0.0))
        totals[name] = count + 1, total + seconds
    kernels = [Kernel(name=name, count=count, seconds=seconds) for name, (count, seconds) in totals.items()]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def trace_options() -> Any:
    """Options for ``jax.profiler.trace``: no Python calls, which would be most of the trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def _events(trace: Any) -> Iterator[tuple[str, float]]:
    with warnings.catch_warnings():
        # jaxlib's type of an event's statistics has no __module__, which Python deprecates at its first use.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield from _read_events(trace)


def _read_events(trace: Any) -> Iterator[tuple[str, float]]:
    planes = list(trace.planes)
    devices = [plane for plane in planes if plane.name.startswith(_DEVICE)]
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith(_STREAM):
                continue
            for event in line.events:
                # A host's line mixes XLA's operations with Python's calls and the thread pool's.
                if devices or (not event.name.startswith("end: ") and any(k == "hlo_op" for k, _ in event.stats)):
                    yield short_name(event.name), event.duration_ns / 1e9


def short_name(name: str) -> str:
    """A kernel's name without its C++ arguments, at most 120 characters: traces hold whole template instances."""
    name = re.sub(r"\s+", " ", name)
    return name if len(name) <= 120 else f"{name[:117]}..."
