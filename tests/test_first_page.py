"""The page of `jrec init`: its trials are those that took place, its keys those of the file, names stay texts."""

import dataclasses

import pytest
from run_cases import quickstart
from test_report_page import Page

from jrec.app.config import load_config
from jrec.app.first_config import LARGE, candidates, facts_of, first_config
from jrec.app.first_page import first_page
from jrec.app.first_trials import Trial
from jrec.cli import main
from jrec.data.schema import Schema


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=2000)


def trial(candidate, auc):
    records = [{"step": 50 * n, "split": "valid", "auc": auc - 0.1 / n, "refinement": 0.4 + 0.1 / n} for n in (1, 2)]
    return Trial(candidate=candidate, beside=auc, score=0.45, step=100, steps=150, seconds=1.25, records=records)


def test_trials_are_in_a_table_and_in_curves(dataset):
    facts = facts_of(dataset, Schema.load(dataset))
    some = candidates(facts)
    trials = [trial(one, 0.8 - place / 100) for place, one in enumerate(some)]
    keys = first_config(str(dataset), facts, some[0])
    text = first_page("<b>log</b>", "first.toml", keys, facts, some, trials)
    page = Page(text)
    assert "b" not in {tag for tag, _ in page.tags}
    rows = page.tables["Trials, the best first"]
    assert [row[0] for row in rows[1:]] == [one.name for one in some]
    assert rows[1][1:] == ["0.4500", "0.8000", "100", "150", "1.2500"]
    assert text.index(f"Chosen: {some[0].name}") < text.index("<h2>")
    assert text.count('<svg class="chart"') == 2
    assert text.count("<circle") == 2 * len(some) * (2 + 1)  # charts, kinds, and evaluations with the legend's
    shown = {row[0]: row[1:] for row in page.tables["Keys, and the reasons for them"][1:]}
    assert list(shown) == [f"{key.section}.{key.name}".lstrip(".") for key in keys]
    assert shown["evaluate.early_stopping"] == [
        "metric = refinement, patience = 6",
        "log loss, whatever the click rate; 6 evaluations without a better one end training",
    ]
    assert {row[0]: row[1] for row in page.tables["What the configuration depends on"]}["training examples"] == "1,600"


@pytest.mark.parametrize(
    ("examples", "valid", "why"),
    [(400, 100, "--quick"), (400, 0, "without a valid split"), (LARGE, 100, "nothing is tried")],
)
def test_without_trials_it_says_why(dataset, examples, valid, why):
    facts = dataclasses.replace(facts_of(dataset, Schema.load(dataset)), examples=examples, valid=valid)
    some = candidates(facts)
    page = Page(first_page("log", "x.toml", first_config("d", facts, some[0]), facts, some, []))
    assert any(why in text for text in page.texts)
    assert not any("Trials" in caption for caption in page.tables)


def test_the_command_writes_both_or_neither(dataset, tmp_path, capsys):
    out, page = tmp_path / "first.toml", tmp_path / "first.html"
    assert main(["init", str(dataset), "--out", str(out), "--quick"]) == 0
    assert str(page) in capsys.readouterr().out
    shown = {row[0]: row[1] for row in Page(page.read_text()).tables["Keys, and the reasons for them"]}
    assert shown["data.batch_size"] == str(load_config(out).data.batch_size)
    out.unlink()
    assert main(["init", str(dataset), "--out", str(out), "--quick"]) == 2
    assert f"{page} exists; replace it with --overwrite" in capsys.readouterr().err
    assert not out.exists()
    assert main(["init", str(dataset), "--out", str(page), "--quick", "--overwrite"]) == 2
    assert "name the configuration, such as first.toml" in capsys.readouterr().err
