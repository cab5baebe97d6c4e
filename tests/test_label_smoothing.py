"""Label smoothing: the loss against plain NumPy, the command, and checkpoints from before the key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from task_logs import CONFIG, SCHEMA, columns, write_log

from jrec import cli
from jrec.app.config import ModelConfig, load_config
from jrec.app.dataset import open_data
from jrec.app.models.kind import kind_named, names
from jrec.app.models.targets import target_of
from jrec.batch import Batch
from jrec.errors import ConfigError
from jrec.nn import binary_cross_entropy, multi_task_loss, smoothed_labels


def batch_of(labels, mask, **extras):
    extras = {name: jnp.asarray(values, jnp.float32) for name, values in extras.items()}
    return Batch(
        dense=jnp.zeros((len(labels), 0)), labels=jnp.asarray(labels, jnp.float32),
        mask=jnp.asarray(mask, jnp.float32), bags={}, extras=extras,
    )  # fmt: skip


def cross_entropy(logits, targets):
    return np.logaddexp(0, logits) - targets * logits


def test_one_label():
    logits, labels, mask = np.array([0.3, -1.0, 2.0, 9.0]), np.array([1, 0, 0, 1]), np.array([1, 1, 1, 0])
    targets = np.array([0.9, 0.1, 0.1])
    loss = functools.partial(binary_cross_entropy, label_smoothing=0.2)
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(logits, jnp.float32), batch_of(labels, mask))
    assert float(value) == pytest.approx(cross_entropy(logits[:3], targets).mean(), rel=1e-6)
    expected = [*(1 / (1 + np.exp(-logits[:3])) - targets) / 3, 0]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    members = jnp.stack([jnp.asarray(logits, jnp.float32)] * 2, axis=1)
    assert float(loss(members, batch_of(labels, mask))) == pytest.approx(float(value))
    for amount in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            smoothed_labels(jnp.zeros(1), amount)


def test_several_labels_leave_unknown_ones_out():
    logits = {"click": np.array([0.5, -2.0, 1.0]), "purchase": np.array([1.5, 0.25, -1.0])}
    click, purchase = np.array([1, 0, -1]), np.array([0, -1, 1])
    loss = multi_task_loss({"click": 1.0, "purchase": 0.5}, label="click", label_smoothing=0.1)
    batch = batch_of(click, np.ones(3), purchase=purchase)
    found = loss({task: jnp.asarray(z, jnp.float32) for task, z in logits.items()}, batch)
    expected = cross_entropy(logits["click"][:2], np.array([0.95, 0.05])).mean()
    expected += 0.5 * cross_entropy(logits["purchase"][[0, 2]], np.array([0.05, 0.95])).mean()
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_a_configuration_of_one_label_trains_by_it():
    logits, labels = np.array([0.5, -2.0, 1.0]), np.array([1, 0, 1])
    plain, smoothed = ModelConfig(), ModelConfig(label_smoothing=0.2)
    loss = target_of(smoothed).loss()
    expected = cross_entropy(logits, np.array([0.9, 0.1, 0.9])).mean()
    assert float(loss(jnp.asarray(logits, jnp.float32), batch_of(labels, np.ones(3)))) == pytest.approx(expected)
    assert target_of(plain).loss() is binary_cross_entropy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoothing")
    (folder / "columns.toml").write_text(SCHEMA)
    (folder / "run.toml").write_text(CONFIG)
    log = write_log(folder / "log.csv", columns(1_000))
    arguments = ["--schema", str(folder / "columns.toml"), "--input", log, "--out", str(folder / "data")]
    assert cli.main(["prepare", "csv", *arguments, "--quiet"]) == 0
    return folder


def config_of(folder, *overrides, out="run"):
    return load_config(str(folder / "run.toml"), [f"data.path={folder / 'data'}", f"out={folder / out}", *overrides])


def test_it_is_no_part_of_what_a_prediction_is(folder):
    for kind in ("dlrm", "din"):
        of_kind = kind_named(kind)
        model = open_data(config_of(folder)).config.model
        smoothed = open_data(config_of(folder, "model.label_smoothing=0.1")).config.model
        if kind == "din":
            model, smoothed = (
                load_config(
                    str(folder / "run.toml"),
                    ["data.path=x", "model.kind=din", "model.din.histories={item='seen'}", more],
                ).model
                for more in ("seed=1", "model.label_smoothing=0.1")
            )
        assert smoothed.label_smoothing == 0.1
        assert of_kind.identity(smoothed, 1) == of_kind.identity(model, 1)
        assert "label_smoothing" not in of_kind.identity(smoothed, 1)


def test_kinds_that_rank_refuse_it(folder):
    assert {"hstu", "sasrec", "two_tower"} <= {*names()}
    for kind in ("hstu", "sasrec", "two_tower"):
        with pytest.raises(ConfigError, match=r"model.label_smoothing"):
            config_of(folder, f"model.kind={kind}", "model.label_smoothing=0.1")
    with pytest.raises(ConfigError, match=r"model.label_smoothing is 1.0"):
        config_of(folder, "model.label_smoothing=1.0")


def test_the_command_trains_by_it_and_its_checkpoints_open(folder, capsys):
    def train(*overrides, out):
        options = [f"data.path={folder / 'data'}", f"out={folder / out}", *overrides]
        assert cli.main(["train", str(folder / "run.toml"), *options]) == 0
        assert cli.main(["eval", str(folder / out), str(folder / "data")]) == 0
        return capsys.readouterr().out

    plain, smoothed = train(out="plain"), train("model.label_smoothing=0.3", out="smoothed")
    assert plain != smoothed
    # A run goes on from a checkpoint of the other, whatever the key says.
    train("model.label_smoothing=0.2", f"init_from={folder / 'plain'}", out="on")
