"""Dense features in pieces between boundaries: the encoding, the models that read it, and the keys that ask for it."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from run_cases import CONFIG, configuring, quickstart

from jrec import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.app.loop import train
from jrec.errors import ConfigError
from jrec.nn import DLRM, DLRMConfig
from jrec.nn.dense_encoding import encoded_width, piecewise_linear

BOUNDARIES = ((0.0, 1.0, 10.0), (), (1990.0, 2000.0, 2010.5, 2020.0))


def test_pieces_are_linear_between_boundaries_and_constant_outside():
    dense = np.array([[-1, 7, 1980], [0, -7, 1990], [0.25, 0, 1995], [5.5, 1e9, 2020], [99, 3, 2099]], np.float32)
    found = piecewise_linear(jnp.asarray(dense), BOUNDARIES)
    assert found.shape == (5, encoded_width(BOUNDARIES, 3)) == (5, 6)
    column = 0
    for feature, own in enumerate(BOUNDARIES):
        if not own:
            np.testing.assert_array_equal(found[:, column], dense[:, feature])
            column += 1
        for low, high in itertools.pairwise(own):
            np.testing.assert_allclose(found[:, column], np.interp(dense[:, feature], [low, high], [0, 1]), atol=1e-6)
            column += 1
    assert piecewise_linear(jnp.asarray(dense), ()) is not None
    np.testing.assert_array_equal(piecewise_linear(jnp.asarray(dense), ()), dense)
    assert encoded_width((), 3) == 3


def test_a_model_reads_pieces_and_so_no_scale_matters():
    layout = EmbeddingLayout.build([TableConfig(name="a", rows=4, dim=8)], [FeatureConfig(name="a", table="a")])
    logits = []
    for scale in (1.0, 1000.0):
        own = (tuple(scale * b for b in BOUNDARIES[0]),)
        sizes = {"bottom_mlp": (8,), "top_mlp": (4, 1), "wide": True}
        config = DLRMConfig(num_dense=1, dense_boundaries=own, interaction="concat", **sizes)
        model = DLRM(config, layout, rngs=nnx.Rngs(0))
        assert model.bottom.layers[0].kernel.shape == (2, 8)
        assert model.first_order.kernel.shape == (2, 1)
        activations, bags = {"dim8": jnp.ones((3, 1, 8))}, {}
        dense = scale * jnp.array([[0.5], [2.0], [30.0]])
        names = list(model.embeddings.arrays())
        activations = {names[0]: jnp.ones((3, 1, 8))}
        logits.append(model.logits(dense, activations, bags))
    np.testing.assert_allclose(*logits, rtol=1e-4)
    assert len(np.unique(np.asarray(logits[0]))) == 3


@pytest.mark.parametrize("own", [(1.0,), (1.0, 1.0), (2.0, 1.0), (0.0, float("nan"))])
def test_boundaries_that_do_not_ascend_are_refused(own):
    with pytest.raises(ValueError, match="must be at least two numbers in ascending order"):
        DLRMConfig(num_dense=1, bottom_mlp=(8,), top_mlp=(1,), dense_boundaries=(own,))


def test_boundaries_are_of_every_feature():
    with pytest.raises(ValueError, match="are of 1 features, but num_dense is 2"):
        DLRMConfig(num_dense=2, bottom_mlp=(8,), top_mlp=(1,), dense_boundaries=((0.0, 1.0),))


def test_the_command_trains_with_boundaries_by_name(tmp_path):
    load = configuring(tmp_path, quickstart(tmp_path, rows=2000), CONFIG)
    name = "I1"
    outcome = train(load("max_steps=2", f"model.dense_boundaries.{name}=[0.0, 0.5, 2.0]"))
    plain = train(load("max_steps=2", out="plain"))
    inputs = outcome.parameters["dense"]["parameters"] - plain.parameters["dense"]["parameters"]
    assert inputs == 16  # one more input of the first layer
    with pytest.raises(ConfigError, match=r"dense_boundaries names 'weight', but the dataset's dense features are"):
        train(load("max_steps=2", "model.dense_boundaries.weight=[0.0, 1.0]", out="odd"))
    with pytest.raises(ConfigError, match=r"dense_boundaries\.I1 is \[2\.0, 1\.0\]; give at least two numbers"):
        load(f"model.dense_boundaries.{name}=[2.0, 1.0]")
