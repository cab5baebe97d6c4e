"""Values that training did not see are counted by feature, said, and refused where somebody asks for that."""

import json

import numpy as np
import optax
import pytest
import shop_logs
from flax import nnx

import jrec
from jrec import cli, nn, ops, serving
from jrec.app.evaluate import UnknownOfSplit
from jrec.app.export import export_run
from jrec.data import GrowingVocabulary, Growth, load_vocabularies
from jrec.data.blocks import ListColumn
from jrec.data.keys import text_key
from jrec.data.schema import CategoricalFeature, DatasetError, Schema, Table
from jrec.data.unknown import ENOUGH, MORE, UnknownOfFeature, UnknownValues, UnknownValuesWarning
from jrec.prepare.encoder import Encoder


def schema_of(*tables):
    features = tuple(CategoricalFeature(name=f"f_{table.name}", table=table.name, max_length=3) for table in tables)
    return Schema(name="some", block_size=1, dense=(), categorical=features, tables=tables, splits={}, provenance={})


VOCABULARY = Table(name="v", rows=10, oov_row=4, vocabulary="vocabulary/v.parquet", oov_share=0.25)
HASHED, GROWS = Table(name="h", rows=10), Table(name="g", rows=10, growing=True)


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_a_loop(seed):
    schema, rng = schema_of(VOCABULARY, HASHED, GROWS), np.random.default_rng(seed)
    rows_of_keys = lambda keys: np.where(keys % np.uint64(3) == 0, 0, 5)  # noqa: E731
    counts, want = UnknownValues(schema, {"g": rows_of_keys}), dict.fromkeys(("f_v", "f_g"), (0, 0))
    for _ in range(4):
        lengths = rng.integers(0, 4, 30)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        keys, rows = rng.integers(0, 9, lengths.sum()).astype(np.uint64), rng.integers(0, 10, lengths.sum())
        for feature in schema.categorical:
            found = keys if feature.table == "g" else rows.astype(np.uint32)
            counts.add(feature, ListColumn(offsets, keys), ListColumn(offsets, found))
        for name, oov in (("f_v", rows == 4), ("f_g", keys % 3 == 0)):
            values, unknown = want[name]
            present = keys != 0  # 0 is the key of a missing value
            want[name] = values + int(present.sum()), unknown + int((oov & present).sum())
    assert {name: (own.values, own.unknown) for name, own in counts.features.items()} == want


def test_some_values_are_shown_with_training_s_share():
    schema, counts = schema_of(VOCABULARY), UnknownValues(schema_of(VOCABULARY))
    texts = ["7", "x", "a rather long text", "", "7"]
    keys = np.array([text_key(text) for text in texts], np.uint64)
    counts.add(schema.categorical[0], keys, np.full(5, 4, np.uint32))
    assert counts.features["f_v"].examples == ["'7'", "'x'"]
    assert counts.remarks() == ["values that training did not see: f_v 100.0% of 4, in training 25.0%"]
    counts.add(schema.categorical[0], np.tile(keys, 30), np.full(150, 4, np.uint32))
    first, _ = counts.remarks()
    assert first.startswith(
        "warning: of the values of 'f_v' training did not see 100.0% of 124, in training 25.0%, such as"
    )
    counts.check(None)
    counts.check(1.0)
    with pytest.raises(DatasetError, match=r"at most 99\.0% may be unknown: write the column as in training, or raise"):
        counts.check(0.99)


def test_a_block_that_a_loader_reads_again_counts_once():
    counted = UnknownOfSplit(schema_of(VOCABULARY))
    for block in (0, 1, 0, 1, 1):
        counted.watch(block, {"f_v": np.array([4, 4, 7], np.uint8)[: 2 + block]})
    own = counted.counts.features["f_v"]
    assert (own.values, own.unknown) == (5, 4)


@pytest.mark.parametrize(
    ("values", "unknown", "trained", "much"),
    [
        (ENOUGH, ENOUGH, 0.0, True),
        (ENOUGH - 1, ENOUGH - 1, 0.0, False),
        (1000, int(1000 * MORE), None, False),
        (1000, int(1000 * MORE) + 1, None, True),
        (1000, 450, 0.25, False),
        (1000, 451, 0.25, True),
    ],
)
def test_what_is_worth_a_warning(values, unknown, trained, much):
    assert UnknownOfFeature(values=values, unknown=unknown, trained=trained).is_much == much


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A run; lines of the next day, and the same with items that are written in another way."""
    folder = tmp_path_factory.mktemp("unknown")
    shop_logs.write_log(folder / "monday.csv", 600)
    dataset = shop_logs.prepare(folder, folder / "monday.csv", "monday", "--growing", "user")
    lines = shop_logs.write_log(folder / "tuesday.csv", 200, seed=1, label=False)
    text = (folder / "tuesday.csv").read_text()
    (folder / "other.csv").write_text(text.replace(",i", ",item_").replace("|i", "|item_").replace("item_tem", "item"))
    run = shop_logs.trained(folder, dataset, "max_steps=3")
    return folder, run, {name: [line[name] for line in lines] for name in lines[0]}


def test_a_dataset_says_how_many_of_training_s_values_were_rare(shop):
    folder, _, _ = shop
    schema = Schema.load(folder / "monday")
    table = schema.table("item")
    counts = np.load(folder / "monday" / table.counts)
    assert table.oov_share == counts[table.oov_row] / counts.sum() > 0
    assert schema.table("user").oov_share is None


def test_predict_says_how_many_values_training_did_not_see(shop, tmp_path, capsys):
    folder, run, columns = shop
    out = tmp_path / "scores.csv"
    arguments = ["predict", str(run), "--out", str(out), "--quiet", "--overwrite"]
    assert cli.main([*arguments, str(folder / "tuesday.csv"), "--max-unknown", "0.5"]) == 0
    said = capsys.readouterr().err
    rows = Encoder(Schema.load(folder / "monday")).columns(columns).ids["item"]
    share = np.mean(rows == Schema.load(folder / "monday").table("item").oov_row)
    assert f"item {share:.1%} of 200, in training" in said
    trained = jrec.load_run(run).restored.run.growing_tables.sections()["user"]["oov_share"]
    assert f"user 10.5% of 200, in training {trained:.1%}" in said  # the next day has users of its own
    assert "warning" not in said
    out.unlink()
    assert cli.main([*arguments, str(folder / "other.csv")]) == 0
    said = capsys.readouterr().err
    assert "warning: of the values of 'item' training did not see 100.0% of 200" in said
    assert "'item_" in said
    out.unlink()
    assert cli.main([*arguments, str(folder / "other.csv"), "--max-unknown", "0.5"]) != 0
    assert "of the values of 'item' training did not see 100.0% of 200" in capsys.readouterr().err
    assert not out.exists()


def test_eval_says_it_of_each_feature(shop, tmp_path, capsys):
    folder, run, _ = shop
    shop_logs.write_log(folder / "labelled.csv", 200, seed=1)
    options = ("--vocabulary-from", str(folder / "monday"), "--split", "0,0,1")
    other = shop_logs.prepare(tmp_path, folder / "labelled.csv", "tuesday", *options)
    schema = Schema.load(other)
    assert schema.table("item").oov_share == Schema.load(folder / "monday").table("item").oov_share
    assert cli.main(["eval", str(run), str(other)]) == 0
    out, said = capsys.readouterr()
    unknown = json.loads(out.splitlines()[-1])["unknown_values"]
    assert unknown.keys() == {"item", "history"}  # rows of users are a run's own
    (piece,) = Encoder(schema).stream([str(folder / "labelled.csv")], batch_size=1000)
    for name in ("item", "history"):
        ids = piece.ids[name]
        rows = ids.values if isinstance(ids, ListColumn) else ids
        assert unknown[name]["values"] == rows.size
        assert unknown[name]["unknown"] == (rows == schema.table("item").oov_row).sum()
        assert unknown[name]["trained"] == schema.table("item").oov_share
    assert f"item {unknown['item']['share']:.1%} of 200, in training" in said


def test_max_unknown_is_of_raw_logs(shop, tmp_path, capsys):
    folder, run, _ = shop
    arguments = ["predict", str(run), str(folder / "monday"), "--out", str(tmp_path / "x.csv"), "--max-unknown", "0.5"]
    assert cli.main(arguments) != 0
    assert "--max-unknown is of raw logs" in capsys.readouterr().err


def test_a_loaded_run_warns_once(shop):
    _, run, columns = shop
    loaded = jrec.load_run(run)
    loaded.predict(columns)
    other = {**columns, "item": [f"item_{k}" for k in range(200)]}
    with pytest.warns(UnknownValuesWarning, match="of the values of 'item' training did not see") as caught:
        loaded.predict(other)
    assert caught[0].filename == __file__
    loaded.predict(other)
    assert loaded.unknown.features["item"].values == 600


def test_a_loaded_run_refuses_too_many(shop):
    _, run, columns = shop
    loaded = jrec.load_run(run)
    columns = {**columns, "item": [*columns["item"][:100], *(f"item_{k}" for k in range(100))]}
    with pytest.raises(
        DatasetError, match=r"'item' training did not see .* of 200, .*; at most 30\.0% .* raise max_unkn"
    ):
        loaded.predict(columns, max_unknown=0.3)
    assert loaded.unknown.features["item"].values == 0  # nothing was scored
    with pytest.warns(UnknownValuesWarning, match="training did not see"):
        assert len(loaded.logits(columns, max_unknown=0.95)) == 200


def library_run(layout, **options):
    config = nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(4, 1), interaction="concat")
    model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
    return jrec.distribute(model, optimizer, **options)


def layout_of_texts():
    tables = [jrec.TableConfig(name=name, rows=30, dim=8) for name in ("user", "tag")]
    features = [
        jrec.FeatureConfig(name="user", table="user"),
        jrec.FeatureConfig(name="tags", table="tag", max_length=2),
    ]
    return jrec.EmbeddingLayout.build(tables, features)


def test_a_run_of_the_library_counts_texts_without_a_row():
    users = [f"u{n % 20}" for n in range(120)]
    others = [*users[:60], *(f"user {n}" for n in range(60))]
    packing = {
        "vocabularies": {"user": {f"u{n}": n + 1 for n in range(20)}, "tag": "hash"},
        "oov_rows": {"user": 0, "tag": 0},
        "on_bad_id": "oov",
    }
    with library_run(layout_of_texts()) as run:
        tags = [["a", "b"][: n % 3] for n in range(120)]
        run.predict({"user": users, "tags": tags}, **packing)
        assert run.unknown.to_dict() == {"user": {"values": 120, "unknown": 0, "share": 0.0, "trained": None}}
        with pytest.raises(
            DatasetError, match=r"'user' training did not see 50\.0% of 120, such as 'user 0', 'user 1'"
        ):
            run.predict({"user": others, "tags": tags}, max_unknown=0.49, **packing)
        assert run.unknown.features["user"].values == 120
        with pytest.warns(UnknownValuesWarning, match=r"25\.0% of 240, such as 'user 0', 'user 1', 'user 2'") as caught:
            scores = run.predict({"user": others, "tags": tags}, max_unknown=0.5, **packing)
        assert caught[0].filename == __file__
        known = {**packing["vocabularies"], "user": dict.fromkeys(others, 0) | packing["vocabularies"]["user"]}
        np.testing.assert_array_equal(
            run.predict({"user": others, "tags": tags}, **{**packing, "vocabularies": known}), scores
        )


def test_a_run_that_grows_counts_texts_without_a_row_beside_training_s():
    growing = {
        "user": GrowingVocabulary(Growth(capacity=30, admit_after=2)),
        "tag": GrowingVocabulary(Growth(capacity=30)),
    }
    with library_run(layout_of_texts(), growing=growing) as run:
        batch = {"label": np.ones(40), "user": [f"u{n % 39}" for n in range(40)], "tags": [["a"]] * 40}
        for fed in run.feed([batch, batch | {"user": [""] * 40}]):
            run.compile()(fed)
        trained = run.growing["user"].oov_share
        assert trained == 38 / 80  # one user came twice, and the missing one often
        users = [f"u{n}" if n % 2 else "" for n in range(240)]
        with pytest.warns(UnknownValuesWarning) as caught:
            run.predict({"user": users, "tags": [["z"]] * 240})
        said = [str(warning.message).split(", such as")[0] for warning in caught]
        assert said == [
            "of the values of 'user' training did not see 100.0% of 120, in training 47.5%",
            "of the values of 'tags' training did not see 100.0% of 240, in training 0.0%",
        ]
        counts = run.unknown.features
        assert (counts["user"].values, counts["user"].unknown, counts["user"].trained) == (120, 120, trained)
        assert counts["user"].examples == ["'u1'", "'u3'", "'u5'"]


def test_a_dataset_s_vocabulary_says_training_s_share(tmp_path):
    log = shop_logs.write_log(tmp_path / "monday.csv", 600)
    dataset = shop_logs.prepare(tmp_path, tmp_path / "monday.csv", "monday")
    table, vocabularies = Schema.load(dataset).table("item"), load_vocabularies(dataset)
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="item", rows=table.rows, dim=8)], [jrec.FeatureConfig(name="item", table="item")]
    )
    with library_run(layout) as run:
        run.predict({"item": [line["item"] for line in log]}, vocabularies=vocabularies, on_bad_id="oov")
        counts = run.unknown.features["item"]
        assert counts.trained == table.oov_share
        assert 0 < counts.share < table.oov_share + MORE


def test_a_served_model_counts_them(shop, tmp_path):
    _, run, columns = shop
    export_run(run, tmp_path / "export")
    model = serving.load(tmp_path / "export", batch_sizes=(4,))
    model({name: values[:4] for name, values in columns.items()} | {"user": ["nobody", "u1", "u2", None]})
    counts = model.unknown.features
    assert (counts["user"].values, counts["user"].unknown, counts["user"].examples) == (3, 1, ["'nobody'"])
    assert counts["item"].values == 4
    assert counts["item"].trained == Schema.load(tmp_path / "export", check_files=False).table("item").oov_share
