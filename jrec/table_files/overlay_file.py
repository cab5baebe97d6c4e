"""The file of an overlay: rows that count in place of a table's own, while its files stay as they are.

It is a safetensors file: ``ids`` (n,) int64, ascending, ``values`` (n, dim) and, of rows in 8 bits with scales of
blocks, ``scales`` (n, blocks of elements), for each row. Its header says in texts which table it belongs to, by
digests of the table and of the rows that it replaces, and has a checksum of the whole file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Iterable

import numpy as np

from jrec.errors import CheckpointError
from jrec.table_files.safetensors import metadata_of, opened, tensors_of
from jrec.table_files.scales import dequantized

KIND, VERSION = "jrec-table-overlay", "1"
UNSEALED = "0" * 64
"""What stands in the header in place of the checksum as the checksum is computed."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Overlay:
    """Rows of a table by their numbers, and what table they are of.

    Attributes:
      path: The file.
      ids: (n,) int64, ascending.
      values: (n, dim) as they are stored.
      scales: (n, blocks of elements), which multiply the values; None without, and where the table's one scale does.
      table: The table's tensor.
      base: ``StoredTable.fingerprint`` of the table.
      before: ``digest_of_rows`` of the rows that lay in its place when it was made.
    """

    path: pathlib.Path
    ids: np.ndarray
    values: np.ndarray
    scales: np.ndarray | None
    table: str
    base: str
    before: str

    @staticmethod
    def open(path: pathlib.Path) -> Overlay:
        """Reads a file, and checks that it is as it was written.

        Raises:
          CheckpointError: If it is missing, damaged, or no overlay.
        """
        return opened(path, lambda data: _overlay(path, data))

    def find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of some rows it holds, as places among ``rows``, and where it holds them."""
        place = np.searchsorted(self.ids, rows)
        # A row behind all of them has no place; it is compared with the last one.
        here = np.flatnonzero(self.ids[np.minimum(place, self.ids.size - 1)] == rows) if self.ids.size else place[:0]
        return here, place[here]

    def read(self, places: np.ndarray, width: int, scale: float | None) -> np.ndarray:
        """The rows at places, as the floats that they stand for.

        Args:
          places: (n,) integers.
          width: Elements of a row that share a scale.
          scale: The table's one scale, which counts for rows in 8 bits that have no scales of their own.
        """
        values = self.values[places]
        if self.scales is not None:
            return dequantized(values, self.scales[places], (1, width))
        if values.dtype.itemsize > 1 or scale is None:
            return values
        return dequantized(values, np.full((1, 1), scale, np.float32), (values.shape[0], values.shape[1]))


def digest_of_rows(pieces: Iterable[np.ndarray]) -> str:
    """SHA-256 of rows as float32."""
    digest = hashlib.sha256()
    for rows in pieces:
        digest.update(np.ascontiguousarray(rows, np.float32).data)
    return digest.hexdigest()


def checksum_of(data: np.ndarray, checksum: str) -> str:
    """SHA-256 of a file's bytes, (size,) uint8, without the checksum that they hold."""
    _, begin = metadata_of(data)
    digest = hashlib.sha256(bytes(data[:begin]).replace(checksum.encode(), UNSEALED.encode()))
    digest.update(data[begin:])
    return digest.hexdigest()


def _overlay(path: pathlib.Path, data: np.ndarray) -> Overlay:
    tensors, (says, _) = tensors_of(data), metadata_of(data)
    if says.get("kind") != KIND:
        raise CheckpointError(f"{path} is no overlay of a table; give files that jrec.table_files.write_overlay wrote")
    if says.get("overlay_version") != VERSION:
        raise CheckpointError(
            f"{path} is an overlay of version {says.get('overlay_version', '')[:20]!r}, but this jrec reads"
            f" {VERSION!r}; write it again, or use the jrec that made it"
        )
    checksum = says.get("sha256", "")
    if not re.fullmatch("[0-9a-f]{64}", checksum) or checksum_of(data, checksum) != checksum:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit; copy it again")
    ids = np.array(tensors.get("ids", ()))
    fits = ids.dtype == np.int64 and ids.ndim == 1 and (ids[1:] > ids[:-1]).all()
    shapes = [tensors[name].shape[:1] for name in ("values", "scales") if name in tensors and tensors[name].ndim == 2]
    if not fits or "values" not in tensors or shapes != [ids.shape] * (len(tensors) - 1):
        raise CheckpointError(f"{path} does not hold ascending rows with a value for each; write the overlay again")
    return Overlay(
        path=path,
        ids=ids,
        values=tensors["values"],
        scales=tensors.get("scales"),
        table=says.get("table", ""),
        base=says.get("base", ""),
        before=says.get("before", ""),
    )
