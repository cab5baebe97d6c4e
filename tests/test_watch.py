"""Evaluations during training: when they take place, the best step, early ends, and that resumed runs agree on them."""

import json

import numpy as np
import pytest
from checkpoint_state import final_arrays
from run_cases import CONFIG, configuring, quickstart
from train_command import train_command

from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.app.preflight import check_start
from jrec.app.recorder import Recorder
from jrec.app.run_record import record_of
from jrec.app.watch import BestStep, plan_evaluations
from jrec.cli import main
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.metrics import Scores, evaluate
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

OVERFITS = (
    "epochs=12", "optimizer.embedding.learning_rate=0.1", "optimizer.learning_rate=0.1", "evaluate.batches=0",
    "evaluate.early_stopping.patience=3", "checkpoint.keep_best=true", "checkpoint.keep=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=2000)


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


def records_of(folder, split="valid"):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if r["split"] == split]


@pytest.mark.parametrize(
    ("total", "batch_size", "eval_batch_size", "count", "batches"),
    [
        (100_000, 2048, 512, 16, 1),  # all of the split, which is one batch
        (100_000, 2048, 10, 16, 8),
        (500, 256, 50, 16, 4),
        (500, 256, 512, 16, 1),
        (500, 64, 512, 6, 1),
        (31, 64, 512, 5, 1),
        (3, 64, 512, 3, 1),
    ],
)
def test_auto_evaluates_as_often_as_it_can_pay_for(
    configure, dataset, total, batch_size, eval_batch_size, count, batches
):
    sizes = (f"data.batch_size={batch_size}", f"data.eval_batch_size={eval_batch_size}")
    schema = Schema.load(dataset)  # 200 examples in "valid"
    plan = plan_evaluations(configure("evaluate.every_steps=auto", "evaluate.batches=0", *sizes), schema, total)
    assert plan.splits == ("valid",)
    assert (total // plan.every_steps, plan.batches) == (pytest.approx(count, abs=1), batches)
    if total > 100:
        assert count * batches * eval_batch_size <= 0.1 * total * batch_size


def test_explicit_intervals_stay_and_absent_splits_have_no_evaluation(configure, dataset):
    schema = Schema.load(dataset)
    for every in (0, 7):
        plan = plan_evaluations(configure(f"evaluate.every_steps={every}"), schema, 1000)
        assert (plan.every_steps, plan.batches) == (every, 2)
    for every in ("auto", 7):
        overrides = (f"evaluate.every_steps={every}", "evaluate.splits=['test']")
        without = type(schema)(**{**vars(schema), "splits": {"train": schema.splits["train"]}} | {})
        assert plan_evaluations(configure(*overrides), without, 1000).every_steps == 0
    assert plan_evaluations(configure("evaluate.every_steps=auto", "schedule=fae"), schema, 1000).every_steps == 0


def scored(auc_like):
    """An evaluation whose AUC and log loss follow from how far the classes are apart."""
    labels = np.arange(100) % 2 == 0
    logits = np.where(labels, auc_like, -auc_like) + np.linspace(-1, 1, 100)
    return evaluate(Scores(logits=logits.astype(np.float32), labels=labels))


@pytest.mark.parametrize("metric", ["auc", "log_loss"])
def test_the_best_step_and_patience(metric):
    best = BestStep(metric, 2)
    assert [best.observe(step, scored(value)) for step, value in enumerate((0.1, 0.3, 0.2, 0.5, 0.4))] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert (best.step, best.over) == (3, False)
    again = BestStep(metric, 2)
    again.restore(json.loads(json.dumps(best.state())))
    one_class = evaluate(Scores(logits=np.zeros(2, np.float32), labels=np.zeros(2, bool)))
    for watch in (best, again):
        if metric == "auc":
            assert not watch.observe(5, one_class)
        assert not watch.over
        assert not watch.observe(6, scored(0.45))
        assert (watch.step, watch.over) == (3, True)
    other = BestStep("log_loss" if metric == "auc" else "auc", 0)
    other.restore(best.state())
    assert other.step is None
    assert not other.over


def test_a_run_that_gets_worse_ends_early_and_its_best_step_is_scored(configure):
    config = configure(*OVERFITS)
    outcome = train(config)
    values = {r["step"]: r["auc"] for r in records_of(outcome.folder)}
    best = max(values, key=values.__getitem__)
    steps = sorted(values)
    assert outcome.stopped_early
    assert outcome.finished
    assert outcome.scored_step == best < outcome.step == steps[-1] == steps[steps.index(best) + 3]
    assert evaluate(outcome.scores["valid"]).auc == pytest.approx(values[best], abs=1e-9)
    assert sorted(int(p.name) for p in (outcome.folder / "checkpoints").iterdir()) == [best, outcome.step]
    assert record_of(outcome.folder).chosen_step() == best
    by_hand = evaluate_checkpoint(outcome.folder, config.data.path, split="test")
    np.testing.assert_array_equal(by_hand.scores.logits, outcome.scores["test"].logits)
    assert train(config, resume=True).step == outcome.step


@pytest.mark.slow
def test_a_killed_run_ends_early_at_the_same_step_with_the_same_bits(configure, monkeypatch):
    whole = train(configure(*OVERFITS, out="whole"))
    config, absorb = configure(*OVERFITS, out="killed"), Recorder.absorb

    class Killed(BaseException):
        """As sudden as a kill: nothing in the loop handles it."""

    for death in (17, whole.step - 1):

        def dies(self, *results, death=death):
            if self.absorbed < death <= self.absorbed + len(results):
                raise Killed
            absorb(self, *results)

        monkeypatch.setattr(Recorder, "absorb", dies)
        with pytest.raises(Killed):
            train(config, resume=True)
    monkeypatch.setattr(Recorder, "absorb", absorb)
    resumed = train(config, resume=True)
    assert (resumed.step, resumed.scored_step) == (whole.step, whole.scored_step)
    assert final_arrays(resumed.folder) == final_arrays(whole.folder)
    assert (resumed.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()
    for split, scores in whole.scores.items():
        np.testing.assert_array_equal(resumed.scores[split].logits, scores.logits)


def test_the_command_reports_the_best_step_and_does_not_go_on(tmp_path, dataset, configure, capsys):
    run = train_command(tmp_path, dataset, *OVERFITS, "evaluate.baselines=off")
    training = json.loads((run / "report" / "metrics.json").read_text())["training"]
    assert training["stopped_early"]
    best, printed = training["scored_step"], capsys.readouterr().out
    assert f"scores are those of the best step, {best:,} of {training['steps']:,}" in printed
    assert "evaluations every 8 steps" in printed
    assert check_start(configure(*OVERFITS), resume=True, overwrite=False).finished
    patient = (*OVERFITS, "evaluate.early_stopping.patience=4")
    assert not check_start(configure(*patient), resume=True, overwrite=False).finished
    assert main(["eval", str(run), str(dataset)]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == best


def test_without_a_best_checkpoint_a_run_is_its_latest(configure, tmp_path):
    folder = train(configure("max_steps=2")).folder
    assert record_of(folder).chosen_step() == 2
    assert record_of(tmp_path).chosen_step() is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["evaluate.early_stopping.patience=2", "evaluate.every_steps=0"],
            r"patience is 2, but evaluate\.every_steps is 0",
        ),
        (
            ["checkpoint.keep_best=true", "evaluate.splits=[]", "evaluate.every_steps=auto"],
            r"keep_best is true, but .*\[\]",
        ),
    ],
)
def test_the_best_needs_evaluations(configure, overrides, message):
    with pytest.raises(ConfigError, match=message):
        configure(*overrides)


@pytest.mark.parametrize("key", ["evaluate.early_stopping.patience=2", "checkpoint.keep_best=true"])
def test_the_best_needs_the_split(tmp_path, key):
    folder = tmp_path / "trained_only"
    synthesize(shape_like("quickstart"), folder, SynthOptions(rows=300, seed=1, split=(0.8, 0.0, 0.2)))
    config = configuring(tmp_path, folder, CONFIG)(key, "evaluate.every_steps=auto", "evaluate.final_splits=['test']")
    with pytest.raises(ConfigError, match=r"has no examples in split .valid., the first of evaluate\.splits"):
        check_start(config, resume=False, overwrite=False)
