"""The whole backward pass of a lookup on a GPU: casted gather-reduce and optimizer step in one kernel.

The gradient of a unique row is summed in registers and applied from there; it never reaches device memory. Only long
segments (see ``segments``) leave partial sums behind, at most one row for every ``split`` lookups. Many tables, of
different dims, dtypes and optimizers, share each launch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref

from jrec.pallas import rules, segments
from jrec.pallas.gather_reduce import make_pieces
from jrec.pallas.interpret import interpret_params
from jrec.pallas.launch import Interpret, Job, Steps, check_dim, launch_together, ops_for
from jrec.pallas.rules import Rule
from jrec.pallas.segments import Gather, Lookups
from jrec.pallas.tile import Tile
from jrec.pallas.tuning import TuningConfig, runs_a_block, tune
from jrec.pallas.update import Rounding, Target, Updater, finished, in_place
from jrec.row_optimizers import RowOptimizer

Updated = tuple[jax.Array, dict[str, jax.Array]]  # a table and its slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """One casted update among several.

    Attributes:
      optimizer: One of jrec's row optimizers.
      table: (num_rows, dim), float32, bfloat16 or float16.
      slots: The slots by name, float32.
      rows: (unique_capacity,) int32 of the cast.
      offsets: (unique_capacity + 1,) int32 of the cast.
      sources: (capacity,) int32 of the cast.
      num_unique: () int32 of the cast; more than the capacity means that rows were left out.
      bag_gradients: (num_bags, dim) float32 or bfloat16.
      weights: (capacity,) float32 in the order of the cast, or None.
      step: () int32.
      gradient_scale: () float32.
      rounding: ``jrec.ops.rounding.round_values``, which is used with a key.
      rounding_key: (2,) uint32 for stochastic rounding, or None for round to nearest.
      rounding_rows: (unique_capacity,) int32, the numbers that rounding hashes in place of ``rows``, or None.
      dim: Elements of a row that count, where the storage is padded; None for all.
      config: Tuning, or None for ``tune``'s.
    """

    optimizer: RowOptimizer
    table: jax.Array
    slots: dict[str, jax.Array]
    rows: jax.Array
    offsets: jax.Array
    sources: jax.Array
    num_unique: jax.Array
    bag_gradients: jax.Array
    weights: jax.Array | None
    step: jax.Array
    gradient_scale: jax.Array
    rounding: Rounding | None = None
    rounding_key: jax.Array | None = None
    rounding_rows: jax.Array | None = None
    dim: int | None = None
    config: TuningConfig | None = None


class _Work(NamedTuple):
    """The arrays of a request, as the kernels take them; ``active`` is (1,) int32, how many segments are real."""

    target: Target
    gather: Gather
    offsets: jax.Array
    active: jax.Array


class _Variant(NamedTuple):
    """The part of a request that kernels are compiled for."""

    rule: Rule
    rounding: Rounding | None
    config: TuningConfig


def casted_update(request: UpdateRequest) -> Updated:
    """Sums the bag gradients of every unique row and takes an optimizer step along them (Algorithm 3, fused).

    See ``jrec.ops.casted_update`` for the contract.

    Args:
      request: The table, the cast and the gradients.

    Returns:
      The new table and slots, aliases of the old ones under donation.

    Raises:
      NotImplementedError: For a dim of more than 1024 or an unknown optimizer.
    """
    return casted_update_many([request])[0]


def casted_update_many(requests: Sequence[UpdateRequest]) -> list[Updated]:
    """Several casted updates in the launches of one; dims, dtypes and optimizers may differ.

    Args:
      requests: One for each table.

    Returns:
      The new table and slots of each: the bits that ``casted_update`` gives one by one.

    Raises:
      NotImplementedError: For a dim of more than 1024 or an unknown optimizer.
    """
    updated: list[Updated] = []
    work, variants, numbers = [], [], []
    for number, request in enumerate(requests):
        check_dim("casted_update", request.table.shape[1])
        rule = rules.rule_of(request.optimizer, request.dim or request.table.shape[1])
        updated.append((request.table, request.slots))
        # Mosaic GPU has no arrays without elements, and without lookups no row changes.
        if 0 not in (request.rows.shape[0], request.sources.shape[0], request.bag_gradients.shape[0]):
            prepared, variant = _prepared(request, rule)
            work.append(prepared)
            variants.append(variant)
            numbers.append(number)
    if work:
        new = _casted_update(work, variants=tuple(variants), interpret=interpret_params())
        for number, of_table in zip(numbers, new, strict=True):
            updated[number] = of_table
    return updated


def _prepared(request: UpdateRequest, rule: Rule) -> tuple[_Work, _Variant]:
    config = request.config
    if config is None:
        config = tune(
            dim=request.table.shape[1],
            itemsize=rule.access(request.table.dtype.itemsize),
            length=None,
            element_slots=sum(shape == "element" for _, shape in rule.slots),
        )
    hyper = rules.hyperparameters(request.optimizer, request.step, request.gradient_scale)
    # The learning rate is an operand, not part of what is compiled for: a schedule compiles one kernel.
    target = Target(request.table, request.slots, request.rows, hyper, request.rounding_key, request.rounding_rows)
    gather = Gather(request.bag_gradients, request.sources, request.weights)
    active = request.num_unique.reshape(1)  # a walk ends with its rows, so more than there are does no harm
    rounding = request.rounding if request.rounding_key is not None else None
    return _Work(target, gather, request.offsets, active), _Variant(rule, rounding, config)


@functools.partial(jax.jit, static_argnames=("variants", "interpret"))
def _casted_update(work: list[_Work], *, variants: tuple[_Variant, ...], interpret: Interpret) -> list[Updated]:
    return launch_together(
        [_steps(one, variant, interpret) for one, variant in zip(work, variants, strict=True)], interpret=interpret
    )


def _steps(work: _Work, variant: _Variant, interpret: Interpret) -> Steps[Updated]:
    """Pieces first, then all rows in one launch: those with long segments wait for pieces while the others stream."""
    table, config = work.target.table, variant.config
    dim, itemsize = table.shape[1], variant.rule.access(table.dtype.itemsize)
    # As refs, so that every launch of the update writes the same arrays where they are.
    work = work._replace(target=in_place(work.target))
    # Launches of their own, one a level: whatever reads a piece is in a later launch.
    levels, runs = yield from make_pieces(dim, work.gather, work.offsets, config, interpret)
    jobs = [
        _ShortRows(
            updater=_updater(variant, Tile.of(dim, itemsize, chunks=config.chunks), interpret), config=config
        ).job(work)
    ]
    if runs is not None:
        # Long segments take longest, so their blocks come first. They may share the launch, since a row's segment is
        # either long or short: no row is updated twice.
        jobs.insert(0, _long(_updater(variant, Tile.of(dim, itemsize), interpret), work, levels, runs, config))
    yield jobs
    return finished(work.target)


def _updater(variant: _Variant, tile: Tile, interpret: Interpret) -> Updater:
    return Updater(tile=tile, ops=ops_for(interpret), rule=variant.rule, rounding=variant.rounding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ShortRows:
    """The walk that updates rows with short segments, its methods in the order in which a tile passes through them.

    Where a block visits several tiles, ``bounds`` runs two tiles ahead of ``casted_update_short``, ``lookups`` one, so
    that a chain of three dependent loads (offsets, then indices, then rows) waits for device memory once a tile, not
    three times.
    """

    updater: Updater
    config: TuningConfig

    def bounds(
        self, item: jax.Array, active: Ref, target: Target, gather: Gather, offsets: Ref
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where each row's segment begins and ends, and the row's address in the table."""
        del active, gather
        low, high = segments.bounds(self.updater.tile, self.updater.ops, offsets, item)
        return low, high, self.updater.addresses(target, item)

    def lookups(
        self,
        item: jax.Array,
        bounds: tuple[jax.Array, jax.Array, jax.Array],
        active: Ref,
        target: Target,
        gather: Gather,
        offsets: Ref,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Lookups | None]:
        """Leaves out rows whose segments are long, and loads the first lookups of the others."""
        del item, active, target, offsets
        low, high, address = bounds
        # An empty segment updates too: with momentum or decay, a row of zero gradient moves.
        # A row of a long segment takes no part here: without an address nothing of it is read or written.
        address = jnp.where(segments.is_short(low, high, self.config.split), address, -1)
        high = jnp.where(address >= 0, high, low)
        ahead = segments.load_lookups(self.updater.tile, self.updater.ops, gather, low, high, unroll=self.config.unroll)
        return low, high, address, ahead

    def casted_update_short(
        self,
        item: jax.Array,
        loaded: tuple[jax.Array, jax.Array, jax.Array, Lookups | None],
        active: Ref,
        target: Target,
        gather: Gather,
        offsets: Ref,
    ) -> None:
        """Sums each row's gradients in registers, and takes the optimizer's step."""
        del active, offsets
        low, high, address, ahead = loaded
        tile, ops, updater = self.updater.tile, self.updater.ops, self.updater
        # Loaded before the sums, the old row arrives while they are taken; it costs its registers meanwhile.
        old = updater.load(target, item, address) if self.config.prefetch else None
        gradients = segments.add_range(
            tile, ops, gather, low, high, tile.zeros(), unroll=self.config.unroll, lookups=ahead
        )
        # Each row of the table is the row of one segment, so no other thread reads or writes it: no atomics, and load,
        # sum and store may come in any order between tiles.
        updater.apply(target, old or updater.load(target, item, address), gradients)

    def job(self, work: _Work) -> Job:
        """The walk over all rows of a request."""
        return Job(
            body=self.casted_update_short,
            tile=self.updater.tile,
            count=work.target.rows.shape[0],
            operands=(work.active, work.target, work.gather, work.offsets),
            out_types=(),
            blocks=self.config.blocks,
            # A cast has room for more unique rows than most batches have; the walk ends behind the real ones.
            active=0,
            stages=(self.bounds, self.lookups),
        )


def _long(updater: Updater, work: _Work, levels: list[Gather], runs: jax.Array, config: TuningConfig) -> Job:
    """Updates the rows whose segments are long, from their pieces."""
    tile, ops, width = updater.tile, updater.ops, runs_a_block(runs.shape[0], updater.tile)

    def casted_update_long(item: jax.Array, target: Target, levels: list[Gather], runs: Ref, offsets: Ref) -> None:
        def visit(segment: jax.Array, low: jax.Array, high: jax.Array) -> None:
            address = updater.addresses(target, segment)
            old = updater.load(target, segment, address) if config.prefetch else None
            gradients = segments.add_nodes(tile, ops, levels, low, high, split=config.split, unroll=config.long_unroll)
            updater.apply(target, old or updater.load(target, segment, address), gradients)

        segments.visit_long(tile, ops, runs, offsets, item, visit, split=config.split, width=width)

    return Job(
        body=casted_update_long,
        tile=tile,
        count=-(-runs.shape[0] // width) * tile.rows,
        operands=(work.target, levels, runs, work.offsets),
        out_types=(),
        blocks=config.blocks,
    )
