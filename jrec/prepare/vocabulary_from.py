"""A later log on an earlier dataset's rows: ``jrec prepare --vocabulary-from DATASET``.

Values get the rows that they have in the earlier dataset, others its OOV rows or their hash buckets, so that what is of
the earlier dataset's rows (runs, plans, profiles) is right for the new one as well.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jrec.data.schema import AS_WRITTEN, CategoricalFeature, DatasetError, DenseFeature, Schema, Table
from jrec.data.texts import TextStore
from jrec.data.vocabulary import HashedTable, KeyTable, Vocabulary, count_rows
from jrec.data.vocabulary_file import buckets_file, copy_vocabulary, load_table, long_texts
from jrec.json_values import JsonObject
from jrec.outputs import link
from jrec.prepare.ingest import keys_name
from jrec.prepare.readers.log_format import CategoricalSpec, LogFormat, learned_of, steps_of
from jrec.prepare.spill import Spill, SpilledLists

_Meaning = dict[str, object]  # what values of a feature become, by the names of settings
_LEARNED = ("min_count", "max_rows", "growing", "key_seed")
# Of a csv schema's tables: where values stand in a file, not what they become.
_PLACES = {"column", "name", "separator", "max_length", "too_long", "fixed_length", "weights", "table", "lists"}


class Usage:
    """How often the rows of a table of the earlier dataset are accessed in the later one.

    Attributes:
      counts: (rows,) int64, accesses of every row in training.
    """

    def __init__(self, table: Vocabulary | HashedTable | KeyTable):
        self.counts = np.zeros(0 if isinstance(table, KeyTable) else table.rows, np.int64)
        self._oov_row = table.oov_row
        self._accesses = self._oov = 0

    def add(self, rows: np.ndarray, trained: np.ndarray) -> None:
        """Counts the accesses of all examples, (n,) rows; ``trained`` holds only those in training."""
        if self.counts.size:
            count_rows(trained, self.counts)
        self._accesses += len(rows)
        if self._oov_row is not None:
            self._oov += int(np.count_nonzero(rows == self._oov_row))

    def stated(self) -> dict[str, int]:
        """For the provenance: how many accesses there were, and of the OOV row, which only vocabularies have."""
        # Hashed tables know every value, and growing ones have no rows yet.
        return {"accesses": self._accesses} | ({} if self._oov_row is None else {"oov": self._oov})


class EarlierDataset:
    """The dataset whose rows a later log gets.

    Args:
      folder: The dataset, made by ``jrec prepare``.

    Raises:
      DatasetError: If it is no finished dataset.
    """

    def __init__(self, folder: str):
        self.folder = pathlib.Path(folder)
        self.schema = Schema.load(folder, check_files=False)
        self.key_seed = self.schema.key_seed

    @property
    def learned(self) -> JsonObject:
        """The options that the earlier dataset's rows were made by, which are the later one's too."""
        stored = self.schema.preparation.get("options")
        return {k: v for k, v in stored.items() if k in _LEARNED} if isinstance(stored, Mapping) else {}

    def source(self, source: LogFormat) -> LogFormat:
        """The later log, its lists bounded by the earlier dataset's.

        Raises:
          DatasetError: If its features or tables differ from the earlier dataset's; names the first difference.
        """
        dense = [_kinds("dense feature", map(_of_dense, one.dense)) for one in (self.schema, source)]
        self._check(*dense)
        features = [_of_feature(f) for f in self.schema.categorical]
        lengths = {f.name: f.max_length for f in self.schema.categorical}
        specs = [_of_spec(s, lengths) for s in source.categorical]
        self._check(_kinds("categorical feature", features), _kinds("categorical feature", specs))
        earlier, later = _csv_columns(self.schema.preparation.get("format_options")), _csv_columns(source.options())
        both = earlier.keys() & later.keys()
        # A log without labels may have a schema that still describes them.
        if source.labels != "required":
            both = {name for name in both if not name.startswith("the label")}
        self._check(*({name: columns[name] for name in sorted(both)} for columns in (earlier, later)))
        if source.key_seed not in (None, self.key_seed):
            raise DatasetError(
                f"the log's joined files were read with key seed {source.key_seed}, but {self.folder} was prepared with"
                f" {self.key_seed}; read them with that seed"
            )
        later = copy.copy(source.limited(lengths).fitted(*learned_of(self.schema)))
        later.steps = steps_of(self.schema)
        return later

    def _check(self, earlier: Mapping[str, _Meaning], later: Mapping[str, _Meaning]) -> None:
        remedy = f"--vocabulary-from needs the features and tables of {self.folder}"
        for name, meaning in later.items():
            if name not in earlier:
                raise DatasetError(f"{name} is not in {self.folder}; {remedy}, so leave it out or prepare without")
            for key in meaning.keys() & earlier[name].keys():
                if meaning[key] != earlier[name][key]:
                    raise DatasetError(
                        f"{name} has {key} {meaning[key]!r} in this log, but {earlier[name][key]!r} in {self.folder};"
                        f" {remedy}, so set it to that"
                    )
        if lacking := [name for name in earlier if name not in later]:
            raise DatasetError(f"this log has no {lacking[0]}, which {self.folder} has; {remedy}, so add it")
        if list(earlier) != list(later):
            moved = next(a for a, b in zip(earlier, later, strict=True) if a != b)
            raise DatasetError(f"{moved} stands in another place in {self.folder}; {remedy} in the same order")

    def add_texts(self, stores: Mapping[str, TextStore]) -> None:
        """Adds each table's long values to its store, so that no new one takes the row of another with its hash."""
        for name, store in stores.items():
            store.remedy = f"prepare {self.folder} and this log again with another --key-seed"
            if (file := self.schema.table(name).vocabulary) is not None:
                for texts in long_texts(self.folder / file, self.key_seed):
                    store.add(texts)

    def table(self, name: str) -> Vocabulary | HashedTable | KeyTable:
        """How a table's values got their rows, or keys if it grows, without counts."""
        return load_table(self.folder, self.schema, self.schema.table(name), self.key_seed)

    def save_table(self, folder: pathlib.Path, name: str, counts: np.ndarray) -> Table:
        """Gives a table's files to the new dataset, with the counts of its own training part.

        Args:
          folder: The new dataset's.
          name: The table's.
          counts: (rows,) int64.

        Returns:
          The table's entry in the schema.
        """
        table, file = self.schema.table(name), f"counts/{name}.npy"
        if table.growing:
            return table
        kept = [] if table.bijection is None else [table.bijection.file]
        for place in (file, buckets_file(name), f"vocabulary/{name}", *kept):
            (folder / place).parent.mkdir(exist_ok=True)
        np.save(folder / file, counts, allow_pickle=False)
        if table.vocabulary is None:
            kept.append(buckets_file(name))
        else:
            copy_vocabulary(self.folder / table.vocabulary, folder / table.vocabulary, counts)
        for one in kept:
            (folder / one).unlink(missing_ok=True)  # of a worker that died here
            try:
                link(self.folder / one, folder / one)
            except FileNotFoundError as error:
                raise DatasetError(f"{self.folder / one} is missing; copy the dataset again") from error
        return dataclasses.replace(table, counts=file)

    def features(self, spill: Spill) -> tuple[CategoricalFeature, ...]:
        """The later dataset's categorical features, the earlier one's.

        Raises:
          DatasetError: If a list is longer than any may be.
        """
        for feature in self.schema.categorical:
            column = spill.columns[keys_name(feature.name)]
            if isinstance(column, SpilledLists) and column.longest > feature.max_length:
                raise DatasetError(
                    f"feature {feature.name!r} has a list of {column.longest:,} values in this log, but at most"
                    f" {feature.max_length:,} in {self.folder}; prepare both anew with room for that many"
                )
        return self.schema.categorical

    def check_made(self, schema: Schema) -> None:
        """Refuses a later dataset whose rows do not mean the same after all.

        Raises:
          DatasetError: As it says.
        """
        earlier = self.schema.identity
        if schema.identity.rows != earlier.rows:
            raise DatasetError(
                f"the rows of this log would not mean what they mean in {self.folder}:"
                f" {earlier.difference(schema.identity)}; prepare it without --vocabulary-from"
            )

    def provenance(self, usage: Mapping[str, Usage], report: Callable[[str], None]) -> JsonObject:
        """Which dataset it is and how its tables are used, for the later one's provenance; reports what went to OOV."""
        tables = {}
        for table in self.schema.tables:
            tables[table.name] = stated = usage[table.name].stated()
            if oov := stated.get("oov"):
                accesses, before = stated["accesses"], self._trained_share(table)
                share = f"{oov:,} of {accesses:,} accesses ({oov / accesses:.1%})"
                compared = "" if before is None else f"; {before:.1%} in the training of {self.folder}"
                report(f"table {table.name!r}: {share} are to values without a row of their own{compared}")
        digests = self.schema.identity.digests
        return {"dataset": self.schema.name, "folder": str(self.folder), **digests, "tables": tables}

    def _trained_share(self, table: Table) -> float | None:
        """The share of the earlier dataset's training accesses that its OOV row has."""
        if table.counts is None:
            return None
        counts = np.load(self.schema.check_file(self.folder, table.counts), mmap_mode="r", allow_pickle=False)
        total = int(counts.sum())
        return float(counts[table.oov_row] / total) if total else None


def _of_dense(feature: DenseFeature) -> tuple[str, _Meaning]:
    return feature.name, {"transform": feature.transform}


def _of_feature(feature: CategoricalFeature) -> tuple[str, _Meaning]:
    meaning = dataclasses.asdict(feature)
    return meaning.pop("name"), meaning


def _of_spec(spec: CategoricalSpec, lengths: Mapping[str, int]) -> tuple[str, _Meaning]:
    length = spec.max_length or lengths.get(spec.name)
    meaning = {"table": spec.table, "weighted": spec.weighted, "fixed_length": spec.fixed_length}
    return spec.name, {**meaning, "max_length": length}


def _kinds(kind: str, entries: Iterable[tuple[str, _Meaning]]) -> dict[str, _Meaning]:
    return {f"{kind} {name!r}": meaning for name, meaning in entries}


def _csv_columns(options: object) -> dict[str, _Meaning]:
    """What the values of a csv schema's columns become, by feature; {} for other formats."""
    schema = options.get("schema") if isinstance(options, Mapping) else None
    if not isinstance(schema, Mapping):
        return {}
    compared = {}
    if isinstance(label := schema.get("label"), Mapping):
        compared["the label"] = {k: v for k, v in label.items() if k not in _PLACES}
    for label in schema.get("labels", ()):
        compared[f"the label {label['name'] or label['column']!r}"] = {
            k: v for k, v in label.items() if k not in _PLACES
        }
    compared["the schema"] = {
        "missing_values": schema.get("missing_values", [""]),
        "values": schema.get("values", AS_WRITTEN),
    }
    for kind in ("cross", "target_mean"):
        for one in schema.get(kind, ()):
            name = one["name"] or "_".join(one["of"])
            compared[f"{kind} {name!r}"] = {k: v for k, v in one.items() if k != "name"}
    for part in (schema, *schema.get("join", ())):
        for one in (*part.get("dense", ()), *part.get("categorical", ())):
            compared[f"feature {one.get('name') or one['column']!r}"] = {
                k: v for k, v in one.items() if k not in _PLACES
            }
    return compared
