"""tensorly-torch's ``FactorizedEmbedding`` (blocktt) on given cores. Runs in the peers' environment:
``python -m benchmarks.peers.tltorch_tt``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tltorch import FactorizedEmbedding

from benchmarks.peers import protocol


def blocktt(arrays: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Sets up cores "core0", .. of (m, R, n, R'), "ids" (lookups,) and "gradient" (lookups, dim)."""
    del options
    cores = [torch.from_numpy(np.array(arrays[f"core{k}"])) for k in range(sum("core" in name for name in arrays))]
    ids, gradient = torch.from_numpy(arrays["ids"].astype(np.int64)), torch.from_numpy(np.array(arrays["gradient"]))
    rows, dims = tuple(core.shape[0] for core in cores), tuple(core.shape[2] for core in cores)
    layer = FactorizedEmbedding(
        int(np.prod(rows)),
        int(np.prod(dims)),
        auto_tensorize=False,
        tensorized_num_embeddings=rows,
        tensorized_embedding_dim=dims,
        factorization="blocktt",
        rank=(1, *(core.shape[3] for core in cores)),
    )
    factors = list(layer.weight.factors)
    with torch.no_grad():
        for factor, core in zip(factors, cores, strict=True):
            factor.copy_(core.transpose(0, 1))  # theirs is (R, m, n, R')

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return layer(ids)

    def forward_backward() -> tuple[torch.Tensor, ...]:
        for factor in factors:
            factor.grad = None
        out = layer(ids)
        out.backward(gradient)
        return out, *(factor.grad.transpose(0, 1) for factor in factors)

    def results() -> dict[str, np.ndarray]:
        out, *gradients = forward_backward()
        named = {f"core{k}": g.contiguous().numpy() for k, g in enumerate(gradients)}
        return {"out": out.detach().numpy(), **named}

    return {"forward": forward, "forward and backward": forward_backward, "results": results}


if __name__ == "__main__":
    protocol.serve({"blocktt": blocktt}, distributions=("torch", "tensorly", "tensorly-torch"))
