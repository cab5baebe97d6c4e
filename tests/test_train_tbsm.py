"""Training runs of a TBSM: on the device, with host and tensor-train tables, and what its section is refused for."""

import json
import pathlib

import numpy as np
import pytest
from checkpoint_state import flatten
from tbsm_config import SHIPPED, SMALL

from jrec import cli
from jrec.app.build import described
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint, restore_run
from jrec.app.loop import train
from jrec.app.report.logs import read_records
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.metrics import evaluate
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

TT = ("tables.overrides.item_id.tier='tt'", "tables.overrides.item_id.rank=2", "tables.implementation='xla'")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "taobao"
    synthesize(shape_like("taobao", table_rows=64), folder, SynthOptions(rows=4000, seed=1))
    return folder


@pytest.fixture
def configure(tmp_path, dataset):
    def load(*overrides, out="run"):
        places = f"data.path={str(dataset)!r}", f"out={str(tmp_path / out)!r}"
        return load_config(SHIPPED, [*places, *SMALL, *overrides])

    return load


@pytest.fixture(scope="module")
def device_run(tmp_path_factory, dataset):
    places = f"data.path={str(dataset)!r}", f"out={str(tmp_path_factory.mktemp('device') / 'run')!r}"
    return train(load_config(SHIPPED, [*places, *SMALL, "epochs=3"]))


def test_a_run_learns_from_histories_and_is_evaluated(device_run, dataset):
    assert device_run.step == 3 * 16
    found = evaluate(device_run.scores["test"])
    assert (found.auc or 0) > 0.55
    again = evaluate_checkpoint(device_run.folder, dataset, split="test")
    np.testing.assert_array_equal(again.scores.logits, device_run.scores["test"].logits)
    dense = [1 * 4 + 4, 10 * 8 + 8 + 8 * 7 + 7, 20 * 6 + 6 + 6 * 20 + 20, 7 * 7, 14 * 12 + 12 + 12 + 1]
    assert device_run.parameters["dense"]["parameters"] == sum(dense)
    assert device_run.parameters["d4_float32"]["parameters"] == 3 * 64 * 4


def test_checkpoints_of_versions_without_products_in_the_top_mlp_are_of_the_same_model(configure, dataset):
    def model(*overrides):
        config, schema = configure(*overrides), Schema.load(dataset)
        return described(config, schema)["model"]["tbsm"]

    assert "top_with" not in model()
    assert model("model.tbsm.top_with=products") == model() | {"top_with": "products"}


@pytest.mark.slow
def test_a_run_on_host_tables_is_the_run_on_the_device(configure, device_run):
    host = train(configure("epochs=3", "tables.tier=host"))
    assert (host.folder / "metrics.jsonl").read_bytes() == (device_run.folder / "metrics.jsonl").read_bytes()
    for split, scores in device_run.scores.items():
        np.testing.assert_array_equal(host.scores[split].logits, scores.logits)


@pytest.mark.slow
def test_devices_train_as_one(configure):
    """Losses, every array and the scores, up to the order of float32 sums."""
    one = train(configure("log.every_steps=1", out="one"))
    assert one.step == 16
    arrays = flatten(restore_run(one.folder, slots=True).state)
    for devices in (2, 4):
        many = train(configure("log.every_steps=1", f"mesh.devices={devices}", out=f"many{devices}"))
        assert "d4_float32" in many.parameters
        losses = [[record["loss"] for record in logged(run)] for run in (many, one)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=2e-4)
        found = flatten(restore_run(many.folder, slots=True).state)
        assert found.keys() == arrays.keys()
        for path, array in arrays.items():
            np.testing.assert_allclose(np.asarray(found[path]), array, rtol=1e-3, atol=1e-4, err_msg=path)
        for split, scores in one.scores.items():
            np.testing.assert_allclose(many.scores[split].logits, scores.logits, rtol=1e-3, atol=1e-4)


def logged(run):
    """Log records of training."""
    return [record for record in read_records(run.folder / "metrics.jsonl") if record["split"] == "train"]


@pytest.mark.slow
def test_a_run_with_a_compressed_item_table_learns_and_is_reported(tmp_path, dataset, capsys):
    out = tmp_path / "run"
    overrides = [*SMALL, *TT, "epochs=3", "log.progress='off'"]
    assert cli.main(["train", str(SHIPPED), f"data.path={str(dataset)!r}", f"out={str(out)!r}", *overrides]) == 0
    metrics = json.loads((out / "report" / "metrics.json").read_text())
    assert metrics["splits"]["test"]["auc"] > 0.55
    assert metrics["tables"]["item_id"]["tier"] == "tt"
    assert cli.main(["eval", str(out), str(dataset)]) == 0
    assert f"{metrics['splits']['test']['auc']:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dlrm_takes_sequences_pooled(tmp_path, dataset):
    places = f"data.path={str(dataset)!r}", f"out={str(tmp_path / 'dlrm')!r}"
    small = [override for override in SMALL if "tbsm" not in override]
    outcome = train(load_config(SHIPPED.with_name("taobao.toml"), [*places, *small, "max_steps=2"]))
    assert np.isfinite(outcome.scores["test"].logits).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.kind='dlrm'"], "model.tbsm is set, but model.kind is 'dlrm'"),
        (["model.bottom_mlp=[]"], "a TBSM needs a layer of each"),
        (["model.tbsm.heads=0"], "model.tbsm.heads is 0, but must be at least 1"),
        (["model.tbsm.inner='cosine'"], 'model.tbsm.inner must be one of "dot", "indefinite", "definite"'),
        (["model.tbsm.tower=[3]"], "tower_mlp"),
        (["model.features.item_history.pooling='max'"], "model.features.item_history is pooled"),
    ],
)
def test_keys_of_a_tbsm_are_checked(configure, overrides, message):
    assert configure("model.features.item_history.pooling='none'").model.kind == "tbsm"
    with pytest.raises(ConfigError) as error:
        configure(*overrides)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        (
            "{item_id='seen'}",
            "model.tbsm.histories names 'seen', but the categorical features of the dataset are user_id",
        ),
        ("", "model.tbsm.histories is empty"),
        ("{user_id='item_history', category_id='category_history'}", "they must share one"),
    ],
)
def test_histories_that_do_not_fit_the_dataset_are_refused(configure, histories, message):
    kept = [line for line in SHIPPED.read_text().splitlines() if not line.startswith("histories")]
    path = pathlib.Path(configure().out).with_name("other.toml")
    given = f"histories = {histories.replace("'", '"')}" if histories else ""
    path.write_text("\n".join(kept).replace("[model.tbsm]", f"[model.tbsm]\n{given}"))
    with pytest.raises(ConfigError, match=message):
        train(load_config(path, [f"data.path={configure().data.path!r}", f"out={configure().out!r}", *SMALL]))
