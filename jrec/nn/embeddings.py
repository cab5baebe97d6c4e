"""The embedding tables of a model: stacked arrays on the device, tensor-train cores; in Variable types of their own."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jrec.memory import keep_by_default
from jrec.mesh.communication import Communication
from jrec.mesh.step import StepOptions
from jrec.nn.feature_lookup import lookup_feature, masked_max
from jrec.nn.tt_stack import CacheHits, TTOptions, TTStack
from jrec.ops import rounding
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.lookup import init_slots, rows_left_out
from jrec.ops.row_init import init_rows, init_stack_rows, is_threefry
from jrec.ops.storage import pad, padded_dim
from jrec.ops.types import Bags
from jrec.row_optimizers import SGD, RowOptimizers, Slots, optimizer_of
from jrec.tiers.cores import Cores
from jrec.tiers.local_rows import LocalRows
from jrec.tiers.store import Context, Residuals, Store, Stores, apply_updates, look_up, updates

# Every model imports this module, as a rule before it makes its first array. Once JAX's threads run it is too late:
# glibc has given each of them a heap of its own by then, which shrinks whatever is asked for.
keep_by_default()


class Table(nnx.Variable):
    """A stack of embedding tables. Not an ``nnx.Param``: dense optimizers and ``nnx.grad`` do not touch it."""


class TableKey(nnx.Variable):
    """The key of a collection's initial rows, as its words: some rows are made elsewhere, or later."""


class EmbeddingCollection(nnx.Module):
    """All embedding tables of a model, each in its tier: whole on the device, or as the cores of a tensor train.

    An uncompressed table starts uniform in ±``TableConfig.bound``, 1/sqrt(rows) unless given; one of tier "tt" starts
    with the variance of such rows, as ``tt_init`` draws it. The first part of a table in parts starts with the same
    rows as the whole table would.
    Rows of tier "host", and those that a plan places, are not in here: a step is given their stores (``jrec.nn.step``).

    Args:
      layout: The tables and features.
      implementation: The implementation of the embedding ops; None for the platform's fastest.
      pad_rows: Whether rows are stored with zeros up to a multiple of 16 bytes, for the widest accesses of a GPU; None
        does so for the Pallas kernels. Activations, gradients and results are the same with and without padding.
      tt: Options of the tensor-train tables.
      unique_capacities: How many unique rows of a batch fit, by device stack. A stack that is not named has room for
        all rows that a batch of the layout can touch. ``rows_left_out`` counts rows that did not fit; their gradients
        are lost and the loss of ``train_step`` is NaN.
      key: The key of the initial rows and cores, which depend only on it, the table's name and the row's number; None
        draws one from ``rngs``.
      rngs: Its ``params`` stream gives the key where ``key`` is None.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        *,
        implementation: Implementation | None = None,
        pad_rows: bool | None = None,
        tt: TTOptions | None = None,
        unique_capacities: Mapping[str, int] | None = None,
        key: jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        self.layout = layout
        self.unique_capacities = _checked_capacities(layout, unique_capacities or {})
        self.implementation: Implementation | None = implementation
        self.pad_rows = implementation == "pallas" if pad_rows is None else pad_rows
        key = rngs.params() if key is None else key
        whole = layout.device_stacks
        self.stacks = nnx.Dict({s.name: Table(init_stack(s, key, pad_rows=self.pad_rows)) for s in whole})
        options = TTOptions() if tt is None else tt
        self.tt = nnx.Dict({stack.name: TTStack(stack, key, options=options) for stack in layout.tt_stacks})
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        self.key_implementation = str(jax.random.key_impl(key)) if typed else ""
        self.key = TableKey(jax.random.key_data(key) if typed else key)
        self.exact = False  # whether rows are read with the slots of exact optimizers; ``SparseOptimizer`` says so

    def table_key(self) -> jax.Array:
        """The key of the initial rows, wherever they are.

        Raises:
          ValueError: If the collection is abstract (``nnx.eval_shape``), so that its key has no value.
        """
        words: Any = self.key.get_value()
        if isinstance(words, jax.ShapeDtypeStruct):
            raise ValueError(
                "the embeddings are abstract, without the key of their initial rows; say which it is (key)"
            )
        return jax.random.wrap_key_data(words, impl=self.key_implementation) if self.key_implementation else words

    def without_rows(self, layout: EmbeddingLayout) -> None:
        """Lets the rows of the device's stacks go, in place: a plan places them from now on.

        Args:
          layout: The same tables with a plan (``EmbeddingLayout.with_plan``).
        """
        self.layout, self.stacks, self.unique_capacities = layout, nnx.Dict({}), ()

    def arrays(self) -> dict[str, jax.Array]:
        """The device's stacks as they are stored: plain arrays, (rows, dim or more) by name; see ``dims``."""
        return {name: table.get_value() for name, table in self.stacks.items()}

    @property
    def dims(self) -> dict[str, int]:
        """How many elements of a stored row are real, by stack of the device; zeros follow where rows are padded."""
        return {name: self.layout.stacks[name].dim for name in self.stacks}

    def set_arrays(self, arrays: Mapping[str, jax.Array]) -> None:
        """Replaces the device's stacks."""
        for name, table in self.stacks.items():
            table[...] = arrays[name]

    def stores(
        self, slots: Mapping[str, Slots] | None = None, *, bags: Mapping[str, Bags] | None = None
    ) -> dict[str, LocalRows | Cores]:
        """The rows and cores that the collection holds, by stack, as a step takes them.

        Args:
          slots: Optimizer slots from ``init_slots``; None to predict.
          bags: The bags to look up, which bound the number of unique rows; None where nothing is looked up.

        Raises:
          ValueError: If a stack has no bags.
        """
        held, by_stack = (*self.stacks, *self.tt), slots or {}
        if bags is not None and (missing := sorted(set(held) - set(bags))):
            raise ValueError(f"there are no bags for stack(s) {', '.join(missing)}, only for {sorted(bags)}")
        stores: dict[str, LocalRows | Cores] = {}
        for name, values in self.arrays().items():
            stores[name] = LocalRows(
                values=values,
                slots=dict(by_stack.get(name, {})),
                dim=self.dims[name],
                unique_capacity=None if bags is None else self._unique_capacity(name, values, bags[name]),
            )
        return stores | {name: stack.store(dict(by_stack.get(name, {}))) for name, stack in self.tt.items()}

    def with_own(
        self, other_stores: Stores, slots: Mapping[str, Slots] | None = None, *, bags: Mapping[str, Bags] | None
    ) -> dict[str, Store]:
        """The stores of all stacks of the layout: the collection's own (``stores``), and ``other_stores``.

        Raises:
          ValueError: If a stack has no bags, or its rows are neither in here nor given.
        """
        every = {**self.stores(slots, bags=bags), **other_stores}
        if elsewhere := [name for name in self.layout.stacks if name not in every]:
            raise ValueError(
                f"the rows of stack(s) {', '.join(elsewhere)} are in host memory or on several devices; give the step"
                " their stores (jrec.nn.step)"
            )
        return every

    def put(self, stores: Mapping[str, Any]) -> dict[str, Slots]:
        """Takes the rows and cores of ``stores`` after a step; their slots are returned, by stack."""
        self.set_arrays({name: stores[name].values for name in self.stacks})
        for name, stack in self.tt.items():
            stack.put(stores[name])
        return {name: stores[name].slots for name in (*self.stacks, *self.tt)}

    def contexts(
        self,
        *,
        optimizer: RowOptimizers | None = None,
        cores: RowOptimizers | None = None,
        step: jax.Array | int = 0,
        rounding_key: jax.Array | None = None,
        communication: Communication | None = None,
    ) -> dict[str, Context]:
        """What the store of each stack of the layout knows of a step.

        Args:
          optimizer: One optimizer for all rows, or one for each stack, None for a frozen stack; None to predict.
          cores: The optimizer of slices of tensor-train cores; None for the same as of rows.
          step: () int32, the number of steps taken before.
          rounding_key: (2,) uint32, a new one for every step; see ``apply_gradients``.
          communication: The other devices, inside ``shard_map``; None on a single one.
        """
        contexts = {}
        for name, stack in self.layout.stacks.items():
            key = rounding_key
            if key is not None and stack.compressed:
                # Cores are numbered from slice 0 in every table: without a key of its own each table's would draw the
                # same bits.
                key = rounding.derived_key(key, zlib.crc32(name.encode()))
            options = StepOptions(step=step, rounding_key=key, stack=stack, implementation=self.implementation)
            contexts[name] = Context(
                options=options,
                optimizer=optimizer_of(optimizer, name),
                cores=optimizer_of(cores, name) if stack.compressed else None,
                pad_rows=self.pad_rows,
                communication=communication,
            )
        return contexts

    def lookup(self, bags: Mapping[str, Bags]) -> tuple[dict[str, jax.Array], dict[str, Residuals]]:
        """Phase one: activations (num_bags, dim) by stack, and what their backward pass needs.

        Raises:
          ValueError: If a stack has no bags, or its rows are not in here; if an exact optimizer trains rows, which are
            looked up by ``SparseOptimizer.lookup``.
        """
        self._check_not_exact()
        return look_up(self.with_own({}, bags=bags), bags, self.contexts(), self.implementation)

    def cache_hits(self, slots: Mapping[str, Mapping[str, jax.Array | nnx.Variable]]) -> dict[str, CacheHits]:
        """Hits and lookups in training of each tensor-train table with a cache, by table; waits for the device.

        Args:
          slots: By stack, such as ``SparseOptimizer.slots``, or what ``init_slots`` or ``apply_gradients`` returned.

        Example:
          >>> tt_model.embeddings.cache_hits(tt_optimizer.slots)["item"]  # before the first step
          CacheHits(hits=0, lookups=0)
        """
        cached = {name: stack for name, stack in self.tt.items() if stack.cache_config is not None}
        return {
            self.layout.stacks[name].tables[0].name: stack.cache_hits(slots[name]) for name, stack in cached.items()
        }

    def lookup_feature(self, name: str, ids: jax.Array, *, weights: jax.Array | None = None) -> jax.Array:
        """Looks up one feature by itself, as for serving. Not differentiable: train with ``lookup``.

        Args:
          name: The feature.
          ids: Row numbers of the feature's table, integers of any type, NumPy's or JAX's: (batch,) for one id an
            example, or (batch, length) of any length; negative ids are absent.
          weights: float32 of the ids' shape, or None.

        Returns:
          (batch, dim) float32, pooled as the feature is; of pooling "none" (batch, length, dim), zeros for absent ids.
          Inside jit, an id past the table gives NaN.

        Raises:
          ValueError: If there is no such feature, its rows are in host memory or on several devices, shapes or dtypes
            do not fit, or, outside jit, an id is past the table.

        Example:
          >>> vectors = nnx.jit(lambda model, ids: model.embeddings.lookup_feature("user", ids))(model, users)
        """
        self._check_not_exact()
        return lookup_feature(self, name, ids, weights)

    def _check_not_exact(self) -> None:
        if self.exact:
            raise ValueError(
                "rows are trained by an exact optimizer, which reads them with its slots: look them up by"
                " optimizer.lookup(model, bags), the method of jrec.nn.SparseOptimizer"
            )

    def _unique_capacity(self, name: str, rows: jax.Array, bags: Bags) -> int:
        stack = self.layout.stacks[name]
        # No batch reads more unique rows than it has lookups, or the table rows.
        examples, most = bags.num_bags // stack.bags_per_example, min(bags.capacity, rows.shape[0])
        if bags.capacity <= stack.capacity(examples):  # longer bags than the layout's have room for all of their rows
            most = min(most, stack.unique_capacity(examples))
        return min(dict(self.unique_capacities).get(name, most), most)

    def rows_left_out(self, residuals: Mapping[str, Residuals]) -> jax.Array:
        """How many unique rows did not fit into ``unique_capacities``, () int32; ``apply_gradients`` skips them."""
        left_out = rows_left_out({name: residuals[name] for name in self.stacks})
        return functools.reduce(jnp.add, left_out.values(), jnp.int32(0))

    def init_slots(self, optimizer: RowOptimizers, *, cores: RowOptimizers | None = None) -> dict[str, Slots]:
        """Fresh slots by stack.

        Args:
          optimizer: One optimizer for all rows, or one for each stack, None for a frozen stack.
          cores: The optimizer of slices of tensor-train cores; None for the same as of rows.
        """
        slots = init_slots(optimizer, self.arrays())
        frozen = SGD(learning_rate=0.0)  # whose cache, if it has one, still has state
        for name, stack in self.tt.items():
            of_rows, of_cores = optimizer_of(optimizer, name) or frozen, optimizer_of(cores, name)
            slots[name] = stack.init_slots(of_rows, cores=of_cores)
        return slots

    def apply_gradients(
        self,
        optimizer: RowOptimizers,
        slots: Mapping[str, Slots],
        residuals: Mapping[str, Residuals],
        gradients: Mapping[str, jax.Array],
        *,
        cores: RowOptimizers | None = None,
        step: jax.Array | int = 0,
        rounding_key: jax.Array | None = None,
    ) -> dict[str, Slots]:
        """Phase two, in place on the tables: updates what was looked up, tier by tier.

        Args:
          optimizer: One optimizer for all rows, or one for each stack, None for a frozen stack, which does not change.
          slots: Optimizer slots from ``init_slots`` or the step before.
          residuals: The residuals from ``lookup``.
          gradients: (num_bags, dim) float32 by stack: the loss's gradient of the activations.
          cores: The optimizer of slices of tensor-train cores; None for the same as of rows.
          step: () int32, the number of steps taken before.
          rounding_key: (2,) uint32, a new one for every step: 16-bit rows and cores are rounded stochastically; None
            rounds to nearest.

        Returns:
          The new slots.
        """
        contexts = self.contexts(optimizer=optimizer, cores=cores, step=step, rounding_key=rounding_key)
        stores = self.stores(slots)
        pending = updates(stores, residuals, gradients, contexts)
        return self.put(apply_updates(stores, pending, contexts, self.implementation))

    def features(self, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]) -> dict[str, jax.Array]:
        """Activations by feature: (batch, dim) where pooled, (batch, max_length, dim) where not; see ``masks``.

        The activation of a feature whose table comes in parts is the sum of the parts' bags.
        """
        return {name: self._feature(name, activations, bags) for name in self.layout.order}

    def _feature(self, name: str, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]) -> jax.Array:
        parts = []
        for stack, number in self.layout.places[name]:
            feature, batch = stack.features[number], activations[stack.name].shape[0] // stack.bags_per_example
            config, begin = feature.config, feature.first_bag * batch
            # Bags are feature-major: a feature's bags of all examples lie together, and are a slice.
            rows = activations[stack.name][begin : begin + config.bags_per_example * batch]
            parts.append(rows.reshape(batch, config.max_length, stack.dim) if config.unpooled else rows)
        rows = functools.reduce(jnp.add, parts)
        return masked_max(rows, self._present(name, bags)) if config.pooling == "max" else rows

    def _present(self, name: str, bags: Mapping[str, Bags]) -> jax.Array:
        """Which positions of an unpooled feature hold an id, (batch, max_length) bool."""
        parts = []
        for stack, number in self.layout.places[name]:
            feature, batch = stack.features[number], bags[stack.name].num_bags // stack.bags_per_example
            begin, length = feature.first_bag * batch, feature.config.max_length
            parts.append(_present(bags[stack.name], begin, batch, length, stack.wide))
        return functools.reduce(jnp.logical_or, parts)

    def masks(self, bags: Mapping[str, Bags]) -> dict[str, jax.Array]:
        """Which positions of each unpooled ("none") feature hold an id, (batch, max_length) bool by feature."""
        return {f.name: self._present(f.name, bags) for f, _ in self.layout.features if f.pooling == "none"}

    def vectors(self, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]) -> list[jax.Array]:
        """The inputs of interactions: the features' vectors in the layout's order, (batch, vectors, dim) each.

        A pooled feature is one vector; one of pooling "none" is ``max_length`` vectors, zeros where a position holds no
        id. Features that are neighbours in the order and in their stack share an array, so that one stack is one array;
        each feature of a table in parts has its own.
        """

        def of_feature(name: str) -> jax.Array:
            rows = self._feature(name, activations, bags)
            return rows if rows.ndim == 3 else rows[:, None]

        arrays = []
        for run in _runs(self.layout):
            if isinstance(run, str):
                arrays.append(of_feature(run))
                continue
            stack = self.layout.stacks[run[0]]
            if any(f.config.unpooled for f in stack.features):
                of_run = [of_feature(f.config.name) for f in stack.features[run[1] : run[2]]]
                arrays.append(jnp.concatenate(of_run, axis=1))
            else:
                # Feature-major bags are (features, batch, dim) as they lie; interactions want examples first.
                whole = activations[stack.name].reshape(len(stack.features), -1, stack.dim).swapaxes(0, 1)
                arrays.append(whole[:, run[1] : run[2]])
        return arrays


def _runs(layout: EmbeddingLayout) -> list[tuple[str, int, int] | str]:
    """The layout's order as pieces of stacks, (stack, first feature, one past the last), and features in parts."""
    runs: list[tuple[str, int, int] | str] = []
    for name, ((stack, number), *rest) in layout.places.items():
        last = runs[-1] if runs else ""
        if rest:
            runs.append(name)
        elif isinstance(last, tuple) and (last[0], last[2]) == (stack.name, number):
            runs[-1] = (stack.name, last[1], number + 1)
        else:
            runs.append((stack.name, number, number + 1))
    return runs


def init_stack(stack: Stack, key: jax.Array, *, pad_rows: bool = False) -> jax.Array:
    """The initial rows of a stack's tables, made in place a few megabytes at a time.

    Keys of another generator than Threefry draw the rows of each table at once, which takes several times their memory.

    Args:
      stack: The stack, uncompressed.
      key: The key of the model's tables.
      pad_rows: Whether zeros follow each row up to a multiple of 16 bytes.

    Returns:
      (rows, dim), or (rows, padded dim), of the stack's dtype.
    """

    @jax.jit
    def init(key: jax.Array) -> jax.Array:
        if is_threefry(key):
            width = padded_dim(stack.dim, jnp.dtype(stack.dtype).itemsize) if pad_rows else stack.dim
            return init_stack_rows(stack.tables, stack.bases, key, stack.rows, width=width)
        rows = jnp.concatenate([init_rows(table, key) for table in stack.tables])
        return pad(rows) if pad_rows else rows

    return init(key)


def _present(bags: Bags, begin: int, batch: int, length: int, wide: bool) -> jax.Array:
    """Which of ``batch * length`` one-id bags from ``begin`` on hold an id, (batch, length) bool.

    On a mesh, ids of ``wide`` stacks are modulo 2^32; of these only -1 is padding.
    """
    stop = begin + batch * length
    if bags.offsets is None:
        ids = bags.ids[begin:stop, 0]
        present = ids != -1 if wide else ids >= 0
    else:
        present = bags.offsets[begin + 1 : stop + 1] > bags.offsets[begin:stop]
    return present.reshape(batch, length)


def _checked_capacities(layout: EmbeddingLayout, capacities: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The capacities in a hashable form, since they are static.

    Raises:
      ValueError: If a capacity names an unknown stack, or has no room for a row.
    """
    for name, capacity in capacities.items():
        if name not in layout.stacks:
            raise ValueError(f"unique_capacities names {name!r}, but the layout's stacks are {sorted(layout.stacks)}")
        if capacity < 1:
            raise ValueError(f"unique_capacities[{name!r}] is {capacity}; give room for one row at least")
    return tuple(sorted(capacities.items()))
