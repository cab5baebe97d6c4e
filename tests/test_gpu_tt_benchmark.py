"""What of the tensor-train GPU benchmark needs no GPU: its sides, their comparison, and that kernels are reached."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import gpu_tt, harness
from jrec.ops.tt.cost import fuses_pooling
from jrec.pallas.interpret import interpreted

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = gpu_tt.Case(rows=60, dim=8, rank=4, lookups=12)


@pytest.mark.slow
def test_xla_sides_agree_and_train():
    sides = {name: gpu_tt.Side(TINY, way) for name, way in gpu_tt.WAYS.items() if way.implementation == "xla"}
    assert set(sides) == {"naive", "unique", "dense"}
    gpu_tt.agree(sides)
    for side in sides.values():
        assert side.forward().shape == (12, 8)
        before = [np.asarray(c) for c in side.cores]
        after = side.step()
        assert all(np.any(b != np.asarray(a)) for b, a in zip(before, after, strict=True))
    assert harness.timed(sides["unique"].forward)() > 0


def test_a_wrong_side_is_found():
    sides = {name: gpu_tt.Side(TINY, gpu_tt.WAYS[name]) for name in ("naive", "unique")}
    sides["unique"].cores = jax.tree.map(lambda core: core * 2, sides["unique"].cores)
    with pytest.raises(SystemExit, match="the output of unique differs"):
        gpu_tt.agree(sides)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pallas, fused", "pallas, unfused"])
def test_pallas_sides_agree(name):
    with interpreted():
        gpu_tt.agree({way: gpu_tt.Side(TINY, gpu_tt.WAYS[way]) for way in ("naive", name)})


def test_traffic_decides_whether_pooling_is_fused():
    shape = TINY.shape
    for name, fused in (("pallas, fused", True), ("pallas, unfused", False)):
        traffic = gpu_tt.WAYS[name].arguments(shape)["traffic"]
        assert fuses_pooling(shape, TINY.lookups, traffic) == fused


def test_the_uncompressed_side_runs():
    plain = gpu_tt.Uncompressed(TINY, "xla")
    assert plain.forward().shape == (12, 8)
    assert all(np.all(np.isfinite(x)) for x in plain.step())


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_tt"], capture_output=True, text=True, check=True, timeout=120
    )
    assert "skipped: there is no NVIDIA GPU that JAX can use" in done.stderr
    assert done.stdout == ""
