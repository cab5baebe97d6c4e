"""What the papers claim beside jrec's figures, and verdicts on it. claims.toml says how a claim is written.

A claim's verdict is that of the worst value of its worst figure. Where the paper's figure is a range, the worst value
is judged by the range's worse end and the best value by its better end, and the harder of the two counts. A figure
takes every case of its metric, or names those that it takes; what no figure of the claim takes has to be left out by
name, with a reason that the page shows.
"""

from __future__ import annotations

import collections
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import ages

PATH = pathlib.Path(__file__).with_suffix(".toml")
OUTCOMES = ("missed", "holds", "beyond")
"""What a value comes to, from the worst to the best."""
VERDICTS = (*OUTCOMES[::-1], "open until a GPU", "not measured", "open")
RULES = ("paper", "at_most", "at_least")
ALL = "all of it"
"""Where every case of a figure is at the paper's own setting."""
SAME = 0.05
"""A figure within 5 % of the paper's is the same: the rest is rounding, and which vocabulary was counted."""

Claim = Mapping[str, Any]
Figure = Mapping[str, Any]
Lines = Sequence[Mapping[str, Any]]


def table(paper: str | None, results: Mapping[str, Any]) -> Iterator[str]:
    """The lines of Markdown of a paper's claims; without a paper, of how many of each paper got which verdict.

    Raises:
      LookupError: There is no such paper, a claim's lines are absent, or it leaves out a case without saying so.
    """
    papers = tomllib.loads(PATH.read_text(encoding="utf-8"))
    if paper is None:
        yield row(["paper", *VERDICTS])
        yield row(["---"] * (1 + len(VERDICTS)))
        for name, claims in papers.items():
            counts = collections.Counter(verdict(claim, results) for claim in claims.values())
            anchor = f"{_page_of(name)}#{name.lower().replace(' ', '-')}"
            yield row([f"[{name}]({anchor})", *(str(counts[v] or "") for v in VERDICTS)])
        return
    if paper not in papers:
        raise LookupError(f"no paper is called {paper!r}; add it to {PATH.name}")
    yield row(["where", "the paper", "jrec", "at the paper's own setting", "verdict", "the difference", "command"])
    yield row(["---"] * 7)
    for where, claim in papers[paper].items():
        try:
            said = f"**{verdict(claim, results)}**"
            shown = [_shown(figure, results) for figure in claim.get("jrec", ())]
            shown += [f"beside: {_shown(figure, results)}" for figure in claim.get("beside", ())]
            at_own = [figure for figure in _all_figures(claim) if "own" in figure]
            own = [_at_own_setting(figure, results, named=len(at_own) > 1) for figure in at_own]
            if any(one != ALL for one in own) or len(own) < len(claim.get("jrec", ())):
                own = [f"{f['of']}: all of it" if one == ALL else one for f, one in zip(at_own, own, strict=True)]
        except LookupError as error:
            raise LookupError(f"{paper}, {where}: {error.args[0]}; run the benchmark, or change the claim") from None
        left_out = [f"Left out: {cases['because']}." for cases in claim.get("left_out", ())]
        own = own or ["not measured"] * ("open" not in claim)
        cells = ["; ".join(shown), "; ".join(dict.fromkeys(own)), said, " ".join([claim["difference"], *left_out])]
        yield row([where, claim["says"], *cells, "; ".join(commands(claim)) or "none"])
    files = {figure["file"] for claim in papers[paper].values() for figure in _all_figures(claim)}
    measured = (f"{file} at {', '.join(sorted({line['commit'] for line in results[file]}))}" for file in sorted(files))
    yield f"\nLines and their commits: {'; '.join(measured)}.{ages.note(files)}"


def _page_of(paper: str) -> str:
    """The page of docs/ that has a paper's claims."""
    for page in sorted((PATH.parents[1] / "docs").glob("*.md")):
        if f"<!-- claims: {paper} -->" in page.read_text(encoding="utf-8"):
            return page.name
    raise LookupError(f"no page of docs/ has <!-- claims: {paper} -->")


def verdict(claim: Claim, results: Mapping[str, Any]) -> str:
    """One of ``VERDICTS``: why the claim is open, or what the worst value of all its figures comes to.

    Raises:
      LookupError: A figure's lines are absent, or cases of its metric are neither judged nor left out by name.
    """
    if "open" in claim:
        return claim["open"]
    unneeded = {cases["case"] for cases in claim.get("left_out", ())}
    for figure in claim["jrec"]:
        unneeded -= _check_every_case_is_named(figure, claim, results)
    if unneeded:
        raise LookupError(
            f"left_out has {', '.join(sorted(unneeded))}, which no case of a judged metric needs: delete it"
        )
    return min((judged(figure, values(figure, results)) for figure in claim["jrec"]), key=OUTCOMES.index)


def judged(figure: Figure, found: Mapping[str, float]) -> str:
    """What the worst of a figure's values comes to; of a range of the paper's, the harder of its two ends."""
    worst, best = (found[case] for case in _worst_and_best(figure, found))
    if isinstance(paper := figure.get("paper"), list):
        ends = [outcome({**figure, "paper": end}, value) for end, value in zip(paper, (worst, best), strict=True)]
        return min(ends, key=OUTCOMES.index)
    return outcome(figure, worst)


def outcome(figure: Figure, value: float) -> str:
    """One of ``OUTCOMES``, by the figure's rule."""
    if "at_most" in figure:
        return "holds" if value <= figure["at_most"] else "missed"
    if "at_least" in figure:
        return "holds" if value >= figure["at_least"] else "missed"
    advantage = figure["paper"] / value if figure.get("better") == "less" else value / figure["paper"]
    return "missed" if advantage < 1 - SAME else "beyond" if advantage > 1 + SAME else "holds"


def values(figure: Figure, results: Mapping[str, Any]) -> dict[str, float]:
    """The figure's value of every case that fits, by the case.

    Raises:
      LookupError: No line fits, or one that the figure is divided by or taken from is absent.
    """
    metrics, divisors, subtracted = (_names(figure.get(key, [])) for key in ("metric", "by", "minus"))
    field, file = "ratio" if figure.get("ratio") else "value", f"{figure['file']}.jsonl"
    found: dict[tuple[str, str], float | None] = {}
    for line in _lines(figure, results):
        found.setdefault((line["case"], line["metric"]), line[field])

    def total(case: str, metrics: Sequence[str]) -> float:
        numbers = [value for metric in metrics if (value := found.get((case, metric))) is not None]
        if len(numbers) < len(metrics):
            raise LookupError(f"{file} lacks a {field} of {metrics} of {case!r}")
        return sum(numbers)

    cases = [case for case, metric in found if metric == metrics[0] and re.search(figure.get("case", ""), case)]
    if not cases:
        raise LookupError(f"{file} has no {figure['metric']!r} of a case like {figure.get('case', '')!r}")
    if "by_case" in figure:
        here, there = figure["by_case"]
        cases = [case for case in cases if here in case]
        compared = {case: total(case, metrics) / total(case.replace(here, there), metrics) for case in cases}
        return {case: figure.get("scale", 1) * value for case, value in compared.items()}
    made = {
        case: figure.get("scale", 1)
        * (total(case, metrics) - total(case, subtracted))
        / (total(case, divisors) if divisors else 1)
        for case in cases
    }
    return {case: 1 / value for case, value in made.items()} if figure.get("inverse") else made


def _check_every_case_is_named(figure: Figure, claim: Claim, results: Mapping[str, Any]) -> set[str]:
    """The patterns of ``left_out`` that this figure's metric needs."""
    rule = [name for name in RULES if name in figure]
    if len(rule) != 1:
        raise LookupError(f"the figure {figure['of']!r} needs one rule of {', '.join(RULES)}; it has {rule or 'none'}")
    alike = [f for f in claim["jrec"] if all(f.get(k) == figure.get(k) for k in ("file", "metric", "by", "peer"))]
    field, metric = "ratio" if figure.get("ratio") else "value", _names(figure["metric"])[0]
    lines = [line for line in _lines(figure, results) if line["metric"] == metric and line[field] is not None]
    cases = dict.fromkeys(line["case"] for line in lines)
    others = [case for case in cases if not any(re.search(f.get("case", ""), case) for f in alike)]
    patterns = {case: [p["case"] for p in claim.get("left_out", ()) if re.search(p["case"], case)] for case in others}
    if unnamed := [case for case, found in patterns.items() if not found]:
        raise LookupError(
            f"{figure['file']}.jsonl has {figure['metric']!r} of {unnamed[0]!r} and {len(unnamed) - 1} more cases,"
            " which no figure takes: add them, or leave them out by left_out, with the reason"
        )
    return {pattern for found in patterns.values() for pattern in found}


def _lines(figure: Figure, results: Mapping[str, Any]) -> Lines:
    return [line for line in results.get(figure["file"], []) if re.search(figure.get("peer", ""), line["peer"] or "")]


def _names(name: str | Sequence[str]) -> Sequence[str]:
    return [name] if isinstance(name, str) else name


def _all_figures(claim: Claim) -> list[Figure]:
    return [*claim.get("jrec", ()), *claim.get("beside", ())]


def _shown(figure: Figure, results: Mapping[str, Any]) -> str:
    """What a figure is of, its worst value with that one's case, and its best."""
    found, unit = values(figure, results), figure.get("unit", "×")  # noqa: RUF001
    worst, best = _worst_and_best(figure, found)
    shown = f"{figure['of']}: **{number(found[worst])}{unit}**"
    return shown if len(found) == 1 else f"{shown} ({worst}) to {number(found[best])}{unit}"


def _at_own_setting(figure: Figure, results: Mapping[str, Any], *, named: bool) -> str:
    """A figure's worst value among the cases at the paper's own setting, and what it comes to; ``named``: of what."""
    every = values(figure, results)
    found = {case: value for case, value in every.items() if re.search(figure["own"], case)}
    if not found:
        raise LookupError(f"the figure {figure['of']!r} has no case like its own setting {figure['own']!r}")
    if len(found) == len(every):
        return ALL
    worst, best = _worst_and_best(figure, found)
    unit = figure.get("unit", "×")  # noqa: RUF001
    end = f" to {number(found[best])}{unit}" if isinstance(figure.get("paper"), list) and len(found) > 1 else ""
    said = f", {judged(figure, found)}" if any(rule in figure for rule in RULES) else ""
    return f"{figure['of']}: " * named + f"{number(found[worst])}{unit}{end}{said}"


def _worst_and_best(figure: Figure, found: Mapping[str, float]) -> tuple[str, str]:
    """The cases of a figure's worst and best values."""
    less_is_better = "at_most" in figure or figure.get("better") == "less"
    worst, *_, best = sorted([*found, *found], key=lambda case: found[case], reverse=less_is_better)
    return worst, best


def commands(claim: Claim) -> list[str]:
    """What measures a claim's figures, or would: its own command, else those of its files.

    Raises:
      LookupError: A file has no command in results/modules.toml, or what is not measured names none.
    """
    said = ages.modules()
    files = dict.fromkeys(figure["file"] for figure in _all_figures(claim))
    found = [claim["command"]] if "command" in claim else [said.get(file, {}).get("command") for file in files]
    if None in found:
        raise LookupError(f"results/modules.toml names no command of {', '.join(files)}")
    if not found and claim.get("open") == "not measured":
        raise LookupError("what is not measured needs the command that would measure it")
    return [f"`{command}`" for command in dict.fromkeys(found)]


def number(value: float) -> str:
    """A figure of three to four digits."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 10 else f"{value:.4g}"


def row(cells: Sequence[str]) -> str:
    """A row of Markdown."""
    return f"| {' | '.join(cells)} |"
