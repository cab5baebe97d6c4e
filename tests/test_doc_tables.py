"""Tables in docs/ come from committed lines, and verdicts on claims from numbers."""

import pytest

from benchmarks import claims, tables

RESULTS = tables.read(tables.FOLDER)
SPECS = tables.tomllib.loads(tables.SPECS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", tables.pages(), ids=lambda path: path.name)
def test_pages_are_what_the_lines_say(path):
    assert tables.filled(path, SPECS, RESULTS) == path.read_text(encoding="utf-8"), "run: python -m benchmarks.tables"


def test_every_table_and_paper_is_on_a_page():
    text = "\n".join(path.read_text(encoding="utf-8") for path in tables.pages())
    papers = tables.tomllib.loads(claims.PATH.read_text(encoding="utf-8"))
    assert [name for name in SPECS if f"<!-- lines: {name} -->" not in text] == []
    assert [name for name in papers if f"<!-- claims: {name} -->" not in text] == []


def line(case, metric, value, *, ratio=None, peer=None):
    return {"case": case, "metric": metric, "value": value, "ratio": ratio, "peer": peer, "unit": "ms", "commit": "abc"}


LINES = {
    "speed": [
        line("a", "step", 2.5, ratio=3.0, peer="torch"),
        line("a", "step", 2.5, ratio=5.0, peer="FBGEMM"),
        line("b", "step", 1234.5, ratio=4.0, peer="torch"),
        line("b", "base", 617.25),
        line("b", "more", 617.25),
    ]
}


@pytest.fixture
def page(tmp_path):
    """Fills a page with one block, by specs, and gives its lines."""

    def fill(block, **spec):
        path = tmp_path / "page.md"
        path.write_text(f"Before.\n\n<!-- {block} -->\nold\n<!-- end -->\n\nAfter.\n")
        return tables.filled(path, {"speed": {"files": ["speed"], **spec}}, LINES).splitlines()

    return fill


def test_a_block_is_replaced_and_nothing_else(page):
    found = page("lines: speed", columns={"step": "a step", "base": "base"}, note="On a desk.")
    assert found[:3] == ["Before.", "", "<!-- lines: speed -->"]
    assert found[3:7] == [
        "| case | a step | base |",
        "| --- | --- | --- |",
        "| a | 2.5 ms (3.00x torch) |  |",
        "| b | 1,234 ms (4.00x torch) | 617.2 ms |",
    ]
    assert found[7:] == ["", "On a desk. Measured at commit abc.", "<!-- end -->", "", "After."]


def test_without_columns_every_line_is_a_row(page):
    rows = [row for row in page("lines: speed", pattern="^step|^more", cases="b") if row.startswith("| b")]
    assert rows == ["| b | step | 1,234 ms (4.00x torch) |", "| b | more | 617.2 ms |"]


def test_what_is_absent_is_named(page):
    for block, spec, match in (
        ("lines: sped", {}, "no table is called 'sped'"),
        ("lines: speed", {"cases": "c"}, r"table 'speed' finds no line of speed\.jsonl"),
        ("claims: SPED", {}, "no paper is called 'SPED'"),
        ("claims: OPER", {}, r"OPER, Figure 6: oper\.jsonl has no"),
    ):
        with pytest.raises(SystemExit, match=match):
            page(block, **spec)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2.5, 1234.5]),
        ({"ratio": True, "peer": "torch"}, [3.0, 4.0]),
        ({"ratio": True, "peer": "FBGEMM"}, [5.0]),
        ({"case": "b", "by": "base"}, [2.0]),
        ({"case": "b", "metric": ["step", "more"], "by": ["base", "more"], "inverse": True}, [2 / 3]),
    ],
)
def test_figures_are_found_by_case_metric_and_peer(options, expected):
    claim = {"jrec": [{"file": "speed", "metric": "step", **options}]}
    assert claims.figures(claim, LINES) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file": "none"}, "none.jsonl has no 'step'"),
        ({"case": "^c$"}, "has no 'step' of a case like"),
        ({"by": "base"}, "lacks a value of .*'base'.* of 'a'"),
        ({"case": "b", "metric": "base", "ratio": True}, "lacks a ratio"),
    ],
)
def test_an_absent_figure_is_an_error(options, message):
    with pytest.raises(LookupError, match=message):
        claims.figures({"jrec": [{"file": "speed", "metric": "step", **options}]}, LINES)


@pytest.mark.parametrize(
    ("rule", "values", "verdict"),
    [
        ({"paper": 2.0}, [1.89], "missed"),
        ({"paper": 2.0}, [1.91], "holds"),
        ({"paper": 2.0}, [2.11], "beyond"),
        ({"paper": 2.0}, [5.0, 1.0], "missed"),
        ({"paper": 2.0, "count": "best"}, [5.0, 1.0], "beyond"),
        ({"paper": 2.0, "count": "mean"}, [3.0, 1.0], "holds"),
        ({"paper": 2.0, "better": "less"}, [1.0, 4.0], "missed"),
        ({"paper": 2.0, "better": "less", "count": "best"}, [1.0, 4.0], "beyond"),
        ({"lost": 0.1}, [0.1, -0.5], "holds"),
        ({"lost": 0.1}, [0.11], "missed"),
        ({"noise": 0.001}, [1.002, 1.01], "holds"),
        ({"noise": 0.001}, [1.01, 1.001], "missed"),
        ({"open": "open until a GPU"}, [], "open until a GPU"),
    ],
)
def test_verdicts_are_by_numbers(rule, values, verdict):
    assert claims.verdict(rule, [values] if values else []) == verdict
