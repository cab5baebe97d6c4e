"""A tensor-train table among the stacks of a model: the variables of its cores and of a cache of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jrec.ops.layout import Stack
from jrec.ops.row_init import table_key
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.tt import TTCacheConfig, TTShape, tt_init
from jrec.ops.tt.cost import Contraction
from jrec.ops.tt.init import Initializer
from jrec.tiers.cores import COUNTERS, Cores, counted, init_slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTOptions:
    """How the tensor-train tables of a model start, and which of them have a cache.

    Attributes:
      initializer: How cores are drawn, see ``tt_init``.
      caches: Caches of uncompressed rows, by table; a table that is not named has none.
      contraction: How lookups are computed, see ``tt_lookup``; None for the choice of ``jrec.ops.tt.explain``.
        "sample" is EL-Rec's sample-level reuse, which tables with a cache do not take.
    """

    initializer: Initializer = "sampled_gaussian"
    caches: Mapping[str, TTCacheConfig] = dataclasses.field(default_factory=dict)
    contraction: Contraction | None = None


class CacheHits(NamedTuple):
    """How many lookups in training a table's cache has answered, of how many there were."""

    hits: int
    lookups: int

    @property
    def rate(self) -> float | None:
        """Hits by lookups; None without lookups."""
        return self.hits / self.lookups if self.lookups else None


class TTCore(nnx.Variable):
    """A core of a tensor-train table. Not an ``nnx.Param``: it is updated in the backward pass, as a ``Table`` is."""


class TTCached(nnx.Variable):
    """Rows that a tensor-train table keeps in full, or their numbers."""


class TTStack(nnx.Module):
    """A tensor-train table whose cores a row optimizer updates; ``EmbeddingCollection`` makes it.

    A table with a cache holds the cached rows and their numbers as well, which predictions need; their slots, the
    tracker of frequencies and the counts of lookups and hits are among the optimizer's slots.

    Outside a collection use ``TTEmbeddingBag``, which has gradients and takes any optax optimizer.

    Args:
      stack: The stack, a tensor-train table.
      key: The key of the collection's initial parameters; the cores follow from it and the table's name.
      options: See ``TTOptions``.
    """

    def __init__(self, stack: Stack, key: jax.Array, *, options: TTOptions):
        if stack.tt_shape is None:
            raise ValueError(f"stack {stack.name} is uncompressed, not a tensor-train table")
        table, bound = stack.tables[0].name, stack.tables[0].initial_bound
        self.shape: TTShape = stack.tt_shape
        cores = tt_init(
            self.shape,
            table_key(key, table),
            initializer=options.initializer,
            variance=None if bound is None else bound**2 / 3,
            dtype=stack.dtype,
        )
        self.cores = nnx.List([TTCore(core) for core in cores])
        self.cache_config: TTCacheConfig | None = options.caches.get(table)
        self.contraction: Contraction | None = options.contraction
        self.cached = nnx.Dict({})
        if self.cache_config is not None:
            size = self.cache_config.cache_rows
            ids = jnp.full(size, self.shape.rows, jnp.int32)
            rows = jnp.zeros((size, self.shape.dim), jnp.float32)
            self.cached = nnx.Dict({"ids": TTCached(ids), "rows": TTCached(rows)})

    def arrays(self) -> tuple[jax.Array, ...]:
        """The cores as plain arrays."""
        return tuple(core.get_value() for core in self.cores)

    def set_arrays(self, cores: tuple[jax.Array, ...]) -> None:
        """Replaces the cores."""
        for variable, core in zip(self.cores, cores, strict=True):
            variable[...] = core

    def store(self, slots: Slots) -> Cores:
        """The cores and the cache with their slots, as a step takes them."""
        cached = {name: variable[...] for name, variable in self.cached.items()}
        return Cores(
            cores=self.arrays(), cached=cached, slots=slots, shape=self.shape, cache=self.cache_config,
            contraction=self.contraction,
        )  # fmt: skip

    def put(self, store: Cores) -> None:
        """Takes the cores and the cached rows of a store."""
        self.set_arrays(store.cores)
        for name, variable in self.cached.items():
            variable[...] = store.cached[name]

    def init_slots(self, optimizer: RowOptimizer, *, cores: RowOptimizer | None = None) -> Slots:
        """Fresh slots of all cores and of the cached rows, the tracker and the counters, by name.

        Args:
          optimizer: The optimizer of cached rows.
          cores: The optimizer of the cores, to which a slice is a row; None for the same.
        """
        return init_slots(optimizer, self.arrays(), self.shape, self.cache_config, of_cores=cores)

    def cache_hits(self, slots: Mapping[str, jax.Array | nnx.Variable]) -> CacheHits:
        """The hits of the table's cache since its slots were made; waits for the device.

        Args:
          slots: The table's slots, from ``init_slots`` or a step.

        Raises:
          ValueError: If the table has no cache, or the slots are not its own.
        """
        if self.cache_config is None or (missing := sorted(set(COUNTERS) - set(slots))):
            problem = "it has no cache" if self.cache_config is None else f"the slots lack {', '.join(missing)}"
            raise ValueError(f"no hits are counted: {problem}; give the table a cache (TTOptions), and its own slots")
        return CacheHits(**{name: counted(slots[name][...]) for name in COUNTERS})
