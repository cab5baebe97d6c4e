"""What of the tensor-train GPU benchmark needs no GPU: its sides, their comparison, and that kernels are reached."""

import jax
import numpy as np
import pytest

from benchmarks import gpu_sides, gpu_tt
from jrec.ops.tt.cost import fuses_pooling
from jrec.pallas.interpret import interpreted

TINY = gpu_tt.TINY


@pytest.mark.slow
def test_xla_sides_agree_and_train():
    sides = {name: gpu_tt.Side(TINY, way) for name, way in gpu_tt.WAYS.items() if way.implementation == "xla"}
    assert set(sides) == {"naive", "unique", "dense"}
    for side in sides.values():
        gpu_tt.agree(side.outputs(), sides["naive"].outputs())
        before = [np.asarray(c) for c in side.cores]
        loop = side.loop("step", rounds=1)
        loop.dispatch()
        assert all(np.any(b != np.asarray(a)) for b, a in zip(before, loop.state[0], strict=True))


def test_a_wrong_side_is_found():
    sides = {name: gpu_tt.Side(TINY, gpu_tt.WAYS[name]) for name in ("naive", "unique")}
    sides["unique"].cores = jax.tree.map(lambda core: core * 2, sides["unique"].cores)
    with pytest.raises(gpu_sides.SidesDifferError, match="the output differs"):
        gpu_tt.agree(sides["unique"].outputs(), sides["naive"].outputs())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pallas, fused", "pallas, unfused"])
def test_pallas_sides_agree(name):
    with interpreted():
        gpu_tt.agree(gpu_tt.Side(TINY, gpu_tt.WAYS[name]).outputs(), gpu_tt.Side(TINY, gpu_tt.WAYS["naive"]).outputs())


def test_ids_are_hashed():
    ids = gpu_tt.drawn_ids(gpu_tt.Case(rows=1000, dim=8, rank=4, lookups=500))
    assert len(ids) == gpu_tt.SETS
    assert np.median(ids[0]) > 200  # half of the lookups by rank fall below about 30


def test_traffic_decides_whether_pooling_is_fused():
    shape = TINY.shape
    for name, fused in (("pallas, fused", True), ("pallas, unfused", False)):
        traffic = gpu_tt.WAYS[name].arguments(shape)["traffic"]
        assert fuses_pooling(shape, TINY.lookups, traffic) == fused


def test_the_uncompressed_side_runs():
    plain = gpu_tt.Uncompressed(TINY, "xla")
    before = np.asarray(plain.side.tables()["stack0"])
    loop = plain.loop("step", rounds=1)
    loop.dispatch()
    assert np.any(np.asarray(loop.state[0]["stack0"]) != before)
