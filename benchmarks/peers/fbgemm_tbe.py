"""Only embedding forward and backward + update: FBGEMM's table-batched embedding, and torch's EmbeddingBag(sparse).

Both cases take options ``workload``, ``seed``, ``optimizer`` and ``learning_rate``, draw ids, tables and output
gradient from ``benchmarks.workloads``, and offer the actions

    forward    pooled outputs of the batch
    backward   gradient of one retained forward, and the optimizer's update of the tables
    step       a forward and a backward
    outputs    -> {"outputs": as ``workloads.output_gradient`` is laid out}
    heads      -> {"head000": (up to 64, dim), ...}, the first rows of every table

Runs in the peers' environment: ``python -m benchmarks.peers.fbgemm_tbe``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import workloads
from benchmarks.peers import protocol, torch_optimizers
from benchmarks.peers.torch_dlrm import embedding_bag

HEAD_ROWS = 64


def fbgemm(_: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """SplitTableBatchedEmbeddingBagsCodegen on the CPU, its optimizer fused into the backward pass."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    optimizers = {
        "sgd": EmbOptimType.EXACT_SGD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }
    workload, seed = workloads.Workload.from_json(options["workload"]), options["seed"]
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, workload.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in workload.rows],
        optimizer=optimizers[options["optimizer"]],
        learning_rate=options["learning_rate"],
        eps=torch_optimizers.EPSILON,
        pooling_mode=PoolingMode.SUM if workload.pooled else PoolingMode.NONE,
        bounds_check_mode=BoundsCheckMode.NONE,  # jrec checks ids in the loader
    )
    weights = tables.split_embedding_weights()
    for table, weight in enumerate(weights):
        weight.copy_(torch.from_numpy(workloads.initial_table(workload, table, seed=seed)))
    for state in tables.split_optimizer_states():
        for slot in state:
            slot.fill_(torch_optimizers.INITIAL_ACCUMULATOR)
    ids = workloads.table_ids(workload, seed=seed)
    flat = torch.from_numpy(np.concatenate([i.ravel() for i in ids]))
    lengths = np.repeat(np.array(workload.ids_per_bag, np.int32), workload.batch)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return _actions(workload, seed, lambda: tables(flat, offsets), lambda: None, weights)


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

    def forward() -> torch.Tensor:
        return torch.cat([bag(i) for bag, i in zip(bags, ids, strict=True)], dim=1)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _actions(workload, seed, forward, update, weights)


def _actions(
    workload: workloads.Workload,
    seed: int,
    forward: Callable[[], torch.Tensor],
    update: Callable[[], None],
    weights: list[torch.Tensor],
) -> dict[str, Callable[[], Any]]:
    gradient = torch.from_numpy(workloads.output_gradient(workload, seed=seed))
    retained: list[torch.Tensor] = []

    def run_forward() -> None:
        with torch.no_grad():
            forward()

    def backward() -> None:
        if not retained:
            retained.append(forward())
        retained[0].backward(gradient, retain_graph=True)
        update()

    def step() -> None:
        forward().backward(gradient)
        update()

    return {
        "forward": run_forward,
        "backward": backward,
        "step": step,
        "outputs": lambda: {"outputs": forward().detach().numpy()},
        "heads": lambda: {f"head{t:03d}": w.detach()[:HEAD_ROWS].numpy() for t, w in enumerate(weights)},
    }


if __name__ == "__main__":
    protocol.serve(
        {"fbgemm": fbgemm, "torch": torch_sparse},
        distributions=("torch", "fbgemm_gpu-cpu"),
    )
