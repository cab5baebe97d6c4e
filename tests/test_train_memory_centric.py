"""Some devices of a mesh keep the tables and the others train the dense model: their plans, batches and scores."""

import mesh_runs
import numpy as np
import pytest
from mesh_plans import MIDDLE, plan_apart
from mesh_run_cases import CONFIG
from run_cases import configuring, quickstart

from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.app.run_plan import check_sharing
from jrec.cli import main
from jrec.data.regroup import blank
from jrec.errors import ConfigError
from jrec.sharding import load_plan


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=800)


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


def test_blank_parts_have_no_lookups():
    layout = mesh_runs.layout()
    (batch,) = mesh_runs.batches(layout, 1)
    part = blank(layout, batch, 5)
    assert part.dense.shape == (5, 3)
    assert not part.mask.any()
    for name, bags in part.bags.items():
        assert (np.asarray(bags.ids) == -1).all()
        assert bags.ids.dtype == batch.bags[name].ids.dtype
        assert (bags.weights is None) == (batch.bags[name].weights is None)
        assert bags.offsets is not None
        assert bags.offsets.shape == (layout.stacks[name].num_bags(5) + 1,)
        assert not bags.offsets.any()


# Runs from a configuration.


@pytest.fixture
def apart(configure, dataset, tmp_path):
    """Overrides of a run by a plan of ``jrec plan``: devices 0 and 3 keep the tables."""
    plan = str(tmp_path / "apart")
    configure()
    made = ["plan", str(dataset), "--hardware", "dgx-a100", "--devices", "4", "--config", str(tmp_path / "tiny.toml")]
    assert main([*made, "--tables-on", "0,3", "--out", plan, "--figure", "none"]) == 0
    assert load_plan(plan).computes == MIDDLE
    return ("mesh.devices=4", f"plan={plan!r}")


@pytest.mark.slow
def test_a_run_scores_as_on_one_device_and_its_checkpoints_move(configure, dataset, apart):
    """Evaluations between steps, a batch of 250 examples that two devices share, checkpoints from and to elsewhere."""
    often = ("evaluate.every_steps=2", "checkpoint.every_steps=2", "evaluate.splits=['test']")
    one = train(configure(*often, out="one"))
    expected = one.scores["test"].logits
    four = train(configure(*apart, *often, out="four"))
    assert four.sections["plan"]["memory_balance"] > 0
    np.testing.assert_allclose(four.scores["test"].logits, expected, rtol=1e-4, atol=1e-5)
    for devices, plan in ((1, ""), (3, ""), (4, apart[1].removeprefix("plan=").strip("'"))):
        scores = evaluate_checkpoint(four.folder, dataset, split="test", devices=devices, plan=plan).scores
        np.testing.assert_allclose(scores.logits, four.scores["test"].logits, rtol=1e-5, atol=1e-6)
    moves = ((apart, ("mesh.devices=0", "plan=''")), (("mesh.devices=2",), apart), (apart, apart))
    for number, (begin, end) in enumerate(moves):
        train(configure(*begin, "max_steps=3", out=f"moved{number}"))
        moved = train(configure(*end, out=f"moved{number}"), resume=True)
        assert moved.step == one.step
        np.testing.assert_allclose(moved.scores["test"].logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("data.batch_size=63",), "batch_size is 63, which the 2 devices that compute by .* use a multiple of 2"),
    ],
)
def test_what_such_a_plan_cannot_train_is_refused(configure, apart, overrides, says):
    from jrec.app.build import build_layout
    from jrec.app.dataset import plan_of
    from jrec.app.make_run import checked_mesh
    from jrec.data.schema import Schema

    config = configure(*apart, *overrides)
    schema, plan = Schema.load(config.data.path), plan_of(config)
    with pytest.raises(ConfigError, match=says):
        checked_mesh(config, schema, build_layout(config, schema, plan), plan)


def test_processes_need_equal_numbers_of_devices_that_compute(configure):
    plan, config = plan_apart(MIDDLE), configure("mesh.devices=4")
    check_sharing(config, plan, [0, 0, 1, 1], training=True)
    with pytest.raises(ConfigError, match=r"of the 2 processes 0, 2 compute.*equal number of devices of every process"):
        check_sharing(config, plan, [0, 1, 1, 0], training=True)
    check_sharing(config, plan, [0, 1, 1, 0], training=False)
