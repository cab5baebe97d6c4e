"""Batches of models that rank items, against plain Python; the ranks that evaluations and popularity give."""

import dataclasses
import tomllib
import types
from typing import Any

import numpy as np
import pytest

import jrec
from jrec.app.baselines import popular_items
from jrec.app.baselines.item_order import ItemOrder, Pairs
from jrec.app.config import DataConfig, EvaluateConfig, ModelConfig, TrainConfig
from jrec.app.models.kinds.hstu import SequenceSection
from jrec.app.models.next_items import NextItemPacker, feature_names
from jrec.app.models.oov_ids import OovIds
from jrec.app.models.rank_items import ItemRanker
from jrec.app.models.reading import Reading
from jrec.app.report.ranking import LEFT_OUT, NEVER, RankScores, evaluated
from jrec.data.columns import ListColumn
from jrec.data.schema import CategoricalFeature, DatasetError, Schema, Table
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout, FeatureConfig

ROWS, LENGTH, DRAWN = 9, 4, 3
NAMES = feature_names("history", "item")


def layout(drawn=DRAWN):
    lengths = (LENGTH, LENGTH, drawn)
    return EmbeddingLayout.build(
        [jrec.TableConfig(name="item", rows=ROWS, dim=8)],
        [
            FeatureConfig(name=n, table="item", max_length=k, pooling="none")
            for n, k in zip(NAMES, lengths, strict=True)
        ],
    )


def packer(drawn=DRAWN, **options):
    return NextItemPacker(layout(drawn), history="history", item="item", rows=ROWS, **options)


def columns_of(lists, items):
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.int64)
    values = np.array([row for one in lists for row in one], np.uint32)
    return {"history": ListColumn(offsets, values), "item": np.array(items, np.uint32)}


def padded(lists, length, lines):
    return [[*one, *[-1] * (length - len(one))] for one in lists] + [[0] * length] * (lines - len(lists))


def looked_up(batch, name, drawn=DRAWN):
    """The rows of a feature, (batch, length), -1 for none."""
    (stack,) = layout(drawn).members
    feature = next(f for f in stack.features if f.config.name == name)
    lines, length = len(batch.labels), feature.config.max_length
    bags, first = batch.bags[stack.name], feature.first_bag * lines
    if bags.offsets is None:
        return bags.ids.reshape(-1)[first : first + lines * length].reshape(lines, length).tolist()
    found = np.full(lines * length, -1)
    for k in range(lines * length):
        begin, stop = bags.offsets[first + k : first + k + 2]
        assert stop - begin <= 1
        found[k] = bags.ids[begin] if stop > begin else -1
    return found.reshape(lines, length).tolist()


@pytest.mark.parametrize("lists", [[[1, 2, 3], [], [4], [5, 6, 7, 8]], [[1, 2, 3, 4]] * 3, [[], []]])
@pytest.mark.parametrize("oov_row", [None, 0, 5])
def test_training_batches(lists, oov_row):
    items, size = [3, 1, 0, 2][: len(lists)], 5
    one = packer(oov_row=oov_row, seed=7)
    batch = one.pack(one.prepare(columns_of(lists, items)), size, number=2)
    following = [[*own[1:], item] if own else [] for own, item in zip(lists, items, strict=True)]
    assert batch.extras["next"].tolist() == padded(following, LENGTH, size)
    blank = [[-1] * LENGTH] * (size - len(lists))
    assert looked_up(batch, NAMES[0]) == padded(lists, LENGTH, len(lists)) + blank
    assert looked_up(batch, NAMES[1]) == padded(following, LENGTH, len(lists)) + blank
    sampled = batch.extras["sampled"][: len(lists)]
    assert looked_up(batch, NAMES[2]) == sampled.tolist() + [[-1] * DRAWN] * (size - len(lists))
    assert batch.mask.tolist() == [1] * len(lists) + [0] * (size - len(lists))


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("history", ["seen", "target", "next", "sampled"])
def test_a_history_may_be_called_as_an_extra_is(history, seed):
    lists, items = [[1, 2, 3], [], [4]], [3, 1, 0]
    features = [
        FeatureConfig(name=name, table="item", max_length=length, pooling="none")
        for name, length in zip((history, *NAMES[1:]), (LENGTH, LENGTH, DRAWN), strict=True)
    ]
    called = jrec.EmbeddingLayout.build([jrec.TableConfig(name="item", rows=ROWS, dim=8)], features)
    one = NextItemPacker(called, history=history, item="item", rows=ROWS, oov_row=0, seed=seed)
    columns = columns_of(lists, items)
    batch = one.pack(one.prepare({history: columns["history"], "item": columns["item"]}), 4)
    plain = packer(oov_row=0, seed=seed)
    wanted = plain.pack(plain.prepare(columns), 4)
    (bags,), (other,) = batch.bags.values(), wanted.bags.values()
    np.testing.assert_array_equal(bags.ids, other.ids)
    assert {name: array.tolist() for name, array in batch.extras.items()} == {
        name: array.tolist() for name, array in wanted.extras.items()
    }


@pytest.mark.parametrize("oov_row", [None, 0, 4, ROWS - 1])
def test_negatives_are_uniform_and_depend_on_seed_and_batch_alone(oov_row):
    one = packer(oov_row=oov_row, seed=1)
    prepared = one.prepare(columns_of([[1]] * 3000, [2] * 3000))

    def drawn(who, number):
        return who.pack(prepared, 3000, number=number).extras["sampled"]

    counts = np.bincount(drawn(one, 0).reshape(-1), minlength=ROWS)
    wanted = 9000 / (ROWS - (oov_row is not None))
    assert [abs(n - wanted) < 5 * wanted**0.5 for n in counts] == [row != oov_row for row in range(ROWS)]
    np.testing.assert_array_equal(drawn(one, 3), drawn(packer(oov_row=oov_row, seed=1), 3))
    assert (drawn(one, 3) != drawn(one, 4)).any()
    assert (drawn(one, 3) != drawn(packer(oov_row=oov_row, seed=2), 3)).any()


@pytest.mark.parametrize("oov_row", [None, 0, 4])
def test_each_position_has_negatives_of_its_own(oov_row):
    lists, each, size = [[1, 2, 3], [], [4], [5, 6, 7, 8]] * 400, 5, 1_601
    one = packer(each * LENGTH, oov_row=oov_row, seed=7, negatives="position")
    batch = one.pack(one.prepare(columns_of(lists, [3] * len(lists))), size, number=2)
    drawn = batch.extras["sampled"]
    assert looked_up(batch, NAMES[2], each * LENGTH) == [*drawn[:-1].tolist(), [-1] * each * LENGTH]
    drawn = drawn[:-1].reshape(-1, LENGTH, each)
    assert ((drawn >= 0) == (batch.extras["next"][:-1] >= 0)[..., None]).all()
    drawn = drawn[drawn >= 0].reshape(-1, each)
    wanted = drawn.size / (ROWS - (oov_row is not None))
    counts = np.bincount(drawn.reshape(-1), minlength=ROWS)
    assert [abs(n - wanted) < 5 * wanted**0.5 for n in counts] == [row != oov_row for row in range(ROWS)]
    assert len({tuple(own) for own in drawn.tolist()}) > len(drawn) / 2
    other = one.pack(one.prepare(columns_of(lists, [3] * len(lists))), size, number=3)
    assert (other.extras["sampled"] != batch.extras["sampled"]).any()


@pytest.mark.parametrize("oov_row", [None, 4])
@pytest.mark.parametrize(("processes", "examples"), [(1, 4), (1, 1), (2, 2), (2, 1), (2, 0), (4, 1)])
def test_all_items_are_in_every_step_once(oov_row, processes, examples):
    """A step of four examples, by one process or several, whose batches may be short, or have no example at all."""
    lists, size = [[1, 2, 3], [7]][:examples] + [[5]] * max(0, examples - 2), 4 // processes
    one = packer(oov_row=oov_row, seed=7, negatives="all", batch_size=4, aged=True)
    ages = ListColumn(columns_of(lists, [])["history"].offsets, np.ones(sum(map(len, lists)), np.float32))
    prepared = one.prepare({**columns_of(lists, [3] * examples), "history:weight": ages})
    batches = [one.pack(prepared, size, number=3 * processes + process) for process in range(processes)]
    for batch in batches:
        assert batch.mask.tolist() == [1] * examples + [0] * (size - examples)
        assert looked_up(batch, NAMES[0])[:examples] == padded(lists, LENGTH, examples)
        assert looked_up(batch, NAMES[0])[examples:] == [[-1] * LENGTH] * (size - examples)
        assert looked_up(batch, NAMES[2]) == batch.extras["sampled"].tolist()
        assert (batch.dense.sum(axis=1) == [*map(len, lists), *[0] * (size - examples)]).all()
    every = np.concatenate([batch.extras["sampled"].reshape(-1) for batch in batches])
    assert sorted(every[every >= 0].tolist()) == [row for row in range(ROWS) if row != oov_row]


def test_evaluation_batches_have_the_item_and_the_history():
    one, lists = packer(oov_row=0), [[1, 2, 3], [], [4]]
    batch = one.pack(one.prepare(columns_of(lists, [5, 6, 7])), 4)
    assert batch.extras["target"].tolist() == [5, 6, 7, 0]
    assert batch.extras["seen"].tolist() == padded(lists, LENGTH, 4)
    assert looked_up(batch, NAMES[0])[:3] == padded(lists, LENGTH, 3)
    assert looked_up(batch, NAMES[1]) == [[-1] * LENGTH] * 4
    assert looked_up(batch, NAMES[2]) == [[-1] * DRAWN] * 4
    only_history = {"history": columns_of(lists, [0] * 3)["history"]}
    assert one.pack(one.prepare(only_history), 3).extras["target"].tolist() == [-1] * 3


@pytest.mark.parametrize("seed", [7, None])
def test_ages_are_the_dense_numbers(seed):
    one, lists = packer(oov_row=0, seed=seed, aged=True), [[1, 2, 3], [], [4]]
    columns = columns_of(lists, [5, 6, 7])
    ages = ListColumn(columns["history"].offsets, np.array([9, 2.5, 1, 0.5], np.float32))
    assert one.columns == ["history", "history:weight", "item"]
    prepared = one.prepare({**columns, "history:weight": ages})
    batch = one.pack(prepared, 4)
    assert batch.dense.dtype == np.float32
    assert batch.dense.tolist() == [[9, 2.5, 1, 0], [0] * 4, [0.5, 0, 0, 0], [0] * 4]
    assert one.pack(prepared.take(np.array([2, 0])), 2).dense.tolist() == [[0.5, 0, 0, 0], [9, 2.5, 1, 0]]
    plain = packer(oov_row=0, seed=seed)
    assert plain.pack(plain.prepare(columns), 4).dense.shape == (4, 0)
    with pytest.raises(DatasetError, match="'history:weight' is nan in example 0"):
        one.pack(one.prepare({**columns, "history:weight": ListColumn(ages.offsets, ages.values * np.nan)}), 4)


@pytest.mark.parametrize(
    ("kind", "ages", "read"), [("hstu", True, True), ("hstu", False, False), ("sasrec", True, False)]
)
def test_models_read_ages_if_they_can_and_shall(kind, ages, read):
    model = ModelConfig(kind=kind, sections={"sequence": SequenceSection(ages=ages)})
    plain = schema_of()
    history = CategoricalFeature(name="history", table="item", max_length=LENGTH, weighted=True, aged=True)
    aged = dataclasses.replace(plain, categorical=(*plain.categorical[:2], history))
    assert [f.aged for f in model.of_kind.schema(model, aged).categorical] == ([True, None] if read else [None, None])
    assert model.of_kind.schema(model, plain).categorical == plain.categorical[1:][::-1]
    assert (model.of_kind.schema(model, aged) == model.of_kind.schema(model, plain)) is not read
    weighted = dataclasses.replace(history, aged=None)
    with pytest.raises(ConfigError, match="'history', which is weighted"):
        model.of_kind.schema(model, dataclasses.replace(plain, categorical=(*plain.categorical[:2], weighted)))


def schema_of(**changes):
    settings = {"rows": ROWS, "oov_row": 0, **changes}
    return Schema(
        name="log", block_size=16, dense=(), splits={}, provenance={}, tables=(
            Table(name="user", rows=3), Table(name="item", **settings)
        ), categorical=(
            CategoricalFeature(name="user", table="user", fixed_length=True),
            CategoricalFeature(name="item", table="item", fixed_length=True),
            CategoricalFeature(name="history", table="item", max_length=LENGTH),
        ),
    )  # fmt: skip


def test_unknown_items_of_a_history_leave_what_comes_next_as_it_is():
    plain = packer(oov_row=5, seed=7)
    lists, items = [[1, 2, 3], [4], [6, 7, 8, 0]], [3, 1, 2]
    drawn = OovIds(plain, {"history": 5}, rate=0.7, seed=0)
    one, other = (p.pack(p.prepare(columns_of(lists, items)), 3, number=2) for p in (plain, drawn))
    before, after = (np.array(looked_up(batch, NAMES[0])) for batch in (one, other))
    assert 0 < (before != after).sum() < (before >= 0).sum()
    assert set(after[before != after]) == {5}
    for name in NAMES[1:]:
        assert looked_up(one, name) == looked_up(other, name)
    for name, extra in one.extras.items():
        np.testing.assert_array_equal(other.extras[name], extra)


def configured(**evaluate):
    return TrainConfig(
        data=DataConfig(path="data"), model=ModelConfig(kind="hstu"), evaluate=EvaluateConfig(**evaluate)
    )


def plain_rank(scores, target, left_out):
    own = scores[target]
    if target in left_out:
        return LEFT_OUT
    return sum(s >= own for row, s in enumerate(scores) if row != target and row not in left_out)


@pytest.mark.parametrize("leave_out", [True, False])
@pytest.mark.parametrize("oov_row", [None, 0, 4])
def test_ranks_and_best_items(leave_out, oov_row):
    draw = np.random.default_rng(0)
    rows, users = draw.normal(size=(ROWS, 8)).astype(np.float32), draw.normal(size=(40, 8)).astype(np.float32)
    seen, targets = draw.integers(-1, ROWS, (40, 3)), draw.integers(0, ROWS, 40)
    config, schema = (
        configured(at=(2,), leave_out_history=leave_out),
        ModelConfig(kind="hstu").of_kind.schema(ModelConfig(kind="hstu"), schema_of(oov_row=oov_row)),
    )
    run: Any = types.SimpleNamespace(table=lambda name: rows, mesh=None)
    ranker = ItemRanker(Reading(run=run, config=config, schema=schema))
    units = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    scores = users.astype(np.float64) @ units.T
    found, (best_scores, best) = ranker.ranks(users, targets, seen), ranker.best(users, seen, 4)
    for k in range(40):
        out = {*(seen[k].tolist() if leave_out else ()), oov_row}
        expected = NEVER if targets[k] == oov_row else plain_rank(scores[k], targets[k], out)
        assert found[k] == expected
        order = [row for row in np.argsort(-scores[k]) if row not in out][:4]
        assert best[k].tolist() == order + [-1] * (4 - len(order))
        np.testing.assert_allclose(best_scores[k][: len(order)], scores[k][order], rtol=1e-5, atol=1e-6)
    assert ranker.candidates == ROWS - (oov_row is not None)


@pytest.mark.parametrize("leave_out", [True, False])
def test_popularity_ranks_by_training_counts(leave_out):
    draw = np.random.default_rng(1)
    counts, candidates = draw.integers(0, 4, ROWS), np.arange(ROWS) != 2
    lists, items = [draw.integers(0, ROWS, n).tolist() for n in draw.integers(0, 6, 50)], draw.integers(0, ROWS, 50)
    config = configured(leave_out_history=leave_out)
    found = popular_items._ranks(config, ItemOrder(counts, candidates=candidates), columns_of(lists, items))
    for rank, seen, item in zip(found, lists, items, strict=True):
        out = {*(seen if leave_out else ()), 2}
        assert rank == (NEVER if item == 2 else plain_rank(counts, item, out))


@pytest.mark.parametrize("leave_out", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_transitions_rank_by_what_followed_then_by_counts(leave_out, seed):
    draw = np.random.default_rng(seed)
    counts, candidates = draw.integers(0, 4, ROWS), np.arange(ROWS) != 2
    before, after = draw.integers(0, ROWS, (2, 4 * ROWS))
    lists, items = [draw.integers(0, ROWS, n).tolist() for n in draw.integers(0, 6, 80)], draw.integers(0, ROWS, 80)
    config = configured(leave_out_history=leave_out)
    pieces = [Pairs.counted(before[k::3], after[k::3], ROWS) for k in range(3)]
    order = ItemOrder(counts, Pairs.merged(pieces), candidates=candidates)
    found = popular_items._ranks(config, order, columns_of(lists, items))
    for rank, seen, item in zip(found, lists, items, strict=True):
        followed = np.bincount(after[before == seen[-1]], minlength=ROWS) if seen else np.zeros(ROWS)
        out = {*(seen if leave_out else ()), 2}
        scores = list(zip(followed.tolist(), counts.tolist(), strict=True))
        assert rank == (NEVER if item == 2 else plain_rank(scores, item, out))


def test_neighbours_are_of_one_list():
    lists = ListColumn(np.array([0, 2, 2, 3, 6]), np.array([4, 5, 1, 7, 8, 9], np.uint32))
    before, after = popular_items.neighbours(lists, np.array([6, 3, 2, 0]))
    assert list(zip(before.tolist(), after.tolist(), strict=True)) == [(4, 5), (5, 6), (1, 2), (7, 8), (8, 9), (9, 0)]


def test_metrics_count_unknown_items_as_not_found():
    scores = RankScores(ranks=np.array([0, 1, 5, NEVER, LEFT_OUT, LEFT_OUT], np.int32), candidates=8, at=(2, 10))
    found = evaluated(scores).to_dict()
    assert found["hr@2"] == 2 / 6
    assert found["hr@10"] == 0.5
    assert found["ndcg@2"] == pytest.approx((1 + 1 / np.log2(3)) / 6)
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 6) / 6)
    assert (found["examples"], found["unknown_items"], found["repeated_items"]) == (6, 1, 2)


def test_the_model_reads_its_features_alone():
    model = ModelConfig(kind="sasrec")
    read = model.of_kind.schema(model, schema_of())
    assert [f.name for f in read.categorical] == ["item", "history"][::-1]
    assert [t.name for t in read.tables] == ["item"]
    assert model.of_kind.unread(model, schema_of()) == "user"
    assert ModelConfig().of_kind.schema(ModelConfig(), schema_of()) == schema_of()


@pytest.mark.parametrize(
    ("own", "changes", "message"),
    [
        ({"history": "past"}, {}, "history is 'past', but the categorical features .* user, item, history"),
        ({"history": "user"}, {}, "model.sequence.history is 'user', which is one id"),
        ({"item": "user"}, {}, "model.sequence.item is 'user' of table 'user', but must be .* of table 'item'"),
        ({}, {"growing": True, "oov_row": None}, "table 'item', but that table grows"),
        ({}, {"rows": 2}, "table 'item' has 2 row"),
    ],
)  # fmt: skip
def test_datasets_that_do_not_fit(own, changes, message):
    model = ModelConfig(kind="hstu", sections={"sequence": SequenceSection(**own)})
    with pytest.raises(ConfigError, match=message):
        model.of_kind.schema(model, schema_of(**changes))


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ({"kind": "hstu", "top_mlp": (8, 1), "wide": True}, {}, "model.top_mlp, model.wide are set, but"),
        ({"kind": "hstu", "calibrate": True}, {}, "model.calibrate is set"),
        ({"sections": {"sequence": SequenceSection(blocks=3)}}, {}, "sequence is set, but model.kind is 'dlrm'"),
        ({"kind": "hstu", "sections": {"sequence": SequenceSection(heads=3)}}, {}, "sequence.heads is 3, which"),
        ({"kind": "sasrec", "sections": {"sequence": SequenceSection(normalize="length")}}, {}, "is 'length', but"),
        ({"kind": "hstu"}, {"schedule": "fae"}, "schedule is 'fae', but model.kind 'hstu'"),
        ({"kind": "hstu"}, {"data": DataConfig(path="d", micro_batches=2)}, "micro_batches is 2, but model.kind"),
        ({"kind": "hstu"}, {"evaluate": EvaluateConfig(group="user")}, "evaluate.group is 'user'"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(model, more, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{"data": DataConfig(path="data"), "model": ModelConfig(**model), **more})


def test_all_negatives_are_not_drawn():
    with pytest.raises(ConfigError, match=r"sequence\.sampled is 4, but with model\.sequence\.negatives = 'all'"):
        SequenceSection(negatives="all", sampled=4)


def test_a_checkpoint_tells_newer_keys_by_their_values():
    """One of before a key has none, and is of the model that the key's default makes."""

    def identity(**own):
        model = ModelConfig(kind="hstu", sections={"sequence": SequenceSection(**own)})
        return model.of_kind.identity(model, 0)["sequence"]

    assert set(identity()) == {
        "history", "item", "blocks", "heads", "attention_dim", "hidden_dim", "sampled", "temperature"
    }  # fmt: skip
    newer = {"negatives": "position", "normalize": "length", "ages": False}
    assert identity(**newer).items() - identity().items() == newer.items()


@pytest.mark.parametrize(
    ("own", "oov_row", "lengths", "scored"),
    [
        ({}, 0, (LENGTH, LENGTH, 8), 512),
        ({"negatives": "position", "sampled": 5}, 0, (LENGTH, LENGTH, 5 * LENGTH), 3),
        ({"negatives": "all"}, 0, (LENGTH, LENGTH, 3), 3),
        ({"negatives": "all"}, None, (LENGTH, LENGTH, 3), 3),
    ],
)
def test_a_batch_has_room_for_the_negatives(own, oov_row, lengths, scored):
    model = ModelConfig(kind="hstu", sections={"sequence": SequenceSection(**own)})
    config = TrainConfig(data=DataConfig(path="data", batch_size=3), model=model)
    layout = model.of_kind.layout(config, model.of_kind.schema(model, schema_of(oov_row=oov_row)), None)
    assert {feature.name: feature.max_length for feature, _ in layout.features} == dict(
        zip(NAMES, lengths, strict=True)
    )
    assert config.data.eval_batch_size == scored


def test_metrics_of_early_stopping():
    assert configured().evaluate.early_stopping.metric == "ndcg"
    assert (configured().data.batch_size, configured().data.eval_batch_size) == (128, 512)
    given = tomllib.loads("batch_size = 2048\neval_batch_size = 8192")
    said = TrainConfig.from_dict({"data": {"path": "d", **given}, "model": {"kind": "hstu"}})
    assert (said.data.batch_size, said.data.eval_batch_size) == (2048, 8192)
    assert TrainConfig.from_dict(said.to_dict()) == said
    plain = TrainConfig(data=DataConfig(path="data"))
    assert plain.evaluate.early_stopping.metric == "auc"
    for kind, metric, fitting in (("hstu", "log_loss", "ndcg, hr, mrr"), ("dlrm", "mrr", "auc, log_loss")):
        with pytest.raises(ConfigError, match=f"metric is '{metric}', which model.kind '{kind}' .* {fitting}"):
            TrainConfig.from_dict(
                {"data": {"path": "d"}, "model": {"kind": kind}, "evaluate": {"early_stopping": {"metric": metric}}}
            )
    with pytest.raises(ConfigError, match=r"evaluate\.at is"):
        EvaluateConfig(at=(10, 10))
