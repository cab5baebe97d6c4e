"""Reordered datasets: what the loader yields of them, that training is the same, and what stops or spoils one."""

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from benchmarks.studies.reorder import image, plot_prefixes
from jrec.cli import main
from jrec.data.bijection import inverse, is_permutation, load_order, save_order
from jrec.data.blocks import ListColumn, ShardWriter, shard_file
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.packing import Packer, pack_batch
from jrec.data.schema import CategoricalFeature, DatasetError, DenseFeature, Schema, Split, Table
from jrec.errors import CheckpointError, OutputError
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer, train_step
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.prepare.joined import csv_source
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import load_schema
from jrec.prepare.reorder import ReorderOptions, driver, reorder, restore
from jrec.prepare.reorder.effect import Effect
from jrec.prepare.reorder.log import Reading, batches, frequencies, stored
from jrec.prepare.reorder.verify import verify

ROWS, GROUPS, BATCH = 600, 6, 128
OPTIONS = ReorderOptions(
    min_rows=ROWS, hot_ratio=0.05, batch_size=BATCH, report_batch_sizes=(64, BATCH), report_batches=4, threads=0
)


def write_dataset(folder, *, examples=2048, block_size=256, seed=0):
    """Time passes through groups of rows: batches read rows of one group, scattered over the table, and hot rows."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    group_of_row = rng.permutation(ROWS) % GROUPS
    splits = {}
    for split, count in (("train", examples), ("valid", 256), ("test", 100)):
        group = np.repeat(rng.integers(0, GROUPS, -(-count // BATCH)), BATCH)[:count]
        members = [np.flatnonzero(group_of_row == g) for g in range(GROUPS)]
        draw = lambda g, members=members: rng.choice(members[g]) if rng.random() < 0.7 else rng.integers(0, 20)  # noqa: E731
        lengths = rng.integers(0, 4, count)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        lists = np.array([draw(g) for g, n in zip(group, lengths, strict=True) for _ in range(n)], np.uint16)
        columns = {
            "label": rng.integers(0, 2, count).astype(np.float32),
            "x": rng.random(count, np.float32),
            "item": np.array([draw(g) for g in group], np.uint16),
            "small": rng.integers(0, 9, count).astype(np.uint8),
            "history": ListColumn(offsets, lists),
            "history:weight": ListColumn(offsets, rng.random(len(lists), np.float32)),
        }
        with ShardWriter(folder / shard_file(split, 0, 1), block_size) as writer:
            writer.write(columns)
        splits[split] = Split(shards=(writer.close(),))
    schema = Schema(
        name="planted",
        block_size=block_size,
        dense=(DenseFeature(name="x"),),
        categorical=(
            CategoricalFeature(name="item", table="items", fixed_length=True),
            CategoricalFeature(name="small", table="small", fixed_length=True),
            CategoricalFeature(name="history", table="items", max_length=3, weighted=True),
        ),
        tables=(Table(name="items", rows=ROWS, oov_row=5), Table(name="small", rows=9)),
        splits=splits,
        provenance={"made": "here"},
    )
    schema.save(folder)
    return folder


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "data")


def model_layout(dim=8, dtype="float32", pooling="sum"):
    return EmbeddingLayout.build(
        [TableConfig(name="items", rows=ROWS, dim=dim, dtype=dtype), TableConfig(name="small", rows=9, dim=dim)],
        [
            FeatureConfig(name="item", table="items", fixed_length=True),
            FeatureConfig(name="history", table="items", max_length=3, weighted=True, pooling=pooling),
            FeatureConfig(name="small", table="small", fixed_length=True),
        ],
    )


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_rows_read_together_share_prefixes_and_every_split_is_renumbered(dataset):
    before = Schema.load(dataset)
    shards = {k: v for k, v in contents(dataset).items() if k != "schema.json"}
    outcome = reorder(dataset, OPTIONS, command="jrec reorder")
    assert outcome.kept == ("items",)
    assert outcome.gains["items"] > 0.2
    schema = Schema.load(dataset)
    assert schema.tables == outcome.schema.tables
    assert stored(schema).tables == before.tables
    assert schema.provenance["made"] == "here"
    assert {k: v for k, v in contents(dataset).items() if k in shards} == shards
    assert schema.table("small").bijection is None, "small tables are left alone"
    order = load_order(dataset, schema.table("items"))
    assert is_permutation(order)
    assert not order.flags.writeable
    np.testing.assert_array_equal(inverse(order)[order], np.arange(ROWS))
    for split in ("train", "valid", "test"):
        config = LoaderConfig(batch_size=100, workers=0, seed=3)
        for layout in (model_layout(), model_layout(pooling="none")):
            olds = make_loader(dataset, stored(schema), layout, split, config)
            news = make_loader(dataset, None, layout, split, config)
            for old, new in zip(olds, news, strict=True):
                bags, moved = old.bags["d8_float32"], new.bags["d8_float32"]
                items = (bags.ids >= 0) & (bags.ids < ROWS)
                np.testing.assert_array_equal(moved.ids, np.where(items, order[bags.ids * items], bags.ids))
                for part in ("offsets", "weights"):
                    np.testing.assert_array_equal(getattr(bags, part), getattr(moved, part))
                for part in ("labels", "dense", "mask"):
                    np.testing.assert_array_equal(getattr(old, part), getattr(new, part))
    found = verify(dataset)
    assert found.examples == 2048 + 256 + 100
    assert found.moved["items"] == np.count_nonzero(order != np.arange(ROWS))
    report = json.loads((dataset / "reorder" / "report.json").read_text())
    assert report["bijections"] == {"items": schema.table("items").bijection.sha256}
    assert {(e["split"], e["window_blocks"], e["batch_size"]) for e in report["effects"]} == {
        (*way, size) for way in (("train", 0), ("train", 8), ("valid", 0)) for size in (64, BATCH)
    }
    effects = [Effect(**effect) for effect in report["effects"]]
    assert image(plot_prefixes(effects, title="prefixes"))[:4] == b"\x89PNG"


def test_the_effect_counts_what_a_plain_loop_counts(dataset):
    outcome = reorder(dataset, dataclasses.replace(OPTIONS, report_batches=100))
    order = load_order(dataset, outcome.schema.table("items"))
    effect = next(e for e in outcome.effects if (e.split, e.window_blocks, e.batch_size) == ("train", 0, BATCH))
    prefixes, rows = [], []
    for batch in batches(dataset, stored(outcome.schema), "train", ["items"], Reading(batch_size=BATCH, workers=0)):
        rows.append(len({int(i) for i in batch["items"]}))
        prefixes.append(len({int(order[i]) // effect.rows_per_prefix for i in batch["items"]}))
    assert effect.batches == len(prefixes) == 16
    assert effect.prefixes["reordered"] == np.mean(prefixes)
    assert effect.unique_rows == np.mean(rows)
    counts = frequencies(dataset, stored(outcome.schema), "items", Reading(batch_size=100, workers=0))
    assert counts.sum() == sum(len(b["items"]) for b in batches(
        dataset, stored(outcome.schema), "train", ["items"], Reading(batch_size=2048, workers=0)
    ))  # fmt: skip


def test_the_bijection_depends_on_the_seed_and_on_nothing_else(dataset, tmp_path):
    checksum = lambda options, out: reorder(dataset, options, out=tmp_path / out).schema.table("items").bijection  # noqa: E731
    one = checksum(OPTIONS, "a")
    assert checksum(dataclasses.replace(OPTIONS, threads=3), "b") == one
    assert checksum(dataclasses.replace(OPTIONS, degree=0.05, seed=1), "c") != one
    before = Schema.load(dataset)
    assert before.table("items").bijection is None, "the source of a copy stays as it is"
    verify(tmp_path / "a")
    reorder(tmp_path / "a", dataclasses.replace(OPTIONS, degree=0.05, seed=1))
    again = reorder(tmp_path / "a", OPTIONS).schema
    assert again.table("items").bijection == one, "an earlier reordering is not built upon"
    assert len(list((tmp_path / "a" / "reorder").glob("*.npy"))) == 1
    assert restore(tmp_path / "a") == ("items",)
    assert Schema.load(tmp_path / "a") == before
    with pytest.raises(OutputError, match="is an input, which would be lost"):
        reorder(dataset, OPTIONS, out=dataset, overwrite=True)


def test_tables_without_gain_are_left_alone_unless_told(tmp_path):
    folder = write_dataset(tmp_path / "data", examples=512)
    never = dataclasses.replace(OPTIONS, min_gain=0.99)
    outcome = reorder(folder, never)
    assert outcome.kept == ()
    assert Schema.load(folder).table("items").bijection is None
    assert verify(folder).moved == {}
    assert reorder(folder, dataclasses.replace(never, min_gain=None)).kept == ("items",)


@pytest.mark.parametrize("step", ["verify", "_write_report", "_judge"])
def test_a_reordering_that_is_stopped_leaves_the_dataset_as_it_was(dataset, monkeypatch, step):
    reorder(dataset, OPTIONS)
    before = (dataset / "schema.json").read_bytes()
    config = LoaderConfig(batch_size=64, workers=0)
    expected = make_loader(dataset, None, model_layout(), "train", config).batch(0)

    def stop(*_, **__):
        raise KeyboardInterrupt

    other = dataclasses.replace(OPTIONS, hot_ratio=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(driver, step, stop)
        with pytest.raises(KeyboardInterrupt):
            reorder(dataset, other)
    assert (dataset / "schema.json").read_bytes() == before
    verify(dataset)
    found = make_loader(dataset, None, model_layout(), "train", config).batch(0)
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    reorder(dataset, other)
    assert len(list((dataset / "reorder").iterdir())) == 2, "what was left behind is swept"


def test_damaged_missing_and_foreign_bijections_are_named(dataset):
    schema = reorder(dataset, OPTIONS).schema
    table = schema.table("items")
    path = dataset / table.bijection.file
    good = path.read_bytes()
    config = LoaderConfig(batch_size=64, workers=0)
    read = lambda schema=None: make_loader(dataset, schema, model_layout(), "train", config)  # noqa: E731
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(DatasetError, match=rf"{path.name} is damaged.*jrec reorder"):
        read()
    path.unlink()
    with pytest.raises(DatasetError, match=rf"{path.name}, which renumbers table 'items', cannot be read"):
        read()
    path.write_bytes(good)
    newer = dataclasses.replace(table, bijection=dataclasses.replace(table.bijection, version=2))
    with pytest.raises(DatasetError, match="version 2, but this jrec reads version 1"):
        load_order(dataset, newer)
    with pytest.raises(DatasetError, match="no permutation of the 599 rows"):
        load_order(dataset, dataclasses.replace(table, rows=599))
    with pytest.raises(ValueError, match="no uint32 permutation"):
        save_order(dataset, "items", np.array([0, 2, 2], np.uint32))
    fewer = EmbeddingLayout.build(
        [TableConfig(name="items", rows=500, dim=8)],
        [FeatureConfig(name="item", table="items")],
    )
    with pytest.raises(DatasetError, match="renumbers its 600 rows"):
        make_loader(dataset, None, fewer, "train", dataclasses.replace(config, on_bad_id="clip"))
    assert read().batch(0).labels.shape == (64,)


def test_positions_of_another_numbering_are_refused(dataset):
    config = LoaderConfig(batch_size=64, workers=0)
    plain = make_loader(dataset, None, model_layout(), "train", config).state()
    reorder(dataset, OPTIONS)
    loader = make_loader(dataset, None, model_layout(), "train", config)
    with pytest.raises(CheckpointError, match="reordered"):
        loader.restore(plain)
    loader.restore(loader.state())


@hypothesis.given(data=st.data(), policy=st.sampled_from(["raise", "clip", "oov"]))
@hypothesis.settings(max_examples=40)
def test_packing_renumbers_after_bad_ids_are_dealt_with(data, policy):
    rows = data.draw(st.integers(1, 30))
    order = np.array(data.draw(st.permutations(range(rows))), np.uint32)
    bad = st.integers(rows, rows + 5)
    ids = st.integers(0, rows - 1) if policy == "raise" else st.one_of(st.integers(0, rows - 1), bad)
    examples = data.draw(st.lists(st.lists(ids, max_size=3), min_size=1, max_size=6))
    oov = data.draw(st.integers(0, rows - 1))
    good = [[i if i < rows else (rows - 1 if policy == "clip" else oov) for i in e] for e in examples]
    column = lambda lists, width: np.array([(e + [-1] * width)[:width] for e in lists], np.int64)  # noqa: E731
    fixed = lambda lists, width: [(e + [0] * width)[:width] for e in lists]  # noqa: E731
    pooling = data.draw(st.sampled_from(["sum", "mean", "none"]))
    layout = EmbeddingLayout.build(
        [TableConfig(name=name, rows=n, dim=dim) for name, n, dim in (("u", 7, 4), ("t", rows, 4), ("v", rows, 8))],
        [
            FeatureConfig(name="u", table="u"),
            FeatureConfig(name="list", table="t", max_length=3, pooling=pooling),
            FeatureConfig(name="one", table="v", fixed_length=True),
        ],
    )
    alone = EmbeddingLayout.build(
        [TableConfig(name="t", rows=rows, dim=4)],
        [FeatureConfig(name="list", table="t", max_length=3, fixed_length=True)],
    )
    renumbered = [[int(order[i]) for i in e] for e in good]
    u = np.arange(len(examples)) % 7
    rest = {"label": np.zeros(len(examples)), "u": u}

    def columns(lists):
        return {**rest, "list": column(lists, 3), "one": np.array([e[0] for e in fixed(lists, 1)])}

    options = {"on_bad_id": policy, "oov_rows": {"u": 0, "t": oov, "v": oov} if policy == "oov" else None}
    found = pack_batch(layout, columns(examples), orders={"t": order, "v": order}, **options)
    one = [[int(order[e[0]])] for e in fixed(good, 1)]
    wanted = pack_batch(layout, {**columns(renumbered), "one": np.array(one)[:, 0]})
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    whole = {"label": rest["label"], "list": np.array(fixed(examples, 3))}
    found = pack_batch(
        alone, whole, orders={"t": order}, **{**options, "oov_rows": {"t": oov} if policy == "oov" else None}
    )
    np.testing.assert_array_equal(found.bags["d4_float32"].ids, order[np.array(fixed(good, 3))])


def test_orders_that_lead_out_of_their_table_are_refused():
    layout = EmbeddingLayout.build([TableConfig(name="t", rows=3, dim=4)], [FeatureConfig(name="f", table="t")])
    for order in (np.array([0, 1, 3], np.uint32), np.array([0, 1, 2, 0], np.uint32), np.array([0, 1, 2])):
        with pytest.raises(ValueError, match="order of table 't' must be"):
            Packer(layout, orders={"t": order})


STEP, PREDICT = nnx.jit(train_step), nnx.jit(lambda model, batch: model(batch))


def train(folder, schema, layout, permute, optimizer, epochs=1):
    """Losses, logits of the test split, and the tables after training, in the numbering of the schema."""
    config = DLRMConfig(num_dense=1, bottom_mlp=(8, 8), top_mlp=(8, 1))
    model = DLRM(config, layout, rngs=nnx.Rngs(0))
    model.embeddings.set_arrays({name: permute(array) for name, array in model.embeddings.arrays().items()})
    rows = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=optimizer)
    loader = make_loader(folder, schema, layout, "train", LoaderConfig(batch_size=BATCH, workers=0), epochs=epochs)
    losses = [np.asarray(STEP(model, rows, batch)[0]) for batch in loader]
    loader = make_loader(folder, schema, layout, "test", LoaderConfig(batch_size=BATCH, workers=0, shuffle=False))
    return losses, [np.asarray(PREDICT(model, batch)) for batch in loader], model.embeddings.arrays()


@pytest.mark.parametrize("name", ["RowWiseAdagrad", pytest.param("Adam", marks=pytest.mark.slow)])
def test_training_is_bit_for_bit_that_of_a_table_whose_initial_rows_are_permuted_alike(dataset, name):
    schema = reorder(dataset, OPTIONS).schema
    order = load_order(dataset, schema.table("items"))
    addresses = np.concatenate([inverse(order), ROWS + np.arange(9)])
    permute = lambda array: array[addresses]  # noqa: E731
    optimizer = getattr(jrec.ops, name)(learning_rate=0.1)
    layout = model_layout()
    plain = train(dataset, stored(schema), layout, lambda array: array, optimizer)
    reordered = train(dataset, schema, layout, permute, optimizer)
    assert plain[0] == reordered[0], "losses"
    jax.tree.map(np.testing.assert_array_equal, plain[1], reordered[1])
    for key, array in plain[2].items():
        np.testing.assert_array_equal(permute(np.asarray(array)), np.asarray(reordered[2][key]))
    assert plain[0][0] != plain[0][-1]


def test_the_command_reorders_verifies_removes_and_says_what_is_wrong(dataset, capsys):
    arguments = ["--min-rows", "600", "--batch-size", "128", "--report-batch-sizes", "64", "--report-batches", "2"]
    assert main(["reorder", str(dataset), *arguments, "--degree", "all", "--method", "louvain", "--threads", "0"]) == 0
    out = capsys.readouterr().out
    assert "items: reordered" in out
    assert "batch 64 in order of time, unique prefixes of all these tables: random" in out
    assert main(["reorder", "--verify", str(dataset)]) == 0
    assert "2,404 examples are unchanged but for their rows" in capsys.readouterr().out
    assert main(["reorder", "--remove", str(dataset)]) == 0
    assert "were reordered: items" in capsys.readouterr().out
    for wrong, message in (
        (["--tables", "user"], "no table user; its tables are items, small"),
        ([], "no table has 10,000 rows or more, the largest has 600"),
        (["--min-rows", "600", "--degree", "all", "--max-edges", "50"], "more than 50 edges"),
        (["--remove", "--tables", "items"], "--tables is given with --remove, which takes all of DATA"),
        (["--verify", "--always"], "--always is given with --verify"),
        (["--remove", "--overwrite"], "--overwrite is given with --remove"),
    ):
        assert main(["reorder", str(dataset), *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["reorder", str(dataset / "absent")]) == 2
    assert "not a finished dataset" in capsys.readouterr().err
    assert Schema.load(dataset).table("items").bijection is None


@pytest.mark.parametrize(
    "change",
    [
        {"hot_ratio": -0.1},
        {"degree": 0},
        {"method": "metis"},
        {"min_gain": 1.0},
        {"batch_size": 1},
        {"report_batch_sizes": ()},
        {"max_edges": 0},
    ],
)
def test_options_that_cannot_be_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        ReorderOptions(**change)


@pytest.mark.slow
def test_real_taobao_events_in_order_of_time_share_a_quarter_fewer_prefixes(shared_data, tmp_path):
    from jrec.prepare.prepare import prepare
    from jrec.prepare.readers import Taobao

    folder = tmp_path / "taobao"
    prepare(Taobao(), [str(shared_data / "taobao_user_behavior_96k.csv.gz")], folder)
    options = ReorderOptions(tables=("user_id", "item_id"), batch_size=1024, report_batch_sizes=(1024,))
    outcome = reorder(folder, options)
    assert outcome.gains["user_id"] > 0.25
    assert outcome.gains["item_id"] > 0.2
    assert verify(folder).examples == 96_168


@pytest.mark.slow
def test_the_benchmark_measures_prefixes_steps_loader_and_memory(tmp_path, monkeypatch):
    import argparse

    from benchmarks import harness
    from benchmarks import reorder as benchmark

    monkeypatch.setattr(harness, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(benchmark, "SESSION", 512)
    benchmark.sessions(tmp_path / "data", 8192, rows=3000)
    for degree in ("16", "all"):
        arguments = argparse.Namespace(measure=(str(tmp_path / "data"), "items", degree), batch=[256], quick=True)
        found = benchmark.measure(arguments)
        ways = {line["where"]: line for line in found["prefixes"]}
        assert set(ways) == {"in order of time", "shuffled", "held out"}
        first = ways["in order of time"]
        assert first["reordered"] < 0.9 * first["frequency"] < first["random"]
        assert found["tables"][0]["edges"] > 0
        assert found["peak"] > 0
        if degree == "16":
            assert found["steps"][0]["ms"] > 0
            assert found["loader"]["rate"] > 0
        else:
            scores = found["modularity"]
            assert set(scores) == {"4", "16", "all"}
            assert scores["16"] > 0.8 * scores["all"]


def test_tables_beyond_int32_are_left_out_and_refused_where_they_are_named():
    rows = {"wide": 3_000_000_000, "large": 2**31 - 2, "small": 10}
    schema = Schema(
        name="t",
        block_size=8,
        dense=(),
        categorical=tuple(CategoricalFeature(name=f"of_{name}", table=name) for name in rows),
        tables=tuple(Table(name=name, rows=count) for name, count in rows.items()),
        splits={},
        provenance={},
    )
    assert driver.choose_tables(schema, ReorderOptions()) == ["large"]
    with pytest.raises(DatasetError, match=r"table 'wide' has 3,000,000,000 rows; .*: leave it out of --tables"):
        driver.choose_tables(schema, ReorderOptions(tables=("small", "wide")))


def test_labels_that_are_numbers_and_not_known_are_the_same_labels(tmp_path):
    """NaN, which stands for them in the first of several labels, differs from itself."""
    (tmp_path / "schema.toml").write_text(
        '[[labels]]\ncolumn = "watched"\nkind = "number"\n[[labels]]\ncolumn = "liked"\n'
        '[[categorical]]\ncolumn = "item"\n'
    )
    lines = [f"{k if k % 3 else ''},{k % 2},i{k % 7}" for k in range(100)]
    (tmp_path / "log.csv").write_text("\n".join(["watched,liked,item", *lines]) + "\n")
    source = csv_source(load_schema(str(tmp_path / "schema.toml")))
    made = prepare(source, tmp_path / "log.csv", tmp_path / "data", PrepareOptions(min_count=1))
    order = np.arange(made.table("item").rows, dtype=np.uint32)[::-1].copy()
    entry = save_order(tmp_path / "data", "item", order)
    dataclasses.replace(made, tables=(dataclasses.replace(made.table("item"), bijection=entry),)).save(
        tmp_path / "data"
    )
    assert verify(tmp_path / "data").examples == 100
