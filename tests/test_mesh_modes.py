"""Bytes that the forms of a lookup move: the cost model's against counts of real batches."""

import dataclasses

import numpy as np
import pytest

from benchmarks import scaling_modes, scaling_step, workloads
from jrec.errors import ConfigError
from jrec.sharding.hardware import load_hardware
from jrec.sharding.modes import expected_traffic, traffic

WORKLOAD = workloads.Workload(
    name="small", rows=(4000, 900), dim=8, ids_per_bag=(12, 3), batch=1024, zipf=1.05, num_dense=1, bottom=(8,)
)


@pytest.fixture(scope="module")
def setup():
    return scaling_step.planned(WORKLOAD, load_hardware("h200x8"), extra_memory=0.0)


def test_bytes_of_each_form():
    """Two devices, one table: 5 lookups of 3 rows in 2 bags go from device 0 to 1."""
    counts = (np.array([[[9.0, n], [0.0, 9.0]]]) for n in (5, 3, 2))
    found = traffic(
        **dict(zip(("lookups", "rows", "bags"), counts, strict=True)), row_bytes=np.array([16]), dims=np.array([8])
    )
    np.testing.assert_array_equal(found.retrieve, [[0, 3 * (4 + 16 + 32)], [0, 0]])  # bfloat16 rows, float32 gradients
    np.testing.assert_array_equal(found.send, [[0, 5 * 4 + 2 * (4 + 32 + 32)], [0, 0]])
    assert (found.bytes_of("retrieve"), found.bytes_of("send"), found.cheaper) == (156, 156, "retrieve")


@pytest.fixture(scope="module")
def apart():
    return scaling_step.planned(WORKLOAD, scaling_modes.APART, extra_memory=0.0)


@pytest.mark.slow
def test_expectations_are_met_by_batches(setup, apart):
    for of in (setup, apart):
        expected = expected_traffic(of.problem, of.plan)
        counted = [
            scaling_modes.counted_traffic(of.problem, of.plan, workloads.table_ids(WORKLOAD, seed=seed))
            for seed in range(2)
        ]
        for field in dataclasses.fields(expected):
            ours = getattr(expected, field.name)
            mean = np.mean([getattr(of, field.name) for of in counted], axis=0)
            np.testing.assert_allclose(mean.sum(), ours.sum(), rtol=0.04, err_msg=field.name)
            asks = ours > 0.05 * ours.max()
            np.testing.assert_array_equal(mean > 0.02 * mean.max(), asks, err_msg=field.name)


def test_devices_that_compute_keep_nothing(setup, apart):
    expected = expected_traffic(apart.problem, apart.plan)
    computes = np.array(apart.plan.computes)
    assert not computes[:4].any()
    assert not expected.bags[~computes].any()
    assert not expected.bags[:, computes].any()
    assert (expected.bags[np.ix_(computes, ~computes)] > 0).all()
    cost = apart.cost  # half a step's bytes, since a step has two passes
    np.testing.assert_allclose(2 * cost.link_bytes, expected.send)
    assert min(cost.memory_balance, cost.lookup_balance) > 0.99, cost
    by_table = [expected_traffic(apart.problem, apart.plan, table=t.name).retrieve for t in apart.plan.tables]
    np.testing.assert_allclose(sum(by_table), expected.retrieve)
    with pytest.raises(ConfigError, match="computes names 0 devices of 8"):
        expected_traffic(setup.problem, setup.plan, computes=(False,) * 8)
