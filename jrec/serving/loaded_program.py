"""The dense part of an export as it is run: a checked, jitted program, and the parameters that it takes."""

from __future__ import annotations

import hashlib
import itertools
import math
import pathlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jrec.serving.format import MODEL, PARAMETERS, ExportError, Manifest
from jrec.table_files.safetensors import tensors_of

if TYPE_CHECKING:
    import jax
    from jax.export import Exported
    from jaxtyping import PyTree


class _Compiled:
    """A jitted program, which does not depend on parameters.

    Attributes:
      exported: What ``jax.export`` wrote.
      width: How many numbers of an example it takes.
      sizes: The sizes of batches that it is compiled for.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest, content: bytes):
        import jax

        self.exported = exported = read_program(folder / MODEL, content)
        shapes = [(f.max_length, f.dim) if f.pooling == "none" else (f.dim,) for f in manifest.features]
        _check(folder, manifest, exported, shapes)
        self.sizes: frozenset[int] = frozenset()
        bounds = np.cumsum([len(manifest.dense_columns), *(math.prod(shape) for shape in shapes)])
        self.width = int(bounds[-1])

        def outputs(taken: Taken, numbers: jax.Array, held: Mapping[str, jax.Array]) -> list[jax.Array]:
            dense, *rows = (numbers[:, begin:end] for begin, end in itertools.pairwise([0, *bounds.tolist()]))
            vectors = {
                feature.name: row.reshape(-1, *shape)
                for feature, row, shape in zip(manifest.features, rows, shapes, strict=True)
            }
            return jax.tree.leaves(exported.call(*taken, dense, vectors, held))

        self._jitted = jax.jit(outputs)

    def __call__(self, parameters: Taken, numbers: np.ndarray, held: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        leaves = [np.asarray(leaf) for leaf in self._jitted(parameters, numbers, held)]
        if len(numbers) not in self.sizes:
            self.sizes |= {len(numbers)}
        return leaves


class LoadedProgram:
    """The dense part of an export: of all its numbers side by side, one array to move, and of masks.

    Exports and deltas of one program share what is compiled of it.

    Args:
      folder: The export or delta.
      manifest: Its manifest.

    Attributes:
      parameters: The arrays of the export that its programs take, by name, on JAX's default device.
      sizes: The sizes of batches that were asked for.
      width: How many numbers of an example it takes.

    Raises:
      ExportError: If it cannot be read, or takes or returns something else than the manifest's features need.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest):
        content = read_bytes(folder / MODEL)
        made_of = content, MODEL, manifest.features, manifest.dense_columns
        self._compiled = compiled_once(made_of, lambda: _Compiled(folder, manifest, content))
        self.parameters = read_parameters(folder, manifest)
        self._taken = taken(folder / MODEL, self._compiled.exported, _INPUTS, self.parameters)
        exported = self._compiled.exported
        self._tree = exported.out_tree
        self._outputs = [(output.dtype, output.shape[1:]) for output in exported.out_avals]
        self._masks = {f.name: f.max_length for f in manifest.features if f.pooling == "none"}
        self.sizes: frozenset[int] = frozenset()
        self.width = self._compiled.width

    def __call__(self, numbers: np.ndarray, held: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The leaves of the model's outputs."""
        if len(numbers) not in self.sizes:
            self.sizes |= {len(numbers)}
        return self._compiled(self._taken, numbers, held)

    def warm_up(self, sizes: Iterable[int]) -> None:
        """Compiles it for batches of these sizes, as far as it is not."""
        for size in sorted({*sizes} - self._compiled.sizes):
            masks = {name: np.zeros((size, length), bool) for name, length in self._masks.items()}
            self(np.zeros((size, self.width), np.float32), masks)
        self.sizes |= {*sizes}

    def joined(self, batches: Sequence[Sequence[np.ndarray]]) -> PyTree:
        """The model's outputs of the examples of all batches, in arrays of their own."""
        import jax

        leaves = [
            np.concatenate([np.zeros((0, *shape), dtype), *(batch[number] for batch in batches)])
            for number, (dtype, shape) in enumerate(self._outputs)
        ]
        return jax.tree.unflatten(self._tree, leaves)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of a model's outputs that are a dictionary; else ()."""
        import jax

        tree: Any = jax.tree.unflatten(self._tree, range(self._tree.num_leaves))
        return tuple(tree) if isinstance(tree, dict) else ()

    def check_logits(self) -> None:
        """Raises ValueError where the model does not return (batch,) logits, or a dictionary of them by task."""
        import jax

        tree: Any = jax.tree.unflatten(self._tree, range(self._tree.num_leaves))
        by_task = isinstance(tree, dict) and self._tree.num_nodes == len(tree) + 1
        if not (by_task or self._tree.num_nodes == 1) or set(self._outputs) != {(np.dtype(np.float32), ())}:
            raise ValueError(
                f"the model does not return one logit an example, or one a task, but {self._tree}; call Model.logits"
            )


_INPUTS = 3  # of a dense part, behind its parameters
Taken = tuple[dict[str, "jax.Array"], ...]
"""What a program takes before its inputs: its parameters, or nothing."""
_shared: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()


def compiled_once[T](made_of: tuple[bytes, *tuple[Hashable, ...]], make: Callable[[], T]) -> T:
    """What was made of the same program, and the same beside it, while something uses it; or else made now."""
    content, *rest = made_of
    key = hashlib.sha256(content).digest(), *rest
    # Held weakly: a program goes with the last model that uses it. Two threads at once may both make it, which costs
    # only time.
    if (program := _shared.get(key)) is None:
        program = _shared[key] = make()
    return program


def read_bytes(path: pathlib.Path) -> bytes:
    """A file's content.

    Raises:
      ExportError: If it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ExportError(f"{path} cannot be read ({problem}); export the run again") from problem


def read_program(path: pathlib.Path, content: bytes) -> Exported:
    """What ``jax.export`` wrote.

    Raises:
      ExportError: If it is no program.
    """
    from jax import export

    try:
        return export.deserialize(bytearray(content))
    except MemoryError:
        raise
    except Exception as problem:  # of many kinds, also of JAX's parsers
        raise ExportError(f"{path} cannot be read ({problem}); export the run again") from problem


def read_parameters(folder: pathlib.Path, manifest: Manifest) -> dict[str, jax.Array]:
    """The parameters beside an export's programs, by name, on JAX's default device; empty of older exports.

    Raises:
      ExportError: If they cannot be read.
    """
    import jax

    if PARAMETERS not in manifest.files:
        return {}
    content = read_bytes(folder / PARAMETERS)
    try:
        tensors = tensors_of(np.frombuffer(content, np.uint8))
    except ValueError as problem:
        raise ExportError(f"{folder / PARAMETERS} cannot be read ({problem}); export the run again") from problem
    return jax.device_put(tensors)


def taken(path: pathlib.Path, exported: Exported, inputs: int, parameters: Mapping[str, jax.Array]) -> Taken:
    """What a program takes before its inputs: parameters by name; nothing of older exports, which have them inside.

    Args:
      path: Its file.
      exported: The program.
      inputs: How many inputs it has.
      parameters: All that there are.

    Raises:
      ExportError: If it takes one that is not there, or another one.
    """
    import jax

    arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    if len(arguments) != inputs + 1:
        return ()
    wanted = arguments[0]
    if not isinstance(wanted, dict) or jax.tree.structure(wanted).num_leaves != len(wanted):
        raise ExportError(f"{path} takes parameters that have no names; export the run again")
    for name, shape in wanted.items():
        array = parameters.get(name)
        if array is None or (array.shape, array.dtype) != (shape.shape, shape.dtype):
            there = "is not there" if array is None else f"is {array.dtype}{list(array.shape)}"
            raise ExportError(
                f"{path} takes the parameter {name!r}, {shape.dtype}{list(shape.shape)}, which {there} in {PARAMETERS};"
                " export the run again"
            )
    return ({name: parameters[name] for name in wanted},)


def _check(folder: pathlib.Path, manifest: Manifest, exported: Exported, shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuses a program of other inputs than the manifest's features, or whose outputs are not one an example."""
    import jax

    def of(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *shape), dtype)

    vectors = {f.name: of("float32", *shape) for f, shape in zip(manifest.features, shapes, strict=True)}
    held = {f.name: of("bool", f.max_length) for f in manifest.features if f.pooling == "none"}
    inputs = (of("float32", len(manifest.dense_columns)), vectors, held)
    parameters = jax.tree.unflatten(exported.in_tree, exported.in_avals)[0][:-_INPUTS][:1]
    tree, own = jax.tree.structure(((*parameters, *inputs), {})), exported.in_avals[len(jax.tree.leaves(parameters)) :]
    wanted = [(x.dtype.name, *x.shape[1:]) for x in jax.tree.leaves(inputs)]
    offered = [(x.dtype.name, *x.shape[1:]) for x in own]
    if tree != exported.in_tree or wanted != offered:
        raise ExportError(
            f"{folder / MODEL} takes inputs of {offered}, but the manifest's features are of {wanted}; export the run"
            " again"
        )
    batch = own[0].shape[0]
    outputs = [(x.shape[:1] == (batch,), *x.shape[1:]) for x in exported.out_avals]
    if not outputs or any(not first or any(type(n) is not int for n in rest) for first, *rest in outputs):
        raise ExportError(
            f"{folder / MODEL} returns {[x.shape for x in exported.out_avals]}, which is not an entry for each example"
            " of a batch; export the run again"
        )
