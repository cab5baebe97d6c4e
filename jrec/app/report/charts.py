"""The charts of a report, from the content of ``metrics.json`` and the records of ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jrec.app.report import numbers
from jrec.app.report.content import Content, Records, Section
from jrec.app.report.groups import words
from jrec.app.report.judgement import metric_by_split
from jrec.app.report.logs import SCHEDULE
from jrec.app.report.svg import Axis, Mark, around, chart
from jrec.app.watch import LOSSES

POINTS = 300
"""At which a curve of the training batches is drawn at most."""
_COLORS = ("train", "valid", "test")
_RMSE = "RMSE (units of the label)"
_RARE = 0.1  # click rate below which axes are logarithmic
_MANY = 20  # values of a chart, from which the most extreme do not count for its range


def learning_curves(content: Content, records: Records) -> Iterator[str]:
    """Log loss and AUC by step, beside the baselines and the teacher; nothing where nothing was logged.

    Args:
      content: The content of ``metrics.json``.
      records: The records of ``metrics.jsonl``.
    """
    if not records:
        return
    size = content["config"]["data"]["batch_size"]
    scored = content["training"].get("scored_step")
    for logs, title, metric, key, unit in _curves(content, records):
        if not logs:
            continue
        logged = [(r["step"], r[key]) for r in logs if r.get(key) is not None]
        steps, values = np.array(logged, float).reshape(-1, 2).T
        curves = list(_training(steps, values, "train, running" if metric == "auc" else "train, moving median"))
        curves += _evaluations(logs, metric)
        if not curves:
            continue
        marks = [*curves, *_across(content, metric, {r["split"] for r in logs})]
        if scored is not None:
            marks.append(Mark(kind="down", color="grey", x=(scored,), dash="dash3", name=f"scored step {scored:,}"))
        last = max(r["step"] for r in logs)
        low, high = _range(marks)
        y = Axis(label=unit, low=low, high=high)
        yield chart(marks, title=title, x=Axis(label=f"step of {size:,} examples", low=0, high=last), y=y)


def calibration(content: Content) -> Iterator[str]:
    """Observed against predicted click rate, in bins of equal count with 95 % intervals, by split."""
    for split, bins in content["reliability"].items():
        observed, predicted, counts = (np.array(bins[k], float) for k in ("observed", "mean_predicted", "counts"))
        logarithmic = content["splits"][split]["base_rate"] < _RARE
        shown = (observed > 0) & (predicted > 0) if logarithmic else np.ones(len(observed), bool)
        name = split
        if not shown.all():
            name += (
                f" ({np.count_nonzero(~shown)} of {len(shown)} bins saw no click, or expected none, and are not drawn)"
            )
        observed, predicted, counts = observed[shown], predicted[shown], counts[shown]
        if not observed.size:
            continue
        error = 1.96 * np.sqrt(observed * (1 - observed) / counts)
        values = np.concatenate([observed, predicted])
        low, high = (values.min() / 1.5, min(1, values.max() * 1.5)) if logarithmic else (0, min(1, values.max() * 1.1))
        lower = np.maximum(observed - error, low)
        color = _color(split)
        marks = [
            Mark(kind="line", color="grey", x=(low, high), y=(low, high), dash="dash1", name="perfectly calibrated"),
            Mark(kind="bars", color=color, x=predicted.tolist(), y=lower.tolist(), upper=(observed + error).tolist()),
            Mark(kind="points", color=color, x=predicted.tolist(), y=observed.tolist(), name=name),
        ]
        axes = [Axis(label=f"{rate} click rate", low=low, high=high, logarithmic=logarithmic)
                for rate in ("predicted", "observed")]  # fmt: skip
        yield chart(marks, title=f"Calibration on {split}", x=axes[0], y=axes[1], height=320)


def residuals(content: Content) -> Iterator[str]:
    """Labels less predictions against predictions, in bins of equal count with their deviation, by split."""
    for split, bins in content.get("residuals", {}).items():
        predicted, labels, deviation = (np.array(bins[k], float) for k in ("mean_predicted", "mean_label", "deviation"))
        gap, color = labels - predicted, _color(split)
        low, high = around([*(gap - deviation).tolist(), *(gap + deviation).tolist(), 0.0])
        left, right = around(predicted.tolist())
        bars = {"y": (gap - deviation).tolist(), "upper": (gap + deviation).tolist()}
        marks = [
            Mark(kind="line", color="grey", x=(left, right), y=(0.0, 0.0), dash="dash1", name="no error"),
            Mark(kind="bars", color=color, x=predicted.tolist(), **bars),
            Mark(kind="points", color=color, x=predicted.tolist(), y=gap.tolist(), name=f"{split}, mean and deviation"),
        ]
        axes = Axis(label="prediction", low=left, high=right), Axis(label="label less prediction", low=low, high=high)
        yield chart(marks, title=f"Residuals on {split}", x=axes[0], y=axes[1], height=320)


def groups(content: Content) -> Iterator[str]:
    """How AUC, or XAUC, within a group is spread over the examples of groups with unlike labels."""
    section = content.get("groups", {"splits": {}})
    marks, top, ranking = [], 0.0, ""
    for split, one in section["splits"].items():
        shares = np.array(one["histogram"], float)
        if not shares.sum():
            continue
        shares /= shares.sum()
        top = max(top, float(shares.max()))
        mean, ranking = words(one).mean, words(one).ranking.upper()
        edges = np.linspace(0, 1, len(shares) + 1).tolist()
        marks.append(Mark(kind="steps", color=_color(split), x=edges, y=shares.tolist(), name=split))
        name = f"{split}, {mean.upper()} {one[mean]:.4f}"
        marks.append(Mark(kind="down", color=_color(split), x=(one[mean],), dash="dash2", name=name))
    if marks:
        y = Axis(label="share of examples", low=0, high=top * 1.05)
        title = f"{ranking} within groups by {section['feature']}"
        yield chart(marks, title=title, x=Axis(label=f"{ranking} within the group", low=0, high=1), y=y)


def schedules(content: Content, records: Records) -> Iterator[str]:
    """Loss and rate by schedule of a run on hot and cold batches."""
    made = [r for r in records if r["split"] == SCHEDULE]
    if "fae" not in content or not made:
        return
    steps = [s["start"] + s["cold"] + s["hot"] for s in made]
    split = content["fae"]["test_split"]
    loss = Mark(
        kind="points", color=_color(split), x=steps, y=[s["test_loss"] for s in made], name=f"{split}, after a schedule"
    )
    rate = Mark(kind="steps", color="train", x=[made[0]["start"], *steps], y=[s["rate"] for s in made], name="rate")
    x = Axis(label="step", low=0, high=steps[-1])
    low, high = _range([loss])
    title, unit = ("RMSE", "unit of the label") if "numbers" in content else ("Log loss", "nats per example")
    y = Axis(label=f"{title} ({unit})", low=low, high=high)
    yield chart([loss], title=f"{title} by schedule", x=x, y=y)
    y = Axis(label="rate (% of an epoch's batches)", low=0, high=105)
    yield chart([rate], title="Rate of hot and cold batches by schedule", x=x, y=y)


def _curves(content: Content, records: Records) -> Iterator[tuple[Records, str, str, str, str]]:
    """What each learning curve shows: records, its title, the metric of evaluations, the key of steps, and the unit."""
    log_loss, nats = "Log loss by step", "log loss (nats per example)"
    auc = (records, "AUC by step", "auc", "running_auc", "AUC")
    if "ranking" in content:  # whose loss is of sampled items, and none of its evaluations'
        first = next(iter(content["ranking"]["at"]))
        yield records, "Loss by step", "", "loss", "loss of sampled items (nats per position)"
        yield records, f"NDCG@{first} by step", f"ndcg@{first}", "", f"NDCG@{first}"
    elif tasks := content.get("tasks", {}):
        numeric = [task for task, own in tasks.items() if numbers.are_of_numbers(own["splits"])]
        yield records, "Loss by step", "", "loss", "sum of the tasks' losses by weight"
        if len(numeric) < len(tasks):
            yield from ((records, log_loss, "log_loss", "", nats), auc)
        for task in numeric:  # a chart of its own for each number, since each has its unit
            yield _of_task(records, task, tasks), f"RMSE by step, {task}", "rmse", "", _RMSE
    elif "numbers" in content:
        yield records, "Loss by step", "", "loss", "loss (of outputs before scale)"
        yield records, "RMSE by step", "rmse", "", _RMSE
    else:
        yield from ((records, log_loss, "log_loss", "loss", nats), auc)


def _of_task(records: Records, task: str, tasks: Section) -> Records:
    """The records of a task's evaluations; the first one's bear no name."""
    name = "" if task == next(iter(tasks)) else task
    return [record for record in records if record["split"].partition("/")[2] == name]


def _training(steps: np.ndarray, values: np.ndarray, name: str) -> Iterator[Mark]:
    """A moving median over a twentieth of the values, in a band from their tenth to their ninetieth percentile."""
    if not len(steps):
        return
    half = len(steps) // 40
    at = np.unique(np.linspace(0, len(steps) - 1, POINTS).astype(int))
    windows = (values[max(0, i - half) : i + half + 1] for i in at)
    low, middle, high = np.array([np.quantile(window, (0.1, 0.5, 0.9)) for window in windows]).T.tolist()
    x = steps[at].tolist()
    yield Mark(kind="band", color="train", x=x, y=low, upper=high)
    yield Mark(kind="line" if len(x) > 2 else "points", color="train", x=x, y=middle, name=name)


def _evaluations(records: Records, metric: str) -> Iterator[Mark]:
    best = min if metric in LOSSES else max
    for split in sorted({r["split"] for r in records if r.get(metric) is not None and r["split"] != "train"}):
        points = [(r["step"], r[metric]) for r in records if r["split"] == split and r.get(metric) is not None]
        x, y = zip(*points, strict=True)
        step = x[y.index(best(y))]
        yield Mark(kind="points", color=_color(split), x=x, y=y, name=f"{split}, best {best(y):.4f} at step {step:,}")


def _across(content: Content, metric: str, splits: set[str]) -> Iterator[Mark]:
    """The baselines and the teacher on the splits that were evaluated by step."""
    for split, values in metric_by_split(content, metric).items():
        if split in splits:
            for number, (name, value) in enumerate(values.items(), 1):
                label = f"{split}, {name} {value:.4f}"
                yield Mark(kind="across", color="grey", y=(value,), dash=f"dash{number}", name=label)
    for split, metrics in content["ceiling"].items():
        if split in splits - {"train"} and metric in metrics:
            label = f"{split}, the teacher's own {metrics[metric]:.4f}"
            yield Mark(kind="across", color=_color(split), y=(metrics[metric],), dash="dash3", name=label)


def _range(marks: Sequence[Mark]) -> tuple[float, float]:
    """The values' range without the first steps', whose loss can be huge and would squeeze all others flat."""
    values = np.concatenate([np.asarray(mark.y, float) for mark in marks if mark.kind != "down"])
    if len(values) >= _MANY:
        low, high = np.quantile(values, (0.02, 0.98))
        kept = [mark.y for mark in marks if mark.kind in ("points", "across")]
        values = np.concatenate([values[(values >= low) & (values <= high)], *(np.asarray(y, float) for y in kept)])
    return around(values.tolist())


def _color(split: str) -> str:
    return split if split in _COLORS else "grey"
