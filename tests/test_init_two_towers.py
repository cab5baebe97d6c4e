"""`jrec init --two-towers`: which features an item decides, and a configuration chosen by NDCG on the valid split."""

import dataclasses

import numpy as np
import pytest
from test_importance_kinds import prepared
from test_report_page import Page

from jrec import cli
from jrec.app import first_ranking, first_towers, first_trials
from jrec.app.build import build_layout, build_modules
from jrec.app.config import load_config
from jrec.app.first_rules import render
from jrec.app.first_towers import facts_of
from jrec.data.schema import DatasetError, Schema
from jrec.errors import ConfigError

KINDS, ITEMS, USERS, LINES = 6, 24, 60, 3_000
SCHEMA = """
[time]
column = "at"
format = "seconds"
[[categorical]]
column = "user"
[[categorical]]
column = "country"
[[categorical]]
column = "item"
[[categorical]]
column = "kind"
[[categorical]]
column = "tags"
separator = "|"
max_length = 3
[[categorical]]
column = "asked"
separator = "|"
max_length = 3
[[categorical]]
column = "campaign"
[[categorical]]
column = "past"
history = {by = "user", of = "item", length = 5}
[[dense]]
column = "size"
[[dense]]
column = "hour"
"""
"""``kind``, ``tags`` and ``size`` are an item's, ``campaign`` mostly, and the others are not."""


def write_log(path, lines=LINES):
    rng = np.random.default_rng(3)
    countries, tags = rng.integers(0, 3, USERS), [rng.permutation(9)[: rng.integers(0, 4)] for _ in range(ITEMS)]
    text = ["at,user,country,item,kind,tags,asked,campaign,size,hour"]
    for at in range(lines):
        user = rng.integers(USERS)
        kind = countries[user] if rng.random() < 0.8 else rng.integers(KINDS)
        item = kind + KINDS * rng.integers(ITEMS // KINDS)
        campaign = item % 5 if rng.random() < 0.85 else rng.integers(5)
        its_tags = "|".join(f"t{tag}" for tag in tags[item])
        asked = "|".join(f"t{tag}" for tag in rng.permutation(9)[: len(tags[item])])  # of an item's length alone
        text.append(
            f"{at},u{user},c{countries[user]},i{item},k{kind},{its_tags},{asked},p{campaign},{item},{rng.integers(24)}"
        )
    path.write_text("\n".join(text) + "\n")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    write_log(folder / "log.csv")
    prepared(folder, SCHEMA, folder / "log.csv", "--no-labels")
    return folder / "data"


@pytest.fixture(scope="module")
def facts(dataset):
    return facts_of(dataset, Schema.load(dataset), "item")


def test_features_that_an_item_decides_are_of_its_tower(facts, dataset):
    schema = Schema.load(dataset)
    assert facts.item == ("item", "kind", "tags", "size")
    assert facts.user == ("user", "country", "asked", "past", "hour")
    assert facts.unclear == ("campaign",)
    assert (facts.id, facts.history) == ("item", "past")
    assert facts.items == schema.table("item").rows - (schema.table("item").oov_row is not None)
    (warning,) = facts.warnings()
    assert warning.startswith("campaign: neither the same in all examples")
    of_kind = facts_of(dataset, schema, "kind")  # of which the items are no features
    assert of_kind.item == ("kind",)
    assert "item" in of_kind.user
    assert not of_kind.history


def test_every_candidate_and_variant_loads_and_builds_a_model_of_the_dataset(facts, dataset, tmp_path):
    schema, first = Schema.load(dataset), facts.candidates()[0]
    for number, candidate in enumerate([*facts.candidates(), *first.variants()]):
        file = tmp_path / f"{number}.toml"
        file.write_text(render("x", facts.config(str(dataset), candidate), facts))
        config = load_config(file)
        read = config.model.of_kind.schema(config.model, schema)
        build_modules(config, read, build_layout(config, read), total_steps=1, abstract=True)
        own = config.model.of_kind.own(config.model)
        assert (own.user, own.item, own.id, own.history) == (facts.user, facts.item, "item", "past")
        assert own.user_mlp == own.item_mlp
        assert (len(own.user_mlp), own.user_mlp[-1]) == (candidate.layers, candidate.dim)
        assert (own.temperature, own.log_q) == (candidate.temperature, candidate.log_q)
        assert (config.model.embedding_dim, config.model.dropout) == (candidate.dim, candidate.dropout)
        assert config.optimizer.learning_rate == candidate.rate
        assert config.optimizer.embedding.learning_rate == candidate.rows
        assert config.evaluate.early_stopping.metric == "ndcg"
        assert config.data.eval_batch_size == first_ranking.EVAL_BATCH  # of which ``evaluate.batches`` is a number
    for variant in first.variants():
        changed = [f.name for f in dataclasses.fields(first) if getattr(variant, f.name) != getattr(first, f.name)]
        assert len(changed) == 2
        assert "tuned" in changed
    sections = {key.section for key in dataclasses.replace(facts, valid=0).config("d", first)}
    assert sections.isdisjoint({"evaluate", "checkpoint"})
    sizes = [(10_000, 128, 40), (300_000, 512, 10), (10_000_000, 2048, 1)]
    for examples, batch, epochs in sizes:
        keys = {key.name: key.value for key in dataclasses.replace(facts, examples=examples).config("d", first)}
        assert (keys["batch_size"], keys["epochs"]) == (batch, epochs)


def test_the_command_tries_and_writes_the_best(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(first_trials, "STEPS", 40)
    monkeypatch.setattr(first_ranking, "_STEPS", 20)
    out = tmp_path / "towers.toml"
    assert cli.main(["init", str(dataset), "--out", str(out), "--two-towers", "item"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert any(line.startswith("jrec: campaign: neither") for line in said)
    assert len([line for line in said if ": valid NDCG@10 " in line]) == 3
    rows = Page(out.with_suffix(".html").read_text()).tables["Trials, the best first"]
    assert out.read_text().startswith("# A first configuration for data, by")  # the folder's name
    assert any(f"# {rows[1][0]}" in line for line in out.read_text().splitlines() if line.startswith("kind"))
    assert cli.main(["train", str(out), f"out={tmp_path / 'run'}", "max_steps=20", "log.progress=off"]) == 0


def test_what_cannot_be_ranked_is_refused(dataset, tmp_path):
    schema = Schema.load(dataset)
    for item in ("past", "none", "hour"):
        with pytest.raises(ConfigError, match=f"--two-towers is '{item}'.* user, country, item, kind, campaign"):
            facts_of(dataset, schema, item)
    grown = [dataclasses.replace(table, growing=table.name == "user") for table in schema.tables]
    with pytest.raises(DatasetError, match="reads tables of as many rows throughout, but table 'user'"):
        facts_of(dataset, dataclasses.replace(schema, tables=tuple(grown)), "item")
    kept = tuple(f for f in schema.categorical if f.name in ("item", "kind", "campaign"))
    with pytest.raises(
        ConfigError, match=r"left for the user's tower: item decides kind, size, and of campaign it cannot be said"
    ):
        facts_of(dataset, dataclasses.replace(schema, categorical=kept), "item")
    with pytest.raises(SystemExit):
        cli.main(["init", str(dataset), "--out", str(tmp_path / "x"), "--two-towers", "item", "--next-item"])


def test_an_item_seen_once_decides_nothing():
    first, second = first_towers._pairs(np.array([4, 2, 9, 2, 4, 4]))
    assert sorted(zip(first.tolist(), second.tolist(), strict=True)) == [(0, 4), (1, 3), (4, 5)]
    none = np.zeros(0, np.int64)
    assert first_towers._agreement(np.array([1, 2]), none, none) == 0
    assert first_towers._agreement(np.array([3, 3, 3]), np.array([0]), np.array([1])) == 0  # a constant says nothing
