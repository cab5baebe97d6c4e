"""FBGEMM's quantized table-batched embedding for inference on the CPU: INT8 and INT4 rows, float32 outputs.

The case "fbgemm" takes options ``workload``, ``seed`` and ``bits``, quantizes the tables of ``benchmarks.workloads`` by
row, to a scale and a bias in float16 as FBGEMM keeps them, and offers the actions

    forward    pooled outputs of the batch
    outputs    -> {"outputs": (batch, tables * dim)}

Runs in FBGEMM's environment: ``python -m benchmarks.peers.fbgemm_int``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import workloads
from benchmarks.peers import protocol


def fbgemm(_: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """IntNBitTableBatchedEmbeddingBagsCodegen on the CPU."""
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    workload, seed, bits = workloads.Workload.from_json(options["workload"]), options["seed"], options["bits"]
    kind = {8: SparseType.INT8, 4: SparseType.INT4}[bits]
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(
        [(f"t{t}", rows, workload.dim, kind, EmbeddingLocation.HOST) for t, rows in enumerate(workload.rows)],
        device="cpu",
        output_dtype=SparseType.FP32,
        bounds_check_mode=BoundsCheckMode.NONE,  # jrec's side is given valid ids, too
    )
    tables.initialize_weights()
    for number, (stored, header) in enumerate(tables.split_embedding_weights()):
        values, scale, bias = _quantized(workloads.initial_table(workload, number, seed=seed), bits)
        stored[:, : values.shape[1]].copy_(torch.from_numpy(values))
        header.copy_(torch.from_numpy(np.stack([scale, bias], axis=1).view(np.uint8)))
    ids = workloads.table_ids(workload, seed=seed)
    flat = torch.from_numpy(np.concatenate([i.ravel() for i in ids]).astype(np.int32))
    lengths = np.repeat(np.array(workload.ids_per_bag, np.int32), workload.batch)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return {
        "forward": lambda: tables(flat, offsets) is None,
        "outputs": lambda: {"outputs": tables(flat, offsets).numpy()},
    }


def _quantized(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, most = rows.min(axis=1), 2**bits - 1
    scale, bias = ((rows.max(axis=1) - low) / most).astype(np.float16), low.astype(np.float16)
    steps = np.maximum(scale.astype(np.float32), 1e-8)[:, None]
    values = np.clip(np.rint((rows - bias.astype(np.float32)[:, None]) / steps), 0, most).astype(np.uint8)
    if bits == 4:
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    return values, scale, bias


if __name__ == "__main__":
    protocol.serve({"fbgemm": fbgemm}, distributions=("torch", "fbgemm_gpu-cpu"))
