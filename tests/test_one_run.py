"""The library's runs and the command's are of one kind: each goes on from, and reads, what the other wrote."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import shutil
from typing import NamedTuple

import jax
import numpy as np
import optax
import own_model
import pyarrow.csv
import pytest
from checkpoint_state import contents
from flax import nnx
from grids import some_of
from run_cases import CONFIG, configuring, quickstart

import jrec
from jrec.app.build import build_layout, build_modules, table_key
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint, restore_run
from jrec.app.export import export_run
from jrec.app.loaders import train_loader
from jrec.app.loop import train
from jrec.app.predict import load_run
from jrec.checkpoint import Checkpoints, Saved
from jrec.checkpoint.files import write_json
from jrec.checkpoint.manifest import MANIFEST, read_manifest
from jrec.cli import main
from jrec.data import LoaderConfig, Schema, make_loader
from jrec.errors import CheckpointError, ConfigError
from jrec.metrics import evaluate
from jrec.ops.tt import TTShape
from jrec.run.placement.rows import make_mesh

STEPS = 12
SHORT = (
    f"max_steps={STEPS}",
    "log.every_steps=1",
    "evaluate.final_splits=[]",
    "evaluate.every_steps=0",
    "checkpoint.keep=9",
)
PLACES = {
    "device": (),
    "host": ("tables.tier=host",),
    "pipeline": ("tables.tier=host", "tables.host.pipeline=on"),
    "mesh": ("mesh.devices=4",),
    "mesh and host": ("mesh.devices=4", "tables.tier=host"),
    "cores": ("tables.tt.largest=1", "tables.tt.rank=2"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=5000)


@pytest.fixture(scope="module")
def configure(tmp_path_factory, dataset):
    return configuring(tmp_path_factory.mktemp("runs"), dataset, CONFIG)


@pytest.fixture(scope="module")
def folders(configure):
    """A folder of ``jrec train`` in every place, made at its first use."""
    made = {}

    def of(place):
        if place not in made:
            made[place] = train(configure(*SHORT, *PLACES[place], out=place.replace(" ", "_"))).folder
        return made[place]

    return of


def by_library(configure, dataset, place):
    """A run of the library with the modules of a configuration, and its loader."""
    config, schema = configure(*SHORT, *PLACES[place]), Schema.load(dataset)
    layout = build_layout(config, schema)
    model, optimizer = build_modules(config, schema, layout, STEPS)
    mesh = make_mesh(config.mesh.devices) if config.mesh.on else None
    run = jrec.distribute(model, optimizer, key=table_key(config), mesh=mesh, host=config.tables.host)
    return run, train_loader(config, schema, layout)


def losses_of(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def rows_of(run):
    return {table.name: run.table(table.name) for table in run.layout.tables if not table.first_row}


MET = ("device", "pipeline", "mesh and host")  # every way to feed and to store rows


@pytest.mark.parametrize("place", some_of(PLACES, *MET))
def test_the_library_gives_the_losses_of_the_command_and_goes_on_from_its_folder(configure, dataset, folders, place):
    logged = losses_of(folders(place))
    run, loader = by_library(configure, dataset, place)
    losses, step = [], run.compile()
    with run:
        for batch in run.feed(loader, total=STEPS):
            losses.append(float(step(batch)[0]))
            if len(losses) == STEPS:
                break
        assert losses == logged
        rows = rows_of(run)
    half, loader = by_library(configure, dataset, place)
    with half:
        meta = half.restore(folders(place), step=5)
        assert half.steps == 5
        losses, step = [], half.compile()
        for batch in half.feed(loader, position=meta["loader"], total=STEPS):
            losses.append(float(step(batch)[0]))
            if len(losses) == STEPS - 5:
                break
        assert losses == logged[5:]
        jax.tree.map(np.testing.assert_array_equal, rows_of(half), rows)


@pytest.mark.parametrize("place", some_of(PLACES, *MET))
def test_a_loader_goes_on_behind_the_last_step_of_a_feed_that_was_closed(configure, dataset, folders, place):
    run, loader = by_library(configure, dataset, place)
    losses, step = [], run.compile()
    with run:
        for steps in (3, STEPS - 3):
            feed = run.feed(loader)
            losses += [float(step(next(feed))[0]) for _ in range(steps)]
            feed.close()
            assert loader.position == len(losses)
    assert losses == losses_of(folders(place))


def test_another_dense_optimizer_is_refused_with_the_remedy(configure, dataset, folders):
    """Rates of the command are schedules, which count steps; the rate of this optimizer is a number."""
    config, schema = configure(*SHORT), Schema.load(dataset)
    layout = build_layout(config, schema)
    model = build_modules(config, schema, layout, STEPS)[0]
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.Adam(learning_rate=0.1))
    with jrec.distribute(model, optimizer, key=table_key(config)) as run:
        remedy = r"dense optimizers differ; .*optax.constant_schedule"
        with pytest.raises(CheckpointError, match=remedy):
            run.restore(folders("device"))


@pytest.mark.parametrize(("before", "after"), [("mesh and host", "device"), ("device", "mesh"), ("mesh", "pipeline")])
def test_a_run_restores_a_folder_of_another_place(configure, dataset, folders, before, after):
    whole, _ = by_library(configure, dataset, before)
    moved, _ = by_library(configure, dataset, after)
    with whole, moved:
        whole.restore(folders(before))
        moved.restore(folders(before))
        jax.tree.map(np.testing.assert_array_equal, rows_of(moved), rows_of(whole))


OPTIONS = {"hidden": [8], "dropout": 0.2, "batch_norm": True}
OWN_CONFIG = CONFIG.replace(
    "bottom_mlp = [16, 8]\ntop_mlp = [16, 1]\n",
    'factory = "own_model:make"\noptions = {hidden = [8], dropout = 0.2, batch_norm = true}\n',
)


def modules_of(layout, num_dense, *, own=False, dense=None):
    """A DLRM, or a model of the user's own with state beside its parameters."""
    rngs = nnx.Rngs(5)
    if own:
        embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
        model = own_model.make(embeddings, num_dense=num_dense, rngs=rngs, **OPTIONS)
    else:
        config = jrec.nn.DLRMConfig(num_dense=num_dense, bottom_mlp=(16, 8), top_mlp=(8, 1))
        model = jrec.nn.DLRM(config, layout, rngs=rngs)
    rows = jrec.ops.Adagrad(learning_rate=0.1)
    return model, jrec.nn.SparseOptimizer(model, dense=dense or optax.sgd(0.05, momentum=0.9), embedding=rows)


def layout_of(schema, *, tier="sharded", cores=None):
    """The dataset's tables in a tier, but for ``cores``, a table's name and its shape."""
    tables = [jrec.TableConfig(name=table.name, rows=table.rows, dim=8, tier=tier) for table in schema.tables]
    if cores is not None:
        name, shape = cores
        train = jrec.TableConfig(name=name, rows=shape.rows, dim=8, tier="tt", tt_shape=shape)
        tables = [train if table.name == name else table for table in tables]
    features = [
        jrec.FeatureConfig(name=f.name, table=f.table, max_length=f.max_length, pooling="mean")
        for f in schema.categorical
    ]
    return jrec.EmbeddingLayout.build(tables, features)


def fed(run, dataset, schema, steps=4):
    loader = make_loader(dataset, schema, run.layout, "train", LoaderConfig(batch_size=256))
    feed, step = run.feed(loader), run.compile()
    for _ in range(steps):
        step(next(feed))
    feed.close()


LIBRARY = {
    "device": {},
    "host": {"tier": "host"},
    "mesh": {"devices": 4},
    "mesh and host": {"tier": "host", "devices": 4},
    "own": {"own": True},
    "own, mesh and host": {"own": True, "tier": "host", "devices": 4},
}


class SavedRun(NamedTuple):
    """A library's folder of checkpoints.

    Attributes:
      folder: The folder, with a checkpoint of step 4.
      logits: Of the test split by the run itself.
      own: Whether the model is the user's own.
    """

    folder: pathlib.Path
    logits: np.ndarray
    own: bool


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory, dataset):
    schema, place = Schema.load(dataset), LIBRARY[request.param]
    folder, own = tmp_path_factory.mktemp("library") / "checkpoints of mine", place.get("own", False)
    model, optimizer = modules_of(layout_of(schema, tier=place.get("tier", "sharded")), len(schema.dense), own=own)
    mesh = make_mesh(place["devices"]) if "devices" in place else None
    made_by = {"factory": "own_model:make", "options": OPTIONS} if own else {}
    with jrec.distribute(model, optimizer, mesh=mesh, **made_by) as run:
        fed(run, dataset, schema)
        run.save(folder)
        order = LoaderConfig(batch_size=512, shuffle=False)
        with make_loader(dataset, schema, run.layout, "test", order) as loader:
            logits = [np.asarray(run.predictions.of_batch(batch))[: int(batch.mask.sum())] for batch in loader]
    return SavedRun(folder, np.concatenate(logits), own)


EVERY_KIND = ("device", "mesh and host", "own, mesh and host")


@pytest.mark.parametrize(
    ("saved", "devices"),
    some_of(
        itertools.product(LIBRARY, (1, 4)),
        ("device", 1),
        *(("own, mesh and host", n) for n in (1, 4)),
        ("mesh and host", 1),
    ),
    indirect=["saved"],
)
def test_commands_read_what_a_run_saved(saved, dataset, devices, tmp_path, capsys):
    result = evaluate_checkpoint(saved.folder, dataset, split="test", devices=devices)
    np.testing.assert_allclose(result.scores.logits, saved.logits, rtol=0, atol=1e-6)
    assert result.step == 4
    flags = ["--split", "test", "--devices", str(devices)]
    scores = tmp_path / "scores.csv"
    assert main(["predict", str(saved.folder), str(dataset), *flags, "--out", str(scores)]) == 0
    np.testing.assert_allclose(pyarrow.csv.read_csv(scores)["logit"], saved.logits, rtol=1e-5, atol=1e-6)
    assert main(["eval", str(saved.folder / "4"), str(dataset), "--devices", str(devices)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 4


def begun_from(configure_own, configure, saved, folder, *keys, out):
    """A run of two steps that begins from a folder."""
    of_model = () if saved.own else ("model.top_mlp=[8, 1]",)
    keys = (*of_model, "model.pooling=mean", "optimizer.embedding.name=adagrad", "optimizer.name=adam", *keys)
    config = (configure_own if saved.own else configure)(*SHORT, *keys, f"init_from={str(folder)!r}", out=out)
    return train(dataclasses.replace(config, max_steps=2))


@pytest.fixture(scope="module")
def configure_own(tmp_path_factory, dataset):
    return configuring(tmp_path_factory.mktemp("own"), dataset, OWN_CONFIG)


@pytest.mark.parametrize("saved", some_of(LIBRARY, *EVERY_KIND), indirect=True)
def test_what_a_run_saved_is_exported_and_begun_from(saved, configure, configure_own, tmp_path):
    export_run(saved.folder, tmp_path / "export")
    loaded = load_run(saved.folder)
    np.testing.assert_allclose(np.concatenate([s.logits for s in loaded.of_dataset(["test"])]), saved.logits, atol=1e-6)
    outcome = begun_from(configure_own, configure, saved, saved.folder, out=f"from_{tmp_path.name}")
    assert outcome.step == 2
    if saved.own:
        before, after = restore_run(saved.folder).model.tower, restore_run(outcome.folder).model.tower
        assert after.dropout.rngs.count[...] == before.dropout.rngs.count[...] + 2
        change, mean = np.abs(after.norms[0].mean[...] - before.norms[0].mean[...]), before.norms[0].mean[...]
        assert 0 < change.max() < 0.7 * np.abs(mean).max()
    else:
        with pytest.raises(CheckpointError, match=r"another model: tables\.\w+\.optimizer was 'Adagrad' and is 'Adam'"):
            train(configure(*SHORT, f"init_from={str(saved.folder)!r}", out=f"other_{tmp_path.name}"))


@pytest.mark.parametrize("saved", some_of(("mesh", "own", "own, mesh and host"), "own, mesh and host"), indirect=True)
def test_what_a_run_saved_is_compressed(saved, dataset, configure, configure_own, tmp_path):
    out, schema = tmp_path / "in cores", Schema.load(dataset)
    assert main([*compressing(saved.folder, out), "C9"]) == 0
    content = json.loads((out / "report" / "compression.json").read_text())
    for state, folder in (("before", saved.folder), ("after", out)):
        scores = evaluate_checkpoint(folder, dataset, split="test").scores
        assert content[state]["test"] == evaluate(scores).to_dict()
    whole, table = sum(8 * table.rows for table in schema.tables), content["tables"]["C9"]
    assert content["tables_total"]["parameters"] == whole - 8 * 5000 + table["parameters"]
    old, new = contents(Saved(saved.folder / "4")), contents(Saved(out / "4"))
    assert {name for name in old if name not in new} == {"C9/values", "C9/sum"}
    assert [name for name in new if name in old and new[name] != old[name]] == []

    on_four = evaluate_checkpoint(out, dataset, split="test", devices=4).scores.logits
    np.testing.assert_allclose(on_four, scores.logits, rtol=0, atol=1e-6)
    assert 0 < np.abs(on_four - saved.logits).max() < 1
    export_run(out, tmp_path / "export")
    assert main(["predict", str(out), str(dataset), "--split", "test", "--out", str(tmp_path / "scores.csv")]) == 0

    moved = shutil.copytree(dataset, tmp_path / "moved")
    assert main([*compressing(out, tmp_path / "both"), "C10", "--whole-rows", "100", "--data", str(moved)]) == 0
    both = restore_run(tmp_path / "both")
    assert both.config.data.path == str(moved)
    assert {t.name: t.first_row for t in both.layout.tables if t.tier == "tt"} == {"C9": 0, "C10": 100}
    cores = "{C9={tier='tt', rank=4}, C10={tier='tt', rank=4, whole_rows=100}}"
    keys = (f"tables.overrides={cores}", "tables.tt.cache.rows=5")
    assert begun_from(configure_own, configure, saved, tmp_path / "both", *keys, out=f"cores_{tmp_path.name}").step == 2


def compressing(folder, out):
    """The command that compresses tables, whose names are to follow."""
    return ["compress", str(folder), "--rank", "4", "--out", str(out), "--quiet", "--tables"]


@pytest.mark.parametrize("saved", ["own"], indirect=True)
def test_the_library_goes_on_with_fresh_slots_of_compressed_tables(saved, dataset, tmp_path, capsys):
    out, schema, shape = tmp_path / "in cores", Schema.load(dataset), TTShape.search(5000, 8, ranks=4)
    assert main([*compressing(saved.folder, out), "C9"]) == 0
    made = functools.partial(modules_of, layout_of(schema, cores=("C9", shape)), len(schema.dense), own=True)
    with jrec.distribute(*made()) as run:
        run.restore(out)
        slots = run.modules()[1].slots
        assert run.steps == 4
        assert [float(slot[...].max()) for slot in slots["tt_C9"].values()] == [0.0] * 3
        assert slots["d8_float32"]["sum"][...].max() > 0
        fed(run, dataset, schema, steps=1)
        assert all(slot[...].max() > 0 for slot in run.modules()[1].slots["tt_C9"].values())
    with (
        jrec.distribute(*nnx.eval_shape(made), key=jax.random.key(0)) as run,
        pytest.raises(CheckpointError, match=r"has no 1\.slots\.tt_C9\.\w+.*begins as in a new run; make the model"),
    ):
        run.restore(out)
    assert main([*compressing(saved.folder, out), "C10"]) == 2
    assert "replace it with --overwrite" in capsys.readouterr().err
    assert main([*compressing(saved.folder, out), "C10", "--overwrite"]) == 0
    assert [t.name for t in restore_run(out).layout.tables if t.tier == "tt"] == ["C10"]
    (out / "mine.txt").write_text("notes")
    assert main([*compressing(saved.folder, out), "C10", "--overwrite"]) == 2
    assert "holds something else" in capsys.readouterr().err


class Keeping(own_model.DeepFM):
    """Keeps all streams that it was given."""

    def __init__(self, embeddings, *, num_dense, rngs, **options):
        super().__init__(embeddings, num_dense=num_dense, rngs=rngs, **options)
        self.rngs, self.drop = rngs, nnx.Dropout(0.2)

    def logits(self, dense, activations, bags):
        return super().logits(self.drop(dense, rngs=self.rngs), activations, bags)


@pytest.mark.parametrize("streams", some_of([{"default": 5}, {"params": 5, "dropout": 6}], {"default": 5}), ids=str)
def test_commands_open_models_that_were_made_with_other_streams(streams, dataset, configure_own, tmp_path):
    schema, rngs, folder = Schema.load(dataset), nnx.Rngs(**streams), tmp_path / "checkpoints"
    layout = layout_of(schema)
    embeddings = jrec.nn.EmbeddingCollection(layout, rngs=rngs)
    model = Keeping(embeddings, num_dense=len(schema.dense), rngs=rngs, **OPTIONS)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=jrec.ops.Adagrad(learning_rate=0.1))
    with jrec.distribute(model, optimizer, factory="test_one_run:Keeping", options=OPTIONS) as run:
        fed(run, dataset, schema)
        run.save(folder)
        with make_loader(dataset, schema, layout, "test", LoaderConfig(batch_size=512, shuffle=False)) as loader:
            want = [np.asarray(run.predictions.of_batch(batch))[: int(batch.mask.sum())] for batch in loader]
        kept = run.modules()[0].rngs
    for devices in (1, 4):
        found = evaluate_checkpoint(folder, dataset, split="test", devices=devices).scores.logits
        np.testing.assert_allclose(found, np.concatenate(want), rtol=0, atol=1e-6)
    export_run(folder, tmp_path / "export")
    keys = ("model=test_one_run:Keeping", "model.pooling=mean", "optimizer.embedding.name=adagrad")
    begun = train(configure_own(*SHORT, *keys, "max_steps=1", f"init_from={str(folder)!r}", out=tmp_path.name))
    assert begun.step == 1
    if "default" in streams:
        assert restore_run(begun.folder).model.rngs.default.count[...] == kept.default.count[...] + 1


@pytest.mark.parametrize("saved", ["device", "own, mesh and host"], indirect=True)
def test_a_run_begun_from_what_a_run_saved_has_its_own_rates(saved, dataset, configure, configure_own, tmp_path):
    rates = ("optimizer.name=sgd", "optimizer.embedding.learning_rate=0.1")
    outcome = begun_from(configure_own, configure, saved, saved.folder, *rates, out=f"rates_{tmp_path.name}")
    schema, config = Schema.load(dataset), load_config(outcome.folder / "config.toml")
    model, optimizer = modules_of(layout_of(schema), len(schema.dense), own=saved.own, dense=optax.sgd(0.05))
    with jrec.distribute(model, optimizer) as run:
        run.load(Checkpoints(saved.folder).open(), goes_on=False, dense_optimizer=False)
        step, feed = run.compile(), run.feed(train_loader(config, schema, run.layout))
        losses = [float(step(next(feed))[0]) for _ in range(2)]
    np.testing.assert_allclose(losses_of(outcome.folder), losses, rtol=1e-6)


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("saved", ["device"], indirect=True)
def test_no_run_is_trained_among_what_a_run_saved(how, saved, configure):
    config = dataclasses.replace(configure(*SHORT), out=str(saved.folder))
    with pytest.raises(ConfigError, match=r"holds checkpoints of Run\.save.*init_from="):
        train(config, **how)
    assert [path.name for path in saved.folder.iterdir() if path.name[0] != "."] == ["4"]


def test_what_commands_cannot_open_says_why(dataset, tmp_path):
    schema = Schema.load(dataset)

    class Own(jrec.nn.DLRM):
        """Of no factory."""

    def save(folder, kind=jrec.nn.DLRM, **how):
        config = jrec.nn.DLRMConfig(num_dense=len(schema.dense), bottom_mlp=(8,), top_mlp=(1,))
        model = kind(config, layout_of(schema), rngs=nnx.Rngs(0))
        rows = jrec.ops.SGD(learning_rate=0.1)
        with jrec.distribute(model, jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=rows), **how) as run:
            if kind is Own:
                fed(run, dataset, schema, steps=1)
            run.save(folder)

    save(tmp_path / "unfed")
    with pytest.raises(CheckpointError, match=r"does not say which dataset its rows are of.*jrec\.data\.Loader"):
        restore_run(tmp_path / "unfed", dataset)
    save(tmp_path / "own", Own)
    with pytest.raises(CheckpointError, match=r"does not say what made its model.*give jrec\.distribute the factory"):
        restore_run(tmp_path / "own", dataset)
    with pytest.raises(CheckpointError, match=r"neither a run folder .* nor a folder of checkpoints"):
        restore_run(tmp_path, dataset)


def as_earlier_versions_wrote(folder: pathlib.Path, config) -> None:
    """Rewrites the latest checkpoint's manifest to what ``jrec train`` recorded before it drove a ``Run``."""
    step = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    manifest = read_manifest(folder / "checkpoints" / str(step))
    now, tables = manifest.fingerprint, {}
    for name, table in now["tables"].items():
        base, _, first = name.partition("[")
        if "ranks" not in table:
            tables[base] = table["rows"]
            continue
        kept = {key: table[key] for key in ("dtype", "row_factors", "dim_factors", "ranks")}
        whole = int(first[:-2]) if first else 0
        tables[base] = {"rows": table["rows"] + whole, **({"whole_rows": whole} if whole else {}), **kept}
    fingerprint = {key: now[key] for key in ("model", "num_dense", "dataset")}
    fingerprint |= {"optimizer": {"dense": config.optimizer.name, "embedding": "adam"}, "tables": tables}
    old = dataclasses.replace(manifest, fingerprint=fingerprint, meta=manifest.meta["meta"])
    path = folder / "checkpoints" / str(step) / MANIFEST
    path.unlink()
    write_json(path, old.to_json())


@pytest.mark.parametrize(
    ("place", "more"), [("device", ()), ("mesh and host", ()), ("cores", ("tables.tt.whole_rows=20",))]
)
def test_folders_of_earlier_versions_open(configure, dataset, place, more):
    keys, out = (*PLACES[place], *more), f"old_{place.replace(' ', '_')}"
    whole = train(configure(*SHORT, *keys, out=f"{out}_whole"))
    config = configure(*SHORT, *keys, out=out)
    folder = train(dataclasses.replace(config, max_steps=7)).folder
    as_earlier_versions_wrote(folder, config)
    assert evaluate_checkpoint(folder, dataset, split="test").step == 7
    train(config, resume=True)
    assert losses_of(folder) == losses_of(whole.folder)
    with pytest.raises(CheckpointError, match=re.escape("model.compute_dtype was 'float32' and is 'bfloat16'")):
        train(
            configure(*SHORT, *keys, "model.compute_dtype=bfloat16", f"init_from={str(folder)!r}", out=f"{out}_other")
        )
