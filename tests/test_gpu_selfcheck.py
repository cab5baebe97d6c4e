"""The check of kernels on a GPU: verdicts are found, kept, and hold."""

import pytest
from gpu_cases import _has_gpu

from jrec.environment import CACHE_VARIABLE
from jrec.ops import verdicts
from jrec.ops.verdicts import KernelClass, local_machine, read_verdicts
from jrec.selfcheck.check import USUAL, prove

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _has_gpu(), reason="needs an NVIDIA GPU that JAX can use")]


def test_a_check_gives_verdicts_that_hold(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE, raising=False)
    classes = [
        KernelClass(kernel="gather_reduce", dtype="float32", dim=64),
        KernelClass(kernel="casted_update", dtype="float32", dim=64, optimizer="RowWiseAdagrad"),
    ]
    machine = local_machine()
    assert machine is not None
    found = prove(dict.fromkeys(classes, USUAL), machine)
    assert read_verdicts(machine) == found
    for of, verdict in found.items():
        assert verdict.right, verdict.why
        assert verdicts.gpu_choice(of) == verdict.choice
