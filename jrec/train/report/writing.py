"""The report of a finished run: ``metrics.json`` and plots.

REPORT/metrics.json      metrics, units, the teacher's ceiling, data, parameters, tables, throughput, configuration,
                         and under "bits" whether another run computes the same ones
REPORT/loss.png          where the run logged its loss
REPORT/schedule.png      of a run on hot and cold batches: rate and loss by schedule
REPORT/roc.png, calibration.png
REPORT/groups.png        with evaluate.group: how AUC within a group is spread
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jrec import environment
from jrec.data.schema import Schema
from jrec.outputs import write_file
from jrec.train import determinism
from jrec.train.config import TrainConfig
from jrec.train.report.comparison import baseline_lines, metric_by_split, step_lines, verdict
from jrec.train.report.fae_plots import plot_schedule
from jrec.train.report.groups import group_lines
from jrec.train.report.growing import growing_lines
from jrec.train.report.logs import SCHEDULE, read_records
from jrec.train.report.metrics import UNITS, Scores, evaluate
from jrec.train.report.plots import plot_calibration, plot_groups, plot_loss, plot_roc
from jrec.train.report.sections import merged
from jrec.train.tables import describe_tables, tables_total

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jrec.sharding import Plan

FORMAT = "jrec-report"
VERSION = 1
METRICS_FILE = "metrics.json"
DPI = 150

_UNITS = {
    **UNITS,
    "parameters": "count",
    "bytes": "bytes",
    "rows": "count",
    "host_rows": "count, those that the run's plan keeps in host memory",
    "host_bytes": "bytes of these",
    "compression": "elements of the whole table by those that are stored",
    "steps": "count",
    "scored_step": "the step of the checkpoint that was scored, where it is not the last",
    "gauc": "AUC within the values of evaluate.group, weighted by examples; of values with both labels",
    "coverage": "share of a split's examples in groups with both labels",
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
    "test_losses": "nats per example, after each schedule",
    "paper_synchronization": "bytes of all hot rows and slots, once at each switch between hot and cold batches",
}


def write_report(
    folder: str | os.PathLike[str],
    *,
    config: TrainConfig,
    schema: Schema,
    plan: Plan | None = None,
    scores: Mapping[str, Scores],
    parameters: Mapping[str, Mapping[str, Any]],
    steps: int,
    seconds: float | None = None,
    examples: int | None = None,
    history: str | os.PathLike[str] | None = None,
    scored_step: int | None = None,
    stopped_early: bool = False,
    sections: Mapping[str, Any] = types.MappingProxyType({}),
) -> dict[str, Any]:
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
      history: The ``metrics.jsonl`` of the run, for the loss plot.
      scored_step: The step whose checkpoint was scored, where it is not the last.
      stopped_early: Whether early stopping ended training.
      sections: Further sections by name, in JSON types; see ``jrec.train.report.sections``.

    Returns:
      The content of ``metrics.json``.

    Raises:
      DatasetError: If a split has no scores.
      ValueError: If one of the sections has the name of a part of the report itself.
      DivergedError: If a logit is NaN or infinite.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "name": config.name,
        "splits": {split: evaluate(one).to_dict() for split, one in scores.items()},
        "ceiling": {split: dict(metrics) for split, metrics in schema.ceiling.items()},
        "units": _UNITS,
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
    described = describe_tables(config, schema, plan)
    content = merged(content, {"tables": described, "tables_total": tables_total(described)}, sections)
    if (fae := content.get("fae")) is not None:
        content["data"]["examples"]["train"] = fae["hot_examples"] + fae["cold_examples"]
    records = [] if history is None else list(read_records(history))
    if (baselines := content.get("baselines")) is not None:
        content["baselines"] = {**baselines, "verdict": verdict(content, records)}
    title = f"{config.name} on {schema.name}"
    if (groups := content.get("groups")) is not None and any(one["groups"] for one in groups["splits"].values()):
        _save(plot_groups(groups, title=title), folder / "groups.png")
    if scores:
        roc = plot_roc(scores, title=title, ceiling=schema.ceiling, baselines=metric_by_split(content, "auc"))
        _save(roc, folder / "roc.png")
        _save(plot_calibration(scores, title=title), folder / "calibration.png")
    if records:
        ceiling = {s: m for s, m in schema.ceiling.items() if any(r["split"] == s for r in records)}
        own = {s: m for s, m in metric_by_split(content, "log_loss").items() if any(r["split"] == s for r in records)}
        batch_size = config.data.batch_size
        figure = plot_loss(records, title=title, ceiling=ceiling, batch_size=batch_size, baselines=own)
        _save(figure, folder / "loss.png")
        if fae is not None and (schedules := [r for r in records if r["split"] == SCHEDULE]):
            _save(plot_schedule(schedules, title=title, split=fae["test_split"]), folder / "schedule.png")
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_file(folder / METRICS_FILE, text)
    return content


def summary(content: Mapping[str, Any]) -> str:
    """A few lines for the terminal: the metrics of every split beside the teacher's ceiling, and compressed tables.

    Args:
      content: The content of ``metrics.json``.
    """
    lines = [f"{'split':<8}{'AUC':>9}{'ceiling':>9}{'log loss':>10}{'NE':>9}{'accuracy':>10}{'calibration':>13}"]
    for split, metrics in content["splits"].items():
        ceiling = content["ceiling"].get(split, {}).get("auc")
        cells = [
            f"{split:<8}{_cell(metrics['auc'], 9)}{_cell(ceiling, 9)}{_cell(metrics['log_loss'], 10)}",
            f"{_cell(metrics['normalized_entropy'], 9)}{_cell(metrics['accuracy'], 10)}",
            f"{_cell(metrics['calibration'], 13)}",
        ]
        lines.append("".join(cells))
        lines += [f"  {name} is undefined: {reason}" for name, reason in metrics.get("undefined", {}).items()]
    lines += [*step_lines(content), *baseline_lines(content), *group_lines(content)]
    for name, group in content["parameters"].items():
        if "host_rows" in group:
            rows, size = group["host_rows"], group["host_bytes"]
            lines.append(f"stack {name}: {rows:,} of {group['rows']:,} rows in host memory, {size:,} bytes")
    if content["device"]["platform"] != "cpu":
        lines.append(f"bits: {content['bits']}")
    lines += _table_lines(content["tables"], content["tables_total"])
    lines += growing_lines(content.get("growing", {}))
    lines += _form_lines(content.get("forms", {}))
    lines += [_cache_line(table, cache, content["tables"][table]) for table, cache in content.get("caches", {}).items()]
    lines += _kernel_lines(content.get("kernels", {}))
    return "\n".join([*lines, *(_fae_lines(content["fae"]) if "fae" in content else [])])


def _kernel_lines(kernels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which kernel classes ran as GPU kernels, which as XLA, and why."""
    lines = []
    for choice, name in (("pallas", "jrec's"), ("xla", "XLA's")):
        reasons = {
            kernel: entry["why"] if entry["ratio"] is None else f"{entry['ratio']:.2f} of XLA's time"
            for kernel, entry in kernels.items()
            if entry["chosen"] == choice
        }
        if reasons:
            lines.append(
                f"GPU kernels, {name}: {', '.join(f'{kernel} ({reason})' for kernel, reason in reasons.items())}"
            )
    return lines


def _form_lines(forms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How each table's rows came from other devices."""
    lines = []
    for name, table in forms.items():
        ways = (
            f"{', '.join(table[way])} {verb}"
            for way, verb in (("send", "sent"), ("retrieve", "retrieved"))
            if table[way]
        )
        lines.append(
            f"table {name}: {'; '.join(ways)}: {table['megabytes']:.4g} MB a step"
            f" (retrieving {table['retrieve_megabytes']:.4g}, sending {table['send_megabytes']:.4g})"
        )
    return lines


def _fae_lines(fae: Mapping[str, Any]) -> list[str]:
    """The savings by hot rows, and the course of the schedule."""
    sizes, rates = fae["bytes"], [*fae["rates"], fae["rate"]]
    return [
        f"fae: {100 * fae['hot_share']:.1f} % of the examples are hot, on {sum(fae['hot_rows'].values()):,} rows of"
        f" {fae['hot_row_bytes']:,} bytes with slots; {fae['switches']:,} switches, rates"
        f" {min(rates):g} to {max(rates):g}",
        f"fae: {sizes['moved']:,} bytes of rows and slots moved between host and device; the paper's synchronization of"
        f" hot rows at every switch would have moved {sizes['paper_synchronization']:,}",
    ]


def _table_lines(tables: Mapping[str, Mapping[str, Any]], total: Mapping[str, Any]) -> list[str]:
    """The compressed tables, and where a rule departed from the configuration; none for plain tables."""
    lines = []
    for name, table in tables.items():
        if table["tier"] == "tt":
            factors, ranks = (" x ".join(map(str, table[key])) for key in ("row_factors", "ranks"))
            whole = f", the first {table['whole_rows']:,} whole, the others" if "whole_rows" in table else ""
            lines.append(
                f"table {name}: {table['rows']:,} rows{whole} as a tensor train of {factors}, rank {ranks}:"
                f" {table['parameters']:,} parameters, {table['compression']:,.1f} times fewer"
            )
        if "note" in table:
            lines.append(f"table {name}: {table['note']}")
    if lines:
        lines.append(
            f"tables: {total['bytes']:,} bytes instead of {total['uncompressed_bytes']:,},"
            f" {total['compression']:,.1f} times fewer parameters"
        )
    return lines


def _cache_line(name: str, hits: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    rate = "-" if hits["hit_rate"] is None else f"{100 * hits['hit_rate']:.1f} %"
    return f"table {name}: {rate} of {hits['lookups']:,} lookups hit the cache of {table['cache_rows']:,} rows"


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.4f}"


def _data(schema: Schema, config: TrainConfig) -> dict[str, Any]:
    return {
        "name": schema.name,
        "path": config.data.path,
        "examples": {name: split.examples for name, split in schema.splits.items()},
        "dense_features": len(schema.dense),
        "categorical_features": len(schema.categorical),
        "tables": len(schema.tables),
        "rows": sum(table.rows for table in schema.tables),
        "provenance": dict(schema.provenance),
    }


def _with_total(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    groups = {name: dict(group) for name, group in parameters.items()}
    total = {key: sum(group[key] for group in groups.values()) for key in ("parameters", "bytes")}
    return {**groups, "total": total}


def _training(steps: int, seconds: float | None, examples: int | None) -> dict[str, Any]:
    if not seconds or not examples:
        return {"steps": steps}
    return {"steps": steps, "seconds": seconds, "examples": examples, "examples_per_second": examples / seconds}


def _save(figure: Figure, path: pathlib.Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DPI)
    write_file(path, image.getvalue())
