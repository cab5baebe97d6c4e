"""TT-Rec's algorithm in PyTorch: a batched GEMM over all lookups for each core, forward and backward.

As in TT-Rec's Algorithms 1 and 2 for three cores, except that the products of the first two cores are kept from the
forward pass in place of being made again. Runs in the peers' environment: ``python -m benchmarks.peers.torch_tt``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.peers import protocol


def naive(arrays: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Sets up cores "core0" to "core2" of (m, R, n, R'), "ids" (lookups,) and "gradient" (lookups, dim)."""
    del options
    first, second, third = (torch.from_numpy(np.array(arrays[f"core{k}"])) for k in range(3))
    gradient = torch.from_numpy(np.array(arrays["gradient"]))
    ids = torch.from_numpy(arrays["ids"].astype(np.int64))
    (m1, _, n1, r1), (m2, _, n2, r2), (m3, _, n3, _) = first.shape, second.shape, third.shape
    first, second, third = first.view(m1, n1, r1), second.view(m2, r1, n2 * r2), third.view(m3, r2, n3)
    lookups = len(ids)

    def forward() -> tuple[torch.Tensor, ...]:
        last, rest = ids % m3, ids // m3
        middle, head = rest % m2, rest // m2
        a, b, c = first[head], second[middle], third[last]
        prefix = torch.bmm(a, b)
        out = torch.bmm(prefix.view(lookups, n1 * n2, r2), c)
        return out.view(lookups, -1), prefix, a, b, c, head, middle, last

    def forward_backward() -> tuple[torch.Tensor, ...]:
        out, prefix, a, b, c, head, middle, last = forward()
        slope = gradient.view(lookups, n1 * n2, n3)
        of_third = torch.bmm(prefix.view(lookups, n1 * n2, r2).transpose(1, 2), slope)
        of_prefix = torch.bmm(slope, c.transpose(1, 2)).view(lookups, n1, n2 * r2)
        of_second = torch.bmm(a.transpose(1, 2), of_prefix)
        of_first = torch.bmm(of_prefix, b.transpose(1, 2))
        pairs = ((first, head, of_first), (second, middle, of_second), (third, last, of_third))
        return out, *(torch.zeros_like(core).index_add_(0, digit, slices) for core, digit, slices in pairs)

    def results() -> dict[str, np.ndarray]:
        return dict(zip(("out", "core0", "core1", "core2"), (x.numpy() for x in forward_backward()), strict=True))

    return {"forward": forward, "forward and backward": forward_backward, "results": results}


if __name__ == "__main__":
    protocol.serve({"naive": naive}, distributions=("torch",))
