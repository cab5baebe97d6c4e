"""What ``jrec train`` does about GPU kernels before its first step: check what was never checked, agree, keep to it."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax._src import xla_bridge

from jrec.errors import ConfigError, JrecError
from jrec.files import load_json, save_json
from jrec.ops import verdicts
from jrec.ops.local_gpu import local_gpu
from jrec.ops.verdicts import KERNELS_VARIABLE, KernelClass, kernels_mode
from jrec.row_optimizers import ROW_OPTIMIZERS
from jrec.selfcheck.classes import classes_of
from jrec.selfcheck.ensure import ensure, missing
from jrec.selfcheck.report import shown, summary
from jrec.selfcheck.runner import How
from jrec.train.build import build_layout
from jrec.train.config import TrainConfig
from jrec.train.dataset import open_data
from jrec.train.run_folder import KERNELS_FILE, began

BUDGET_SECONDS = 60.0
HOW = How(timeout=30.0, start_timeout=60.0)


def check_before_training(config: TrainConfig, options: How = HOW) -> tuple[KernelClass, ...]:
    """Checks the kernels that a run's model needs and that nobody checked on this GPU, a minute at most.

    Does nothing without a GPU, where JREC_KERNELS or ``tables.implementation`` has chosen already, or once JAX has
    taken the GPU's memory. A check that fails is no reason not to train: XLA then computes.

    Args:
      config: The run's configuration.
      options: How to check.

    Returns:
      What the model may run on a GPU, where verdicts decide; none where nothing has to be decided.

    Raises:
      ConfigError: If JREC_KERNELS has an unknown value, or the configuration does not fit the dataset.
      DatasetError: If the dataset cannot be used.
    """
    if kernels_mode() != "auto" or config.tables.implementation != "auto":
        return ()
    if xla_bridge.backends_are_initialized() or (gpu := local_gpu()) is None:
        return ()
    data = open_data(config)
    classes = classes_of(build_layout(data.config, data.schema, data.plan), optimizer=_optimizer_of(config))
    unchecked = missing(classes, gpu)
    if not unchecked:
        return classes
    _say(
        f"checking {len(unchecked)} GPU kernels on this {gpu.kind} before their first use, {BUDGET_SECONDS:g} s at most"
        f" (once; {KERNELS_VARIABLE}=xla goes without)"
    )
    show = {"auto": None, "on": True, "off": False}[config.log.progress]
    try:
        with shown(show=show) as progress:
            checked = ensure(classes, gpu, options, progress=progress, budget=BUDGET_SECONDS, wait=2 * BUDGET_SECONDS)
    except (JrecError, OSError) as error:
        _say(f"GPU kernels could not be checked, so XLA computes: {error}")
        return classes
    left = len(classes) - len(checked.verdicts)
    unfinished = f"; {left} not checked in time, which XLA computes; `jrec kernels check` checks them" if left else ""
    _say(f"{summary(checked.verdicts)} ({checked.seconds:.0f} s){unfinished}")
    return classes


def _optimizer_of(config: TrainConfig) -> Callable[[str], str | None]:
    """By table, the class name of its row optimizer; None for a frozen one."""

    def name_of(table: str) -> str | None:
        trained = config.optimizer.embedding.of(table)
        return None if trained is None else ROW_OPTIMIZERS[trained.name].__name__

    return name_of


def agree_on_kernels(classes: Sequence[KernelClass]) -> None:
    """Lets processes that run one program use only the kernels that all of them chose. Every process calls it.

    Args:
      classes: As ``check_before_training`` returned them, the same in every process.
    """
    if not jax.distributed.is_initialized() or jax.default_backend() != "gpu":
        return
    from jax.experimental import multihost_utils

    # Also without classes, as where JREC_KERNELS is set in one process and not in others: all must gather.
    known = verdicts.local_verdicts()
    chosen = [kernel_class in known and known[kernel_class].choice == "pallas" for kernel_class in classes]
    own = np.array([len(classes), *chosen], np.int32)
    every = np.atleast_2d(multihost_utils.process_allgather(np.pad(own, (0, _ROOM))[:_ROOM]))
    same = bool(np.all(every[:, 0] == len(classes)))
    verdicts.agree(
        kernel_class
        for kernel_class, all_chose in zip(classes, every.min(axis=0)[1:], strict=False)
        if same and all_chose
    )


def keep_kernels(config: TrainConfig, classes: Sequence[KernelClass], *, resume: bool, overwrite: bool) -> None:
    """Lets a resumed run take the kernels that it began with, since kernels and XLA add in different orders.

    A kernel that the run began with but that its verdict now rejects, as on another GPU, is not used: a message says
    so, and XLA computes instead, so bits may differ from an uninterrupted run's.

    Args:
      config: The run's configuration.
      classes: As ``check_before_training`` returned them.
      resume: Whether the run goes on.
      overwrite: Whether it replaces another.

    Raises:
      ConfigError: If the file of the run's kernels is damaged.
    """
    if not classes:
        return
    folder = pathlib.Path(config.out)
    path, taken = folder / KERNELS_FILE, verdicts.let_in(classes)
    if resume and began(folder):
        if not path.is_file():
            return
        remedy = "delete it, and the run goes on with the kernels that are fastest now"
        content = load_json(path, kind="jrec-run-kernels", version=1, error=ConfigError, remedy=remedy)
        before = frozenset(map(str, content.get("taken", ())))
        lost = sorted(before - {str(kernel_class) for kernel_class in taken})
        if lost:
            _say(
                f"this run began with GPU kernels that are not the choice here: {', '.join(lost)}. XLA computes"
                " instead, so bits may differ from an uninterrupted run's; JREC_KERNELS=pallas takes them"
                " all the same"
            )
        verdicts.agree(kernel_class for kernel_class in taken if str(kernel_class) in before)
    elif (overwrite or not began(folder)) and (not jax.distributed.is_initialized() or jax.process_index() == 0):
        folder.mkdir(parents=True, exist_ok=True)
        save_json(path, {"taken": sorted(map(str, taken))}, kind="jrec-run-kernels", version=1)


_ROOM = 256  # classes of a model, far above any; of one size in all processes


def _say(line: str) -> None:
    print(f"jrec: {line}", file=sys.stderr)
