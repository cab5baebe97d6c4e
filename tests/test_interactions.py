"""Interactions and first-order terms of a DLRM against float64 NumPy: logits, gradients, errors, whole runs."""

import dataclasses
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from grids import some_of
from run_cases import CONFIG, configuring, quickstart

import jrec
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.app.run_record import CONFIG_FILE
from jrec.app.tables import plan_tables
from jrec.data.schema import Schema
from jrec.errors import CheckpointError, ConfigError
from jrec.nn import DLRM, CrossNetwork, DLRMConfig, fm_interaction
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

BATCH, DIM = 6, 4
MLPERF = pathlib.Path(__file__).parents[1] / "configs" / "mlperf_dlrm_dcnv2.toml"
MODELS = {
    "fm": {"interaction": "fm"},
    "deepfm": {"interaction": "fm", "wide": True},
    "dcn": {"interaction": "dcn", "cross_layers": 2},
    "low-rank dcn": {"interaction": "dcn", "cross_layers": 3, "cross_rank": 5, "wide": True},
    "dot": {},
    "wide dot": {"wide": True},
    "dot with embeddings": {"dot_with": "embeddings"},
    "dot with bottom": {"dot_with": "bottom"},
    "wide concat": {"interaction": "concat", "wide": True},
    "members": {"members": 3},
    "deepfm members": {"interaction": "fm", "wide": True, "members": 2},
    "dcn members": {"interaction": "dcn", "cross_layers": 2, "cross_rank": 5, "members": 2},
}


def layout_of(config):
    """A feature of one id, one of a sum of two, and one of three positions."""
    dim = config.members * (DIM + config.wide)
    return jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name=name, rows=9, dim=dim) for name in ("one", "two", "three")],
        [
            jrec.FeatureConfig(name="one", table="one"),
            jrec.FeatureConfig(name="two", table="two", max_length=2),
            jrec.FeatureConfig(name="three", table="three", max_length=3, pooling="none"),
        ],
    )


def config_of(model, num_dense, **changes):
    settings = {"num_dense": num_dense, "bottom_mlp": (5, DIM) if num_dense else (), "top_mlp": (7, 1)}
    return DLRMConfig(**settings | MODELS[model] | changes)


def examples(layout, num_dense):
    rng = np.random.default_rng(0)
    ids = {name: rng.integers(0, 9, (BATCH, n)) for name, n in (("two", 2), ("three", 3))}
    ids["three"][1, 2] = -1
    columns = {"label": rng.integers(0, 2, BATCH), "one": rng.integers(0, 9, BATCH)}
    columns |= {name: [row[row >= 0] for row in lists] for name, lists in ids.items()}
    columns |= {f"d{i}": rng.normal(size=BATCH).astype(np.float32) for i in range(num_dense)}
    batch = jrec.data.pack_batch(layout, columns, dense=[f"d{i}" for i in range(num_dense)])
    return columns, jax.tree.map(jnp.asarray, batch)


def numpy_logits(config, dense, rows, parameters):
    """Logits by the papers' formulas, one example at a time, from a nested dict of float64 parameters.

    Of several members, (batch, members), each by its part of rows and parameters.
    """
    if (members := config.members) > 1:
        alone, logits = dataclasses.replace(config, members=1), []
        for number in range(members):
            parts = [np.split(r, members, axis=2)[number] for r in rows]
            own = jax.tree.map(lambda x, number=number: x[number], parameters)
            logits.append(numpy_logits(alone, dense, parts, own))
        return np.stack(logits, axis=1)

    def mlp(x, layers, last):
        for number in range(len(layers)):
            x = x @ layers[number]["kernel"] + layers[number]["bias"]
            x = np.maximum(x, 0) if last or number + 1 < len(layers) else x
        return x

    logits = []
    for n in range(BATCH):
        vectors = list(np.concatenate([r[n] for r in rows]))
        first_order = 0.0
        if config.wide:
            first_order = sum(v[-1] for v in vectors) / 10
            vectors = [v[:-1] for v in vectors]
            if config.num_dense:
                first_order += dense[n] @ parameters["first_order"]["kernel"][:, 0]
        bottom = []
        if config.num_dense:
            bottom = [mlp(dense[n], parameters["bottom"]["layers"], True) if config.bottom_mlp else dense[n]]
        together = [*bottom, *vectors]
        products = (
            [together[i] @ together[j] for i in range(len(together)) for j in range(i)]
            if config.bottom_mlp or (not config.num_dense)
            else []
        )
        if config.interaction == "dot":
            embeddings = config.dot_with == "embeddings" or (config.dot_with == "auto" and not bottom)
            x = np.concatenate([*bottom, products, *(vectors if embeddings else [])])
        else:
            x = np.concatenate(together)
        if config.interaction == "dcn":
            x0 = x
            for number in range(config.cross_layers):
                layer = parameters["cross"]["layers"][number]
                low = x @ parameters["cross"]["down"][number]["kernel"] if config.cross_rank else x
                x = x0 * (low @ layer["kernel"] + layer["bias"]) + x
        logit = mlp(x, parameters["top"]["layers"], False)[0] + first_order
        logits.append(logit + (sum(products) if config.interaction == "fm" else 0))
    return np.array(logits)


@pytest.mark.parametrize(
    ("name", "num_dense"),
    some_of(itertools.product(MODELS, (0, 3)), *((name, 3) for name in MODELS), ("dot", 0), ("deepfm", 0), ("dcn", 0)),
)
def test_logits_and_gradients_equal_the_formulas_in_float64(name, num_dense):
    check_model(config_of(name, num_dense))


@pytest.mark.parametrize("name", ["wide concat", "low-rank dcn"])
def test_dense_features_join_as_they_are_without_a_bottom_mlp(name):
    check_model(config_of(name, 3, bottom_mlp=()))


def check_model(config):
    layout = layout_of(config)
    model = DLRM(config, layout, rngs=nnx.Rngs(0))
    if model.first_order is not None:  # which starts as zeros
        kernel = model.first_order.kernel
        kernel[...] = jnp.arange(1, kernel[...].size + 1, dtype=jnp.float32).reshape(kernel.shape) / 5
    _, batch = examples(layout, config.num_dense)
    activations, _ = model.embeddings.lookup(batch.bags)
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    weights = np.random.default_rng(1).normal(size=BATCH * config.members)

    def loss(parameters, activations):
        logits = nnx.merge(graph, parameters, rest).logits(batch.dense, activations, batch.bags)
        return jnp.sum(jnp.asarray(weights, jnp.float32) * logits.reshape(-1)), logits

    slopes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, logits), gradients = slopes(parameters, activations)

    def reference(parameters, activations):
        pure = {key: value for key, value in parameters.items() if key != "embeddings"}
        rows = [np.asarray(r, np.float64) for r in numpy_features(model, activations, batch.bags)]
        return numpy_logits(config, np.asarray(batch.dense, np.float64), rows, pure)

    exact = (float64(nnx.to_pure_dict(parameters)), float64(activations))
    np.testing.assert_allclose(logits, reference(*exact), rtol=2e-5, atol=1e-5)
    assert logits.dtype == jnp.float32
    direction = jax.tree.map(lambda x: np.random.default_rng(x.size).normal(size=x.shape), exact)
    step = 1e-6
    up, down = (
        weights @ reference(*jax.tree.map(lambda x, d, sign=sign: x + sign * step * d, exact, direction)).reshape(-1)
        for sign in (1, -1)
    )
    found = (float64(nnx.to_pure_dict(gradients[0])), float64(gradients[1]))
    slope = sum(np.sum(g * d) for g, d in zip(*map(jax.tree.leaves, (found, direction)), strict=True))
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=2e-4, atol=1e-4)


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def numpy_features(model, activations, bags):
    """Rows by feature, (batch, vectors, dim): the stack's bags are feature-major."""
    (stack,) = model.embeddings.layout.members
    rows = activations[stack.name]
    for feature in stack.features:
        begin, count = feature.first_bag * BATCH, feature.config.bags_per_example
        yield rows[begin : begin + count * BATCH].reshape(BATCH, count, stack.dim)


def test_members_are_trained_apart_and_predict_by_their_mean():
    config = config_of("members", 3, dropout=0.5, batch_norm=True)
    model = DLRM(config, layout_of(config), rngs=nnx.Rngs(0, dropout=1))
    for part in (model.bottom, model.top):
        for parameter in jax.tree.leaves(nnx.state(part, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)):
            parameter[...] = jnp.broadcast_to(parameter[...][:1], parameter.shape)
    for table in model.embeddings.stacks.values():
        table[...] = jnp.tile(table[...][:, :DIM], (1, config.members))
    _, batch = examples(model.embeddings.layout, 3)
    logits = nnx.jit(lambda model: model(batch))
    first = logits(model)
    assert first.shape == (BATCH, 3)
    assert len({tuple(column) for column in np.asarray(first).T}) == 3  # by dropout alone
    model.eval()
    alike = logits(model)
    assert alike.shape == (BATCH,)
    means = [norm.mean[...] for norm in model.top.norms]
    assert all(mean.shape[0] == 3 and np.abs(mean).max() > 0 for mean in means)
    model.train()
    assert not np.array_equal(logits(model), first)  # the streams went on


def test_the_loss_of_members_is_the_mean_of_their_losses():
    config = config_of("members", 3)
    model = DLRM(config, layout_of(config), rngs=nnx.Rngs(0))
    _, batch = examples(model.embeddings.layout, 3)
    batch = dataclasses.replace(batch, mask=batch.mask.at[2].set(0), extras={"weight": jnp.arange(BATCH) / 3})
    logits = model(batch)
    for loss in (jrec.nn.binary_cross_entropy, jrec.nn.focal(), jrec.nn.weighted_binary_cross_entropy("weight")):
        alone = [loss(logits[:, number], batch) for number in range(3)]
        np.testing.assert_allclose(loss(logits, batch), np.mean(alone), rtol=1e-6)
        slopes = [jax.grad(loss)(logits[:, number], batch) for number in range(3)]
        np.testing.assert_allclose(jax.grad(loss)(logits, batch), np.stack(slopes, axis=1), rtol=1e-6)  # each its own
    model.eval()
    np.testing.assert_allclose(model(batch), jnp.mean(logits, axis=1), rtol=1e-6)


def test_second_order_term_is_the_sum_of_products_of_pairs():
    vectors = np.random.default_rng(0).normal(size=(5, 7, 3))
    expected = [sum(v[i] @ v[j] for i in range(7) for j in range(i)) for v in vectors]
    np.testing.assert_allclose(fm_interaction(jnp.asarray(vectors, jnp.float32)), expected, rtol=1e-5, atol=1e-5)
    rounded = jnp.asarray(vectors, jnp.bfloat16)
    assert fm_interaction(rounded).dtype == jnp.float32
    np.testing.assert_array_equal(fm_interaction(rounded), fm_interaction(rounded.astype(jnp.float32)))


@pytest.mark.parametrize("name", ["deepfm", "low-rank dcn"])
def test_bfloat16_compute_is_near_float32(name):
    models = [
        DLRM(config, layout_of(config), rngs=nnx.Rngs(0))
        for config in (config_of(name, 3, compute_dtype=dtype) for dtype in ("float32", "bfloat16"))
    ]
    _, batch = examples(models[0].embeddings.layout, 3)
    exact, rounded = (np.asarray(model(batch)) for model in models)
    assert 0 < np.abs(rounded - exact).max() < 0.1
    assert rounded.dtype == np.float32
    parameters = jax.tree.leaves(nnx.state(models[1], nnx.Param))
    assert {str(x.dtype) for x in parameters} == {"float32"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"interaction": "outer"}, "choose dot, concat, fm or dcn"),
        ({"dot_with": "all"}, "choose auto, bottom or embeddings"),
        ({"interaction": "fm", "bottom_mlp": ()}, "bottom_mlp is empty"),
        ({"interaction": "fm", "bottom_mlp": (3,)}, r"a fm interaction needs one dim .* \[3, 4\]"),
        ({"interaction": "dcn", "cross_layers": 0}, "cross_layers is 0"),
        ({"interaction": "dcn", "cross_rank": 99}, "cross_rank is 99, but the interaction is 24 wide"),
        ({"members": 0}, "members is 0; a model has at least one"),
    ],
)
def test_models_that_do_not_fit_are_refused(changes, match):
    def build():
        config = config_of("dot", 3, **changes)
        return DLRM(config, layout_of(config), rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=match):
        build()


def test_a_table_without_room_for_first_order_weights_is_refused():
    table = jrec.TableConfig(name="user", rows=9, dim=1)
    layout = jrec.EmbeddingLayout.build([table], [jrec.FeatureConfig(name="user", table="user")])
    config = DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(1,), interaction="concat", wide=True)
    with pytest.raises(ValueError, match="'user' has dim 1"):
        DLRM(config, layout, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="has dim 1, no multiple of members=2"):
        DLRM(dataclasses.replace(config, wide=False, members=2), layout, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="cross_rank is -1"):
        CrossNetwork(4, rank=-1, rngs=nnx.Rngs(0))


# Runs from a configuration.

SHORT = CONFIG.replace("seed = 3", "seed = 3\nmax_steps = 6")
DEEPFM = ("model.interaction='fm'", "model.wide=true")
MEMBERS = ("model.members=3", "model.wide=true")
DCN = ("model.interaction='dcn'", "model.cross_layers=2", "model.cross_rank=8", "model.wide=true")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=2000)


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, SHORT)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["model.interaction=fm", "model.bottom_mlp=[9]"], r"bottom_mlp is \[9\], but under fm interaction"),
        (["model.cross_layers=2"], r"cross_layers is 2, but model.interaction is 'dot'; set it to 'dcn'"),
        (["model.cross_rank=2", "model.interaction=concat"], "cross_rank is 2"),
        (["model.dot_with=bottom", "model.interaction=fm"], "dot_with is 'bottom', but model.interaction is 'fm'"),
        (["model.interaction=dcn", "model.kind=tbsm"], "a TBSM has interaction 'dot' or 'concat'"),
        (["model.wide=true", "model.kind=tbsm"], "model.wide True"),
        (["model.wide=true", "model.embedding_dim=4096", "model.bottom_mlp=[]"], "rows of 4,097 elements"),
        (["model.members=5", "model.embedding_dim=1024", "model.bottom_mlp=[]"], "rows of 5,120 elements"),
        (["model.members=2", "model.kind=tbsm"], "model.members 2"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(configure, overrides, match):
    with pytest.raises(ConfigError, match=match):
        configure(*overrides)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(DEEPFM, id="deepfm", marks=pytest.mark.slow),
        pytest.param(DCN, id="dcn"),
        pytest.param(MEMBERS, id="members"),
    ],
)
def test_every_tier_and_a_mesh_train_the_same_model(configure, model):
    places = {"device": (), "host": ("tables.tier='host'",), "mesh": ("mesh.devices=2",)}
    runs = {place: train(configure(*model, *own, out=place)) for place, own in places.items()}
    for place in ("host", "mesh"):
        np.testing.assert_allclose(
            runs[place].scores["test"].logits, runs["device"].scores["test"].logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
def test_wide_tables_in_cores_train_and_resume(configure, dataset):
    tt = (*DEEPFM, "tables.tt.largest=2", "tables.tt.rank=2", "model.embedding_dim=7", "model.bottom_mlp=[7]")
    shapes = {t.name: t.tt_shape for t in plan_tables(configure(*tt), Schema.load(dataset)).tables}
    assert (shape := shapes["C10"]) is not None
    assert shape.dim_factors == (2, 2, 2)
    whole = train(configure(*tt, out="whole"))
    train(configure(*tt, "max_steps=3", out="parts"))
    resumed = train(configure(*tt, out="parts"), resume=True)
    np.testing.assert_array_equal(resumed.scores["test"].logits, whole.scores["test"].logits)


def earlier(folder):
    """Makes a run's configuration one of a version without the keys of first-order terms, cross layers and dot_with."""
    path = folder / CONFIG_FILE
    new = ("wide =", "cross_layers =", "cross_rank =", "dot_with =")
    lines = [line for line in path.read_text().splitlines() if not line.startswith(new)]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def without_dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "avazu"
    synthesize(shape_like("avazu", table_rows=40), folder, SynthOptions(rows=1000, seed=1))
    return folder


@pytest.mark.slow
def test_earlier_runs_of_only_dot_products_are_evaluated_and_not_taken_for_others(tmp_path, without_dense):
    configure = configuring(tmp_path, without_dense, SHORT)
    products = train(configure("model.dot_with='bottom'", "max_steps=3", "evaluate.final_splits=['test']"))
    earlier(products.folder)
    old = (products.folder / CONFIG_FILE).read_text()
    assert "dot_with" not in old
    with pytest.raises(CheckpointError, match=r"model\.dot_with was None and is 'embeddings'"):
        train(configure(), resume=True)
    scores = evaluate_checkpoint(products.folder, without_dense, split="test").scores
    np.testing.assert_array_equal(scores.logits, products.scores["test"].logits)
    assert train(configure("model.dot_with='bottom'"), resume=True).step > 3


@pytest.mark.slow
def test_earlier_runs_with_dense_features_go_on(configure):
    whole = train(configure(out="whole"))
    earlier(train(configure("max_steps=3", out="parts")).folder)
    resumed = train(configure(out="parts"), resume=True)
    np.testing.assert_array_equal(resumed.scores["test"].logits, whole.scores["test"].logits)
    assert load_config(resumed.folder / CONFIG_FILE).model.dot_with == "bottom"
    train(configure("max_steps=8", out="parts"), resume=True)


@pytest.mark.slow
def test_mlperfs_configuration_trains_on_its_twin(tmp_path):
    synthesize(shape_like("mlperf-dlrm-dcnv2", scale=2**-16), tmp_path / "twin", SynthOptions(rows=300, seed=1))
    changes = [f"data.path={str(tmp_path / 'twin')!r}", f"out={str(tmp_path / 'run')!r}", "data.batch_size=64"]
    small = ["data.eval_batch_size=64", "max_steps=2", "log.tensorboard=false"]
    outcome = train(load_config(MLPERF, [*changes, *small]))
    assert outcome.step == 2
    assert outcome.parameters["dense"]["parameters"] == 16_044_545
