"""What the papers claim beside jrec's figures, and verdicts on it. claims.toml says how a claim is written."""

from __future__ import annotations

import collections
import pathlib
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PATH = pathlib.Path(__file__).with_suffix(".toml")
VERDICTS = ("holds", "beyond", "missed", "open until a GPU", "open")
SAME = 0.05
"""A figure within 5 % of the paper's is the same: the rest is rounding, and which vocabulary was counted."""

Claim = Mapping[str, Any]


def table(paper: str | None, results: Mapping[str, Any]) -> Iterator[str]:
    """The lines of Markdown of a paper's claims; without a paper, of how many of each paper got which verdict.

    Raises:
      LookupError: There is no such paper, or a claim's lines are absent.
    """
    papers = tomllib.loads(PATH.read_text(encoding="utf-8"))
    if paper is None:
        yield row(["paper", *VERDICTS])
        yield row(["---"] * (1 + len(VERDICTS)))
        for name, claims in papers.items():
            counts = collections.Counter(verdict(claim, figures(claim, results)) for claim in claims.values())
            yield row([f"[{name}](#{name.lower().replace(' ', '-')})", *(str(counts[v] or "") for v in VERDICTS)])
        return
    if paper not in papers:
        raise LookupError(f"no paper is called {paper!r}; add it to {PATH.name}")
    yield row(["where", "the paper", "jrec", "verdict", "the difference"])
    yield row(["---"] * 5)
    for where, claim in papers[paper].items():
        try:
            found = figures(claim, results)
        except LookupError as error:
            raise LookupError(f"{paper}, {where}: {error.args[0]}; run the benchmark, or change the claim") from None
        shown = "; ".join(_shown(f, values) for f, values in zip(claim.get("jrec", ()), found, strict=True))
        yield row([where, claim["says"], shown, f"**{verdict(claim, found)}**", claim["difference"]])
    files = {figure["file"] for claim in papers[paper].values() for figure in claim.get("jrec", ())}
    measured = (f"{file} at {', '.join(sorted({line['commit'] for line in results[file]}))}" for file in sorted(files))
    yield f"\nLines and their commits: {'; '.join(measured)}."


def figures(claim: Claim, results: Mapping[str, Any]) -> list[list[float]]:
    """The values of each of a claim's figures: one of every case that fits.

    Raises:
      LookupError: No line fits.
    """
    return [_values(figure, results) for figure in claim.get("jrec", ())]


def _values(figure: Mapping[str, Any], results: Mapping[str, Any]) -> list[float]:
    names = figure["metric"], figure.get("by", [])
    metrics, divisors = ([name] if isinstance(name, str) else name for name in names)
    field, file = "ratio" if figure.get("ratio") else "value", f"{figure['file']}.jsonl"
    found: dict[tuple[str, str], float | None] = {}
    for line in results.get(figure["file"], []):
        if re.search(figure.get("peer", ""), line["peer"] or ""):
            found.setdefault((line["case"], line["metric"]), line[field])

    def total(case: str, metrics: Sequence[str]) -> float:
        values = [value for metric in metrics if (value := found.get((case, metric))) is not None]
        if len(values) < len(metrics):
            raise LookupError(f"{file} lacks a {field} of {metrics} of {case!r}")
        return sum(values)

    cases = [case for case, metric in found if metric == metrics[0] and re.search(figure.get("case", ""), case)]
    if not cases:
        raise LookupError(f"{file} has no {figure['metric']!r} of a case like {figure.get('case', '')!r}")
    values = [total(case, metrics) / (total(case, divisors) if divisors else 1) for case in cases]
    return [1 / value for value in values] if figure.get("inverse") else values


def verdict(claim: Claim, found: Sequence[Sequence[float]]) -> str:
    """One of ``VERDICTS``, by the claim's first figure."""
    if "open" in claim:
        return claim["open"]
    values = found[0]
    if "lost" in claim:
        return "holds" if max(values) <= claim["lost"] else "missed"
    if "noise" in claim:
        return "holds" if min(values) > 1 + claim["noise"] else "missed"
    paper, less = claim["paper"], claim.get("better") == "less"
    advantages = [paper / value if less else value / paper for value in values]
    counts = {"worst": min, "best": max, "mean": statistics.mean}[claim.get("count", "worst")]
    advantage = counts(advantages)
    return "missed" if advantage < 1 - SAME else "beyond" if advantage > 1 + SAME else "holds"


def _shown(figure: Mapping[str, Any], values: Sequence[float]) -> str:
    least, greatest = number(min(values)), number(max(values))
    span = least if least == greatest else f"{least} to {greatest}"
    return f"**{span}{figure.get('unit', '×')}** {figure['of']}"  # noqa: RUF001


def number(value: float) -> str:
    """A figure of three to four digits."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 10 else f"{value:.4g}"


def row(cells: Sequence[str]) -> str:
    """A row of Markdown."""
    return f"| {' | '.join(cells)} |"
