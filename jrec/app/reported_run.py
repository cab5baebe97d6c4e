"""A whole run: last checks, kernels, training, and the report of it."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence

from jrec.app.build import build_layout, check_model
from jrec.app.callbacks import Callback
from jrec.app.commands.kernel_check import prepare_kernels
from jrec.app.comparisons import comparison_sections
from jrec.app.config import TrainConfig
from jrec.app.dataset import with_tasks
from jrec.app.evaluate import restore_run
from jrec.app.importance import ImportanceOptions
from jrec.app.loop import Outcome, train
from jrec.app.make_run import check_pipeline
from jrec.app.preflight import Start, check_space, host_memory_warning
from jrec.app.processes.mesh_processes import one_of_many
from jrec.app.report import write_report
from jrec.app.report.logs import METRICS_FILE
from jrec.app.report.trackers import Trackers
from jrec.app.report.writing import PAGE_FILE, merged
from jrec.app.run_folder import REPORT_FOLDER
from jrec.app.run_record import CHECKPOINT_FOLDER
from jrec.json_values import JsonObject
from jrec.ops.verdicts import choices

_LOGGER = logging.getLogger(__name__)


def train_and_report(
    config: TrainConfig,
    start: Start,
    *,
    resume: bool = False,
    overwrite: bool = False,
    resume_from: int | None = None,
    writes: bool = True,
    callbacks: Sequence[Callback] = (),
) -> tuple[Outcome, JsonObject | None, pathlib.Path]:
    """Trains as ``config`` says, evaluates the result, and writes its report.

    Args:
      config: The run's configuration.
      start: What ``check_start`` gave for it.
      resume, overwrite, resume_from, callbacks: As of ``jrec.app.loop.train``, which also says what is raised.
      writes: Whether this process writes to the run's folder.

    Returns:
      The outcome, the content of the report's ``metrics.json`` where this process wrote a report, else None, and where
      its page is.
    """
    data = start.data
    config = with_tasks(config, data.schema)  # the report says what the dataset settles
    layout = build_layout(data.config, data.schema, data.plan)
    check_pipeline(config)  # before kernels are checked, which may take minutes
    if writes:
        check_space(config, layout, data.plan, overwrite=overwrite)
        if warning := host_memory_warning(config, layout, data.plan):
            _LOGGER.warning("%s", warning)
    check_model(data.config, data.schema, layout)
    prepare_kernels(config, layout, resume=resume, overwrite=overwrite)
    outcome = train(config, resume=resume, overwrite=overwrite, resume_from=resume_from, data=data, callbacks=callbacks)
    importance = _importance(config, outcome)
    report, kernels = outcome.folder / REPORT_FOLDER, choices()
    if not (outcome.finished and outcome.reports):
        return outcome, None, report / PAGE_FILE
    content = write_report(
        report,
        config=config,
        schema=outcome.schema,
        plan=data.plan,
        scores=outcome.scores,
        parameters=outcome.parameters,
        steps=outcome.step,
        seconds=outcome.seconds or None,
        examples=outcome.examples or None,
        history=outcome.folder / METRICS_FILE,
        scored_step=outcome.scored_step,
        stopped_early=outcome.stopped_early,
        sections=merged(
            outcome.sections,
            {"kernels": kernels} if kernels else {},
            comparison_sections(config, outcome.schema, outcome.scores),
            {} if importance is None else {"importance": importance},
        ),
    )
    trackers = Trackers(config.log.to, outcome.folder, title=config.name)
    for split, metrics in content["splits"].items():
        trackers.write(outcome.step, split, metrics)
    for task, scored in list(content.get("tasks", {}).items())[1:]:  # the first one's are those above
        for split, metrics in scored["splits"].items():
            trackers.write(outcome.step, f"{split}/{task}", metrics)
    trackers.close()
    return outcome, content, report / PAGE_FILE


def _importance(config: TrainConfig, outcome: Outcome) -> JsonObject | None:
    """How important features are to the model that was scored, where ``evaluate.importance`` asks; in every process."""
    if not (outcome.finished and outcome.scores and config.evaluate.importance):
        return None
    checkpoint = outcome.folder / CHECKPOINT_FOLDER / str(outcome.scored_step)
    with one_of_many():
        run = restore_run(checkpoint, devices=max(1, config.mesh.devices), plan=config.plan)
        return run.importance(list(outcome.scores)[-1], ImportanceOptions(repeats=config.evaluate.importance))
