"""The benchmark of quality: the columns that peers get, ranks, and logs whose files are absent."""

import argparse
import io
import json
import pathlib
import tomllib
import types

import numpy as np
import pytest
import shop_logs

from benchmarks import harness, quality, quality_logs
from jrec.app.first_rules import Metric, Proposal, render
from jrec.data.blocks import LABEL, ListColumn, ShardReader
from jrec.data.schema import Schema
from jrec.prepare.readers import load_schema


def test_peers_get_the_columns_of_every_split(tmp_path):
    shop_logs.write_log(tmp_path / "monday.csv")
    dataset = pathlib.Path(shop_logs.prepare(tmp_path, tmp_path / "monday.csv", "monday"))
    schema, arrays = Schema.load(dataset), quality.columns_of(dataset)
    for split in ("train", "valid", "test"):
        (shard,) = schema.splits[split].shards
        reader = ShardReader(dataset, shard)
        blocks = [reader.read(number) for number in range(len(reader))]
        labels = np.concatenate([block[LABEL] for block in blocks])
        np.testing.assert_array_equal(arrays[f"{split}.labels"], labels > 0)
        one_hot = [f.name for f in schema.categorical if not isinstance(blocks[0][f.name], ListColumn)]
        lists = [f.name for f in schema.categorical if f.name not in one_hot]
        ids = [np.concatenate([block[name] for block in blocks]) for name in one_hot]
        np.testing.assert_array_equal(arrays[f"{split}.ids"], np.stack(ids, 1))
        assert arrays[f"{split}.dense"].shape == (len(labels), len(schema.dense))
        assert lists
        for number, name in enumerate(lists):
            values = np.concatenate([np.asarray(block[name].values) for block in blocks])
            lengths = np.concatenate([np.diff(block[name].offsets) for block in blocks])
            np.testing.assert_array_equal(arrays[f"{split}.{number}.values"], values)
            np.testing.assert_array_equal(np.diff(arrays[f"{split}.{number}.offsets"]), lengths)


def test_ranks_are_means_over_logs_and_ties_share_the_better_one():
    def log(aucs, losses):
        rows = zip(quality.RANKED, aucs, losses, strict=True)
        return {m: {"auc": a, "log_loss": loss, "calibration_error": 0.1} for m, a, loss in rows}

    text = io.StringIO()
    report = harness.Report(argparse.Namespace(quick=True, out=None), "quality", stdout=text)
    quality._ranks(
        report, [log((0.8, 0.7, 0.6, 0.5), (0.3, 0.2, 0.1, 0.4)), log((0.5, 0.7, 0.7, 0.4), (0.1, 0.2, 0.3, 0.4))]
    )
    found = {line["metric"]: line["value"] for line in map(json.loads, text.getvalue().splitlines())}
    assert [found[f"auc, {model}"] for model in quality.RANKED] == [2, 1.5, 2, 4]
    assert [found[f"log_loss, {model}"] for model in quality.RANKED] == [2, 2, 2, 4]
    assert [found[f"calibration_error, {model}"] for model in quality.RANKED] == [1, 1, 1, 1]


def test_means_measured_before_are_read_by_log(tmp_path):
    line = {"case": "frappe", "metric": "test log_loss, logistic regression, mean", "value": 0.25}
    others = [line | {"metric": "time of jrec init"}, line | {"metric": "test auc, jrec, worst seed"}]
    more = line | {"case": "kaggle, held out", "metric": "test auc, jrec, mean", "value": 0.77}
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (line, *others, more)))
    assert quality._measured_before([path]) == {
        "frappe": {"logistic regression": {"log_loss": 0.25}},
        "kaggle, held out": {"jrec": {"auc": 0.77}},
    }


def test_what_init_proposes_is_taken_from_its_comment(tmp_path):
    metric = Metric(key="log_loss", name="log loss", unit="nats per example")
    proposal = Proposal(why=("Some pairs",), sections='[[target_mean]]\nof = ["a", "b"]  # 3.0%\n')
    scores = ["  0.2705  products", "  0.2882  cross layers"]
    rules = types.SimpleNamespace(summary="100 training examples", warnings=tuple, metric=metric)
    text = render("a log", [], rules, [*scores, *proposal.lines])
    (tmp_path / "init.toml").write_text(text)
    assert tomllib.loads(quality.proposed(text)) == {"target_mean": [{"of": ["a", "b"]}]}
    assert quality.best_trial(tmp_path / "init.toml") == 0.2705
    assert not quality.proposed(render("a log", [], rules, scores))


def test_synthetic_pairs_are_one_log_with_and_without_their_means(tmp_path):
    logs = []
    for name in ("pairs", "pair_means"):
        (tmp_path / name).mkdir()
        arguments = quality_logs.LOGS[name].arguments(quality_logs.Places(packages=tmp_path, work=tmp_path / name))
        schema = load_schema(arguments[arguments.index("--schema") + 1])
        assert [mean.of for mean in schema.target_mean] == [("user", "item")] * (name == "pair_means")
        logs.append(pathlib.Path(arguments[arguments.index("--input") + 1]).read_bytes())
    assert logs[0] == logs[1]
    assert logs[0].count(b"\n") == 40_001


def test_a_log_without_its_files_says_which_are_absent(tmp_path):
    places = quality_logs.Places(packages=tmp_path, work=tmp_path)
    for name in ("frappe", "flights", "ml100k", "ratings", "verbagg", "restaurants"):
        with pytest.raises(quality_logs.AbsentError, match=rf"{tmp_path}/.* of the packages is absent"):
            quality_logs.LOGS[name].arguments(places)
    assert sum(log.held_out for log in quality_logs.LOGS.values()) == 3
