"""Only embedding forward and backward + update: FBGEMM's table-batched embedding on the CPU.

The case "fbgemm" takes options ``workload``, ``seed``, ``optimizer`` and ``learning_rate``, draws ids, tables and
output gradient from ``benchmarks.workloads``, and offers the actions of ``embedding_actions``.

Runs in FBGEMM's environment: ``python -m benchmarks.peers.fbgemm_tbe``.
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
    return actions(workload, seed, lambda: [tables(flat, offsets)], lambda: None, weights)


if __name__ == "__main__":
    protocol.serve({"fbgemm": fbgemm}, distributions=("torch", "fbgemm_gpu-cpu"))
