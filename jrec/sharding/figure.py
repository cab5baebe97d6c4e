"""OPER's Figure 10: memory, lookups and communication of every strategy, greatest, mean and least."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

import numpy as np

from jrec.outputs import new_file
from jrec.sharding.cost import Cost


def draw_balance(costs: Mapping[str, Cost], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Writes Figure 10 as an image of the format that the path's ending names.

    Args:
      costs: The costs, by strategy.
      path: Such as ``balance.svg`` or ``.png``.
      title: Above the figure.
    """
    from matplotlib.figure import Figure

    panels = (
        ("memory of a device (GB)", lambda c: c.memory[c.keepers] / 1e9),
        ("lookups of a device (ms a step)", lambda c: c.lookup[c.keepers] * 1e3),
        ("fetched over a link (MB a step)", lambda c: c.remote_bytes / 1e6 if c.remote_bytes.size else np.zeros(1)),
    )
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    place = np.arange(len(costs))
    for axis, (label, measure) in zip(axes, panels, strict=True):
        values = [measure(cost) for cost in costs.values()]
        for number, (name, reduce) in enumerate((("greatest", np.max), ("mean", np.mean), ("least", np.min))):
            shade = ("#1b4965", "#5fa8d3", "#cae9ff")[number]
            axis.bar(place + 0.27 * (number - 1), [reduce(v) for v in values], 0.27, label=name, color=shade)
        axis.set_xticks(place, list(costs), rotation=35, ha="right")
        axis.set_ylabel(label)
    axes[0].legend(frameon=False)
    if title:
        figure.suptitle(title)
    with new_file(path) as partial:
        figure.savefig(partial, format=pathlib.Path(path).suffix[1:] or "png")
