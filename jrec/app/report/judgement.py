"""What a report warns of: by ranking, log loss and calibration, each beside the baselines', and by slices.

A model may rank better than a baseline and still have worse probabilities, which matters wherever scores are more than
an order: in auctions, for thresholds, as expected values. So each of the three is judged on its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from jrec.app.report import numbers, progressive
from jrec.app.report.advice import WORSE, advise, scored, valid_losses
from jrec.app.report.content import Content, Records, Section
from jrec.app.report.terminal import BASELINES, own_words

_MARGIN = 5e-4  # of AUC, below which nothing is said
_OFF = 0.05  # of the click rate, by which the mean prediction may be off
_SLICE_OFF = 0.1
_SURE = 4.0  # standard deviations, from which a gap is no chance; of a hundred slices one is often beyond 3
_BINS = 20  # of the calibration error
_MUCH = 0.01  # of a table's lookups: evictions beyond it say that there are too few rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
      kind: "rank", "loss", "calibration", "drift", "course" of training, or "data", for which there is no general
        advice.
      text: A sentence without its full stop.
    """

    kind: str
    text: str


def judge(content: Content, records: Records) -> dict[str, list[str]]:
    """The report's section ``judgement``: sentences under "warnings" and "advice".

    Args:
      content: The content of ``metrics.json``, without this section.
      records: The records of ``metrics.jsonl``, which tell how the valid split's log loss went.
    """
    if not content["splits"]:
        return {"warnings": [], "advice": []}
    if (own := own_words(content)) is not None:
        findings = own.findings(content)
        further = (finding.text for finding in (*_slices(content), *_tasks(content.get("tasks", {}))))
        return {**findings, "warnings": [*findings["warnings"], *further]}
    split, metrics = list(content["splits"].items())[-1]
    baselines = {
        name: metric_by_split(content, name).get(split, {}) for name in ("auc", "log_loss", "calibration_error")
    }
    findings = [
        *_undefined(content),
        *_ranking(split, metrics, baselines),
        *_log_loss(split, metrics, baselines),
        *_calibration(split, metrics, baselines),
        *_course(content, records),
        *_slices(content),
        *_tasks(content.get("tasks", {})),
        *_evictions(content.get("growing", {})),
        *(Finding(kind="drift", text=text) for text in [progressive.drift(content)] if text),
    ]
    advice = advise(content, records, {finding.kind for finding in findings})
    return {"warnings": [finding.text for finding in findings], "advice": list(advice)}


def _tasks(tasks: Mapping[str, Section]) -> Iterator[Finding]:
    """Of all tasks but the first, which the other findings are of."""
    for task in list(tasks)[1:]:
        splits = tasks[task]["splits"]
        if not splits:
            yield Finding(kind="data", text=f"{task}: no example of the splits has a known label of it")
            continue
        if numbers.are_of_numbers(splits):
            warnings = numbers.findings(tasks[task])["warnings"]
            yield from (Finding(kind="data", text=f"{task}: {text}") for text in warnings)
            continue
        split, metrics = list(splits.items())[-1]
        none: Baselines = {name: {} for name in ("auc", "log_loss", "calibration_error")}
        of_task = (*_undefined(tasks[task]), *_log_loss(split, metrics, none), *_calibration(split, metrics, none))
        yield from (dataclasses.replace(one, text=f"{task}: {one.text}") for one in of_task)


def metric_by_split(content: Content, metric: str) -> dict[str, dict[str, float]]:
    """A metric of every baseline, by split and by what texts call it; empty where none was computed."""
    by_split: dict[str, dict[str, float]] = {}
    for key, name in BASELINES.items():
        for split, metrics in content.get("baselines", {}).get(key, {"splits": {}})["splits"].items():
            if metrics.get(metric) is not None:
                by_split.setdefault(split, {})[name] = metrics[metric]
    return by_split


Baselines = Mapping[str, Mapping[str, float]]
"""By metric and by what texts call the baseline."""


def _undefined(content: Content) -> Iterator[Finding]:
    for split, metrics in content["splits"].items():
        for reason in dict.fromkeys(metrics.get("undefined", {}).values()):
            names = ", ".join(name for name, one in metrics["undefined"].items() if one == reason)
            yield Finding(kind="data", text=f"{names.replace('_', ' ')} of {split}: undefined, since {reason}")


def _ranking(split: str, metrics: Section, baselines: Baselines) -> Iterator[Finding]:
    own = metrics["auc"]
    for name, value in baselines["auc"].items():
        if own is not None and own < value - _MARGIN:
            why = "a linear model of the same features" if name == BASELINES["logistic_regression"] else "one feature"
            text = f"the model's {split} AUC {own:.4f} is below {name}'s {value:.4f}: {why} ranks better"
            yield Finding(kind="rank", text=text)


def _log_loss(split: str, metrics: Section, baselines: Baselines) -> Iterator[Finding]:
    own, auc = metrics["log_loss"], metrics["auc"]
    for name, value in baselines["log_loss"].items():
        if own > WORSE * value:
            better = auc is not None and auc > baselines["auc"].get(name, 1.0)
            rank = ": it ranks better, but its probabilities are worse" if better else ""
            text = f"the model's {split} log loss {own:.4f} nats is above {name}'s {value:.4f}{rank}"
            yield Finding(kind="loss", text=text)
    share = metrics["normalized_entropy"]
    if share is not None and share >= 1:
        text = (
            f"the model's {split} log loss {own:.4f} nats is no better than {own / share:.4f}, that of predicting the"
            f" click rate {metrics['base_rate']:.4f} for every example"
        )
        yield Finding(kind="loss", text=text)


def _calibration(split: str, metrics: Section, baselines: Baselines) -> Iterator[Finding]:
    rate, mean, own = (metrics[name] for name in ("base_rate", "mean_prediction", "calibration_error"))
    deviation = math.sqrt(rate * (1 - rate) / metrics["examples"])
    # Bins whose predictions are right have gaps of sqrt(2 / pi) of a bin's deviation on average, seldom of half more.
    chance = 1.5 * math.sqrt(2 / math.pi * _BINS) * deviation
    for name, value in baselines["calibration_error"].items():
        if own - value > max(chance, _OFF * rate):
            text = (
                f"the model's {split} calibration error {own:.4f} is above {name}'s {value:.4f}: so far are its"
                " predictions, on average, from the click rate of the examples that get them"
            )
            yield Finding(kind="calibration", text=text)
    if rate and abs(mean - rate) > max(_OFF * rate, _SURE * deviation):
        text = (
            f"the model predicts {_more(mean / rate)} clicks than there are on {split}: mean prediction {mean:.4f},"
            f" click rate {rate:.4f}"
        )
        yield Finding(kind="calibration", text=text)


def _course(content: Content, records: Records) -> Iterator[Finding]:
    losses = valid_losses(records)
    if (last := scored(content, losses)) is not None and last[0] > WORSE * min(losses)[0]:
        best, step = min(losses)
        text = (
            f"valid's log loss was best, {best:.4f} nats, at step {step:,}; at the last evaluation of what is scored,"
            f" step {last[1]:,}, it was {last[0]:.4f}"
        )
        yield Finding(kind="course", text=text)


def _slices(content: Content) -> Iterator[Finding]:
    section = content.get("slices", {"slices": []})
    off = [one for one in section["slices"] if is_off(one)]
    if off:
        worst = max(off, key=lambda one: abs(one["deviations"]))
        numeric, mean = "rmse" in worst, worst["mean_prediction"]
        truth, key, form = ("mean label", "mean_label", ".4g") if numeric else ("click rate", "base_rate", ".4f")
        share = f"{100 * _SLICE_OFF:.0f} %{' of its RMSE' if numeric else ''}"
        text = (
            f"in {len(off):,} of {len(section['slices']):,} slices of {section['split']} the mean prediction is off by"
            f" more than {share}, most surely where {worst['feature']} is {worst['slice']}: mean prediction"
            f" {mean:{form}}, {truth} {worst[key]:{form}}, {worst['examples']:,} examples"
        )
        yield Finding(kind="data", text=text)


def is_off(one: Section) -> bool:
    """Whether a slice's mean prediction is further from its click rate, or its mean label, than chance has it.

    And by more than a tenth of the rate; of numbers, whose mean may be 0, of the slice's RMSE.
    """
    numeric = "rmse" in one
    gap = abs(one["mean_prediction"] - one["mean_label" if numeric else "base_rate"])
    return abs(one["deviations"]) > _SURE and gap > _SLICE_OFF * one["rmse" if numeric else "base_rate"]


def _evictions(growing: Mapping[str, Section]) -> Iterator[Finding]:
    """The table that grows and gives most of its rows away, with its remedy."""
    if not growing:
        return
    name, most = max(growing.items(), key=lambda entry: entry[1]["evicted"] / max(1, entry[1]["lookups"]))
    if most["evicted"] > _MUCH * most["lookups"]:
        text = (
            f"table {name!r} gave {most['evicted']:,} rows of {most['capacity']:,} to others in {most['lookups']:,}"
            f" lookups; give it more by tables.overrides.{name}.capacity"
        )
        yield Finding(kind="data", text=text)


def _more(ratio: float) -> str:
    return f"{100 * abs(ratio - 1):.1f} % {'more' if ratio > 1 else 'fewer'}"
