"""Writes docs/results.md: what the five papers claim, and what jrec measures, from committed lines.

Claims and where their figures lie are in benchmarks/claims/; verdicts come from rules on the figures.

Examples:
  python -m benchmarks.results
  python -m benchmarks.results --check
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Mapping

from benchmarks.claims.claim import SAME, VERDICTS, Claim, Figure, MissingLineError, Paper, Rule
from benchmarks.claims.el_rec import EL_REC
from benchmarks.claims.fae import FAE
from benchmarks.claims.oper import OPER
from benchmarks.claims.tensor_casting import TENSOR_CASTING
from benchmarks.claims.tt_rec import TT_REC
from benchmarks.harness import ROOT
from benchmarks.page import Results, anchor, number, read_folder

PAPERS = (TT_REC, EL_REC, FAE, TENSOR_CASTING, OPER)
FOLDER = ROOT / "benchmarks" / "results" / "cpu-2-cores"
PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"
COMMANDS = {
    "accuracy_tt": "python -m benchmarks.accuracy_tt",
    "casting": "python -m benchmarks.casting",
    "casting_counted": "python -m benchmarks.casting --counted",
    "casting_overlap": "python -m benchmarks.casting_overlap",
    "fae_calibration": "python -m benchmarks.fae --part calibration",
    "fae_training": "python -m benchmarks.fae --part training",
    "oper": "python -m benchmarks.oper",
    "pipeline": "python -m benchmarks.pipeline",
    "reorder": "python -m benchmarks.reorder",
    "tt": "python -m benchmarks.tt --device cpu",
    "tt_footprints": "python -m benchmarks.tt --parts footprints",
}
HEAD = f"""# Results

What the five papers claim, and what jrec measures. `python -m benchmarks.results` writes this page from the lines in
`benchmarks/results/`; every line has its machine, versions and commit, and [the appendix](performance.md) shows them
all. **Nothing here ran on a GPU yet**: all times are of two cores of a CPU, so believe ratios, not milliseconds.

Verdicts are computed, not typed: *holds* within {100 * SAME:g} % of the paper's figure (for an accuracy: not more
lost), *beyond* if better, *missed* if worse. *Open until a GPU* is what only a GPU can show; *open* is what has not
been measured, with the reason.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A claim with jrec's figures.

    Attributes:
      claim: The claim.
      values: The values of each of its figures.
    """

    claim: Claim
    values: tuple[tuple[float, ...], ...]

    @property
    def verdict(self) -> str:
        """By the claim's rule."""
        return self.claim.rule.verdict(self.values[0] if self.values else ())


def main() -> None:
    """Writes the page and its figures, or compares the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page would change")
    arguments = parser.parse_args()
    results = read_folder(FOLDER)
    text = render(results)
    if arguments.check:
        sys.exit(int(PAGE.read_text(encoding="utf-8") != text))
    PAGE.write_text(text, encoding="utf-8")
    for paper in PAPERS:
        draw(paper, answers_of(paper, results), FIGURES / picture(paper))


def answers_of(paper: Paper, results: Mapping[str, Results]) -> list[Answer]:
    """A paper's claims with figures.

    Raises:
      SystemExit: A figure's line is absent; it names the claim and the file.
    """
    answers = []
    for claim in paper.claims:
        try:
            values = tuple(tuple(figure.values(results)) for figure in claim.figures)
        except MissingLineError as error:
            raise SystemExit(f"{paper.name}, {claim.where}: {error}; run the benchmark, or change the claim") from None
        answers.append(Answer(claim=claim, values=values))
    return answers


def render(results: Mapping[str, Results]) -> str:
    """The page's text."""
    answered = {paper.name: answers_of(paper, results) for paper in PAPERS}
    parts = [HEAD, "\n".join(_summary(answered))]
    parts += ["\n".join(_section(paper, answered[paper.name], results)) for paper in PAPERS]
    return "\n".join(parts) + "\n"


def _summary(answered: Mapping[str, list[Answer]]) -> Iterator[str]:
    yield _row(("paper", *VERDICTS))
    yield _row(["---"] * (1 + len(VERDICTS)))
    for name, answers in answered.items():
        counts = collections.Counter(answer.verdict for answer in answers)
        yield _row((f"[{name}](#{anchor(name)})", *(str(counts[verdict] or "") for verdict in VERDICTS)))
    yield ""


def _section(paper: Paper, answers: list[Answer], results: Mapping[str, Results]) -> Iterator[str]:
    yield f"## {paper.name}\n\n{paper.title}. Measured on {paper.hardware}.\n"
    yield f"![jrec's figures by those of {paper.name}](figures/{picture(paper)})\n"
    yield _row(("where", "the paper", "jrec", "verdict", "the difference"))
    yield _row(["---"] * 5)
    for answer in answers:
        claim = answer.claim
        found = "; ".join(_text(f, v) for f, v in zip(claim.figures, answer.values, strict=True))
        yield _row((claim.where, claim.says, found, f"**{answer.verdict}**", claim.difference))
    yield ""
    for file in dict.fromkeys(figure.file for claim in paper.claims for figure in claim.figures):
        lines = results[file].lines
        commits, devices = (", ".join(dict.fromkeys(line[key] for line in lines)) for key in ("commit", "device"))
        yield f"- `{COMMANDS[file]}`: {file}.jsonl, {devices}, commit {commits}"
    yield ""


def _text(figure: Figure, values: tuple[float, ...]) -> str:
    least, greatest = min(values), max(values)
    shown = number(least) if number(least) == number(greatest) else f"{number(least)} to {number(greatest)}"
    return f"**{shown}{figure.unit}** {figure.of}"


def draw(paper: Paper, answers: list[Answer], path: pathlib.Path) -> None:
    """A bar a claim that has a figure: jrec's by the paper's, to the right of 1 where jrec's is better."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    bars = [
        (answer.claim.where, answer.claim.rule.advantage(answer.values[0]), answer.verdict)
        for answer in answers
        if isinstance(answer.claim.rule, Rule)
    ]
    colors = {"holds": "#4c9f70", "beyond": "#2b6cb0", "missed": "#c0504d"}
    with mpl.rc_context({"svg.hashsalt": paper.name, "svg.fonttype": "none", "font.size": 9}):
        canvas = Canvas(figsize=(7, 0.6 + 0.32 * len(bars)), layout="constrained")
        axes = canvas.subplots()
        for place, (_, advantage, verdict) in enumerate(reversed(bars)):
            axes.barh(place, advantage - 1, left=1, color=colors[verdict], height=0.6)
            axes.annotate(
                f" {number(advantage)}×, {verdict} ",
                (advantage, place),
                ha="left" if advantage >= 1 else "right",
                va="center",
            )
        axes.set_yticks(range(len(bars)), [where for where, *_ in reversed(bars)])
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}×")
        axes.xaxis.set_minor_formatter("")
        least, most = min(b[1] for b in bars), max(b[1] for b in bars)
        axes.set_xlim(min(0.5, 0.25 * least), max(2, 4 * most))
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel("jrec's figure by the paper's, right of 1 is better")
        axes.spines[["top", "right"]].set_visible(False)
        canvas.savefig(path, metadata={"Date": None})


def picture(paper: Paper) -> str:
    """The file of a paper's figure in docs/figures."""
    return f"results_{anchor(paper.name).replace('-', '_')}.svg"


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
