"""The report of a finished run: ``metrics.json``, and ``report.html`` for people.

REPORT/metrics.json      metrics, units, the teacher's ceiling, data, parameters, tables, throughput, configuration,
                         and under "bits" whether another run computes the same ones
REPORT/report.html       the same in one file that loads nothing (``jrec.app.report.run_page``)

"judgement" in metrics.json has what the report warns of and advises (``jrec.app.report.judgement``), "reliability" by
split the bins of its calibration. Each part of a run may give sections of its own to metrics.json:

``pipeline``: work and traffic of the host pipeline's stages during training (``Timeline.summary``)
``in_place``: seconds of a run whose rows in host memory were pooled and updated in place (``InPlaceFeed``)
``forms``: how rows were looked up on a mesh, and the bytes that each form moves (``LookupModes.record``)
``fae``: schedules and bytes of a run on hot and cold batches (``HotColdFeed``)
``plan``: balance and cost of the run's plan under its accesses (``PlanMonitor.summary``)
``caches``: hits of tensor-train tables' caches in training (``HitRates``)
``growing``: rows that tables which grow gave to values and took away (``GrowingTables.sections``)
``progressive``: of windows of time their metrics before the model learnt from them (``jrec.app.report.progressive``)
``evaluations``: how many took place during training, when, and their share of the time
``baselines``: metrics of logistic regression and of popularity, or of orders of items (``jrec.app.baselines``)
``groups``: AUC and log loss, or XAUC and RMSE, within the values of ``evaluate.group`` (``jrec.app.report.groups``)
``slices``: log loss and calibration within slices of the last split (``jrec.app.report.slices``)
``importance``: by how much the model scores worse without each feature (``jrec.app.importance``)
``numbers``: the loss, and how outputs become numbers, where labels are numbers (``jrec.app.report.numbers``)
``residuals``: by split, mean labels and the deviation of residuals in bins of equal count by prediction
``ranking``: how items were ranked, where the model ranks them (``jrec.app.report.ranking``)
``tasks``: of several labels by task "splits" and "reliability" as above, where those are the first task's
``kernels``: by kernel class, the choice on the GPU and the verdict behind it
"""

from __future__ import annotations

import json
import os
import pathlib
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jrec import environment, regression
from jrec.app import determinism
from jrec.app.config import TrainConfig
from jrec.app.report import progressive
from jrec.app.report.judgement import judge
from jrec.app.report.logs import read_records
from jrec.app.report.ranking import AnyScores, RankScores, evaluated
from jrec.app.report.run_page import run_page
from jrec.app.tables import describe_tables, tables_total
from jrec.data.schema import Schema
from jrec.json_values import JsonObject
from jrec.metrics import UNITS, Scores, reliability_bins, sigmoid
from jrec.outputs import check_local, write_file
from jrec.regression import NumberScores, residual_bins

if TYPE_CHECKING:
    from jrec.sharding import Plan

FORMAT = "jrec-report"
VERSION = 1
METRICS_FILE = "metrics.json"
PAGE_FILE = "report.html"

_UNITS = {
    **UNITS,
    **regression.UNITS,
    "parameters": "count",
    "bytes": "bytes",
    "rows": "count",
    "host_rows": "count, those that the run's plan keeps in host memory",
    "host_bytes": "bytes of these",
    "compression": "elements of the whole table by those that are stored",
    "steps": "count",
    "scored_step": "the step of the checkpoint that was scored, where it is not the last",
    "gauc": "AUC within the values of evaluate.group, weighted by examples; of values with both labels",
    "xgauc": "XAUC within the values of evaluate.group, weighted by examples; of values with unlike labels",
    "deviations": "standard deviations of the number of clicks, by which that of the predictions is off",
    "coverage": "share of a split's examples in groups with unlike labels",
    "share": "evaluations' seconds during training by these and training's",
    "seconds": "seconds of training, without evaluations and checkpoints",
    "examples_per_second": "examples per second of training",
    "busy_seconds": "seconds that a stage of the host tier's pipeline worked",
    "wait_seconds": "seconds that it waited for its neighbours",
    "read_seconds": "seconds that steps waited for the loader's next batch",
    "lookup_seconds": "seconds in which the host pooled rows",
    "step_seconds": "seconds in which the device took steps on pooled rows",
    "update_seconds": "seconds in which the host updated rows",
    "rows_made": "rows that host memory holds at the end; all others have their first values",
    "overlap_efficiency": "the busiest stage's busy seconds by those of training",
    "hit_rate": "share of unique host rows found on the device; of caches, of training lookups found in them",
    "bytes_to_device": "bytes of rows and slots, in the static sizes in which they travel",
    "bytes_to_host": "bytes of rows and slots, in the static sizes in which they travel",
    "megabytes": "millions of bytes of a table's rows and sums that a step moves between devices, without padding",
    "rates": "per cent of an epoch's batches, by schedule",
    "test_losses": "nats per example, or RMSE of labels that are numbers, after each schedule",
    "paper_synchronization": "bytes of all hot rows and slots, once at each switch between hot and cold batches",
}


def write_report(
    folder: str | os.PathLike[str],
    *,
    config: TrainConfig,
    schema: Schema,
    plan: Plan | None = None,
    scores: Mapping[str, AnyScores],
    parameters: Mapping[str, Mapping[str, int]],
    steps: int,
    seconds: float | None = None,
    examples: int | None = None,
    history: str | os.PathLike[str] | None = None,
    scored_step: int | None = None,
    stopped_early: bool = False,
    sections: Mapping[str, object] = types.MappingProxyType({}),
) -> JsonObject:
    """Computes the metrics of the final scores and writes the report, each file atomically, ``metrics.json`` last.

    Args:
      folder: The report folder; made if absent, files of an earlier report are replaced.
      config: The run's configuration.
      schema: The schema of the dataset that was read.
      plan: What ``config.plan`` names; None where it names none.
      scores: The scores of the final splits, by split.
      parameters: By group ("dense" and each stack), counts under "parameters" and "bytes".
      steps: The number of steps that the model was trained for.
      seconds, examples: Training time of this process and the examples it covers; None where nothing was trained.
      history: The ``metrics.jsonl`` of the run, for learning curves and advice.
      scored_step: The step whose checkpoint was scored, where it is not the last.
      stopped_early: Whether early stopping ended training.
      sections: Further sections by name, in JSON types; see the module.

    Returns:
      The content of ``metrics.json``.

    Raises:
      DatasetError: If a split has no scores.
      ValueError: If one of the sections has the name of a part of the report itself.
      DivergedError: If a logit is NaN or infinite.
    """
    check_local(folder)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "name": config.name,
        **_scored(scores),
        **({"tasks": by_task} if (by_task := _tasks(scores)) else {}),
        "ceiling": {split: dict(metrics) for split, metrics in schema.ceiling.items()},
        "units": _UNITS | config.model.of_kind.units(config),
        "data": _data(schema, config),
        "parameters": _with_total(parameters),
        "training": _training(steps, seconds, examples)
        | ({} if scored_step in (None, steps) else {"scored_step": scored_step})
        | ({"stopped_early": True} if stopped_early else {}),
        "device": environment.devices(),
        "bits": determinism.promise(str(environment.devices()["platform"])),
        "versions": environment.versions(),
        "config": config.to_dict(),
    }
    content |= config.model.of_kind.sections(config, scores)
    described = describe_tables(config, schema, plan)
    content = merged(content, {"tables": described, "tables_total": tables_total(described)}, sections)
    if (fae := content.get("fae")) is not None:
        content["data"]["examples"]["train"] = fae["hot_examples"] + fae["cold_examples"]
    records = [] if history is None else list(read_records(history))
    content |= progressive.section(records)
    content["judgement"] = judge(content, records)
    write_file(folder / PAGE_FILE, run_page(content, records))
    # Last, since its presence says that all is there: --resume takes a run with it for finished.
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_file(folder / METRICS_FILE, text)
    return content


def _scored(scores: Mapping[str, AnyScores]) -> JsonObject:
    """Metrics, and bins of calibration or, of numbers, of residuals, by split."""
    residuals = {split: residual_bins(one).to_dict() for split, one in scores.items() if isinstance(one, NumberScores)}
    return {
        "splits": {split: evaluated(one).to_dict() for split, one in scores.items()},
        "reliability": {
            split: reliability_bins(sigmoid(one.logits), one.labels, weights=one.weights).to_dict()
            for split, one in scores.items()
            if isinstance(one, Scores)
        },
        **({"residuals": residuals} if residuals else {}),
    }


def _tasks(scores: Mapping[str, AnyScores]) -> JsonObject:
    """By task what ``_scored`` has of the splits in which any of its labels is known."""
    by_split = {split: one.tasks for split, one in scores.items() if not isinstance(one, RankScores)}
    names = dict.fromkeys(task for tasks in by_split.values() for task in tasks)
    return {
        task: _scored({split: tasks[task] for split, tasks in by_split.items() if tasks[task].labels.size})
        for task in names
    }


def merged(*sections: Mapping[str, object]) -> JsonObject:
    """All sections in one mapping, in the order in which they are given.

    Raises:
      ValueError: If a section is given twice.
    """
    combined: JsonObject = {}
    for some in sections:
        if twice := sorted(combined.keys() & some.keys()):
            raise ValueError(f"the report's section {twice[0]!r} is given twice; each has one source")
        combined |= some
    return combined


def _data(schema: Schema, config: TrainConfig) -> JsonObject:
    return {
        "name": schema.title,
        "path": config.data.path,
        "examples": {name: split.examples for name, split in schema.splits.items()},
        "dense_features": len(schema.dense),
        "categorical_features": len(schema.categorical),
        "tables": len(schema.tables),
        "rows": sum(table.rows for table in schema.tables),
        "provenance": dict(schema.provenance),
    }


def _with_total(parameters: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    groups = {name: dict(group) for name, group in parameters.items()}
    total = {key: sum(group[key] for group in groups.values()) for key in ("parameters", "bytes")}
    return {**groups, "total": total}


def _training(steps: int, seconds: float | None, examples: int | None) -> JsonObject:
    if not seconds or not examples:
        return {"steps": steps}
    return {"steps": steps, "seconds": seconds, "examples": examples, "examples_per_second": examples / seconds}
