"""Embedding ops in plain NumPy and float64, one lookup at a time, and the random cases they are compared on.

Compiled programs depend on shapes and dtypes alone, so cases draw their shapes from fixed lists and everything else at
random: ids (how they are distributed, repeated, negative, past the table), bag lengths, values.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from jrec import ops
from jrec.row_optimizers import Exact, RowOptimizer

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
ID_KINDS = ("uniform", "identical", "power law", "half padding", "all padding")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static shape of a case: padded bags of ``length``, or ragged ones of ``capacity`` in all."""

    rows: int
    dim: int
    bags: int
    length: int | None = None
    capacity: int | None = None
    dtype: str = "float32"
    weighted: bool = False


SHAPES = (
    Shape(rows=1, dim=1, bags=3, length=4),
    Shape(rows=7, dim=2, bags=16, length=1, dtype="bfloat16"),
    Shape(rows=50, dim=3, bags=9, length=5, weighted=True),
    Shape(rows=300, dim=16, bags=40, length=1),
    Shape(rows=1000, dim=64, bags=33, length=20),
    Shape(rows=20, dim=100, bags=8, length=7, dtype="float16", weighted=True),
    Shape(rows=11, dim=256, bags=5, length=3),
    Shape(rows=1, dim=8, bags=6, capacity=20, weighted=True),
    Shape(rows=5, dim=1, bags=12, capacity=30),
    Shape(rows=90, dim=20, bags=30, capacity=77, dtype="float16"),
    Shape(rows=400, dim=33, bags=1, capacity=64),
    Shape(rows=33, dim=64, bags=25, capacity=120, dtype="bfloat16", weighted=True),
    Shape(rows=60, dim=128, bags=10, capacity=50, weighted=True),
    Shape(rows=8, dim=256, bags=4, capacity=9),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Random ids in a shape, with a table and gradients for them."""

    shape: Shape
    ids: np.ndarray
    offsets: np.ndarray | None
    weights: np.ndarray | None
    table: np.ndarray
    bag_gradients: np.ndarray

    def bags(self) -> list[list[tuple[int, int, float]]]:
        """Per bag its lookups that are not padding: (flat position, id, weight)."""
        return bags_of(self.ids, self.offsets, self.weights)


@st.composite
def cases(draw: st.DrawFn, shapes: tuple[Shape, ...] = SHAPES, past: bool = False) -> Case:
    """Cases in any of ``shapes``; with ``past``, some ids lie past the table."""
    shape = draw(st.sampled_from(shapes))
    kind = draw(st.sampled_from(ID_KINDS))
    full = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return make_case(shape, rng, kind=kind, full=full, past=past)


def make_case(
    shape: Shape, rng: np.random.Generator, *, kind: str = "uniform", full: bool = False, past: bool = False
) -> Case:
    """One case. ``full`` leaves no empty bags and no unused tail where the shape allows it."""
    size = shape.bags * shape.length if shape.length is not None else shape.capacity
    ids = draw_ids(rng, shape.rows, size, kind)
    if past:
        ids[rng.random(size) < 0.1] = rng.integers(shape.rows, shape.rows + 5)
    offsets = None
    if shape.length is not None:
        ids = ids.reshape(shape.bags, shape.length)
    else:
        cuts = rng.integers(0, size + 1, shape.bags + 1)
        if full:
            cuts[:] = np.linspace(0, size, shape.bags + 1)
        offsets = np.sort(cuts).astype(np.int32)
        offsets[0] = 0
    weights = rng.normal(size=ids.shape).astype(np.float32) if shape.weighted else None
    table = rng.normal(size=(shape.rows, shape.dim)).astype(DTYPES[shape.dtype])
    gradients = rng.normal(size=(shape.bags, shape.dim)).astype(np.float32)
    return Case(shape, ids, offsets, weights, table, gradients)


def draw_ids(rng: np.random.Generator, rows: int, size: int, kind: str) -> np.ndarray:
    """(size,) int32 ids, negative where they are padding."""
    match kind:
        case "identical":
            ids = np.full(size, rng.integers(rows))
        case "power law":
            ids = np.minimum(rng.zipf(1.3, size), rows) - 1
        case "all padding":
            ids = rng.integers(-3, 0, size)
        case _:
            ids = rng.integers(0, rows, size)
    if kind == "half padding":
        ids[rng.random(size) < 0.5] = -1
    return ids.astype(np.int32)


def bags_of(
    ids: np.ndarray, offsets: np.ndarray | None, weights: np.ndarray | None
) -> list[list[tuple[int, int, float]]]:
    """Per bag its lookups that are not padding: (flat position, id, weight)."""
    flat = ids.reshape(-1)
    factors = np.ones(flat.size) if weights is None else weights.reshape(-1).astype(np.float64)
    bounds = np.arange(ids.shape[0] + 1) * ids.shape[1] if offsets is None else offsets
    return [
        [(j, int(flat[j]), float(factors[j])) for j in range(begin, end) if flat[j] >= 0]
        for begin, end in itertools.pairwise(bounds)
    ]


def gather_reduce(case: Case) -> np.ndarray:
    """(bags, dim) float64; NaN where an id lies past the table."""
    out = np.zeros((case.shape.bags, case.shape.dim))
    for bag, lookups in enumerate(case.bags()):
        for _, row, weight in lookups:
            out[bag] += weight * case.table[row].astype(np.float64) if row < case.shape.rows else np.nan
    return out


def tensor_cast(
    ids: np.ndarray, offsets: np.ndarray | None, num_rows: int, unique_capacity: int
) -> dict[str, np.ndarray]:
    """The fields of the cast, int32."""
    bags = bags_of(ids, offsets, None)
    real = sorted((row, j, bag) for bag, lookups in enumerate(bags) for j, row, _ in lookups if row < num_rows)
    padding = sorted(set(range(ids.size)) - {j for _, j, _ in real})
    starts = [i for i in range(len(real)) if i == 0 or real[i][0] != real[i - 1][0]]
    kept = [real[i][0] for i in starts[:unique_capacity]]
    bounds = (starts + [len(real)] * (unique_capacity + 1))[: unique_capacity + 1]
    fields = {
        "rows": kept + [num_rows] * (unique_capacity - len(kept)),
        "offsets": bounds,
        "sources": [bag for _, _, bag in real] + [len(bags)] * len(padding),
        "positions": [j for _, j, _ in real] + padding,
        "num_unique": len(starts),
    }
    return {name: np.array(values, np.int32) for name, values in fields.items()}


def embedding_bag(case: Case, combiner: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, and the gradients of table and weights for ``case.bag_gradients``; float64."""
    table = case.table.astype(np.float64)
    out = np.zeros((case.shape.bags, case.shape.dim))
    table_gradient, weight_gradient = np.zeros(table.shape), np.zeros(case.ids.size)
    for bag, lookups in enumerate(case.bags()):
        if not lookups:
            continue
        gradient = case.bag_gradients[bag].astype(np.float64)
        if combiner == "max":
            products = np.array([weight * table[row] for _, row, weight in lookups])
            out[bag] = products.max(axis=0)
            wins = products == out[bag]
            shares = wins / wins.sum(axis=0) * gradient
        else:
            norm = {"sum": 1.0, "mean": len(lookups), "sqrtn": np.sqrt(len(lookups))}[combiner]
            out[bag] = sum(weight * table[row] for _, row, weight in lookups) / norm
            shares = np.broadcast_to(gradient / norm, (len(lookups), case.shape.dim))
        for (j, row, weight), share in zip(lookups, shares, strict=True):
            table_gradient[row] += weight * share
            weight_gradient[j] = share @ table[row]
    return out, table_gradient, weight_gradient.reshape(case.ids.shape)


def row_gradients(case: Case) -> dict[int, np.ndarray]:
    """The summed gradient of each row that is looked up, float64."""
    gradients: dict[int, np.ndarray] = {}
    for bag, lookups in enumerate(case.bags()):
        for _, row, weight in lookups:
            if row < case.shape.rows:
                share = weight * case.bag_gradients[bag].astype(np.float64)
                gradients[row] = gradients.get(row, np.zeros(case.shape.dim)) + share
    return gradients


def slack(case: Case) -> float:
    """Absolute tolerance of float32 sums per row: n equal terms drift by up to n half units in the last place."""
    real = case.ids[case.ids >= 0]
    return 5e-5 + 2e-6 * (int(np.bincount(real).max()) if real.size else 0)


def made(kind: type[RowOptimizer], **common: object) -> RowOptimizer:
    """An optimizer of what its kind takes: exact ones decay no gradients, and AdamW has no schedule."""
    if not kind.decays_gradients and kind is not ops.ExactAdamW:
        common.pop("weight_decay", None)
    if not kind.takes_schedule and callable(rate := common["learning_rate"]):
        common["learning_rate"] = float(rate(0))
    return kind(**common)


LAZY = {
    ops.ExactMomentum: ops.Momentum, ops.ExactRMSProp: ops.RMSProp, ops.ExactAdam: ops.Adam, ops.ExactAdamW: ops.Adam
}  # fmt: skip


def _exact_step(
    optimizer: Exact, rows: np.ndarray, gradients: np.ndarray, slots: dict[str, np.ndarray], *, step: int, scale: float
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """``textbook_step`` where rows lie at rest: all coming movements are summed, term by term."""
    o, kind, rate = optimizer, type(optimizer), optimizer.learning_rate
    of_momentum, of_nu = getattr(o, "momentum", None), getattr(o, "b2", getattr(o, "decay", None))
    decays = {"trace": of_momentum, "mu": getattr(o, "b1", None), "nu": of_nu}
    stays = 1 - o.learning_rate * o.weight_decay if kind is ops.ExactAdamW else 1.0
    own = {name: getattr(o, name) for name in (f.name for f in LAZY[kind].hyperparameters())}
    lazy = LAZY[kind](learning_rate=o.learning_rate, max_row_norm=o.max_row_norm, **own)

    def coming(state: dict[str, np.ndarray], first: int) -> np.ndarray:
        """What steps ``first``, ``first + 1``, … without gradients subtract from rows."""
        if kind is ops.ExactRMSProp:
            return np.zeros_like(rows)
        after = np.arange(1, 301)[:, None, None]  # 0.9**300 is 2e-14
        rates = rates_of(rate, first, 300)[:, None, None]
        if kind is ops.ExactMomentum:
            return np.sum(rates * state["trace"] * o.momentum ** (after + o.nesterov), axis=0)
        mu, nu, count = state["mu"] * o.b1**after, state["nu"] * o.b2**after, first + after
        moved = rates * (mu / (1 - o.b1**count)) / (np.sqrt(nu / (1 - o.b2**count)) + o.eps)
        return np.sum(moved / stays**after, axis=0)

    missed = (step - slots["last"])[:, None]
    state = {name: slots[name] * decays[name] ** missed for name in kind.slots if name != "last"}
    now = rows * stays**missed + coming(state, step)
    new, state = textbook_step(lazy, stays * now, gradients, state, step=step, scale=scale)
    return new - coming(state, step + 1), {**state, "last": np.full_like(slots["last"], step + 1)}


@functools.cache
def rates_of(rate: float | Callable, first: int, steps: int) -> np.ndarray:
    """The learning rates of steps ``first``, ``first + 1``, …: (steps,) float64. A schedule of optax is slow."""
    if callable(rate):
        rate = rate(first if steps == 1 else np.arange(first, first + steps, dtype=np.float32))
    return np.broadcast_to(np.asarray(rate, np.float64), (steps,))


def textbook_step(
    optimizer: object, rows: np.ndarray, gradients: np.ndarray, slots: dict[str, np.ndarray], *, step: int, scale: float
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One step of one of jrec's row optimizers, from the textbook formulas, float64.

    Args:
      optimizer: The optimizer.
      rows: (n, dim) float64.
      gradients: (n, dim) float64.
      slots: (n, dim) or (n,) float64 each.
      step: How many steps were taken before.
      scale: Multiplies the gradients.
    """
    if isinstance(optimizer, Exact):
        return _exact_step(optimizer, rows, gradients, slots, step=step, scale=scale)
    o, kind = optimizer, type(optimizer).__name__
    (rate,) = rates_of(o.learning_rate, step, 1)
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
    if kind == "RowWiseRMSProp":
        nu = o.decay * slots["nu"] + (1 - o.decay) * np.mean(g**2, axis=1)
        return rows - rate * g / np.sqrt(nu + o.eps)[:, None], {"nu": nu}
    if kind == "RowWiseAdam":
        mu, nu = o.b1 * slots["mu"] + (1 - o.b1) * g, o.b2 * slots["nu"] + (1 - o.b2) * np.mean(g**2, axis=1)
        deviation = np.sqrt(nu / (1 - o.b2 ** (step + 1))) + o.eps
        return rows - rate * (mu / (1 - o.b1 ** (step + 1))) / deviation[:, None], {"mu": mu, "nu": nu}
    if kind == "Adam":
        mu, nu = o.b1 * slots["mu"] + (1 - o.b1) * g, o.b2 * slots["nu"] + (1 - o.b2) * g**2
        corrected = (mu / (1 - o.b1 ** (step + 1))) / (np.sqrt(nu / (1 - o.b2 ** (step + 1))) + o.eps)
        return rows - rate * corrected, {"mu": mu, "nu": nu}
    raise NotImplementedError(f"there is no reference for the optimizer {kind}")


def step_row(
    optimizer: object, row: np.ndarray, gradient: np.ndarray, slots: dict[str, np.ndarray], *, step: int, scale: float
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One step on one row: (dim,) row and gradient, slots (dim,) or (); float64, from the textbook formulas."""
    of_one = {name: np.asarray(slot, np.float64)[None] for name, slot in slots.items()}
    rows, new = textbook_step(optimizer, row[None].astype(np.float64), gradient[None], of_one, step=step, scale=scale)
    return rows[0], {name: slot[0] for name, slot in new.items()}


def step_rows(
    optimizer: object, table: np.ndarray, slots: dict[str, np.ndarray], gradients: dict[int, np.ndarray], *, step: int,
    scale: float,
) -> None:  # fmt: skip
    """One step in place of the rows that have a gradient, rounded to the table's dtype; slots are float64."""
    if not gradients:
        return
    rows = [*gradients]
    of_rows = table[rows].astype(np.float64), np.stack([*gradients.values()])
    new, state = textbook_step(optimizer, *of_rows, {n: s[rows] for n, s in slots.items()}, step=step, scale=scale)
    table[rows] = new.astype(table.dtype)
    for name, values in state.items():
        slots[name][rows] = values
