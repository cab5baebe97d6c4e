"""An exported model in memory: raw columns to probabilities."""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrec.data.encoder import Encoder
from jrec.data.schema import Schema
from jrec.serving.encode import model_inputs, rows_of_keys
from jrec.serving.format import MODEL, ExportError, Manifest, check_follows, load_manifest, verify
from jrec.serving.tables import Ids, ServedTables, masks

BATCH_SIZES = (1, 4, 16, 64, 256, 1024, 4096)
"""Sizes that batches are padded to, one compiled program each; larger ones are cut."""


class Model:
    """An exported model: ``model(columns)`` gives probabilities. Made by ``load``; any thread may call it.

    Rows are looked up in host memory, from memory-mapped files, whatever their number; the dense part runs on JAX's
    default device.

    Attributes:
      manifest: What is loaded: of the last delta, where some were applied.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        manifest: Manifest,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        threads: int | None = None,
    ):
        self.manifest, self._folder, self._threads = manifest, folder, threads
        self._schema = Schema.load(folder, check_files=False)
        self._latest = folder  # the last delta's, which has the keys of tables that grow
        self._sizes = tuple(sorted(set(batch_sizes)))
        if not self._sizes or self._sizes[0] < 1:
            raise ValueError(f"batch_sizes are {list(batch_sizes)}; give sizes of at least 1")
        self._tables = ServedTables(folder, manifest)
        self._program = _program(folder, manifest)
        self._lock = threading.RLock()  # a delta changes rows, their keys and the program together
        self._encoder: Encoder | None = None

    def __call__(self, columns: Any) -> np.ndarray:
        """Probabilities, (examples,) float32.

        Args:
          columns: Raw columns by name, as the log has them that the dataset was made of: NumPy arrays, lists, Arrow or
            polars columns; ragged lists for features of several ids. Unknown values read their table's row for them, as
            in ``jrec prepare``.

        Raises:
          DatasetError: If a column is missing or holds what the feature cannot have; the message names it.
        """
        logits = self.logits(columns)
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)

    def logits(self, columns: Any) -> np.ndarray:
        """Logits, (examples,) float32; see ``__call__``."""
        if not self._schema.growing:
            return self.logits_of(*self.encode(columns))
        with self._lock:  # a delta in between could give a row to another key
            return self.logits_of(*self.encode(columns))

    def encode(self, columns: Any) -> tuple[np.ndarray, dict[str, Ids]]:
        """Dense features, (examples, num_dense) float32, and ids by feature, of raw columns.

        Ids of tables that grow are good until the next ``apply``, which may give their rows to other keys.
        """
        if (encoder := self._encoder) is None:
            growing = {name: rows_of_keys(self._latest, name) for name in self._schema.growing}
            encoder = self._encoder = Encoder(self._schema, growing=growing)
        encoded = encoder.columns(columns)
        return model_inputs(encoded.by_name(), self.manifest.dense, self.manifest.features, encoder.orders)

    def logits_of(self, dense: np.ndarray, ids: Mapping[str, Ids]) -> np.ndarray:
        """Logits, (examples,) float32, of dense features and rows of tables.

        Args:
          dense: (examples, num_dense) float32, transformed.
          ids: By feature.

        Raises:
          ValueError: If shapes do not fit, or an id is past its table.
        """
        count = dense.shape[0]
        with self._lock:
            vectors = self._tables.vectors(ids, threads=self._threads)
            program = self._program
        parts = [np.ascontiguousarray(dense, np.float32)]
        parts += [
            vectors[feature.name].reshape(count, math.prod(vectors[feature.name].shape[1:]))
            for feature in self.manifest.features
        ]
        held = masks(self.manifest.features, ids)
        out = [self._run(program, parts, held, begin, count) for begin in range(0, count, self._sizes[-1])]
        return np.concatenate(out) if out else np.zeros(0, np.float32)

    def vectors(self, ids: Mapping[str, Ids]) -> dict[str, np.ndarray]:
        """Vectors by feature, as the dense part takes them: (examples, dim) float32; see ``ServedTables.vectors``."""
        with self._lock:
            return self._tables.vectors(ids, threads=self._threads)

    def apply(self, delta: str | os.PathLike[str]) -> None:
        """Takes the next delta, while other threads go on: rows and dense part change at once.

        Raises:
          ExportError: If it does not follow what is loaded, or is damaged; nothing has changed then.
        """
        folder = pathlib.Path(delta)
        manifest = load_manifest(folder)
        check_follows(self.manifest, folder, manifest)
        verify(folder, manifest)
        program = _program(folder, manifest)
        with self._lock:
            self._tables.apply(folder, manifest)
            self._program, self.manifest = program, manifest
            if self._schema.growing:
                self._latest, self._encoder = folder, None

    def warm_up(self) -> None:
        """Compiles the program for every size of a batch, so that no request waits for it."""
        features = self.manifest.features
        for size in self._sizes:
            ids = {f.name: Ids(values=np.full((size, 1), -1, np.int32)) for f in features}
            self.logits_of(np.zeros((size, len(self.manifest.dense)), np.float32), ids)

    def _run(
        self, program: Any, parts: Sequence[np.ndarray], held: Mapping[str, np.ndarray], begin: int, count: int
    ) -> np.ndarray:
        stop = min(begin + self._sizes[-1], count)
        size = next(size for size in self._sizes if size >= stop - begin)
        numbers = np.zeros((size, sum(part.shape[1] for part in parts)), np.float32)
        np.concatenate([part[begin:stop] for part in parts], axis=1, out=numbers[: stop - begin])
        padded = {}
        for name, mask in held.items():
            padded[name] = np.zeros((size, mask.shape[1]), bool)
            padded[name][: stop - begin] = mask[begin:stop]
        return np.asarray(program(numbers, padded))[: stop - begin]


def load(
    folder: str | os.PathLike[str],
    deltas: Sequence[str | os.PathLike[str]] = (),
    *,
    check: bool = True,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    threads: int | None = None,
) -> Model:
    """Loads what ``jrec export`` wrote.

    Args:
      folder: A whole export.
      deltas: The deltas that follow it, in order.
      check: Whether all files are read for their checksums first; rows are read only as they are looked up otherwise.
      batch_sizes: Sizes that batches are padded to: each costs a compilation at its first use (``Model.warm_up``).
      threads: Threads of lookups; None for all cores.

    Raises:
      ExportError: If a folder is no export, is damaged, is of another version, or a delta is missing in between.

    Example:
      >>> model = jrec.serving.load("exports/clicks")  # doctest: +SKIP
      >>> model({"user": ["u1", "u2"], "item": ["i7", "i9"], "price": [1.5, 20.0]})  # doctest: +SKIP
      array([0.0312, 0.271], dtype=float32)
    """
    path = pathlib.Path(folder)
    manifest = load_manifest(path)
    if manifest.follows:
        raise ExportError(f"{path} is a delta; load the export that it follows, and give this one in deltas")
    if check:
        verify(path, manifest)
    model = Model(path, manifest, batch_sizes=batch_sizes, threads=threads)
    for delta in deltas:
        model.apply(delta)
    return model


def _program(folder: pathlib.Path, manifest: Manifest) -> Any:
    """The jitted dense part of an export: of all its numbers side by side, one array to move, and of masks."""
    import jax
    from jax import export

    try:
        exported = export.deserialize(bytearray((folder / MODEL).read_bytes()))
    except (OSError, ValueError) as problem:
        raise ExportError(f"{folder / MODEL} cannot be read ({problem}); export the run again") from problem
    shapes = [(f.max_length, f.dim) if f.pooling == "none" else (f.dim,) for f in manifest.features]
    bounds = np.cumsum([len(manifest.dense), *(math.prod(shape) for shape in shapes)])

    def logits(numbers: jax.Array, held: Mapping[str, jax.Array]) -> jax.Array:
        dense, *rows = (numbers[:, begin:end] for begin, end in itertools.pairwise([0, *bounds.tolist()]))
        vectors = {
            feature.name: row.reshape(-1, *shape)
            for feature, row, shape in zip(manifest.features, rows, shapes, strict=True)
        }
        return exported.call(dense, vectors, held)

    return jax.jit(logits)
