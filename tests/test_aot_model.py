"""The facts that ``benchmarks.gpu_model`` reads are those of the kernels as they are compiled now."""

import aot
import pytest

from benchmarks import gpu_facts
from benchmarks.gpu_model_cases import CASES

pytestmark = [pytest.mark.aot, aot.needs_environment()]

PROGRAMS = [
    (name, what, config)
    for name, case in CASES.items()
    for what, config in (
        ("forward", case.forward_config()), ("update", case.update_config()), ("cast", None),
    )
    if name in ("cpu", "kaggle") or what == "update"
]  # fmt: skip


@pytest.mark.parametrize(("name", "what", "config"), PROGRAMS, ids=lambda part: part if isinstance(part, str) else "")
def test_facts_are_up_to_date(name, what, config):
    case = CASES[name]
    program = gpu_facts.key(case, what, config)
    kept = gpu_facts.load()
    remedy = (
        "the kernels have changed: run python -m benchmarks.gpu_facts (see its --help), and look at the predictions"
    )
    assert program in kept, remedy
    assert gpu_facts.compiled(case, what, config) == kept[program], remedy
