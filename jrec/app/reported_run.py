"""A whole run: last checks, kernels, training, and the report of it."""

from __future__ import annotations

import pathlib
from typing import Any

from jrec.app.build import build_layout, check_model
from jrec.app.commands.kernel_check import prepare_kernels
from jrec.app.comparisons import comparison_sections
from jrec.app.config import TrainConfig
from jrec.app.dataset import with_tasks
from jrec.app.loop import Outcome, train
from jrec.app.make_run import check_pipeline
from jrec.app.preflight import Start, check_space
from jrec.app.report import write_report
from jrec.app.report.logs import METRICS_FILE
from jrec.app.report.trackers import Trackers
from jrec.app.report.writing import PAGE_FILE, merged
from jrec.app.run_folder import REPORT_FOLDER
from jrec.ops.verdicts import choices


def train_and_report(
    config: TrainConfig,
    start: Start,
    *,
    resume: bool = False,
    overwrite: bool = False,
    resume_from: int | None = None,
    writes: bool = True,
) -> tuple[Outcome, dict[str, Any] | None, pathlib.Path]:
    """Trains as ``config`` says, evaluates the result, and writes its report.

    Args:
      config: The run's configuration.
      start: What ``check_start`` gave for it.
      resume, overwrite, resume_from: As of ``jrec.app.loop.train``, which also says what is raised.
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
    check_model(data.config, data.schema, layout)
    prepare_kernels(config, layout, resume=resume, overwrite=overwrite)
    outcome = train(config, resume=resume, overwrite=overwrite, resume_from=resume_from, data=data)
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
