"""From a raw click log to a dataset: ``jrec prepare``.

Three passes, each in bounded memory: parse the files into columns on disk (and sort them by time where the log is not),
count the training part of each table and turn its values into row numbers, write blocks of examples into shards.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

from jrec import environment
from jrec.data import blocks
from jrec.data.moments import save_moments
from jrec.data.schema import CategoricalFeature, DatasetError, LabelNumbers, NoExamplesError, Schema, Split, Table
from jrec.data.texts import TextStore, budget_of
from jrec.data.vocabulary_file import file_digests
from jrec.json_values import JsonObject
from jrec.outputs import new_folder
from jrec.prepare.fit import fit
from jrec.prepare.histories import check_ascending, last_lines, write_histories
from jrec.prepare.ingest import (
    BAD_LINE_REMEDY,
    BAD_LINES_FILE,
    LABEL,
    TIME,
    BadLines,
    Log,
    fill_spill,
    keys_name,
    label_name,
    new_spill,
    weights_name,
)
from jrec.prepare.parts import read_parts
from jrec.prepare.prepare_options import LEAVE_ONE_OUT, PrepareOptions
from jrec.prepare.readers.lines import check_inputs, repeated_places
from jrec.prepare.readers.log_format import CategoricalSpec, History, LogFormat
from jrec.prepare.readers.streams import Input, InputLike, is_stream, read_names, spool
from jrec.prepare.shards import ShardRows, write_shards
from jrec.prepare.spill import PlainColumn, Spill, SpilledLists
from jrec.prepare.splits import (
    SPLITS,
    check_labels,
    drawn_splits,
    flat,
    joined_splits,
    label_numbers,
    lines_of,
    random_splits,
    split_bounds,
)
from jrec.prepare.table_parts import TablePart, encode_table
from jrec.prepare.target_means import write_target_means
from jrec.prepare.tasks import Task, running
from jrec.prepare.vocabulary_from import EarlierDataset, Usage
from jrec.progress import Progress

_READ_ROWS = 1 << 18
WHOLE = "log"  # stands for all splits where one log is split


def prepare(
    source: LogFormat,
    inputs: InputLike | Sequence[InputLike] | Mapping[str, Sequence[InputLike]],
    out: str | os.PathLike[str],
    options: PrepareOptions | None = None,
    *,
    command: str = "",
    progress: Progress | None = None,
    report: Callable[[str], None] = lambda message: None,
    workers: concurrent.futures.Executor | None = None,
    bad_line_remedy: str = BAD_LINE_REMEDY,
) -> Schema:
    """Makes a dataset folder of a raw log.

    Args:
      source: The log's format.
      inputs: Its files, folders of files, or pipes, in order of time; "-" is standard input. The format csv also takes
        tables: anything with ``__arrow_c_stream__``, such as a DataFrame. A pipe or a table is read once, to a file
        beside ``out``. Or the inputs of each split by its name, "train", "valid" and "test"; the format has to be one
        whose lines are examples.
      out: The folder to make. Work is done in ``OUT.partial`` beside it, which is renamed at the end.
      options: how.
      command: What the user typed, for the provenance.
      progress: Bars to show.
      report: Takes messages for the user, such as how many bad lines were skipped.
      workers: Who parses, encodes and writes, such as ``jrec.app.ray.RayExecutor``; all see the same files, and a
        piece of work whose worker dies is done once more. Shut down where preparation fails. By default threads of
        this process.
      bad_line_remedy: What the error about a bad line advises.

    Returns:
      The schema of the finished dataset.

    Raises:
      DatasetError: On bad input, no room, or an ``out`` that must not be replaced; ``out`` is then as it was.
    """
    options = options or PrepareOptions()
    progress = progress or Progress(show=False)
    groups = {WHOLE: inputs} if not isinstance(inputs, Mapping) else {n: inputs[n] for n in SPLITS if inputs.get(n)}
    groups = {name: read_names(paths, "" if name == WHOLE else name) for name, paths in groups.items()}
    for paths in groups.values():
        check_inputs(paths, keep_order=options.keep_order)
    _check_groups(groups, source, options)
    source = source if options.labels else source.with_labels("none")
    earlier = None if options.vocabulary_from is None else EarlierDataset(options.vocabulary_from)
    if earlier is not None:
        source = earlier.source(source)
    learned = {} if earlier is None else earlier.learned
    # Provenance says what the dataset depends on, and so not how many threads made it: it is the same for any number.
    left_out = {"threads", "overwrite"}
    left_out |= {"vocabulary_from"} if earlier is None else set()
    left_out |= {"split_by", "split_seed"} if options.split_by == "time" else set()
    left_out |= {"split", "split_seed"} if options.split_by == LEAVE_ONE_OUT else set()
    left_out |= set() if WHOLE in groups else {"split"}
    stated = {k: v for k, v in dataclasses.asdict(options).items() if k not in left_out}
    provenance = {
        "command": command,
        "format": source.name,
        "inputs": [
            {"file": p, "stream": True} if is_stream(p) else Input(name=p, file=p).describe() for p in flat(groups)
        ]
        + source.joined_inputs(),
        "options": stated | learned,
        "jrec": environment.version("jrec"),
    }
    read = [*(str(entry["file"]) for entry in provenance["inputs"]), *filter(None, [options.vocabulary_from])]
    with new_folder(
        out, provenance, kind="dataset", overwrite=options.overwrite, inputs=read, room=_ROOM, report=report
    ) as folder:
        schema = _Preparation(source, groups, folder, options, earlier, progress, report, workers, bad_line_remedy).run(
            provenance
        )
        if earlier is not None:
            earlier.check_made(schema)
        schema.save(folder)
    return Schema.load(out)


_ROOM = "Preparing needs about twice the size of the unpacked log"


def _check_groups(groups: Mapping[str, Sequence[str]], source: LogFormat, options: PrepareOptions) -> None:
    """Refuses files for each split that make no dataset."""
    if source.histories and options.split_by == "random":
        raise DatasetError(
            f"--split-by {options.split_by} with the history {next(iter(source.histories))!r}: a line of training would"
            " hold items of test lines; leave --split-by out, which splits by time, or give leave-one-out"
        )
    if options.split_by == LEAVE_ONE_OUT:
        by = sorted({history.by for history in source.histories.values()})
        if len(by) != 1:
            has = f"histories by {', '.join(by)}" if by else "no history"
            raise DatasetError(
                f"--split-by {LEAVE_ONE_OUT} tells users apart by what histories are of, but the schema has {has}; give"
                ' it a feature with history = {by = "user", of = "item", length = 200}'
            )
    if WHOLE in groups:
        return
    # Also by another path, or through a link.
    if repeated := repeated_places(flat(groups), os.path.realpath):
        raise DatasetError(f"input(s) {', '.join(repeated)} given for more than one split; their examples would leak")
    if "train" not in groups and options.vocabulary_from is None:
        raise DatasetError("there is no file to train on; give --train, or --input for files to split")
    if options.split_by != "time" or options.split != PrepareOptions().split:
        raise DatasetError("--split and --split-by split one log; leave them out where each split has files of its own")
    if not source.has_fields:
        raise DatasetError(
            f"{source.name} makes examples of several lines, which may not stand in files of different splits; give"
            " the whole log as --input"
        )


@dataclasses.dataclass
class _Preparation:
    source: LogFormat
    inputs: Mapping[str, Sequence[str]]
    folder: pathlib.Path
    options: PrepareOptions
    earlier: EarlierDataset | None
    progress: Progress
    report: Callable[[str], None]
    workers: concurrent.futures.Executor | None
    bad_line_remedy: str

    @property
    def attempts(self) -> int:
        """How often a piece of work is tried."""
        return 1 if self.workers is None else 2

    @property
    def _key_seed(self) -> int:
        return self.options.key_seed if self.earlier is None else self.earlier.key_seed

    def run(self, provenance: JsonObject) -> Schema:
        """All passes; returns the schema of what lies in the folder."""
        work = self.folder / "work"
        work.mkdir()
        inputs = self._spooled(work / "streams")
        read = [
            one.describe() | ({"split": split} if split != WHOLE else {})
            for split, group in inputs.items()
            for one in group
        ]
        names = dict.fromkeys(s.table for s in self.source.categorical)
        texts = {
            name: TextStore(work / f"{i:04d}.texts", name, budget=budget_of(len(names))) for i, name in enumerate(names)
        }
        bad = BadLines(self.folder / BAD_LINES_FILE, skip=self.options.on_bad_line == "skip")
        bad.remedy = self.bad_line_remedy
        spill, bounds = self._ingest(inputs, work, texts, bad)
        # The spooled inputs are read; their room is needed for what follows.
        shutil.rmtree(work / "streams", ignore_errors=True)
        if self.earlier is None and bounds[0] == 0:
            split = f"--split {self.options.split}"
            if self.options.split_by == LEAVE_ONE_OUT:
                split = f"--split-by {LEAVE_ONE_OUT}, which needs users of four lines or more"
            raise DatasetError(f"{spill.rows} example(s) leave none to train on with {split}")
        no_matter = self.source.tasks or self.options.split_by == LEAVE_ONE_OUT  # of lines that are all to be found
        if self.earlier is None and self.options.labels and not no_matter:
            check_labels(spill.plain(LABEL), bounds[0], self.source.label)
        numbers = {
            task: self._label_numbers(spill, bounds[0], task)
            for task in self.source.tasks or ("",)
            if task in self.source.numeric_labels
        }
        with self.progress.stage("counting labels", len(self.source.target_means)) as advance:
            self.source = write_target_means(
                self.source, spill, work, self.folder,
                train_rows=bounds[0], split_by=self.options.split_by,
                earlier=None if self.earlier is None else self.earlier.schema, advance=advance,
            )  # fmt: skip
        # Behind the target means, which are raw values that are standardized as any other; and only now, since splits
        # say what training is.
        self.source = fit(self.source, spill, bounds[0])
        if self.earlier is not None:
            features = self.earlier.features(spill)
        else:
            features = tuple(_feature(s, spill) for s in self.source.categorical)
        tables, ids, usage = self._encode(spill, work, texts, bounds[0])
        if self.earlier is not None:
            provenance = {**provenance, "vocabulary": self.earlier.provenance(usage, self.report)}
        splits, times = self._write(spill, ids, bounds, features), self._write_times(spill, bounds)
        shutil.rmtree(work)
        return Schema(
            name=self.source.name,
            block_size=self.options.block_size,
            dense=self.source.dense,
            categorical=features,
            tables=tables,
            splits=splits,
            labels=self.options.labels,
            tasks=self.source.tasks,
            weighted=self.source.weighted,
            numbers=numbers.pop(next(iter(self.source.tasks), ""), None),
            further_numbers=numbers,
            provenance={
                **provenance,
                "inputs": read + self.source.joined_inputs(),
                "format_options": self.source.options(),
                "bad_lines": bad.count,
            },
            files=file_digests(self.folder, tables, self.options.threads)
            | {f.statistic.file: f.statistic.digest for f in self.source.dense if f.statistic is not None}
            | times,
        )

    def _label_numbers(self, spill: Spill, train_rows: int, task: str) -> LabelNumbers:
        """What a label that is a number is like; where no line of a later log knows it, what it was like in training.

        Raises:
          DatasetError: If no line knows it, and there is no earlier dataset.
        """
        numbers = label_numbers(spill.plain(label_name(self.source, task)), train_rows)
        if numbers is None and self.earlier is not None:
            numbers = self.earlier.schema.numbers_by_label.get(task)
        if numbers is None:
            raise DatasetError(
                f"label {task!r} is known of none of the {train_rows:,} training examples, so that there is nothing to"
                " learn; leave its [[labels]] out, or say in missing_values only what stands for a missing value"
            )
        return numbers

    def _spooled(self, folder: pathlib.Path) -> dict[str, list[Input]]:
        """The inputs by split, pipes among them spooled to files of the folder."""
        paths = flat(self.inputs)
        streams = [path for path in paths if is_stream(path)]
        if streams:
            self.report(f"reading {', '.join(streams)} to disk first: a pipe can be read only once")
            folder.mkdir()
        by_path = {
            path: spool(path, folder / f"{i:04d}") if path in streams else Input(name=path, file=path)
            for i, path in enumerate(paths)
        }
        return {split: [by_path[path] for path in group] for split, group in self.inputs.items()}

    def _ingest(
        self, inputs: dict[str, list[Input]], work: pathlib.Path, texts: dict[str, TextStore], bad: BadLines
    ) -> tuple[Spill, tuple[int, int, int]]:
        """All examples in order of their splits, and where each split ends."""
        try:
            if self.earlier is not None:
                # The earlier dataset's texts first: a new value with the hash of an old one would otherwise take its
                # row without a word.
                self.earlier.add_texts(texts)
            spills = {}
            for split, group in inputs.items():
                folder = work / split
                folder.mkdir()
                spills[split] = self._read(group, folder, texts, bad)
        finally:
            for store in texts.values():
                store.close()
        for store in texts.values():
            store.merge()
        if bad.count:
            assert bad.first is not None
            self.report(
                f"skipped {bad.count:,} bad line(s), kept aside in {BAD_LINES_FILE}; the first is"
                f" {bad.first.path}:{bad.first.line}: {bad.first.reason}"
            )
        for split, spill in spills.items():
            if not spill.rows:
                raise NoExamplesError(f"no example in {', '.join(self.inputs[split])}: the input has no (good) line")
        fractions, new = self.options.split, functools.partial(new_spill, self.source)
        if WHOLE not in spills:
            spill, bounds = joined_splits(new, work / "joined", spills)
            if self.source.histories and self.source.timed:
                check_ascending(spill.plain(TIME), spill.rows)
        elif self.options.split_by == "random":
            split_of = random_splits(fractions, self.options.split_seed)
            with self.progress.stage("splitting", 1):
                return drawn_splits(new, work / "drawn", spills[WHOLE], split_of)
        elif self.options.split_by == LEAVE_ONE_OUT:
            return self._last_lines(new, spills[WHOLE], work)
        else:
            spill = spills[WHOLE]
            bounds = split_bounds(spill.rows, fractions)
        spill.columns.update(self._histories(spill, work))
        return spill, bounds

    def _last_lines(
        self, new: Callable[[pathlib.Path], Spill], spill: Spill, work: pathlib.Path
    ) -> tuple[Spill, tuple[int, int, int]]:
        """The last lines of every user, one a split, with their histories."""
        history, rows = next(iter(self.source.histories.values())), spill.rows
        with self.progress.stage("splitting", 1):
            last = last_lines(*self._columns_of(history, spill), work / "last", rows=rows)
            lines = lines_of(last.splits.read, rows, work / "lines")
        histories = self._histories(spill, work, lines)
        drawn, bounds = drawn_splits(new, work / "drawn", spill, last.splits.read)
        drawn.columns.update(histories)
        counts = [stop - start for start, stop in zip((0, *bounds), bounds, strict=False)]
        lacking = f"; {last.without_history:,} lines had no earlier one to learn from" if last.without_history else ""
        self.report(
            f"{last.users:,} users of {rows:,} lines: {counts[0]:,} lines to train on, whose histories hold those"
            f" before them, {counts[1]:,} for validation, {counts[2]:,} for the test{lacking}"
        )
        return drawn, bounds

    def _columns_of(self, history: History, spill: Spill) -> tuple[PlainColumn, PlainColumn, PlainColumn | None]:
        """Users, items and moments of a history."""
        moments = spill.plain(TIME) if self.source.timed else None
        return spill.plain(keys_name(history.by)), spill.plain(keys_name(history.of)), moments

    def _histories(self, spill: Spill, work: pathlib.Path, lines: PlainColumn | None = None) -> dict[str, SpilledLists]:
        """Columns for each history, of all lines or of some in their order."""
        histories, columns = self.source.histories, {}
        if histories and self.earlier is not None:
            self.report("histories begin with this log: they lack what came before it")
        with self.progress.stage("making histories", len(histories)) as advance:
            for number, (name, history) in enumerate(histories.items()):
                made = write_histories(
                    *self._columns_of(history, spill),
                    work / f"history-{number:04d}",
                    rows=spill.rows,
                    length=history.length,
                    in_step=[
                        spill.plain(keys_name(histories[other].of))
                        for group in self.source.steps
                        for other in group
                        if name in group and other != name
                    ],
                    lines=lines,
                    ticks=self.source.ticks if history.ages else None,
                )
                columns[keys_name(name)] = made.items
                if made.ages is not None:
                    columns[weights_name(name)] = made.ages
                advance(number + 1)
        return columns

    def _read(self, inputs: list[Input], work: pathlib.Path, texts: dict[str, TextStore], bad: BadLines) -> Spill:
        """The examples of some files, in order of time."""
        log = Log(self.source, inputs, key_seed=self._key_seed, threads=self.options.threads)
        with self.progress.stage("surveying", log.bytes) as advance:
            self.source.survey(lambda: log.converted(advance, None))
        with self.progress.stage("reading", log.bytes * self.source.passes) as advance:
            if self.workers is not None and self.source.divisible:
                spill, ordered = read_parts(
                    self.source, inputs, work, texts, bad,
                    key_seed=self._key_seed, executor=self.workers, attempts=self.attempts, advance=advance,
                )  # fmt: skip
            else:
                self.source.begin(work / "source", lambda share: advance(log.bytes * (1 + share)))
                chunks = self.source.assemble(log.converted(advance, bad))
                spill = new_spill(self.source, work / "columns")
                try:
                    ordered = fill_spill(self.source, chunks, spill, texts)
                finally:
                    spill.close()
        for remark in self.source.remarks():
            self.report(remark)
        if not ordered:
            with self.progress.stage("sorting by time", 1):
                spill = spill.sorted_by_time(work / "sorted", TIME)
        return spill

    def _encode(
        self, spill: Spill, work: pathlib.Path, texts: dict[str, TextStore], train_rows: int
    ) -> tuple[tuple[Table, ...], dict[str, PlainColumn], dict[str, Usage]]:
        """Builds every table, or takes it from the earlier dataset, and replaces keys by row numbers.

        Returns:
          The tables, the columns of ids by feature, and how the earlier dataset's tables are used, by table.
        """
        names = list(dict.fromkeys(s.table for s in self.source.categorical))
        if self.earlier is not None:
            names = [table.name for table in self.earlier.schema.tables]
        growing = self._growing(names)
        tasks = []
        for index, name in enumerate(names):
            specs = [s for s in self.source.categorical if s.table == name]
            part = TablePart(
                name=name,
                features=tuple(s.name for s in specs),
                columns=tuple(spill.columns[keys_name(s.name)] for s in specs),
                paths=tuple(work / f"ids-{index:04d}-{number:04d}" for number in range(len(specs))),
                rows=spill.rows,
                train_rows=train_rows,
                min_count=specs[0].min_count,
            )
            texts_of_table = texts.get(name) if self.earlier is None else None
            arguments = (part, self.folder, self.options, name in growing, self.earlier, texts_of_table, self._key_seed)
            tasks.append(Task(f"encoding table {name!r}", encode_table, (*arguments, self.attempts == 1)))
        ids: dict[str, PlainColumn] = {}
        usage: dict[str, Usage] = {}
        tables = []
        with (
            self.progress.stage("encoding", max(len(names), 1)) as advance,
            self._executor() as executor,
            running(executor, tasks, attempts=self.attempts) as encoded,
        ):
            for name, one in zip(names, encoded, strict=True):
                tables.append(one.table)
                ids |= one.ids
                if one.usage is not None:
                    usage[name] = one.usage
                if one.hashed:
                    self.report(f"table {name!r} is capped at {one.table.rows:,} rows by hashing")
                advance(len(tables))
        return tuple(tables), ids, usage

    @contextlib.contextmanager
    def _executor(self) -> Iterator[concurrent.futures.Executor]:
        """The workers that were given, or threads."""
        if self.workers is not None:
            yield self.workers
            return
        with concurrent.futures.ThreadPoolExecutor(self.options.threads) as pool:
            yield pool

    def _growing(self, tables: Sequence[str]) -> Sequence[str]:
        """The tables that grow."""
        growing = self.options.growing
        if growing == ("all",) and "all" not in tables:
            return tables
        if unknown := [name for name in growing if name not in tables]:
            raise DatasetError(
                f"--growing names {unknown[0]!r}, but the log's tables are {', '.join(tables)}; name one of them, or"
                " 'all'"
            )
        return growing

    def _write(
        self,
        spill: Spill,
        ids: dict[str, PlainColumn],
        bounds: tuple[int, int, int],
        features: tuple[CategoricalFeature, ...],
    ) -> dict[str, Split]:
        slices, start = [], 0
        for name, stop in zip(SPLITS, bounds, strict=True):
            count = math.ceil((stop - start) / self.options.shard_examples)
            for i in range(count):
                first = start + i * self.options.shard_examples
                last = min(first + self.options.shard_examples, stop)
                slices.append(ShardRows(split=name, file=blocks.shard_file(name, i, count), start=first, stop=last))
            start = stop
        with self.progress.stage("writing", spill.rows) as advance, self._executor() as executor:
            shards = write_shards(
                slices, self.folder, spill, ids, self.source.dense, features,
                beside_labels=self.source.beside_labels, block_size=self.options.block_size, executor=executor,
                attempts=self.attempts, advance=advance,
            )  # fmt: skip
        by_split: dict[str, list] = {name: [] for name in SPLITS}
        for shard_rows, shard in zip(slices, shards, strict=True):
            by_split[shard_rows.split].append(shard)
        return {name: Split(shards=tuple(shards)) for name, shards in by_split.items()}

    def _write_times(self, spill: Spill, bounds: tuple[int, int, int]) -> dict[str, str]:
        """When the examples of each split were, where the log says it; returns the files' digests."""
        if not self.source.dated:
            return {}
        times, digests = spill.plain(TIME), {}
        for name, start, stop in zip(SPLITS, (0, *bounds), bounds, strict=False):
            parts = (times.read(at, min(at + _READ_ROWS, stop)) for at in range(start, stop, _READ_ROWS))
            digests |= save_moments(self.folder, name, (part // self.source.ticks for part in parts))
        return digests


def _feature(spec: CategoricalSpec, spill: Spill) -> CategoricalFeature:
    column = spill.columns[keys_name(spec.name)]
    longest = max(column.longest, 1) if isinstance(column, SpilledLists) else 1
    return CategoricalFeature(
        name=spec.name,
        table=spec.table,
        max_length=spec.max_length or longest,
        fixed_length=spec.fixed_length,
        weighted=spec.weighted,
        boundaries=spec.boundaries,
        aged=spec.aged or None,
    )
