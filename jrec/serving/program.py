"""The dense part of a model as one program of its parameters and of looked-up vectors, of any batch size.

Programs are StableHLO by ``jax.export``. Parameters are among their inputs, not constants inside, so that a later model
of the same run is the same program, which a server has compiled already.
"""

from __future__ import annotations

import collections
import inspect
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export
from jaxtyping import PyTree

from jrec.ops.layout import EmbeddingLayout, FeatureConfig
from jrec.serving.format import ExportError
from jrec.table_files.safetensors import DTYPES

PLATFORMS = ("cpu", "cuda")
Arrays = Mapping[str, jax.Array]
_Shapes = dict[str, jax.ShapeDtypeStruct]
Program = Callable[[Arrays, jax.Array, Arrays, Arrays], PyTree]


class Parameters:
    """The arrays of a model by their paths, such as "top_mlp.layers.0.kernel": what a program of it may take.

    Args:
      model: Any NNX module; it does not change.

    Attributes:
      model: The same.
    """

    def __init__(self, model: Any):
        self.model = model
        self._graph, state = nnx.split(model)
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(state)
        named = [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]
        self._leaves = {name.removesuffix(".value"): leaf for name, leaf in named}
        assert len(self._leaves) == len(named)

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes by name, but of keys of random numbers and what else no file holds."""
        dtypes = {name: getattr(leaf, "dtype", None) for name, leaf in self._leaves.items()}
        return {
            name: jax.ShapeDtypeStruct(self._leaves[name].shape, dtype)
            for name, dtype in dtypes.items()
            if isinstance(dtype, np.dtype) and dtype in DTYPES.values()
        }

    @property
    def identity(self) -> Hashable:
        """All that programs of the model depend on; equal of two states of one model."""
        shapes = self.shapes
        rest = [_content(leaf) for name, leaf in self._leaves.items() if name not in shapes]
        kinds = [(name, shape.shape, shape.dtype) for name, shape in shapes.items()]
        return self._graph, self._tree, tuple(kinds), tuple(rest)

    def merged(self, arrays: Arrays) -> Any:
        """The model in evaluation mode with some arrays in the place of its own; what it changes stays in it."""
        leaves = [arrays.get(name, leaf) for name, leaf in self._leaves.items()]
        model = nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves), copy=True)
        model.eval()
        return model

    def arrays(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """The model's own arrays of these names."""
        return {name: np.asarray(self._leaves[name]) for name in sorted(names)}


def _content(leaf: object) -> Hashable:
    """What tells a constant of a program from another one."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    return object()  # equal to nothing else


_MOST = 8
_made: collections.OrderedDict[Hashable, ExportedProgram] = collections.OrderedDict()
# Reentrant: ``make`` takes it again in ``_exported``, which changes JAX's configuration, and so that of all threads.
_making = threading.RLock()


def _once(key: Hashable, make: Callable[[], ExportedProgram]) -> ExportedProgram:
    """A program that was made of the same before, or else a new one: the deltas of a process have one and the same."""
    try:
        hash(key)
    except TypeError:  # of a model with attributes that have none
        return make()
    with _making:
        if (program := _made.get(key)) is None:
            program = _made[key] = make()
            if len(_made) > _MOST:
                _made.popitem(last=False)
        return program


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


class _Stacks(Mapping[str, NoReturn]):
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


def dense_program(model: Parameters, layout: EmbeddingLayout, unread: Collection[str] = ()) -> Program:
    """The function ``parameters, dense, vectors, masks -> outputs`` of a model in evaluation mode.

    ``parameters`` are arrays by name; the model's arrays that are not among them are constants. ``dense`` is (batch,
    num_dense) float32, ``vectors`` float32 by feature: (batch, dim), of pooling "none" (batch, max_length, dim), zeros
    where a position holds no id; ``masks`` (batch, max_length) bool by feature of pooling "none". Outputs are what the
    model's ``logits`` returns, (batch,) float32 or a tree of arrays; all their floats are float32.

    Args:
      model: Any NNX module with ``embeddings`` and ``logits``.
      layout: Its tables and features.
      unread: Features that are not among the inputs, of which the model sees zeros and no positions.
    """

    def outputs(parameters: Arrays, dense: jax.Array, vectors: Arrays, masks: Arrays) -> PyTree:
        served = model.merged(parameters)
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


class ExportedProgram(NamedTuple):
    """A program as ``jax.export`` serializes it.

    Attributes:
      content: What is written.
      parameters: The names of the model's arrays that it takes.
      features: The features that it takes.
    """

    content: bytes
    parameters: frozenset[str]
    features: frozenset[str]


def export_program(
    model: Parameters,
    layout: EmbeddingLayout,
    num_dense: int,
    platforms: Sequence[str] = PLATFORMS,
    *,
    served: Collection[str] | None = None,
) -> ExportedProgram:
    """``dense_program`` of those parameters that ``logits`` reads; made once of the same model.

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
    asked = None if served is None else frozenset(served)
    key = "logits", model.identity, layout, num_dense, tuple(platforms), asked
    return _once(key, lambda: _export_program(model, layout, num_dense, platforms, asked))


def _export_program(
    model: Parameters,
    layout: EmbeddingLayout,
    num_dense: int,
    platforms: Sequence[str],
    served: frozenset[str] | None,
) -> ExportedProgram:
    subject, names = f"{type(model.model).__name__}.logits", frozenset(layout.order)
    try:
        inputs = (model.shapes, *symbolic_inputs(layout, num_dense))
        parameters, _, *features = _read(dense_program(model, layout), inputs)
        unread = names - (features[0] | features[1] if served is None else served)
        taken = {name: shape for name, shape in model.shapes.items() if name in parameters}
        inputs = (taken, *symbolic_inputs(layout, num_dense, unread))
        exported = _exported(dense_program(model, layout, unread), platforms, inputs)
    except (ExportError, MemoryError):
        raise
    except Exception as problem:  # whatever the model's own code, Flax and JAX raise
        raise ExportError(
            f"{subject} cannot be exported for {num_dense} dense features and batches of any size"
            f" ({type(problem).__name__}: {problem})"
        ) from problem
    _check_outputs(subject, exported, inputs[1].shape[0])
    try:
        return ExportedProgram(bytes(exported.serialize()), parameters, names - unread)
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
    model: Parameters, layout: EmbeddingLayout, name: str, num_dense: int, platforms: Sequence[str] = PLATFORMS
) -> ExportedProgram:
    """``extend`` of a model in evaluation mode, as a program of parameters and of a history; made once of a model.

    The history is a dictionary: "rows" (batch, queries, dim) float32, "first" and "count" (batch,) int32, "before"
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
    key = "extend", model.identity, layout, name, num_dense, tuple(platforms)
    return _once(key, lambda: _export_append(model, layout, name, num_dense, platforms))


def _export_append(
    model: Parameters, layout: EmbeddingLayout, name: str, num_dense: int, platforms: Sequence[str]
) -> ExportedProgram:
    leaves, tree = jax.tree.flatten(model.model.remembered())
    dim = next(dim for feature, dim in layout.features if feature.name == name)

    def appended(parameters: Arrays, inputs: Mapping[str, PyTree]) -> tuple[PyTree, list[jax.Array]]:
        outputs, own = model.merged(parameters).extend(
            **{**inputs, "before": jax.tree.unflatten(tree, inputs["before"])}
        )
        return outputs, jax.tree.leaves(own)

    batch, queries, positions = export.symbolic_shape("batch, queries, positions")
    inputs: dict[str, PyTree] = {
        "rows": jax.ShapeDtypeStruct((batch, queries, dim), jnp.float32),
        "first": jax.ShapeDtypeStruct((batch,), jnp.int32),
        "count": jax.ShapeDtypeStruct((batch,), jnp.int32),
        "before": [jax.ShapeDtypeStruct((batch, positions, *leaf.shape), leaf.dtype) for leaf in leaves],
    }
    if num_dense:
        inputs["times"] = jax.ShapeDtypeStruct((batch, positions), jnp.float32)
        inputs["asked"] = jax.ShapeDtypeStruct((batch, queries), jnp.float32)
    parameters = _read(appended, (model.shapes, inputs))[0]
    taken = {name: shape for name, shape in model.shapes.items() if name in parameters}
    exported = _exported(appended, platforms, (taken, inputs))
    return ExportedProgram(bytes(exported.serialize()), parameters, frozenset({name}))


def _exported(program: Callable[..., PyTree], platforms: Sequence[str], inputs: Sequence[PyTree]) -> export.Exported:
    """A program without the lines of source code that it came from: the same model gives the same bytes anywhere."""
    limit = "jax_traceback_in_locations_limit"
    with _making:
        before = getattr(jax.config, limit)
        jax.config.update(limit, 0)
        try:
            return export.export(jax.jit(program), platforms=tuple(platforms))(*inputs)
        finally:
            jax.config.update(limit, before)


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


def _read(program: Callable[..., PyTree], inputs: Sequence[PyTree]) -> list[frozenset[str]]:
    """By argument, which entries of a dictionary have a part in a program's outputs."""
    jaxpr = jax.make_jaxpr(program)(*inputs).jaxpr
    needed = set(map(id, jaxpr.outvars))
    # Backwards, so that all readers of an equation's outputs come before it.
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(map(id, equation.outvars)):
            needed.update(map(id, equation.invars))
    read = [set[str]() for _ in inputs]
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tuple(inputs)))
    for path, variable in zip(paths, jaxpr.invars, strict=True):
        if len(path) > 1 and id(variable) in needed:
            read[path[0].idx].add(path[1].key)
    return [frozenset(names) for names in read]


def symbolic_inputs(
    layout: EmbeddingLayout, num_dense: int, unread: Collection[str] = ()
) -> tuple[jax.ShapeDtypeStruct, _Shapes, _Shapes]:
    """Shapes of the program's inputs for a batch of any size."""
    (batch,) = export.symbolic_shape("batch")
    vectors, masks = _shapes(layout, batch, frozenset(layout.order) - set(unread))
    return jax.ShapeDtypeStruct((batch, num_dense), jnp.float32), vectors, masks


def _shapes(layout: EmbeddingLayout, batch: object, names: Collection[str]) -> tuple[_Shapes, _Shapes]:
    """The shapes of the vectors, and of the masks, of features with these names."""

    def shape(dtype: object, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *sizes), dtype)

    def of(feature: FeatureConfig, dim: int) -> jax.ShapeDtypeStruct:
        sizes = (feature.max_length, dim) if feature.pooling == "none" else (dim,)
        return shape(jnp.float32, *sizes)

    chosen = [(feature, dim) for feature, dim in layout.features if feature.name in names]
    vectors = {feature.name: of(feature, dim) for feature, dim in chosen}
    return vectors, {f.name: shape(jnp.bool_, f.max_length) for f, _ in chosen if f.pooling == "none"}
