"""A run's state in checkpoints: rows of the device's stacks by table, everything else as dense arrays by path."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from jrec.checkpoint import Saved
from jrec.checkpoint.saved import SavedTable
from jrec.errors import CheckpointError
from jrec.nn.embeddings import Table
from jrec.nn.optimizer import RowSlot
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.row_fill import PIECE_BYTES, fill_rows
from jrec.random_keys import key_implementation, words

VALUES = "values"
FRESH = "fresh_cores"
"""The key of a checkpoint's meta with tables whose cores come without slots and caches: these begin as in a new run."""
_STATE, _PROGRESS = "state.", "progress."
_OPTIMIZER, _DENSE_OPTIMIZER = "1.", "1.dense."  # a state is of (model, optimizer)
_KEY = "0.embeddings.key.value"
_BESIDE_CORES = (("1.slots", ""), ("0.embeddings.tt", "cached."))  # what a state has of a tensor train but its cores
_Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # of a state, which may be abstract


class StateRows:
    """The arrays of rows that a run's state holds, on one device.

    Args:
      layout: The tables.
      state: Gives the run's state as it is now.
    """

    def __init__(self, layout: EmbeddingLayout, state: Callable[[], PyTree]):
        self._layout, self._state = layout, state
        self._leaves: dict[str, dict[str, int]] = {}  # by stack and array, which leaf: the same in every state of a run

    def of(self, stack: str) -> dict[str, jax.Array]:
        """A stack's "values" and slots."""
        leaves = jax.tree.leaves(current := self._state())
        if not self._leaves:
            for number, (_, _, where) in enumerate(_leaves(current, self._layout)):
                if where is not None:
                    self._leaves.setdefault(where[0], {})[where[1]] = number
        return {array: leaves[number] for array, number in self._leaves[stack].items()}


def dense_arrays(state: PyTree, progress: Mapping[str, np.ndarray], layout: EmbeddingLayout) -> dict[str, Any]:
    """A checkpoint's arrays beside tables' rows: the arrays of a state and running metrics, by path.

    Arrays of random keys are there as their words, uint32 with one more axis, and their generator in the path.
    """
    leaves = [(path, leaf) for path, leaf, where in _leaves(state, layout) if where is None and path != _KEY]
    dense = {_STATE + _saved_path(path, leaf): words(leaf) for path, leaf in leaves}
    return dense | {_PROGRESS + name: array for name, array in progress.items()}


def core_arrays[Core](layout: EmbeddingLayout, table: str, cores: Sequence[Core]) -> dict[str, Core]:
    """The cores of a tensor-train table as ``dense_arrays`` names them."""
    stack = next(s.name for s in layout.tt_stacks if s.tables[0].name == table)
    return {f"{_STATE}0.embeddings.tt.{stack}.cores.{k}.value": core for k, core in enumerate(cores)}


def restore_state(
    saved: Saved,
    like: PyTree,
    layout: EmbeddingLayout,
    *,
    slots: bool = True,
    rows: bool = True,
    dense_optimizer: bool = True,
    streams: bool = True,
) -> tuple[PyTree, dict[str, np.ndarray]]:
    """The state of a checkpoint, and running metrics.

    Args:
      saved: The checkpoint, written on one device or on a mesh.
      like: The expected state, arrays or ``jax.ShapeDtypeStruct``.
      layout: The tables.
      slots: Whether to read the optimizers' state too, such as the slots of rows; otherwise empty arrays stand for it,
        which is enough to predict.
      rows: Whether to read rows at all; otherwise empty arrays stand for them and their slots.
      dense_optimizer: Whether to read the state of the dense optimizer; otherwise it stays as ``like`` has it.
      streams: Whether both must have the same streams of random numbers; otherwise those that only one has, because the
        model was made with another ``nnx.Rngs``, stay as ``like`` has them, and zeros where that is abstract.

    Raises:
      CheckpointError: If the checkpoint is damaged or belongs to another model.
    """
    dense, fresh = saved.arrays(), _fresh_paths(saved, layout)
    progress = {name.removeprefix(_PROGRESS): dense.pop(name) for name in list(dense) if name.startswith(_PROGRESS)}
    if not streams:
        dense = _with_streams_of(like, layout, dense)
    leaves = []
    for path, leaf, where in _leaves(like, layout):
        if where is not None:
            read = rows and (slots or where[1] == VALUES)
            leaves.append(_rows(saved, layout, *where, leaf) if read else jnp.zeros(0))
        elif path == _KEY:  # a run knows it from its seed; a restored one makes no row by it
            leaves.append(_placed(saved, path, np.zeros(leaf.shape, leaf.dtype), leaf) if _abstract(leaf) else leaf)
        elif not slots and path.startswith(_OPTIMIZER):
            leaves.append(jnp.zeros(0))
        elif not dense_optimizer and path.startswith(_DENSE_OPTIMIZER):
            leaves.append(leaf)
        elif path.startswith(fresh):
            if _abstract(leaf):
                raise CheckpointError(
                    f"{saved.folder} has no {path}, which begins as in a new run; make the model and its optimizer with"
                    " values, not by nnx.eval_shape"
                )
            leaves.append(leaf)
        elif (array := dense.pop(_STATE + (saved_path := _saved_path(path, leaf)), None)) is None:
            raise _only_in(saved, saved_path, "this run")
        elif (implementation := key_implementation(leaf)) is None:
            leaves.append(_placed(saved, path, array, leaf))
        else:
            leaves.append(jax.random.wrap_key_data(_placed(saved, path, array, words(leaf)), impl=implementation))
    if not (slots and dense_optimizer):
        unread = _STATE + (_DENSE_OPTIMIZER if slots else _OPTIMIZER)
        dense = {name: array for name, array in dense.items() if not name.startswith(unread)}
    # Whatever is left was in the checkpoint and has no place in this run: another model, or another optimizer.
    if dense:
        raise _only_in(saved, min(dense).removeprefix(_STATE), "the checkpoint")
    return jax.tree.unflatten(jax.tree.structure(like), leaves), progress


def _only_in(saved: Saved, path: str, where: str) -> CheckpointError:
    message = f"{saved.folder}: array {path} exists only in {where}"
    if path.startswith(_DENSE_OPTIMIZER):
        message += (
            ", so that the dense optimizers differ; use the one that the checkpoint was trained with. Learning rates of"
            " `jrec train` are schedules, which count steps: optax.adam(optax.constant_schedule(0.01))"
        )
    return CheckpointError(message)


def _fresh_paths(saved: Saved, layout: EmbeddingLayout) -> tuple[str, ...]:
    """How the paths begin of what ``FRESH`` says that the checkpoint lacks."""
    tables = saved.manifest.meta.get(FRESH, ())
    stacks = [stack.name for stack in layout.tt_stacks if stack.tables[0].name in tables]
    return tuple(f"{start}.{stack}.{rest}" for stack in stacks for start, rest in _BESIDE_CORES)


def _with_streams_of(like: PyTree, layout: EmbeddingLayout, dense: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A checkpoint's arrays, with the streams of random numbers that a state has."""
    of_state = dense_arrays(like, {}, layout)
    streams = {name: of_state[name] for name in _streams(of_state)}
    fresh = {name: np.zeros(x.shape, x.dtype) if _abstract(x) else np.asarray(x) for name, x in streams.items()}
    dropped = _streams(dense) - streams.keys()
    return {**fresh, **{name: array for name, array in dense.items() if name not in dropped}}


def _streams(names: Collection[str]) -> set[str]:
    """The names of streams' arrays, each a key beside a count, among names of ``dense_arrays``."""
    streams = {name.partition(".key.value.")[0] for name in names if ".key.value." in name}
    return {name for name in names if re.split(r"\.key\.value\.|\.count\.value$", name)[0] in streams}


def _saved_path(path: str, leaf: _Leaf) -> str:
    """The path in checkpoints. A key's, of which the words are saved, ends with the name of its generator."""
    implementation = key_implementation(leaf)
    return path if implementation is None else f"{path}.{implementation}"


def _abstract(leaf: _Leaf) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _leaves(state: PyTree, layout: EmbeddingLayout) -> Iterator[tuple[str, _Leaf, tuple[str, str] | None]]:
    """Paths and leaves, and (stack, array) for leaves that are rows of the device's stacks."""
    for keys, variable in jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    ):
        where = _row_array(keys, variable, layout)
        for path, leaf in jax.tree_util.tree_leaves_with_path(variable):
            yield jax.tree_util.keystr((*keys, *path), simple=True, separator="."), leaf, where


def _row_array(keys: jax.tree_util.KeyPath, variable: object, layout: EmbeddingLayout) -> tuple[str, str] | None:
    if not isinstance(variable, Table | RowSlot):
        return None
    *_, before, last = (jax.tree_util.keystr((key,), simple=True) for key in keys)
    stack, array = (last, VALUES) if isinstance(variable, Table) else (before, last)
    return (stack, array) if layout.stacks[stack] in layout.device_stacks else None


def _rows(saved: Saved, layout: EmbeddingLayout, name: str, array: str, like: _Leaf) -> jax.Array:
    """A stack's array, read and put on the device piece by piece."""
    stack = layout.stacks[name]
    tables = saved.stack_tables(stack)
    tail, dtype = tables[0].record.shape.array(array)
    if jnp.dtype(dtype) != like.dtype or len(tail) != len(like.shape) - 1:
        raise CheckpointError(
            f"{saved.folder}: {array} of stack {name} are {dtype} of {tail} there, but this run expects {like.dtype} of"
            f" {like.shape[1:]}"
        )
    return fill_rows(like.shape, like.dtype, (piece for table in tables for piece in _pieces(table, array, like)))


def _pieces(table: SavedTable, array: str, like: _Leaf) -> Iterator[np.ndarray]:
    """A table's rows from the first to the last, each padded with the zeros that the run stores."""
    most = max(1, PIECE_BYTES // max(1, int(np.prod(like.shape[1:])) * like.dtype.itemsize))
    for begin in range(0, table.record.shape.rows, most):
        rows = table.read(array, np.arange(begin, min(begin + most, table.record.shape.rows)))
        if rows.ndim == 2 and rows.shape[1] < like.shape[1]:
            rows = np.pad(rows, ((0, 0), (0, like.shape[1] - rows.shape[1])))
        yield rows


def _placed(saved: Saved, path: str, array: np.ndarray, like: _Leaf) -> Any:
    if array.shape != like.shape or array.dtype != like.dtype:
        raise CheckpointError(
            f"{saved.folder}: array {path} is {array.dtype} of shape {array.shape}, but this run expects {like.dtype}"
            f" of {like.shape}"
        )
    if isinstance(like, np.ndarray):
        return array
    sharding = getattr(like, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return jnp.array(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
