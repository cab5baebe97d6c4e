"""The page of a run: ``report.html``, from the content of ``metrics.json`` and the records of ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jrec.app.config import DataConfig, TrainConfig
from jrec.app.report import charts, importance, numbers, progressive, ranking
from jrec.app.report.content import Content, Records, Section
from jrec.app.report.elements import (
    NONE,
    Cell,
    flattened,
    folded,
    measured,
    note,
    number,
    page,
    paragraph,
    section,
    side_by_side,
    table,
    tiles,
)
from jrec.app.report.groups import LEAST, ends, words
from jrec.app.report.judgement import is_off
from jrec.app.report.terminal import BASELINES

_METRICS = {
    "auc": ("AUC", "0 to 1"),
    "log_loss": ("log loss", "nats per example"),
    "normalized_entropy": ("normalized entropy", "log loss / entropy of the click rate"),
    "calibration": ("calibration", "mean prediction / click rate"),
    "calibration_error": ("calibration error", "probability"),
}
_OWN = {
    "average_precision": ("average precision", "0 to 1"),
    "accuracy": ("accuracy", "share at probability 0.5"),
    "base_rate": ("click rate", "share of examples"),
    "mean_prediction": ("mean prediction", "probability"),
    "examples": ("examples", "count"),
}
_SLICE = {
    "examples": ("examples", "count"),
    "base_rate": ("click rate", "share of examples"),
    "mean_prediction": ("mean prediction", "probability"),
    "calibration": ("calibration", "mean prediction / click rate"),
    "deviations": ("off by", "standard deviations"),
    "log_loss": ("log loss", "nats per example"),
    "normalized_entropy": ("normalized entropy", "log loss / entropy of the slice's click rate"),
}
_NUMBER_SLICE = {
    "examples": ("examples", "count"),
    "mean_label": ("mean label", "units of the label"),
    "mean_prediction": ("mean prediction", "units of the label"),
    "deviations": ("off by", "standard deviations"),
    "rmse": ("RMSE", "units of the label"),
}
_SHOWN = {"format", "version", "name", "splits", "units", "config", "judgement", "reliability", "groups", "slices",
          "baselines", "ceiling", "tasks", "importance", "progressive"}  # fmt: skip
_MANY = 12  # slices that are shown unfolded


def run_page(content: Content, records: Records) -> str:
    """The page as HTML.

    Args:
      content: The content of ``metrics.json``.
      records: The records of ``metrics.jsonl``; none where the run's are not at hand.
    """
    parts = [
        *_judgement(content),
        *_tiles(content),
        *section("Scores", _scores(content)),
        *section("Tasks", _tasks(content)),
        *section("Learning curves", side_by_side(charts.learning_curves(content, records))),
        *section("Order of time", progressive.parts(content, _named(content)[0])),
        *section("Hot and cold batches", side_by_side(charts.schedules(content, records))),
        *section("Calibration", _calibration(content)),
        *section("Residuals", _residuals(content)),
        *section("Slices", _slices(content)),
        *section("Groups", _groups(content)),
        *section("Importance of features", importance.parts(content)),
        *section("Baselines", _baselines(content)),
        *section("Training and hardware", _hardware(content)),
        *section("Configuration", _configuration(content["config"])),
        *section("All other numbers", _others(content)),
    ]
    return page(f"{content['name']} on {content['data']['name']}", parts)


def _judgement(content: Content) -> Iterator[str]:
    warnings, advice = content["judgement"]["warnings"], content["judgement"]["advice"]
    if warnings:
        yield note("Warnings", warnings)
    elif content["splits"] and "baselines" in content:
        own = {"ranking": "any of these metrics", "numbers": "RMSE"}
        by = next((name for section, name in own.items() if section in content), "AUC, log loss or calibration")
        yield note(f"No warnings: no baseline is better in {by}.", [], good=True)
    elif content["splits"]:
        yield note("No warnings; but there are no baselines to compare the model with (evaluate.baselines).", [])
    if advice:
        yield note("What to try", advice)


def _tiles(content: Content) -> Iterator[str]:
    splits, training = content["splits"], content["training"]
    if not splits:
        return
    split = next(reversed(splits))
    names, _ = _named(content)
    shown = {f"{split} {name}": (measured(splits[split][key]), unit) for key, (name, unit) in list(names.items())[:4]}
    shown["steps"] = (f"{training['steps']:,}", "of training")
    if "seconds" in training:
        shown["training"] = (f"{training['seconds']:,.1f} s", "without evaluations and checkpoints")
        shown["speed"] = (f"{training['examples_per_second']:,.0f}", "examples/s")
    yield tiles(shown)


def _scores(content: Content) -> Iterator[str]:
    names, further = _named(content)
    columns, keys = {"": "", **dict((names | further).values())}, list(names | further)
    for split, metrics in reversed(content["splits"].items()):
        rows = [["the model", *_metrics(keys, metrics)]]
        for key, name in BASELINES.items():
            baseline = content.get("baselines", {}).get(key)
            if baseline is not None and split in baseline["splits"]:
                feature = f" of {baseline['feature']}" if "feature" in baseline else ""
                rows.append([name + feature, *_metrics(keys, baseline["splits"][split])])
        if split in content["ceiling"]:
            known = content["ceiling"][split]
            rows.append(
                ["the teacher that made the labels", *_metrics(keys, {**known, "base_rate": known.get("click_rate")})]
            )
        yield table(f"{split} split", columns, rows, marks={0: "own"})


def _tasks(content: Content) -> Iterator[str]:
    """The metrics of every task beside each other, and the calibration of those that other sections leave out."""
    if not (tasks := content.get("tasks", {})):
        return
    first, *further_tasks = tasks
    yield paragraph(
        f"Examples have several labels. What names none of them is of the first, {first}; each task's metrics are of"
        " the examples whose label of it is known."
    )
    of_numbers = {task: numbers.are_of_numbers(one["splits"]) for task, one in tasks.items()}
    for split in reversed(content["splits"]):
        for numeric in sorted(set(of_numbers.values())):
            named = numbers.METRICS | numbers.OTHERS if numeric else _METRICS | _OWN
            scored = {task: one["splits"].get(split) for task, one in tasks.items() if of_numbers[task] == numeric}
            rows = [[task, *_metrics(list(named), metrics)] for task, metrics in scored.items() if metrics is not None]
            title = f"Tasks that are numbers, on the {split} split" if numeric else f"Tasks on the {split} split"
            if rows:
                yield table(title, {"": "", **dict(named.values())}, rows)
    for task in further_tasks:
        own = {
            part: {f"{split}, {task}": one for split, one in tasks[task].get(part, {}).items()}
            for part in ("splits", "reliability", "residuals")
        }
        yield from side_by_side(charts.residuals(own) if of_numbers[task] else charts.calibration({**content, **own}))


def _named(content: Content) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """By key what texts call metrics, with units, and what else an evaluation has."""
    if "ranking" in content:
        return ranking.metric_names(content["ranking"]["at"]), ranking.OTHERS
    names, further = (numbers.METRICS, numbers.OTHERS) if "numbers" in content else (_METRICS, _OWN)
    weighted = any("weight" in metrics for metrics in content["splits"].values())
    return names, further | ({"weight": ("sum of weights", "all metrics are means by them")} if weighted else {})


def _metrics(keys: Sequence[str], metrics: Section) -> list[Cell]:
    return [metrics.get(key) for key in keys]


def _calibration(content: Content) -> Iterator[str]:
    yield from side_by_side(charts.calibration(content))
    columns = {"bin": "", "examples": "count", "mean prediction": "probability", "click rate": "share of examples"}
    for split, bins in content["reliability"].items():
        rows = [
            [at, count, predicted, observed]
            for at, (count, predicted, observed) in enumerate(
                zip(bins["counts"], bins["mean_predicted"], bins["observed"], strict=True), 1
            )
        ]
        yield from folded(f"The bins of {split} as a table", [table(f"Calibration on {split}", columns, rows)])


def _residuals(content: Content) -> Iterator[str]:
    yield from side_by_side(charts.residuals(content))
    unit = "units of the label"
    columns = {"bin": "", "examples": "count", "mean prediction": unit, "mean label": unit, "deviation": unit}
    for split, bins in content.get("residuals", {}).items():
        rows = [
            [at, *values]
            for at, values in enumerate(
                zip(*(bins[k] for k in ("counts", "mean_predicted", "mean_label", "deviation")), strict=True), 1
            )
        ]
        yield from folded(f"The bins of {split} as a table", [table(f"Residuals on {split}", columns, rows)])


def _slices(content: Content) -> Iterator[str]:
    section = content.get("slices", {"slices": []})
    slices = sorted(section["slices"], key=lambda one: -abs(one["deviations"]))
    if not slices:
        return
    truth, share = ("mean label", "10 % of their RMSE") if "rmse" in slices[0] else ("click rate", "10 %")
    yield paragraph(
        f"Slices of the {section['split']} split by the values of features with few values, and by the frequency in"
        f" training of the others' values. Those come first whose mean prediction is most surely not their {truth};"
        f" marked are those that are also off by more than {share}."
    )
    yield _slice_table(f"Slices furthest from calibrated, of {len(slices):,}", slices[:_MANY])
    if len(slices) > _MANY:
        yield from folded("All slices", [_slice_table("All slices", section["slices"])])


def _slice_table(caption: str, slices: Sequence[Section]) -> str:
    named = _NUMBER_SLICE if "rmse" in slices[0] else _SLICE
    rows = [[one["feature"], one["slice"], *(one[key] for key in named)] for one in slices]
    marks = {at: "off" for at, one in enumerate(slices) if is_off(one)}
    return table(caption, {"feature": "", "slice": "", **dict(named.values())}, rows, marks=marks)


def _groups(content: Content) -> Iterator[str]:
    section = content.get("groups", {"splits": {}})
    yield from side_by_side(charts.groups(content))
    for split, one in section["splits"].items():
        share = f"{100 * one['coverage']:.1f} % of the examples"
        called = words(one)
        yield paragraph(
            f"{split}, by {section['feature']}: {called.mean.upper()} {measured(one[called.mean])} of"
            f" {one['groups']:,} groups with {called.enough}, {share}; {one['groups_of_one_label']:,} groups have one"
            " label only."
        )
        columns = {section["feature"]: "", **called.units}
        for kind, groups in ends(one).items():
            rows = [[row["group"], *called.cells(row)] for row in groups]
            yield table(f"{split}: the {kind} groups of {LEAST} examples or more", columns, rows)


def _baselines(content: Content) -> Iterator[str]:
    if (baselines := content.get("baselines")) is None:
        return
    for key, name in BASELINES.items():
        if key in baselines:
            chosen = {k: v for k, v in baselines[key].items() if k != "splits"}
            said = ", ".join(f"{k.replace('_', ' ')} {number(v)}" for k, v in chosen.items())
            yield paragraph(f"{name}: {said}" if said else name)
    kept = ", kept from an earlier run" if baselines["cached"] else ""
    yield paragraph(f"Fitted to the training split on the CPU in {baselines['seconds']:.1f} s{kept}.")


def _hardware(content: Content) -> Iterator[str]:
    device, training = content["device"], content["training"]
    yield paragraph(
        f"{device['count']:,} device(s) of kind {device['kind']} ({device['platform']}), {device['processes']:,}"
        f" process(es), {device['host_cpu_threads']:,} CPU threads. Bits: {content['bits']}."
    )
    if (evaluations := content.get("evaluations")) is not None:
        yield paragraph(
            f"{evaluations['count']:,} evaluations every {evaluations['every_steps']:,} steps took"
            f" {evaluations['seconds']:.1f} s, {100 * evaluations['share']:.1f} % of the time."
        )
    if training.get("stopped_early"):
        yield paragraph(f"Training stopped early after step {training['steps']:,}.")
    if "scored_step" in training:
        yield paragraph(f"Scores are those of the best step, {training['scored_step']:,} of {training['steps']:,}.")
    versions = [list(pair) for pair in content["versions"].items()]
    yield from folded("Versions", [table("Versions", {"package": "", "version": ""}, versions)])


def _configuration(config: Section) -> Iterator[str]:
    default = dict(flattened(TrainConfig(data=DataConfig(path="DATA")).to_dict()))
    every = list(flattened(config))
    columns = {"key": "", "value": "", "default": ""}
    changed = [[key, number(v), number(default.get(key))] for key, v in every if default.get(key, NONE) != v]
    yield table("Keys with another value than their default", columns, changed)
    rows = [[key, number(value)] for key, value in every]
    yield from folded("Every key", [table("The whole configuration", {"key": "", "value": ""}, rows)])


def _others(content: Content) -> Iterator[str]:
    """Every section that no other part of the page has, with units."""
    units = content["units"]
    for name, inside in content.items():
        if name in _SHOWN or not isinstance(inside, Mapping):
            continue
        rows = [
            [path or name, number(value), next((units[k] for k in reversed(path.split(".")) if k in units), "")]
            for path, value in flattened(inside)
        ]
        yield from folded(name, [table(name, {"name": "", "value": "", "unit": ""}, rows)] if rows else [])
