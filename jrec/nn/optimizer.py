"""One optimizer for a model's dense parameters and its tables."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.nn.embeddings import EmbeddingCollection
from jrec.nn.update import apply_gradients, joined_bags, step_contexts, step_stores
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.rounding import derived_key
from jrec.ops.types import Bags
from jrec.row_optimizers import BagGradients, Exact, RowOptimizer
from jrec.tiers.store import Residuals, look_up

Loss = Callable[[PyTree, Batch], jax.Array]
"""A function of what the model's ``logits`` returns, an array or a tree, and of the batch: a mean over the examples."""

_ROUNDING = 0x726F756E  # "roun": sets the keys of rounding apart from those of the initial parameters of the same seed


class SparseModel(Protocol):
    """The model that ``train_step`` needs: an ``EmbeddingCollection``, and logits from its activations.

    A step keeps what ``logits`` changes in the model: statistics of ``nnx.BatchNorm``, counts of ``nnx.Rngs``, any
    ``nnx.Variable``. It runs in the mode that the model is in; predictions are in eval mode and keep nothing. On a mesh
    every device runs ``logits`` on its part of the batch, and all keep one state: BatchNorm's statistics are the whole
    batch's, streams draw other numbers on each device, floats become the devices' mean by their examples, and what has
    no mean must not depend on the batch.
    """

    embeddings: EmbeddingCollection

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]
    ) -> PyTree[jax.Array]:
        """(batch,) float32, or an array or a tree of them that the loss takes, examples first.

        It may also take ``mask``, best with a default of None, which exports leave it at: (batch,) float32, 0 for rows
        that pad the batch.
        """
        ...

    def eval(self) -> object:
        """Turns eval mode on, as ``nnx.Module`` does; predictions call it on a copy of the model."""
        ...


class RowSlot(nnx.Variable):
    """An optimizer slot of an embedding stack, or of a core of one."""


class SparseOptimizer(nnx.Module):
    """``optax`` for a model's dense parameters, a row optimizer for its embedding tables.

    Tables may have different optimizers. A stack has one, so that a table that differs needs its own group:

      >>> user = jrec.TableConfig(name="user", rows=1000, dim=16, group="fixed")
      >>> item = jrec.TableConfig(name="item", rows=1000, dim=16)
      >>> features = [jrec.FeatureConfig(name=name, table=name) for name in ("user", "item")]
      >>> config = jrec.nn.DLRMConfig(num_dense=1, bottom_mlp=(32, 16), top_mlp=(1,))
      >>> model = jrec.nn.DLRM(config, jrec.EmbeddingLayout.build([user, item], features), rngs=nnx.Rngs(0))
      >>> rows = jrec.ops.SGD(learning_rate=0.1)
      >>> optimizer = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=rows, tables={"user": None})

    Args:
      model: The model whose ``nnx.Param`` variables and tables are trained.
      dense: An optax transformation.
      embedding: A row optimizer from ``jrec.ops``.
      cores: The row optimizer of tensor-train cores, to which a slice is a row, for all tables or by name; None, and
        tables that are not named, take the optimizer of their rows.
      tables: Row optimizers of single tables, by name, or None for a frozen table.
      max_global_norm: The greatest Euclidean norm of the gradients of dense parameters, rows and cores together, to
        which they are scaled down, as ``optax.clip_by_global_norm`` would scale dense gradients of all of them. A row's
        gradient is the sum over its lookups; frozen tables do not count. It comes before ``max_row_norm`` and weight
        decay. None for no clipping, which costs nothing; else a step sums the gradients of all looked-up rows once
        more, and keeps the float32 row gradients of one stack at a time in memory.
      rounding_seed: Updated rows of 16-bit tables and slices of 16-bit cores are rounded stochastically, so that
        updates below half of the last bit survive on average; None rounds to nearest. float32 is not rounded.
      bag_gradients: The dtype to which the loss's gradients of pooled rows are rounded before they are summed by row,
        always in float32. "bfloat16" halves the bytes that the update gathers, and those that gradients of bags sent
        to other devices take, for a relative error of at most 2^-9 in each. Tensor-train tables take float32.

    Raises:
      TypeError: If ``dense`` is a row optimizer, or rows or cores are given one of optax.
      ValueError: If ``tables`` or ``cores`` name an unknown table, a stack would need two optimizers, or
        ``max_global_norm`` is not above 0, or ``bag_gradients`` is another dtype.
    """

    def __init__(
        self,
        model: SparseModel,
        *,
        dense: optax.GradientTransformation,
        embedding: RowOptimizer,
        cores: RowOptimizer | Mapping[str, RowOptimizer] | None = None,
        tables: Mapping[str, RowOptimizer | None] = types.MappingProxyType({}),
        max_global_norm: float | None = None,
        rounding_seed: int | None = None,
        bag_gradients: BagGradients = "float32",
    ):
        if max_global_norm is not None and not max_global_norm > 0:
            raise ValueError(f"max_global_norm is {max_global_norm}, but must be above 0, or None for no clipping")
        if bag_gradients not in typing.get_args(BagGradients):
            raise ValueError(f"bag_gradients is {bag_gradients!r}, but must be 'float32' or 'bfloat16'")
        _check_kinds(dense, embedding, cores, tables)
        _check_every_step(dense, model)
        self.max_global_norm = max_global_norm
        self.rounding_seed = rounding_seed
        self.bag_gradients = bag_gradients
        self.dense = nnx.Optimizer(model, dense, wrt=nnx.Param)
        self.embedding = embedding
        stacks = model.embeddings.layout.members
        self._rows = _by_stack(stacks, embedding, tables, "tables")
        trains = [stack for stack in stacks if stack.compressed]
        own = {table.name: self.of(stack.name) for stack in trains for table in stack.tables}
        named = {name: cores for name in own if name not in tables} if isinstance(cores, RowOptimizer) else cores or {}
        self._cores = _by_stack(trains, embedding, {**own, **named}, "cores")
        _check_cores(trains, self.of, self.cores_of)
        # Predictions without this optimizer's slots would read rows at rest: the embeddings refuse them.
        model.embeddings.exact = self.has_tail
        slots = model.embeddings.init_slots(self.of, cores=self.cores_of)
        self.slots = nnx.Dict(
            {stack: nnx.Dict({name: RowSlot(slot) for name, slot in fresh.items()}) for stack, fresh in slots.items()}
        )

    def without_rows(self, before: EmbeddingLayout, layout: EmbeddingLayout) -> None:
        """Lets the slots of all rows go, in place, as ``EmbeddingCollection.without_rows`` does; cores keep theirs.

        Args:
          before: The layout of the optimizer's model.
          layout: The same tables with a plan.

        Raises:
          ValueError: If a stack of the new layout would need two optimizers.
        """
        whole = {table.name: self.of(s.name) for s in before.members if not s.compressed for table in s.tables}
        planned = [stack for stack in layout.members if not stack.compressed]
        trains = tuple((name, own) for name, own in self._rows if name in {stack.name for stack in layout.tt_stacks})
        self._rows = (*_by_stack(planned, self.embedding, whole, "tables"), *trains)
        self.slots = nnx.Dict({name: slots for name, slots in self.slots.items() if name in dict(trains)})

    def of(self, stack: str) -> RowOptimizer | None:
        """The row optimizer of a stack; None where its rows are frozen."""
        return dict(self._rows)[stack]

    @property
    def has_tail(self) -> bool:
        """Whether lookups read other rows than tables hold, by slots: of exact optimizers."""
        return any(optimizer is not None and optimizer.has_tail for _, optimizer in self._rows)

    def lookup(self, model: SparseModel, bags: Mapping[str, Bags]) -> tuple[dict[str, jax.Array], dict[str, Residuals]]:
        """``EmbeddingCollection.lookup`` of rows as they are before the next step, which exact optimizers need.

        Raises:
          ValueError: As ``EmbeddingCollection.lookup``.
        """
        embeddings = model.embeddings
        contexts, stores = step_contexts(embeddings, self), step_stores(embeddings, self, {}, bags)
        return look_up(stores, bags, contexts, embeddings.implementation)

    def cores_of(self, stack: str) -> RowOptimizer | None:
        """The row optimizer of the cores of a tensor-train table; None where they are frozen."""
        return None if self.of(stack) is None else dict(self._cores)[stack]

    def update(
        self,
        model: SparseModel,
        residuals: Mapping[str, Residuals],
        dense_gradients: PyTree,
        activation_gradients: Mapping[str, jax.Array],
        *,
        gradient_scale: jax.Array | float | None = None,
    ) -> jax.Array | None:
        """Steps dense parameters, rows and cores together, in place on ``model`` and on itself, in a loop of one's own.

          >>> activations, residuals = model.embeddings.lookup(batch.bags)
          >>> def loss(model, activations):
          ...     return jrec.nn.binary_cross_entropy(model.logits(batch.dense, activations, batch.bags), batch)
          >>> dense_gradients, activation_gradients = nnx.grad(loss, argnums=(0, 1))(model, activations)
          >>> optimizer.update(model, residuals, dense_gradients, activation_gradients)

        Args:
          model: The optimizer's model, which holds all of its rows.
          residuals: The residuals of ``EmbeddingCollection.lookup``, or of ``lookup``, by stack.
          dense_gradients: The gradients of ``nnx.Param``, as from ``nnx.grad``.
          activation_gradients: (num_bags, dim) float32 by stack: the loss's gradient of the activations.
          gradient_scale: A factor of all gradients before they are clipped, such as one over the loss scale; None for
            one.

        Returns:
          The norm of all gradients before they were clipped, () float32; None without ``max_global_norm``.

        Raises:
          ValueError: If rows of the model are in host memory or on several devices (``jrec.distribute``).
        """
        return self._update(model, None, residuals, dense_gradients, activation_gradients, gradient_scale)

    def update_accumulated(
        self,
        model: SparseModel,
        bags: Sequence[Mapping[str, Bags]],
        dense_gradients: PyTree,
        activation_gradients: Sequence[Mapping[str, jax.Array]],
        *,
        gradient_scale: jax.Array | float | None = None,
    ) -> jax.Array | None:
        """``update`` on the sums of the gradients of several micro-batches, as of one batch with all their bags.

        A row that several of them read takes one step, on the sum of its gradients, as dense parameters do. The bags
        are cast together, and tensor-train rows contracted again, which micro-batches in one step each would not need.

        Args:
          model: The optimizer's model, which holds all of its rows; unchanged since the lookups.
          bags: The bags of the micro-batches.
          dense_gradients: The sum of the micro-batches' gradients of ``nnx.Param``.
          activation_gradients: The activations' gradients of each micro-batch, as in ``update``.
          gradient_scale: A factor of all gradients: one over their number, where their losses are means.

        Returns:
          As ``update``.

        Raises:
          ValueError: If there are not as many bags as gradients, or their forms differ.
        """
        if len(bags) != len(activation_gradients) or not bags:
            raise ValueError(
                f"there are bags of {len(bags)} micro-batches, but gradients of {len(activation_gradients)}"
            )
        joined = joined_bags(model.embeddings.layout, bags)
        gradients = {name: jnp.concatenate([one[name] for one in activation_gradients]) for name in joined}
        return self._update(model, joined, {}, dense_gradients, gradients, gradient_scale)

    def _update(
        self,
        model: SparseModel,
        bags: Mapping[str, Bags] | None,
        residuals: Mapping[str, Residuals],
        dense_gradients: PyTree,
        activation_gradients: Mapping[str, jax.Array],
        gradient_scale: jax.Array | float | None,
    ) -> jax.Array | None:
        embeddings = model.embeddings
        # Without bags, stores have room for all rows: ``unique_capacities`` hold for a batch, not for several together.
        contexts, stores = step_contexts(embeddings, self), step_stores(embeddings, self, {}, None)
        if bags is not None:
            _, residuals = look_up(stores, bags, contexts, embeddings.implementation)
        _, norm = apply_gradients(
            model,
            self,
            stores,
            residuals,
            dense_gradients,
            activation_gradients,
            contexts=contexts,
            gradient_scale=gradient_scale,
        )
        return norm

    def narrowed(self, activation_gradients: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """The activations' gradients by stack, in ``bag_gradients`` where the stack's rows are uncompressed."""
        cores = dict(self._cores)
        return {
            name: gradients if name in cores else gradients.astype(self.bag_gradients)
            for name, gradients in activation_gradients.items()
        }

    @property
    def step(self) -> jax.Array:
        """() uint32, steps taken."""
        return self.dense.step[...]

    def rounding_key(self) -> jax.Array | None:
        """The key of the next step's rounding, (2,) uint32, or None for round to nearest.

        It depends only on the seed and the number of the step: a resumed run rounds like an uninterrupted one.
        """
        if self.rounding_seed is None:
            return None
        seed = jax.random.key_data(jax.random.key(self.rounding_seed, impl="threefry2x32"))
        return derived_key(derived_key(seed, _ROUNDING), self.step)


def _check_kinds(dense: object, embedding: object, cores: object, tables: Mapping[str, object]) -> None:
    """Refuses optax's optimizers for rows, and row optimizers for dense parameters."""
    if not (hasattr(dense, "init") and hasattr(dense, "update")):
        raise TypeError(f"dense is {dense!r}, but dense parameters are trained by one of optax, as optax.adagrad(0.1)")
    optimizers = {
        "embedding": embedding,
        **{f"tables[{name!r}]": own for name, own in tables.items() if own is not None},
    }
    many = isinstance(cores, Mapping)
    optimizers |= {f"cores[{name!r}]": own for name, own in cores.items()} if many else {"cores": cores or embedding}
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, RowOptimizer):
            raise TypeError(
                f"{name} is {_named(optimizer)}, but rows and cores are trained by a row optimizer, as"
                " jrec.ops.Adagrad(learning_rate=0.1)"
            )


def _check_cores(
    trains: Sequence[Stack],
    rows_of: Callable[[str], RowOptimizer | None],
    cores_of: Callable[[str], RowOptimizer | None],
) -> None:
    """Refuses exact optimizers for tensor trains, whose slices are not read one by one."""
    for stack in trains:
        for optimizer, key in ((cores_of(stack.name), "cores"), (rows_of(stack.name), "tables")):
            if isinstance(optimizer, Exact):
                name = stack.tables[0].name
                raise ValueError(
                    f"table {name!r} is a tensor train, but by {key} it would be trained by {type(optimizer).__name__};"
                    f" give it a lazy optimizer, as tables={{{name!r}: jrec.ops.Adam(learning_rate=0.001)}}, or in a"
                    f' configuration optimizer.embedding.tables.{name}.name = "adam"'
                )


def _named(optimizer: object) -> str:
    """Short enough for a message: a transformation of optax names only its functions."""
    return "one of optax" if isinstance(optimizer, optax.GradientTransformation) else repr(optimizer)


def _check_every_step(dense: optax.GradientTransformation, model: SparseModel) -> None:
    """Refuses a transformation that steps only now and then: rows would step every time."""
    # Shapes alone: the state of a large model would be made and thrown away.
    state = jax.eval_shape(dense.init, nnx.state(model, nnx.Param))

    def waits(node: object) -> bool:
        return isinstance(node, optax.MultiStepsState)

    if any(map(waits, jax.tree.leaves(state, is_leaf=waits))):
        raise ValueError(
            "dense is optax.MultiSteps, which steps dense parameters only after several micro-batches, but rows would"
            " step after each; give the optimizer inside it, and accumulate both by jrec.nn.accumulated_step or"
            " SparseOptimizer.update_accumulated"
        )


def _by_stack(
    stacks: Sequence[Stack], default: RowOptimizer, tables: Mapping[str, RowOptimizer | None], key: str
) -> tuple[tuple[str, RowOptimizer | None], ...]:
    """The optimizer of each stack, in a hashable form, since it is static."""
    names = {table.name for stack in stacks for table in stack.tables}
    if unknown := sorted(tables.keys() - names):
        raise ValueError(f"{key} name {', '.join(unknown)}, but there are only {', '.join(sorted(names)) or 'none'}")
    optimizers = []
    for stack in stacks:
        first, *rest = stack.tables
        own = tables.get(first.name, default)
        for table in rest:
            if (other := tables.get(table.name, default)) != own:
                raise ValueError(
                    f"tables {first.name!r} and {table.name!r} are in one stack, {stack.name}, but by {key} they are"
                    f" trained by {own or 'nothing'} and {other or 'nothing'}; give the tables that differ a"
                    f" TableConfig.group of their own"
                )
        optimizers.append((stack.name, own))
    return tuple(optimizers)
