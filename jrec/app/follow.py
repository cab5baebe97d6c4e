"""A model that goes on learning from files as they appear, each scored before it is learnt from: ``jrec follow``.

    RUN/files.jsonl         the files that were taken, a line each, in the order in which they are learnt
    RUN.files/000012        a file's examples, by the rows of the dataset that the model was first trained on, until a
                            checkpoint has them
    RUN.files/bad_lines/    the lines of a file that were skipped, by its number: 000012.tsv; of a file without a good
                            line all of it, 000012-NAME
    RUN/checkpoints/STEP    beside rows and parameters: how many files were learnt, and the position in the next one

A file is taken once: it gets a line, on disk, before anything becomes of it. What is learnt depends on the files and
this order only, neither on when they came nor on when the run was stopped, so that a run that is killed anywhere goes
on with the same bits from its last checkpoint: files behind it are learnt again, none twice.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from jrec.app.build import build_layout, build_loss
from jrec.app.config import LRScheduleConfig, TrainConfig
from jrec.app.config.typed_toml import MOST
from jrec.app.dataset import open_data
from jrec.app.evaluate import score_split
from jrec.app.export import export_run
from jrec.app.loaders import train_loader
from jrec.app.make_run import load_initial, make_run
from jrec.app.models.reading import Reading
from jrec.app.processes.interrupt import StopRequest, stop_on_signals
from jrec.app.progress import TrainingProgress
from jrec.app.recorder import Recorder
from jrec.app.report.logs import PROGRESSIVE, JsonLines, MetricLog, read_records, truncate_after
from jrec.app.report.ranking import evaluated, evaluated_by_task
from jrec.app.run_folder import open_run_folder
from jrec.app.run_record import CHECKPOINT_FOLDER, RunRecord, TrainedRun, find_run
from jrec.app.saver import Saver
from jrec.checkpoint import Checkpoints
from jrec.checkpoint.manifest import TableRecord
from jrec.checkpoint.saved import Saved
from jrec.data.schema import DatasetError, NoExamplesError, Schema
from jrec.errors import ConfigError
from jrec.json_values import JsonObject
from jrec.outputs import kind_of
from jrec.prepare.encoder import stored_log
from jrec.prepare.ingest import BAD_LINES_FILE
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers.lines import read_blocks
from jrec.prepare.readers.places import natural_order
from jrec.run.export import ExportBase
from jrec.run.feeds.run_feed import RunFeed
from jrec.serving.checks import is_finished, load_manifest, read_manifest
from jrec.serving.format import MANIFEST as EXPORT_MANIFEST
from jrec.serving.format import ExportError
from jrec.shown import counted, human_bytes

if TYPE_CHECKING:
    from jrec.sharding import Plan

FILES = "files.jsonl"
UNFINISHED = (".tmp", ".partial", ".part")
"""How names of files end that someone is still writing."""
_BAD_LINES = "bad_lines"
_WAIT = 0.2  # seconds between two looks at whether to stop
_OWN_DELTA = re.compile(r"step-\d{12}")  # of equal length, so that names compare as steps do


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """How files are followed.

    Attributes:
      files: The folder in which they appear. Names that begin with "." or "_" or end as in ``UNFINISHED`` are not read.
      export, deltas: An export, made where there is none, and the folder for what follows it; None for none.
      every: Seconds between two checkpoints, each with a delta; a file is finished first. 0 for one after every file.
      poll: Seconds between two looks for files where there was none.
      settle: Seconds for which a file must have stayed as it is.
      once: Whether to end where there is no further file.
      on_bad_line: What becomes of lines that are none ("error", or "skip").
    """

    files: pathlib.Path
    export: pathlib.Path | None = None
    deltas: pathlib.Path | None = None
    every: float = 60.0
    poll: float = 1.0
    settle: float = 1.0
    once: bool = False
    on_bad_line: str = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed:
    """What came of following.

    Attributes:
      folder: The run.
      step: Its step.
      files: How many files it has learnt in all.
      examples: How many examples it learnt this time.
      stopped: Whether a signal ended it.
    """

    folder: pathlib.Path
    step: int
    files: int
    examples: int
    stopped: bool


def follow_config(run: str | pathlib.Path, out: str, overrides: list[str], *, resume: bool = False) -> TrainConfig:
    """The configuration of a run that goes on from another one, by the order of files and at constant rates.

    Args:
      run: The trained run, or one of its checkpoints.
      out: The folder of the run that goes on.
      overrides: Further keys, as ``section.key=value``.
      resume: Whether ``run`` may be ``out`` itself, whose configuration says what it began from.

    Raises:
      ConfigError: If a key cannot be as it is given, or the model cannot follow files.
    """
    before, _ = find_run(run)
    # What it began from need not be there anymore.
    begun_from = before.config().init_from if resume and _is_folder(before, out) else ""
    fixed = [f"out={out!r}", f"init_from={begun_from or str(run)!r}", "data.order='time'", "epochs=1", "max_steps=0"]
    fixed += ["data.half_life=''", "evaluate.progressive=''", "checkpoint.keep_best=false"]
    # A file is read once: what is left of its last batch would never be learnt, and a small file has no more than that.
    fixed += ["data.drop_remainder=false"]
    config = before.config([*fixed, *overrides])
    if not begun_from and not any(key.startswith("lr_schedule") for key in overrides):
        # The one of training ends at low rates.
        config = dataclasses.replace(config, lr_schedule=LRScheduleConfig())
    kept = dataclasses.replace(config.checkpoint, every_steps=config.checkpoint.every_steps or 1)
    config = dataclasses.replace(config, checkpoint=kept)
    if config.schedule != "plain":
        raise ConfigError(f"schedule is {config.schedule!r}, which needs hot rows known beforehand; train by 'plain'")
    if not config.model.of_kind.scores_lines:
        raise ConfigError(
            f"model.kind is {config.model.kind!r}, which learns from histories; only models that score lines follow"
            " files"
        )
    return config


def _is_folder(run: RunRecord, out: str) -> bool:
    return run.folder.resolve() == pathlib.Path(out).resolve()


def examples_folder(run: pathlib.Path) -> pathlib.Path:
    """Where examples of files are until a checkpoint has them; beside the run, in which no dataset may lie."""
    return run.with_name(f"{run.name}.files")


class Files:
    """The files that a run takes, in their order.

    Args:
      run: The run's folder.
      options: Where files appear.
      base: The dataset whose rows the model has.
      report: Takes what is to be said of a file's lines, such as how many bad ones were skipped.
    """

    def __init__(self, run: pathlib.Path, options: FollowOptions, base: str, report: Callable[[str], None]):
        self._folder, self._options, self._base, self._report = examples_folder(run), options, base, report
        self._folder.mkdir(exist_ok=True)
        truncate_after(run / FILES, MOST)  # a torn last line, of a kill
        self._list = JsonLines(run / FILES)
        # A later line of a name says how the file was when it was read once more; the first one gives it its place.
        self._taken = {entry["file"]: entry for entry in read_records(run / FILES)}
        self._said: set[str] = set()  # of files that were written again
        self._waiting = collections.deque[pathlib.Path]()
        source = stored_log(Schema.load(base, check_files=False))
        if source is None or source.histories:
            which = "are not made of single lines" if source is None else "have histories, which go on over files"
            raise ConfigError(f"examples of {base} {which}; only logs of which a line makes an example can be followed")
        self._source = source

    @property
    def taken(self) -> list[JsonObject]:
        """What is known of the files that were taken, in the order in which they are learnt."""
        return [*self._taken.values()]

    def take(self, step: int) -> bool:
        """Takes the next file that is there and finished, by the numbers in the names; False where there is none.

        Args:
          step: The step of the run, which has learnt all that were taken before.
        """
        if not self._waiting:  # a look at all names, of which there may be many, for all files that it shows
            self._waiting.extend(self._finished())
        while self._waiting:
            path = self._waiting.popleft()
            # Taken away since the look: it has no line yet, so that nobody misses it.
            with contextlib.suppress(FileNotFoundError):
                self._enter({"step": step, "file": path.name, **_state(path)})
                return True
        return False

    def _enter(self, entry: JsonObject) -> None:
        self._list.write(entry)
        # On disk before anything becomes of the file: the order of these lines is the order in which files are learnt
        # again.
        self._list.sync()
        self._taken[entry["file"]] = entry

    def _finished(self) -> Iterator[pathlib.Path]:
        for path in sorted(self._options.files.iterdir(), key=lambda path: natural_order(path.name)):
            if path.name.startswith((".", "_")) or path.name.endswith(UNFINISHED) or not path.is_file():
                continue
            with contextlib.suppress(FileNotFoundError):
                state = _state(path)
                if (entry := self._taken.get(path.name)) is not None:
                    self._say_once_if_changed(entry, state)
                # A time ahead of this machine's clock, as of another machine's, only makes the file wait longer.
                elif time.time() - state["written"] >= self._options.settle:
                    yield path

    def _say_once_if_changed(self, entry: JsonObject, state: JsonObject) -> None:
        if entry["file"] in self._said or entry.items() >= state.items():
            return
        self._said.add(entry["file"])
        self._report(
            f"{entry['file']}: written again after it was learnt, which changes nothing: a name is taken once; give"
            " new lines a file of another name"
        )

    def dataset(self, number: int, *, begun: bool) -> pathlib.Path | None:
        """The examples of a file; None of one that has none.

        Args:
          number: Its place among those that were taken.
          begun: Whether a checkpoint has learnt its first examples, so that it must be the same file.

        Raises:
          DatasetError: If it is gone, or cannot be read as the first log was.
        """
        folder, entry = self._folder / f"{number:06d}", self.taken[number]
        # Made before a kill. It is whole, since ``prepare`` gives a folder its name last.
        if kind_of(folder) == "dataset":
            return folder
        path = self._options.files / entry["file"]
        if not path.is_file() or (begun and path.stat().st_size != entry["bytes"]):
            is_now = f"has {path.stat().st_size:,} bytes now" if path.is_file() else "is no longer there"
            instead = "" if begun else ", or put an empty file in its place, which leaves it out"
            raise DatasetError(
                f"{path} was taken with {entry['bytes']:,} bytes, and no checkpoint has all of it, but it {is_now};"
                f" bring it back as it was{instead}"
            )
        if not entry.items() >= (state := _state(path)).items():
            # No checkpoint, and so no delta, has anything of it: a line that was mended is learnt as it is now.
            self._report(f"{path.name}: written again since it was taken; it is learnt as it is now")
            self._enter({**entry, **state})
        skipped: list[str] = []
        with contextlib.suppress(NoExamplesError):
            if not _is_empty(path):
                self._prepare(path, folder, skipped.append)
                return folder
        if skipped:
            # They went with the folder that was to have the other lines.
            kept = self._bad_lines() / f"{folder.name}-{path.name}"
            shutil.copyfile(path, kept)
            self._report(f"{path.name}: no good line; nothing is learnt of it, and {kept} is a copy of it")
        else:
            self._report(f"{path.name}: empty")
        return None

    def _prepare(self, path: pathlib.Path, folder: pathlib.Path, report: Callable[[str], None]) -> None:
        def say(message: str) -> None:
            report(message)
            self._report(f"{path.name}: {message}")

        options = PrepareOptions(
            split=(1.0, 0.0, 0.0), vocabulary_from=self._base, on_bad_line=self._options.on_bad_line, overwrite=True
        )
        prepare(self._source, str(path), folder, options, command="jrec follow", report=say)

    def _bad_lines(self) -> pathlib.Path:
        (folder := self._folder / _BAD_LINES).mkdir(exist_ok=True)
        return folder

    def close(self) -> None:
        """Closes the list."""
        self._list.close()

    def drop(self, before: int) -> None:
        """Deletes the examples of the files before a number, which a checkpoint has; their bad lines stay."""
        for folder in [*self._folder.iterdir()]:
            number = folder.name.partition(".")[0]
            if number.isdigit() and int(number) < before:
                bad = folder / BAD_LINES_FILE
                if folder.name == number and bad.is_file():  # else what a kill left of an attempt
                    bad.replace(self._bad_lines() / f"{number}.tsv")
                shutil.rmtree(folder, ignore_errors=True)


def follow(
    config: TrainConfig,
    options: FollowOptions,
    *,
    resume: bool = False,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda message: None,
) -> Followed:
    """Learns from files as they appear, until a signal comes, or with ``options.once`` until there is none.

    Args:
      config: ``follow_config``.
      options: Where files appear, and what is written when.
      resume: Whether to go on with the run in ``config.out``, where there is one.
      overwrite: Whether to replace it.
      report: Takes a line for each file, and for each delta.

    Returns:
      What came of it. A SIGINT or SIGTERM ends the run after the current step, with a checkpoint.

    Raises:
      ConfigError: If the configuration does not fit the data or the folder.
      DatasetError: If a file cannot be read as the first log was, or is gone before a checkpoint has it.
      CheckpointError: If a checkpoint cannot be used or written.
      ExportError: If the export is of another model.
      DivergedError: If the loss becomes NaN or infinite.
    """
    if not options.files.is_dir():
        raise ConfigError(f"{options.files}, in which files are to appear, is no folder; make it first")
    if overwrite and _is_folder(find_run(config.init_from)[0], config.out):
        raise ConfigError(
            f"--overwrite would delete the run in {config.out}, from which this one is to begin; go on with it by"
            " --resume, or choose another --out"
        )
    if options.deltas is not None and options.export is None:
        raise ConfigError("deltas follow an export; give its folder, too (--export)")
    # Not by the run that it begins from, which may be gone: the configuration has the capacities of that one's tables.
    data = open_data(dataclasses.replace(config, init_from=""))
    config = dataclasses.replace(data.config, init_from=config.init_from)
    with open_run_folder(config, resume=resume, overwrite=overwrite) as folder, stop_on_signals() as stop:
        if not (resume and TrainedRun(folder).began):
            # Of an earlier run under this name, whose examples would be taken for this one's by their numbers.
            shutil.rmtree(examples_folder(folder), ignore_errors=True)
            (folder / FILES).unlink(missing_ok=True)
        follower = _Follower(config, data.schema, data.plan, folder, options, report, resume)
        with contextlib.closing(follower), follower.saver.rescuing(follower.run):
            return follower.go(stop)


class _Follower:
    """A run that follows files."""

    def __init__(
        self,
        config: TrainConfig,
        schema: Schema,
        plan: Plan | None,
        folder: pathlib.Path,
        options: FollowOptions,
        report: Callable[[str], None],
        resume: bool,
    ):
        self._config, self._schema, self._folder, self._options, self._report = config, schema, folder, options, report
        record = TrainedRun(folder)
        record.keep_dataset(schema.identity, resume=resume)
        initial = record.keep_initial(config, schema.identity, resume=resume)
        assert initial is not None  # as ``follow_config`` has set ``init_from``
        self.files = Files(folder, options, config.data.path, report)
        self._layout = build_layout(config, schema, plan)
        self.saver = Saver(folder, config.checkpoint)
        resumed = self.saver.open(None) if resume else None
        self.run = make_run(
            config, schema, self._layout, total_steps=MOST, first_step=initial.optimizer_step, plan=plan, abstract=True
        )
        self._log = MetricLog(folder, tensorboard=config.log.tensorboard)
        self._recorder = Recorder.of(config, self.run, self._log, kept=self.saver.kept)
        self._learnt, self._position, self._metrics = 0, None, {}  # files, and where in the next one, and its scores
        if resumed is not None:
            loaded = self.saver.go_on(resumed, self.run, self._recorder, self._log)
            self._learnt, self._position = loaded.meta["files"], loaded.meta["loader"]
            self._metrics = {"": loaded.meta.get("scored", {}), **loaded.meta.get("scored_tasks", {})}
        else:
            self._log.truncate_after(-1)
            saved = Checkpoints(initial.record.checkpoints).open(initial.step)
            load_initial(self.run, initial, saved, config, schema)
        self._step = self.run.compile(
            loss=build_loss(config.model, schema),
            micro_batches=config.data.micro_batches,
            metrics=self._recorder.metrics,
        )
        self._saved_at = time.monotonic()
        # What the last delta is, and its checkpoint's tables: a ``Saved`` would keep the checkpoint.
        self._followed: tuple[ExportBase, Mapping[str, TableRecord]] | None = None

    def go(self, stop: StopRequest) -> Followed:
        """Learns from one file after the other."""
        if self.saver.saved < 0:
            self._save(None)  # the model as it begins: from here on a run that is killed goes on
        else:
            self._write_delta(self.run.steps)  # of a run that ended before it, or had no export
        learnt = counted(self._learnt, "file")
        self._report(f"follows {self._options.files} from step {self.run.steps:,} on, with {learnt} learnt before")
        while not stop:
            if self._learnt == len(self.files.taken) and not self.files.take(self.run.steps):
                if self._due(idle=True):
                    self._save(None)
                if self._options.once or not _waited(self._options.poll, stop):
                    break
                continue
            position = self._learn(stop)
            if position is not None or self._due():
                self._save(position)
        if self.saver.saved != self.run.steps:
            self._save(None)
        examples = self._recorder.examples
        return Followed(
            folder=self._folder, step=self.run.steps, files=self._learnt, examples=examples, stopped=bool(stop)
        )

    def _due(self, *, idle: bool = False) -> bool:
        """Whether a checkpoint is due after a file; ``idle`` where no further one is there."""
        if self.saver.saved == self.run.steps:
            return False
        return (idle and self._options.once) or time.monotonic() - self._saved_at >= self._options.every

    def _learn(self, stop: StopRequest) -> JsonObject | None:
        """Scores the next file and learns from it; returns the position in it where a signal came before its end."""
        number, begin = self._learnt, time.perf_counter()
        if (data := self.files.dataset(number, begun=self._position is not None)) is None:
            self._learnt += 1
            return None
        entry = self.files.taken[number]
        config = dataclasses.replace(self._config, data=dataclasses.replace(self._config.data, path=str(data)))
        schema = config.model.of_kind.schema(config.model, Schema.load(data))
        schema.check_labels()
        position, self._position = self._position, None
        # Not where the run goes on within the file: the model has learnt its begin, and would be scored too well.
        if position is None:
            self._metrics = self._scored(config, schema)
        with contextlib.closing(train_loader(config, schema, self._layout)) as loader:
            feed = self.run.feed(
                loader, workers=config.data.threads, prefetch=config.data.prefetch, position=position, steps=1
            )
            with feed:
                before = self._recorder.examples
                self._take_steps(feed, stop)
                if not feed.closed and _batches(feed.position()) != loader.total_batches:
                    return feed.position()
        self._learnt += 1
        examples, seconds = self._recorder.examples - before, time.perf_counter() - begin
        late = time.time() - entry["written"]
        # Only now: records of a step come before its checkpoint, so that a run that goes on from it has each once.
        self._recorder.write(self.run.steps)
        timing = {"examples_per_second": examples / seconds, "seconds": seconds, "late_seconds": late}
        for task, metrics in self._metrics.items():
            split = f"{PROGRESSIVE}/{task}" if task else PROGRESSIVE
            self._log.write(self.run.steps, {"file": entry["file"], **metrics}, split=split, timing=timing)
            timing = None
        first = self._metrics[""]
        shown = {name: first[key] for key, name in _SHOWN.items() if first.get(key) is not None}
        scores = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        scored = f"{scores} before they were learnt" if shown else "none of which has the first label"
        self._report(
            f"{entry['file']}: {counted(examples, 'example')}, {scored}; {examples / seconds:,.0f} examples/s,"
            f" {late:,.1f} s after it was written"
        )
        return None

    def _scored(self, config: TrainConfig, schema: Schema) -> dict[str, JsonObject]:
        """The metrics of a file by the model as it is, by task; those of the first task, or the only one, under "".

        Of a task of which no label of the file is known, there are none.
        """
        reading = Reading(run=self.run, config=config, schema=schema)
        with TrainingProgress("off", total=0, start=0) as progress:
            scores = score_split(reading, "train", progress=progress)
        if not (tasks := config.model.multi_task.tasks):
            return {"": evaluated(scores).to_dict()}
        by_task = {task: own.to_dict() for task, own in evaluated_by_task(scores).items()}
        return {"": by_task.pop(tasks[0], {}), **by_task}

    def _take_steps(self, feed: RunFeed, stop: StopRequest) -> None:
        self._recorder.start_clock()
        pending = None
        for fed in feed:
            _, outputs = self._step(fed)
            if pending is not None:  # read back once the next step is under way
                self._recorder.absorb(pending)
            pending = outputs
            if stop:
                break
        if pending is not None:
            self._recorder.absorb(pending)
        self.run.flush()
        self._recorder.stop_clock()

    def _save(self, position: JsonObject | None) -> None:
        """Writes a checkpoint and waits for it; then a delta of the same step."""
        step = self.run.steps
        scored, tasks = self._metrics.get("", {}), {task: own for task, own in self._metrics.items() if task}
        within = {} if position is None else {"scored": scored, "scored_tasks": tasks}
        meta = {"loader": position, "files": self._learnt, **within, **self._recorder.position()}
        self.saver.save(self.run, self._log, step, meta=meta, arrays=self._recorder.arrays(), best=None)
        self.saver.finish(self.run, self._log, step)
        # Only once the checkpoint is complete: until then a kill has these files learnt again.
        self.files.drop(self._learnt)
        self._saved_at = time.monotonic()
        self._write_delta(step)

    def _write_delta(self, step: int) -> None:
        if (export := self._options.export) is None:
            return
        deltas, checkpoint = self._options.deltas, self._folder / CHECKPOINT_FOLDER / str(step)
        if not (export / EXPORT_MANIFEST).is_file():
            manifest = export_run(checkpoint, export, run=self.run)
            self._report(f"{export}: export {manifest.id[:12]} of step {step:,}")
        elif deltas is not None and step > 0:
            deltas.mkdir(parents=True, exist_ok=True)
            chain, path = _chain(export, deltas), deltas / f"step-{step:012d}"
            own = [other for other in chain if _OWN_DELTA.fullmatch(other.name) and other.name >= path.name]
            if own:  # written before the run was killed and went on from an earlier checkpoint
                if own[-1] != path:
                    self._report(f"{own[-1]}: of a later step already, so that step {step:,} writes no delta")
                return
            base, before = self._followed or (None, None)
            # Others may write a whole export in the place of this one, take deltas away, or add some of edited rows.
            if base is None or base.folders != (export, *chain) or base.manifests[0].id != load_manifest(export).id:
                base, before = ExportBase.read([export, *chain]), None
            # In the place of one of this step, if any, that follows what the export was before.
            manifest = export_run(checkpoint, path, since=base, before=before, run=self.run, overwrite=True)
            self._followed = base.followed_by(path, manifest), Saved(checkpoint).manifest.tables
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            newest = max((entry["written"] for entry in self.files.taken[: self._learnt]), default=time.time())
            self._report(f"{path}: a delta of {human_bytes(size)}, {time.time() - newest:,.1f} s behind the files")

    def close(self) -> None:
        """Releases threads and files."""
        self.run.close(finish=False)
        self.files.close()
        self._log.close()


def _chain(export: pathlib.Path, deltas: pathlib.Path) -> list[pathlib.Path]:
    """The deltas in a folder that follow an export, each the one before, whatever they are called.

    Others are no part of it, as those of an export that was in its place before: `jrec serve` passes them over, too.

    Raises:
      ExportError: If two follow the same, or a manifest is damaged.
    """
    following: dict[str, tuple[pathlib.Path, str]] = {}
    for path in sorted(filter(is_finished, deltas.iterdir())):
        own, parent = _ids(path, (path / EXPORT_MANIFEST).stat().st_mtime_ns)
        twin, _ = following.setdefault(parent, (path, own))
        if twin != path and parent:
            raise ExportError(f"{twin} and {path} both follow {parent[:12]}; leave only one there")
    chain, last = [], read_manifest(export).id
    while last in following:
        path, last = following[last]
        chain.append(path)
    return chain


@functools.lru_cache(maxsize=1 << 16)
def _ids(folder: pathlib.Path, written: int) -> tuple[str, str]:
    """The ids of a delta and of what it follows: read once, since a folder has one more at every checkpoint."""
    del written  # another time is another file
    manifest = read_manifest(folder)
    return manifest.id, manifest.parent


def _state(path: pathlib.Path) -> JsonObject:
    """What differs when somebody writes a file again."""
    status = path.stat()
    return {"bytes": status.st_size, "written": status.st_mtime}


def _is_empty(path: pathlib.Path) -> bool:
    """Whether a file has no text, packed or not."""
    with contextlib.suppress(DatasetError):  # of a table, or of what ``prepare`` cannot read either
        return next(read_blocks(str(path), block_bytes=1), None) is None
    return False


def _batches(position: JsonObject) -> int:
    """The batches of a position: a loader's, or where tables grow the packer's of its columns."""
    return position["position"] if "position" in position else position["batches"]


_SHOWN = {"auc": "AUC", "log_loss": "log loss", "rmse": "RMSE"}


def _waited(seconds: float, stop: StopRequest) -> bool:
    """Waits; returns False as soon as a signal came."""
    end = time.monotonic() + seconds
    while not stop and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _WAIT))
    return not stop
