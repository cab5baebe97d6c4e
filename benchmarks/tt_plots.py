"""Figures of the tensor-train benchmarks, as PNG."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any


def bars(folder: pathlib.Path, name: str, times: Mapping[str, Mapping[str, float]], title: str) -> pathlib.Path:
    """Milliseconds of the variants (inner keys) of every group (outer keys), side by side."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(2 + 2.2 * len(times), 4))
    variants = list(next(iter(times.values())))
    width = 0.8 / len(variants)
    for i, variant in enumerate(variants):
        places = [group + (i - (len(variants) - 1) / 2) * width for group in range(len(times))]
        axes.bar(places, [group[variant] for group in times.values()], width=width, label=variant)
    axes.set_xticks(range(len(times)), list(times))
    axes.set_ylabel("ms")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    return _saved(plt, figure, folder, name)


def lines(
    folder: pathlib.Path,
    name: str,
    series: Mapping[str, list[tuple[float, float]]],
    *,
    x: str,
    y: str,
    logarithmic: bool,
) -> pathlib.Path:
    """One line of (x, y) points each."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(5, 4))
    for label, points in series.items():
        axes.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=label)
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(fontsize=7)
    return _saved(plt, figure, folder, name)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _saved(plt: Any, figure: Any, folder: pathlib.Path, name: str) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return path
