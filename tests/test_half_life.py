"""Training in which examples count less the older they are: their weights, what that is worth, and what is refused."""

import json

import numpy as np
import pytest
from test_order_of_time import CONFIG, DAY, moments_of_log, prepare_items, train
from test_order_of_time import prepare as prepare_log

from jrec import cli
from jrec.app.config import load_config
from jrec.app.dataset import open_data
from jrec.app.loaders import eval_loader, train_loader
from jrec.data.moments import STRIDE, Moments
from jrec.errors import CheckpointError, ConfigError

LINES = 1_000
SCHEMA = """
[label]
column = "label"
[time]
column = "ts"
format = "seconds"
[[dense]]
column = "number"
transform = "none"
[[categorical]]
column = "user"
"""
SHUFFLED = CONFIG.replace('order = "time"', 'half_life = "1d"').replace('progressive = "1d"\n', "")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Two datasets whose examples have their number as a dense feature, one with weights."""
    folder = tmp_path_factory.mktemp("numbered")
    moments, rng = moments_of_log(LINES, days=10), np.random.default_rng(2)
    weights = rng.integers(0, 4, LINES)
    lines = [f"{n % 2},{at},{n},u{n % 7},{w}" for n, (at, w) in enumerate(zip(moments, weights, strict=True))]
    (folder / "log.csv").write_text("\n".join(["label,ts,number,user,w", *lines]) + "\n")
    for name, weight in (("plain", ""), ("weighted", '[weight]\ncolumn = "w"\n')):
        (folder / f"{name}.toml").write_text(SCHEMA + weight)
        given = ["--schema", str(folder / f"{name}.toml"), "--input", str(folder / "log.csv"), "--quiet"]
        given += ["--out", str(folder / name), "--block-size", "128"]
        assert cli.main(["prepare", "csv", *given]) == 0
    (folder / "run.toml").write_text(SHUFFLED)
    return folder, moments, weights


def loaded(folder, name, *changes):
    config = load_config(folder / "run.toml", [f"data.path={folder / name}", f"out={folder / 'none'}", *changes])
    data = open_data(config)
    return data.config, data.schema, data.config.model.of_kind.layout(data.config, data.schema, None)


@pytest.mark.parametrize("name", ["plain", "weighted"])
@pytest.mark.parametrize("half_life", ["1d", "36h"])
def test_an_example_counts_half_as_much_as_one_a_half_life_later(numbered, name, half_life):
    folder, moments, given = numbered
    config, schema, layout = loaded(folder, name, f"data.half_life={half_life}", "data.window_blocks=2")
    with train_loader(config, schema, layout) as loader:
        batches = [(np.asarray(batch.dense)[:, 0], np.asarray(batch.mask)) for batch in loader]
    numbers, weights = (np.concatenate(column) for column in zip(*batches, strict=True))
    examples = schema.splits["train"].examples
    order = np.argsort(numbers[:examples])
    assert not np.array_equal(order, np.arange(examples))  # they are shuffled
    # The second of every 64th example is known, of others what lies between.
    known = np.append(np.arange(0, examples, STRIDE), examples - 1)
    seconds = np.interp(np.arange(examples), known, moments[known])
    want = 0.5 ** ((moments[examples - 1] - seconds) / {"1d": DAY, "36h": 1.5 * DAY}[half_life])
    want = want * (given[:examples] if name == "weighted" else 1)
    np.testing.assert_allclose(weights[:examples][order], want, rtol=1e-5)
    exact = 0.5 ** ((moments[examples - 1] - moments[:examples]) / {"1d": DAY, "36h": 1.5 * DAY}[half_life])
    np.testing.assert_allclose(Moments.load(folder / name, schema, "train").recency(0, examples, DAY), 0.5 ** (
        (moments[examples - 1] - seconds) / DAY), rtol=1e-5)  # fmt: skip
    assert np.abs(want - exact * (given[:examples] if name == "weighted" else 1)).max() < 0.1 * max(1, given.max())
    assert not weights[examples:].any()


def test_evaluations_count_all_examples_alike(numbered):
    folder, _, _ = numbered
    config, schema, layout = loaded(folder, "plain")
    with eval_loader(config, schema, layout, "train") as loader:
        assert all(set(np.unique(batch.mask)) <= {0.0, 1.0} for batch in loader)


def test_a_run_of_another_half_life_does_not_go_on(numbered):
    folder, _, _ = numbered
    states = {}
    for half_life in ("1d", "2d"):
        config, schema, layout = loaded(folder, "plain", f"data.half_life={half_life}")
        with train_loader(config, schema, layout) as loader:
            next(iter(loader))
            states[half_life] = loader.state()
            if half_life == "2d":
                with pytest.raises(CheckpointError, match="half_life"):
                    loader.restore(states["1d"])


def test_a_model_follows_tastes_that_turned_round(tmp_path):
    """Two of eight days are of the old taste: without a half-life they pull the model back."""
    prepare_log(tmp_path, "data")
    (tmp_path / "run.toml").write_text(SHUFFLED)
    losses = {}
    for half_life in ("", "1d"):
        train(tmp_path, f"run{half_life}", f"data.half_life={half_life!r}", "epochs=4", "seed=1")
        report = json.loads((tmp_path / f"run{half_life}" / "report" / "metrics.json").read_text())
        losses[half_life] = report["splits"]["test"]["log_loss"]
    assert losses["1d"] < losses[""] - 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.half_life=1w"], "data.half_life is '1w'; give days, hours, minutes or seconds, such as '7d'"),
        (["data.order=time"], "those of a batch in the order of time are of one moment; leave it out"),
        (["data.window_blocks=0"], "leave out data.order and data.window_blocks"),
        (["schedule=fae"], "but schedule 'fae' packs its examples without weights"),
    ],
)
def test_configurations_that_are_refused(numbered, changes, message):
    folder, _, _ = numbered
    with pytest.raises(ConfigError, match=message):
        load_config(folder / "run.toml", [f"data.path={folder / 'plain'}", *changes])


def test_a_dataset_without_times_is_refused_before_training(tmp_path):
    prepare_log(tmp_path, "data", form="integer")
    (tmp_path / "run.toml").write_text(SHUFFLED)
    said = train(tmp_path, "run", code=2)
    assert "does not say when its train examples were" in said
    assert not (tmp_path / "run").exists()


def test_models_without_weights_refuse_it(tmp_path):
    prepare_items(tmp_path)
    config = load_config(tmp_path / "run.toml", ["data.half_life=1d"])
    with pytest.raises(ConfigError, match=r"'1d', but model\.kind 'sasrec' takes no weights of examples"):
        open_data(config)
