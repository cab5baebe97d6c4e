"""``jrec plan`` writes no plan that training, or evaluation, would refuse."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jrec.errors import ConfigError, JrecError

if TYPE_CHECKING:
    from jrec.app.config import TrainConfig
    from jrec.data.schema import Schema
    from jrec.sharding.plans import Plan
    from jrec.sharding.problem import Problem


def check_shared(problem: Problem, batch_size: int | None) -> None:
    """Refuses a batch of training that the devices that compute cannot share equally.

    Args:
      problem: What is planned.
      batch_size: Examples of a step, as the arguments or the configuration say; None where neither does.

    Raises:
      ConfigError: Naming both numbers.
    """
    if batch_size is None or problem.purpose != "training" or not batch_size % problem.num_compute_devices:
        return
    who = (
        f"{problem.num_compute_devices} devices"
        if problem.computes is None
        else f"the {problem.num_compute_devices} devices that compute"
    )
    raise ConfigError(
        f"the batch size is {batch_size:,}, which {who} cannot share equally, so that training would refuse the plan;"
        f" use a multiple of {problem.num_compute_devices}, by --batch-size or data.batch_size, or other devices"
    )


def check_trains(path: str | None, config: TrainConfig | None, tables: Sequence[str]) -> None:
    """Refuses cores for tables whose tier the configuration names.

    Args:
      path: The configuration's file.
      config: The run's configuration, if there is one.
      tables: The tables that --tt names.

    Raises:
      ConfigError: Naming the table.
    """
    if config is None:
        return
    for name in tables:
        if name in config.tables.overrides and (tier := config.tables.overrides[name].tier) is not None:
            raise ConfigError(
                f"--tt {name}: {path} says tables.overrides.{name}.tier = {tier!r}, so that its run would refuse the"
                " plan; leave one of them out"
            )


def save_usable(plan: Plan, out: str | os.PathLike[str], *, schema: Schema, config: TrainConfig | None) -> None:
    """Writes a plan, unless a run of the configuration would refuse it: it is opened as a run opens it.

    Args:
      plan: The plan.
      out: Its file.
      schema: The dataset.
      config: The run's configuration, if there is one.

    Raises:
      JrecError: As the run would; nothing is written then.
    """
    from jrec.outputs import new_file
    from jrec.sharding.plan_file import save_plan

    with new_file(out) as tried:
        save_plan(plan, tried)
        try:
            if config is not None:
                _open(plan, tried, schema, config)
        except JrecError as error:
            raise type(error)(str(error).replace(str(tried), str(out))) from error


def _open(plan: Plan, path: pathlib.Path, schema: Schema, config: TrainConfig) -> None:
    from jrec.app.build import build_layout
    from jrec.app.dataset import plan_of
    from jrec.app.run_plan import check_sharing, run_plan

    mesh = dataclasses.replace(config.mesh, devices=plan.devices)
    config = dataclasses.replace(config, mesh=mesh, plan=str(path))
    training = plan.purpose == "training"
    written = plan_of(config)
    layout = build_layout(config, schema, written)
    slots = config.optimizer.embedding.slots if training else None
    opened = run_plan(written, config, schema, layout, slots)
    check_sharing(config, opened, [0] * plan.devices, training=training)
