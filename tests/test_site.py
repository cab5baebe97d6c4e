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
    programs = {path.stem: path for kind in ("py", "ipynb") for path in (ROOT / "examples").glob(f"*.{kind}")}
    pages = {path.stem: path.read_text() for path in (DOCS / "how_to").glob("*.md") if path.stem != "index"}
    assert set(programs) == set(pages)
    for name, text in pages.items():
        file = f"examples/{programs[name].name}"
        assert (f"<!-- notebook: {file} -->" if file.endswith("ipynb") else f'--8<-- "{file}"') in text


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
    text = "[n](../examples/newcomer.ipynb)"
    assert site_hooks.with_links_inside(text, pathlib.Path("page.md"), DOCS) == "[n](how_to/newcomer.md)"
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


def test_a_page_shows_the_cells_of_its_notebook():
    text = (DOCS / "how_to" / "newcomer.md").read_text()
    shown = site_hooks.with_notebook(text, pathlib.Path("how_to/newcomer.md"), DOCS)
    assert shown.startswith("# From a DataFrame to a served score\n")
    assert shown.count("# From a DataFrame") == 1  # the notebook's own title is left out
    assert '\n```python\nmodel = jrec.fit(clicks, label="click"' in shown
    links = [link.partition("#")[0] for link in LINK.findall(shown) if not link.startswith("http")]
    assert "../importance.md" in links
    assert all((DOCS / "how_to" / link).exists() for link in links)


def test_a_drawing_follows_the_readers_scheme():
    both = "![rows](images/rows.svg#only-light)![rows](images/rows.dark.svg#only-dark)"
    assert site_hooks.with_both_schemes("a ![rows](images/rows.svg) b ![c](c.png)") == f"a {both} b ![c](c.png)"
    assert site_hooks.darkened('<svg width="1"><a fill="#FFF"/><b href="#fffab"/></svg>') == (
        '<svg fill="#e7eaee" width="1"><a fill="#14171b"/><b href="#fffab"/></svg>'
    )


def luminance(color):
    """As in WCAG 2, of "#rgb" or "#rrggbb"."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("drawing", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_what_a_drawing_shows_is_seen_on_a_dark_page(drawing):
    page = site_hooks.DARK["#fff"]
    behind = {page, *(site_hooks.DARK[color] for color in ("#f3f5fa", "#d4d9df", "#b0b0b0")), "#0b2c42"}
    colors = {color.lower() for color in site_hooks.COLOR.findall(site_hooks.darkened(drawing.read_text()))}
    contrasts = {color: (luminance(color) + 0.05) / (luminance(page) + 0.05) for color in colors - behind}
    assert len(colors) >= 3
    assert not {color: round(contrast, 1) for color, contrast in contrasts.items() if contrast < 3}


def test_the_home_pages_chart_is_what_the_lines_say(tmp_path):
    site_pictures.draw_rows(site_pictures.ROWS_LINES, tmp_path / "rows.svg")
    drawn = (tmp_path / "rows.svg").read_text()
    assert drawn == (DOCS / "images" / "rows.svg").read_text(), "run `python -m scripts.site_pictures rows`"
    assert drawn.count("<circle") == 11 + 2  # 6 and 5 measured tables, and the legend
    assert "table[ids] and optax" in drawn


def test_the_home_page_has_one_chart_and_words_are_explained():
    home = (DOCS / "index.md").read_text()
    assert re.findall(r"!\[[^\]]*\]\(([^)]+)\)", home) == ["images/rows.svg"]
    assert home.index("](concepts.md#words)") < home.index("## Try it")
    words = (DOCS / "concepts.md").read_text().partition("## Words")[2]
    for word in ("bag", "cast", "slot", "stack", "tier", "plan"):
        assert f"\n| {word} |" in words
    assert "](concepts.md#words)" in (DOCS / "library.md").read_text()
