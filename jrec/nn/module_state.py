"""A model's state beside its parameters and rows: statistics, streams of random numbers, counters of any Variable type.

``logits`` may change it in a step, which keeps what it changed. On a mesh every device has the whole state, and runs
``logits`` on its part of the batch; the state stays equal on all devices:

* ``nnx.BatchNorm`` has the statistics of the whole batch: its ``axis_name`` is the mesh's axis during the step.
* Streams (``nnx.Rngs``, such as ``nnx.Dropout`` has) draw different numbers on every device of several, from keys that
  are folded with the device's number during the step. Their stored keys and counts do not depend on the device.
* Floats become the mean of what the devices have, weighted by their examples: so a moving average of the parts' means
  is the moving average of the batch's mean. What is to be summed, ``logits`` sums itself, over the axis "devices".
* Integers and other types must not depend on the batch, as a count of steps does not; else the step is refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters import partial_eval
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.errors import ConfigError
from jrec.mesh.communication import Communication
from jrec.mesh.route import AXIS
from jrec.nn.batch_norm import BatchNorm

if TYPE_CHECKING:
    from jrec.nn.optimizer import SparseModel

Changed = dict[str, jax.Array]
"""New values of some of a model's arrays, by their path in ``nnx.state``."""
Logits = Callable[
    [nnx.State, Changed, Mapping[str, jax.Array], Batch, jax.Array | None], tuple[PyTree[jax.Array], Changed]
]


def logits_of(model: SparseModel, batch: Batch, activations: Mapping[str, jax.Array]) -> PyTree[jax.Array]:
    """What the model's ``logits`` returns; it gets the batch's ``mask`` if it takes one."""
    more = {"mask": batch.mask} if "mask" in inspect.signature(model.logits).parameters else {}
    return model.logits(batch.dense, activations, batch.bags, **more)


def pure_logits(model: SparseModel, communication: Communication | None) -> tuple[nnx.State, Logits]:
    """A model's parameters, and its ``logits`` as a function without effects.

    Args:
      model: The model; it stays as it is.
      communication: The other devices, inside ``shard_map``; None on a single one.

    Returns:
      The ``nnx.Param`` state, and a function of such a state, of other arrays that were changed before, activations,
      batch and the device's number, None on a single device, to what ``logits`` returns and all arrays changed since.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def logits(
        params: nnx.State,
        changed: Changed,
        activations: Mapping[str, jax.Array],
        batch: Batch,
        device: jax.Array | None,
    ) -> tuple[PyTree[jax.Array], Changed]:
        working = nnx.merge(graph, params, replaced(rest, changed), copy=True)
        _spread_batch_norms(working, communication)
        with _streams_of(working, device):
            outputs = logits_of(working, batch, activations)
        return outputs, _changes(_named(params) | _named(rest), arrays_of(working))

    return params, logits


def arrays_of(model: SparseModel) -> dict[str, jax.Array]:
    """The model's arrays by path, less what ``sow`` leaves."""
    return _named(nnx.state(model))


def replaced[T: PyTree](state: T, changed: Changed) -> T:
    """The state with the changed arrays that are in it."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: changed.get(_name(path), leaf), state)


def put(model: SparseModel, changed: Changed) -> None:
    """Replaces some of the model's arrays, in place."""
    if changed:
        nnx.update(model, replaced(nnx.state(model), changed))


def shared(model: SparseModel, changed: Changed, communication: Communication, weight: jax.Array) -> Changed:
    """Changed arrays as all devices keep them: the mean of floats, weighted; others as they are.

    Args:
      model: The model before the change.
      changed: The device's own.
      communication: The devices.
      weight: () float32, the device's share of the examples of all devices. Without any example floats stay as they
        were.
    """
    old = arrays_of(model)
    # A batch of only padding has no mean; its weights are all zero.
    some = jax.lax.psum(weight, AXIS) > 0

    def mean(name: str, leaf: jax.Array) -> jax.Array:
        # bfloat16 statistics are summed in float32, or the devices' shares would round away.
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        total = jax.lax.psum(wide * weight.astype(wide.dtype), AXIS)
        return jnp.where(some, total.astype(leaf.dtype), old[name])

    return {name: leaf if _exact(leaf) else mean(name, leaf) for name, leaf in changed.items()}


def check_independent(changed: Changed, step: Callable[[PyTree], Changed], inputs: PyTree) -> None:
    """Refuses integers, and others that have no mean, that devices would change by their own parts of a batch.

    Args:
      changed: What ``step`` returns.
      step: The changed arrays, from ``inputs``.
      inputs: A tree of all that differs between devices.

    Raises:
      ConfigError: If one of them depends on the inputs.
    """
    for name, leaf in changed.items():
        if not _exact(leaf):
            continue
        jaxpr = jax.make_jaxpr(lambda inputs, name=name: step(inputs)[name])(inputs).jaxpr
        # Dead code elimination keeps what the new value is computed from: an input that is kept is one it depends on.
        _, used = partial_eval.dce_jaxpr(jaxpr, [True])
        if any(used):
            raise ConfigError(
                f"the model's {name.removesuffix('.value')} is {leaf.dtype} and its new value depends on the batch, of"
                " which every device of a mesh sees only its part; make it float32, of which the devices' mean is kept"
                " (jax.lax.psum over 'devices' in logits sums), or let it count steps"
            )


def _named(state: nnx.State) -> dict[str, jax.Array]:
    kept = nnx.filter_state(state, nnx.Not(nnx.Intermediate))
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(kept)}


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _exact(leaf: jax.Array) -> bool:
    return not jnp.issubdtype(leaf.dtype, jnp.inexact)


def _changes(before: Mapping[str, jax.Array], after: Mapping[str, jax.Array]) -> Changed:
    """The arrays that are others than before.

    Raises:
      ConfigError: If there are other Variables than before.
    """
    if new := sorted(after.keys() ^ before.keys()):
        raise ConfigError(
            f"the model's logits made or removed the Variable {new[0].removesuffix('.value')}, which a step cannot"
            " keep; make it in __init__"
        )
    # By identity: tracers have no values to compare, and what ``logits`` did not assign is the same object.
    return {name: leaf for name, leaf in after.items() if leaf is not before[name]}


def _spread_batch_norms(model: Any, communication: Communication | None) -> None:
    """Lets the BatchNorms of a model that only one step sees work on the whole batch's real examples."""
    for _, module in nnx.iter_modules(model):
        if type(module) is nnx.BatchNorm:
            module.__class__ = BatchNorm  # Flax's own counts devices alike, however many examples they have
        if isinstance(module, nnx.BatchNorm) and module.axis_name is None and communication is not None:
            module.axis_name, module.axis_index_groups = AXIS, communication.groups


@contextlib.contextmanager
def _streams_of(model: SparseModel, device: jax.Array | None) -> Iterator[None]:
    """Lets all streams of a model draw a device's own numbers; afterwards their keys are the stored ones again."""
    if device is None:
        yield
        return
    keys = {path: node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.RngKey)}
    stored = {path: variable.get_value() for path, variable in keys.items()}
    own = {path: _folded(key, device) for path, key in stored.items()}
    for path, variable in keys.items():
        variable.set_value(own[path])
    yield
    for path, variable in keys.items():
        if variable.get_value() is not own[path]:
            raise ConfigError(
                f"the model's logits changed the key {'.'.join(map(str, path))}, which would no longer be the same on"
                " all devices of a mesh; draw from the stream, which counts its draws"
            )
        variable.set_value(stored[path])


def _folded(key: jax.Array, device: jax.Array) -> jax.Array:
    """Keys of any shape, folded with a number."""
    fold = functools.reduce(lambda fold, _: jax.vmap(fold, in_axes=(0, None)), range(key.ndim), jax.random.fold_in)
    return fold(key, device)
