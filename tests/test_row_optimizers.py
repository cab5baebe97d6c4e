"""Row optimizers as objects: what they refuse, and what reading them costs. Their steps: test_ops_row_update."""

import math
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jrec import ops
from jrec.native.hyper import STEPS
from jrec.row_optimizers import ROW_OPTIMIZERS

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_they_are_read_without_jax():
    code = "import sys, jrec.row_optimizers, jrec.app.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_every_one_is_exported_and_has_a_native_step():
    assert set(ROW_OPTIMIZERS.values()) == set(STEPS)
    assert all(getattr(ops, kind.__name__) is kind for kind in ROW_OPTIMIZERS.values())


@pytest.mark.parametrize(
    ("kind", "hyperparameters", "message"),
    [
        (ops.SGD, {"learning_rate": -0.1}, "learning_rate of SGD is -0.1, but must be at least 0"),
        (ops.SGD, {"learning_rate": math.nan}, "learning_rate of SGD is nan"),
        (ops.SGD, {"learning_rate": 1, "weight_decay": -1}, "weight_decay of SGD is -1, but must be at least 0"),
        (ops.SGD, {"learning_rate": 1, "max_row_norm": 0}, "max_row_norm of SGD is 0, but must be above 0"),
        (ops.Momentum, {"learning_rate": 1, "momentum": 1}, "momentum of Momentum is 1, but must be at least 0 and"),
        (ops.Adagrad, {"learning_rate": 1, "eps": 0.0}, "eps of Adagrad is 0.0, but must be above 0"),
        (ops.RowWiseAdagrad, {"learning_rate": 1, "initial_accumulator": -1}, "initial_accumulator of RowWiseAdagrad"),
        (ops.Adam, {"learning_rate": 1, "b2": np.float32(1)}, "b2 of Adam is 1.0"),
        (ops.SGD, {"learning_rate": "0.1"}, "learning_rate of SGD is '0.1', but must be a number, or a schedule of"),
        (ops.SGD, {"learning_rate": 1, "weight_decay": None}, "weight_decay of SGD is None, but must be a number"),
        (ops.SGD, {"learning_rate": 1, "weight_decay": abs}, "weight_decay of SGD is <.*>, but must be a number"),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused(kind, hyperparameters, message):
    with pytest.raises(ValueError, match=message):
        kind(**hyperparameters)


def test_a_learning_rate_is_a_single_number():
    for rate in (jnp.ones(2), lambda _: jnp.ones(2)):
        with pytest.raises(ValueError, match=r"learning_rate of SGD is of shape \(2,\); give a single number"):
            ops.SGD(learning_rate=rate).learning_rate_at(jnp.int32(0))


def test_tiny_gradients_move_rows_by_the_learning_rate():
    """The defaults do not drown a gradient of 1e-6, the size of a mean over thousands of examples."""
    for kind in (ops.Adagrad, ops.RowWiseAdagrad):
        optimizer, table = kind(learning_rate=0.5), np.zeros((2, 4), np.float32)
        gradient = np.full((1, 4), 1e-6, np.float32)
        rows, _ = ops.row_update(optimizer, table, optimizer.init(table), np.array([1], np.int32), gradient)
        np.testing.assert_allclose(rows[1], -0.5, rtol=0.01)
