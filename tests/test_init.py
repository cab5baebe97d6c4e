"""`jrec init`: its configurations load, fit their dataset, and choose what is best on the valid split."""

import dataclasses
import json
import signal

import numpy as np
import pytest
from run_cases import quickstart

from jrec.app import first_search, first_trials
from jrec.app.baselines.examples import Split as Blocks
from jrec.app.build import build_layout, build_modules
from jrec.app.config import load_config
from jrec.app.first_config import LARGE, candidates, facts_of, first_config
from jrec.app.first_rules import render
from jrec.cli import main
from jrec.data.blocks import ListColumn, ShardWriter
from jrec.data.schema import CategoricalFeature, DenseFeature, Schema, Split, Table
from jrec.errors import ConfigError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=3000)


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    """Two one-hot features with histories, one without, and a year as it is. Names need quoting in TOML."""
    folder, random = tmp_path_factory.mktemp("sequences"), np.random.default_rng(0)
    splits = {}
    for name, size in (("train", 400), ("valid", 100)):
        offsets = np.arange(0, 3 * size + 1, 3, dtype=np.int32)
        items, kinds = (random.integers(0, rows, 3 * size).astype(np.uint8) for rows in (90, 9))
        with ShardWriter(folder / f"{name}-00000-of-00001.array_record", 100) as writer:
            writer.write(
                {
                    "label": random.integers(0, 2, size).astype(np.float32),
                    "year": (1990 + random.integers(0, 30, size)).astype(np.float32),
                    "share": random.random(size).astype(np.float32),
                    "user id": random.integers(0, 50, size).astype(np.uint8),
                    "item": random.integers(0, 90, size).astype(np.uint8),
                    "kind": random.integers(0, 9, size).astype(np.uint8),
                    "items": ListColumn(offsets, items),
                    "kinds": ListColumn(offsets, kinds),
                }
            )
        splits[name] = Split(shards=(writer.shard,))
    one_hot = {"fixed_length": True}
    schema = Schema(
        name="sequences",
        block_size=100,
        dense=(DenseFeature(name="year"), DenseFeature(name="share")),
        categorical=(
            CategoricalFeature(name="user id", table="user id", **one_hot),
            CategoricalFeature(name="item", table="item", **one_hot),
            CategoricalFeature(name="kind", table="kind", **one_hot),
            CategoricalFeature(name="items", table="item", max_length=3),
            CategoricalFeature(name="kinds", table="kind", max_length=3),
        ),
        tables=(Table(name="user id", rows=50), Table(name="item", rows=90), Table(name="kind", rows=9)),
        splits=splits,
        provenance={},
    )
    schema.save(folder)
    return folder


def test_facts(sequences):
    facts = facts_of(sequences, Schema.load(sequences))
    assert (facts.examples, facts.valid, facts.rows, facts.lookups, facts.dense) == (400, 100, 149, 9.0, 2)
    assert facts.histories == {"item": "items", "kind": "kinds"}
    assert facts.visits == pytest.approx(400 * 9 / 149)
    assert list(facts.boundaries) == ["year", "share"]
    years = facts.boundaries["year"]
    assert (years[0], years[-1]) == (1990, 2019)
    assert len(years) == 17
    assert list(years) == sorted(set(years))
    assert not list(facts.warnings())


def test_a_constant_feature_has_no_boundaries(sequences, monkeypatch):
    schema = Schema.load(sequences)
    read = Blocks.read
    constant = lambda *arguments: ({**block, "year": np.full(100, 7.0)} for block in read(*arguments))  # noqa: E731
    monkeypatch.setattr(Blocks, "read", constant)
    facts = facts_of(sequences, schema)
    assert list(facts.boundaries) == ["share"]


@pytest.mark.parametrize("examples", [400, 1_000_000, LARGE, 200_000_000])
def test_every_candidate_loads_and_builds_a_model_of_the_dataset(sequences, tmp_path, examples):
    schema = Schema.load(sequences)
    facts = dataclasses.replace(facts_of(sequences, schema), examples=examples)
    for number, candidate in enumerate(candidates(facts)):
        (tmp_path / f"{number}.toml").write_text(render("x", first_config(str(sequences), facts, candidate), facts))
        config = load_config(tmp_path / f"{number}.toml")
        model, _ = build_modules(config, schema, build_layout(config, schema), total_steps=1, abstract=True)
        alone = candidate.frozen or examples >= 1_000_000
        assert config.model.members == (1 if alone else 8)
        assert model.embeddings.layout.features[0][1] == candidate.dim * config.model.members
        assert {name for name, own in config.optimizer.embedding.tables.items() if own.frozen} == set(candidate.frozen)
        assert {name: own.initial_bound for name, own in config.tables.overrides.items()} == candidate.bounds
        assert config.checkpoint.keep_best
        assert config.model.calibrate
        assert config.model.dense_boundaries == facts.boundaries
        assert config.optimizer.embedding.weight_decay == candidate.decay
        assert config.evaluate.early_stopping.patience == (18 if candidate.decay else 6)
        assert (config.epochs == 1) == (examples >= LARGE)
    of_history = [c for c in candidates(facts) if c.frozen]
    assert [(c.kind, c.frozen) for c in of_history] == [(kind, ("user id", "item")) for kind in ("dlrm", "tbsm")]
    assert all(set(c.bounds) == {"kind"} for c in of_history)
    grown = [c for name in ("item", "kind") for c in candidates(dataclasses.replace(facts, growing=frozenset({name})))]
    assert [c.frozen for c in grown if c.frozen] == [("user id", "item")] * 2  # only where those do not grow
    assert "Adam" in candidates(dataclasses.replace(facts, examples=10_000_000))[0].name
    huge = dataclasses.replace(facts, tables={"user id": 300_000_000})
    assert not any("Adam" in c.name for c in candidates(huge))


def test_members_need_small_tables(sequences):
    facts = facts_of(sequences, Schema.load(sequences))
    some = candidates(facts)[0]

    def members(facts):
        return {key.name: key.value for key in first_config("d", facts, some)}.get("members", 1)

    assert members(facts) == 8
    assert members(dataclasses.replace(facts, tables={"user id": 10_000_000})) == 1  # 5 GB of rows


def test_rates_fall_where_a_trial_got_worse_after_its_best_step(sequences):
    facts = facts_of(sequences, Schema.load(sequences))
    some = candidates(facts)[0]
    trials = [
        first_trials.Trial(candidate=some, score=0.4, beside=0.7, step=step, steps=1000, seconds=1.0)
        for step in (500, 950)
    ]
    assert [trial.best_step for trial in trials] == [500, 0]
    keys = {key.name: key.value for key in first_config("d", facts, some, best_step=500) if key.section != "model"}
    assert (keys["max_steps"], keys["kind"]) == (1000, "warmup_linear")
    assert "max_steps" not in {key.name for key in first_config("d", facts, some)}


def test_among_trials_of_about_the_same_log_loss_auc_decides(sequences):
    facts = facts_of(sequences, Schema.load(sequences))
    some, metric = candidates(facts), facts.metric
    scores = [(0.4362, 0.776), (0.4364, 0.778), (0.4369, 0.777), (0.4391, 0.79), (0.4448, None)]
    trials = [
        first_trials.Trial(candidate=one, score=loss, beside=auc, step=1, steps=2, seconds=1.0)
        for one, (loss, auc) in zip(some, scores, strict=False)
    ]
    assert first_trials.best_first(trials[::-1], metric) == [trials[1], trials[0], *trials[2:]]
    no_auc = [dataclasses.replace(trial, beside=None) for trial in trials]
    assert first_trials.best_first(no_auc[::-1], metric) == no_auc


def test_tables_that_grow_are_never_frozen(sequences):
    schema = Schema.load(sequences)
    grows = [dataclasses.replace(table, growing=table.name == "item" or None) for table in schema.tables]
    facts = facts_of(sequences, dataclasses.replace(schema, tables=tuple(grows)))
    assert facts.growing == {"item"}
    assert not any(candidate.frozen for candidate in candidates(facts))


def test_the_rates_follow_how_often_rows_are_looked_up(dataset):
    facts = facts_of(dataset, Schema.load(dataset))
    rare = dataclasses.replace(facts, tables={"C1": 10_000_000})
    assert candidates(rare)[0].rows[0] == "rowwise_adagrad"
    assert candidates(dataclasses.replace(facts, tables={"C1": 10}))[0].rows[0] == "adam"


def test_without_a_valid_split_nothing_is_tried_or_watched(sequences, tmp_path, capsys):
    schema = Schema.load(sequences)
    facts = dataclasses.replace(facts_of(sequences, schema), valid=0)
    sections = {key.section for key in first_config(str(sequences), facts, candidates(facts)[0])}
    assert not sections & {"evaluate", "checkpoint"}
    assert any("no valid split" in line for line in facts.warnings())
    empty = dataclasses.replace(schema, splits={"valid": schema.splits["valid"]})
    with pytest.raises(ConfigError, match="has no examples in a 'train' split"):
        facts_of(sequences, empty)


def test_rows_of_new_values_are_trained_where_training_meets_none(sequences):
    schema = Schema.load(sequences)
    assert facts_of(sequences, schema).unmet_oov == frozenset()
    rows = {"user id": None, "item": 90, "kind": 0}  # "item" has a row more than ids, "kind" none
    tables = tuple(
        dataclasses.replace(t, rows=t.rows + (t.name == "item"), oov_row=rows[t.name]) for t in schema.tables
    )
    facts = facts_of(sequences, dataclasses.replace(schema, tables=tables))
    assert facts.unmet_oov == {"item"}
    for known, expected in ((facts, [0.01]), (dataclasses.replace(facts, unmet_oov=frozenset()), [])):
        keys = first_config("d", known, candidates(known)[0])
        assert [key.value for key in keys if key.name == "oov_rate"] == expected


@pytest.mark.slow
def test_the_command_tries_the_candidates_and_writes_the_best(dataset, tmp_path, capsys):
    out = tmp_path / "init.toml"
    assert main(["init", str(dataset), "--out", str(out)]) == 0
    said = capsys.readouterr()
    tried = {}
    for line in said.err.splitlines():
        name, found, rest = line.removeprefix("jrec: ").partition(": valid log loss ")
        if found:
            tried[name] = float(rest.partition(",")[0]), float(rest.rpartition(" AUC ")[2])
            assert 0.5 < tried[name][1] < 1
    assert len(tried) == 5
    least = min(tried.values())[0]
    best = max((name for name in tried if tried[name][0] <= 1.002 * least), key=lambda name: tried[name][1])
    text = out.read_text()
    assert f"  # {best}" in text
    assert f"#   {tried[best][0]:.4f}  {best}" in text
    assert f"jrec train {out}" in said.out
    assert load_config(out).data.path == str(dataset)


def test_an_interrupt_ends_all_trials_and_speaks_of_no_checkpoint(dataset, monkeypatch, capfd):
    facts = facts_of(dataset, Schema.load(dataset))
    begun, train = [], first_trials.train

    def interrupted(config, **options):
        begun.append(config)
        return train(config, **options | {"callbacks": [lambda event: signal.raise_signal(signal.SIGINT)]})

    monkeypatch.setattr(first_trials, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first_trials.try_all(str(dataset), facts, candidates(facts))
    assert "checkpoint" not in capfd.readouterr().err
    (config,) = begun
    assert config.max_steps == first_trials.STEPS
    assert config.evaluate.early_stopping.patience == 6
    assert config.evaluate.early_stopping.metric == "refinement"


def test_the_command_by_rules_alone(sequences, tmp_path, capsys):
    out = tmp_path / "init.toml"
    assert main(["init", str(sequences), "--out", str(out), "--quick"]) == 0
    said = capsys.readouterr()
    assert f"jrec train {out}" in said.out
    assert list(load_config(out).model.dense_boundaries) == ["year", "share"]
    assert load_config(out).data.path == str(sequences)
    assert main(["init", str(sequences), "--out", str(out), "--quick"]) == 2
    assert "exists; replace it with --overwrite" in capsys.readouterr().err
    assert main(["init", str(sequences), "--out", str(out), "--overwrite", "--quick"]) == 0
    assert main(["init", str(sequences), "--out", str(sequences / "x.toml")]) == 2
    assert f"{sequences / 'x.toml'} lies inside the dataset {sequences}" in capsys.readouterr().err


@pytest.fixture
def searched(dataset, tmp_path, monkeypatch):
    """A search whose trials take no time: a function of minutes, what was tried anew, in words, and the file."""
    new = []

    def tried(path, facts, candidate, *, seed=0, callbacks=()):
        new.append(f"{candidate.title}{f' (seed {seed})' if seed else ''}")
        loss = 0.5 + abs(np.log2(candidate.rows[1] / 0.2)) / 100 + candidate.dim / 1e4 + seed / 1e4
        record = {"step": 12, "auc": 1 - loss, "refinement": loss}
        own = {"score": loss, "beside": 1 - loss, "step": 12, "steps": 24, "seconds": 1.0, "records": [record]}
        return first_trials.Trial(candidate=candidate, seed=seed, **own)

    monkeypatch.setattr(first_search, "tried", tried)
    out = tmp_path / "clicks.toml"

    def search(minutes, code=0):
        new.clear()
        assert main(["init", str(dataset), "--out", str(out), "--minutes", str(minutes), "--overwrite"]) == code
        return list(new)

    return search, out


def test_with_minutes_variants_of_the_best_kind_are_tried_and_kept(searched, dataset, capsys):
    search, out = searched
    first = search(1e-4)
    assert len(first) == 1  # there is always one
    assert "valid log loss" in capsys.readouterr().err
    more = search(5)
    assert first[0] not in more
    kinds = [candidate.name for candidate in candidates(facts_of(dataset, Schema.load(dataset)))]
    assert [title for title in more if title in kinds] == kinds[1:]
    assert [title for title in more if "(seed 1)" in title] == [f"{kinds[0]} (seed 1)"]
    # The best has the rate of 0.2, two steps from that of the kind, and the least dim.
    config = load_config(out)
    assert (config.optimizer.embedding.learning_rate, config.model.embedding_dim) == (0.2, 4)
    said = capsys.readouterr().err
    assert "products of all pairs of features, rare rows in large steps, rows' rate 0.2, dim 4: valid log loss" in said
    assert "min left" in said
    assert search(5) == []  # all of them are kept
    page = out.with_suffix(".html").read_text()
    assert "another seed differs by 0.00010 (nats per example): so much is chance" in page
    assert load_config(out).model == config.model


def test_a_search_that_is_interrupted_goes_on(searched, monkeypatch):
    search, out = searched
    tried, count = first_search.tried, []

    def interrupted(*arguments, **options):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return tried(*arguments, **options)

    monkeypatch.setattr(first_search, "tried", interrupted)
    search(5, code=130)
    assert not out.exists()
    before = [json.loads(line)["model"] for line in out.with_suffix(".trials.jsonl").read_text().splitlines()]
    assert len(before) == 2
    with out.with_suffix(".trials.jsonl").open("a") as kept:
        kept.write('{"trial": "of a kill')
    monkeypatch.setattr(first_search, "tried", tried)
    after = search(5)
    assert not set(before) & {title for title in after if "seed" not in title}
    assert out.exists()
    assert search(5) == []


def test_a_trial_that_takes_too_long_ends_with_the_time(dataset, tmp_path):
    facts, events = facts_of(dataset, Schema.load(dataset)), []
    clock = first_search._Clock(0.0)

    def watch(event):
        events.append(event.kind)
        clock.watch(event)

    trial = first_trials.tried(str(dataset), facts, candidates(facts)[0], callbacks=[watch])
    assert trial.steps < 100  # of some thousands
    assert events


def test_variants_differ_in_one_thing(dataset):
    facts = facts_of(dataset, Schema.load(dataset))
    (first, *_) = candidates(facts)
    of_seed = {"candidate": first, "beside": 0.5, "step": 1, "steps": 2, "seconds": 1.0}
    both = [first_trials.Trial(seed=seed, score=0.5 - seed / 4, **of_seed) for seed in (1, 0)]
    assert [trial.seed for trial in first_trials.best_first(both, facts.metric)] == [0, 1]
    assert first_trials.spread(both) == 0.25
    for variant in first.variants():
        changed = [f.name for f in dataclasses.fields(first) if getattr(variant, f.name) != getattr(first, f.name)]
        assert len(changed) == 2
        assert "tuned" in changed
        assert variant.title.startswith(f"{first.name}, ")
        assert first in [dataclasses.replace(back, tuned={}) for back in variant.variants()]


def test_minutes_and_quick_exclude_each_other(dataset, tmp_path, capsys):
    assert main(["init", str(dataset), "--out", str(tmp_path / "a.toml"), "--minutes", "1", "--quick"]) == 2
    assert "--quick trains nothing, but --minutes is 1" in capsys.readouterr().err
