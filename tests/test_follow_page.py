"""The queue of docs/follow.md: a program that is lost goes on with the messages behind its last checkpoint."""

import pathlib
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jrec
from jrec.data import GrowingVocabulary, Growth

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "follow.md"


def read(offset, size):
    """1,000 messages, of which ``size`` are given from an offset on."""
    draw = np.random.default_rng(0)
    labels, users, prices = draw.integers(0, 2, 1000), draw.integers(0, 200, 1000), draw.random(1000)
    chosen = range(offset, min(offset + size, 1000))
    return [{"label": int(labels[at]), "user": f"u{users[at]}", "price": float(prices[at])} for at in chosen]


def program():
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="user", rows=100, dim=4)], [jrec.FeatureConfig(name="user", table="user")]
    )
    config = jrec.nn.DLRMConfig(num_dense=1, bottom_mlp=(4,), top_mlp=(8, 1))
    model = jrec.nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    rows = jrec.ops.RowWiseAdagrad(learning_rate=0.05)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.05), embedding=rows)
    run = jrec.distribute(model, optimizer, growing={"user": GrowingVocabulary(Growth(capacity=100))})
    return run, run.compile()


def test_no_message_is_lost_and_none_is_learnt_twice(tmp_path):
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"read": read}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(snippet.replace("% 100", "% 5"), PAGE.name, "exec"), names)
        learn = names["learn"]
        with program()[0] as whole:
            learn(whole, whole.compile(), tmp_path / "whole")
            expected, keys = whole.table("user"), whole.growing["user"].keys.tolist()
            assert whole.steps == 16  # of 64 messages, the last of fewer
        run, step = program()

        def lost(batch):
            step(batch)
            if run.steps == 8:
                raise KeyError("lost")

        with run, pytest.raises(KeyError):
            learn(run, lost, tmp_path / "live")
        run, step = program()
        with run:
            position = run.restore(tmp_path / "live")["feed"]
            assert run.steps == 5
            assert position["iterator"] == {"offset": 5 * 64}
            learn(run, step, tmp_path / "live", position)
            np.testing.assert_array_equal(run.table("user"), expected)
            assert run.growing["user"].keys.tolist() == keys
