"""A program's parameters beside it: a delta of the same run copies them, and compiles nothing."""

import collections
import contextlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_model
import pytest
from export_cases import SIZES, made_exports, reseal
from flax import nnx
from jax import export as jax_export

import jrec
from jrec import nn, ops, serving
from jrec.serving import program as programs
from jrec.serving.checks import load_manifest
from jrec.serving.format import MODEL, PARAMETERS
from jrec.table_files.safetensors import encoded_tensors, tensors_of

NOISE = {"seed": 7}
ROWS = {"user": 12, "item": 9}
REQUEST = {
    "user": ["u1", "u2", "u9"],
    "item": ["i3", "i4", "i5"],
    "price": [0.5, 2.0, 7.0],
    "history": [["i1", "i7"], [], ["i2"]],
    "strengths": [[1.0, 0.5], [], [2.0]],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_exports(tmp_path_factory.mktemp("exports"))


@contextlib.contextmanager
def compilations():
    """Counts programs that XLA compiles."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def parameters_of(folder):
    return tensors_of(np.frombuffer((folder / PARAMETERS).read_bytes(), np.uint8))


def test_a_delta_of_the_same_run_compiles_nothing(folder):
    files = [load_manifest(folder / name).files for name in ("whole", "delta1", "delta2")]
    assert len({file[MODEL] for file in files}) == 1
    assert len({file[PARAMETERS] for file in files}) == 3  # the run trained in between
    model = serving.load(folder / "whole", batch_sizes=SIZES)
    scores = [model(REQUEST)]
    with compilations() as compiled:
        for name in ("delta1", "delta2"):
            model.apply(folder / name)
            scores.append(model(REQUEST))
    assert not compiled
    for count, score in enumerate(scores):
        fresh = serving.load(folder / "whole", [folder / f"delta{n + 1}" for n in range(count)], batch_sizes=SIZES)
        np.testing.assert_array_equal(score, fresh(REQUEST))
    assert (scores[0] != scores[1]).all()
    assert (scores[1] != scores[2]).all()


def test_an_export_in_the_place_of_another_of_the_same_model_compiles_nothing(folder, tmp_path):
    model = serving.load(folder / "whole", batch_sizes=SIZES)
    model.warm_up()
    later = shutil.copytree(folder / "delta1", tmp_path / "later")
    shutil.copytree(folder / "whole", tmp_path / "export")
    shutil.copyfile(later / PARAMETERS, tmp_path / "export" / PARAMETERS)
    reseal(tmp_path / "export", files=[PARAMETERS])
    with compilations() as compiled:
        other = serving.load(tmp_path / "export", batch_sizes=SIZES)
        other.warm_up()
        scores = other(REQUEST)
    assert not compiled
    assert (scores != model(REQUEST)).all()


def with_constants(folder):
    """Rewrites exports as older ones are: with the parameters inside of the program, which takes three inputs."""
    arrays = {name: parameters_of(folder / name) for name in ("whole", "delta1")}
    for name, own in arrays.items():
        whole = jax_export.deserialize(bytearray((folder / name / MODEL).read_bytes()))
        parameters, *inputs = jax.tree.unflatten(whole.in_tree, whole.in_avals)[0]
        assert parameters.keys() == own.keys()
        program = jax.jit(lambda *inputs, whole=whole, own=own: whole.call(own, *inputs))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
        older = jax_export.export(program, platforms=programs.PLATFORMS)(*shapes)
        (folder / name / MODEL).write_bytes(older.serialize())
        (folder / name / PARAMETERS).unlink()
        reseal(folder / name, lambda content: content["files"].pop(PARAMETERS), files=[MODEL])


@pytest.mark.parametrize("older", ["both", "the export"])
def test_exports_with_parameters_inside_of_the_program_are_served_as_before(folder, tmp_path, older):
    chains = [], [folder / "delta1"]
    expected = [serving.load(folder / "whole", deltas, batch_sizes=SIZES)(REQUEST) for deltas in chains]
    for name in ("whole", "delta1"):
        shutil.copytree(folder / name, tmp_path / name)
    with_constants(tmp_path)
    if older == "the export":
        shutil.rmtree(tmp_path / "delta1")
        shutil.copytree(folder / "delta1", tmp_path / "delta1")
    parent = load_manifest(tmp_path / "whole").id
    reseal(tmp_path / "delta1", lambda content: content.update(parent=parent))
    model = serving.load(tmp_path / "whole", batch_sizes=SIZES)
    np.testing.assert_array_equal(model(REQUEST), expected[0])
    model.apply(tmp_path / "delta1")
    np.testing.assert_array_equal(model(REQUEST), expected[1])


def first_of(tensors, change):
    name = sorted(tensors)[0]
    return {**tensors, name: change(tensors[name])}


BAD = {
    "another shape": (lambda t: first_of(t, lambda x: x[:-1]), "takes the parameter .* float32.*, which is float32"),
    "another dtype": (lambda t: first_of(t, lambda x: x.astype(np.float16)), "takes the parameter .* is float16"),
    "another name": (lambda t: {f"{name}x": x for name, x in t.items()}, "takes the parameter .* is not there in"),
    "none": (lambda t: {}, "takes the parameter .* is not there in"),
}


@pytest.mark.parametrize("fault", BAD)
def test_parameters_that_do_not_fit_are_refused_and_change_nothing(fault, folder, tmp_path):
    change, message = BAD[fault]
    for name in ("whole", "delta1"):
        shutil.copytree(folder / name, tmp_path / name)
        tensors = {key: np.array(tensor) for key, tensor in parameters_of(tmp_path / name).items()}
        (tmp_path / name / PARAMETERS).write_bytes(encoded_tensors(change(tensors)))
    model = serving.load(folder / "whole", batch_sizes=SIZES)
    before = model(REQUEST)
    reseal(tmp_path / "whole", files=[PARAMETERS])
    reseal(tmp_path / "delta1", files=[PARAMETERS])
    with pytest.raises(serving.ExportError, match=f"{MODEL} {message}"):
        serving.load(tmp_path / "whole")
    with pytest.raises(serving.ExportError, match=f"{MODEL} {message}"):
        model.apply(tmp_path / "delta1")
    np.testing.assert_array_equal(model(REQUEST), before)
    model.apply(folder / "delta1")


def test_a_file_of_parameters_that_is_none_is_refused(folder, tmp_path):
    shutil.copytree(folder / "whole", tmp_path / "whole")
    (tmp_path / "whole" / PARAMETERS).write_bytes(b"\xff" * 20)
    reseal(tmp_path / "whole", files=[PARAMETERS])
    with pytest.raises(serving.ExportError, match=f"{PARAMETERS} cannot be read .*export the run again"):
        serving.load(tmp_path / "whole")


class Odd(own_model.DeepFM):
    """Reads arrays of many kinds, and has some that nobody reads."""

    def __init__(self, embeddings, **options):
        super().__init__(embeddings, **options)
        self.scale = nnx.Param(jnp.float32(3.0))
        self.half = nnx.Variable(jnp.arange(1, 4, dtype=jnp.bfloat16))
        self.place = nnx.Variable(jnp.array([2, 1], jnp.int32))
        self.on = nnx.Variable(jnp.array([True, False]))
        self.noise = nnx.Variable(jax.random.key(NOISE["seed"]))
        self.unread = nnx.Variable(jnp.zeros(100_000))

    def logits(self, dense, activations, bags):
        half = self.half[...][self.place[...]].astype(jnp.float32).sum()
        noise = jax.random.uniform(self.noise[...], ())
        return super().logits(dense, activations, bags) * self.scale[...] + jnp.where(self.on[...], half, noise).sum()


def run_of(model_class):
    tables = [jrec.TableConfig(name=name, rows=rows, dim=8, tier="sharded") for name, rows in ROWS.items()]
    features = [jrec.FeatureConfig(name=name, table=name) for name in ROWS]
    rngs = nnx.Rngs(0)
    layout = jrec.EmbeddingLayout.build(tables, features)
    embeddings = nn.EmbeddingCollection(layout, rngs=rngs)
    model = model_class(embeddings, num_dense=1, hidden=[6], rngs=rngs, dropout=0.5, batch_norm=True)
    rows = ops.SGD(learning_rate=0.1)
    return jrec.distribute(model, nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=rows))


def test_arrays_of_any_dtype_are_parameters_and_only_those_that_are_read(tmp_path):
    asked = {"user": [1, 11], "item": [0, 8], "price": [0.5, -2.0]}
    with run_of(Odd) as run:
        run.export(tmp_path / "odd", dense=["price"])
    tensors = parameters_of(tmp_path / "odd")
    dtypes = {name: tensors[name].dtype.name for name in ("scale", "half", "place", "on")}
    assert dtypes == {"scale": "float32", "half": "bfloat16", "place": "int32", "on": "bool"}
    assert tensors["scale"].shape == ()
    assert not {"unread", "noise"} & tensors.keys()
    assert not any("embeddings" in name or "dropout" in name for name in tensors)
    model = serving.load(tmp_path / "odd")
    with run_of(own_model.DeepFM) as run:
        run.export(tmp_path / "plain", dense=["price"])
    plain = serving.load(tmp_path / "plain").logits(asked)
    added = 3 + 2 + float(jax.random.uniform(jax.random.key(7), ()))
    np.testing.assert_allclose(model.logits(asked), plain * 3 + added, rtol=1e-6)


def test_a_program_is_the_same_bytes_wherever_it_is_made(tmp_path):
    def further(out):
        with run_of(own_model.DeepFM) as run:
            run.export(out, dense=["price"])

    further(tmp_path / "one")
    (lambda: further(tmp_path / "other"))()
    one, other = (load_manifest(tmp_path / name).files[MODEL] for name in ("one", "other"))
    assert one == other
    assert b".py" not in (tmp_path / "one" / MODEL).read_bytes()


def test_a_process_makes_a_program_once_of_the_same_model_and_constants(tmp_path, monkeypatch):
    made, export = [], programs._exported
    monkeypatch.setattr(programs, "_exported", lambda *arguments: made.append(arguments) or export(*arguments))
    monkeypatch.setattr(programs, "_made", type(programs._made)())
    asked = {"user": [1, 11], "item": [0, 8], "price": [0.5, -2.0]}
    logits = []
    for seed, count in ((7, 1), (8, 2), (7, 2)):
        monkeypatch.setitem(NOISE, "seed", seed)
        with run_of(Odd) as run:
            for again in range(2):
                run.export(tmp_path / f"{len(logits)} {again}", dense=["price"])
                assert len(made) == count
        logits.append(serving.load(tmp_path / f"{len(logits)} 1").logits(asked))
    np.testing.assert_array_equal(logits[0], logits[2])
    assert (logits[0] != logits[1]).all()


def test_a_model_without_a_hash_is_exported_each_time(tmp_path, monkeypatch):
    class Listed(own_model.DeepFM):
        """Has an attribute that no dictionary takes as a key."""

        def __init__(self, embeddings, **options):
            super().__init__(embeddings, **options)
            self.names = Names(["a"])

    made, export = [], programs._exported
    monkeypatch.setattr(programs, "_exported", lambda *arguments: made.append(arguments) or export(*arguments))
    with run_of(Listed) as run:
        for number in range(2):
            run.export(tmp_path / str(number), dense=["price"])
    assert len(made) == 2


class Names(collections.UserList):
    """A list that JAX takes for an attribute, not for a tree."""
