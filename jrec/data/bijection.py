"""The bijection of a table's rows: a NumPy file beside the dataset, named by its checksum, applied by the loader.

``reorder/TABLE-CHECKSUM.npy`` holds ``order``, (rows,) uint32: the loader yields row ``order[i]`` for stored id ``i``.
The schema names the file and the SHA-256 of its bytes. A file never changes: another bijection is another file, and the
schema, which is replaced in one step, says which of them is meant.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
from collections.abc import Iterable

import numpy as np

from jrec.data.schema import Bijection, DatasetError, Schema, Table
from jrec.outputs import write_file

FOLDER = "reorder"
VERSION = 1


def is_permutation(order: np.ndarray) -> bool:
    """Whether (rows,) integers hold each of 0 to rows - 1 once, which makes them invertible."""
    if order.ndim != 1 or order.dtype.kind not in "iu":
        return False
    if order.size and (int(order.min()) < 0 or int(order.max()) >= order.size):
        return False
    taken = np.zeros(order.size, bool)
    taken[order] = True
    return bool(taken.all())


def inverse(order: np.ndarray) -> np.ndarray:
    """(rows,) uint32: the stored row that each row of a permutation came from."""
    back = np.empty(order.size, np.uint32)
    back[order] = np.arange(order.size, dtype=np.uint32)
    return back


def save_order(folder: str | os.PathLike[str], table: str, order: np.ndarray) -> Bijection:
    """Writes a table's bijection atomically and returns the schema's entry.

    Raises:
      ValueError: If ``order`` is no permutation of the table's rows.
    """
    if order.dtype != np.uint32 or not is_permutation(order):
        raise ValueError(f"the order of table {table!r} is no uint32 permutation of its {order.size:,} rows")
    content = io.BytesIO()
    np.save(content, order, allow_pickle=False)
    data = content.getvalue()  # no view of it: CPython's garbage collection crashes on one in an error's frames
    checksum = hashlib.sha256(data).hexdigest()
    path = pathlib.Path(folder) / FOLDER / f"{table}-{checksum[:16]}.npy"
    path.parent.mkdir(exist_ok=True)
    # Before the schema names it: a crash between the two leaves a file that nobody reads.
    write_file(path, data)
    return Bijection(file=f"{FOLDER}/{path.name}", sha256=checksum, version=VERSION)


def load_order(folder: str | os.PathLike[str], table: Table) -> np.ndarray | None:
    """The bijection of a table, (rows,) uint32 and read-only, or None where its rows keep their places.

    The file is mapped into memory, so that several loaders share one copy.

    Raises:
      DatasetError: If the file is missing, of another version, damaged, or no permutation of the table's rows.
    """
    entry = table.bijection
    if entry is None:
        return None
    path = pathlib.Path(folder) / entry.file
    advice = "copy it again, or run `jrec reorder` on the dataset anew"
    if entry.version != VERSION:
        raise DatasetError(f"{path} is of version {entry.version}, but this jrec reads version {VERSION}; {advice}")
    try:
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DatasetError(
            f"{path}, which renumbers table {table.name!r}, cannot be read ({error}); {advice}"
        ) from error
    if checksum != entry.sha256:
        raise DatasetError(f"{path} is damaged: its SHA-256 is {checksum}, not {entry.sha256}; {advice}")
    order = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    if order.dtype != np.uint32 or order.shape != (table.rows,) or not is_permutation(order):
        raise DatasetError(f"{path} is no permutation of the {table.rows:,} rows of table {table.name!r}; {advice}")
    return order


def load_orders(folder: str | os.PathLike[str], schema: Schema, tables: Iterable[str]) -> dict[str, np.ndarray]:
    """The bijections of the named tables, by table, for those that have one."""
    orders = {name: load_order(folder, schema.table(name)) for name in tables}
    return {name: order for name, order in orders.items() if order is not None}


def table_checksums(schema: Schema) -> dict[str, str] | None:
    """SHA-256 of every bijection by table; None where no table has one. Equal ones mean the same numbering of rows."""
    return {t.name: t.bijection.sha256 for t in schema.tables if t.bijection is not None} or None
