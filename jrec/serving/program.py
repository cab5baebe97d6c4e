"""The dense part of a model as one program of looked-up vectors: StableHLO by ``jax.export``, of any batch size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

from jrec.ops.layout import EmbeddingLayout, FeatureConfig
from jrec.serving.format import ExportError

PLATFORMS = ("cpu", "cuda")
Program = Callable[[jax.Array, Mapping[str, jax.Array], Mapping[str, jax.Array]], Any]


class _Vectors:
    """Stands for a model's ``EmbeddingCollection`` where vectors were looked up elsewhere, by feature."""

    def __init__(self, layout: EmbeddingLayout, vectors: Mapping[str, jax.Array], masks: Mapping[str, jax.Array]):
        # JAX gives a traced function its dictionaries sorted by key, but models join features in the layout's order.
        self.layout = layout
        self._vectors = {name: vectors[name] for name in layout.order}
        self._masks = {name: masks[name] for name in layout.order if name in masks}

    def vectors(self, activations: object, bags: object) -> list[jax.Array]:
        """See ``EmbeddingCollection.vectors``."""
        del activations, bags
        return [x if x.ndim == 3 else x[:, None] for x in self._vectors.values()]

    def features(self, activations: object, bags: object) -> dict[str, jax.Array]:
        """See ``EmbeddingCollection.features``."""
        del activations, bags
        return dict(self._vectors)

    def masks(self, bags: object) -> dict[str, jax.Array]:
        """See ``EmbeddingCollection.masks``."""
        del bags
        return dict(self._masks)


class _Stacks(Mapping[str, Any]):
    """Stands for activations and bags by stack, which a served model does not have."""

    def __getitem__(self, name: str) -> NoReturn:
        self._refuse()

    def __iter__(self) -> Iterator[str]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ExportError(
            "the model's logits reads activations or bags itself, but serving looks vectors up by feature; read them by"
            " self.embeddings.features(activations, bags), vectors(activations, bags) and masks(bags)"
        )


def dense_program(model: Any, layout: EmbeddingLayout, unread: Collection[str] = ()) -> Program:
    """The function ``dense, vectors, masks -> outputs`` of a model in evaluation mode.

    ``dense`` is (batch, num_dense) float32, ``vectors`` float32 by feature: (batch, dim), of pooling "none"
    (batch, max_length, dim), zeros where a position holds no id; ``masks`` (batch, max_length) bool by feature of
    pooling "none". Outputs are what the model's ``logits`` returns, (batch,) float32 or a tree of arrays; all their
    floats are float32.

    Args:
      model: Any NNX module with ``embeddings`` and ``logits``; it does not change.
      layout: Its tables and features.
      unread: Features that are not among the inputs, of which the model sees zeros and no positions.
    """
    graph, state = nnx.split(model)  # of which only what ``logits`` reads becomes a constant: no table

    def outputs(dense: jax.Array, vectors: Mapping[str, jax.Array], masks: Mapping[str, jax.Array]) -> Any:
        served = nnx.merge(graph, state, copy=True)  # what it changes of its state stays in the trace
        served.eval()
        zeros, nowhere = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _shapes(layout, dense.shape[0], unread))
        _replace(served, served.embeddings, _Vectors(layout, {**zeros, **vectors}, {**nowhere, **masks}))
        named = {}
        if "mask" in inspect.signature(served.logits).parameters:  # whose 0 marks padding, which requests have none of
            named["mask"] = jnp.ones(dense.shape[0], jnp.float32)
        result = served.logits(dense, _Stacks(), _Stacks(), **named)
        return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, result)

    return outputs


def _replace(model: nnx.Module, embeddings: object, by: _Vectors) -> None:
    """Replaces a model's embeddings wherever a module of it refers to them."""
    for _, module in list(nnx.iter_modules(model)):
        for name, value in list(vars(module).items()):
            if value is embeddings:
                setattr(module, name, by)


def export_program(
    model: object,
    layout: EmbeddingLayout,
    num_dense: int,
    platforms: Sequence[str] = PLATFORMS,
    *,
    served: Collection[str] | None = None,
) -> tuple[bytes, frozenset[str]]:
    """``dense_program`` as ``jax.export`` serializes it, with the model's parameters inside, and the features it reads.

    Args:
      model: A trained model; its embeddings are not used.
      layout: Its tables and features.
      num_dense: Dense features of an example.
      platforms: What it can run on.
      served: The features of a request; None for those that ``logits`` reads in evaluation mode, as a next-item model
        reads only the history.

    Raises:
      ExportError: If ``logits`` cannot be traced for a batch of any size, or its outputs are no arrays of an example
        each.
    """
    subject = f"{type(model).__name__}.logits"
    names = frozenset(layout.order)
    try:
        if served is None:
            served = _read_features(dense_program(model, layout), symbolic_inputs(layout, num_dense))
        unread = names - set(served)
        inputs = symbolic_inputs(layout, num_dense, unread)
        program = jax.jit(dense_program(model, layout, unread))
        exported = export.export(program, platforms=tuple(platforms))(*inputs)
    except (ExportError, MemoryError):
        raise
    except Exception as problem:  # whatever the model's own code, Flax and JAX raise
        raise ExportError(
            f"{subject} cannot be exported for {num_dense} dense features and batches of any size"
            f" ({type(problem).__name__}: {problem})"
        ) from problem
    _check_outputs(subject, exported, inputs[0].shape[0])
    try:
        return bytes(exported.serialize()), names - unread
    except ValueError as problem:  # of a container that was not registered
        raise ExportError(
            f"{subject} returns what cannot be stored ({problem}); return arrays, or dictionaries, lists or tuples of"
            " them"
        ) from problem


def extends(model: Any) -> bool:
    """Whether a model goes on from what it remembers of a history, as ``jrec.nn.NextItem`` does.

    A class that has a ``logits`` of its own must have its own ``extend``, too: another's would answer otherwise.
    """
    for cls in type(model).__mro__:
        if "extend" in vars(cls):
            return model.remembered() is not None
        if "logits" in vars(cls):
            return False
    return False


def export_append(
    model: Any, layout: EmbeddingLayout, name: str, num_dense: int, platforms: Sequence[str] = PLATFORMS
) -> bytes:
    """``extend`` of a model in evaluation mode, as ``jax.export`` serializes it.

    Its one argument is a dictionary: "rows" (batch, queries, dim) float32, "first" and "count" (batch,) int32, "before"
    a list of (batch, positions, ...) arrays and, of a model that reads times, "times" (batch, positions) and "asked"
    (batch, queries) float32. It returns what the model's ``logits`` returns, and a list of (batch, queries, ...) arrays
    that belong to "before".

    Args:
      model: A model that ``extends``.
      layout: Its tables and features.
      name: The feature with the history.
      num_dense: Dense numbers of an example: the history's times, or none.
      platforms: What it can run on.
    """
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(model.remembered())
    dim = next(dim for feature, dim in layout.features if feature.name == name)

    def appended(inputs: dict[str, Any]) -> tuple[Any, list[jax.Array]]:
        served = nnx.merge(graph, state, copy=True)
        served.eval()
        outputs, own = served.extend(**{**inputs, "before": jax.tree.unflatten(tree, inputs["before"])})
        return outputs, jax.tree.leaves(own)

    batch, queries, positions = export.symbolic_shape("batch, queries, positions")
    inputs: dict[str, Any] = {
        "rows": jax.ShapeDtypeStruct((batch, queries, dim), jnp.float32),
        "first": jax.ShapeDtypeStruct((batch,), jnp.int32),
        "count": jax.ShapeDtypeStruct((batch,), jnp.int32),
        "before": [jax.ShapeDtypeStruct((batch, positions, *leaf.shape), leaf.dtype) for leaf in leaves],
    }
    if num_dense:
        inputs["times"] = jax.ShapeDtypeStruct((batch, positions), jnp.float32)
        inputs["asked"] = jax.ShapeDtypeStruct((batch, queries), jnp.float32)
    return bytes(export.export(jax.jit(appended), platforms=tuple(platforms))(inputs).serialize())


def _check_outputs(subject: str, exported: export.Exported, batch: object) -> None:
    """Refuses outputs that are not one entry an example: requests are padded, and cut into batches."""
    if not exported.out_avals:
        raise ExportError(f"{subject} returns no array")
    for output in exported.out_avals:
        if not output.ndim or output.shape[0] != batch or not all(isinstance(size, int) for size in output.shape[1:]):
            raise ExportError(
                f"{subject} returns an array of shape {output.shape}; what is served is (batch, ...), an entry for each"
                " example, whose shape does not depend on the batch"
            )


def _read_features(program: Program, inputs: tuple[Any, dict[str, Any], dict[str, Any]]) -> frozenset[str]:
    """The features whose vectors or masks have a part in the outputs."""
    jaxpr = jax.make_jaxpr(program)(*inputs).jaxpr
    needed = set(map(id, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(map(id, equation.outvars)):
            needed.update(map(id, equation.invars))
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(inputs))
    read = (path for path, variable in zip(paths, jaxpr.invars, strict=True) if id(variable) in needed)
    return frozenset(path[1].key for path in read if len(path) == 2)  # the first leaf is ``dense``


def symbolic_inputs(
    layout: EmbeddingLayout, num_dense: int, unread: Collection[str] = ()
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Shapes of the program's inputs for a batch of any size."""
    (batch,) = export.symbolic_shape("batch")
    vectors, masks = _shapes(layout, batch, frozenset(layout.order) - set(unread))
    return jax.ShapeDtypeStruct((batch, num_dense), jnp.float32), vectors, masks


def _shapes(layout: EmbeddingLayout, batch: Any, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shapes of the vectors, and of the masks, of features with these names."""

    def shape(dtype: object, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *sizes), dtype)

    def of(feature: FeatureConfig, dim: int) -> jax.ShapeDtypeStruct:
        sizes = (feature.max_length, dim) if feature.pooling == "none" else (dim,)
        return shape(jnp.float32, *sizes)

    chosen = [(feature, dim) for feature, dim in layout.features if feature.name in names]
    vectors = {feature.name: of(feature, dim) for feature, dim in chosen}
    return vectors, {f.name: shape(jnp.bool_, f.max_length) for f, _ in chosen if f.pooling == "none"}
