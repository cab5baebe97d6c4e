"""Batches of two towers against plain Python, what they may read of a dataset, and the ranks of a catalogue's items."""

import dataclasses
import re
import types
from typing import Any

import numpy as np
import pytest
from test_importance_kinds import prepared

import jrec
from jrec.access.container import write_container
from jrec.app.baselines import popular_items
from jrec.app.baselines.item_order import ItemOrder
from jrec.app.config import DataConfig, EvaluateConfig, FeatureOverride, ModelConfig, TrainConfig
from jrec.app.models import rank_items
from jrec.app.models.catalogue import Catalogue, catalogue_of, read_catalogue
from jrec.app.models.kinds.two_tower import TwoTowerSection
from jrec.app.models.rank_items import ItemRanker
from jrec.app.models.reading import Reading
from jrec.app.models.user_items import LOG_Q, UserItemPacker
from jrec.app.report.ranking import LEFT_OUT, NEVER, RankScores, evaluated
from jrec.app.watch import plan_evaluations
from jrec.data.columns import ListColumn
from jrec.data.dataset_packer import dataset_packer
from jrec.data.schema import CategoricalFeature, DatasetError, DenseFeature, Schema, Shard, Split, Table
from jrec.errors import CheckpointError, ConfigError
from jrec.prepare.joined import csv_source
from jrec.prepare.readers.delimited import schema_of_features, stored_schema
from jrec.prepare.readers.delimited_schema import check_schema, load_schema

ROWS, LENGTH = 9, 3


def schema_of(*, labels=True, **changes):
    settings = {"rows": ROWS, "oov_row": 0, **changes}
    return Schema(
        name="log",
        block_size=16,
        dense=tuple(DenseFeature(name=n) for n in ("price", "age", "time")),
        splits={},
        provenance={},
        labels=labels,
        tables=(Table(name="user", rows=5), Table(name="item", **settings), Table(name="tag", rows=4)),
        categorical=(
            CategoricalFeature(name="user", table="user", fixed_length=True),
            CategoricalFeature(name="item", table="item", fixed_length=True),
            CategoricalFeature(name="past", table="item", max_length=LENGTH),
            CategoricalFeature(name="tags", table="tag", max_length=2, weighted=True),
            CategoricalFeature(name="page", table="user", fixed_length=True),
        ),
    )


def sections(**changes):
    own = {"user": ("past", "age", "user"), "item": ("price", "item", "tags"), "id": "item", "history": "past"}
    return {"two_tower": TwoTowerSection(**{**own, **changes})}


def model(**changes):
    return ModelConfig(kind="two_tower", sections=sections(**changes))


def configured(own=None, **evaluate):
    return TrainConfig(data=DataConfig(path="data"), model=own or model(), evaluate=EvaluateConfig(**evaluate))


def packer(*, training, log_q=None):
    schema = model().of_kind.schema(model(), schema_of())
    tables = [jrec.TableConfig(name=table.name, rows=table.rows, dim=4) for table in schema.tables]
    features = [
        jrec.FeatureConfig(
            name=f.name, table=f.table, max_length=f.max_length, fixed_length=f.fixed_length, weighted=f.weighted
        )
        for f in schema.categorical
    ]
    extras = UserItemPacker.names(training=training, log_q=log_q is not None)
    layout = jrec.EmbeddingLayout.build(tables, features)
    inner = dataset_packer("data", schema, layout, extras=extras)
    return UserItemPacker(inner, item="item", history="past", log_q=log_q), inner


def columns():
    offsets = np.array([0, 2, 2, 5])
    return {
        "label": np.array([1, 0, 1], np.float32),
        "age": np.array([1, 2, 3], np.float32),
        "price": np.array([4, 5, 6], np.float32),
        "user": np.array([4, 0, 2], np.uint32),
        "item": np.array([8, 1, 3], np.uint32),
        "past": ListColumn(offsets, np.array([1, 2, 3, 4, 5], np.uint32)),
        "tags": ListColumn(np.array([0, 1, 3, 3]), np.array([0, 1, 3], np.uint32)),
        "tags:weight": ListColumn(np.array([0, 1, 3, 3]), np.array([0.5, 1, 2], np.float32)),
    }


def test_a_line_has_both_sides_its_item_and_the_items_share():
    log_q = np.linspace(-3, 0, ROWS).astype(np.float32)
    one, inner = packer(training=True, log_q=log_q)
    assert set(one.columns) == set(columns())
    batch = one.pack(one.prepare(columns()), 4)
    assert batch.dense.tolist() == [[1, 4], [2, 5], [3, 6], [0, 0]]  # the user's before the item's
    assert batch.labels.tolist() == [1, 0, 1, 0]
    assert batch.extras["target"].tolist() == [8, 1, 3, 0]
    np.testing.assert_array_equal(batch.extras[LOG_Q][:3], log_q[[8, 1, 3]])
    plain = inner.pack(inner.prepare({**columns(), "/target": np.zeros(3, int), f"/{LOG_Q}": np.zeros(3)}), 4)
    for name, bags in plain.bags.items():
        np.testing.assert_array_equal(batch.bags[name].ids, bags.ids)
        np.testing.assert_array_equal(batch.bags[name].weights, bags.weights)
    assert set(packer(training=True)[0].pack(one.prepare(columns()), 3).extras) == {"target"}


def test_in_evaluation_there_is_the_history_and_a_side_may_be_missing():
    one, inner = packer(training=False)
    batch = one.pack(one.prepare(columns()), 4)
    assert batch.extras["seen"].tolist()[:3] == [[1, 2, -1], [-1] * 3, [3, 4, 5]]
    user = {name: columns()[name] for name in ("past", "user", "age")}
    alone = one.pack(one.prepare(user), 4)
    assert alone.extras["target"].tolist()[:3] == [-1] * 3
    np.testing.assert_array_equal(alone.extras["seen"], batch.extras["seen"])
    assert alone.dense.tolist() == [[1, 0], [2, 0], [3, 0], [0, 0]]
    items = {name: columns()[name] for name in ("item", "price", "tags", "tags:weight")}
    alone = one.pack(one.prepare(items), 4)
    assert alone.dense.tolist() == [[0, 4], [0, 5], [0, 6], [0, 0]]
    assert alone.extras["target"].tolist()[:3] == [8, 1, 3]
    for name, want in (("item", 8), ("tags", 0)):
        stack, number = inner.layout.places[name][0]
        ids, offsets = alone.bags[stack.name].ids.reshape(-1), alone.bags[stack.name].offsets
        first = stack.features[number].first_bag * 4
        at = first if offsets is None else offsets[first]
        assert ids[at] - stack.features[number].base == want


def test_what_is_read_is_what_the_towers_name():
    read = model().of_kind.schema(model(), schema_of())
    assert [f.name for f in read.dense] == ["age", "price"]
    assert [f.name for f in read.categorical] == ["user", "item", "past", "tags"]
    assert [t.name for t in read.tables] == ["user", "item", "tag"]
    assert read.labels
    assert model().of_kind.unread(model(), schema_of()) == "time, page"
    assert model().of_kind.item_table(model(), read).name == "item"
    asked = model().of_kind.request_schema(model(), read)
    assert [f.name for f in asked.dense + asked.categorical] == ["age", "user", "past"]
    assert [t.name for t in asked.tables] == ["user", "item"]
    assert not asked.labels


@pytest.mark.parametrize(
    ("own", "changes", "message"),
    [
        ({"user": ("past", "income")}, {}, "two_tower.user names 'income', but the features .* price, age, time"),
        ({"id": "price"}, {}, "two_tower.id is 'price', but the categorical features .* user, item, past, tags"),
        ({"id": "tags"}, {}, "two_tower.id is 'tags', which has several ids"),
        ({"history": "user"}, {}, "history is 'user' of table 'user', but must be a list of ids of table 'item'"),
        ({"user": ("age",), "history": ""}, {}, "dense features alone; name a categorical one"),
        ({}, {"growing": True, "oov_row": None}, "table 'item', but that table grows"),
        ({}, {"rows": 2}, "table 'item' has 2 row"),
    ],
)  # fmt: skip
def test_datasets_that_do_not_fit(own, changes, message):
    with pytest.raises(ConfigError, match=message):
        model(**own).of_kind.schema(model(**own), schema_of(**changes))


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({"sections": sections(user=())}, {}, "two_tower.user is empty; name the features"),
        ({"sections": sections(item=("item", "user"))}, {}, "'user' is named twice in model.two_tower.user and item"),
        ({"sections": sections(id="")}, {}, r"two_tower.id is '', but must be one of model.two_tower.item = \['price'"),
        ({"sections": sections(history="item")}, {}, "history is 'item', but must be one of model.two_tower.user"),
        ({"sections": sections(item_mlp=(8,))}, {}, r"item_mlp \[8\]; give both a layer, and last layers of one width"),
        ({"pooling": "none"}, {}, "model.pooling is 'none', but a tower"),
        ({"features": {"past": FeatureOverride(pooling="none")}}, {}, "model.features.past is 'none', but a tower"),
        ({"members": 2, "calibrate": True}, {}, "calibrate, model.members are set, but model.kind is 'two_tower'"),
        ({"kind": "dlrm"}, {}, "model.two_tower is set, but model.kind is 'dlrm'"),
        ({"kind": "hstu"}, {}, "model.two_tower is set, but model.kind is 'hstu'"),
        ({}, {"schedule": "fae"}, "schedule is 'fae', but model.kind 'two_tower'"),
        ({}, {"evaluate": EvaluateConfig(group="user")}, "evaluate.group is 'user'"),
        ({}, {"data": DataConfig(path="data", micro_batches=2)}, "data.micro_batches is 2, but model.kind 'two_tower'"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(change, more, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(
            **{
                "data": DataConfig(path="data"),
                "model": ModelConfig(**{"kind": "two_tower", "sections": sections(), **change}),
                **more,
            }
        )


def test_a_split_without_a_click_cannot_be_evaluated():
    with pytest.raises(DatasetError, match="has no line with label 1; evaluate more batches"):
        evaluated(RankScores(ranks=np.empty(0, np.int32), candidates=3, at=(2,)))


LOG = """
[label]
column = "click"
[time]
column = "at"
format = "seconds"
[[dense]]
column = "years"
name = "age"
[[categorical]]
column = "who"
name = "user"
[[categorical]]
column = "item"
[[categorical]]
column = "past"
history = {by = "user", of = "item", length = 3}
[[categorical]]
column = "at"
part = "hour"
[[join]]
file = "items.csv"
key = "item"
[[join.dense]]
column = "price"
[[join]]
file = "users.csv"
key = "who"
[[join.categorical]]
column = "city"
[[join.categorical]]
column = "street"
"""


def test_a_request_has_the_columns_of_the_users_features_alone(tmp_path):
    (tmp_path / "log.toml").write_text(LOG)
    log = schema_of_features(load_schema(str(tmp_path / "log.toml")), ("past", "age", "user", "city", "at_hour"))
    stored = stored_schema(log)
    check_schema(log, "of a request")
    assert [column.feature for column in log.categorical] == ["user", "past", "at_hour"]
    assert [(join.title, [c.feature for c in join.categorical]) for join in log.join] == [("users.csv", ["city"])]
    source = csv_source(log).with_labels("optional").predicted()
    assert {field.name for field in source.prejoined().raw_fields()} == {"at", "who", "years", "past", "city"}
    past = next(column for column in stored["categorical"] if column["column"] == "past")
    assert (past["table"], past["max_length"], past["too_long"], past["lists"]) == ("item", 3, "last", True)
    fewer = schema_of_features(load_schema(str(tmp_path / "log.toml")), ("user",))
    assert {field.name for field in csv_source(fewer).predicted().raw_fields()} == {"who"}


def test_batches_stay_large_and_the_metric_is_of_ranking():
    config = configured()
    assert (config.data.batch_size, config.data.eval_batch_size) == (2048, 8192)
    assert config.evaluate.early_stopping.metric == "ndcg"


@pytest.mark.parametrize(("rows", "count"), [(ROWS, 16), (1_000_000, 8), (10**8, 5)])
def test_where_items_are_many_there_are_fewer_evaluations(rows, count):
    shard = Shard(file="valid", blocks=1, examples=8192, bytes=1, digest="")
    schema = dataclasses.replace(schema_of(rows=rows), splits={"valid": Split(shards=(shard,))})
    plan = plan_evaluations(configured(), model().of_kind.schema(model(), schema), 40_000)
    assert -(-40_000 // plan.every_steps) == count


def plain_rank(scores, target, left_out):
    if target in left_out:
        return LEFT_OUT
    return sum(s >= scores[target] for row, s in scores.items() if row != target and row not in left_out)


@pytest.mark.parametrize("leave_out", [True, False])
def test_only_items_of_the_catalogue_are_ranked_and_only_clicks_count(leave_out, monkeypatch):
    draw, rows = np.random.default_rng(0), np.array([1, 2, 4, 5, 8])
    vectors = draw.normal(size=(5, 4)).astype(np.float32)
    monkeypatch.setattr(rank_items, "item_vectors", lambda *arguments: vectors)
    users, targets, seen = (
        draw.normal(size=(40, 4)).astype(np.float32),
        draw.integers(0, ROWS, 40),
        draw.integers(-1, ROWS, (40, 2)),
    )
    run: Any = types.SimpleNamespace(mesh=None)
    schema = model().of_kind.schema(model(), schema_of())
    config = configured(at=(2,), leave_out_history=leave_out)
    ranker = ItemRanker(Reading(run=run, config=config, schema=schema, catalogue=Catalogue(rows=rows, columns={})))
    assert ranker.candidates == 5
    _, best = ranker.best(users, seen, 3)
    found = ranker.ranks(users, targets, seen)
    for k in range(40):
        scores = dict(zip(rows.tolist(), (vectors.astype(np.float64) @ users[k]).tolist(), strict=True))
        out = set(seen[k].tolist()) if leave_out else set()
        assert found[k] == (plain_rank(scores, int(targets[k]), out) if targets[k] in scores else NEVER)
        order = [row for row in sorted(scores, key=lambda row: -scores[row]) if row not in out][:3]
        assert best[k].tolist() == order + [-1] * (3 - len(order))
    labels, mask = draw.integers(0, 2, 40).astype(np.float32), np.append(np.ones(38), [0, 0]).astype(np.float32)
    batch: Any = types.SimpleNamespace(labels=labels, mask=mask, extras={"target": targets, "seen": seen})
    of_clicks = ranker.scores([({"user": users}, batch)])
    np.testing.assert_array_equal(of_clicks.ranks, found[(labels > 0) & (mask > 0)])


def test_popularity_without_a_history_leaves_nothing_out():
    counts, candidates = np.array([9, 5, 3, 4, 1, 1, 0, 2, 8]), np.arange(ROWS) != 0
    config = configured(model(user=("user",), history=""))
    order = ItemOrder(counts, candidates=candidates)
    found = popular_items._ranks(config, order, {"item": np.array([0, 8, 1, 2, 4], np.uint32)})
    assert found.tolist() == [NEVER, 0, 1, 3, 6]


VIEWS = """
{labels}
[time]
column = "at"
format = "seconds"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
[[categorical]]
column = "past"
history = {{by = "user", of = "item", length = 3}}
"""
CLICKS = '[label]\ncolumn = "click"'


def views(tmp_path, lines, labels, *options):
    """A configuration and a dataset of lines of a user, an item and a click, one a second."""
    log = "".join(f"{user},{item},{at},{click}\n" for at, (user, item, click) in enumerate(lines))
    (tmp_path / "log.csv").write_text("user,item,at,click\n" + log)
    prepared(tmp_path, VIEWS.format(labels=labels), tmp_path / "log.csv", "--min-count", "1", *options)
    own = model(user=("user", "past"), item=("item",))
    config = dataclasses.replace(configured(own, at=(1,)), data=DataConfig(path=str(tmp_path / "data")))
    schema = own.of_kind.schema(own, Schema.load(tmp_path / "data"))
    return config, schema, popular_items.popular_items(config, schema, ["test"])


def test_popularity_is_of_clicks(tmp_path):
    # "a" is shown most often and, being in histories, read most often of all; "b" is what is clicked.
    lines = [(f"u{k % 4}", "a" if k % 3 else "b", int(k % 3 == 0 or k == 1)) for k in range(60)]
    lines += [(f"n{k}", "b", k >= 10) for k in range(20)]  # no click in valid
    _, _, sections = views(tmp_path, lines, CLICKS, "--split", "0.75,0.125,0.125")
    assert sections["popularity"]["splits"]["test"]["hr@1"] == 1
    assert sections["ease"]["ranked_by"].endswith("ridge 200")


def test_baselines_rank_the_items_that_two_towers_have_vectors_of(tmp_path):
    lines = [("x", item, 1) for item in "abec"] + [("y", item, 1) for item in "cbea"]
    config, schema, sections = views(tmp_path, lines, "", "--no-labels", "--split-by", "leave-one-out")
    assert len(read_catalogue(schema, config).rows) == 1  # "b"; "a" and "c" are in histories alone
    for name in ("popularity", "transitions", "ease"):
        assert sections[name]["splits"]["test"]["unknown_items"] == 2
    counts, of_lines = popular_items._counts(config, schema, schema.table("item"))
    assert sorted(counts.tolist())[-3:] == [1, 1, 2]
    assert of_lines.sum() == 2


def test_a_kept_catalogue_of_another_dataset_is_not_taken(tmp_path, monkeypatch):
    made = []

    def read(schema, config):
        made.append(schema)
        tags = ListColumn(np.array([0, 2, 2]), np.array([1, 2], np.uint32))
        return Catalogue(rows=np.array([1, 3]), columns={"item": np.array([1, 3], np.uint32), "tags": tags})

    monkeypatch.setattr("jrec.app.models.catalogue.read_catalogue", read)
    schema = model().of_kind.schema(model(), schema_of())
    other = model().of_kind.schema(model(), schema_of(numbering="another"))
    first = catalogue_of(tmp_path, configured(), schema, schema.identity, keep=True)
    again = catalogue_of(tmp_path, configured(), other, schema.identity)
    assert len(made) == 1  # kept, also where another dataset is evaluated
    assert first is not None
    assert again is not None
    assert again.rows.tolist() == first.rows.tolist()
    assert [part.tolist() for part in again.columns["tags"]] == [part.tolist() for part in first.columns["tags"]]
    assert catalogue_of(tmp_path, configured(), other, other.identity) is not None
    assert catalogue_of(tmp_path, configured(model(item=("item", "price"))), schema, schema.identity) is not None
    assert len(made) == 3
    plain = TrainConfig(data=DataConfig(path="data"))
    assert plain.model.of_kind.catalogue(tmp_path, plain, schema, schema.identity) is None
    (tmp_path / "catalogue").write_bytes((tmp_path / "catalogue").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"truncated or damaged.*delete it"):
        catalogue_of(tmp_path, configured(), schema, schema.identity)
    (tmp_path / "catalogue").unlink()
    with pytest.raises(CheckpointError, match="has no catalogue of the items to rank, which are read from"):
        catalogue_of(tmp_path, configured(), other, schema.identity)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.array([3, 1])}, "rows are not ascending"),
        ({"rows": np.array([[1, 3]])}, "rows are not ascending"),
        ({"rows": None}, "rows are not ascending"),
        ({"rows": np.array([1, ROWS])}, "rows are from 1 to 9, of a table of 9"),
        ({"values of item": np.array([1])}, "array 'values of item' has 1 values, which are not those of 2 items"),
        ({"offsets of tags": np.array([0, 3, 2])}, "array 'values of tags' has 2 values"),
        ({"offsets of tags": np.array([0, 1])}, "array 'values of tags' has 2 values"),
        ({"other": np.array([0, 1])}, "array 'other' is odd"),
    ],
)  # fmt: skip
def test_a_kept_catalogue_is_checked(change, message, tmp_path):
    schema = model().of_kind.schema(model(), schema_of())
    arrays = {
        "rows": np.array([1, 3]), "values of item": np.array([1, 3], np.uint32),
        "offsets of tags": np.array([0, 2, 2]), "values of tags": np.array([1, 2], np.uint32),
    }  # fmt: skip
    changed = {name: array for name, array in {**arrays, **change}.items() if array is not None}
    header = {**schema.identity.digests, "item": ["price", "item", "tags"]}
    for written in (arrays, changed):
        write_container(tmp_path / "catalogue", kind="jrec-catalogue", version=1, header=header, arrays=written)
        if written is arrays:
            assert catalogue_of(tmp_path, configured(), schema, schema.identity) is not None
    with pytest.raises(CheckpointError, match=re.escape(message)):
        catalogue_of(tmp_path, configured(), schema, schema.identity)
