"""What a dataset folder holds: ``schema.json``, ArrayRecord shards of columnar blocks, per-row counts, vocabularies.

    DATASET/
      schema.json                        this module; written last, so its presence means the dataset is whole
      train-00000-of-00004.array_record  one record = one block of examples (``jrec.data.blocks``)
      valid-…, test-…
      counts/TABLE.npy                   (rows,) int64, accesses of every row in the training split
      vocabulary/TABLE.parquet           value, row, count; absent for synthetic data and hashed tables
      means/NAME.npy                     labels' sums and counts by key: (3, keys) int64, or (keys,) records of labels
                                         that are numbers (``jrec.prepare.target_means``)
      reorder/TABLE-CHECKSUM.npy         (rows,) uint32, the new row of every stored one (`jrec reorder`)

Rows of a table descend by frequency, so row 0 is the most accessed. Shards, counts, vocabularies and ``oov_row`` speak
of these stored rows, also where a bijection renumbers what the loader yields.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from jrec.data.identity import Identity, digest_of
from jrec.errors import JrecError
from jrec.files import decode, load_json, save_json, sha256_of, stays_inside
from jrec.json_values import JsonMapping, JsonObject
from jrec.shown import Shown, counted

FORMAT = "jrec-dataset"
VERSION = 2
MAX_ROWS = 2**32
MAX_LENGTH = 2**31 - 1
UNKNOWN = -1.0
"""Of several labels, one of 0 and 1 that is not known; one that is a number is NaN then."""
SCHEMA_FILE = "schema.json"
LOG_ENDINGS = (".csv", ".tsv", ".txt", ".jsonl", ".parquet", ".arrow", ".feather", ".inter", ".gz", ".zst")
"""How names of logs end, for the advice of errors about one that stands in another place."""
CANONICAL, AS_WRITTEN = "canonical", "as_written"
"""What ``values`` of a csv schema may be; older datasets, whose schema does not say it, have them as written."""
LISTS, KEEP_LAST = "lists", "keep the last"
"""In the provenance of a schema without a format: of longer lists the last values count."""


# Keys of features and tables that are written only where they say something.
_OPTIONAL = {
    "dense": ("mean", "deviation", "missing", "statistic"),
    "categorical": ("boundaries", "aged"),
    "tables": ("growing", "oov_share"),
}
_REMEDY = "copy it again, or prepare the dataset again"
NO_TABLES = (
    "jrec trains embedding tables, which only these have; name one in the schema of its log, or turn a column of"
    " numbers into one ([[categorical]] with quantiles = 64)"
)


class DatasetError(JrecError):
    """A dataset that cannot be used as it is: the message says which file, what is wrong and what to do."""


class NoExamplesError(DatasetError):
    """A log without a (good) line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistic:
    """What a dense feature says of the training examples with the same values of categorical features.

    Attributes:
      kind: "mean" of their labels, or "count": the logarithm of 1 + their number.
      features: The categorical features whose values, or combinations of values, are told apart.
      file: Labels' sums and counts by key, relative to the dataset's folder.
      digest: The SHA-256 of that file.
      prior: The mean of a key that is not there.
      smoothing: How many more examples with the mean ``prior`` each key is taken to have.
    """

    kind: Literal["mean", "count"]
    features: tuple[str, ...]
    file: str
    digest: str
    prior: float
    smoothing: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseFeature:
    """A float feature. ``transform`` names what preparation did to the raw value ("log1p", "none", "standardize").

    ``mean`` and ``deviation`` describe the raw values in training, where they were standardized. ``missing`` is the raw
    value that a missing one stands for in predictions, where none may be missing in a log: the one that becomes the
    mean of the transformed values in training. ``statistic`` is what the raw values are, if they are no column's.
    """

    name: str
    transform: str = "none"
    mean: float | None = None
    deviation: float | None = None
    missing: float | None = None
    statistic: Statistic | None = None

    @property
    def unfitted(self) -> bool:
        """Whether its mean and deviation are yet to be learnt."""
        return self.transform == "standardize" and self.mean is None

    @property
    def meaning(self) -> JsonObject:
        """What its values mean: all of it but what it did not learn, so that older datasets keep their identity.

        What stands for a missing value is no part of it, since no example of a dataset has one.
        """
        content = dataclasses.asdict(dataclasses.replace(self, missing=None))
        return {key: value for key, value in content.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CategoricalFeature:
    """Ids of ``table``: one an example, or up to ``max_length``; exactly that many where ``fixed_length``.

    ``boundaries``, if not None, lie between the buckets that its numbers fall into; the values are buckets' numbers.
    ``aged``, if not None, is True: its weights say how many seconds before the example each value was, and scale no
    row.
    """

    name: str
    table: str
    max_length: int = 1
    fixed_length: bool = False
    weighted: bool = False
    boundaries: tuple[float, ...] | None = None
    aged: bool | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_length <= MAX_LENGTH:
            raise DatasetError(
                f"feature {self.name!r} has max_length {self.max_length:,}; it must be 1 to {MAX_LENGTH:,}"
            )

    @property
    def one_hot(self) -> bool:
        """Whether every example has exactly one unweighted id, stored as a plain column."""
        return self.max_length == 1 and self.fixed_length and not self.weighted

    @property
    def scaled(self) -> bool:
        """Whether its weights scale the rows of its values."""
        return self.weighted and not self.aged

    @property
    def meaning(self) -> JsonObject:
        """What its ids mean: all of it but how long lists may get, which has no influence on that."""
        content = dataclasses.asdict(self)
        if not self.fixed_length:
            del content["max_length"]
        return {key: value for key, value in content.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bijection:
    """A file that renumbers a table's rows (``jrec.data.bijection``), and the SHA-256 of its bytes."""

    file: str
    sha256: str
    version: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """An id space.

    Attributes:
      name: The table's name.
      rows: How many rows it has.
      oov_row: Where values outside the vocabulary went, if anywhere.
      counts, vocabulary: Files, relative to the dataset's folder.
      bijection: What the loader applies to every id, if anything.
      numbering: Digest of which value has which row: of the vocabulary's content, or of hash buckets and their seed;
        "" where the table's maker did not say.
      growing: True where the examples hold 64-bit keys of values, which a run gives rows (``jrec.data.growing``);
        ``rows`` is then how many values training has. None for row numbers.
      oov_share: The share of the training values that numbered the rows which read the OOV row, 0 to 1; None where
        nobody counted, or the table has no such row.
    """

    name: str
    rows: int
    oov_row: int | None = None
    counts: str | None = None
    vocabulary: str | None = None
    bijection: Bijection | None = None
    numbering: str = ""
    growing: bool | None = None
    oov_share: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise DatasetError(f"table {self.name!r} has {self.rows:,} rows; it must have 1 to {MAX_ROWS:,}")
        if self.oov_row is not None and not 0 <= self.oov_row < self.rows:
            raise DatasetError(f"table {self.name!r} of {self.rows:,} rows has its OOV row at {self.oov_row:,}")

    @property
    def rows_for_all(self) -> int:
        """How many rows a table that grows needs for all values of training, and for the others."""
        return self.rows + 1

    @property
    def meaning(self) -> JsonObject:
        """What its row numbers mean; keys mean the same, however many there are."""
        if self.growing:
            return {"growing": True, "numbering": self.numbering}
        return {"rows": self.rows, "oov_row": self.oov_row, "numbering": self.numbering}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One ArrayRecord file: its name, the blocks and examples it holds, its size in bytes, its content's digest."""

    file: str
    blocks: int
    examples: int
    bytes: int
    digest: str

    def __post_init__(self) -> None:
        if min(self.blocks, self.examples, self.bytes) < 0:
            raise DatasetError(
                f"shard {self.file!r} has {self.blocks:,} blocks, {self.examples:,} examples and {self.bytes:,} bytes"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of "train", "valid" or "test", in time order. Every block but a shard's last is full."""

    shards: tuple[Shard, ...]

    @property
    def examples(self) -> int:
        """Examples in all shards."""
        return sum(s.examples for s in self.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelNumbers:
    """What labels that are numbers are like: the least of all, and mean and standard deviation in training.

    Of several labels those count that are known.
    """

    least: float
    mean: float
    deviation: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """The description of a dataset.

    Attributes:
      name: What it was made from, e.g. "criteo-kaggle".
      block_size: Examples in a full block.
      dense, categorical: The features, in column order.
      tables: The id spaces, in order.
      splits: The splits, by name.
      provenance: How it was made: command, inputs with sizes, options, jrec version, bad lines skipped.
      ceiling: For synthetic data, the teacher's own metrics on each split, e.g. {"test": {"auc": 0.81}}.
      files: SHA-256 of files of counts and vocabularies, by path relative to the folder.
      folder: Where it was read from; None where it was not.
      labels: Whether the examples have labels; where they have none, the blocks' labels are zeros.
      tasks: The names of the labels where examples have several, each of which may be unknown
        (``jrec.data.blocks.known_labels``); else (). The first is the blocks' ``label``, the others have columns of
        their names.
      weighted: Whether examples have weights (``jrec.data.blocks.EXAMPLE_WEIGHT``).
      numbers: What labels are like that are numbers, of several the first; None of labels of 0 and 1.
      further_numbers: The same of the further labels that are numbers, by task.
    """

    name: str
    block_size: int
    dense: tuple[DenseFeature, ...]
    categorical: tuple[CategoricalFeature, ...]
    tables: tuple[Table, ...]
    splits: Mapping[str, Split]
    provenance: JsonMapping
    ceiling: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folder: pathlib.Path | None = dataclasses.field(default=None, compare=False, repr=False)
    labels: bool = True
    tasks: tuple[str, ...] = ()
    weighted: bool = False
    numbers: LabelNumbers | None = None
    further_numbers: Mapping[str, LabelNumbers] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_LENGTH:
            raise DatasetError(f"the schema has blocks of {self.block_size:,} examples; it must be 1 to {MAX_LENGTH:,}")
        names = [t.name for t in self.tables]
        for feature in self.categorical:
            if feature.table not in names:
                raise DatasetError(f"feature {feature.name!r} reads table {feature.table!r}, which the schema lacks")
        if len(self.tasks) == 1 or (self.tasks and not self.labels):
            raise DatasetError(f"the schema has tasks {list(self.tasks)}; there must be none, or two and labels")
        columns = [*self.tasks, *self.feature_names]
        for kind, all_names in (("feature", columns), ("table", names)):
            if repeated := sorted({n for n in all_names if all_names.count(n) > 1}):
                raise DatasetError(f"{kind} name(s) {', '.join(repeated)} occur more than once in the schema")
        if odd := sorted(self.further_numbers.keys() - {*self.tasks[1:]}):
            raise DatasetError(f"the schema has numbers of {odd[0]!r}, which is none of its further labels")
        if (file := next((f for f in self._named_files() if not stays_inside(f)), None)) is not None:
            raise DatasetError(f"the schema names file {file!r}, which is no path inside the dataset's folder")

    def __repr__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()

    def _shown(self) -> Shown:
        readers: dict[str, list[str]] = {}
        for feature in self.categorical:
            more = f" (up to {feature.max_length} ids)" if feature.max_length > 1 else ""
            readers.setdefault(feature.table, []).append(f"{feature.name}{more}")
        splits = ", ".join(f"{name} {split.examples:,}" for name, split in self.splits.items())
        labels = f", labels {', '.join(self.tasks)}" if self.tasks else "" if self.labels else ", no labels"
        labels += f" (numbers: {', '.join(self.numbers_by_label)})" if self.tasks and self.numbers_by_label else ""
        labels += ", labels are numbers" if self.numbers and not self.tasks else ""
        labels += ", weighted" if self.weighted else ""
        dense = f"; dense: {', '.join(f.name for f in self.dense)[:80]}" if self.dense else ""
        rows = [
            (table.name, f"{table.rows:,} {'values, grows' if table.growing else 'rows'}",
             f"read by {', '.join(readers.get(table.name, ['nothing']))}"[:80])
            for table in self.tables
        ]  # fmt: skip
        return Shown((f"Schema of {self.name}: {splits or 'no'} examples{labels}{dense}",), rows)

    def _named_files(self) -> Iterator[str]:
        """All files that are read by a name of the schema's."""
        yield from (shard.file for split in self.splits.values() for shard in split.shards)
        yield from self.files
        yield from self.statistic_files
        for table in self.tables:
            named = (f"{table.name}.npy", table.counts, table.vocabulary, table.bijection and table.bijection.file)
            yield from (file for file in named if file is not None)

    @property
    def numbers_by_label(self) -> dict[str, LabelNumbers]:
        """What labels are like that are numbers, by task, or by "" where there is one label."""
        first = {} if self.numbers is None else {next(iter(self.tasks), ""): self.numbers}
        return {**first, **self.further_numbers}

    @property
    def feature_names(self) -> list[str]:
        """Dense, then categorical feature names."""
        return [f.name for f in self.dense] + [f.name for f in self.categorical]

    @property
    def statistic_files(self) -> list[str]:
        """The files of what dense features say of training examples, relative to the folder."""
        return list(dict.fromkeys(f.statistic.file for f in self.dense if f.statistic is not None))

    @property
    def growing(self) -> frozenset[str]:
        """The tables that grow."""
        return frozenset(t.name for t in self.tables if t.growing)

    def with_capacities(self, capacities: Mapping[str, int]) -> Schema:
        """The schema with the rows that a run gives to tables that grow.

        Args:
          capacities: By table, its number of rows.
        """
        rows = {table.name: capacities.get(table.name, table.rows) for table in self.tables if table.growing}
        tables = (dataclasses.replace(t, rows=rows.get(t.name, t.rows)) for t in self.tables)
        return dataclasses.replace(self, tables=tuple(tables))

    def check_numbered(self, need: str, *, remedy: str = "prepare it without --growing") -> None:
        """Raises DatasetError if a table grows, for what needs to know which row means what.

        Args:
          need: What needs it and why, as the beginning of a sentence: "`jrec reorder` renumbers rows".
          remedy: What to do instead.
        """
        if self.growing:
            raise DatasetError(
                f"{need}, but table {min(self.growing)!r} of {self.folder or self.name} grows: training gives its rows"
                f" to values as they come; {remedy}"
            )

    @functools.cached_property
    def identity(self) -> Identity:
        """What the dataset's columns, rows and examples are, in two digests."""
        dense = [("feature " + f.name, f.meaning) for f in self.dense]
        categorical = [("feature " + f.name, f.meaning) for f in self.categorical]
        tables = [("table " + t.name, t.meaning) for t in self.tables]
        orders = [("order of table " + t.name, t.bijection.sha256) for t in self.tables if t.bijection is not None]
        content = [dense, categorical, tables, orders]
        splits = {name: [[s.digest, s.examples] for s in split.shards] for name, split in self.splits.items()}
        return Identity(
            name=self.name,
            path="" if self.folder is None else str(self.folder),
            rows=digest_of(content),
            examples=digest_of([self.block_size, splits]),
            columns={name: digest_of(meaning)[:16] for group in content for name, meaning in group},
        )

    @property
    def preparation(self) -> JsonMapping:
        """How it was prepared; of a part of a dataset that `jrec fae pack` made, how that dataset was."""
        made: object = self.provenance
        while isinstance(made, Mapping) and "format" not in made and "source" in made:
            made = made["source"]
        return made if isinstance(made, Mapping) else {}

    @property
    def key_seed(self) -> int:
        """The seed of the hash of long values that it was prepared with."""
        options = self.preparation.get("options")
        seed = options.get("key_seed") if isinstance(options, Mapping) else None
        return seed if isinstance(seed, int) else 0

    @property
    def canonical(self) -> bool:
        """Whether texts of categories were brought into one form before they became keys (``values`` of the schema)."""
        options = self.preparation.get("format_options")
        columns = options.get("schema") if isinstance(options, Mapping) else None
        return isinstance(columns, Mapping) and columns.get("values") == CANONICAL

    @property
    def crosses(self) -> frozenset[str]:
        """The features whose values are combinations of others' (``[[cross]]`` in the schema of a csv log)."""
        options = self.preparation.get("format_options")
        columns = options.get("schema") if isinstance(options, Mapping) else None
        made = columns.get("cross", ()) if isinstance(columns, Mapping) else ()
        return frozenset(one["name"] or "_".join(one["of"]) for one in made)

    def table(self, name: str) -> Table:
        """The table called ``name``."""
        return next(t for t in self.tables if t.name == name)

    def with_examples(self, splits: Iterable[str]) -> tuple[str, ...]:
        """Those of some splits that the dataset has, and has examples of."""
        return tuple(name for name in splits if name in self.splits and self.splits[name].examples)

    def check_labels(self) -> None:
        """Raises DatasetError where the examples have no labels, for what cannot do without."""
        if not self.labels:
            raise DatasetError(f"{self.folder or self.name} has no labels; prepare it with them, or use `jrec predict`")

    def check_file(self, folder: str | os.PathLike[str], file: str) -> pathlib.Path:
        """The path of a file of counts or a vocabulary, after comparing its checksum where the schema has one.

        Raises:
          DatasetError: If the file is missing or another than the one that was written.
        """
        path = pathlib.Path(folder) / file
        try:
            digest = sha256_of(path)
        except OSError as error:
            raise DatasetError(f"{path} cannot be read ({error.strerror or error}); {_REMEDY}") from error
        if digest != self.files.get(file, digest):
            raise DatasetError(f"{path} is damaged: its SHA-256 is {digest}, not {self.files[file]}; {_REMEDY}")
        return path

    @property
    def sizes(self) -> str:
        """The examples of each split, and the tables with their rows, as `jrec prepare` says them at its end."""
        examples = ", ".join(f"{name} {split.examples:,}" for name, split in self.splits.items())
        tables = f"{counted(len(self.tables), 'table')} of {counted(sum(t.rows for t in self.tables), 'row')}"
        return f"{examples} examples; {tables}"

    @property
    def title(self) -> str:
        """What pages and files call the dataset: its name, or where its format has only its own, its folder's."""
        return self.folder.resolve().name if self.name == "csv" and self.folder is not None else self.name

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``schema.json`` atomically."""
        path = pathlib.Path(folder) / SCHEMA_FILE
        content = dataclasses.asdict(dataclasses.replace(self, folder=None))
        del content["folder"]
        if self.labels:
            del content["labels"]
        if not self.tasks:
            del content["tasks"]
        if not self.weighted:
            del content["weighted"]
        if self.numbers is None:
            del content["numbers"]
        if not self.further_numbers:
            del content["further_numbers"]
        for kind, keys in _OPTIONAL.items():
            content[kind] = [{k: v for k, v in f.items() if v is not None or k not in keys} for f in content[kind]]
        save_json(path, content, kind=FORMAT, version=VERSION, sealed=True)

    @staticmethod
    def load(folder: str | os.PathLike[str], *, check_files: bool = True) -> Schema:
        """Reads and checks a dataset's schema, and that every shard is there in its full size.

        Raises:
          DatasetError: If the folder is no finished dataset, is of another format version, has no categorical feature,
            or a shard is missing or truncated.
        """
        folder = pathlib.Path(folder)
        path = folder / SCHEMA_FILE
        if folder.is_file() and folder.name.lower().endswith(LOG_ENDINGS):
            raise DatasetError(
                f"{folder} is a log, and no dataset; `jrec prepare csv --input {folder} --out DATASET` makes one of it"
            )
        if not path.is_file():
            raise DatasetError(
                f"{folder} is not a finished dataset: it has no {SCHEMA_FILE}. Make one with `jrec prepare` or"
                " `jrec synth`; if one was interrupted, run the same command again"
            )
        content = load_json(
            path,
            kind=FORMAT,
            version=VERSION,
            error=DatasetError,
            remedy="prepare the dataset again; by the same options values get the same rows",
            sealed=True,
        )
        content["folder"] = None
        content.setdefault("labels", True)
        content.setdefault("tasks", [])
        content.setdefault("weighted", False)
        content.setdefault("numbers", None)
        content.setdefault("further_numbers", {})
        for kind, keys in _OPTIONAL.items():
            for feature in content[kind] if isinstance(content.get(kind), list) else ():
                if isinstance(feature, dict):
                    feature |= {key: None for key in keys if key not in feature}
        try:
            schema = decode(content, Schema, where=str(path), error=DatasetError, remedy=_REMEDY)
        except DatasetError as error:
            raise error if str(path) in str(error) else DatasetError(f"{path}: {error}; {_REMEDY}") from error
        if not schema.categorical:
            raise DatasetError(f"{folder} has no categorical feature, but {NO_TABLES}; then prepare it again")
        schema = dataclasses.replace(schema, folder=folder)
        if check_files:
            _check_shards(folder, schema)
        return schema


def _check_shards(folder: pathlib.Path, schema: Schema) -> None:
    for name, split in schema.splits.items():
        for shard in split.shards:
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                fault = "is missing" if size is None else f"has {size:,} bytes"
                raise DatasetError(
                    f"{path} ({name} split) {fault}, but the schema says {shard.bytes:,}; copy it again or prepare anew"
                )
            if shard.blocks != math.ceil(shard.examples / schema.block_size):
                raise DatasetError(
                    f"{path} claims {shard.examples:,} examples in {shard.blocks:,} blocks of {schema.block_size:,}"
                )
