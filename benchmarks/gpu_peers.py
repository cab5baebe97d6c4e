"""Peers of the GPU benchmark in the same process: PyTorch's EmbeddingBag, and FBGEMM's table-batched embedding.

Both are timed by CUDA events around many calls. They take the same ids; sums are not compared, since their tables are
filled otherwise.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import gpu_cases, workloads
from benchmarks.gpu_cases import FORWARD, Case
from benchmarks.gpu_timing import Timing

BATCHES = 3
SAMPLES = 7
BACKWARD = "forward, backward and update"


def missing(name: str) -> str | None:
    """Why the peer "torch" or "fbgemm" cannot run here, or None where it can."""
    package = {"torch": "torch", "fbgemm": "fbgemm_gpu"}[name]
    for needed in dict.fromkeys(("torch", package)):
        if importlib.util.find_spec(needed) is None:
            return f"{needed} is not installed"
    import torch  # pyright: ignore[reportMissingImports]

    return None if torch.cuda.is_available() else "torch sees no GPU"


def runs(name: str, case: Case) -> Iterator[tuple[str, Timing]]:
    """(metric, timing) of a peer's passes over a case."""
    import torch  # pyright: ignore[reportMissingImports]

    make = {"torch": _torch, "fbgemm": _fbgemm}[name]
    try:
        for metric, call in make(case):
            yield metric, _timed(call)
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # else torch keeps the memory that the next case's tables need


def _timed(call: Callable[[], Any]) -> Timing:
    import torch  # pyright: ignore[reportMissingImports]

    def dispatch(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    dispatch(3)
    calls = int(max(5, min(200, 0.02 / max(1e-6, dispatch(3)))))
    samples = sorted(dispatch(calls) for _ in range(SAMPLES))
    median = samples[SAMPLES // 2]
    spread = (samples[-1] - samples[0]) / median
    return Timing(seconds=median, spread=spread, calls=calls, dispatches=SAMPLES)


def _torch(case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One EmbeddingBag a stack; its backward pass is sparse, and followed by Adagrad, SparseAdam or SGD."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype = getattr(torch, case.dtype)
    bags = [
        torch.nn.EmbeddingBag(sum(s.rows), s.dim, mode="sum", sparse=True, device="cuda", dtype=dtype)
        for s in case.stacks
    ]
    offsets = [gpu_cases.stacked_offsets(s) for s in case.stacks]
    starts = [None if o is None else torch.as_tensor(o[:-1], device="cuda") for o in offsets]
    batches = itertools.cycle(
        [
            [torch.as_tensor(gpu_cases.stacked_ids(s, seed=seed), device="cuda") for s in case.stacks]
            for seed in range(BATCHES)
        ]
    )

    def outputs() -> list[Any]:
        return [bag(ids, start) for bag, ids, start in zip(bags, next(batches), starts, strict=True)]

    def forward() -> Any:
        with torch.no_grad():
            return outputs()

    yield FORWARD, forward
    if case.metrics == (FORWARD,):
        return
    parameters = [p for bag in bags for p in bag.parameters()]
    kind = {"Adam": torch.optim.SparseAdam, "SGD": torch.optim.SGD}.get(
        type(case.optimizer).__name__, torch.optim.Adagrad
    )
    optimizer = kind(parameters, lr=0.01)
    gradients = [torch.randn_like(out) for out in forward()]

    def step() -> None:
        made = outputs()
        optimizer.zero_grad()
        torch.autograd.backward(made, gradients)
        optimizer.step()

    yield BACKWARD, step


def _fbgemm(case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One SplitTableBatchedEmbeddingBags for all tables, whatever their dims; its backward pass updates the tables."""
    import torch  # pyright: ignore[reportMissingImports]
    from fbgemm_gpu import split_embedding_configs as configs  # pyright: ignore[reportMissingImports]
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as common  # pyright: ignore[reportMissingImports]
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training  # pyright: ignore[reportMissingImports]

    tables = [(rows, s.dim) for s in case.stacks for rows in s.rows]
    optimizers = {"Adam": "ADAM", "SGD": "EXACT_SGD", "Adagrad": "EXACT_ADAGRAD"}
    kind = optimizers.get(type(case.optimizer).__name__, "EXACT_ROWWISE_ADAGRAD")
    precision = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}[case.dtype]
    module = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, common.EmbeddingLocation.DEVICE, training.ComputeDevice.CUDA) for rows, dim in tables],
        optimizer=getattr(configs.EmbOptimType, kind),
        weights_precision=getattr(configs.SparseType, precision),
        output_dtype=configs.SparseType.FP32,
        learning_rate=0.01,
    ).cuda()
    batches = itertools.cycle([_fbgemm_batch(case, seed) for seed in range(BATCHES)])

    def forward() -> Any:
        with torch.no_grad():
            return module(*next(batches))

    yield FORWARD, forward
    if case.metrics == (FORWARD,):
        return
    gradient = torch.randn_like(forward())
    yield BACKWARD, lambda: module(*next(batches)).backward(gradient)


def _fbgemm_batch(case: Case, seed: int) -> tuple[Any, Any]:
    """(ids, offsets), int64 on the GPU: table-major, each table's ids its own rows."""
    import torch  # pyright: ignore[reportMissingImports]

    ids, lengths = fbgemm_ids(case, seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return torch.as_tensor(ids.astype(np.int64), device="cuda"), torch.as_tensor(offsets, device="cuda")


def fbgemm_ids(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashed ids of all tables, one after the other, and every bag's length."""
    ids, lengths = [], []
    for stack in case.stacks:
        for table, rows in zip(workloads.table_ids(stack, seed=seed), stack.rows, strict=True):
            ids.append(workloads.hashed_ids(table, rows).reshape(-1))
            lengths.append(np.full(len(table), table.shape[1]))
    return np.concatenate(ids), np.concatenate(lengths)
