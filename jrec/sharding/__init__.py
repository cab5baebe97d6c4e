"""Which device keeps which rows: OPER's cost model and planner, baselines, and the plan file."""

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

__getattr__, __dir__, __all__ = attach(__name__)
