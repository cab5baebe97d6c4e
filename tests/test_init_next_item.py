"""`jrec init` of a dataset with histories: a model of the next item, chosen by NDCG on the valid split."""

import dataclasses

import pytest
import test_train_sequences as sequences
from test_importance_kinds import prepared
from test_report_page import Page

from jrec import cli
from jrec.app import first_ranking, first_trials
from jrec.app.build import build_layout, build_modules
from jrec.app.config import load_config
from jrec.app.first_ranking import facts_of
from jrec.app.first_rules import render
from jrec.data.schema import Schema
from jrec.errors import ConfigError

AGES = 'length = 8, ages = "ages"}'


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plays")
    sequences.write_log(folder / "log.csv")
    schema = sequences.SCHEMA.replace("length = 8}", AGES)
    prepared(folder, schema, folder / "log.csv", "--no-labels", "--split-by", "leave-one-out")
    return folder / "data"


@pytest.fixture(scope="module")
def facts(dataset):
    return facts_of(dataset, Schema.load(dataset))


def test_facts(facts, dataset):
    schema = Schema.load(dataset)
    assert (facts.history, facts.item, facts.length, facts.aged) == ("history", "item", 8, True)
    assert (facts.examples, facts.valid) == (schema.splits["train"].examples, schema.splits["valid"].examples)
    assert facts.items == schema.table("item").rows - (schema.table("item").oov_row is not None)
    assert 0 < facts.mean_length <= 8
    assert facts.metric.loss(0.3) < facts.metric.loss(0.2)
    for examples, tried in ((1_000, 25_000), (10_000, 100_000), (1_000_000, 200_000)):
        assert dataclasses.replace(facts, examples=examples, length=200).trial_examples == tried


def test_every_candidate_loads_and_builds_a_model_of_the_dataset(facts, dataset, tmp_path):
    schema = Schema.load(dataset)
    some = facts.candidates()
    assert [(one.kind, one.ages) for one in some] == [
        ("hstu", True),
        ("hstu", False),
        ("hstu", False),
        ("sasrec", False),
    ]
    assert len(dataclasses.replace(facts, aged=False).candidates()) == 3
    assert all(one.sampled for one in dataclasses.replace(facts, items=1_000_000).candidates())
    for number, candidate in enumerate([*some, *some[0].variants()]):
        for examples in (facts.examples, 3_000_000):
            own = dataclasses.replace(facts, examples=examples)
            file = tmp_path / f"{number}_{examples}.toml"
            file.write_text(render("x", own.config(str(dataset), candidate), own))
            config = load_config(file)
            read = config.model.of_kind.schema(config.model, schema)
            build_modules(config, read, build_layout(config, read), total_steps=1, abstract=True)
            section = config.model.of_kind.own(config.model)
            assert (config.model.kind, section.ages) == (candidate.kind, candidate.ages or candidate.kind == "sasrec")
            assert section.blocks == candidate.blocks
            drawn = section.sampled if section.negatives == "batch" else 0
            assert drawn == candidate.sampled
            assert config.model.dropout == candidate.dropout
            assert config.model.embedding_dim == candidate.dim
            assert config.optimizer.embedding.learning_rate == config.optimizer.learning_rate == candidate.rate
            assert config.evaluate.early_stopping.metric == "ndcg"
            assert config.data.batch_size == (32 if examples < 4_000 else 128)
            assert config.epochs == (100 if examples < 200_000 else 10)
    assert {section.section for section in dataclasses.replace(facts, valid=0).config("d", some[0])}.isdisjoint(
        {"evaluate", "checkpoint"}
    )


def test_variants_differ_in_one_thing_and_lead_back(facts):
    first, *_ = facts.candidates()
    for variant in first.variants():
        changed = [f.name for f in dataclasses.fields(first) if getattr(variant, f.name) != getattr(first, f.name)]
        assert len(changed) == 2
        assert "tuned" in changed
        assert first in [dataclasses.replace(back, tuned={}) for back in variant.variants()]


def test_the_greater_is_better_and_about_the_same_is_told_by_hits(facts):
    def trial(score, hits, seed=0):
        return first_trials.Trial(
            candidate=facts.candidates()[0], score=score, beside=hits, step=1, steps=2, seconds=1.0, seed=seed
        )

    low, high, close, again = trial(0.2, 0.9), trial(0.3, 0.4), trial(0.2999, 0.5), trial(0.4, 0.9, seed=1)
    assert first_trials.best_first([again, low, high, close], facts.metric) == [close, high, low, again]


def test_the_command_tries_and_writes_the_best(dataset, facts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(first_trials, "STEPS", 40)
    monkeypatch.setattr(first_ranking, "_STEPS", 20)
    candidates = type(facts).candidates
    monkeypatch.setattr(type(facts), "candidates", lambda facts: candidates(facts)[::2])
    out = tmp_path / "plays.toml"
    assert cli.main(["init", str(dataset), "--out", str(out)]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if ": valid NDCG@10 " in line]
    assert len(said) == 2
    scores = {line.split(": valid")[0].removeprefix("jrec: "): line.split("NDCG@10 ")[1].split(",")[0] for line in said}
    page = Page(out.with_suffix(".html").read_text())
    rows = page.tables["Trials, the best first"]
    assert rows[0][:3] == ["kind of model", "valid NDCG@10", "valid HR@10"]
    assert {row[0]: row[1] for row in rows[1:]} == scores
    assert any(f"# {rows[1][0]}" in line for line in out.read_text().splitlines() if line.startswith("kind"))
    assert cli.main(["train", str(out), f"out={tmp_path / 'run'}", "max_steps=20", "log.progress=off"]) == 0


def test_a_label_asks_for_clicks_unless_it_is_told_otherwise(tmp_path, capsys):
    log = tmp_path / "log.csv"
    sequences.write_log(log)
    lines = log.read_text().splitlines()
    labelled = [f"{lines[0]},click", *(f"{line},{n % 2}" for n, line in enumerate(lines[1:]))]
    log.write_text("\n".join(labelled) + "\n")
    prepared(tmp_path, '[label]\ncolumn = "click"\n' + sequences.SCHEMA, log)
    for options, kind in (([], "dlrm"), (["--next-item"], "hstu")):
        out = tmp_path / f"{kind}.toml"
        assert cli.main(["init", str(tmp_path / "data"), "--out", str(out), "--quick", *options]) == 0
        assert load_config(out).model.kind == kind
    capsys.readouterr()


def test_a_dataset_that_knows_no_next_item_is_refused(dataset):
    schema = Schema.load(dataset)
    without = dataclasses.replace(schema, categorical=tuple(f for f in schema.categorical if f.one_hot))
    with pytest.raises(ConfigError, match=r"has no history of a user's items .*, and no labels.*docs/next_item.md"):
        facts_of(dataset, without)
    grown = [dataclasses.replace(table, growing=True) for table in schema.tables]
    with pytest.raises(ConfigError, match="but that table grows"):
        facts_of(dataset, dataclasses.replace(schema, tables=tuple(grown)))
    with pytest.raises(ConfigError, match="has no examples in a 'train' split"):
        facts_of(dataset, dataclasses.replace(schema, splits={}))
