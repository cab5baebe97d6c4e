"""The check's programs, compiled for an H200: they compile, and timed loops hold nothing but the kernels they time."""

import re

import aot
import jax
import numpy as np
import pytest

from jrec.ops.verdicts import KernelClass
from jrec.selfcheck import child, trials
from jrec.selfcheck.trials import Sizes

pytestmark = [pytest.mark.aot, aot.needs_environment()]

GATHER = KernelClass(kernel="gather_reduce", dtype="float32", dim=16)
UPDATE = KernelClass(kernel="casted_update", dtype="float32", dim=16, optimizer="RowWiseAdagrad")
KEYED = KernelClass(kernel="casted_update", dtype="bfloat16", dim=16, optimizer="SGD")
SIZES = Sizes(rows=16_384, bags=512, length=20)


def _on_h200(trial):
    arguments = trial.draw(np.random.default_rng(0), "power law")
    return jax.tree.map(lambda x: aot.shape(x.shape, x.dtype), arguments)


@pytest.mark.parametrize("of", [GATHER, UPDATE, KEYED], ids=str)
def test_the_programs_of_the_check_compile(of):
    for trial in trials.small_trials(of, tiny=False):
        donated = (0,) if trial.in_place else ()
        run = trial.run("pallas")
        _, modules = aot.compile_checked(f"check of {of}", run, *_on_h200(trial), donate_argnums=donated)
        assert modules


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("of", [GATHER, UPDATE], ids=str)
def test_a_timed_loop_is_of_known_length_and_copies_no_table(of, implementation):
    trial = trials.trial(of, SIZES)
    arguments = _on_h200(trial)
    result = None if trial.in_place else [aot.shape((SIZES.bags, of.dim), np.float32)]
    loop = child.looped(trial, implementation)
    text = aot.compile_for_h200(loop, arguments, result, donate_argnums=(0, 1)).as_text()
    assert '"known_trip_count":{"n":"32"}' in text
    assert not re.search(rf"f32\[{SIZES.rows},{of.dim}\]\S* copy\(", text)
    (body,) = re.findall(r"body=%(\S+),.*\"known_trip_count\":\{\"n\":\"32\"", text)
    body = text[text.index(f"\n%{body} ") :].partition("\n}\n")[0]
    inside = "mosaic_gpu_v2" if implementation == "pallas" else "fusion("
    assert inside in body
