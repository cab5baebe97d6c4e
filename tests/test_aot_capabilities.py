"""jrec's kernels compile for GPUs before and after Hopper; docs/gpu.md has the table of what runs where."""

import json
import os
import pathlib
import subprocess
import sys

import aot
import pytest
from grids import some_of

from benchmarks import ahead_of_time

pytestmark = [pytest.mark.aot, aot.needs_environment()]
HERE = pathlib.Path(__file__).parent


# A GPU before Hopper and one after it: Mosaic GPU and jrec's kernels make no difference between those of a side.
SOME = [target for target in ahead_of_time.OTHERS if target.architecture in ("sm_89", "sm_100a")]


@pytest.mark.parametrize("target", some_of(ahead_of_time.OTHERS, *SOME), ids=lambda target: target.architecture)
def test_kernels_of_a_capability(target):
    """Rows, casts, updates and tensor-train products, multiplied in registers where there is no wgmma."""
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / "aot_capability.py", target.architecture], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for case, kernel, registers in found["kernels"]:
        sys.stdout.write(f"{target.architecture}: {case}: {kernel}, {registers} registers\n")
    names = {kernel for _, kernel, *_ in found["kernels"]}
    assert {"gather_reduce_padded", "cast_write", "casted_update_long_and_casted_update_short", "tt_products"} <= names
    assert "tt_wgmma_products" not in names
    assert "wgmma is an instruction of Hopper GPUs" in found["wgmma"]
