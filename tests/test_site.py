"""README and docs/: links and anchors lead somewhere, pages are in the navigation, and snippets name what exists."""

import ast
import json
import pathlib
import re

import pytest

import jrec
from scripts import site_hooks, site_pictures

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page):
    """GitHub's anchors of a page's headings."""
    found, text = [], re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return found


def broken_links(page):
    """Relative links of a page that lead nowhere, outside of code."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page):
    assert not broken_links(page)


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n## What `it` says, now\n\n[a](page.md#what-it-says-now) [b](gone.md) [c](#gone) `[d](gone.md)`\n"
    )
    assert broken_links(page) == ["gone.md", "#gone"]


def test_the_navigation_has_every_page():
    named = re.findall(r"^\s+- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_a_page_is_read_in_one_sitting():
    """Pages that tell of one thing; those that list every key, name or claim are not read from end to end."""
    lists = ("configuration.md", "results_tensor_trains.md", "results_hot_rows.md", "results_placement.md")
    told = [page for page in DOCS.rglob("*.md") if page.parent.name != "api" and page.name not in lists]
    words = {str(page.relative_to(DOCS)): len(page.read_text().split()) for page in told}
    assert len(words) > 40
    assert not {page: count for page, count in words.items() if count > 2_500}


def test_every_program_has_a_page_that_shows_it():
    programs = {path.stem for path in (ROOT / "examples").glob("*.py")}
    pages = {path.stem: path.read_text() for path in (DOCS / "how_to").glob("*.md") if path.stem != "index"}
    assert programs == set(pages)
    assert all(f'--8<-- "examples/{name}.py"' in text for name, text in pages.items())


def test_the_readme_is_short_and_honest():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120
    assert "several GPUs are not measured yet" in text[: text.index("## Two commands")]


def snippets():
    """Every Python snippet of the pages, by page and number."""
    for page in PAGES:
        if page.parent.name != "api":  # signatures
            for number, code in enumerate(
                re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
            ):
                if "--8<--" not in code:
                    yield pytest.param(code, id=f"{page.name}-{number + 1}")


@pytest.mark.parametrize("code", list(snippets()))
def test_what_a_snippet_takes_from_jrec_exists(code):
    for node in ast.walk(ast.parse(code)):
        names = (
            re.fullmatch(r"jrec((?:\.[a-z_]\w*|\.[A-Z]\w*)+)", ast.unparse(node))
            if isinstance(node, ast.Attribute)
            else None
        )
        found = jrec
        for name in names[1].split(".")[1:] if names else ():
            assert hasattr(found, name), f"{ast.unparse(node)}: there is no {name}"
            found = getattr(found, name)


def test_links_out_of_docs_lead_to_pages_of_the_site():
    text = "[p](../../examples/two_tower.py) [c](../../CONTRIBUTING.md) [d](../data.md#formats) [f](../figures) [u](https://a.b/c)"
    inside = site_hooks.with_links_inside(text, pathlib.Path("guides/page.md"), DOCS)
    assert inside == "[p](../how_to/two_tower.md) c [d](../data.md#formats) f [u](https://a.b/c)"


def test_a_timeline_has_the_spans_of_its_batches(tmp_path):
    span = {"ph": "X", "cat": "plan", "args": {"batch": 4}, "ts": 3000.0, "dur": 500.0}
    later = {**span, "cat": "device step", "ts": 5000.0}
    events = [span, later, {**span, "args": {"batch": 9}}, {**span, "cat": "dispatch"}, {"ph": "M"}]
    assert site_pictures.spans_between(events, 4, 5) == [("plan", 4, 0.0, 0.5), ("device step", 4, 2.0, 0.5)]
    with pytest.raises(SystemExit, match="no span of batches 5 to 6"):
        site_pictures.spans_between(events, 5, 6)
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    site_pictures.draw_timeline(trace, 4, 4, tmp_path / "timeline.svg")
    assert "device step" in (tmp_path / "timeline.svg").read_text()


def test_the_reports_table_has_the_model_its_baselines_and_its_ceiling():
    scores = {"test": {"auc": 0.75, "log_loss": 0.5}}
    baselines = {"logistic_regression": {"splits": scores}, "popularity": {"splits": scores, "feature": "C8"}}
    table = site_pictures.report_table({"splits": scores, "baselines": baselines, "ceiling": scores})
    assert table.splitlines()[2] == "| **the model** | 0.7500 | 0.5000 |  |  |"
    assert "| popularity of C8 | 0.7500 |" in table
    assert len(table.splitlines()) == 6
