"""Baselines: logistic regression against scikit-learn's, popularity by hand, their cache, and what reports have."""

import dataclasses
import json

import numpy as np
import pytest
import scipy.sparse
import sklearn.linear_model
from run_cases import CONFIG, configuring, quickstart
from train_command import train_command

from jrec.app.baselines import measure as measured
from jrec.app.baselines import popularity
from jrec.app.baselines.examples import Slots
from jrec.app.baselines.examples import Split as Blocks
from jrec.app.baselines.measure import measure, wanted
from jrec.app.preflight import _check_compared
from jrec.cli import main
from jrec.data.blocks import ListColumn, ShardWriter
from jrec.data.schema import CategoricalFeature, DenseFeature, Schema, Split, Table
from jrec.errors import ConfigError
from jrec.metrics import auc, log_loss

SPLITS = {"train": 6000, "valid": 1500, "test": 1500}


def random_columns(random, size, truth):
    """A one-hot, a multi-hot and a weighted feature, and a dense one on an odd scale, with clicks by a linear truth."""
    lengths = random.integers(0, 4, (2, size))
    lists = [ListColumn(np.r_[0, np.cumsum(n)].astype(np.int32), random.integers(0, 30, n.sum())) for n in lengths]
    one = random.integers(0, 40, size)
    dense = random.normal(size=size)
    weights = random.random(lengths[1].sum()).astype(np.float32)
    logits = truth["one"][one] + 0.5 * dense
    for name, column, weight in (("many", lists[0], 1.0), ("weighted", lists[1], weights)):
        owner = np.repeat(np.arange(size), np.diff(column.offsets))
        total = np.bincount(owner, truth[name][column.values] * weight, size)
        logits = logits + total / np.maximum(np.diff(column.offsets), 1)
    return {
        "label": (random.random(size) < 1 / (1 + np.exp(-logits))).astype(np.float32),
        "price": (1000 + 300 * dense).astype(np.float32),
        "one": one.astype(np.uint8),
        "many": ListColumn(lists[0].offsets, lists[0].values.astype(np.uint8)),
        "weighted": ListColumn(lists[1].offsets, lists[1].values.astype(np.uint8)),
        "weighted:weight": ListColumn(lists[1].offsets, weights),
    }


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    truth = {"one": 1.5 * random.normal(size=40), "many": random.normal(size=30), "weighted": random.normal(size=30)}
    splits = {}
    for name, size in SPLITS.items():
        with ShardWriter(folder / f"{name}-00000-of-00001.array_record", 1000) as writer:
            writer.write(random_columns(random, size, truth))
        splits[name] = Split(shards=(writer.shard,))
    schema = Schema(
        name="mixed",
        block_size=1000,
        dense=(DenseFeature(name="price"),),
        categorical=(
            CategoricalFeature(name="one", table="one", fixed_length=True),
            CategoricalFeature(name="many", table="many", max_length=3),
            CategoricalFeature(name="weighted", table="weighted", max_length=3, weighted=True),
        ),
        tables=(Table(name="one", rows=40), Table(name="many", rows=30), Table(name="weighted", rows=30)),
        splits=splits,
        provenance={},
    )
    schema.save(folder)
    return Schema.load(folder)


def matrix(schema, split):
    """The split's examples for scikit-learn, and their labels."""
    blocks = Blocks(schema.folder, schema, split)
    train = Blocks(schema.folder, schema, "train")
    slots = Slots(schema, train.read(train.blocks))
    found = [slots.of_block(columns) for columns in blocks.read(blocks.blocks)]
    rows = [scipy.sparse.csr_matrix((e.values, e.slots.astype(np.int64), e.offsets),
            (len(e.labels), slots.count)) for e in found]  # fmt: skip
    return scipy.sparse.vstack(rows).tocsr(), np.concatenate([e.labels for e in found])


def test_logistic_regression_is_as_good_as_scikit_learns(dataset, tmp_path):
    (x, y), (xt, yt) = matrix(dataset, "train"), matrix(dataset, "test")
    best = sklearn.linear_model.LogisticRegression(C=0.3, max_iter=500).fit(x, y).decision_function(xt)
    found = measure(dataset.folder, dataset, ["test"], cache=tmp_path)["logistic_regression"]["splits"]["test"]
    assert found["auc"] > auc(best, yt) - 0.004
    assert found["log_loss"] < log_loss(best, yt) + 0.004
    assert auc(best, yt) > 0.75


def test_slots_have_means_of_lists_and_standardized_dense_features(dataset):
    train = Blocks(dataset.folder, dataset, "train")
    slots = Slots(dataset, train.read(train.blocks))
    columns = next(train.read([(0, 3)]))
    found = slots.of_block(columns)
    assert slots.count == 1 + 1 + 40 + 30 + 30
    prices = found.values[found.slots == 1]
    assert abs(prices.mean()) < 0.2
    assert 0.8 < prices.std() < 1.2
    for i in range(50):
        own = slice(found.offsets[i], found.offsets[i + 1])
        ids = {name: column.values[column.offsets[i] : column.offsets[i + 1]] for name, column in columns.items()
               if isinstance(column, ListColumn)}  # fmt: skip
        many, weighted, weight = (ids[name] for name in ("many", "weighted", "weighted:weight"))
        wanted_slots = [0, 1, 2 + columns["one"][i], *(42 + many.astype(int)), *(72 + weighted.astype(int))]
        np.testing.assert_array_equal(found.slots[own], wanted_slots)
        means = [*np.full(len(many), 1 / max(1, len(many))), *(weight / max(1, len(weighted)))]
        np.testing.assert_allclose(found.values[own][3:], means, rtol=1e-6)
        assert found.values[own][0] == found.values[own][2] == 1


def test_popularity_is_the_smoothed_click_rate_of_the_best_feature(dataset, tmp_path):
    found = measure(dataset.folder, dataset, ["valid", "test"], cache=tmp_path)["popularity"]
    train, test = Blocks(dataset.folder, dataset, "train"), Blocks(dataset.folder, dataset, "test")
    columns = list(train.read(train.blocks))
    ids, labels = (np.concatenate([block[name] for block in columns]) for name in ("one", "label"))
    clicks, seen = np.bincount(ids, labels, 40), np.bincount(ids, minlength=40)
    rate = (labels.sum() + 1) / (labels.size + 2)
    smoothed = (clicks + 20 * rate) / (seen + 20)
    tested = list(test.read(test.blocks))
    scores = np.concatenate([smoothed[block["one"]] for block in tested])
    truth = np.concatenate([block["label"] for block in tested])
    assert found["feature"] == "one"
    assert found["splits"]["test"]["auc"] == pytest.approx(auc(scores, truth), abs=1e-9)
    assert found["splits"]["test"]["auc"] > 0.6
    valid = Blocks(dataset.folder, dataset, "valid")
    lists = dataclasses.replace(dataset, categorical=dataset.categorical[1:])
    of_lists = popularity.fit(lists, columns, list(valid.read(valid.blocks)))
    assert np.isfinite(of_lists.scores(tested).logits).all()
    assert popularity.fit(dataclasses.replace(dataset, categorical=()), columns, columns) is None


def test_results_are_kept_by_the_datasets_identity(dataset, tmp_path, monkeypatch):
    first = measure(dataset.folder, dataset, ["test"], cache=tmp_path)
    both = measure(dataset.folder, dataset, ["test", "valid"], cache=tmp_path)
    assert not first["cached"]
    assert not both["cached"]
    monkeypatch.setattr(measured, "_fitted", None)  # would raise
    again = measure(dataset.folder, dataset, ["test"], cache=tmp_path)
    assert again["cached"]
    assert again["logistic_regression"] == first["logistic_regression"]
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace('"auc": 0.', '"auc": 1.', 1))
    with pytest.raises(TypeError):  # an edited file does not count
        measure(dataset.folder, dataset, ["test"], cache=tmp_path)


@pytest.mark.parametrize("left", [6, 1])
def test_without_a_valid_split_the_last_blocks_of_train_choose(dataset, tmp_path, left):
    (shard,) = dataset.splits["train"].shards
    assert shard.blocks == 6
    splits = {"train": dataset.splits["train"] if left == 6 else dataset.splits["test"], "test": dataset.splits["test"]}
    schema = dataclasses.replace(dataset, splits=splits, block_size=1000)
    assert (
        measure(dataset.folder, schema, ["test"], cache=tmp_path)["logistic_regression"]["splits"]["test"]["auc"] > 0.7
    )


def test_only_small_datasets_have_baselines_unless_they_are_asked_for(dataset, monkeypatch):
    assert [wanted(mode, dataset) for mode in ("auto", "on", "off")] == [True, True, False]
    monkeypatch.setattr(measured, "SMALL", 5999)
    assert [wanted(mode, dataset) for mode in ("auto", "on", "off")] == [False, True, False]
    assert not wanted("on", dataclasses.replace(dataset, splits={"test": dataset.splits["test"]}))


def test_the_report_of_a_run_has_baselines_which_change_no_bit_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JREC_CACHE", str(tmp_path / "cache"))
    data = quickstart(tmp_path, rows=2000)
    runs = {mode: train_command(tmp_path, data, f"evaluate.baselines={mode}", out=mode) for mode in ("on", "off")}
    printed = capsys.readouterr().out
    reports = {mode: json.loads((folder / "report" / "metrics.json").read_text()) for mode, folder in runs.items()}
    assert "baselines" not in reports["off"]
    assert set(reports["on"]["baselines"]["popularity"]["splits"]) == {"valid", "test"}
    assert "test, baselines: logistic regression: AUC 0." in printed
    assert reports["on"]["splits"] == reports["off"]["splits"]
    assert (runs["on"] / "metrics.jsonl").read_bytes() == (runs["off"] / "metrics.jsonl").read_bytes()
    assert main(["eval", str(runs["on"]), str(data)]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["baselines"]["cached"]
    logistic = reports["on"]["baselines"]["logistic_regression"]["splits"]["test"]
    assert evaluated["baselines"]["logistic_regression"]["splits"]["test"] == logistic


def test_baselines_of_hot_and_cold_parts_are_refused_by_name(tmp_path):
    data = quickstart(tmp_path, rows=600)
    config = configuring(tmp_path, data, CONFIG)("schedule=fae", "evaluate.baselines=on")
    with pytest.raises(ConfigError, match=r"evaluate\.baselines is 'on', but with schedule 'fae'"):
        _check_compared(config, Schema.load(data))
