"""Models of one's own by ``[model] factory = "package.module:function"``.

The function is called as

    function(embeddings, *, num_dense, rngs, **options)

with the ``jrec.nn.EmbeddingCollection`` of the configuration's tables, the number of dense features, ``nnx.Rngs``
seeded by ``config.seed``, and the keys of ``[model.options]``. It returns an NNX module that keeps ``embeddings`` under
that name, and whose ``logits(dense, activations, bags)`` returns (batch,) float32; of a dataset with several labels a
dictionary of them by task, for which the function is also called with ``tasks``, their names, if it takes that.

``model.kind`` says what else the model is: the kind decides its features, loss, evaluation and predictions. A
"two_tower" network returns {"user": (batch, dim), "item": (batch, dim)} float32, and ranks as two towers do.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pathlib
import traceback
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from jrec.app.config import ModelConfig
from jrec.data.packing import pack_batch
from jrec.errors import ConfigError
from jrec.nn import EmbeddingCollection
from jrec.nn.optimizer import SparseModel
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.types import Bags

Factory = Callable[..., SparseModel]
_OWN = ("embeddings", "num_dense", "rngs", "tasks")
_EXAMPLES = 4  # of the batch on which a model is tried


def made_by_factory(
    config: ModelConfig, embeddings: EmbeddingCollection, *, num_dense: int, rngs: nnx.Rngs
) -> SparseModel:
    """The model of ``config.factory``, which was tried on the shapes of a batch.

    Raises:
      ConfigError: If there is no such factory, it does not take the options, it fails, or its model is none that can be
        trained.
    """
    factory, subject = load_factory(config.factory), f"model.factory {config.factory}"
    named = _check_options(factory, subject, config.options)
    told = {"tasks": config.multi_task.tasks} if "tasks" in named and config.multi_task.tasks else {}
    try:
        model = factory(embeddings, num_dense=num_dense, rngs=rngs, **told, **config.options)
    except Exception as problem:  # of the user's own code
        raise ConfigError(f"{subject} failed: {_described(problem)}") from problem
    if not isinstance(model, nnx.Module):
        raise ConfigError(f"{subject} returned a {type(model).__name__}; return a Flax NNX module (nnx.Module)")
    if getattr(model, "embeddings", None) is not embeddings:
        raise ConfigError(
            f"{subject} returned a {type(model).__name__} without the embeddings that it was given; keep them:"
            " self.embeddings = embeddings"
        )
    if not callable(getattr(model, "logits", None)):
        raise ConfigError(
            f"{subject} returned a {type(model).__name__} without logits; define logits(self, dense, activations, bags)"
        )
    _check_logits(model, config, embeddings.layout, num_dense, subject)
    return model


def load_factory(name: str, key: str = "model.factory") -> Factory:
    """The function "package.module:function", which ``key`` of the configuration names.

    Raises:
      ConfigError: If the module cannot be imported, or has no such function.
    """
    module_name, _, path = name.partition(":")
    module = _imported(module_name, key)
    target: object = module
    for part in path.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, vars(target), n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            where = getattr(module, "__file__", None) or "a namespace package"
            raise ConfigError(f"{key} is {name}, but {module_name} ({where}) has no {path}{advice}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{key} is {name}, which is a {type(target).__name__} and no function")
    return cast("Factory", target)


def _imported(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is not None and f"{name}.".startswith(f"{problem.name}."):
            raise ConfigError(
                f"{key}: there is no module {problem.name!r} in {pathlib.Path.cwd()} or on Python's path; run"
                " the command in the folder that has it, install it, or name its folder in PYTHONPATH"
            ) from problem
        raise ConfigError(f"{key}: {name} cannot be imported: {_described(problem)}") from problem
    except Exception as problem:  # of the user's own code
        raise ConfigError(f"{key}: {name} cannot be imported: {_described(problem)}") from problem


def _check_options(factory: Factory, subject: str, options: Mapping[str, object]) -> Collection[str]:
    """Refuses options that the factory does not take, and factories that need more; returns what it takes by name."""
    if taken := sorted(set(_OWN) & options.keys()):
        raise ConfigError(f"model.options.{taken[0]} is what jrec gives {subject} itself; call the option otherwise")
    called = factory.__init__ if isinstance(factory, type) else factory  # of a module's class Flax hides the signature
    try:
        parameters = list(inspect.signature(called).parameters.values())[isinstance(factory, type) :]
    except ValueError:  # of some functions in C
        return ()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = {*_OWN, *options} - {"tasks"}  # which it need not know of
    else:
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if unknown := sorted(options.keys() - named):
        own = sorted(named - set(_OWN))
        raise ConfigError(f"{subject} takes no model.options.{unknown[0]}; it takes {', '.join(own) or 'no options'}")
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing := [name for name in needed[1:] if name not in (*_OWN, *options)]:
        raise ConfigError(f"{subject} needs model.options.{missing[0]}; set it")
    return named


def _check_logits(
    model: SparseModel, config: ModelConfig, layout: EmbeddingLayout, num_dense: int, subject: str
) -> None:
    """Traces ``logits`` of a batch, so that a model of other shapes is refused before anything is made or read."""
    names = [f"dense {number}" for number in range(num_dense)]
    columns: dict[str, np.ndarray] = {name: np.zeros(_EXAMPLES, np.float32) for name in names}
    for feature, _ in layout.features:
        columns[feature.name] = np.zeros((_EXAMPLES, feature.max_length), np.int64)
        columns[f"{feature.name}:weight"] = np.ones((_EXAMPLES, feature.max_length), np.float32)
    batch = pack_batch(layout, columns, dense=names, label=None)
    shapes = {s.name: (s.bags_per_example * _EXAMPLES, s.dim) for s in layout.members}
    activations = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    graph, state = nnx.split(model)
    named = {"mask": batch.mask} if "mask" in inspect.signature(model.logits).parameters else {}

    def logits(
        dense: jax.Array,
        activations: Mapping[str, jax.Array],
        bags: Mapping[str, Bags],
        named: Mapping[str, jax.Array],
    ) -> PyTree:
        return nnx.merge(graph, state, copy=True).logits(dense, activations, bags, **named)

    try:
        result = jax.eval_shape(logits, batch.dense, activations, batch.bags, named)
    except Exception as problem:  # of the user's own code, Flax and JAX
        raise ConfigError(f"{subject}: its model's logits failed: {_described(problem)}") from problem
    floats = all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(result))
    shapes = jax.tree.map(lambda leaf: leaf.shape, result)
    if (wanted := config.of_kind.misfit(config, shapes, _EXAMPLES)) or not floats:
        raise ConfigError(
            f"{subject}: its model's logits returned {result} for {_EXAMPLES} examples; return {wanted or 'float32'}."
            " Other outputs and losses are for jrec.distribute (docs/library.md)"
        )


def _described(problem: BaseException) -> str:
    """An error of a user's code, and where it arose there."""
    frames = traceback.extract_tb(problem.__traceback__)
    last = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), frames[-1])
    return f"{type(problem).__name__}: {problem} ({last.filename}, line {last.lineno})"
