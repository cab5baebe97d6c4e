"""The check's programs, compiled for an H200: they compile, and timed loops hold nothing but the kernels they time."""

import re

import aot
import jax
import pytest

from jrec.ops.verdicts import KernelClass
from jrec.selfcheck import kernels, timing, trials

pytestmark = [pytest.mark.aot, aot.needs_environment()]

GATHER = KernelClass(kernel="gather_reduce", dtype="float32", dim=16)
UPDATE = KernelClass(kernel="casted_update", dtype="float32", dim=16, optimizer="RowWiseAdagrad")
KEYED = KernelClass(kernel="casted_update", dtype="bfloat16", dim=16, optimizer="SGD")
SIZE = timing.Size(bags=(512,), lengths=(20,), table_bytes=1 << 20, loop=32)


def _on_h200(arrays):
    return jax.tree.map(lambda x: aot.shape(x.shape, x.dtype), arrays)


@pytest.mark.parametrize("of", [GATHER, UPDATE, KEYED], ids=str)
def test_the_programs_of_the_check_compile(of):
    for program in trials.programs(of):
        arguments = _on_h200(jax.device_put(program.draws[0].arguments))
        function = program.build(kernels, "pallas")
        _, modules = aot.compile_checked(f"check of {of}", function, *arguments, donate_argnums=program.donated)
        assert modules


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("of", [GATHER, UPDATE], ids=str)
def test_a_timed_loop_is_of_known_length_and_copies_no_table(of, implementation):
    (case,) = timing.cases(of, SIZE)
    arguments = _on_h200((case.carry, case.linked, case.fixed))
    run = timing.looped(case, kernels, implementation, SIZE)
    text = aot.compile_for_h200(run, *arguments, donate_argnums=0).as_text()
    assert '"known_trip_count":{"n":"32"}' in text
    table = max((case.carry, case.fixed), key=lambda arrays: max((x.size for x in jax.tree.leaves(arrays)), default=0))
    rows, dim = next(x.shape for x in jax.tree.leaves(table) if x.ndim == 2 and x.shape[0] > 1000)
    assert not re.search(rf"f32\[{rows},{dim}\]\S* copy\(", text)
    body = text[text.index("%region") :]
    inside = "mosaic_gpu_v2" if implementation == "pallas" else "fusion("
    assert inside in body
