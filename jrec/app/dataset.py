"""The dataset of a run: an ordinary one, or one packed for FAE, of which evaluation reads the ordinary part."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jrec.app.config import MultiTaskSection, TrainConfig
from jrec.app.config.model import NumbersSection
from jrec.app.models.targets import Number, targets_of
from jrec.app.run_record import find_run
from jrec.data.fae import FaeManifest, is_fae_folder
from jrec.data.schema import DatasetError, LabelNumbers, Schema
from jrec.errors import ConfigError

if TYPE_CHECKING:
    from jrec.sharding import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
    """A run's dataset, and the plan of its rows.

    Attributes:
      config: The run's configuration; ``data.path`` is the ordinary dataset, which has the run's tables and evaluation
        splits.
      schema: The ordinary dataset's schema.
      packed: The manifest of hot and cold examples; None where ``schedule`` is "plain".
      plan: What the configuration's ``plan`` names, as it was read; None where it names none.
    """

    config: TrainConfig
    schema: Schema
    packed: FaeManifest | None = None
    plan: Plan | None = None


def open_data(config: TrainConfig) -> RunData:
    """Reads the description of a run's dataset, and its plan.

    Raises:
      ConfigError: If ``schedule`` and the kind of dataset do not go together, or ``fae.split`` is missing.
      DatasetError: If the dataset cannot be used.
      PlanError: If the plan cannot be read.
    """
    packed = is_fae_folder(config.data.path)
    if config.schedule == "plain":
        if packed:
            raise ConfigError(
                f"data.path is {config.data.path}, hot and cold examples apart (`jrec fae pack`), but schedule is"
                " 'plain'; set schedule=fae, or give the dataset that was packed"
            )
        kind = config.model.of_kind
        schema = kind.schema(config.model, Schema.load(config.data.path))
        if kind.needs_labels:
            schema.check_labels()
        config = with_tasks(with_capacities(config, schema), schema)
        return RunData(config=config, schema=schema, plan=plan_of(config))
    if not packed:
        raise ConfigError(
            f"schedule is 'fae', but data.path is {config.data.path}, which does not have hot and cold examples apart;"
            " make a folder that does with `jrec fae calibrate` and `jrec fae pack`"
        )
    manifest = FaeManifest.load(config.data.path)
    config = evaluation_config(config)
    schema = manifest.cold_schema
    config = with_tasks(config, schema)
    if config.fae.split not in schema.splits:
        raise ConfigError(
            f"fae.split is {config.fae.split!r}, whose loss decides about the order of hot and cold batches, but the"
            f" dataset has {', '.join(schema.splits) or 'no splits'}"
        )
    return RunData(config=config, schema=schema, packed=manifest, plan=plan_of(config))


def plan_of(config: TrainConfig) -> Plan | None:
    """Reads the plan that a configuration names; None where it names none."""
    if not config.plan:
        return None
    from jrec.sharding.plan_file import load_plan

    return load_plan(config.plan)


def evaluation_config(config: TrainConfig) -> TrainConfig:
    """The configuration with ``data.path`` at an ordinary dataset: in an FAE folder, the one with all tables."""
    if not is_fae_folder(config.data.path):
        return config
    folder = FaeManifest.load(config.data.path).cold_folder
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(folder)))


def with_tasks(config: TrainConfig, schema: Schema) -> TrainConfig:
    """The configuration with the tasks of a dataset with several labels, which it may leave open.

    Args:
      config: The run's configuration.
      schema: The dataset to train on.

    Raises:
      ConfigError: If it says something of tasks that the dataset has not, or asks for what is of one label.
    """
    _check_lines(config, schema)
    model, stopping = config.model, config.evaluate.early_stopping
    heads, path = model.multi_task, config.data.path
    if not schema.tasks:
        one_label = {"model.multi_task": heads != MultiTaskSection(), "evaluate.early_stopping.task": stopping.task}
        for key in (key for key, is_set in one_label.items() if is_set):
            raise ConfigError(f"{key} is set, but {path} has one label; leave it out, or prepare [[labels]]")
        return _with_targets(config, schema)
    if heads.tasks not in ((), schema.tasks):
        raise ConfigError(
            f"model.multi_task.tasks is {list(heads.tasks)}, but the labels of {path} are {list(schema.tasks)}; leave"
            " it out"
        )
    if stopping.task and stopping.task not in schema.tasks:
        raise ConfigError(
            f"evaluate.early_stopping.task is {stopping.task!r}, but the labels of {path} are {', '.join(schema.tasks)}"
        )
    for key, own, is_set in (
        ("loss", "losses", model.loss not in ("auto", "log_loss")),
        ("numbers", "numbers", model.numbers != NumbersSection()),
    ):
        if is_set:
            raise ConfigError(
                f"model.{key} is set, but {path} has several labels; set model.multi_task.{own}.{schema.tasks[0]}, or"
                " another label's"
            )
    heads = dataclasses.replace(heads, tasks=schema.tasks)
    return _with_targets(dataclasses.replace(config, model=dataclasses.replace(model, multi_task=heads)), schema)


def check_tasks(config: TrainConfig, schema: Schema) -> None:
    """Refuses to score a dataset with other labels than the run has; one without labels may be predicted.

    Raises:
      DatasetError: Names the labels of both.
    """
    _check_lines(config, schema)
    own = config.model.multi_task.tasks
    if schema.labels and own != schema.tasks:
        has, trained = ([*tasks] if tasks else "one label" for tasks in (schema.tasks, own))
        raise DatasetError(
            f"{schema.folder or schema.name} has {has} where the run was trained with {trained}; prepare it by the"
            " schema file of the training data, or with --no-labels to predict it"
        )
    numeric, trained = schema.numbers_by_label.keys(), config.model.numbers_by_label.keys()
    if schema.labels and (differ := sorted(numeric ^ trained)):
        has, had = ("a number", "a click") if differ[0] in numeric else ("a click", "a number")
        label = f"label {differ[0]!r}" if differ[0] else "the label"
        raise DatasetError(
            f"{label} of {schema.folder or schema.name} is {has} where the run was trained with {had}; prepare it by"
            " the schema file of the training data, or with --no-labels to predict it"
        )


def with_capacities(config: TrainConfig, schema: Schema) -> TrainConfig:
    """The configuration with the capacity of every growing table that it leaves open.

    They are settled once for a run: other datasets that it meets later do not change them. The run that this one
    begins from (``init_from``) decides, or else training has values for all rows but one.

    Args:
      config: The run's configuration.
      schema: The dataset to train on.
    """
    if not schema.growing:
        return config
    rows = {table.name: table.rows_for_all for table in schema.tables if table.growing}
    if config.init_from:
        rows |= find_run(config.init_from)[0].config().tables.capacities
    return dataclasses.replace(config, tables=config.tables.with_capacities(rows))


def _with_targets(config: TrainConfig, schema: Schema) -> TrainConfig:
    """The configuration with the losses, scales and the metric of labels that are numbers, which it may leave open.

    Raises:
      ConfigError: If it says something that does not go with the labels.
    """
    model = config.model
    if not model.of_kind.scores_lines:
        return config
    numbers, heads = schema.numbers_by_label, model.multi_task
    if schema.tasks:
        losses = {task: heads.losses.get(task, "squared") for task in numbers}
        heads = dataclasses.replace(
            heads,
            losses={**heads.losses, **losses},
            numbers=dict(heads.numbers)
            | {
                task: _settled(heads.numbers.get(task, NumbersSection()), losses[task], one, task)
                for task, one in numbers.items()
            },
        )
        model = dataclasses.replace(model, multi_task=heads)
    elif numbers:
        loss = "squared" if model.loss == "auto" else model.loss
        own = _settled(model.numbers, loss, numbers[""])
        model = dataclasses.replace(model, loss=loss, numbers=own)
    config = dataclasses.replace(config, model=model)
    targets, stopping, path = targets_of(model), config.evaluate.early_stopping, config.data.path
    for task, target in targets.items():
        target.check_label(f"{path} ({task})" if task else path, numbers.get(task))
    first, *_ = targets
    numeric = [isinstance(target, Number) for target in targets.values()]
    of_clicks = {"model.calibrate": model.calibrate} if numeric[0] else {}
    of_clicks |= {"model.label_smoothing": model.label_smoothing} if all(numeric) else {}
    for key, value in of_clicks.items():
        if value:
            raise ConfigError(
                f"{key} is {value!r}, which is of clicks, but the label of {path} is a number; leave it out"
            )
    if odd := sorted(heads.numbers.keys() - numbers.keys()):
        raise ConfigError(
            f"model.multi_task.numbers.{odd[0]} is set, but that label of {path} is 0 and 1; leave it out"
        )
    metrics = targets[stopping.task or first].metrics
    if stopping.metric not in metrics:
        # The section's default is a metric of clicks; another one is the user's choice.
        if stopping.metric != type(stopping).metric:
            raise ConfigError(
                f"evaluate.early_stopping.metric is {stopping.metric!r}, which the label"
                f" {f'{stopping.task or first!r} ' if schema.tasks else ''}of {path} does not have; choose one of"
                f" {', '.join(metrics)}"
            )
        stopping = dataclasses.replace(stopping, metric=metrics[0])
        config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, early_stopping=stopping))
    return config


def _settled(section: NumbersSection, loss: str, numbers: LabelNumbers, task: str = "") -> NumbersSection:
    """How outputs become numbers: as the section says, or by what the labels are like where that says "auto".

    Raises:
      ConfigError: If it has a location for counts.
    """
    counts = loss == "poisson"
    location, scale = (0.0, numbers.mean) if counts else (numbers.mean, numbers.deviation)
    section = dataclasses.replace(
        section,
        location=location if section.location is None else section.location,
        scale=(scale if scale > 0 else 1.0) if section.scale is None else section.scale,
    )
    if counts and section.location:
        where, key = "model.numbers", "model.loss"
        if task:
            where, key = f"model.multi_task.numbers.{task}", f"model.multi_task.losses.{task}"
        raise ConfigError(f"{where}.location is {section.location:g}, but {key} 'poisson' has none; leave it out")
    return section


def _check_lines(config: TrainConfig, schema: Schema) -> None:
    """Refuses weights, and labels that are numbers, where the kind of model does not score lines by them."""
    kind = config.model.kind
    if config.model.of_kind.scores_lines:
        return
    if schema.weighted:
        raise ConfigError(
            f"{config.data.path} has weights of examples, which model.kind {kind!r} does not take; leave [weight] out"
            " of the schema of the log, and prepare it again"
        )
    if config.data.half_life:
        raise ConfigError(
            f"data.half_life is {config.data.half_life!r}, but model.kind {kind!r} takes no weights of examples; leave"
            " it out"
        )
    if schema.numbers is not None:
        raise ConfigError(
            f"the label of {config.data.path} is a number, which model.kind {kind!r} does not take; say in [label] from"
            " where on it is a click (positive_at_least), or prepare it with --no-labels"
        )
