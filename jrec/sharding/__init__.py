"""Which device keeps which rows: OPER's cost model and planner, baselines, an exact solver, and the plan file."""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.sharding.baselines import BASELINES as BASELINES
    from jrec.sharding.cost import Cost as Cost
    from jrec.sharding.cost import evaluate as evaluate
    from jrec.sharding.drift import Drift as Drift
    from jrec.sharding.drift import measure_drift as measure_drift
    from jrec.sharding.errors import PlanError as PlanError
    from jrec.sharding.hardware import PRESETS as PRESETS
    from jrec.sharding.hardware import Hardware as Hardware
    from jrec.sharding.hardware import load_hardware as load_hardware
    from jrec.sharding.locator import Locator as Locator
    from jrec.sharding.of_layout import plan as plan
    from jrec.sharding.plan_file import load_plan as load_plan
    from jrec.sharding.plan_file import save_plan as save_plan
    from jrec.sharding.planner import Planned as Planned
    from jrec.sharding.planner import PlanOptions as PlanOptions
    from jrec.sharding.planner import plan_placement as plan_placement
    from jrec.sharding.plans import Located as Located
    from jrec.sharding.plans import Plan as Plan
    from jrec.sharding.plans import build_plan as build_plan
    from jrec.sharding.problem import PlanTable as PlanTable
    from jrec.sharding.problem import Problem as Problem

__getattr__, __dir__ = attach(
    __name__,
    {
        "BASELINES": "jrec.sharding.baselines",
        **dict.fromkeys(("Cost", "evaluate"), "jrec.sharding.cost"),
        **dict.fromkeys(("Drift", "measure_drift"), "jrec.sharding.drift"),
        "PlanError": "jrec.sharding.errors",
        **dict.fromkeys(("PRESETS", "Hardware", "load_hardware"), "jrec.sharding.hardware"),
        "Locator": "jrec.sharding.locator",
        **dict.fromkeys(("Located", "Plan", "build_plan"), "jrec.sharding.plans"),
        "plan": "jrec.sharding.of_layout",
        **dict.fromkeys(("load_plan", "save_plan"), "jrec.sharding.plan_file"),
        **dict.fromkeys(("PlanOptions", "Planned", "plan_placement"), "jrec.sharding.planner"),
        **dict.fromkeys(("PlanTable", "Problem"), "jrec.sharding.problem"),
    },
)
