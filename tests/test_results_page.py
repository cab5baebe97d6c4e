"""docs/results.md: equal to what the committed lines say, every table and figure answered, verdicts by numbers."""

import pytest

from benchmarks import results
from benchmarks.claims.claim import GPU, OPEN, VERDICTS, Best, Claim, Figure, Lost, MissingLineError, Paper, Rule
from benchmarks.page import Results, read_folder


def line(case, metric, value, *, ratio=None, peer=None):
    return {"case": case, "metric": metric, "value": value, "ratio": ratio, "peer": peer, "unit": "ms"}


LINES = {
    "speed": Results(
        lines=(
            line("a", "step", 2.0, ratio=3.0, peer="torch"),
            line("a", "step", 2.0, ratio=5.0, peer="FBGEMM"),
            line("b", "step", 4.0, ratio=4.0, peer="torch"),
            line("b", "base", 8.0),
            line("b", "more", 2.0),
        )
    )
}


def figure(**options):
    return Figure(**{"file": "speed", "case": "", "metric": "step", "of": "steps", **options})


def test_the_page_is_what_the_lines_say():
    found = results.render(read_folder(results.FOLDER))
    assert results.PAGE.read_text(encoding="utf-8") == found, "run: python -m benchmarks.results"


@pytest.mark.parametrize("paper", results.PAPERS, ids=lambda paper: paper.name)
def test_every_table_and_figure_of_a_paper_has_a_verdict_and_a_difference(paper):
    assert sorted(claim.where for claim in paper.claims) == sorted(paper.evaluation)
    for answer in results.answers_of(paper, read_folder(results.FOLDER)):
        assert answer.verdict in VERDICTS
        assert answer.claim.says
        assert answer.claim.difference
    assert (results.FIGURES / results.picture(paper)).is_file()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2.0, 4.0]),
        ({"ratio": True, "peer": "torch"}, [3.0, 4.0]),
        ({"ratio": True, "peer": "FBGEMM"}, [5.0]),
        ({"case": "^b$", "by": "base"}, [0.5]),
        ({"case": "^b$", "metric": ("step", "more"), "by": ("base", "more")}, [0.6]),
    ],
)
def test_figures_are_found_by_case_metric_and_peer(options, expected):
    assert figure(**options).values(LINES) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file": "none"}, "there is no none.jsonl"),
        ({"case": "^c$"}, "has no 'step' of a case like"),
        ({"metric": "stop"}, "has no 'stop'"),
        ({"by": "base"}, "has no 'base' of 'a'"),
        ({"case": "b", "metric": "base", "ratio": True}, "has no ratio"),
    ],
)
def test_an_absent_line_is_an_error_that_names_the_claim(options, message):
    with pytest.raises(MissingLineError, match=message):
        figure(**options).values(LINES)
    claim = Claim(where="Table 9", says="fast", rule=GPU, difference="none", figures=(figure(**options),))
    paper = Paper(name="P", title="P", hardware="H", evaluation=("Table 9",), claims=(claim,))
    with pytest.raises(SystemExit, match=f"P, Table 9: .*{message}"):
        results.answers_of(paper, LINES)


@pytest.mark.parametrize(
    ("rule", "values", "verdict"),
    [
        (Rule(paper=2.0), [1.89], "missed"),
        (Rule(paper=2.0), [1.91], "holds"),
        (Rule(paper=2.0), [2.09], "holds"),
        (Rule(paper=2.0), [2.11], "beyond"),
        (Rule(paper=2.0), [5.0, 1.0], "missed"),
        (Rule(paper=2.0, of="best"), [5.0, 1.0], "beyond"),
        (Rule(paper=2.0, of="mean"), [3.0, 1.0], "holds"),
        (Rule(paper=2.0, better="less"), [1.0, 4.0], "missed"),
        (Rule(paper=2.0, better="less"), [1.0], "beyond"),
        (Rule(paper=2.0, better="less", of="best"), [1.0, 4.0], "beyond"),
        (Lost(paper=0.1), [0.1, -0.5], "holds"),
        (Lost(paper=0.1), [0.11], "missed"),
        (Best(noise=0.001), [1.002, 1.01], "holds"),
        (Best(noise=0.001), [1.01, 1.001], "missed"),
        (GPU, [], "open until a GPU"),
        (OPEN, [9.0], "open"),
    ],
)
def test_verdicts_are_by_numbers(rule, values, verdict):
    assert rule.verdict(values) == verdict


def test_a_claim_with_a_verdict_needs_a_figure():
    with pytest.raises(ValueError, match="Table 1: a claim with a verdict needs a figure"):
        Claim(where="Table 1", says="fast", rule=Rule(paper=1.0), difference="none")
