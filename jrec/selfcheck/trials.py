"""What the check runs of each kernel class: random inputs, the op on them, and the judge of a kernel's result by XLA's.

Sums must have XLA's very bits in any order of additions: their terms are small integers by a power of two, or each sum
has one term, of all bits. So a lookup that is left out of a bag of thousands shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jrec import ops
from jrec.ops.dispatch import Implementation
from jrec.ops.gather_reduce import gather_reduce_call, gather_reduce_together
from jrec.ops.row_update import casted_update_call, casted_update_together
from jrec.ops.tt.index import Level
from jrec.ops.tt.products import expand, expand_transpose
from jrec.ops.verdicts import KernelClass
from jrec.row_optimizers import ROW_OPTIMIZERS, Slots, slot_bytes

TABLE_BYTES = 128 << 20  # with slots, of timed tables: past the caches of every GPU, and little of its memory
KINDS = ("single", "power law", "one row", "half padding", "past the end", "all padding")
TINY_KINDS = ("single", "one row", "half padding", "past the end")

_BESIDE_DIM = 12  # of the second table where two share launches: other lanes and columns than any usual dim's
_BESIDE = ops.SGD(learning_rate=0.1)
_PLAIN = {"learning_rate": 0.1}
_FULL = {"learning_rate": lambda step: 0.5 / (step + 1), "weight_decay": 0.01, "max_row_norm": 1.5}
_EXACT = {"learning_rate": 0.1, "max_row_norm": 1.5}


Arguments = tuple[PyTree, ...]
"""What an op takes, trees of arrays."""


class Wrong(Exception):  # noqa: N818, it is a judgement, not an error
    """A result that is not what it must be; the message says where."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that one program is compiled for.

    Attributes:
      rows: Rows of the table.
      bags: How many bags there are.
      length: Ids a bag, of padded bags; None of ragged ones.
      capacity: Room for ids, of ragged bags.
      weighted: Whether lookups have weights, and updates all options.
      hot: Whether nearly all ids are in one ragged bag; others are of any length, some of none.
      beside: Whether a second table shares the launches.
    """

    rows: int
    bags: int
    length: int | None = None
    capacity: int = 0
    weighted: bool = False
    hot: bool = False
    beside: bool = False

    @property
    def lookups(self) -> int:
        """Room for ids."""
        return self.capacity if self.length is None else self.bags * self.length

    @property
    def room(self) -> int:
        """Room for unique rows; where lookups are weighted, some more than there can be."""
        return min(self.lookups, self.rows) + (20 if self.weighted else 0)


# The largest segment of the hot bags is split in pieces twice over (see docs/kernels.md, Skew).
_HOT = Sizes(rows=400, bags=70, capacity=20_000, weighted=True, hot=True)
SMALL = (Sizes(rows=300, bags=300, length=7), _HOT, dataclasses.replace(_HOT, beside=True))
_TINY_HOT = Sizes(rows=17, bags=6, capacity=160, weighted=True, hot=True)
TINY = (Sizes(rows=9, bags=10, length=3), _TINY_HOT, dataclasses.replace(_TINY_HOT, beside=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """An op that is compiled once for an implementation and run on several draws of its arguments.

    Attributes:
      run: Makes the function of the arguments, by implementation.
      draw: Makes the arguments, pytrees of arrays, of the kind of ids that is named.
      judge: Takes the arguments, the kernel's result and XLA's; raises ``Wrong``.
      in_place: Whether the result replaces the first argument, in its memory if it is donated.
    """

    run: Callable[[Implementation], Callable[..., PyTree]]
    draw: Callable[[np.random.Generator, str], Arguments]
    judge: Callable[[Arguments, PyTree, PyTree], None]
    in_place: bool = False


def small_trials(kernel_class: KernelClass, *, tiny: bool) -> Iterator[Trial]:
    """The trials whose results decide whether a kernel is right.

    Args:
      kernel_class: The class.
      tiny: Whether sizes are for an interpreter.

    Raises:
      NotImplementedError: If the check knows no such kernel or optimizer.
    """
    sizes = TINY if tiny else SMALL
    if kernel_class.kernel in ("row_update", "tt_products"):
        sizes = sizes[:2]  # these share no launches
    elif kernel_class.kernel == "tensor_cast":
        # Rows are sorted in 8, 16 or 32 bits, as the table needs, and each compiles to code of its own.
        rows = (200, 0), (40_000, 1), (40_000_000, 0), (40_000_000, 1)
        sizes = tuple(dataclasses.replace(sizes[i], rows=n) for n, i in rows)
    for one in sizes:
        yield trial(kernel_class, one)


def trial(kernel_class: KernelClass, sizes: Sizes) -> Trial:
    """One trial of a class.

    Raises:
      NotImplementedError: If the check knows no such kernel or optimizer.
    """
    if kernel_class.kernel not in _TRIALS:
        raise NotImplementedError(f"the check knows no kernel {kernel_class.kernel!r}, only {', '.join(_TRIALS)}")
    return _TRIALS[kernel_class.kernel](kernel_class, sizes)


def fitted(kernel_class: KernelClass, sizes: Sizes) -> Sizes:
    """Sizes whose table and slots take at most ``TABLE_BYTES``."""
    if not isinstance(kernel_class.dim, int) or kernel_class.kernel == "tensor_cast":
        return sizes
    slots = {} if kernel_class.optimizer is None else _optimizer(kernel_class, sizes)[0].slots
    row_bytes = kernel_class.dim * jnp.dtype(kernel_class.dtype).itemsize + slot_bytes(slots, kernel_class.dim)
    return dataclasses.replace(sizes, rows=max(16, min(sizes.rows, TABLE_BYTES // row_bytes)))


def draw_lookups(
    rng: np.random.Generator, sizes: Sizes, kind: str
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Random ids, offsets and weights, the latter None where there are none.

    Args:
      rng: The source of randomness.
      sizes: The sizes.
      kind: How ids are distributed, one of ``KINDS``; "single" has at most one lookup a bag and a row.
    """
    size, rows = sizes.lookups, sizes.rows
    if sizes.length is None:
        cuts = np.sort(rng.integers(0, size // (40 if sizes.hot else 1) - 2, sizes.bags + 1))
        cuts[0], cuts[-2:] = 0, size - 3  # the last bag but one is the hot one, the last is empty; a tail is nobody's
        offsets = cuts.astype(np.int32)
    else:
        offsets = np.arange(sizes.bags + 1, dtype=np.int32) * sizes.length
    # A power law of exponent 1; frequent rows lie anywhere in the table, as hashed ids do.
    rank = np.minimum(np.exp(rng.random(size) * np.log(rows + 1)) - 1, rows - 1).astype(np.int64)
    ids = (rank * 2654435761 % (1 << 32) % rows).astype(np.int32)
    if kind == "single":
        first = offsets[:-1][np.diff(offsets) > 0][:rows]
        ids[:] = -1
        ids[first] = rng.choice(rows, first.size, replace=False)
    elif kind == "one row":
        ids[:] = rng.integers(rows)
    elif kind == "half padding":
        ids[rng.random(size) < 0.5] = -1
    elif kind == "past the end":
        ids[rng.integers(size, size=1 + size // 20)] = rng.integers(rows, rows + 5)
    elif kind == "all padding":
        ids[:] = rng.integers(-3, 0, size)
    weights = None
    if sizes.weighted and kind == "single":
        weights = rng.normal(size=size).astype(np.float32)
    elif sizes.weighted:
        weights = (rng.choice([-1, 1], size) * rng.integers(1, 5, size) / 2).astype(np.float32)
    if sizes.length is None:
        return ids, offsets, weights
    shape = sizes.bags, sizes.length
    return ids.reshape(shape), None, None if weights is None else weights.reshape(shape)


def _terms(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Terms of sums: of all bits where a sum has one; else times a weight, 66,000 of them add without a rounding."""
    whole = rng.normal(size=shape) if kind == "single" else rng.integers(-63, 64, shape, np.int8) / np.float32(16)
    return whole.astype(np.float32)


def _gather_reduce(kernel_class: KernelClass, sizes: Sizes) -> Trial:
    def run(implementation: Implementation) -> Callable[..., PyTree]:
        def sums(
            sources: list[jax.Array], ids: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
        ) -> list[jax.Array]:
            calls = [gather_reduce_call(source, ids, offsets, weights=weights) for source in sources]
            return gather_reduce_together(calls, implementation)

        return sums

    def draw(rng: np.random.Generator, kind: str) -> Arguments:
        source = _terms(rng, (sizes.rows, _dim(kernel_class)), kind)
        beside = [source[:, :_BESIDE_DIM]] if sizes.beside else []
        return [source.astype(kernel_class.dtype), *beside], *draw_lookups(rng, sizes, kind)

    return Trial(run=run, draw=draw, judge=_judge_equal)


def _casted_update(kernel_class: KernelClass, sizes: Sizes) -> Trial:
    optimizer, options = _optimizer(kernel_class, sizes)

    def run(implementation: Implementation) -> Callable[..., PyTree]:
        def update(
            tables: list[tuple[jax.Array, Slots]], cast: ops.Cast, gradients: jax.Array, weights: jax.Array | None
        ) -> list[tuple[jax.Array, Slots]]:
            (table, slots), *beside = tables
            calls = [casted_update_call(optimizer, table, slots, cast, gradients, weights=weights, **options)]
            for other, _ in beside:
                of_other = gradients[:, : other.shape[1]]
                calls.append(casted_update_call(_BESIDE, other, {}, cast, of_other, weights=weights))
            return casted_update_together(calls, implementation)

        return update

    def draw(rng: np.random.Generator, kind: str) -> Arguments:
        ids, offsets, weights = draw_lookups(rng, sizes, kind)
        cast = jax.jit(_tensor_cast(kernel_class, sizes).run("xla"))(ids, offsets)
        table, slots = _table(rng, kernel_class, sizes, optimizer)
        beside = [(table[:, :_BESIDE_DIM].astype(np.float32), {})] if sizes.beside else []
        return [(table, slots), *beside], cast, _terms(rng, (sizes.bags, _dim(kernel_class)), kind), weights

    def judge(arguments: Arguments, got: PyTree, want: PyTree) -> None:
        tables, cast, *_ = arguments
        _judge_rows(np.asarray(cast.rows)[: int(cast.num_unique)], tables, got, want)

    return Trial(run=run, draw=draw, judge=judge, in_place=True)


def _row_update(kernel_class: KernelClass, sizes: Sizes) -> Trial:
    optimizer, options = _optimizer(kernel_class, sizes)

    def run(implementation: Implementation) -> Callable[..., PyTree]:
        return lambda table, rows, gradients: ops.row_update(
            optimizer, table[0], table[1], rows, gradients, **options, implementation=implementation
        )

    def draw(rng: np.random.Generator, kind: str) -> Arguments:
        most = min(sizes.room, sizes.rows * 3 // 4)
        real = {"half padding": most // 2, "all padding": 0}.get(kind, most)
        rows = np.full(sizes.room, sizes.rows, np.int32)
        rows[:real] = np.sort(rng.choice(sizes.rows, real, replace=False))
        gradients = rng.standard_normal((sizes.room, _dim(kernel_class)), np.float32)
        gradients[real:] = np.nan  # which nobody may read
        return _table(rng, kernel_class, sizes, optimizer), rows, gradients

    def judge(arguments: Arguments, got: PyTree, want: PyTree) -> None:
        table, rows, _ = arguments
        _judge_rows(rows[rows < sizes.rows], table, got, want)

    return Trial(run=run, draw=draw, judge=judge, in_place=True)


def _tensor_cast(kernel_class: KernelClass, sizes: Sizes) -> Trial:
    del kernel_class

    def run(implementation: Implementation) -> Callable[..., PyTree]:
        return lambda ids, offsets: ops.tensor_cast(
            ids, offsets, num_rows=sizes.rows, unique_capacity=sizes.room, implementation=implementation
        )

    return Trial(run=run, draw=lambda rng, kind: draw_lookups(rng, sizes, kind)[:2], judge=_judge_equal)


def _tt_products(kernel_class: KernelClass, sizes: Sizes) -> Trial:
    """A tensor-train level's products, and the gradients of what it multiplies; of ``sizes`` the lookups count."""
    assert not isinstance(kernel_class.dim, int)
    height, rank, columns, right_rank = kernel_class.dim
    capacity = min(sizes.lookups, 8192)
    parents = slices = 2 * math.isqrt(capacity)

    def run(implementation: Implementation) -> Callable[..., PyTree]:
        def products(below: jax.Array, core: jax.Array, level: Level, gradient: jax.Array) -> tuple[jax.Array, ...]:
            out = expand(below, core, level, method="grouped", implementation=implementation)
            count = jnp.asarray(below.shape[0], jnp.int32)
            real = jnp.arange(capacity, dtype=jnp.int32) < level.count
            out = jnp.where(real[:, None, None], out, 0)  # what padding holds is undefined
            return out, *expand_transpose(
                gradient, below, core, level, below_count=count, method="grouped", implementation=implementation
            )

        return products

    def draw(rng: np.random.Generator, kind: str) -> Arguments:
        real = {"half padding": capacity // 2, "all padding": 0}.get(kind, capacity - 3)
        pairs = np.sort(rng.choice(parents * slices, real, replace=False))
        if kind == "half padding":  # one slice that most entries choose
            pairs = np.unique(np.where(rng.random(real) < 0.7, pairs // slices * slices, pairs))
        real = pairs.size
        of_parent, of_digit = np.full(capacity, parents, np.int32), np.full(capacity, slices, np.int32)
        of_parent[:real], of_digit[:real] = pairs // slices, pairs % slices
        gradient = rng.standard_normal((capacity, height * columns, right_rank), np.float32)
        gradient[real:] = np.nan  # padding's is never read
        below = rng.standard_normal((parents, height, rank), np.float32)
        core = rng.standard_normal((slices, rank, columns, right_rank), np.float32).astype(kernel_class.dtype)
        level: Any = {"parents": of_parent, "digits": of_digit, "count": np.int32(real)}
        return below, core, Level(**level), gradient

    def judge(arguments: Arguments, got: PyTree, want: PyTree) -> None:
        # Float32 sums stray from each other by far less than 1e-5 of the sum of their terms' magnitudes.
        magnitudes = jax.jit(run("xla"))(*jax.tree.map(lambda x: x if x.dtype == np.int32 else abs(x), arguments))
        for number, (one, other, size) in enumerate(zip(got, want, magnitudes, strict=True)):
            _judge_close(f"result[{number}]", one, other, 1e-5 * np.asarray(size, np.float64))

    return Trial(run=run, draw=draw, judge=judge)


_TRIALS: dict[str, Callable[[KernelClass, Sizes], Trial]] = {
    "gather_reduce": _gather_reduce,
    "casted_update": _casted_update,
    "row_update": _row_update,
    "tensor_cast": _tensor_cast,
    "tt_products": _tt_products,
}
OPTIMIZERS = {kind.__name__: kind for kind in ROW_OPTIMIZERS.values()}


def _dim(kernel_class: KernelClass) -> int:
    assert isinstance(kernel_class.dim, int)
    return kernel_class.dim


def _optimizer(kernel_class: KernelClass, sizes: Sizes) -> tuple[ops.RowOptimizer, dict[str, Any]]:
    """The optimizer, and the options of its update: all of them where lookups are weighted."""
    if kernel_class.optimizer not in OPTIMIZERS:
        raise NotImplementedError(
            f"the check knows no optimizer {kernel_class.optimizer!r}, only {', '.join(OPTIMIZERS)}"
        )
    if not sizes.weighted:
        return OPTIMIZERS[kernel_class.optimizer](**_PLAIN), {}
    options: dict[str, Any] = {"step": 3, "gradient_scale": 0.5}
    if kernel_class.dtype != "float32":  # rounded stochastically
        numbers = np.random.default_rng(0).integers(-(2**31), 2**31, sizes.room).astype(np.int32)
        options |= {"rounding_key": np.array([1234567, 7654321], np.uint32), "rounding_rows": numbers}
    kind = OPTIMIZERS[kernel_class.optimizer]
    return kind(**_FULL if kind.decays_gradients else _EXACT), options


def _table(rng: np.random.Generator, kernel_class: KernelClass, sizes: Sizes, optimizer: ops.RowOptimizer) -> Arguments:
    """A table, and slots by name."""
    table = rng.standard_normal((sizes.rows, _dim(kernel_class)), np.float32).astype(kernel_class.dtype)
    shapes = {name: table.shape if shape == "element" else table.shape[:1] for name, shape in optimizer.slots.items()}
    return table, {name: rng.uniform(0.1, 1.1, shape).astype(np.float32) for name, shape in shapes.items()}


def same_bits(one: object, other: object) -> bool:
    """Whether two pytrees of arrays hold the same bits."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def _judge_equal(arguments: tuple[object, ...], got: object, want: object) -> None:
    del arguments
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        _judge_close(f"result{jax.tree_util.keystr(path)}", one, other, np.zeros(()))


def _judge_rows(rows: np.ndarray, old: object, got: object, want: object) -> None:
    """Judges tables and slots after an update of ``rows``; all others must keep their bits."""
    leaves = zip(jax.tree.leaves_with_path(old), jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for (path, before), after, other in leaves:
        name = f"result{jax.tree_util.keystr(path)}"
        if after.shape != before.shape:
            raise Wrong(f"{name} has shape {after.shape}, not {before.shape}")
        spared = np.delete(np.arange(before.shape[0]), rows)
        if not same_bits(after[spared], before[spared]):
            raise Wrong(f"{name} has other bits in a row that nobody named")
        after, before, other = after[rows], before[rows].astype(np.float64), other[rows]
        off = 1e-4 * np.abs(other - before) + 5e-7 * (np.abs(other.astype(np.float64)) + np.abs(before) + 1)
        if other.dtype.itemsize == 2:  # a sum's last bit seldom decides to which side a row is rounded
            kind = jnp.finfo(other.dtype)
            off += float(kind.eps) * np.abs(other.astype(np.float64)) + float(kind.smallest_subnormal)
            if (differ := int(np.sum(after != other))) > 2 + 0.01 * other.size:
                raise Wrong(f"{name} has other bits than XLA's in {differ} of {other.size} elements")
        _judge_close(name, after, other, off)


def _judge_close(name: str, got: object, want: object, off: np.ndarray) -> None:
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Wrong(f"{name} is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}")
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - want.astype(np.float64))
        right = (got == want) | (error <= off) | (np.isnan(got) & np.isnan(want))
    if not right.all():
        place = tuple(np.argwhere(~right)[0])
        raise Wrong(f"{name}{[int(i) for i in place]} is {got[place]:.9g}, and XLA's {want[place]:.9g}")
