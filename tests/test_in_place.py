"""Rows in host memory that are pooled and updated in place: the bits of rows on the device, whatever a batch holds."""

import dataclasses

import numpy as np
import pytest
from host_runs import STEPS, HostRun, device_snapshots, make_batch

from jrec.ops import layout as layouts


def widened(batch, name):
    """The same batch with int64 ids of one stack."""
    bags = {**batch.bags, name: dataclasses.replace(batch.bags[name], ids=batch.bags[name].ids.astype(np.int64))}
    return dataclasses.replace(batch, bags=bags)


@pytest.mark.parametrize("rows", ["adam", "rowwise_adagrad", "sgd"])
@pytest.mark.parametrize("wide", [False, True])
def test_every_step_has_the_bits_of_the_device(rows, wide, monkeypatch):
    expected = device_snapshots(rows)
    if wide:
        monkeypatch.setattr(layouts, "MAX_ROWS", 300)  # so that table "item", of 300 16-bit rows, has int64 addresses
    run = HostRun(rows, threads=2)
    assert [s.address_dtype.name for s in run.layout.members] == ["int32", "int64" if wide else "int32"]
    for number in range(STEPS):
        batch = make_batch(run.layout, number)
        loss = run.step_in_place(widened(batch, "host_d8_bfloat16") if wide else batch)
        assert loss == expected[number + 1].loss
        assert run.snapshot(loss) == expected[number + 1]
