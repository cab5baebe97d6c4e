"""The check of kernels on a GPU: verdicts are found, kept, and hold."""

import pytest
from gpu_cases import _has_gpu

from jrec.environment import CACHE_VARIABLE
from jrec.ops import verdicts
from jrec.ops.local_gpu import expected_gpu, local_gpu
from jrec.ops.verdicts import KernelClass
from jrec.selfcheck.ensure import ensure, missing
from jrec.selfcheck.report import BROKEN
from jrec.selfcheck.runner import How

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _has_gpu(), reason="needs an NVIDIA GPU that JAX can use")]


def test_the_device_is_known_before_and_after_jax_starts_under_one_name():
    assert expected_gpu() == local_gpu()


def test_a_check_gives_verdicts_that_hold(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE, raising=False)
    classes = [
        KernelClass(kernel="gather_reduce", dtype="float32", dim=64),
        KernelClass(kernel="casted_update", dtype="float32", dim=64, optimizer="RowWiseAdagrad"),
    ]
    gpu = local_gpu()
    assert gpu is not None
    checked = ensure(classes, gpu, How())
    assert missing(classes, gpu) == ()
    for of, verdict in checked.verdicts.items():
        assert verdict.reason not in BROKEN, verdict.detail
        assert verdicts.gpu_choice(of) == verdict.choice
