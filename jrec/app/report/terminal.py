"""What a report says in the terminal: lines of the content of ``metrics.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from jrec.app.report import importance, numbers, progressive, ranking
from jrec.app.report.content import Content, Section
from jrec.app.report.groups import LEAST, ends, words
from jrec.shown import counted

BASELINES = {
    "logistic_regression": "logistic regression",
    "popularity": "popularity",
    "transitions": "transitions",
    "ease": "EASE",
    **numbers.BASELINES,
}
"""The baselines, and what texts call them."""


class MetricWords(Protocol):
    """A module with the words for a model's metrics."""

    def lines(self, content: Content) -> Iterator[str]:
        """The metrics of every split beside the baselines', for the terminal."""
        ...

    def findings(self, content: Content) -> dict[str, list[str]]:
        """The report's section ``judgement``."""
        ...


def own_words(content: Content) -> MetricWords | None:
    """The module with the words for a model's metrics; None of a model of clicks."""
    modules: dict[str, MetricWords] = {"ranking": ranking, "numbers": numbers}
    return next((module for section, module in modules.items() if section in content), None)


def summary(content: Content) -> str:
    """A few lines for the terminal: the metrics of every split beside the teacher's ceiling, tables, and the judgement.

    Args:
      content: The content of ``metrics.json``.
    """
    lines = [*_metric_lines(content), *_step_lines(content), *_baseline_lines(content), *_group_lines(content)]
    lines += [*progressive.lines(content, _progressive_names(content)), *importance.lines(content)]
    for name, group in content["parameters"].items():
        if "host_rows" in group:
            rows, size = group["host_rows"], group["host_bytes"]
            lines.append(f"stack {name}: {rows:,} of {group['rows']:,} rows in host memory, {size:,} bytes")
    if content["device"]["platform"] != "cpu":
        lines.append(f"bits: {content['bits']}")
    lines += _table_lines(content["tables"], content["tables_total"])
    lines += _growing_lines(content.get("growing", {}))
    lines += _form_lines(content.get("forms", {}))
    lines += [_cache_line(table, cache, content["tables"][table]) for table, cache in content.get("caches", {}).items()]
    lines += _kernel_lines(content.get("kernels", {}))
    lines += _fae_lines(content["fae"]) if "fae" in content else []
    return "\n".join([*lines, *judgement_lines(content)])


def _progressive_names(content: Content) -> dict[str, str]:
    if "ranking" in content:
        return {key: name for key, (name, _) in ranking.metric_names(content["ranking"]["at"]).items()}
    if "numbers" in content:
        return {key: name for key, (name, _) in numbers.METRICS.items()}
    return {"auc": "AUC", "log_loss": "log loss", "calibration": "calibration"}


def score_lines(content: Content) -> list[str]:
    """The metrics of every split, beside baselines' and groups', as `jrec eval` shows them on a terminal.

    Args:
      content: As ``metrics.json`` has it: splits, ceiling, and of tasks, ranking, baselines and groups what there is.
    """
    return [
        *_metric_lines(content),
        *_baseline_lines(content),
        *_group_lines(content),
        *importance.lines(content),
    ]


def _metric_lines(content: Content) -> list[str]:
    """The metrics of every split, or of several labels by split and task."""
    if "ranking" in content:
        return list(ranking.lines(content))
    return [*_click_lines(content), *numbers.lines(content)]


def _click_lines(content: Content) -> Iterator[str]:
    """The metrics of labels of 0 and 1, beside the teacher's ceiling; nothing where none is."""
    scored: dict[str, Section] = {}
    for split in content["splits"]:
        for task, inside in (content.get("tasks") or {"": content}).items():
            if "auc" in (metrics := inside["splits"].get(split, {})):
                scored[f"{split}, {task}" if task else split] = metrics
    if not scored:
        return
    width = max(8, *(len(name) + 2 for name in scored), 0)
    yield f"{'split':<{width}}{'AUC':>9}{'ceiling':>9}{'log loss':>10}{'NE':>9}{'accuracy':>10}{'calibration':>13}"
    for name, metrics in scored.items():
        ceiling = content["ceiling"].get(name, {}).get("auc")
        cells = [
            f"{name:<{width}}{_cell(metrics['auc'], 9)}{_cell(ceiling, 9)}{_cell(metrics['log_loss'], 10)}",
            f"{_cell(metrics['normalized_entropy'], 9)}{_cell(metrics['accuracy'], 10)}",
            f"{_cell(metrics['calibration'], 13)}",
        ]
        yield "".join(cells)


def judgement_lines(content: Content) -> list[str]:
    """What the report warns of and advises.

    Args:
      content: The content of ``metrics.json``.
    """
    judgement = content["judgement"]
    return [*(f"warning: {text}" for text in judgement["warnings"]), *(f"try: {text}" for text in judgement["advice"])]


def _kernel_lines(kernels: Mapping[str, Mapping[str, object]]) -> list[str]:
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


def _form_lines(forms: Mapping[str, Section]) -> list[str]:
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


def _fae_lines(fae: Section) -> list[str]:
    """The savings by hot rows, and the course of the schedule."""
    sizes, rates = fae["bytes"], [*fae["rates"], fae["rate"]]
    return [
        f"fae: {100 * fae['hot_share']:.1f} % of the examples are hot, on {sum(fae['hot_rows'].values()):,} rows of"
        f" {fae['hot_row_bytes']:,} bytes with slots; {fae['switches']:,} switches, rates"
        f" {min(rates):g} to {max(rates):g}",
        f"fae: {sizes['moved']:,} bytes of rows and slots moved between host and device; the paper's synchronization of"
        f" hot rows at every switch would have moved {sizes['paper_synchronization']:,}",
    ]


def _table_lines(tables: Mapping[str, Section], total: Section) -> list[str]:
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


def _cache_line(name: str, hits: Section, table: Section) -> str:
    rate = "-" if hits["hit_rate"] is None else f"{100 * hits['hit_rate']:.1f} %"
    return f"table {name}: {rate} of {hits['lookups']:,} lookups hit the cache of {table['cache_rows']:,} rows"


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.4f}"


def _baseline_lines(content: Content) -> Iterator[str]:
    """The baselines' metrics, for the terminal."""
    if "baselines" not in content or own_words(content) is not None:  # whose own lines have them
        return
    baselines = content["baselines"]
    for split in content["splits"]:
        texts = []
        for key, name in BASELINES.items():
            metrics = baselines.get(key, {"splits": {}})["splits"].get(split)
            if metrics is not None:
                auc = "-" if metrics["auc"] is None else f"{metrics['auc']:.4f}"
                feature = f" of {baselines[key]['feature']}" if "feature" in baselines[key] else ""
                texts.append(f"{name}{feature}: AUC {auc}, log loss {metrics['log_loss']:.4f}")
        if texts:
            yield f"{split}, baselines: {'; '.join(texts)}"
    kept = ", kept from an earlier run" if baselines["cached"] else ""
    yield f"baselines: {baselines['seconds']:.1f} s{kept}"


def _step_lines(content: Content) -> Iterator[str]:
    """Evaluations during training, which step was scored, and whether training ended early."""
    training = content["training"]
    if (evaluations := content.get("evaluations")) is not None:
        yield (
            f"{counted(evaluations['count'], 'evaluation')} every {counted(evaluations['every_steps'], 'step')}:"
            f" {100 * evaluations['share']:.1f} % of the time, {evaluations['seconds']:.1f} s"
        )
    if training.get("stopped_early"):
        yield f"stopped early after step {training['steps']:,}"
    if "scored_step" in training:
        yield f"scores are those of the best step, {training['scored_step']:,} of {training['steps']:,}"


def _group_lines(content: Content) -> Iterator[str]:
    """GAUC or XGAUC and the best and the worst groups, for the terminal.

    Args:
      content: The content of ``metrics.json``.
    """
    groups = content.get("groups", {"splits": {}})
    for split, one in groups["splits"].items():
        called = words(one)
        if one[called.mean] is None:
            yield f"{split}, by {groups['feature']}: no group has {called.enough}"
            continue
        yield (
            f"{split}, by {groups['feature']}: {called.mean.upper()} {one[called.mean]:.4f} of {one['groups']:,} groups"
            f" with {called.enough}, {100 * one['coverage']:.1f} % of the examples"
        )
        for kind, rows in ends(one).items():
            shown = ", ".join(f"{row['group']} {row[called.ranking]:.3f} ({row['examples']:,})" for row in rows)
            yield f"  {kind} groups of {LEAST} examples or more, {called.ranking.upper()} (examples): {shown}"


def _growing_lines(growing: Mapping[str, Section]) -> list[str]:
    """A line for the terminal: all growing tables together.

    Args:
      growing: By table (``GrowingTables.sections``).
    """
    if not growing:
        return []
    total = {name: sum(table[name] for table in growing.values()) for name in ("keys", "admitted", "evicted")}
    lookups = max(1, sum(table["lookups"] for table in growing.values()))
    share = sum(table["oov_lookups"] for table in growing.values()) / lookups
    return [
        f"{len(growing)} table(s) that grow: {total['keys']:,} values have rows, {total['admitted']:,} were admitted,"
        f" {total['evicted']:,} evicted; {share:.1%} of lookups read row 0"
    ]
