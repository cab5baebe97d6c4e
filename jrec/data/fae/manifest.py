"""A dataset packed for FAE: examples that read only hot rows, apart from all others (FAE, §III-B; ``jrec fae pack``).

    DIR/
      fae.json            this module; written last
      hot_rows/TABLE.npy  (hot rows,) uint32 ascending; absent for tables whose rows are all hot or all cold
      hot/                the hot training examples
      cold/               the other training examples; valid and test of the source

Both are ordinary datasets of the source's tables, in order of time unless they were shuffled. A split without examples
is left out, and ``hot/`` as a whole where no example is hot.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from jrec.data.identity import Identity, digest_of
from jrec.data.schema import MAX_ROWS, DatasetError, Schema
from jrec.files import decode, load_json, save_json
from jrec.json_values import JsonMapping
from jrec.outputs import write_file

FORMAT, VERSION = "jrec-fae", 3
MANIFEST_FILE = "fae.json"
HOT, COLD, ROWS = "hot", "cold", "hot_rows"
_ADVICE = "copy it again, or pack the dataset anew with `jrec fae pack`"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HotSet:
    """Which rows are hot, and why.

    Attributes:
      rows: The hot rows of every table, (hot,) uint32 ascending, numbered as the dataset's loader yields them.
      dataset: The identity of the dataset; None where rows were just given.
      threshold: The share of inputs from which a row is hot; None where rows were just given.
      calibration: How they were chosen, JSON types.
    """

    rows: Mapping[str, np.ndarray]
    dataset: Identity | None = None
    threshold: float | None = None
    calibration: JsonMapping = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HotTable:
    """A table's entry.

    Attributes:
      name, rows: The table's name and number of rows.
      hot: How many of them are hot.
      file: The file of the hot rows, relative to the folder; None where all rows are hot or none is.
      sha256: The file's SHA-256; None without a file.
    """

    name: str
    rows: int
    hot: int
    file: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS or not 0 <= self.hot <= self.rows:
            raise DatasetError(f"table {self.name!r} claims {self.hot:,} hot rows among {self.rows:,}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaeContent:
    """What an FAE folder says of itself.

    Attributes:
      name: The source dataset's name.
      dataset: The source's identity.
      cold: The identity of ``cold/``.
      hot: The identity of ``hot/``; None where no example is hot.
      tables: In the source's order.
      hot_examples, cold_examples: How many training examples are hot, and how many cold.
      content: Checksum of the training examples' content, whatever their order: of the source and of what was written.
      seed: The seed of the examples' order; None where hot and cold ones keep the order of time.
      threshold: A row is hot that at least this share of the inputs accesses; None where the hot rows were just given.
      calibration: How the hot rows were chosen, JSON types; empty where they were just given.
    """

    name: str
    dataset: Identity
    cold: Identity
    hot: Identity | None
    tables: tuple[HotTable, ...]
    hot_examples: int
    cold_examples: int
    content: str
    seed: int | None = None
    threshold: float | None = None
    calibration: JsonMapping = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaeManifest(FaeContent):
    """An FAE folder.

    Attributes:
      folder: Where it lies.
    """

    folder: pathlib.Path

    @property
    def identity(self) -> str:
        """A digest of the batches that training makes of the folder, wherever it lies."""
        digests = [None if identity is None else identity.digests for identity in (self.dataset, self.cold, self.hot)]
        return digest_of([digests, [dataclasses.asdict(table) for table in self.tables]])

    @property
    def hot_folder(self) -> pathlib.Path:
        """The dataset of the hot examples; absent where ``hot_examples`` is 0."""
        return self.folder / HOT

    @property
    def cold_folder(self) -> pathlib.Path:
        """The dataset of the cold examples, and of validation and test."""
        return self.folder / COLD

    @functools.cached_property
    def hot_rows(self) -> dict[str, np.ndarray]:
        """The hot rows of every table: (hot,) uint32 ascending, numbered as the loader of ``cold/`` yields them.

        Raises:
          DatasetError: Naming a file that is missing, damaged or not such a list.
        """
        return {table.name: self._rows_of(table) for table in self.tables}

    @functools.cached_property
    def hot_schema(self) -> Schema | None:
        """The schema of ``hot/``; None where no example is hot.

        Raises:
          DatasetError: If the dataset is missing, damaged, or does not go with this manifest.
        """
        return None if self.hot is None else self._schema_of(self.hot_folder, self.hot)

    @functools.cached_property
    def cold_schema(self) -> Schema:
        """The schema of ``cold/``. It has no training split where all examples are hot.

        Raises:
          DatasetError: If the dataset is missing, damaged, or does not go with this manifest.
        """
        return self._schema_of(self.cold_folder, self.cold)

    def save(self) -> None:
        """Writes ``fae.json`` atomically."""
        content = dataclasses.asdict(self)
        del content["folder"]
        save_json(self.folder / MANIFEST_FILE, content, kind=FORMAT, version=VERSION, sealed=True)

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> FaeManifest:
        """Reads and checks ``fae.json``; hot rows and schemas are read when they are first asked for.

        Raises:
          DatasetError: If the folder is no finished FAE folder, of another version, or the file is damaged.
        """
        folder = pathlib.Path(folder)
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise DatasetError(
                f"{folder} is not a finished FAE folder: it has no {MANIFEST_FILE}. Make one with `jrec fae pack`; if"
                " one was interrupted, run the same command again"
            )
        content = load_json(path, kind=FORMAT, version=VERSION, error=DatasetError, remedy=_ADVICE, sealed=True)
        manifest = decode(content, FaeContent, where=str(path), error=DatasetError, remedy=_ADVICE)
        return FaeManifest(folder=folder, **{f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)})

    def _rows_of(self, table: HotTable) -> np.ndarray:
        if table.file is None:
            return np.arange(table.hot, dtype=np.uint32)  # all or none
        path = self.folder / table.file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DatasetError(f"{path} cannot be read ({error.strerror or error}); {_ADVICE}") from error
        if (digest := hashlib.sha256(data).hexdigest()) != table.sha256:
            raise DatasetError(f"{path} is damaged: its SHA-256 is {digest}, not {table.sha256}; {_ADVICE}")
        rows = np.load(io.BytesIO(data), allow_pickle=False)
        if not is_row_list(rows, table.rows) or len(rows) != table.hot:
            raise DatasetError(f"{path} is no ascending list of {table.hot:,} of {table.rows:,} rows; {_ADVICE}")
        return rows

    def _schema_of(self, folder: pathlib.Path, identity: Identity) -> Schema:
        schema = Schema.load(folder)
        subject = f"{self.folder / MANIFEST_FILE}, folder {folder.name},"
        identity.check(schema.identity, subject=subject, remedy=_ADVICE, error=DatasetError, examples=True)
        return schema


def is_fae_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether this is a finished folder of ``jrec fae pack``."""
    return (pathlib.Path(folder) / MANIFEST_FILE).is_file()


def is_row_list(rows: np.ndarray, table_rows: int) -> bool:
    """Whether these are distinct rows of a table, ascending and uint32."""
    if rows.dtype != np.uint32 or rows.ndim != 1:
        return False
    return not len(rows) or (bool((rows[1:] > rows[:-1]).all()) and int(rows[-1]) < table_rows)


def check_rows(name: str, table_rows: int, rows: np.ndarray) -> None:
    """Refuses what is no list of rows of a table.

    Raises:
      ValueError: Naming the table.
    """
    if not is_row_list(rows, table_rows):
        raise ValueError(f"hot rows of table {name!r} must be ascending uint32 numbers below {table_rows:,}")


def save_hot_rows(folder: pathlib.Path, name: str, table_rows: int, rows: np.ndarray) -> HotTable:
    """Writes a table's hot rows, where its entry needs a file, and returns the entry."""
    if len(rows) in (0, table_rows):
        return HotTable(name=name, rows=table_rows, hot=len(rows))
    content = io.BytesIO()
    np.save(content, rows, allow_pickle=False)
    path = folder / ROWS / f"{name}.npy"
    path.parent.mkdir(exist_ok=True)
    data = content.getvalue()  # no view of it: CPython's garbage collection crashes on one in an error's frames
    write_file(path, data)
    digest = hashlib.sha256(data).hexdigest()
    return HotTable(name=name, rows=table_rows, hot=len(rows), file=f"{ROWS}/{path.name}", sha256=digest)
