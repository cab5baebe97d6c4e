"""Tensor-train tables in plain NumPy and float64, one lookup at a time."""

from __future__ import annotations

import numpy as np


def digits_of(row: int, row_factors: tuple[int, ...]) -> list[int]:
    """One slice number a core, from Python integers."""
    digits = []
    for factor in reversed(row_factors):
        row, digit = divmod(row, factor)
        digits.append(digit)
    assert row == 0
    return digits[::-1]


def row_of(cores: list[np.ndarray], row: int) -> np.ndarray:
    """(dim,) float64."""
    product = np.ones((1, 1))
    for core, digit in zip(cores, digits_of(row, tuple(len(c) for c in cores)), strict=True):
        left, n, right = core[digit].shape
        product = (product @ core[digit].astype(np.float64).reshape(left, n * right)).reshape(-1, right)
    return product[:, 0]


def dense(cores: list[np.ndarray], rows: int) -> np.ndarray:
    """(rows, dim) float64, by one einsum over all cores at once."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    bonds = [next(letters) for _ in range(len(cores) + 1)]
    terms, row_axes, dim_axes = [], [], []
    for k in range(len(cores)):
        row_axes.append(next(letters))
        dim_axes.append(next(letters))
        terms.append(row_axes[-1] + bonds[k] + dim_axes[-1] + bonds[k + 1])
    equation = f"{','.join(terms)}->{''.join(row_axes + dim_axes)}"
    whole = np.einsum(equation, *[c.astype(np.float64) for c in cores], optimize=True)
    return whole.reshape(np.prod([len(c) for c in cores]), -1)[:rows]


def add_core_gradients(cores: list[np.ndarray], row: int, slope: np.ndarray, sums: list[np.ndarray]) -> None:
    """Adds one row's gradient, (dim,), to those of the slices it is the product of."""
    digits = digits_of(row, tuple(len(c) for c in cores))
    slices = [core[digit].astype(np.float64) for core, digit in zip(cores, digits, strict=True)]
    for k, (left_rank, n, right_rank) in enumerate(s.shape for s in slices):
        left = np.ones((1, 1))
        for s in slices[:k]:
            left = (left @ s.reshape(s.shape[0], -1)).reshape(-1, s.shape[2])
        right = np.ones((1, 1))
        for s in reversed(slices[k + 1 :]):
            right = (s.reshape(-1, s.shape[2]) @ right).reshape(s.shape[0], -1)
        split = slope.reshape(left.shape[0], n, right.shape[1])
        sums[k][digits[k]] += np.einsum("ar,anb,sb->rns", left, split, right).reshape(left_rank, n, right_rank)


def bags(
    cores: list[np.ndarray], lookups: list[list[tuple[int, int, float]]], gradients: np.ndarray, combiner: str
) -> tuple[np.ndarray, list[np.ndarray], dict[int, float]]:
    """Outputs, core gradients, and weight gradients by flat position, of ``reference.bags_of`` lookups; float64."""
    out = np.zeros((len(lookups), gradients.shape[1]))
    sums = [np.zeros(core.shape) for core in cores]
    of_weights = {}
    for b, bag in enumerate(lookups):
        norm = {"mean": len(bag), "sqrtn": np.sqrt(len(bag))}.get(combiner, 1.0)
        rows = np.array([row_of(cores, row) for _, row, _ in bag]).reshape(-1, gradients.shape[1])
        products = np.array([weight for *_, weight in bag]).reshape(-1, 1) * rows / norm
        shares = np.ones_like(rows)  # of the bag's gradient, by element
        if combiner == "max" and bag:
            shares = products == products.max(axis=0)
            shares = shares / shares.sum(axis=0)
        out[b] = np.sum(shares * products, axis=0)
        for (position, row, weight), values, share in zip(bag, rows, shares, strict=True):
            slope = share * gradients[b].astype(np.float64) / norm
            add_core_gradients(cores, row, weight * slope, sums)
            of_weights[position] = float(slope @ values)
    return out, sums, of_weights
