"""PyTorch's DLRM as facebookresearch/dlrm trains it on a CPU: EmbeddingBag(sparse=True), torch's optimizers.

Two things are given to the peer beyond the original: the fused BCE-with-logits loss, and fused dense optimizers.
Runs in the peers' environment: ``python -m benchmarks.peers.torch_dlrm``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import workloads
from benchmarks.peers import protocol, torch_optimizers


class DLRM(torch.nn.Module):
    """Bottom MLP, one EmbeddingBag per table, dot products of all pairs or low-rank cross layers, top MLP."""

    def __init__(self, workload: workloads.Workload, seed: int) -> None:
        super().__init__()
        self.bags = torch.nn.ModuleList(
            embedding_bag(workloads.initial_table(workload, table, seed=seed)) for table in range(workload.num_tables)
        )
        self.bottom = _mlp(workloads.initial_mlp(workload, "bottom", seed=seed), last_relu=True)
        self.top = _mlp(workloads.initial_mlp(workload, "top", seed=seed), last_relu=False)
        crosses = workloads.initial_cross(workload, seed=seed)
        self.crosses = torch.nn.ParameterList(torch.from_numpy(array) for layer in crosses for array in layer)
        vectors = workload.num_tables + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1))

    def forward(self, dense: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
        """(batch,) logits of (batch, num_dense) features and per table (batch, length) ids."""
        bottom = self.bottom(dense)
        pooled = [bag(table_ids) for bag, table_ids in zip(self.bags, ids, strict=True)]
        if len(self.crosses):
            return self.top(self.crossed(torch.cat([bottom, *pooled], dim=1))).squeeze(1)
        vectors = torch.stack([bottom, *pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        interactions = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, interactions], dim=1)).squeeze(1)

    def crossed(self, x0: torch.Tensor) -> torch.Tensor:
        """(batch, width) through the cross layers."""
        x, parameters = x0, iter(self.crosses)
        for down, up, bias in zip(parameters, parameters, parameters, strict=True):
            x = torch.addcmul(x, x0, torch.addmm(bias, x @ down, up))
        return x


def embedding_bag(table: np.ndarray) -> torch.nn.EmbeddingBag:
    """A summing EmbeddingBag with sparse gradients over ``table``, which is not copied."""
    return torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(table), freeze=False, mode="sum", sparse=True)


def _mlp(layers: list[tuple[np.ndarray, np.ndarray]], *, last_relu: bool) -> torch.nn.Sequential:
    modules: list[torch.nn.Module] = []
    for position, (kernel, bias) in enumerate(layers):
        linear = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(kernel.T))
            linear.bias.copy_(torch.from_numpy(bias))
        modules.append(linear)
        if last_relu or position < len(layers) - 1:
            modules.append(torch.nn.ReLU())
    return torch.nn.Sequential(*modules)


def dlrm(_: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Sets up training of ``options["workload"]``; "step" trains on the next of ``options["batches"]`` batches."""
    workload = workloads.Workload.from_json(options["workload"])
    seed = options["seed"]
    model = DLRM(workload, seed)
    optimizers = torch_optimizers.build(
        options["optimizer"],
        dense=[*model.bottom.parameters(), *model.crosses.parameters(), *model.top.parameters()],
        tables=list(model.bags.parameters()),
        learning_rate=options["learning_rate"],
    )
    loss_function = torch.nn.BCEWithLogitsLoss()
    batches = itertools.cycle([_batch(workload, seed + i) for i in range(options["batches"])])
    last = torch.zeros(())

    def step() -> None:
        nonlocal last
        dense, labels, ids = next(batches)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = loss_function(model(dense, ids), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        last = loss.detach()

    return {"step": step, "loss": lambda: {"loss": last.numpy()}}


def predict(arrays: dict[str, np.ndarray], _: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Sets up predictions of a DLRM with dot interaction from its arrays: tables, "bottom0_weight", "dense", "ids"."""
    tables = [embedding_bag(arrays[name]) for name in sorted(arrays) if name.startswith("table")]
    mlps = {}
    for name, last_relu in (("bottom", True), ("top", False)):
        count = sum(key.startswith(name) and key.endswith("_weight") for key in arrays)
        layers = [(arrays[f"{name}{k}_weight"].T, arrays[f"{name}{k}_bias"]) for k in range(count)]
        mlps[name] = _mlp(layers, last_relu=last_relu)
    pairs = torch.tril_indices(len(tables) + 1, len(tables) + 1, offset=-1)
    dense = torch.from_numpy(arrays["dense"])
    ids = [torch.from_numpy(column.astype(np.int64))[:, None] for column in arrays["ids"].T]

    @torch.inference_mode()
    def logits() -> torch.Tensor:
        bottom = mlps["bottom"](dense)
        vectors = torch.stack([bottom, *(bag(i) for bag, i in zip(tables, ids, strict=True))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, pairs[0], pairs[1]]
        return mlps["top"](torch.cat([bottom, products], dim=1)).squeeze(1)

    return {"predict": lambda: logits() is None, "logits": lambda: {"logits": logits().numpy()}}


def _batch(workload: workloads.Workload, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    dense, labels = workloads.dense_batch(workload, seed=seed)
    ids = [torch.from_numpy(table_ids.astype(np.int64)) for table_ids in workloads.table_ids(workload, seed=seed)]
    return torch.from_numpy(dense), torch.from_numpy(labels), ids


if __name__ == "__main__":
    protocol.serve({"dlrm": dlrm, "predict": predict}, distributions=("torch",))
