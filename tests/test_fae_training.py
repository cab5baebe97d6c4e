"""Runs on hot and cold batches: the bits of a plain run over the same batches, every example once, resumed anywhere."""

import collections
import dataclasses
import itertools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from checkpoint_state import final_arrays
from fae_cases import config_of, device_config, hot_set, packed, records_of, rows_of, write_dataset
from host_runs import pipeline_threads
from mesh_plans import scattered
from run_cases import CONFIG, configuring, quickstart
from tbsm_config import SHIPPED, SMALL

from jrec.app.build import build_layout, build_model, build_optimizer
from jrec.app.config import load_config
from jrec.app.dataset import evaluation_config, open_data
from jrec.app.evaluate import evaluate_checkpoint, restore_run
from jrec.app.hot_cold_feed import FaeLoaders
from jrec.app.loaders import train_loader
from jrec.app.loop import train
from jrec.app.recorder import Recorder
from jrec.app.report import summary, write_report
from jrec.app.shuffle_scheduler import ShuffleScheduler
from jrec.data.schema import Schema
from jrec.errors import CheckpointError, ConfigError
from jrec.metrics import sigmoid
from jrec.prepare.fae_pack import pack
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.run.placement.plan import default_plan
from jrec.run.step import compile_run
from jrec.sharding.plan_file import save_plan


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"))


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test():
    yield
    assert pipeline_threads() == []


@pytest.fixture(scope="module")
def fae_folder(dataset, tmp_path_factory):
    """Small tables hot whole, a fifth of the large ones."""
    return packed(dataset, tmp_path_factory.mktemp("fae") / "fae", lambda t: 1 if t.rows < 500 else 0.2)


@pytest.fixture(scope="module")
def fae(fae_folder, tmp_path_factory):
    """Configures runs on the packed dataset, each in a folder of its own unless named."""
    place = tmp_path_factory.mktemp("runs")
    (place / "tiny.toml").write_text(CONFIG)

    def load(*overrides, folder=fae_folder, out=None):
        out = place / (f"run{len(list(place.iterdir()))}" if out is None else out)
        out.mkdir(exist_ok=True)
        keys = [f"data.path={str(folder)!r}", f"out={str(out)!r}", "schedule=fae", "evaluate.every_steps=0"]
        return load_config(place / "tiny.toml", [*keys, "fae.batches=1", *overrides])

    return load


WHOLE = ("epochs=2", "log.every_steps=1", "checkpoint.every_steps=2", "checkpoint.keep=1")


@pytest.fixture(scope="module")
def whole(fae):
    """A run of two epochs, and its configuration."""
    config = fae(*WHOLE, out="whole")
    return train(config), config


def kinds_of(folder):
    """The order of a run's hot and cold batches, from its checkpoint."""
    _, _, meta = final_arrays(folder)
    state = meta["loader"]["scheduler"]
    totals = state["batches"]
    again = ShuffleScheduler(config_of(folder).fae, **totals, epochs=config_of(folder).epochs)
    losses, kinds = iter([s["test_loss"] for s in state["history"]]), []
    while len(kinds) < state["issued"]:
        if again.awaits_loss:
            again.observe(next(losses))
        kinds.append(again.next())
    return kinds


def loaders_of(config):
    """The loaders of a run."""
    data = open_data(config)
    layout = build_layout(data.config, data.schema, data.plan)
    return FaeLoaders(data.config, data.packed, layout)


def close(loaders):
    for loader in (loaders.hot, loaders.cold):
        if loader is not None:
            loader.close()


def plain_run(config, kinds):
    """A run with all tables on the device, over the batches of the FAE run of ``config`` in the order of ``kinds``.

    Returns:
      Its losses, its state, and its modules.
    """
    data, loaders = open_data(config), loaders_of(config)
    device = device_config(data.config)
    model = build_model(device, data.schema, build_layout(device, data.schema))
    state, compiled = compile_run(model, build_optimizer(device, model, loaders.total_batches))
    losses = []
    for kind in kinds:
        batch = next(loaders.hot if kind == "hot" else loaders.cold)
        bags = {n: dataclasses.replace(of, cast=None) for n, of in batch.bags.items()}
        state, loss, _ = compiled.step(state, dataclasses.replace(batch, bags=bags))
        losses.append(float(loss))
    close(loaders)
    return losses, state, compiled.merge(state)


def check_against_plain(outcome, config):
    """Losses, dense parameters and their slots, rows and their slots: all bits of a run without FAE."""
    losses, state, (model, optimizer) = plain_run(config, kinds_of(outcome.folder))
    logged = [r for r in records_of(outcome.folder) if r["split"] == "train"]
    every = config.log.every_steps
    assert [r["loss"] for r in logged] == [
        sum(losses[i : i + every]) / every for i in range(0, len(losses) - every + 1, every)
    ]
    rows = {}
    for name, array in model.embeddings.arrays().items():
        rows[name] = np.asarray(array).tobytes()
        slots = optimizer.slots[name].items()
        rows |= {f"{name}.{slot}": np.asarray(variable[...]).tobytes() for slot, variable in slots}
    assert rows_of(outcome.folder) == rows
    kept = final_arrays(outcome.folder)[1]
    leaves = {jax.tree_util.keystr(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(state)}
    elsewhere = ("stacks", "slots", "['key']")  # rows, and the key that a run has from its seed
    dense = collections.Counter(
        np.asarray(x).tobytes() for p, x in leaves.items() if not any(part in p for part in elsewhere)
    )
    assert sum(dense.values()) > 6
    assert not dense - collections.Counter(kept.values())


def test_a_run_is_the_plain_run_over_the_same_batches(whole, dataset, tmp_path):
    outcome, config = whole
    check_against_plain(outcome, config)
    schedules = [r for r in records_of(outcome.folder) if r["split"] == "schedule"]
    assert sum(r["cold"] + r["hot"] for r in schedules) == outcome.step
    assert [r["step"] for r in schedules] == [r["start"] + r["cold"] + r["hot"] for r in schedules]
    assert len({r["test_loss"] for r in schedules}) == len(schedules)
    assert outcome.step == 2 * (14 + 6)  # 3,402 hot and 1,398 cold examples in batches of 256
    assert [(r["cold"], r["hot"]) for r in schedules][:2] == [(3, 7), (3, 7)]
    check_report(outcome, config, tmp_path)
    for data in (dataset, config.data.path):  # the dataset that was packed, and the folder itself
        again = evaluate_checkpoint(outcome.folder, data, split="test")
        np.testing.assert_array_equal(again.scores.logits, outcome.scores["test"].logits)


def check_report(outcome, config, tmp_path):
    content = write_report(
        tmp_path / "report", config=config, schema=outcome.schema, scores=outcome.scores, parameters=outcome.parameters,
        steps=outcome.step, history=outcome.folder / "metrics.jsonl", sections=outcome.sections,
    )  # fmt: skip
    found, rows = content["fae"], content["pipeline"]["rows"]["d8_float32"]
    kinds = kinds_of(outcome.folder)
    assert content["data"]["examples"] == {"train": 4800, "valid": 600, "test": 600}
    assert found["steps"] == collections.Counter(kinds)
    assert found["switches"] == sum(a != b for a, b in itertools.pairwise(kinds))
    assert found["hot_share"] == 3402 / 4800
    assert found["rates"][0] == 50
    assert len(found["rates"]) == len(found["test_losses"])
    row = 4 * 8 * 3  # values and Adam's two slots
    assert found["hot_row_bytes"] == row * sum(found["hot_rows"].values()) == row * 4080
    sizes = found["bytes"]
    assert sizes["moved"] == rows["bytes_to_device"] + rows["bytes_to_host"]
    assert row * rows["fetched"] <= rows["bytes_to_device"]
    assert row * rows["unique"] <= rows["bytes_to_host"]  # of cold rows alone
    assert sizes["paper_synchronization"] == found["switches"] * found["hot_row_bytes"]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Log loss by schedule" in page
    assert "Rate of hot and cold batches by schedule" in page
    text = summary(content)
    assert "70.9 % of the examples are hot" in text
    assert f"{found['switches']} switches" in text


def test_every_example_once_an_epoch_and_in_another_order_in_the_next(fae, dataset, configure):
    loaders = loaders_of(fae("epochs=2"))
    scheduler = loaders.scheduler
    config = configure("tables.tier=host")
    source = Schema.load(dataset)

    def examples(batch, stack="d8_float32"):
        ids = batch.bags[stack].ids.reshape(10, -1).T
        real = batch.mask > 0
        return [
            (d.tobytes(), i.tolist(), y)
            for d, i, y in zip(batch.dense[real], ids[real], batch.labels[real], strict=True)
        ]

    expected = []
    with train_loader(config, source, build_layout(config, source)) as loader:
        for batch in loader:
            expected += examples(batch, stack="host_d8_float32")
    epochs = []
    while scheduler.issued < scheduler.total:
        if scheduler.issued % (scheduler.total // 2) == 0 and not scheduler.awaits_loss:
            epochs.append([])
        if scheduler.awaits_loss:
            scheduler.observe(0.5)
            continue
        loader = loaders.hot if scheduler.next() == "hot" else loaders.cold
        epochs[-1] += examples(next(loader))
    close(loaders)
    assert len(epochs) == 2
    for epoch in epochs:
        assert sorted(map(repr, epoch)) == sorted(map(repr, expected))
    assert epochs[0] != epochs[1]


def kept(folder):
    """All that a run leaves: step, bits of the state, the meta, host rows, and the log."""
    return final_arrays(folder), rows_of(folder), (folder / "metrics.jsonl").read_bytes()


class Killed(BaseException):
    """As sudden as a kill: nothing in the loop handles it."""


def resumed_through(fae, monkeypatch, deaths, overrides, out):
    """A run that dies at each of the steps ``deaths`` in turn, goes on each time, and ends."""
    absorb = Recorder.absorb
    for queue, death in enumerate([*deaths, None], 1):

        def dies(self, *results, death=death):
            if death is not None and self.absorbed < death <= self.absorbed + len(results):
                raise Killed
            absorb(self, *results)

        monkeypatch.setattr(Recorder, "absorb", dies)
        config = fae(*overrides, f"tables.host.queue={1 + queue % 3}", out=out)
        if death is None:
            return train(config, resume=True)
        with pytest.raises(Killed):
            train(config, resume=True)
    raise AssertionError


@pytest.mark.slow
def test_a_run_killed_around_switches_resumes_to_the_same_bits(fae, whole, monkeypatch):
    kinds = kinds_of(whole[0].folder)
    # Checkpoints follow every second step. The first death is in the first hot batch, the checkpoint in the middle of
    # the cold ones before; the second behind the schedule's end and its loss, with the checkpoint between both.
    assert kinds[:12] == ["cold"] * 3 + ["hot"] * 7 + ["cold"] * 2
    outcome = resumed_through(fae, monkeypatch, [4, 11], WHOLE, "killed")
    assert kept(outcome.folder) == kept(whole[0].folder)
    assert outcome.sections["fae"]["switches"] == whole[0].sections["fae"]["switches"] == 7


@pytest.mark.slow
def test_a_finished_run_of_one_epoch_goes_on_for_a_second(fae, whole):
    train(fae(*WHOLE, "epochs=1", out="longer"))
    assert kept(train(fae(*WHOLE, out="longer"), resume=True).folder) == kept(whole[0].folder)


@pytest.mark.slow
def test_a_run_of_single_batches_in_turn_killed_anywhere_resumes_to_the_same_bits(fae, monkeypatch):
    overrides = ("epochs=2", "checkpoint.every_steps=3", "fae.initial_rate=1", "model.table_dtype='bfloat16'")
    expected = train(fae(*overrides))
    deaths = np.unique(np.random.default_rng(0).integers(2, 40, 6)).tolist()
    outcome = resumed_through(fae, monkeypatch, deaths, overrides, "killed16")
    assert kept(outcome.folder) == kept(expected.folder)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 1])
def test_no_row_hot_and_all_rows_hot(fae, dataset, tmp_path, share):
    folder = packed(dataset, tmp_path / "packed", lambda _: share)
    config = fae("log.every_steps=1", "checkpoint.every_steps=7", "max_steps=10", folder=folder)
    outcome = train(config)
    kinds = kinds_of(outcome.folder)
    assert set(kinds) == {"hot" if share else "cold"}
    check_against_plain(outcome, config)
    assert outcome.sections["fae"]["switches"] == outcome.sections["fae"]["bytes"]["paper_synchronization"] == 0
    if share:
        assert outcome.sections["fae"]["bytes"]["moved"] == 0
    again = evaluate_checkpoint(outcome.folder, dataset, split="test")
    np.testing.assert_array_equal(again.scores.logits, outcome.scores["test"].logits)


@pytest.mark.slow
def test_one_table(configure, tmp_path, dataset):
    shape = shape_like("quickstart")
    one = dataclasses.replace(shape, rows={"C10": shape.rows["C10"]}, features=shape.features[-1:])
    synthesize(one, tmp_path / "one", SynthOptions(rows=3000, seed=1))
    folder = packed(tmp_path / "one", tmp_path / "packed", lambda _: 0.01)
    config = configure(f"data.path={str(folder)!r}", "schedule=fae", "log.every_steps=1", "evaluate.every_steps=0")
    outcome = train(config)
    assert len(set(kinds_of(outcome.folder))) == 2
    check_against_plain(outcome, config)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_weighted_lists_and_a_table_that_was_renumbered(configure, tmp_path, pooling):
    data = write_dataset(tmp_path / "shop", bijection=True)
    folder = pack(data, tmp_path / "packed", hot_set(data)).folder
    overrides = ("data.batch_size=32", "epochs=2", "log.every_steps=1", "evaluate.every_steps=0")
    pooled = (f"model.features.history.pooling={pooling!r}", "model.interaction='concat'")
    config = configure(f"data.path={str(folder)!r}", "schedule=fae", *overrides, *pooled)
    outcome = train(config)
    assert len(set(kinds_of(outcome.folder))) == 2
    check_against_plain(outcome, config)
    again = evaluate_checkpoint(outcome.folder, data, split="valid")
    np.testing.assert_array_equal(again.scores.logits, outcome.scores["valid"].logits)
    with pytest.raises(ConfigError, match=r"fae\.split is 'test', .* the dataset has train, valid"):
        train(configure(f"data.path={str(folder)!r}", "schedule=fae", "fae.split=test", out="test"))


@pytest.mark.slow
@pytest.mark.parametrize("interaction", ["fm", "dcn"])
def test_first_order_terms_and_other_interactions(configure, tmp_path, interaction):
    data = write_dataset(tmp_path / "shop")
    folder = pack(data, tmp_path / "packed", hot_set(data)).folder
    overrides = ("data.batch_size=32", "log.every_steps=1", "evaluate.every_steps=0", "model.wide=true")
    model = f"model.interaction={interaction!r}"
    config = configure(f"data.path={str(folder)!r}", "schedule=fae", *overrides, model)
    outcome = train(config)
    assert len(set(kinds_of(outcome.folder))) == 2
    losses, *_ = plain_run(config, kinds_of(outcome.folder))
    logged = [r["loss"] for r in records_of(outcome.folder) if r["split"] == "train"]
    np.testing.assert_allclose(logged, losses, rtol=1e-5)  # XLA fuses these interactions in another way


def test_calibration_on_packs_keeps_the_mean_prediction(fae):
    """Their training split has the cold examples alone, of which no shift can be told."""
    rate = "optimizer.embedding.learning_rate=0.5"  # so that predictions become too extreme
    outcome = train(fae("max_steps=12", "evaluate.every_steps=12", "evaluate.batches=0", "model.calibrate=true", rate))
    restored = restore_run(outcome.folder)
    restored.run.calibrate(1.0, 0.0)
    raw, found = restored.scores("valid").logits, outcome.scores["valid"].logits
    assert np.ptp(found) < 0.99 * np.ptp(raw)
    assert sigmoid(found).mean() == pytest.approx(sigmoid(raw).mean(), abs=1e-3)


@pytest.mark.slow
def test_histories_of_a_tbsm(tmp_path):
    """Without fused multiply-adds: which products are fused into sums is XLA's choice for each program as a whole."""
    if (flag := "--xla_cpu_max_isa=AVX") not in os.environ["XLA_FLAGS"]:
        flags = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flag}", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
        test = [sys.executable, "-m", "pytest", "-q", "-m", "slow", f"{__file__}::test_histories_of_a_tbsm"]
        alone = subprocess.run(test, env=os.environ | flags, capture_output=True, text=True, check=False)
        assert (alone.returncode, "1 passed" in alone.stdout) == (0, True), alone.stdout
        return
    synthesize(shape_like("taobao", table_rows=64), tmp_path / "taobao", SynthOptions(rows=2000, seed=1))
    folder = packed(tmp_path / "taobao", tmp_path / "packed", lambda _: 0.6)
    places = (f"data.path={str(folder)!r}", f"out={str(tmp_path / 'run')!r}", "schedule=fae")
    config = load_config(SHIPPED, [*places, *SMALL, "data.batch_size=64", "log.every_steps=1"])
    outcome = train(config)
    assert len(set(kinds_of(outcome.folder))) == 2
    check_against_plain(outcome, config)


@pytest.mark.parametrize("overrides", [(), pytest.param(("model.table_dtype='bfloat16'",), marks=pytest.mark.slow)])
def test_hot_rows_lie_over_any_plan(fae, tmp_path, overrides):
    """The others are where the plan has them: on the device, and in host memory."""
    overrides = (*overrides, "max_steps=12", "log.every_steps=1", "fae.initial_rate=20")
    config = fae(*overrides)
    layout = build_layout(config, Schema.load(evaluation_config(config).data.path))
    save_plan(scattered(default_plan(layout, 1), seed=1, replicate=0.2, host=0.5), tmp_path / "plan")
    config = fae(*overrides, f"plan={str(tmp_path / 'plan')!r}")
    outcome = train(config)
    assert set(kinds_of(outcome.folder)) == {"cold", "hot"}
    assert outcome.sections["fae"]["bytes"]["moved"] > 0
    check_against_plain(outcome, config)


def test_what_cannot_work_is_refused(fae, configure, whole, fae_folder, dataset, tmp_path):
    with pytest.raises(ConfigError, match=r"schedule is 'plain'; set schedule=fae"):
        train(configure(f"data.path={str(fae_folder)!r}"))
    with pytest.raises(ConfigError, match=r"schedule is 'fae', but data\.path is .*jrec fae pack"):
        train(configure("schedule=fae"))
    other = packed(dataset, tmp_path / "other", lambda t: 1 if t.rows < 600 else 0.2)
    with pytest.raises(ConfigError, match=r"rows mean the same, but the examples are others; resume with the dataset"):
        train(fae(*WHOLE, folder=other, out="whole"), resume=True)
    loaders = loaders_of(fae(*WHOLE, folder=other))
    with pytest.raises(CheckpointError, match=r"is not the FAE folder of this run"):
        loaders.restore(final_arrays(whole[0].folder)[2]["loader"])
    close(loaders)
    with pytest.raises(ConfigError, match=r"data\.eval_batch_size was 512 and is 256"):
        train(fae(*WHOLE, "data.eval_batch_size=256", out="whole"), resume=True)
