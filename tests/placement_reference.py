"""A DLRM trained on a handful of examples in float64 and plain NumPy: the trace that every placement must follow.

It reads no code of jrec's but the examples' own arrays: bags by loops, tensor trains by ``tt_reference``, row
optimizers by ``reference.step_row``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import reference
import tt_reference

Bag = list[tuple[int, float]]  # (row, weight) of each lookup


@dataclasses.dataclass(frozen=True)
class Example:
    """One example: dense features, a bag for each feature, and the label."""

    dense: np.ndarray
    bags: Mapping[str, Bag]
    label: float


@dataclasses.dataclass(frozen=True)
class Feature:
    """A categorical feature: its table, how its bag is pooled, and how many ids a bag has at most."""

    table: str
    pooling: str
    length: int = 1


class Reference:
    """The model and what it has learned.

    Args:
      features: By name, in the model's order.
      arrays: First values: ``bottom.0.kernel`` and so on for the MLPs, ``TABLE`` for rows, ``TABLE.core0`` and so on
        for the cores of a tensor train.
      optimizer: Row optimizer of ``jrec.ops``, of which only the class name and the hyperparameters are read.
      dense: The same for dense parameters.
      first_core_row: By table, the first row that lies in cores.
      max_global_norm: Of the gradients of all arrays together.

    Attributes:
      scales: What gradients were multiplied by to have at most that norm, by step.
    """

    def __init__(
        self,
        features: Mapping[str, Feature],
        arrays: Mapping[str, np.ndarray],
        optimizer: Any,
        dense: Any,
        first_core_row: Mapping[str, int],
        max_global_norm: float = np.inf,
    ):
        self.features, self.optimizer, self.dense_optimizer = features, optimizer, dense
        self.arrays = {name: np.array(array, np.float64) for name, array in arrays.items()}
        self.first_core_row, self.max_global_norm = first_core_row, max_global_norm
        self.scales: list[float] = []
        self.dim = next(a.shape[1] for n, a in arrays.items() if n == n.split(".")[0])
        self.slots: dict[str, dict[str, np.ndarray]] = {}
        for name, array in self.arrays.items():
            of = dense if self.is_dense(name) else optimizer
            flat = (len(array), array[0].size) if ".core" in name else array.shape  # a slice is a row of its slots
            shapes = {"element": flat, "row": array.shape[:1]}
            self.slots[name] = {s: np.full(shapes[kind], of.initial_slot(s)) for s, kind in of.slots.items()}
        self.steps = 0

    @staticmethod
    def is_dense(name: str) -> bool:
        """Whether an array belongs to an MLP."""
        return name.startswith(("bottom.", "top."))

    def cores(self, table: str) -> list[np.ndarray]:
        """The cores of a table, none where all its rows are whole."""
        return [self.arrays[f"{table}.core{k}"] for k in range(4) if f"{table}.core{k}" in self.arrays]

    def row(self, table: str, row: int) -> np.ndarray:
        """(dim,) float64."""
        if table in self.first_core_row and row >= self.first_core_row[table]:
            return tt_reference.row_of(self.cores(table), row - self.first_core_row[table])
        return self.arrays[table][row]

    def everything(self) -> dict[str, np.ndarray]:
        """All arrays by name, slots as ``NAME/SLOT``."""
        return self.arrays | {f"{name}/{slot}": array for name, of in self.slots.items() for slot, array in of.items()}

    def take(self, everything: Mapping[str, np.ndarray]) -> None:
        """Goes on from arrays and slots by the names of ``everything``, and from no others."""
        exact = {name: np.array(array, np.float64) for name, array in everything.items()}
        self.arrays = {name: array for name, array in exact.items() if "/" not in name}
        self.slots = {name: {} for name in self.arrays}
        for name, array in exact.items():
            if "/" in name:
                of, slot = name.rsplit("/", 1)
                self.slots[of][slot] = array

    def predict(self, examples: Sequence[Example]) -> np.ndarray:
        """(n,) logits."""
        return np.array([self._forward(example)[0] for example in examples])

    def step(self, examples: Sequence[Example]) -> float:
        """Trains on one batch; its mean log loss before."""
        gradients: dict[str, np.ndarray] = {n: np.zeros_like(a) for n, a in self.arrays.items()}
        touched: dict[str, set[int]] = {n: set() for n in self.arrays}
        loss = 0.0
        for example in examples:
            logit, backward = self._forward(example)
            loss += np.logaddexp(0, logit) - example.label * logit
            slope = (1 / (1 + np.exp(-logit)) - example.label) / len(examples)
            for name, gradient in backward(slope, gradients).items():
                self._add_bag(self.features[name], example.bags[name], gradient, gradients, touched)
        norm = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values()))
        self.scales.append(min(1.0, self.max_global_norm / norm))
        for name, gradient in gradients.items():
            gradient *= self.scales[-1]
            rows = [...] if self.is_dense(name) else sorted(touched[name])
            for row in rows:
                self._update(name, row, gradient[row])
        self.steps += 1
        return loss / len(examples)

    def _update(self, name: str, row: Any, gradient: np.ndarray) -> None:
        array, slots = self.arrays[name], self.slots[name]
        of = self.dense_optimizer if self.is_dense(name) else self.optimizer
        shape = np.shape(array[row])
        held = {s: np.reshape(slot[row], -1) if np.ndim(slot[row]) else slot[row] for s, slot in slots.items()}
        new, held = reference.step_row(
            of, np.reshape(array[row], -1), np.reshape(gradient, -1), held, step=self.steps, scale=1.0
        )
        array[row] = np.reshape(new, shape)
        for s, slot in slots.items():
            slot[row] = np.reshape(held[s], np.shape(slot[row]))

    def _forward(self, example: Example):
        """The logit, and what takes its gradient back to the features' vectors, adding those of MLPs."""
        pooled = {name: self._pool(of, example.bags[name]) for name, of in self.features.items()}
        bottom, back_bottom = self._mlp("bottom", example.dense.astype(np.float64), last=True)
        vectors = np.concatenate([bottom[None], *pooled.values()])
        ends = np.cumsum([len(of) for of in pooled.values()])[:-1]
        lower = np.tril_indices(len(vectors), -1)
        top, back_top = self._mlp("top", np.concatenate([bottom, (vectors @ vectors.T)[lower]]), last=False)

        def backward(slope: float, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            above = back_top(np.array([slope]), gradients)
            products = np.zeros((len(vectors), len(vectors)))
            products[lower] = above[len(bottom) :]
            of_vectors = (products + products.T) @ vectors
            back_bottom(above[: len(bottom)] + of_vectors[0], gradients)
            return dict(zip(pooled, np.split(of_vectors[1:], ends), strict=True))

        return float(top[0]), backward

    def _mlp(self, which: str, x: np.ndarray, *, last: bool):
        layers = sorted({int(n.split(".")[1]) for n in self.arrays if n.startswith(f"{which}.")})
        inputs, outputs = [], []
        for layer in layers:
            inputs.append(x)
            x = x @ self.arrays[f"{which}.{layer}.kernel"] + self.arrays[f"{which}.{layer}.bias"]
            if last or layer != layers[-1]:
                x = np.maximum(x, 0)
            outputs.append(x)

        def backward(slope: np.ndarray, gradients: dict[str, np.ndarray]) -> np.ndarray:
            for layer in reversed(layers):
                if last or layer != layers[-1]:
                    slope = slope * (outputs[layer] > 0)
                gradients[f"{which}.{layer}.kernel"] += np.outer(inputs[layer], slope)
                gradients[f"{which}.{layer}.bias"] += slope
                slope = self.arrays[f"{which}.{layer}.kernel"] @ slope
            return slope

        return x, backward

    def _pool(self, feature: Feature, bag: Bag) -> np.ndarray:
        """(vectors, dim): one, or one a position where nothing is pooled."""
        products = np.array([weight * self.row(feature.table, row) for row, weight in bag]).reshape(-1, self.dim)
        if feature.pooling == "none":
            return np.pad(products, ((0, feature.length - len(bag)), (0, 0)))
        if not bag:
            return np.zeros((1, self.dim))
        if feature.pooling == "max":
            return products.max(axis=0, keepdims=True)
        return products.sum(axis=0, keepdims=True) / (len(bag) if feature.pooling == "mean" else 1)

    def _add_bag(self, feature: Feature, bag: Bag, gradient: np.ndarray, gradients: Any, touched: Any) -> None:
        if not bag:
            return
        shares = gradient[: len(bag)]
        if feature.pooling != "none":
            shares = np.repeat(gradient / (len(bag) if feature.pooling == "mean" else 1), len(bag), axis=0)
        if feature.pooling == "max":
            products = np.array([weight * self.row(feature.table, row) for row, weight in bag])
            wins = products == products.max(axis=0)
            shares = wins / wins.sum(axis=0) * gradient
        first = self.first_core_row.get(feature.table)
        for (row, weight), share in zip(bag, shares, strict=True):
            if first is None or row < first:
                gradients[feature.table][row] += weight * share
                touched[feature.table].add(row)
                continue
            cores = self.cores(feature.table)
            names = [f"{feature.table}.core{k}" for k in range(len(cores))]
            tt_reference.add_core_gradients(cores, row - first, weight * share, [gradients[n] for n in names])
            digits = tt_reference.digits_of(row - first, tuple(len(core) for core in cores))
            for name, digit in zip(names, digits, strict=True):
                touched[name].add(digit)
