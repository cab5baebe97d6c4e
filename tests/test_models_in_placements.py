"""What a model has besides rows trains alike wherever these live: ``model_cases``, and the second table of its page."""

import dataclasses
import shutil
import socket
import subprocess
import sys

import model_cases as cases
import numpy as np
import pytest
import shop_logs
from checkpoint_state import final_arrays
from child_processes import with_devices
from feature_table import NAMES

from jrec.app.compress import Selection, compress_run
from jrec.app.config import load_config
from jrec.app.evaluate import restore_run
from jrec.app.loop import train

CLOSE = {"rtol": 1e-3, "atol": 1e-4}
ROUNDED = {"rtol": 2**-5, "atol": 2**-8}  # a row of 16 bits may come to lie at a neighbour in every step


class Runs:
    """Datasets and runs, each made once."""

    def __init__(self, folder):
        self.folder, self.done = folder, {}
        cases.prepare(folder)
        (folder / "run.toml").write_text(shop_logs.CONFIG)

    def config(self, model, name, *more, out=None):
        place = cases.PLACES[name]
        data = "growing" if (model, place.data) == (cases.GROWS, "plain") else place.data
        out = self.folder / "runs" / (out or f"{model}-{name}").replace("`", "")
        keys = [f"data.path={str(self.folder / data)!r}", f"out={str(out)!r}", *cases.SMALL]
        config = load_config(self.folder / "run.toml", [*keys, *cases.MODELS[model], *place.keys, *more])
        if not place.plan:
            return config
        plan = out.with_name(f"{out.name}.plan")
        if not plan.exists():
            plan.parent.mkdir(exist_ok=True)
            whole = config if place.data != "fae" else dataclasses.replace(self.config(model, "plan"), plan="")
            cases.write_plan(place.plan, whole, plan)
        return load_config(
            self.folder / "run.toml", [*keys, *cases.MODELS[model], *place.keys, *more, f"plan={str(plan)!r}"]
        )

    def run(self, model, name):
        if (model, name) not in self.done:
            self.done[model, name] = train(self.config(model, name))
        return self.done[model, name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("models"))


def same(found, want, limits):
    """Vocabularies to the bit, everything else up to the order of sums."""
    one, other = cases.arrays_of(found), cases.arrays_of(want)
    assert one.keys() == other.keys()
    for name, array in other.items():
        exact = name.startswith("progress.growing.")
        np.testing.assert_allclose(one[name], array, err_msg=name, **({"rtol": 0} if exact else limits))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model in cases.MODELS for name, p in cases.places_of(model).items() if p.like]
)
def test_a_model_trains_alike_wherever_its_rows_live(runs, model, name):
    place = cases.PLACES[name]
    found = runs.run(model, name)
    if model == cases.DRAWS and "devices" in place.features:
        resumed_to_the_same_bits(runs, model, name)
        return
    want = runs.run(model, place.like)
    assert found.step == want.step >= 9
    same(found.folder, want.folder, ROUNDED if place.narrow else CLOSE)
    if not place.narrow:
        np.testing.assert_allclose(found.scores["test"].logits, want.scores["test"].logits, **CLOSE)


def resumed_to_the_same_bits(runs, model, name):
    """Asserts that a run is the one that stops in its middle and goes on."""
    whole, out = runs.run(model, name), f"{model}-{name}-parts"
    assert train(runs.config(model, name, "max_steps=5", out=out)).step == 5
    parts = train(runs.config(model, name, out=out), resume=True)
    assert parts.step == whole.step >= 9
    assert final_arrays(parts.folder)[:2] == final_arrays(whole.folder)[:2]
    np.testing.assert_array_equal(parts.scores["test"].logits, whole.scores["test"].logits)


@pytest.mark.slow
@pytest.mark.parametrize("model", cases.MODELS)
def test_one_process_goes_on_with_what_two_began(runs, model):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    config = runs.config(model, "one", "mesh.devices=4", out=f"{model}-two")
    (runs.folder / "two.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "jrec", "train", str(runs.folder / "two.toml"), "evaluate.baselines=off"]
    together = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process"]
    options = {"env": with_devices(2), "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    children = [subprocess.Popen([*command, *together, str(n)], **options) for n in range(2)]
    for child in children:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors[-2000:]
    like = ("mesh.devices=4",) if model == cases.DRAWS else ()
    moved = runs.config(model, "one", *like, out=f"{model}-moved")
    shutil.copytree(config.out, moved.out)
    assert train(moved, resume_from=6).step >= 9
    same(runs.folder / "runs" / moved.out, runs.folder / "runs" / config.out, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in cases.MODELS if (model, "compress") not in cases.NEVER])
def test_a_run_is_compressed_and_trained_on(runs, model, tmp_path):
    run = runs.run(model, "one")
    found = compress_run(run.folder, tmp_path / "out", Selection(tables=("item",), rank=3), splits=("test",))
    np.testing.assert_allclose(found.before["test"].logits, run.scores["test"].logits, **CLOSE)
    np.testing.assert_allclose(found.after["test"].logits, restore_run(tmp_path / "out").scores("test").logits, **CLOSE)
    longer = train(load_config(tmp_path / "out" / "config.toml", ["epochs=2"]), resume=True)
    assert longer.step == 2 * run.step


def test_every_model_is_trained_in_every_placement():
    for model, features in cases.trained().items():
        assert set(NAMES) - features == {feature for of, feature in cases.NEVER if of == model}
