"""What each of EL-Rec's optimizations of a tensor-train table is worth, by switching it off (Figures 14, 17 and 18).

    reuse         forward, products of unique prefixes and unique rows; off: one of each a lookup
    aggregation   backward, gradients added up on unique rows and prefixes first; off: one of each a lookup
    fused update  Adagrad's step on each core as soon as its gradient is there, on the slices that were chosen; off: a
                  program of its own, over whole cores

The same kernels run either way, and which lookups need which products is found beforehand for both sides, so that only
the optimization differs; but for the comparison with TT-Rec's algorithm, which needs no such index. Ids are sorted in
both, so locality (EL-Rec's index reordering) is not what differs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.tt_side import FUSED, Side, describe, shape_of
from jrec.ops import Bags, tt
from jrec.ops.gather_reduce import gather_reduce
from jrec.ops.tt import contract
from jrec.ops.tt.index import Level, TTIndex, tt_index
from jrec.ops.types import Cast

ROWS = (2_500_000, 5_000_000, 10_000_000)
LOOKUPS = (2048, 8192, 32768)
DIM, RANK = 16, 32


def run(report: harness.Report, *, seconds: float) -> None:
    """Measures and reports all three figures."""
    for rows in ROWS[:1] if report.quick else ROWS:
        side = Side(shape_of(rows, DIM, RANK), LOOKUPS[0] if report.quick else LOOKUPS[-1])
        _measure(report, side, "step", steps_of(side), seconds)
    for lookups in LOOKUPS[:1] if report.quick else LOOKUPS:
        side = Side(shape_of(ROWS[-1], DIM, RANK), lookups)
        _measure(report, side, "forward", forwards_of(side), seconds)
        _measure(report, side, "forward", lookups_of(side), seconds)
        _measure(report, side, "backward and update", backwards_of(side), seconds)


def _measure(
    report: harness.Report, side: Side, variant: str, variants: Mapping[str, Callable[[], Any]], seconds: float
) -> None:
    """Times all variants in turn; the first is the whole, beside which the others are its peers."""
    whole, *rest = variants
    runs = {name: harness.timed(run) for name, run in variants.items()}
    report.compare_all(
        describe(side.shape, side.ids.size),
        f"{variant}, {whole}",
        runs[whole],
        {name: runs[name] for name in rest},
        seconds=seconds,
    )


def steps_of(side: Side) -> dict[str, Callable[[], Any]]:
    """Whole steps: with everything, and with one optimization switched off."""
    shape, optimizer = side.shape, FUSED
    index, each = indices_of(side)
    first = jax.jit(_first_lookups)(index)

    def whole(cores: Any, slots: Any, _: jax.Array, targets: jax.Array, index: TTIndex) -> Any:
        out, products = forward(shape, cores, index)
        residuals = tt.TTResiduals(index=index, weights=None, products=products)
        return tt.tt_apply_gradients(optimizer, cores, slots, shape, residuals, out - targets, contraction="unique")

    def without_reuse(
        cores: Any, slots: Any, _: jax.Array, targets: jax.Array, index: TTIndex, each: TTIndex, first: jax.Array
    ) -> Any:
        out, products = forward(shape, cores, each)
        of_prefixes = products[0].at[first].get(mode="clip")
        residuals = tt.TTResiduals(index=index, weights=None, products=(of_prefixes,))
        return tt.tt_apply_gradients(optimizer, cores, slots, shape, residuals, out - targets, contraction="unique")

    def without_aggregation(
        cores: Any, slots: Any, _: jax.Array, targets: jax.Array, index: TTIndex, each: TTIndex
    ) -> Any:
        out, products = forward(shape, cores, index)
        residuals = tt.TTResiduals(index=index, weights=None, products=products)
        repeated = _repeated(each, residuals)
        return tt.tt_apply_gradients(optimizer, cores, slots, shape, repeated, out - targets, contraction="unique")

    def gradients(cores: Any, _: Any, __: jax.Array, targets: jax.Array, index: TTIndex) -> Any:
        out, products = forward(shape, cores, index)
        residuals = tt.TTResiduals(index=index, weights=None, products=products)
        return tt.tt_core_gradients(cores, shape, residuals, out - targets, contraction="unique")

    return {
        "all on": _trained(side, whole, index),
        "without reuse": _trained(side, without_reuse, index, each, first),
        "without aggregation": _trained(side, without_aggregation, index, each),
        "without fused update": _trained_apart(side, gradients, index),
    }


def forwards_of(side: Side) -> dict[str, Callable[[], Any]]:
    """Forward passes."""
    index, each = indices_of(side)
    run = jax.jit(lambda cores, index: forward(side.shape, cores, index)[0])
    return {"with reuse": lambda: run(side.cores, index), "without reuse": lambda: run(side.cores, each)}


def lookups_of(side: Side) -> dict[str, Callable[[], Any]]:
    """Forward passes from ids on, both sides in XLA, since TT-Rec's algorithm has no native kernels here."""
    run = jax.jit(lambda cores, ids: forward(side.shape, cores, tt_index(side.shape, ids), "xla")[0])
    return {
        "index and reuse, in XLA": lambda: run(side.cores, side.ids),
        "TT-Rec's, in XLA": side.program(False, "naive", "xla"),
    }


def backwards_of(side: Side) -> dict[str, Callable[[], Any]]:
    """Backward passes with the update, on residuals of one forward pass."""
    shape = side.shape
    _, residuals = jax.jit(lambda cores, ids: tt.tt_lookup(cores, shape, Bags(ids=ids), contraction="unique"))(
        side.cores, side.ids
    )
    repeated = jax.jit(_repeated)(indices_of(side)[1], residuals)

    def update(residuals: Any) -> Callable[..., Any]:
        def apply(cores: Any, slots: Any, _: jax.Array, gradient: jax.Array, residuals: Any) -> Any:
            return tt.tt_apply_gradients(FUSED, cores, slots, shape, residuals, gradient, contraction="unique")

        return _trained(side, apply, residuals)

    def gradients(residuals: Any) -> Callable[..., Any]:
        def core_gradients(cores: Any, _: Any, __: jax.Array, gradient: jax.Array, residuals: Any) -> Any:
            return tt.tt_core_gradients(cores, shape, residuals, gradient, contraction="unique")

        return _trained_apart(side, core_gradients, residuals)

    return {
        "aggregation and fused update": update(residuals),
        "without fused update": gradients(residuals),
        "without aggregation": update(repeated),
        "without either": gradients(repeated),
    }


def forward(
    shape: tt.TTShape, cores: Any, index: TTIndex, implementation: Any = None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Activations and products of a lookup."""
    rows, products = contract.unique_rows(cores, shape, index.levels, method="grouped", implementation=implementation)
    return gather_reduce(rows.reshape(-1, shape.dim), index.sources, implementation=implementation), products


def indices_of(side: Side) -> tuple[TTIndex, TTIndex]:
    """The index of a side's ids, and one in which no product serves two lookups."""
    shape = side.shape
    return jax.jit(lambda ids: (tt_index(shape, ids), index_of_lookups(shape, ids)))(side.ids)


def index_of_lookups(shape: tt.TTShape, ids: jax.Array) -> TTIndex:
    """The index of (n, 1) ids of a table of three cores in which no product serves two lookups: each is its own
    "unique" row, with a prefix of its own.
    """
    _, middle, last = shape.row_factors
    count = ids.size
    each = jnp.arange(count, dtype=jnp.int32)
    entries, order = jax.lax.sort((ids[:, 0], each), num_keys=1)
    cast = Cast(
        rows=entries,
        offsets=jnp.arange(count + 1, dtype=jnp.int32),
        sources=order,
        positions=order,
        num_unique=jnp.int32(count),
    )
    prefixes = entries // jnp.int32(last)
    levels = (
        Level(parents=prefixes // jnp.int32(middle), digits=prefixes % jnp.int32(middle), count=jnp.int32(count)),
        Level(parents=each, digits=entries % jnp.int32(last), count=jnp.int32(count)),
    )
    sources = jnp.zeros(count, jnp.int32).at[order].set(each, unique_indices=True)
    return TTIndex(cast=cast, sources=sources[:, None], levels=levels)


def _first_lookups(index: TTIndex) -> jax.Array:
    """The first lookup of each unique prefix, in order of the ids."""
    rows = jnp.searchsorted(index.levels[1].parents, jnp.arange(index.levels[0].capacity, dtype=jnp.int32))
    return index.cast.offsets.at[rows].get(mode="clip")


def _repeated(each: TTIndex, residuals: tt.TTResiduals) -> tt.TTResiduals:
    """The residuals as if no two lookups had anything in common."""
    rows = residuals.index.sources.reshape(-1)[each.cast.positions]
    products = residuals.products[0].at[residuals.index.levels[1].parents[rows]].get(mode="clip")
    return dataclasses.replace(residuals, index=each, products=(products,))


def _trained(side: Side, step: Callable[..., Any], *extra: Any) -> Callable[[], Any]:
    """``step`` of (cores, slots, ids, targets, ..) -> (cores, slots) as a callable that goes on training."""
    jitted = jax.jit(step, donate_argnums=(0, 1))
    state = [jax.tree.map(jnp.array, side.cores), tt.tt_init_slots(FUSED, side.cores)]

    def run() -> Any:
        state[:] = jitted(*state, side.ids, side.gradient, *extra)
        return state

    return run


def _trained_apart(side: Side, gradients: Callable[..., Any], *extra: Any) -> Callable[[], Any]:
    """As ``_trained`` with core gradients, which an Adagrad over whole cores applies in a program of its own."""
    jitted = jax.jit(gradients)
    fresh = tt.tt_init_slots(FUSED, side.cores)
    sums = tuple(slots["sum"].reshape(core.shape) for slots, core in zip(fresh, side.cores, strict=True))
    state = [jax.tree.map(jnp.array, side.cores), sums]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(cores: Any, sums: Any, slopes: Any) -> Any:
        sums = jax.tree.map(lambda s, g: s + g * g, sums, slopes)
        rate, eps = FUSED.learning_rate_at(jnp.int32(0)), FUSED.eps

        def stepped(core: jax.Array, total: jax.Array, slope: jax.Array) -> jax.Array:
            return core - rate * slope * jnp.where(total > 0, jax.lax.rsqrt(total + eps), 0)

        return jax.tree.map(stepped, cores, sums, slopes), sums

    def run() -> Any:
        state[:] = update(*state, jitted(state[0], None, side.ids, side.gradient, *extra))
        return state

    return run


def check(variants: Mapping[str, Callable[[], Any]], tolerance: float) -> None:
    """Raises AssertionError unless every variant computes what the first does."""
    whole, *rest = (jax.tree.leaves(run()) for run in variants.values())
    for other in rest:
        for one, two in zip(whole[:3], other[:3], strict=True):
            np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance * np.abs(one).max())
