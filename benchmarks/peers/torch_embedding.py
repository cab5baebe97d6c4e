"""Only embedding forward and backward + update in PyTorch: an EmbeddingBag(sparse=True) a table, torch's optimizers.

The case "torch" takes options ``workload`` (pooled), ``seed``, ``optimizer`` and ``learning_rate``, draws ids, tables
and output gradient from ``benchmarks.workloads``, and offers the actions of ``embedding_actions``. Outputs stay a list
of one tensor a table.

Runs in the peers' environment: ``python -m benchmarks.peers.torch_embedding``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import workloads
from benchmarks.peers import protocol, torch_optimizers
from benchmarks.peers.embedding_actions import actions
from benchmarks.peers.torch_dlrm import embedding_bag


def torch_sparse(_: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """EmbeddingBag(sparse=True) per table, torch's optimizer for sparse gradients. Pooled workloads only."""
    workload, seed = workloads.Workload.from_json(options["workload"]), options["seed"]
    if not workload.pooled:
        raise ValueError(f"workload {workload.name} is unpooled, which EmbeddingBag does not do")
    bags = [embedding_bag(workloads.initial_table(workload, t, seed=seed)) for t in range(workload.num_tables)]
    weights: list[torch.Tensor] = [bag.weight for bag in bags]
    (optimizer,) = torch_optimizers.build(
        options["optimizer"], dense=[], tables=weights, learning_rate=options["learning_rate"]
    )
    ids = [torch.from_numpy(i.astype(np.int64)) for i in workloads.table_ids(workload, seed=seed)]

    def forward() -> list[torch.Tensor]:
        return [bag(i) for bag, i in zip(bags, ids, strict=True)]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return actions(workload, seed, forward, update, weights)


if __name__ == "__main__":
    protocol.serve({"torch": torch_sparse}, distributions=("torch",))
