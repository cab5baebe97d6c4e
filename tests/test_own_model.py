"""``[model] factory``: a model that jrec does not ship, trained, evaluated, exported and compressed by the command."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import own_model
import pyarrow.parquet as pq
import pytest
import shop_logs
from checkpoint_state import final_arrays
from flax import nnx
from grids import some_of
from run_cases import killed_and_resumed

from jrec import cli, nn, serving
from jrec.app.build import build_layout, build_model, table_key
from jrec.app.config import TrainConfig, load_config
from jrec.app.config.typed_toml import toml_value
from jrec.app.evaluate import evaluate_checkpoint, restore_run
from jrec.app.loop import train
from jrec.data.schema import Schema
from jrec.errors import CheckpointError, ConfigError
from jrec.metrics import log_loss
from jrec.random_keys import words

CONFIG = shop_logs.CONFIG.replace(
    """bottom_mlp = [8]
top_mlp = [8, 1]
""",
    """factory = "own_model:make"
[model.options]
hidden = [8, 4]
""",
).replace("[log]", 'baselines = "off"\n[log]')
PLAIN = ()
STATEFUL = ("model.options.dropout=0.2", "model.options.batch_norm=true")
PLACES = {
    "device": (),
    "host": ("tables.tier='host'", "tables.host.pipeline='off'"),
    "pipeline": ("tables.tier='host'", "tables.host.pipeline='on'"),
    "mesh": ("mesh.devices=4",),
    "mesh, host rows": ("mesh.devices=4", "tables.tier='host'"),
    "tensor train": ("tables.tt.min_rows=50", "tables.tt.rank=2"),
}
CASES = [(place, PLAIN) for place in ("device", "mesh")]
CASES += [(place, STATEFUL) for place in PLACES]
MET = (("device", STATEFUL), ("mesh, host rows", STATEFUL))  # state kept beside rows of one tier, and of all


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    lines = shop_logs.write_log(folder / "log.csv", 1000)
    return shop_logs.prepare(folder, folder / "log.csv", "data"), lines


def config_file(folder: pathlib.Path, text: str = CONFIG) -> pathlib.Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def config_of(folder: pathlib.Path, dataset: pathlib.Path, *overrides, out="run", text=CONFIG) -> TrainConfig:
    keys = [f"data.path={str(dataset)!r}", f"out={str(folder / out)!r}", *overrides]
    return load_config(config_file(folder, text), keys)


@pytest.fixture(scope="module")
def trained(shop, tmp_path_factory):
    """The run of a place and options, made at its first use."""
    made, folder = {}, tmp_path_factory.mktemp("trained")

    def of(place, options):
        if (place, options) not in made:
            keys = (*PLACES[place], *options, "checkpoint.every_steps=5")
            made[place, options] = train(config_of(folder, shop[0], *keys, out=str(len(made))))
        return made[place, options]

    return of


@pytest.mark.parametrize(("place", "options"), some_of(CASES, *MET))
def test_commands_on_a_run_of_an_own_model(place, options, shop, trained, tmp_path, capsys):
    """Training, a resumed run of the same bits, scores in batches of any size, an export and its scores."""
    (dataset, lines), whole = shop, trained(place, options)
    run, other = whole.folder, tmp_path / "other"
    assert whole.finished
    assert whole.scores["test"].labels.size == 100
    on = 4 if place.startswith("mesh") else 1
    arguments = [str(config_file(tmp_path)), f"data.path={dataset}", f"out={other}", "data.workers=1"]
    arguments += [*PLACES[place], *options, "log.progress=off", "checkpoint.every_steps=5"]
    assert cli.main(["train", *arguments, "max_steps=5"]) == 0
    assert cli.main(["train", *arguments, "data.eval_batch_size=32", "--resume"]) == 0
    assert "parameters" in (other / "report" / "metrics.json").read_text()
    assert final_arrays(other)[:2] == final_arrays(run)[:2]

    first, again = (evaluate_checkpoint(run, dataset, split="test", devices=on).scores for _ in range(2))
    np.testing.assert_array_equal(first.logits, again.logits)
    np.testing.assert_array_equal(first.logits, whole.scores["test"].logits)
    close(evaluate_checkpoint(other, dataset, split="test", devices=on).scores.logits, first.logits)
    capsys.readouterr()
    assert cli.main(["eval", str(run), str(dataset), "--devices", str(on)]) == 0
    evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert evaluated["log_loss"] == pytest.approx(log_loss(first.logits, first.labels))
    assert cli.main(["export", str(run), "--out", str(tmp_path / "export"), "--quiet"]) == 0
    served = serving.load(tmp_path / "export", batch_sizes=(64,))
    raw = {name: [line[name] for line in lines] for name in lines[0]}
    close(served.logits(raw), predicted(run, dataset.parent / "log.csv", tmp_path))
    close(predicted(run, dataset, tmp_path, "--split", "test", "--devices", str(on)), first.logits)


@pytest.mark.parametrize(("place", "options"), some_of((case for case in CASES if case[1] == STATEFUL), *MET))
def test_state_goes_over_to_runs_that_are_made_of_another(place, options, shop, trained, tmp_path):
    """To a run that begins from it, and to one whose tables are compressed."""
    whole, dataset = trained(place, options), shop[0]
    before, keys = tower_of(whole.folder), (*PLACES[place], *options, "max_steps=1")
    begun = train(config_of(tmp_path, dataset, *keys, f"init_from={str(whole.folder)!r}", out="begun"))
    after, drawn = tower_of(begun.folder), len(before.norms)  # dropout is drawn once a hidden layer
    assert after.dropout.rngs.count[...] == before.dropout.rngs.count[...] + drawn == drawn * (whole.step + 1)
    for old, new in zip(before.norms, after.norms, strict=True):  # a hundredth of the statistics are of one batch
        change = np.abs(new.mean[...] - old.mean[...]).max()
        assert 0 < change < 0.5 * np.abs(old.mean[...]).max()
    if place == "tensor train":
        return
    command = ["compress", str(whole.folder), "--rank", "4", "--tables", "item", "--out", str(tmp_path / "tt")]
    assert cli.main(command) == 0
    compressed = restore_run(tmp_path / "tt")
    assert [stack.name for stack in compressed.layout.tt_stacks] == ["tt_item"]
    assert 0 < np.abs(compressed.scores("test").logits - whole.scores["test"].logits).max() < 0.5
    jax.tree.map(np.testing.assert_array_equal, *map(values_of, (before, compressed.model.tower)))


def tower_of(folder):
    """All of the model that is not embeddings, in the folder's latest checkpoint."""
    return restore_run(folder).model.tower


def values_of(tower):
    """By path, its arrays, keys as their words; without its reference to the embeddings."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(tower))
    named = {jax.tree_util.keystr(path): words(leaf) for path, leaf in leaves}
    return {name: array for name, array in named.items() if "embeddings" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "mesh, host rows"])
def test_a_killed_run_with_state_resumes_to_the_same_bits(place, shop, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(own_model.__file__).parent), prepend=os.pathsep)
    command = [sys.executable, "-m", "jrec", "train", str(config_file(tmp_path)), f"data.path={shop[0]}", "epochs=16"]
    command += [*PLACES[place], *STATEFUL, "checkpoint.every_steps=20"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    subprocess.run([*command, f"out={whole}"], check=True, capture_output=True)
    killed_and_resumed([*command, f"out={killed}", "--resume"], killed)
    assert final_arrays(killed) == final_arrays(whole)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def predicted(run, data, folder, *options):
    """Logits of ``jrec predict``."""
    out = str(folder / "scores.parquet")
    assert cli.main(["predict", str(run), str(data), "--out", out, "--overwrite", "--quiet", *options]) == 0
    return pq.read_table(out)["logit"].to_numpy()


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_another_run_begins_from_it_and_its_tables_are_compressed(shop, tmp_path):
    dataset, _ = shop
    first = train(config_of(tmp_path, dataset))
    assert (
        cli.main(["compress", str(tmp_path / "run"), "--rank", "4", "--tables", "item", "--out", str(tmp_path / "tt")])
        == 0
    )
    compressed = restore_run(tmp_path / "tt")
    assert compressed.layout.tt_stacks
    assert compressed.config.model == load_config(tmp_path / "run" / "config.toml").model
    assert np.abs(compressed.scores("test").logits - first.scores["test"].logits).max() < 0.5
    for folder in ("run", "tt"):
        shape = [f"tables.overrides.item={toml_value_of(compressed)}"] if folder == "tt" else []
        more = train(
            config_of(tmp_path, dataset, f"init_from={str(tmp_path / folder)!r}", *shape, out=f"from_{folder}")
        )
        assert more.finished
        _, optimizer = restore_run(tmp_path / f"from_{folder}", slots=True).run.modules()
        assert optimizer.dense.step[...] == 2 * first.step


def toml_value_of(run):
    return toml_value(run.config.to_dict()["tables"]["overrides"]["item"])


def test_batch_statistics_are_trained_and_kept(shop, tmp_path):
    dataset, _ = shop
    outcome = train(config_of(tmp_path, dataset, "model.options.batch_norm=true", "max_steps=5"))
    assert outcome.finished
    norm = restore_run(tmp_path / "run").model.tower.norms[0]
    assert np.abs(norm.mean[...]).max() > 0


def test_first_rows_are_those_of_a_model_of_jrec(shop, tmp_path):
    dataset, _ = shop
    own = config_of(tmp_path, dataset)
    shipped = config_of(tmp_path, dataset, text=shop_logs.CONFIG)
    made = []
    for config in (own, shipped):
        schema = Schema.load(dataset)
        made.append(build_model(config, schema, build_layout(config, schema)).embeddings)
    for name, array in made[0].arrays().items():
        np.testing.assert_array_equal(array, made[1].arrays()[name])
    assert made[0].table_key() == made[1].table_key() == table_key(own)


def test_the_configuration_of_a_run_says_what_made_it(shop, tmp_path):
    dataset, _ = shop
    deep = "model.options.deep={rates=[0.5, 1], on=true, parts=[{name='a', n={}}, [], {}]}"
    config = config_of(tmp_path, dataset, "model.options.hidden=[3]", deep, "model.options.say='\u00e9 \"x\"'")
    wanted = {"rates": [0.5, 1], "on": True, "parts": [{"name": "a", "n": {}}, [], {}]}
    assert config.model.options == {"hidden": [3], "deep": wanted, "say": 'é "x"'}
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml") == config
    short = config_of(tmp_path, dataset, "model=other_model:make", "model.options.rate=0.25", "model.options.name=relu")
    assert (short.model.factory, dict(short.model.options)) == (
        "other_model:make", {"hidden": [8, 4], "rate": 0.25, "name": "relu"}
    )  # fmt: skip


BAD_CONFIGS = {
    "both": (
        ("model.bottom_mlp=[3, 8]", "model.interaction=fm"),
        "model.bottom_mlp, model.interaction are set, but model",
    ),
    "kind": (
        ("model.kind=tbsm",),
        r"model.kind is set, but model.factory is own_model:make, whose model does not read",
    ),
    "name": (("model.factory=own_model",), "model.factory is 'own_model', not package.module:function"),
    "options alone": (("model.factory=''",), "model.options has hidden, but model.factory, whose arguments they are"),
    "date": (
        ("model.options.day=2024-01-01",),
        r"override.*model.options.day is datetime.date.*; it takes true or false",
    ),
    "infinite": (("model.options.rate=inf",), r"model.options.rate is inf; it takes"),
    "Python": (("model.options.norm=True",), r"model.options.norm is True of Python; write true or false"),
    "empty": (("model.options.deep={}",), "model.options.deep is an empty table, which a file would not keep"),
    "no table": (("model.options=3",), "model.options must be a table, but is 3"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configurations_are_refused(name, tmp_path):
    overrides, message = BAD_CONFIGS[name]
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, tmp_path, *overrides)


class Plain:
    """No module."""

    def __init__(self, embeddings, **options):
        pass


class Forgetful(own_model.DeepFM):
    """Keeps other embeddings."""

    def __init__(self, embeddings, *, num_dense, rngs, hidden):
        other = nn.EmbeddingCollection(embeddings.layout, rngs=rngs)
        super().__init__(other, num_dense=num_dense, hidden=hidden, dropout=0.0, batch_norm=False, rngs=rngs)


class NoOptions(nnx.Module):
    """Takes none."""

    def __init__(self, embeddings, *, num_dense, rngs):
        pass


class Mute(nnx.Module):
    """Has no logits."""

    def __init__(self, embeddings, **_):
        self.embeddings = embeddings


class Wide(Mute):
    """Has two logits an example."""

    def logits(self, dense, activations, bags):
        return jnp.concatenate([dense, dense], axis=1)


class Broken(Mute):
    """Has dense features of another number."""

    def logits(self, dense, activations, bags):
        return dense @ jnp.ones(7)


def needs(embeddings, *, num_dense, rngs, hidden, depth):
    """Has options without defaults."""


def fails(embeddings, *, num_dense, rngs, hidden):
    """Fails."""
    raise KeyError("no such layer")


NOTHING = 3
HERE = "test_own_model"
BAD_FACTORIES = {
    "module": (
        ("nowhere.models:make",),
        r"there is no module 'nowhere' in .* or on Python's path; run the command in the",
    ),
    "submodule": (("own_model.parts:make",), r"there is no module 'own_model.parts'|cannot be imported"),
    "import": (
        ("broken_module:make",),
        r"broken_module cannot be imported: ZeroDivisionError: .* \(.*broken_module.py, line 2\)",
    ),
    "missing": (
        ("needs_more:make",),
        r"needs_more cannot be imported: ModuleNotFoundError: No module named 'absent_xyz'",
    ),
    "attribute": (("own_model:mak",), r"own_model \(.*own_model.py\) has no mak; did you mean make\?"),
    "no function": ((f"{HERE}:NOTHING",), r"which is a int and no function"),
    "unknown option": (
        ("own_model:make", "model.options.hiden=[3]"),
        r"takes no model.options.hiden; it takes batch_norm, dropout",
    ),
    "own option": (("own_model:make", "model.options.rngs=3"), r"model.options.rngs is what jrec gives"),
    "missing option": ((f"{HERE}:needs",), r"needs model.options.depth; set it"),
    "fails": ((f"{HERE}:fails",), r"fails failed: KeyError: 'no such layer' \(.*test_own_model.py, line \d+\)"),
    "no module": ((f"{HERE}:Plain",), r"returned a Plain; return a Flax NNX module"),
    "embeddings": ((f"{HERE}:Forgetful",), r"returned a Forgetful without the embeddings that it was given; keep them"),
    "option of a class": (
        ("own_model:DeepFM", "model.options.hiden=3"),
        r"no model.options.hiden; it takes batch_norm, dro",
    ),
    "class without options": ((f"{HERE}:NoOptions",), r"takes no model.options.hidden; it takes no options"),
    "no logits": ((f"{HERE}:Mute",), r"returned a Mute without logits; define logits"),
    "shape": ((f"{HERE}:Wide",), r"logits returned .*4, 2.* for 4 examples; return one logit an example"),
    "other widths": ((f"{HERE}:Broken",), r"its model's logits failed: TypeError: .*\(.*, line \d+\)"),
}


@pytest.mark.parametrize("name", BAD_FACTORIES)
def test_bad_factories_are_refused_before_anything_is_made(name, shop, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_module.py").write_text("\n1 / 0\n")
    (tmp_path / "needs_more.py").write_text("import absent_xyz\n")
    monkeypatch.syspath_prepend(tmp_path)
    (factory, *options), message = BAD_FACTORIES[name]
    config_of(tmp_path, shop[0])
    arguments = [str(tmp_path / "own.toml"), f"model={factory}", *options, f"data.path={shop[0]}"]
    assert cli.main(["train", *arguments, f"out={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_model_is_found_in_the_folder_of_the_command_and_missed_elsewhere(shop, tmp_path, capsys):
    """As a user runs it: the module lies in the folder, which no path names."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine_xyz.py").write_text(pathlib.Path(own_model.__file__).read_text())
    config_of(home, shop[0])
    command = [sys.executable, "-c", "import sys; sys.path.remove(''); from jrec.cli import main; sys.exit(main())"]
    out = tmp_path / "run"
    arguments = ["train", "own.toml", "model=mine_xyz:make", f"data.path={shop[0]}", f"out={out}", "max_steps=2"]
    subprocess.run([*command, *arguments, "evaluate.baselines=off"], cwd=home, check=True, capture_output=True)
    assert 'factory = "mine_xyz:make"' in (out / "config.toml").read_text()
    assert cli.main(["eval", str(out), str(shop[0])]) == 2
    assert "there is no module 'mine_xyz' in" in capsys.readouterr().err


def test_a_checkpoint_of_other_options_is_refused(shop, tmp_path):
    dataset, _ = shop
    train(config_of(tmp_path, dataset, "max_steps=2"))
    with pytest.raises(ConfigError, match=r"model.options.hidden was \[8, 4\] and is \[3\]"):
        train(config_of(tmp_path, dataset, "max_steps=2", "model.options.hidden=[3]"), resume=True)
    (tmp_path / "run" / "config.toml").write_text(
        (tmp_path / "run" / "config.toml").read_text().replace("hidden = [8, 4]", "hidden = [3]")
    )
    with pytest.raises(CheckpointError, match="hidden"):
        restore_run(tmp_path / "run")
