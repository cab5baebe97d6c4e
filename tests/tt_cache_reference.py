"""A tensor-train table with a cache of full rows in plain Python and float64, one lookup at a time."""

from __future__ import annotations

import numpy as np
import reference
import tt_reference


class CachedTable:
    """What ``jrec.ops.tt.cache`` does, with dictionaries in place of sorted arrays."""

    def __init__(self, config, shape, optimizer, cores, core_optimizer=None):
        self.config, self.shape, self.optimizer = config, shape, optimizer
        self.core_optimizer = core_optimizer or optimizer
        self.cores = [np.asarray(core).astype(np.float64) for core in cores]
        self.slots = [self._fresh(self.core_optimizer, len(core), core[0].size) for core in self.cores]
        self.cache = {}  # id -> (row, slots)
        self.counts, self.floor = {}, 0
        self.capacity = min(config.tracked_rows or 8 * config.cache_rows, shape.rows)

    def row(self, row):
        return self.cache[row][0] if row in self.cache else tt_reference.row_of(self.cores, row)

    def step(self, bags, gradients, *, step, scale=1.0):
        """Bags' outputs, hits and lookups; then the update, the tracking and the refresh."""
        out, hits, lookups = np.zeros((len(bags), self.shape.dim)), 0, {}
        of_rows = {}
        for b, bag in enumerate(bags):
            for _, row, weight in bag:
                if row >= self.shape.rows:
                    out[b] = np.nan
                    continue
                out[b] += weight * self.row(row)
                hits += row in self.cache
                lookups[row] = lookups.get(row, 0) + 1
                of_rows[row] = of_rows.get(row, 0) + weight * gradients[b].astype(np.float64)
        self._update(of_rows, step, scale)
        since, every = step + 1 - self.config.warmup_steps, self.config.refresh_every
        if step % self.config.track_every == 0 and (every is not None or since <= 0):
            self._track(lookups)
        if since == 0 or (since > 0 and every is not None and since % every == 0):
            self.refresh()
        return out, hits, sum(lookups.values())

    def refresh(self):
        chosen = sorted(self.counts, key=lambda row: (-self.counts[row], row))[: self.config.cache_rows]
        self.cache = {row: self.cache.get(row) or self._entry(row) for row in sorted(chosen)}

    def _entry(self, row):
        slots = {name: slot[0] for name, slot in self._fresh(self.optimizer, 1, self.shape.dim).items()}
        return tt_reference.row_of(self.cores, row), slots

    @staticmethod
    def _fresh(optimizer, rows, width):
        start = getattr(optimizer, "initial_accumulator", 0.0)
        shapes = {"element": (rows, width), "row": (rows,)}
        return {name: np.full(shapes[kind], start) for name, kind in optimizer.slots.items()}

    def _update(self, of_rows, step, scale):
        sums = [np.zeros(core.shape) for core in self.cores]
        chosen = [set() for _ in self.cores]
        cached = dict(self.cache)
        for row, slope in of_rows.items():
            if row in cached:
                values, slots = cached[row]
                self.cache[row] = reference.step_row(self.optimizer, values, slope, slots, step=step, scale=scale)
                continue
            tt_reference.add_core_gradients(self.cores, row, slope, sums)
            for k, digit in enumerate(tt_reference.digits_of(row, self.shape.row_factors)):
                chosen[k].add(digit)
        for k, core in enumerate(self.cores):
            for digit in chosen[k]:
                slots = {name: slot[digit] for name, slot in self.slots[k].items()}
                new, slots = reference.step_row(
                    self.core_optimizer,
                    core[digit].reshape(-1),
                    sums[k][digit].reshape(-1),
                    slots,
                    step=step,
                    scale=scale,
                )
                core[digit] = new.reshape(core[digit].shape)
                for name, slot in slots.items():
                    self.slots[k][name][digit] = slot

    def _track(self, lookups):
        merged = dict(self.counts)
        for row, count in lookups.items():
            merged[row] = merged.get(row, self.floor) + count
        ranked = sorted(merged, key=lambda row: (-merged[row], row))
        self.counts = {row: merged[row] for row in ranked[: self.capacity]}
        self.floor = max([self.floor, *(merged[row] for row in ranked[self.capacity :])])
