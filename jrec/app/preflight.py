"""Checks of a run before JAX is loaded, rows are made or programs are compiled, so that mistakes end it in seconds.

``check_start`` reads the configuration, the run's folder and the dataset's description, and imports no JAX;
``check_space`` also needs the layout of the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jrec.app.config import TrainConfig
from jrec.app.dataset import RunData, open_data, with_tasks
from jrec.app.progressive import windows_of
from jrec.app.report.trackers import check_trackers
from jrec.app.run_folder import REPORT_FOLDER, RUN_FOLDERS, check_run_folder
from jrec.app.run_length import new_length, steps_of
from jrec.app.run_record import TrainedRun, check_initial
from jrec.data.moments import Moments
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.json_values import JsonMapping
from jrec.row_optimizers import SlotShape, slot_bytes

if TYPE_CHECKING:
    from jrec.ops.layout import EmbeddingLayout, Stack
    from jrec.sharding import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A run that may start.

    Attributes:
      data: The dataset.
      steps: Steps of the whole run.
      finished: The steps that the run took, where it is over and its report has every split in the configuration;
        fewer than ``steps`` where ``evaluate.early_stopping`` ended it. None where there is more to do.
    """

    data: RunData
    steps: int
    finished: int | None


def check_start(
    config: TrainConfig, *, resume: bool, overwrite: bool, resume_from: int | None = None, writes: bool = True
) -> Start:
    """Refuses a run that could not begin, or could not end.

    Args:
      config: The run's configuration.
      resume: Whether to resume a run in its folder.
      overwrite: Whether to replace a run in its folder.
      resume_from: The step of the checkpoint to resume from; None for the latest.
      writes: Whether this process writes to the folder, as the first of several does.

    Raises:
      ConfigError: If a tracker's package is absent, the folder holds another run or cannot be written to, the learning
        rates' decay would begin after the last step, no split to evaluate in training has examples, training is no two
        windows of ``evaluate.progressive``, or a run to resume would end before its checkpoint.
      DatasetError: If the dataset cannot be used, or has no examples to train on.
      CheckpointError: If a run to resume does not record its dataset.
    """
    folder = pathlib.Path(config.out)
    check_trackers(config.log.to)
    data = open_data(config)
    record = TrainedRun(folder)
    goes_on = resume and record.began
    if goes_on:
        record.check_resumed(data.schema.identity)
    # What the dataset settles is in the configuration of the run that is there.
    check_run_folder(with_tasks(config, data.schema), resume=resume, overwrite=overwrite)
    if writes:
        _check_writable(folder)
    if goes_on:
        new_length(data, resume_from=resume_from)
    else:
        check_initial(config, data.schema.identity)
        if any(table.initial_rows for table in config.tables.overrides.values()):
            from jrec.app.initial_rows import check_initial_rows  # loads JAX, for the vocabulary's kernels

            check_initial_rows(config, data.schema)
    _check_evaluated(data.config, data.schema)
    steps = steps_of(data)
    windows_of(data.config, data.schema, steps)
    if data.config.data.half_life:
        Moments.load(config.data.path, data.schema, "train")
    config.lr_schedule.check_length(steps)
    for table, own in config.optimizer.embedding.tables.items():
        if own.lr_schedule is not None:
            own.lr_schedule.check_length(steps, key=f"optimizer.embedding.tables.{table}.lr_schedule")
    return Start(data=data, steps=steps, finished=_finished(data, folder, steps) if goes_on else None)


def check_space(config: TrainConfig, layout: EmbeddingLayout, plan: Plan | None, *, overwrite: bool) -> None:
    """Refuses a new run whose first checkpoint, or whose tables in a folder, the disk cannot hold.

    The checkpoint's size does not include rows of host memory: only rows that were written go there, and their number
    is not known.

    Args:
      config: The run's configuration.
      layout: The run's tables.
      plan: The run's plan, if any.
      overwrite: Whether to replace a run in the folder, which frees its space.

    Raises:
      ConfigError: If the disk is too small; names the folder, and the needed and the free space.
    """
    run = pathlib.Path(config.out)
    if TrainedRun(run).began and not overwrite:
        return  # a resumed run writes what it wrote before, in place of its oldest checkpoint
    freed = sum(_size(run / name) for name in RUN_FOLDERS) if overwrite else 0
    on_host = _planned_host_rows(plan, layout)
    slots = config.optimizer.embedding.slots
    needs = [
        (
            run,
            _bytes((*layout.device_stacks, *layout.planned_stacks), slots, on_host),
            freed,
            "the first checkpoint",
            "out",
        )
    ]
    if config.tables.host.folder:
        host = pathlib.Path(config.tables.host.folder)
        needs.append((host, _bytes(layout.host_stacks, slots, {}), 0, "tables in host memory", "tables.host.folder"))
    before: dict[int, int] = {}
    for folder, size, more, name, key in needs:
        place = _existing(folder)
        status, disk = os.statvfs(place), place.stat().st_dev
        free = status.f_bavail * status.f_frsize + more - before.get(disk, 0)
        if size > free:
            taken = f" besides the {_readable(before[disk])} of the other part" if disk in before else ""
            raise ConfigError(
                f"{name} of {config.name!r} takes {_readable(size)} (rows and slots) in {folder}, where"
                f" {_readable(max(free, 0))} are free{taken}; free some, or choose another folder with {key}="
            )
        before[disk] = before.get(disk, 0) + size


def host_memory_warning(config: TrainConfig, layout: EmbeddingLayout, plan: Plan | None) -> str | None:
    """What is to be said of rows in host memory that do not fit this machine's; None where nothing is.

    Args:
      config: The run's configuration.
      layout: The run's tables.
      plan: The run's plan, if any.
    """
    from jrec.host.memory import physical_memory

    host, slots, planned = config.tables.host, config.optimizer.embedding.slots, layout.planned_stacks
    size = _bytes(layout.host_stacks, slots, {}) + _bytes(planned, slots, {})
    size -= _bytes(planned, slots, _planned_host_rows(plan, layout))
    memory, limit = physical_memory(), host.memory_bytes("tables.host.memory", "tables.host.folder")
    if limit > memory:
        return (
            f"tables.host.memory is {host.memory!r}, but this machine has {_readable(memory)}: the system drops rows"
            " before the limit does; set it to what the run's other memory leaves"
        )
    if limit or size <= memory:
        return None
    folder = "" if host.folder else "tables.host.folder to a folder on a fast disk, and "
    return (
        f"rows in host memory take {_readable(size)} with their slots once all are written, and this machine has"
        f" {_readable(memory)}; set {folder}tables.host.memory to what they may take of it, so that they are read ahead"
        " of their use"
    )


def _check_writable(folder: pathlib.Path) -> None:
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(
            f"out: {folder} cannot be written to ({place}: {error.strerror or error}); choose another folder with out="
        ) from error


def _existing(folder: pathlib.Path) -> pathlib.Path:
    """The folder, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _check_evaluated(config: TrainConfig, schema: Schema) -> None:
    """Refuses evaluations in training of splits none of which has examples; such splits are left out elsewhere."""
    wanted: list[tuple[str, Sequence[str]]] = []
    if config.evaluate.every_steps:
        wanted.append(("evaluate.splits", config.evaluate.splits))
    if config.schedule == "fae":
        wanted.append(("fae.split", [config.fae.split]))
    for key, splits in wanted:
        if not schema.with_examples(splits):
            raise ConfigError(
                f"{key} names {' and '.join(map(repr, splits))}, of which {config.data.path} has no examples; name"
                " another split, or prepare more rows or other split fractions"
            )
    _check_compared(config, schema)


def _check_compared(config: TrainConfig, schema: Schema) -> None:
    """Refuses a best step by a split that is not there, groups by an unfit feature, and baselines of hot batches."""
    wanted = config.evaluate
    keys = {
        "evaluate.early_stopping.patience": wanted.early_stopping.patience,
        "checkpoint.keep_best": config.checkpoint.keep_best,
    }
    for key, value in keys.items():
        first = wanted.splits[0] if wanted.splits else ""
        if value and not schema.with_examples([first]):
            raise ConfigError(
                f"{key} is {str(value).lower()}, but {config.data.path} has no examples in split {first!r}, the first"
                " of evaluate.splits, by which steps are compared; name another, or prepare other split fractions"
            )
    check_group(wanted.group, schema, key="evaluate.group")
    if config.schedule == "fae" and wanted.baselines == "on":
        raise ConfigError(
            "evaluate.baselines is 'on', but with schedule 'fae' the training split lies in hot and cold parts, to"
            " which no baseline is fitted; train on the dataset that was packed, or set evaluate.baselines=auto"
        )


def check_group(group: str, schema: Schema, *, key: str) -> None:
    """Refuses groups by what is no categorical feature with one id an example; "" groups nothing.

    Raises:
      ConfigError: Names ``key``, its value and the features that fit.
    """
    fitting = [feature.name for feature in schema.categorical if feature.one_hot]
    if group and group not in fitting:
        near = difflib.get_close_matches(group, fitting, n=1)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{key} is {group!r}, but the dataset's categorical features with one id an example are"
            f" {', '.join(fitting) or 'none'}{advice}"
        )


def _finished(data: RunData, folder: pathlib.Path, steps: int) -> int | None:
    """The steps of a run that is over and whose report has every split in the configuration."""
    report: object = None
    with contextlib.suppress(OSError, ValueError):
        report = json.loads((folder / REPORT_FOLDER / "metrics.json").read_bytes())
    if not isinstance(report, dict):
        return None
    training, scored = report.get("training"), report.get("splits")
    if not isinstance(training, dict) or not isinstance(scored, dict):
        return None
    wanted = set(data.schema.with_examples(data.config.evaluate.final_splits))
    over = training.get("steps") == steps or _ended_early(report, data.config)
    return training.get("steps") if over and wanted <= scored.keys() else None


def _ended_early(report: JsonMapping, config: TrainConfig) -> bool:
    """Whether the run ended before its last step by the rule that it has now."""
    rule: object = report.get("config", {})
    for key in ("evaluate", "early_stopping"):
        rule = rule.get(key, {}) if isinstance(rule, dict) else {}
    same = rule == config.evaluate.early_stopping.to_dict()
    return same and report["training"].get("stopped_early") is True


def _planned_host_rows(plan: Plan | None, layout: EmbeddingLayout) -> dict[str, int]:
    """By table, rows that the run's plan keeps in host memory."""
    if plan is None:
        return {}
    from jrec.sharding.pieces import HOST

    host_rows = {}
    for stack in layout.members:
        for table in stack.tables:
            number = plan.number(table.name)
            ranges = slice(plan.first[number], plan.first[number + 1])
            host_rows[table.name] = int((plan.stop - plan.start)[ranges][plan.tier[ranges] == HOST].sum())
    return host_rows


def _bytes(stacks: Iterable[Stack], slots: Callable[[str], Mapping[str, SlotShape]], less: Mapping[str, int]) -> int:
    """Bytes of rows and slots (by table) of some stacks, less some rows of each table."""

    def of(stack: Stack) -> int:
        import jax.numpy as jnp

        row = stack.dim * jnp.dtype(stack.dtype).itemsize
        sizes = ((t.name, max(0, t.rows - less.get(t.name, 0))) for t in stack.tables)
        return sum((row + slot_bytes(slots(name), stack.dim)) * rows for name, rows in sizes)

    return sum(map(of, stacks))


def _size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _readable(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"
