"""``report.html``: its numbers are those of the JSON, texts stay texts, nothing is loaded, parts are well formed."""

import html.parser
import itertools
import json
import re
import time
import xml.etree.ElementTree

import numpy as np
import pytest
from test_report import make_history, make_schema, make_scores, write

from jrec.app.report import charts
from jrec.app.report.elements import MOST_ROWS, measured, number, table
from jrec.app.report.logs import read_records
from jrec.app.report.run_page import run_page
from jrec.app.report.svg import Axis, Mark, chart

VOID = {"meta", "link", "img", "br", "wbr"}
LOADS = {"src", "href", "srcset", "data", "action", "poster"}


class Page(html.parser.HTMLParser):
    """What a page holds: tables by caption as lists of cells, texts, tags with their attributes; tags must match."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.texts = {}, [], []
        self._open, self._rows, self._caption = [], [], ""
        self.feed(text)
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in VOID:
            return
        self._open.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data):
        self.texts.append(data)
        if "caption" in self._open:
            self._caption = data
        elif "small" not in self._open and {"td", "th"} & set(self._open):
            self._rows[-1][-1] += data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report with all that a run of the command has; names are hostile."""
    folder = tmp_path_factory.mktemp("report")
    schema = make_schema(test={"auc": 0.8, "log_loss": 0.51})
    scores = {"valid": make_scores(1), "test": make_scores(2)}
    baseline = {"auc": 0.61, "log_loss": 0.4, "normalized_entropy": 0.9, "calibration": 1.01, "calibration_error": 0.02}
    splits = {"splits": {"valid": baseline, "test": baseline}}
    group = {"group": "<b>", "examples": 12, "positives": 5, "auc": 0.75, "log_loss": 0.5}
    groups = {"groups": 3, "groups_of_one_label": 1, "coverage": 0.5, "gauc": 0.7, "histogram": [0, 1, 2],
              "best": [group], "worst": []}  # fmt: skip
    one = {"feature": "<script>alert(1)</script>", "slice": "<i>&amp;", "examples": 90, "base_rate": 0.2,
           "mean_prediction": 0.3, "calibration": 1.5, "deviations": 6.5, "log_loss": 0.6,
           "normalized_entropy": 1.1}  # fmt: skip
    sections = {
        "baselines": {"logistic_regression": {**splits, "l2": 3.0}, "popularity": {**splits, "feature": "C1"},
                      "seconds": 1.25, "cached": False},
        "groups": {"feature": "\"><img src=x onerror='x'>", "splits": {"test": groups}},
        "slices": {"split": "test", "slices": [one, {**one, "slice": "other", "deviations": 0.5}]},
        "evaluations": {"every_steps": 20, "batches": 2, "count": 3, "seconds": 1.5, "share": 0.05},
    }  # fmt: skip
    history = make_history(folder)
    content = write(folder, scores, schema, seconds=2.0, examples=1000, history=history, sections=sections)
    text = (folder / "report.html").read_text()
    assert json.loads((folder / "metrics.json").read_text()) == content
    return content, text, Page(text), list(read_records(history))


def test_scores_are_those_of_the_json(written):
    content, _, page, _ = written
    for split in ("valid", "test"):
        head, own, logistic, popularity, *teacher = page.tables[f"{split} split"]
        metrics = content["splits"][split]
        names = ("auc", "log_loss", "normalized_entropy", "calibration", "calibration_error", "average_precision",
                 "accuracy", "base_rate",
                 "mean_prediction", "examples")  # fmt: skip
        assert head[1:] == ["AUC", "log loss", "normalized entropy", "calibration", "calibration error",
                            "average precision", "accuracy",
                            "click rate", "mean prediction", "examples"]  # fmt: skip
        assert own == ["the model", *(measured(metrics[name]) for name in names)]
        assert [float(cell.replace(",", "")) for cell in own[1:]] == pytest.approx(
            [metrics[n] for n in names], abs=6e-5
        )
        assert logistic[:3] == ["logistic regression", "0.6100", "0.4000"]
        assert popularity[0] == "popularity of C1"
        assert [row[:3] for row in teacher] == (
            [["the teacher that made the labels", "0.8000", "0.5100"]] if split == "test" else []
        )
    assert next(iter(page.tables)) == "test split"  # the last one comes first


def test_the_warning_stands_first_and_is_that_of_the_json(written):
    content, text, page, _ = written
    warnings = content["judgement"]["warnings"]
    assert any("log loss" in line for line in warnings)
    assert set(warnings) <= set(page.texts)
    assert text.index("Warnings") < text.index("<h2>")
    assert set(content["judgement"]["advice"]) <= set(page.texts)


def test_names_of_data_stay_texts(written):
    _, _, page, _ = written
    assert not {"script", "b", "i", "img"} & {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script>" in page.texts
    assert page.tables["test: the best groups of 10 examples or more"][1][0] == "<b>"
    assert page.tables["Slices furthest from calibrated, of 2"][1][1] == "<i>&amp;"
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_nothing_is_loaded(written):
    _, text, page, _ = written
    assert {attributes[name] for _, attributes in page.tags for name in LOADS & attributes.keys()} == {"data:,"}
    assert "url(" not in text
    assert "@import" not in text
    assert ("default-src 'none'") in text


def test_every_number_of_the_json_is_there_with_its_unit(written):
    content, _, page, _ = written
    rows = {row[0]: row[1:] for row in page.tables["training"]}
    assert rows["examples_per_second"] == [number(500.0), content["units"]["examples_per_second"]]
    assert rows["steps"] == ["60", "count"]
    assert {row[0]: row[1] for row in page.tables["parameters"]}["d16_float32.bytes"] == "640"
    changed = {row[0]: row[1:] for row in page.tables["Keys with another value than their default"][1:]}
    assert changed["data.batch_size"] == ["64", "2,048"]
    assert {row[0]: row[1] for row in page.tables["The whole configuration"]}["seed"] == "0"
    bins = page.tables["Calibration on test"][1:]
    assert [int(row[1]) for row in bins] == content["reliability"]["test"]["counts"]


def test_a_reader_without_eyes_gets_names(written):
    _, _, page, _ = written
    assert ("html", {"lang": "en"}) in page.tags
    drawings = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("class") == "chart"]
    assert len(drawings) == 5
    assert all(one["role"] == "img" and one["aria-label"] for one in drawings)
    scrolling = [attributes for _, attributes in page.tags if attributes.get("class") == "scroll"]
    assert all(one["tabindex"] == "0" and one["aria-label"] for one in scrolling)
    assert [tag for tag, _ in page.tags if re.fullmatch(r"h\d", tag)][:2] == ["h1", "h2"]
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")


def test_charts_are_xml_and_hold_the_points(written):
    content, text, _, records = written
    drawings = re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL)
    for drawing in drawings:
        xml.etree.ElementTree.fromstring(drawing)
    loss, auc = charts.learning_curves(content, records)
    assert loss.count("<circle") == 3 + 1  # evaluations, and the legend's
    assert "valid, best 0.5167 at step 60" in loss
    assert "valid, logistic regression 0.4000" in loss
    assert "step of 64 examples" in loss
    assert "valid, best 0.7000" in auc
    assert list(charts.learning_curves(content, [])) == []


def points(drawing, shape):
    """The (right, down) places of a path's points."""
    path = re.search(rf'<path class="{shape}" d="M(.*?)"', drawing)[1]
    return np.array([tuple(map(float, pair.split())) for pair in path.split("L")])


def test_a_chart_puts_values_where_the_axes_say():
    marks = [Mark(kind="line", color="valid", x=(0, 5, 10), y=(1, 10, 100), name="<i>")]
    y = Axis(label="loss", low=1, high=100, logarithmic=True)
    drawing = chart(marks, x=Axis(label="step", low=0, high=10), y=y, title="a < b")
    (right, down) = points(drawing, "valid solid").T
    assert np.diff(right)[0] == pytest.approx(np.diff(right)[1], abs=0.11)
    assert np.diff(down)[0] == pytest.approx(np.diff(down)[1], abs=0.11)  # 1, 10, 100 are evenly spread
    assert down[0] > down[2]
    ticks = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
    assert {"0", "10", "1", "100", "step", "loss"} <= set(ticks)
    assert "a &lt; b" in drawing
    assert "&lt;i&gt;" in drawing


@pytest.mark.parametrize(
    "axis", [(0.00002, 0.0021, True), (1e-9, 0.9, True), (0, 9_000_000, False), (-1e5, 3e5, False)]
)
def test_numbers_under_a_chart_do_not_run_into_each_other(axis):
    low, high, logarithmic = axis
    x = Axis(label="", low=low, high=high, logarithmic=logarithmic)
    drawing = chart([], x=x, y=Axis(label="", low=0, high=1), title="")
    shown = re.findall(r'<text x="([\d.]+)" y="234" text-anchor="middle">([^<]*)</text>', drawing)
    ends = [(float(place) - 3.25 * len(text), float(place) + 3.25 * len(text)) for place, text in shown]
    assert len(shown) >= 3
    assert all(end + 8 <= begin + 0.1 for (_, end), (begin, _) in itertools.pairwise(ends))
    assert drawing.count('class="grid"') - 6 == len(x.ticks()) >= len(shown)  # a line each, and six across


def test_what_lies_outside_of_a_chart_is_clipped():
    marks = [Mark(kind="line", color="train", x=(0, 20), y=(-5, 5))]
    axis = Axis(label="", low=0, high=1)
    right, down = points(chart(marks, x=axis, y=axis, title=""), "train solid").T
    assert right.max() <= 400
    assert down.min() >= 0
    assert down.max() <= 260


@pytest.mark.parametrize("rate", [0.3, 0.01])
def test_calibration_of_rare_clicks_is_drawn_on_logarithmic_axes(rate):
    observed, predicted = [0.0, rate, rate * 2], [rate / 9, rate, rate * 1.5]
    bins = {"counts": [100, 100, 100], "mean_predicted": predicted, "observed": observed}
    content = {"splits": {"test": {"base_rate": rate}}, "reliability": {"test": bins}}
    (drawing,) = charts.calibration(content)
    assert ("1 of 3 bins saw no click" in drawing) == (rate < 0.1)
    assert drawing.count('<circle class="test"') == (2 if rate < 0.1 else 3) + 1  # and the legend's


def test_predictions_of_zero_are_not_on_logarithmic_axes():
    """As a model that diverged makes them; of several bins, or of all."""
    for predicted, drawn in (([0.0, 0.01, 0.02], 2), ([0.0, 0.0, 0.0], 0)):
        bins = {"counts": [100, 100, 100], "mean_predicted": predicted, "observed": [0.01, 0.01, 0.02]}
        content = {"splits": {"test": {"base_rate": 0.013}}, "reliability": {"test": bins}}
        drawings = list(charts.calibration(content))
        assert [d.count('<circle class="test"') - 1 for d in drawings] == [drawn] * bool(drawn)
        assert all(f"{3 - drawn} of 3 bins saw no click, or expected none, and are not drawn" in d for d in drawings)


def test_a_long_table_says_what_it_leaves_out():
    page = Page(table("t", {"a": "", "b": ""}, [[n, 0.5] for n in range(MOST_ROWS + 5)]))
    assert len(page.tables["t"]) == MOST_ROWS + 1
    assert "5 more rows are in metrics.json." in page.texts


def test_a_long_run_takes_little_room_and_time(written):
    content, _, _, _ = written
    records = [{"step": s, "split": "train", "loss": 0.5 + 1 / s, "running_auc": 0.7} for s in range(1, 20_001)]
    slices = [{**content["slices"]["slices"][0], "slice": f"row {n}"} for n in range(2000)]
    begin = time.process_time()
    text = run_page({**content, "slices": {"split": "test", "slices": slices}}, records)
    assert time.process_time() - begin < 1
    assert len(text) < 400_000


def test_long_names_may_break_and_long_labels_fit():
    """Or a name hides the other cells of a narrow window, and a label is cut where the chart ends."""
    assert '<th scope="row">a_<wbr>b.<wbr>c_ &lt;x&gt;</th>' in table(
        "t", {"name": "", "value": ""}, [["a_b.c_ <x>", 1]]
    )
    axes = {label: Axis(label=label, low=0, high=1) for label in ("short", "loss of sampled items (nats per position)")}
    charts = [chart([], x=axes["short"], y=axis, title="t") for axis in axes.values()]
    assert [text.count("textLength") for text in charts] == [0, 1]
