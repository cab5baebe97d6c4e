"""What kernels must compute, in plain NumPy and float64, and how far float32 may stray from it."""

from __future__ import annotations

from typing import Any

import numpy as np

HALF_UNIT = 2.0**-24  # the largest relative error of one float32 rounding
_STORED_UNIT = {
    "float32": 0.0,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
}  # relative: at most one unit in the last place
_TINY = {"float32": 1e-7, "bfloat16": 1e-7, "float16": 2.0**-24}

Slots = dict[str, np.ndarray]


def segment_sums(
    source: np.ndarray, indices: np.ndarray, offsets: np.ndarray | None, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sums per segment as ``jrec.ops.gather_reduce`` defines them, and how far a float32 sum in any order may be off.

    The bound comes from error analysis: n terms, added in whatever order, are off by at most n roundings of the sum of
    their magnitudes.

    Returns:
      (segments, dim) float64 each; NaN in the sums where an index lies past the source.
    """
    bounds = np.arange(indices.shape[0] + 1) * indices.shape[1] if offsets is None else offsets
    flat, count = indices.reshape(-1), len(bounds) - 1
    factors = np.ones(flat.size) if weights is None else weights.reshape(-1).astype(np.float64)
    segments = np.repeat(np.arange(count), np.diff(bounds))
    flat, factors = flat[: bounds[-1]], factors[: bounds[-1]]
    real = flat >= 0
    segments, flat, factors = segments[real], flat[real], factors[real]
    past = flat >= source.shape[0]
    rows = source[np.where(past, 0, flat)].astype(np.float64) * factors[:, None]
    sums, sizes = np.zeros((count, source.shape[1])), np.zeros((count, source.shape[1]))
    np.add.at(sums, segments, rows)
    np.add.at(sizes, segments, np.abs(rows))
    sums[segments[past]] = np.nan
    terms = np.bincount(segments, minlength=count)[:, None]
    return sums, (terms + 2) * HALF_UNIT * sizes


def step(
    optimizer: Any, rows: np.ndarray, gradients: np.ndarray, slots: Slots, *, step: int, scale: float
) -> tuple[np.ndarray, Slots]:
    """One step of one of jrec's row optimizers, from the textbook formulas, float64.

    Args:
      optimizer: The optimizer.
      rows: (n, dim) float64.
      gradients: (n, dim) float64.
      slots: (n, dim) or (n,) float64 each.
      step: How many steps were taken before.
      scale: Multiplies the gradients.
    """
    o, kind = optimizer, type(optimizer).__name__
    rate: Any = o.learning_rate(step) if callable(o.learning_rate) else o.learning_rate
    rate = float(rate)
    g = gradients * scale
    if o.max_row_norm is not None:
        norm = np.linalg.norm(g, axis=1, keepdims=True)
        g = g * np.minimum(1.0, o.max_row_norm / np.maximum(norm, 1e-300))
    g = g + o.weight_decay * rows
    if kind == "SGD":
        return rows - rate * g, {}
    if kind == "Momentum":
        trace = g + o.momentum * slots["trace"]
        return rows - rate * (g + o.momentum * trace if o.nesterov else trace), {"trace": trace}
    if kind == "Adagrad":
        total = slots["sum"] + g**2
        return rows - rate * g / np.sqrt(total + o.eps), {"sum": total}
    if kind == "RowWiseAdagrad":
        total = slots["sum"] + np.mean(g**2, axis=1)
        return rows - rate * g / np.sqrt(total + o.eps)[:, None], {"sum": total}
    if kind == "RMSProp":
        nu = o.decay * slots["nu"] + (1 - o.decay) * g**2
        return rows - rate * g / np.sqrt(nu + o.eps), {"nu": nu}
    if kind == "Adam":
        mu, nu = o.b1 * slots["mu"] + (1 - o.b1) * g, o.b2 * slots["nu"] + (1 - o.b2) * g**2
        corrected = (mu / (1 - o.b1 ** (step + 1))) / (np.sqrt(nu / (1 - o.b2 ** (step + 1))) + o.eps)
        return rows - rate * corrected, {"mu": mu, "nu": nu}
    raise NotImplementedError(f"the check has no reference for the optimizer {kind}")


def updated(
    optimizer: Any,
    table: np.ndarray,
    slots: Slots,
    touched: np.ndarray,
    sums: np.ndarray,
    slack: np.ndarray,
    *,
    dice: bool = False,
    **keywords: Any,
) -> tuple[tuple[np.ndarray, Slots], tuple[np.ndarray, Slots]]:
    """Table and slots after a step on the touched rows, and what each element may be off by; 0 for untouched rows.

    Args:
      optimizer: The optimizer.
      table: (rows, dim).
      slots: The slots, by name.
      touched: (n,) distinct rows.
      sums: (n, dim) float64, their gradients.
      slack: (n, dim), what a float32 sum may be off by.
      dice: Whether 16-bit rows are rounded stochastically, to either neighbour.
      **keywords: ``step`` and ``scale``.
    """
    old = table[touched].astype(np.float64)
    before = {name: slot[touched].astype(np.float64) for name, slot in slots.items()}
    want, off = (table.astype(np.float64), dict(_float64(slots))), (np.zeros(table.shape), {})
    new = step(optimizer, old, sums, before, **keywords)
    sides = [step(optimizer, old, sums + sign * slack, before, **keywords) for sign in (1, -1)]
    rest = np.abs(sums * keywords["scale"])
    unit, tiny = _STORED_UNIT[table.dtype.name] * (1.0 if dice else 0.5), _TINY[table.dtype.name]
    want[0][touched] = new[0]
    off[0][touched] = _off(new[0], old, rest, [side[0] for side in sides]) + unit * np.abs(new[0]) + tiny
    for name, slot in new[1].items():
        want[1][name][touched] = slot
        off[1][name] = np.zeros(slots[name].shape)
        of_row = rest if slot.ndim == 2 else rest.max(axis=1)
        off[1][name][touched] = _off(slot, before[name], of_row, [side[1][name] for side in sides]) + 1e-7
    return want, off


def _off(new: np.ndarray, old: np.ndarray, gradient: np.ndarray, sides: list[np.ndarray]) -> np.ndarray:
    """What sums move it by, and the roundings of a step: relative to what it changes, and to all that it adds up."""
    moved = 2 * np.maximum(*(np.abs(side - new) for side in sides))
    return moved + 1e-4 * np.abs(new - old) + 4e-7 * (np.abs(new) + np.abs(old) + gradient)


def _float64(slots: Slots) -> Slots:
    return {name: slot.astype(np.float64) for name, slot in slots.items()}


def cast_of(ids: np.ndarray, offsets: np.ndarray | None, num_rows: int, unique_capacity: int) -> dict[str, np.ndarray]:
    """The fields of a cast (Tensor Casting, Algorithm 2), int32."""
    flat = ids.reshape(-1)
    bounds = np.arange(ids.shape[0] + 1) * ids.shape[1] if offsets is None else offsets
    bags = np.full(flat.size, len(bounds) - 1)
    bags[: bounds[-1]] = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    real = (flat >= 0) & (flat < num_rows) & (bags < len(bounds) - 1)
    order = np.argsort(np.where(real, flat, num_rows), kind="stable")
    total = int(real.sum())
    keys = flat[order[:total]]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if total else np.zeros(0, int)
    rows, begins = np.full(unique_capacity, num_rows), np.full(unique_capacity + 1, total)
    kept = starts[:unique_capacity]
    rows[: kept.size] = keys[kept]
    begins[: min(starts.size, unique_capacity + 1)] = starts[: unique_capacity + 1]
    sources = np.where(real[order], bags[order], len(bounds) - 1)
    fields = {"rows": rows, "offsets": begins, "sources": sources, "positions": order, "num_unique": starts.size}
    return {name: np.asarray(values, np.int32) for name, values in fields.items()}
