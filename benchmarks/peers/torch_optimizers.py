"""Torch's optimizers for dense parameters and for tables with sparse gradients, with one learning rate for both."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch

INITIAL_ACCUMULATOR = 0.1
EPSILON = 1e-10

# The default too, but left unsaid torch warns at the first sparse update.
torch.sparse.check_sparse_tensor_invariants.disable()


class RowWiseAdagrad:
    """Adagrad with one accumulator a row, the mean square of its gradient, for sparse gradients; torch has none."""

    def __init__(self, tables: list[torch.Tensor], learning_rate: float) -> None:
        self._tables = tables
        self._learning_rate = learning_rate
        self._sums = [torch.full((len(table),), INITIAL_ACCUMULATOR) for table in tables]

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        for table in self._tables:
            table.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Updates the rows that have gradients."""
        for table, sums in zip(self._tables, self._sums, strict=True):
            if table.grad is None:
                continue
            gradient = table.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            sums.index_add_(0, rows, values.square().mean(dim=1))
            scale = -self._learning_rate / (sums[rows].sqrt() + EPSILON)
            table.index_add_(0, rows, values * scale[:, None])


def build(name: str, *, dense: list[torch.Tensor], tables: list[torch.Tensor], learning_rate: float) -> tuple[Any, ...]:
    """Optimizers for dense parameters and tables.

    Raises:
      ValueError: on a name that is none of sgd, adagrad, rowwise_adagrad, adam.
    """
    adagrad = {"lr": learning_rate, "initial_accumulator_value": INITIAL_ACCUMULATOR, "eps": EPSILON}
    if name == "sgd":
        of_dense = torch.optim.SGD(dense, lr=learning_rate, fused=True) if dense else None
        of_tables: Any = torch.optim.SGD(tables, lr=learning_rate)
    elif name in ("adagrad", "rowwise_adagrad"):
        of_dense = torch.optim.Adagrad(dense, fused=True, **adagrad) if dense else None
        row_wise = name == "rowwise_adagrad"
        of_tables = RowWiseAdagrad(tables, learning_rate) if row_wise else torch.optim.Adagrad(tables, **adagrad)
    elif name == "adam":
        of_dense = torch.optim.Adam(dense, lr=learning_rate, fused=True) if dense else None
        of_tables = torch.optim.SparseAdam(tables, lr=learning_rate)
    else:
        raise ValueError(f"optimizer {name!r} is none of sgd, adagrad, rowwise_adagrad, adam")
    return tuple(optimizer for optimizer in (of_dense, of_tables) if optimizer is not None)
