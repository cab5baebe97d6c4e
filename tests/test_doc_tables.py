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


def test_no_committed_line_is_unsteady():
    unsteady = [
        f"{file}: {line['case']}, {line['metric']}"
        for file, lines in RESULTS.items()
        for line in lines
        if (line.get("details") or {}).get("unsteady")
    ]
    assert unsteady == [], "another program took part in these: measure them anew"


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


def test_each_gpu_has_its_rows_and_is_named(tmp_path):
    (tmp_path / "h100").mkdir()
    (tmp_path / "h200").mkdir()
    for gpu, value in (("H100 80GB HBM3", 2.0), ("H200", 1.0)):
        measured = {**line("a", "step", value), "device": f"NVIDIA {gpu}; a CPU, 16 cores"}
        (tmp_path / gpu[:4].lower() / "speed.jsonl").write_text(tables.json.dumps(measured) + "\n")
    spec = {"files": ["speed"], "columns": {"step": "a step"}, "note": "On one {devices}."}
    rows = list(tables.table({"speed": spec}, "speed", tables.read(tmp_path)))
    assert rows[2:] == [
        "| a, H100 80GB HBM3 | 2 ms |",
        "| a, H200 | 1 ms |",
        "\nOn one H100 80GB HBM3 and one H200. Measured at commit abc.",
    ]


def test_a_place_may_wait_for_its_lines(page):
    assert page("lines: speed", cases="none", optional=True)[2:5] == [
        "<!-- lines: speed -->",
        "Not measured yet.",
        "<!-- end -->",
    ]


def test_what_is_absent_is_named(page):
    for block, spec, match in (
        ("lines: sped", {}, "no table is called 'sped'"),
        ("lines: speed", {"cases": "c"}, r"table 'speed' finds no line of speed\.jsonl"),
        ("claims: SPED", {}, "no paper is called 'SPED'"),
        ("claims: OPER", {}, r"OPER, Section 4.2: oper_partitions\.jsonl has no"),
    ):
        with pytest.raises(SystemExit, match=match):
            page(block, **spec)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"a": 2.5, "b": 1234.5}),
        ({"ratio": True, "peer": "torch"}, {"a": 3.0, "b": 4.0}),
        ({"ratio": True, "peer": "FBGEMM"}, {"a": 5.0}),
        ({"case": "b", "by": "base"}, {"b": 2.0}),
        ({"case": "b", "metric": ["step", "more"], "by": ["base", "more"], "inverse": True}, {"b": 2 / 3}),
        ({"case": "b", "minus": "base", "scale": 2}, {"b": 1234.5}),
        ({"by_case": ["b", "a"], "scale": 0.5}, {"b": 246.9}),
    ],
)
def test_figures_are_found_by_case_metric_and_peer(options, expected):
    found = claims.values({"file": "speed", "metric": "step", **options}, LINES)
    assert found == pytest.approx(expected)


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
        claims.values({"file": "speed", "metric": "step", **options}, LINES)


@pytest.mark.parametrize(
    ("rule", "value", "outcome"),
    [
        ({"paper": 2.0}, 1.89, "missed"),
        ({"paper": 2.0}, 1.91, "holds"),
        ({"paper": 2.0}, 2.11, "beyond"),
        ({"paper": 2.0, "better": "less"}, 2.11, "missed"),
        ({"paper": 2.0, "better": "less"}, 2.09, "holds"),
        ({"paper": 2.0, "better": "less"}, 1.0, "beyond"),
        ({"at_most": 0.1}, 0.1, "holds"),
        ({"at_most": 0.1}, 0.11, "missed"),
        ({"at_most": 0.1}, -5.0, "holds"),
        ({"at_least": 1.001}, 1.001, "holds"),
        ({"at_least": 1.001}, 1.0, "missed"),
    ],
)
def test_outcomes_are_by_numbers(rule, value, outcome):
    assert claims.outcome(rule, value) == outcome


SPEED = {"of": "speed", "file": "speed", "metric": "step", "ratio": True}  # 3 and 4 times torch's, 5 times FBGEMM's


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ([{**SPEED, "peer": "torch", "paper": 2.0}], "beyond"),
        ([{**SPEED, "peer": "torch", "paper": 3.0}], "holds"),
        ([{**SPEED, "peer": "torch", "paper": 3.5}], "missed"),
        ([{**SPEED, "peer": "FBGEMM", "paper": 2.0}, {**SPEED, "peer": "torch", "paper": 3.5}], "missed"),
        ([{**SPEED, "peer": "FBGEMM", "paper": 2.0}, {**SPEED, "peer": "torch", "at_least": 2.0}], "holds"),
    ],
)
def test_the_worst_value_of_the_worst_figure_decides(figures, verdict):
    assert claims.verdict({"jrec": figures}, LINES) == verdict
    assert claims.verdict({"jrec": figures[::-1]}, LINES) == verdict
    assert claims.verdict({"jrec": figures, "open": "open until a GPU"}, LINES) == "open until a GPU"


def test_a_case_may_not_be_left_out_without_a_reason():
    kind = {**SPEED, "peer": "torch", "paper": 4.0, "case": "b"}
    with pytest.raises(LookupError, match=r"speed\.jsonl has 'step' of 'a' and 0 more cases, which no figure takes"):
        claims.verdict({"jrec": [kind]}, LINES)
    with pytest.raises(LookupError, match="of 'a'"):  # to show it is not to judge it
        claims.verdict({"jrec": [kind], "beside": [{**kind, "case": "a"}]}, LINES)
    assert claims.verdict({"jrec": [kind], "left_out": [{"case": "a", "because": "another machine"}]}, LINES) == "holds"
    both = {"jrec": [kind, {**kind, "case": "a", "paper": 3.0}]}
    assert claims.verdict(both, LINES) == "holds"
    with pytest.raises(LookupError, match="left_out has a, which no case of a judged metric needs"):
        claims.verdict({**both, "left_out": [{"case": "a", "because": "another machine"}]}, LINES)


@pytest.mark.parametrize(
    ("paper", "better", "verdict"),
    [
        ([3.0, 4.0], "more", "holds"),
        ([2.0, 3.0], "more", "beyond"),
        ([2.0, 9.5], "more", "missed"),  # by the better end
        ([3.5, 3.6], "more", "missed"),  # by the worse end
        ([4.0, 3.0], "less", "holds"),
        ([4.0, 1.0], "less", "missed"),
        ([9.0, 8.0], "less", "beyond"),
    ],
)
def test_a_range_is_judged_by_the_harder_of_its_ends(paper, better, verdict):
    figure = {**SPEED, "peer": "torch", "paper": paper, "better": better}  # 3 and 4
    assert claims.verdict({"jrec": [figure]}, LINES) == verdict


def test_every_claim_names_what_measures_it():
    for paper in claims.tomllib.loads(claims.PATH.read_text(encoding="utf-8")).values():
        for where, claim in paper.items():
            impossible = claim.get("open") in ("open", "open until a GPU") and "jrec" not in claim
            assert bool(claims.commands(claim)) != impossible, where
    with pytest.raises(LookupError, match=r"modules\.toml names no command of none"):
        claims.commands({"jrec": [{"file": "none"}]})
    with pytest.raises(LookupError, match="needs the command that would measure it"):
        claims.commands({"open": "not measured"})


@pytest.mark.parametrize("rules", [{}, {"paper": 1.0, "at_most": 1.0}])
def test_a_judged_figure_has_one_rule(rules):
    with pytest.raises(LookupError, match="'speed' needs one rule"):
        claims.verdict({"jrec": [{**SPEED, **rules}]}, LINES)


def test_the_page_shows_the_worst_value_first_and_what_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(claims.ages, "modules", lambda: {"speed": {"command": "run speed"}})
    path = tmp_path / "benchmarks" / "claims.toml"
    path.parent.mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "speed.md").write_text("<!-- claims: Paper -->")
    path.write_text(
        """
        [Paper."Figure 1"]
        says = "fast"
        difference = "None."
        jrec = [{ of = "by torch", paper = 3, case = "a", file = "speed", metric = "step", ratio = true, peer = "to" }]
        beside = [{ of = "time", unit = " ms", better = "less", file = "speed", metric = "step" }]
        left_out = [{ case = "b", because = "the machine broke" }]

        [Paper."Figure 2"]
        says = "faster"
        difference = "None."
        jrec = [{ of = "by torch", own="b", paper = [2,9], file = "speed", metric = "step", ratio = true, peer = "t" }]
        beside = [{ of = "time", own = "a", unit = " ms", better = "less", file = "speed", metric = "step" }]

        [Paper."Figure 3"]
        says = "warm"
        open = "not measured"
        difference = "Nobody has."
        command = "feel"
        """
    )
    monkeypatch.setattr(claims, "PATH", path)
    rows = list(claims.table("Paper", LINES))
    shown = "by torch: **3×**; beside: time: **1,234 ms** (b) to 2.5 ms"  # noqa: RUF001
    end = "None. Left out: the machine broke. | `run speed` |"
    assert rows[2] == f"| Figure 1 | fast | {shown} | not measured | **holds** | {end}"
    shown = "by torch: **3×** (a) to 4×; beside: time: **1,234 ms** (b) to 2.5 ms"  # noqa: RUF001
    own = "by torch: 4×, missed; time: 2.5 ms"  # noqa: RUF001
    assert rows[3] == f"| Figure 2 | faster | {shown} | {own} | **missed** | None. | `run speed` |"
    assert rows[4] == "| Figure 3 | warm |  |  | **not measured** | Nobody has. | `feel` |"
    assert rows[5] == "\nLines and their commits: speed at abc."
    assert list(claims.table(None, LINES))[2] == "| [Paper](speed.md#paper) |  | 1 | 1 |  | 1 |  |"
