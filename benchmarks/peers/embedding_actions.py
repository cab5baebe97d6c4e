"""The actions of peers that measure only embeddings, whichever library computes them.

- ``forward``: outputs of the batch
- ``backward``: gradient of one retained forward, and the optimizer's update of the tables
- ``step``: a forward and a backward
- ``outputs``: -> {"outputs": as ``workloads.output_gradient`` is laid out}
- ``heads``: -> {"head000": (up to 64, dim), ...}, the first rows of every table
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import workloads

HEAD_ROWS = 64


def actions(
    workload: workloads.Workload,
    seed: int,
    forward: Callable[[], Sequence[torch.Tensor]],
    update: Callable[[], None],
    weights: Sequence[torch.Tensor],
) -> dict[str, Callable[[], Any]]:
    """Makes the actions.

    Args:
      workload: Its output gradient is drawn with ``seed``.
      seed: The gradient's seed.
      forward: Gives the outputs as the library does: one tensor with all tables side by side, or one (batch, dim) a
        table. They are never joined inside a timed action, since jrec's are not either.
      update: Applies the gradients that the backward pass left; does nothing where that pass updates tables itself.
      weights: The tables, (rows, dim) each.
    """
    whole = torch.from_numpy(workloads.output_gradient(workload, seed=seed))
    retained: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []

    def run_forward() -> None:
        with torch.no_grad():
            forward()

    def gradients_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not gradients:
            widths = [output.shape[1] for output in outputs]
            gradients.extend(piece.contiguous() for piece in whole.split(widths, dim=1))
        return gradients

    def backward() -> None:
        if not retained:
            retained.extend(forward())
        torch.autograd.backward(retained, gradients_of(retained), retain_graph=True)
        update()

    def step() -> None:
        outputs = list(forward())
        torch.autograd.backward(outputs, gradients_of(outputs))
        update()

    return {
        "forward": run_forward,
        "backward": backward,
        "step": step,
        "outputs": lambda: {"outputs": torch.cat(list(forward()), dim=1).detach().numpy()},
        "heads": lambda: {f"head{t:03d}": w.detach()[:HEAD_ROWS].numpy() for t, w in enumerate(weights)},
    }
