"""Row updates of every optimizer, and what they must be in float64."""

import jax.numpy as jnp
import numpy as np
import reference

from jrec import ops
from jrec.ops.rounding import round_values
from jrec.pallas.casted_update import UpdateRequest, casted_update
from jrec.pallas.tuning import TuningConfig
from jrec.row_optimizers import LAST

COMMON = {"learning_rate": lambda step: 0.5 / (step + 1), "weight_decay": 0.01, "max_row_norm": 1.5}


OPTIMIZERS = (
    ops.SGD(**COMMON),
    ops.Momentum(nesterov=True, **COMMON),
    ops.Adagrad(**COMMON),
    ops.RowWiseAdagrad(**COMMON),
    ops.RMSProp(**COMMON),
    ops.Adam(**COMMON),
    ops.RowWiseRMSProp(**COMMON),
    ops.RowWiseAdam(**COMMON),
    *(reference.made(kind, **COMMON) for kind in reference.LAZY),
)


STEP, SCALE = 3, 0.5


SHAPE = reference.Shape(rows=17, dim=20, bags=14, length=4, weighted=True)


CONFIG = TuningConfig(chunks=1, unroll=2, split=4, top=16, blocks=2)


def _case(shape=SHAPE, kind="power law"):
    return reference.make_case(shape, np.random.default_rng(7), kind=kind, past=True)


def _slots(optimizer, table):
    rng = np.random.default_rng(8)
    drawn = {k: v + jnp.asarray(rng.uniform(size=v.shape), jnp.float32) for k, v in optimizer.init(table).items()}
    return {k: jnp.floor(STEP * v) if k == LAST else v for k, v in drawn.items()}


def _expected(optimizer, case, slots):
    """Table and slots after a step, float64."""
    table = case.table.astype(np.float64)
    slots = {name: np.array(slot, np.float64) for name, slot in slots.items()}
    reference.step_rows(optimizer, table, slots, reference.row_gradients(case), step=STEP, scale=SCALE)
    return table, slots


def update_request(optimizer, case, slots, *, config=CONFIG, key=None, unique_capacity=None):
    table = jnp.asarray(case.table)
    offsets = None if case.offsets is None else jnp.asarray(case.offsets)
    cast = ops.tensor_cast(
        jnp.asarray(case.ids), offsets, num_rows=case.shape.rows, unique_capacity=unique_capacity, implementation="xla"
    )
    weights = None if case.weights is None else jnp.asarray(case.weights).reshape(-1)[cast.positions]
    return UpdateRequest(
        optimizer=optimizer,
        table=table,
        slots=slots,
        rows=cast.rows,
        offsets=cast.offsets,
        sources=cast.sources,
        num_unique=cast.num_unique,
        bag_gradients=jnp.asarray(case.bag_gradients),
        weights=weights,
        step=jnp.int32(STEP),
        gradient_scale=jnp.float32(SCALE),
        rounding=round_values,
        rounding_key=key,
        config=config,
    )


def _fused(optimizer, case, slots, **options):
    return casted_update(update_request(optimizer, case, slots, **options))


def _assert_close(got, want, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(np.asarray(got[0], np.float64), want[0], rtol=rtol, atol=atol)
    for name, slot in want[1].items():
        np.testing.assert_allclose(got[1][name], slot, rtol=rtol, atol=atol, err_msg=name)
