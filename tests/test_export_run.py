"""Exported runs give the run's own scores, whatever the model, the tables' tiers and the dtype; deltas follow them."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import shop_logs
from grids import some_of
from tbsm_config import SHIPPED, SMALL

from jrec import cli, serving
from jrec.app.config import load_config
from jrec.app.evaluate import restore_run
from jrec.app.export import export_run
from jrec.app.loop import train
from jrec.data.blocks import ListColumn, ShardReader
from jrec.data.columns import cut
from jrec.data.schema import Schema
from jrec.errors import JrecError
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.serving.encode import model_inputs

HISTORY = 'model.features={{history={{pooling="{}"}}}}'
RUNS = {
    "dot": (),
    "concat, mean": ("model.interaction='concat'", HISTORY.format("mean"), "model.embedding_dim=6"),
    "DeepFM": ("model.interaction='fm'", "model.wide=true"),
    "DCN-v2": ("model.interaction='dcn'", "model.cross_rank=3"),
    "max, sqrtn": (HISTORY.format("max"), "model.pooling='sqrtn'"),
    "unpooled": (HISTORY.format("none"),),
    "tensor train": ("tables.tt.min_rows=20", "tables.tt.rank=2"),
    "tensor train with a cache": (
        "tables.tt.min_rows=20",
        "tables.tt.rank=2",
        "tables.tt.cache.rows=8",
        "tables.tt.cache.warmup_steps=2",
    ),
    "bfloat16 rows": ("model.table_dtype='bfloat16'",),
    "host": ("tables.tier='host'",),
    "whole rows and a tensor train": ("tables.tt.min_rows=20", "tables.tt.rank=2", "tables.tt.whole_rows=10"),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    shop_logs.write_log(folder / "monday.csv")
    return folder, shop_logs.prepare(folder, folder / "monday.csv", "monday")


def _columns(dataset, split="test"):
    """The columns of a split, as its blocks have them."""
    schema = Schema.load(dataset)
    (shard,) = schema.splits[split].shards
    return ShardReader(dataset, shard).read(0)


def _inputs(model, dataset):
    return model_inputs(_columns(dataset), model.manifest)


@pytest.mark.parametrize(
    "name",
    some_of(RUNS, "whole rows and a tensor train", "DCN-v2", "max, sqrtn", "unpooled", "host", "bfloat16 rows"),
)
def test_an_export_gives_the_scores_of_the_run(name, shop, tmp_path):
    _, dataset = shop
    run = shop_logs.trained(tmp_path, dataset, *RUNS[name])
    manifest = export_run(run, tmp_path / "export")
    model = serving.load(tmp_path / "export")
    assert model.manifest == manifest
    got = model.logits_of(*_inputs(model, dataset))
    want = restore_run(run).scores("test")
    np.testing.assert_allclose(got, want.logits, rtol=2e-5, atol=2e-6)


def test_quantized_exports_lose_little(shop, tmp_path):
    _, dataset = shop
    run = shop_logs.trained(tmp_path, dataset, "epochs=3")
    want = restore_run(run).scores("test")
    sizes = {}
    for dtype, most in (("float32", 2e-5), ("float16", 2e-3), ("int8", 2e-2), ("int4", 0.4)):
        export_run(run, tmp_path / dtype, dtype=dtype)
        model = serving.load(tmp_path / dtype)
        logits = model.logits_of(*_inputs(model, dataset))
        assert np.abs(logits - want.logits).max() < most
        assert not np.array_equal(logits, want.logits) or dtype == "float32"
        sizes[dtype] = (tmp_path / dtype / "tables" / "item.npy").stat().st_size
    assert sizes["int4"] < sizes["int8"] < sizes["float16"] + 500 < sizes["float32"]


def test_batches_of_any_size_give_the_same_scores(shop, tmp_path):
    _, dataset = shop
    export_run(shop_logs.trained(tmp_path, dataset), tmp_path / "export")
    model = serving.load(tmp_path / "export", batch_sizes=(1, 4, 32))
    model.warm_up()
    dense, ids = _inputs(model, dataset)
    whole = model.logits_of(dense, ids)
    assert whole.shape == (120,)
    columns = _columns(dataset)
    for count in (0, 1, 3, 40):
        part = model_inputs({n: cut(c, 0, count) for n, c in columns.items()}, model.manifest)
        np.testing.assert_allclose(model.logits_of(*part), whole[:count], rtol=1e-5, atol=1e-6)


def test_a_served_model_keeps_nothing_that_it_was_given_or_gave(shop, tmp_path):
    _, dataset = shop
    export_run(shop_logs.trained(tmp_path, dataset), tmp_path / "export")
    model = serving.load(tmp_path / "export")
    offsets, items, strengths = np.array([0, 2, 3]), np.array([1, 2, 3]), np.ones(3, np.float32)
    columns = {"price": np.ones(2), "user": np.arange(2), "item": np.arange(2)}
    columns |= {"history": ListColumn(offsets, items), "strengths": ListColumn(offsets, strengths)}

    def spoil(tree):
        for leaf in jax.tree.leaves(tree):
            leaf[...] = 0

    dense, ids = model.encode(columns)
    expected = model.logits_of(dense, ids).copy(), {n: v.copy() for n, v in model.vectors(ids).items()}
    spoil([columns, model.logits_of(dense, ids), model.vectors(ids)])
    np.testing.assert_array_equal(model.logits_of(dense, ids), expected[0])
    jax.tree.map(np.testing.assert_array_equal, model.vectors(ids), expected[1])
    logits = model.logits_of(dense, ids)
    spoil([dense, [dataclasses.astuple(one) for one in ids.values()]])
    np.testing.assert_array_equal(logits, expected[0])


def test_deltas_apply_in_order_and_a_gap_is_refused(shop, tmp_path):
    _, dataset = shop
    path = [tmp_path / name for name in ("whole", "delta1", "delta2")]
    few = ("checkpoint.every_steps=1", "checkpoint.keep=20", "data.batch_size=8", "max_steps=20")
    run = shop_logs.trained(tmp_path, dataset, *few)
    steps = sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
    first, second, third = (run / "checkpoints" / str(step) for step in (steps[0], steps[1], steps[-1]))
    export_run(first, path[0], dtype="int8")
    export_run(second, path[1], since=[path[0]])
    export_run(third, path[2], since=path[:2])
    changed = np.load(path[1] / "tables" / "user.changed.npy")
    assert 0 < changed.size < Schema.load(dataset).table("user").rows
    sizes = [sum(file.stat().st_size for file in (delta / "tables").iterdir()) for delta in path]
    assert max(sizes[1:]) <= sizes[0] + 300  # where most rows changed, a delta has the whole table
    export_run(third, tmp_path / "again", dtype="int8")

    model = serving.load(path[0])
    inputs = _inputs(model, dataset)
    before = model.logits_of(*inputs)
    with pytest.raises(serving.ExportError, match=r"delta2 .* is a delta of .*apply all deltas in the order"):
        model.apply(path[2])
    np.testing.assert_array_equal(model.logits_of(*inputs), before)
    model.apply(path[1])
    model.apply(path[2])
    want = serving.load(tmp_path / "again").logits_of(*inputs)
    np.testing.assert_array_equal(model.logits_of(*inputs), want)
    np.testing.assert_array_equal(serving.load(path[0], path[1:]).logits_of(*inputs), want)
    with pytest.raises(serving.ExportError, match="is a delta; load the export"):
        serving.load(path[1])
    with pytest.raises(serving.ExportError, match="is a whole export, not a delta"):
        serving.load(path[0], [tmp_path / "again"])
    with pytest.raises(serving.ExportError, match="dtype is int4, not int8"):
        export_run(third, tmp_path / "other", dtype="int4", since=path[:1])
    assert not (tmp_path / "other").exists()


def test_a_damaged_or_foreign_export_is_refused(shop, tmp_path):
    _, dataset = shop
    run = shop_logs.trained(tmp_path, dataset)
    export = tmp_path / "export"
    export_run(run, export)
    with pytest.raises(JrecError, match="export is a finished export; pass --overwrite"):
        export_run(run, export)
    export_run(run, export, overwrite=True)
    table = export / "tables" / "user.npy"
    content = bytearray(table.read_bytes())
    content[-1] ^= 1
    table.write_bytes(content)
    with pytest.raises(serving.ExportError, match=r"user.npy is damaged"):
        serving.load(export)
    table.unlink()
    with pytest.raises(serving.ExportError, match=r"user.npy is missing"):
        serving.load(export)
    manifest = json.loads((export / "manifest.json").read_text())
    (export / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(serving.ExportError, match="version 99"):
        serving.load(export)
    with pytest.raises(serving.ExportError, match="not a folder"):
        serving.load(pathlib.Path(tmp_path / "nothing"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning")  # of jax2onnx, in Flax
@pytest.mark.parametrize(
    "keys", [("model.interaction=dot",), ("model.interaction=concat",), ("model.members=3", "model.dropout=0.1")]
)
def test_onnxruntime_gives_the_same_logits(keys, shop, tmp_path):
    pytest.importorskip("jax2onnx", reason="jax2onnx, of jrec[onnx], is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime, of jrec[onnx], is not installed")
    _, dataset = shop
    run = shop_logs.trained(tmp_path, dataset, *keys)
    assert cli.main(["export", str(run), "--onnx", "--out", str(tmp_path / "export"), "--quiet"]) == 0
    model = serving.load(tmp_path / "export")
    dense, ids = _inputs(model, dataset)
    vectors = model.vectors(ids)
    session = onnxruntime.InferenceSession(tmp_path / "export" / "model.onnx")
    want = model.logits_of(dense, ids)
    for count in (120, 1, 7):
        (got,) = session.run(None, {"dense": dense[:count], **{name: v[:count] for name, v in vectors.items()}})
        np.testing.assert_allclose(got, want[:count], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_sequence_model_is_exported_but_not_to_onnx(tmp_path):
    dataset = tmp_path / "taobao"
    synthesize(shape_like("taobao", table_rows=64), dataset, SynthOptions(rows=4000, seed=1))
    run = tmp_path / "run"
    train(load_config(SHIPPED, [f"data.path={str(dataset)!r}", f"out={str(run)!r}", *SMALL]))
    export_run(run, tmp_path / "export")
    model = serving.load(tmp_path / "export")
    want = restore_run(run).scores("test").logits
    np.testing.assert_allclose(model.logits_of(*_inputs(model, dataset)), want, rtol=2e-5, atol=2e-6)
    pytest.importorskip("jax2onnx", reason="jax2onnx, of jrec[onnx], is not installed")
    with pytest.raises(serving.ExportError, match=r"is not pooled; --onnx"):
        export_run(run, tmp_path / "onnx", onnx=True)
