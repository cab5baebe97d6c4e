"""Synthetic datasets: published sizes, exact numbering by frequency, a teacher that is the ceiling, determinism."""

import dataclasses
import filecmp
import hashlib
import json

import numpy as np
import pytest

from jrec.cli import main
from jrec.data.blocks import ListColumn, ShardReader
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.schema import CategoricalFeature, DatasetError, Schema
from jrec.errors import OutputError
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.prepare.synth import SHAPES, Shape, SynthFeature, SynthOptions, shape_like, synthesize
from jrec.prepare.synth.examples import ExampleGenerator
from jrec.prepare.synth.generate import bytes_per_example, default_block_size, number_rows
from jrec.prepare.synth.kernels import power_rank
from jrec.prepare.synth.shapes import one_hot
from jrec.prepare.synth.teacher import Ceiling, Teacher


def read_split(folder, schema, split):
    """All columns of a split, lists as ``ListColumn``."""
    parts = [ShardReader(folder, shard).read(i) for shard in schema.splits[split].shards for i in range(shard.blocks)]
    columns = {}
    for name, first in parts[0].items():
        if isinstance(first, ListColumn):
            lengths = np.concatenate([np.diff(p[name].offsets) for p in parts])
            columns[name] = ListColumn(np.cumsum([0, *lengths]), np.concatenate([p[name].values for p in parts]))
        else:
            columns[name] = np.concatenate([p[name] for p in parts])
    return columns


def values(column):
    return column.values if isinstance(column, ListColumn) else column


MIXED = Shape(
    name="mixed",
    dense=3,
    features=(
        one_hot("hour_of_day", "hour"),
        one_hot("weekday", "weekday"),
        one_hot("item"),
        one_hot("category", "parent", "item"),
        SynthFeature(feature=CategoricalFeature(name="tags", table="tag", max_length=5)),
        SynthFeature(feature=CategoricalFeature(name="likes", table="tag", max_length=4, weighted=True)),
        SynthFeature(feature=CategoricalFeature(name="trio", table="trio", max_length=3, fixed_length=True)),
    ),
    rows={"hour_of_day": 24, "weekday": 7, "item": 70_000, "category": 40, "tag": 300, "trio": 1},
    click_rate=0.3,
    days=14,
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synth") / "mixed"
    return folder, synthesize(MIXED, folder, SynthOptions(rows=30_000, seed=5, block_size=1000))


def test_splits_and_columns(mixed):
    folder, schema = mixed
    assert [schema.splits[s].examples for s in ("train", "valid", "test")] == [24_000, 3000, 3000]
    assert schema == Schema.load(folder)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["mixed"]
    columns = read_split(folder, schema, "valid")
    types = {name: str(values(column).dtype) for name, column in columns.items()}
    assert types == {
        "label": "float32", "I1": "float32", "I2": "float32", "I3": "float32", "hour_of_day": "uint8",
        "weekday": "uint8", "item": "uint32", "category": "uint8", "tags": "uint16", "likes": "uint16",
        "likes:weight": "float32", "trio": "uint8",
    }  # fmt: skip
    assert set(np.diff(columns["tags"].offsets)) == set(range(6))
    assert set(np.diff(columns["trio"].offsets)) == {3}
    np.testing.assert_array_equal(columns["likes"].offsets, columns["likes:weight"].offsets)
    assert ((columns["likes:weight"].values >= 0.5) & (columns["likes:weight"].values <= 1.5)).all()


def test_rows_descend_by_frequency_in_training_and_counts_are_exact(mixed):
    folder, schema = mixed
    train = read_split(folder, schema, "train")
    for table in schema.tables:
        features = [f.name for f in schema.categorical if f.table == table.name]
        ids = np.concatenate([values(train[name]) for name in features])
        counts = np.load(folder / table.counts)
        assert counts.dtype == np.int64
        assert counts.shape == (table.rows,)
        np.testing.assert_array_equal(counts, np.bincount(ids, minlength=table.rows))
        assert (np.diff(counts) <= 0).all()


def test_numbering_is_a_permutation():
    counts = np.array([0, 5, 2, 0, 5, 9], np.uint32)
    rows, leading = number_rows(counts)
    assert rows.tolist() == [4, 1, 3, 5, 2, 0]
    assert leading.tolist() == [9, 5, 5, 2]


def test_the_category_is_a_function_of_the_item(mixed):
    columns = read_split(*mixed, "train")
    pairs = np.unique(np.stack([columns["item"], columns["category"]], axis=1).astype(np.int64), axis=0)
    assert len(np.unique(pairs[:, 0])) == len(pairs)
    assert len(np.unique(pairs[:, 1])) > 10


def test_time_runs_through_hours_and_weekdays(mixed):
    source = ExampleGenerator(shape=MIXED, seed=0, total=14 * 24 * 10)
    items = source.items(np.arange(14 * 24 * 10))
    hours, days = (items[name].items for name in ("hour_of_day", "weekday"))
    np.testing.assert_array_equal(hours, np.arange(3360) // 10 % 24)
    np.testing.assert_array_equal(days, np.arange(3360) // 240 % 7)


def test_the_same_seed_gives_the_same_files(tmp_path):
    def make(name, **options):
        synthesize(MIXED, tmp_path / name, SynthOptions(rows=6000, block_size=512, **options))
        return [p for p in sorted(tmp_path.joinpath(name).rglob("*")) if p.is_file()]

    one, again, other = make("one", seed=1, threads=1), make("again", seed=1, threads=4), make("other", seed=2)
    for first, second in zip(one, again, strict=True):
        assert filecmp.cmp(first, second, shallow=False), first
    assert not filecmp.cmp(one[-1], other[-1], shallow=False)


def test_examples_do_not_depend_on_their_neighbours():
    source = ExampleGenerator(shape=MIXED, seed=9, total=1000)
    whole = source.examples(np.arange(1000))
    part = source.examples(np.array([700, 3]))
    np.testing.assert_array_equal(part.dense, whole.dense[[700, 3]])
    for name, items in part.items.items():
        start, stop = whole.items[name].offsets[[700, 701]]
        np.testing.assert_array_equal(items.items[: items.offsets[1]], whole.items[name].items[start:stop])
        if items.weights.size:
            np.testing.assert_array_equal(items.weights[: items.offsets[1]], whole.items[name].weights[start:stop])


def test_values_are_fixed_for_ever():
    source = ExampleGenerator(shape=shape_like("quickstart"), seed=0, total=1000)
    items = source.items(np.arange(1000))
    digest = hashlib.sha256(b"".join(i.items.tobytes() for i in items.values())).hexdigest()
    assert digest[:16] == "3b067561966905bc"


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.2])
def test_ranks_follow_the_power_law(exponent):
    u = (np.arange(200_000) + 0.5) / 200_000
    ranks = np.array([power_rank(x, 1000, exponent) for x in u])
    assert (ranks.min(), ranks.max()) == (0, 999)
    shares = np.bincount(ranks, minlength=1000) / len(u)
    edges = np.arange(1.0, 1002.0)
    mass = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(mass) / (mass[-1] - mass[0])
    np.testing.assert_allclose(shares, expected, atol=2e-5)


def test_popularity_drifts_only_where_it_should():
    shape = Shape(name="one", dense=0, features=(one_hot("a"),), rows={"a": 1000}, click_rate=0.5, days=10)
    for drift in (True, False):
        source = ExampleGenerator(shape=shape, seed=3, total=1_000_000, drift=drift)
        first, last = (
            np.bincount(source.items(np.arange(start, start + 50_000))["a"].items, minlength=1000) / 50_000
            for start in (0, 950_000)
        )
        moved = np.abs(first - last).sum() / 2
        assert (0.03 < moved < 0.3) if drift else moved < 0.06
        steady = np.arange(1000) % 5 != 4
        assert np.abs(first - last)[steady].max() < 0.01


def test_features_are_correlated():
    shape = Shape(
        name="two", dense=1, features=(one_hot("a"), one_hot("b")), rows={"a": 64, "b": 64}, click_rate=0.5, days=1
    )
    source = ExampleGenerator(shape=shape, seed=3, total=100_000, drift=False)
    examples = source.examples(np.arange(100_000))
    a, b = (examples.items[n].items for n in "ab")
    together = np.histogram2d(a % 8, b % 8, bins=8)[0] / len(a)
    apart = np.outer(together.sum(axis=1), together.sum(axis=0))
    assert (together * np.log(together / apart)).sum() > 0.02
    means = [examples.dense[a % 8 == c, 0].mean() for c in range(8)]
    assert np.std(means) > 0.02


def test_the_ceiling_is_the_teachers_own(mixed):
    from jrec.metrics import auc, log_loss

    _, schema = mixed
    source = ExampleGenerator(shape=MIXED, seed=5, total=30_000)
    teacher = Teacher.calibrated(source)
    start = 0
    whole = sum(schema.ceiling[s]["click_rate"] * schema.splits[s].examples for s in schema.splits) / 30_000
    assert whole == pytest.approx(MIXED.click_rate, abs=0.02)
    for split in ("train", "valid", "test"):
        numbers = np.arange(start, start + schema.splits[split].examples)
        start = numbers[-1] + 1
        examples = source.examples(numbers)
        logits = teacher.logits(examples)
        labels = teacher.labels(examples, logits)
        np.testing.assert_array_equal(labels, read_split(*mixed, split)["label"])
        stored = schema.ceiling[split]
        assert stored["auc"] == pytest.approx(auc(logits, labels), abs=1e-5)
        assert stored["log_loss"] == pytest.approx(log_loss(logits, labels), rel=1e-6)
        rate = labels.mean()
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        assert stored["normalized_entropy"] == pytest.approx(stored["log_loss"] / entropy, rel=1e-4)
        assert rate == pytest.approx(MIXED.click_rate, abs=0.08)
        assert stored["click_rate"] == pytest.approx(rate, rel=1e-5)


def test_teachers_are_calibrated_and_use_all_parts():
    for name in ("quickstart", "criteo-kaggle", "criteo-terabyte", "avazu", "taobao", "taobao-intent", "rm3"):
        shape = shape_like(name)
        source = ExampleGenerator(shape=shape, seed=1, total=100_000)
        teacher = Teacher.calibrated(source)
        examples = source.examples(np.arange(0, 100_000, 50))
        logits = teacher.logits(examples)
        assert (1 / (1 + np.exp(-logits))).mean() == pytest.approx(shape.click_rate, rel=0.1)
        assert logits.std() == pytest.approx(shape.logit_std, rel=0.1)
        spread = (teacher.parts(examples) * teacher.weights[:, None]).std(axis=1)
        assert (spread[:2] > 0.3).all()
        assert (spread[2] > 0.3) == bool(shape.dense)


def test_one_sided_labels_have_no_auc():
    ceiling = Ceiling()
    assert ceiling.metrics() == {}
    ceiling.add(np.zeros(3), np.ones(3, np.float32))
    assert ceiling.metrics() == {"log_loss": pytest.approx(np.log(2)), "click_rate": 1.0}


def test_shapes_have_the_published_sizes(shared_data):
    published = json.loads((shared_data / "access_statistics" / "cardinalities.json").read_text())
    assert list(shape_like("criteo-kaggle").rows.values()) == published["criteo_kaggle"]["rows"]
    assert list(shape_like("criteo-terabyte").rows.values()) == published["criteo_terabyte_40m_cap"]["rows"]


def test_shapes_are_whole():
    for name in SHAPES:
        shape = shape_like(name)
        assert shape.name == name
        assert {f.table for f in shape.categorical} == set(shape.rows)
        assert shape.sources
        assert default_block_size(shape) * bytes_per_example(shape) <= 8 << 20
    sizes = {name: (len(shape_like(name).rows), shape_like(name).ids_per_example) for name in SHAPES}
    assert sizes == {
        "criteo-kaggle": (26, 26), "criteo-terabyte": (26, 26), "mlperf-dlrm-dcnv2": (26, 214), "avazu": (23, 23),
        "taobao": (3, 43), "taobao-intent": (5, 5),
        "rm1": (10, 800), "rm2": (40, 3200), "rm3": (10, 200), "rm4": (10, 200), "quickstart": (10, 10),
    }  # fmt: skip


def test_scaled_shapes_have_a_fraction_of_the_rows(tmp_path, capsys):
    whole = shape_like("mlperf-dlrm-dcnv2")
    assert sum(whole.rows.values()) == 204_184_588
    scaled = shape_like("mlperf-dlrm-dcnv2", scale=1 / 64)
    assert scaled.rows == {table: -(-rows // 64) for table, rows in whole.rows.items()}
    assert [f.max_length for f in scaled.categorical][19:22] == [12, 100, 27]
    folder = tmp_path / "twin"
    arguments = ["--scale", "1/65536", "--rows", "300", "--seed", "1", "--out", str(folder), "--quiet"]
    assert main(["synth", "--like", "mlperf-dlrm-dcnv2", *arguments]) == 0
    assert {t.rows for t in Schema.load(folder).tables} == {1, 7, 10, 47, 611}
    for wrong in ("0", "2", "1/0", "x"):
        with pytest.raises(SystemExit):
            main(["synth", "--like", "rm1", "--scale", wrong, "--rows", "9", "--out", str(folder)])
        assert "no fraction above 0 and up to 1" in capsys.readouterr().err
    with pytest.raises(DatasetError, match="--scale is 2"):
        shape_like("rm1", scale=2)


@pytest.mark.parametrize("like", ["avazu", "taobao", "taobao-intent", "criteo-kaggle"])
def test_columns_are_those_of_the_prepared_log(like):
    from jrec.prepare.readers import Avazu, Criteo, Taobao, TaobaoSequences

    readers = {"avazu": Avazu, "taobao": TaobaoSequences, "taobao-intent": Taobao}
    reader = readers.get(like, lambda: Criteo("criteo-kaggle"))()
    shape = shape_like(like)
    assert [(f.name, f.table, f.max_length) for f in shape.categorical] == [
        (f.name, f.table, f.max_length) for f in reader.categorical
    ]
    assert shape.dense_features == tuple(reader.dense)


def test_table_rows_and_exponent():
    assert set(shape_like("rm1", table_rows=5).rows.values()) == {5}
    assert set(shape_like("rm1", table_rows=3_000_000).rows.values()) == {3_000_000}
    capped = shape_like("criteo-kaggle", table_rows=1000).rows
    assert max(capped.values()) == 1000
    assert capped["C6"] == 24
    assert shape_like("rm1", exponent=1.3).exponent == 1.3
    for bad, message in [({"table_rows": 0}, "--table-rows is 0"), ({"exponent": -1.0}, "--exponent is -1")]:
        with pytest.raises(DatasetError, match=message):
            shape_like("rm1", **bad)
    with pytest.raises(DatasetError, match="no shape 'criteo'; choose one of criteo-kaggle"):
        shape_like("criteo")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "--rows is 0; it must be at least 1"),
        ({"rows": 10, "block_size": 0}, "--block-size is 0"),
        ({"rows": 10, "threads": 0}, "--threads is 0"),
        ({"rows": 10, "split": (0.5, 0.5, 0.5)}, "three fractions that add up to 1"),
        ({"rows": 1, "split": (0.1, 0.1, 0.8)}, "leave none to train on"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(DatasetError, match=message):
        SynthOptions(**options)


def test_empty_splits_are_written_and_have_no_ceiling(tmp_path):
    schema = synthesize(MIXED, tmp_path / "out", SynthOptions(rows=50, split=(1.0, 0.0, 0.0), block_size=20))
    assert [s.examples for s in schema.splits.values()] == [50, 0, 0]
    assert list(schema.ceiling) == ["train"]


def test_several_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("jrec.prepare.synth.generate._SHARD_BYTES", 2000 * bytes_per_example(MIXED))
    schema = synthesize(MIXED, tmp_path / "many", SynthOptions(rows=6000, seed=2, block_size=500))
    assert [s.examples for s in schema.splits["train"].shards] == [2000, 2000, 800]
    monkeypatch.undo()
    whole = synthesize(MIXED, tmp_path / "one", SynthOptions(rows=6000, seed=2, block_size=500))
    many, one = (read_split(tmp_path / n, s, "train") for n, s in (("many", schema), ("one", whole)))
    for name, column in one.items():
        np.testing.assert_array_equal(values(many[name]), values(column))


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    out = tmp_path / "out"
    options = SynthOptions(rows=500)
    synthesize(MIXED, out, options)
    before = (out / "schema.json").read_bytes()
    with pytest.raises(OutputError, match="pass --overwrite"):
        synthesize(MIXED, out, options)
    monkeypatch.setattr(Teacher, "logits", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        synthesize(MIXED, out, dataclasses.replace(options, overwrite=True))
    assert (out / "schema.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_loader_reads_what_synth_wrote(mixed):
    folder, schema = mixed
    layout = EmbeddingLayout.build(
        [TableConfig(name=t.name, rows=t.rows, dim=8) for t in schema.tables],
        [
            FeatureConfig(
                name=f.name, table=f.table, max_length=f.max_length, fixed_length=f.fixed_length, weighted=f.weighted
            )
            for f in schema.categorical
        ],
    )
    with make_loader(
        folder, schema, layout, "test", LoaderConfig(batch_size=700, shuffle=False, cast="host")
    ) as loader:
        batches = list(loader)
    labels = np.concatenate([b.labels[b.mask > 0] for b in batches])
    np.testing.assert_array_equal(labels, read_split(folder, schema, "test")["label"])


def test_the_command(tmp_path, capsys):
    out = str(tmp_path / "data")
    arguments = [
        "synth",
        "--like",
        "criteo-kaggle",
        "--rows",
        "3000",
        "--table-rows",
        "500",
        "--out",
        out,
        "--seed",
        "3",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "train 2,400, valid 300, test 300 examples; 26 tables of" in printed
    assert "ceiling on test: log_loss" in printed
    schema = Schema.load(out)
    assert schema.name == "criteo-kaggle"
    assert schema.provenance["options"]["seed"] == 3
    assert main(arguments) == 2
    assert "pass --overwrite to replace it" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--quiet"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["synth", "--like", "rm1", "--rows", "-4", "--out", out])
    assert "error: argument --rows: '-4' is out of range" in capsys.readouterr().err


@pytest.mark.parametrize("like", ["rm1", "rm2", "avazu", "taobao-intent", "criteo-terabyte"])
def test_every_shape_can_be_made(tmp_path, like):
    shape = shape_like(like, table_rows=2000)
    schema = synthesize(shape, tmp_path / "out", SynthOptions(rows=400, block_size=128))
    train = read_split(tmp_path / "out", schema, "train")
    for feature in schema.categorical:
        assert values(train[feature.name]).size == 320 * feature.max_length
        assert values(train[feature.name]).max() < 2000
