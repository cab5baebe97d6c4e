"""A training step of a tensor-train table with a cache of full rows, over the cache's hit rate (TT-Rec, Figure 12).

Beside the same table without a cache, which says what the cache gains, and beside the uncompressed table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.tt_side import FUSED, KAGGLE_ROWS, PLAIN, Side, describe, shape_of
from jrec import ops
from jrec.ops import tt

DIM, RANK, LOOKUPS = 16, 32, 32768
HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def run(report: harness.Report, *, seconds: float) -> None:
    """Measures the step at every hit rate beside those without a cache and of the uncompressed table."""
    lookups = 2048 if report.quick else LOOKUPS
    side = Side(shape_of(KAGGLE_ROWS, DIM, RANK), lookups)
    for wanted in HIT_RATES[::2] if report.quick else HIT_RATES:
        step, rate = cached_step(side, wanted)
        peers = {"without cache": side.step, "uncompressed table": side.plain_step}
        report.compare_all(
            f"{describe(side.shape, lookups)}, cache of {lookups:,} rows",
            f"step, hit rate {rate:.1%}",
            harness.timed(step),
            {name: harness.timed(peer) for name, peer in peers.items()},
            seconds=seconds,
        )


def cached_step(side: Side, wanted: float) -> tuple[Callable[[], Any], float]:
    """A step with a cache that the share ``wanted`` of the lookups hits, as near as whole rows allow; that share."""
    shape = side.shape
    ids = rows_to_cache(np.asarray(side.ids), wanted, shape.rows)
    config = tt.TTCacheConfig(cache_rows=len(ids))
    cache = tt.tt_cache_init(config, shape, PLAIN)
    rows = np.zeros((len(ids), shape.dim), np.float32)
    real = ids < shape.rows
    if real.any():
        rows[real] = tt.tt_rows(side.cores, shape, ids[real])
    cache = dataclasses.replace(cache, ids=jnp.asarray(ids), rows=jnp.asarray(rows))

    def train(cores: Any, slots: Any, cache: Any, ids: jax.Array, targets: jax.Array) -> Any:
        out, residuals = tt.tt_cached_lookup(cores, cache, shape, ops.Bags(ids=ids))
        state = tt.tt_cached_apply_gradients(
            PLAIN, cores, slots, cache, shape, residuals, out - targets, core_optimizer=FUSED
        )
        return state, residuals.hits, residuals.lookups

    jitted = jax.jit(train, donate_argnums=(0, 1, 2))
    state = [jax.tree.map(jnp.array, side.cores), tt.tt_init_slots(FUSED, side.cores), cache]

    def step() -> Any:
        new, hits, lookups = jitted(*state, side.ids, side.gradient)
        state[:] = new
        return hits, lookups

    hits, lookups = step()
    return step, int(hits) / int(lookups)


def rows_to_cache(ids: np.ndarray, wanted: float, rows: int) -> np.ndarray:
    """As many sorted row numbers as there are ids: the most frequent rows that make up the share, then padding."""
    unique, counts = np.unique(ids, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    reached = np.cumsum(counts[order])
    chosen = unique[order[: np.searchsorted(reached, wanted * ids.size, side="left") + 1]] if wanted > 0 else unique[:0]
    cached = np.full(ids.size, rows, np.int32)
    cached[: len(chosen)] = np.sort(chosen)
    return cached
