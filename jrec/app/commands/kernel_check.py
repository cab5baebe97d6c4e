"""What ``jrec train`` does about GPU kernels before its first step: check what was never checked, agree, keep to it."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

import jax
import numpy as np

from jrec.app.config import TrainConfig
from jrec.app.run_folder import KERNELS_FILE
from jrec.app.run_record import TrainedRun
from jrec.errors import ConfigError, JrecError
from jrec.files import load_json, save_json
from jrec.ops import verdicts
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.verdicts import KERNELS_VARIABLE, KernelClass, kernels_mode, local_machine, read_verdicts
from jrec.row_optimizers import ROW_OPTIMIZERS
from jrec.selfcheck.check import Wanted, classes_of, prove


def prepare_kernels(config: TrainConfig, layout: EmbeddingLayout, *, resume: bool, overwrite: bool) -> None:
    """Checks the kernels that a run's model needs and that nobody checked on this GPU, and lets those in that all take.

    Every process of a run calls it. It does nothing without a GPU, or where ``tables.implementation`` has chosen
    already. A check that fails is no reason not to train: XLA then computes.

    Args:
      config: The run's configuration.
      layout: The model's tables.
      resume: Whether the run goes on.
      overwrite: Whether it replaces another.

    Raises:
      ConfigError: If JREC_KERNELS has an unknown value, or the file of the run's kernels is damaged.
    """
    mode = kernels_mode()
    if jax.default_backend() != "gpu":
        return
    gpu = jax.local_devices()[0]
    if str(getattr(gpu, "compute_capability", "")).startswith("gfx"):  # JAX's default backend is "gpu" with ROCm, too
        _say(f"{gpu.device_kind} is an AMD GPU: XLA computes everything on it, and nobody has tried jrec there yet")
        return
    if config.tables.implementation != "auto":
        return

    def optimizer(table: str) -> str | None:
        trained = config.optimizer.embedding.of(table)
        return None if trained is None else ROW_OPTIMIZERS[trained.name].__name__

    wanted = classes_of(layout, optimizer=optimizer, batch_size=config.data.batch_size)
    if mode == "auto":
        _check(wanted)
    _agree(list(wanted))
    if mode == "auto":
        _keep(pathlib.Path(config.out), list(wanted), resume=resume, overwrite=overwrite)


def _check(wanted: Wanted) -> None:
    machine = local_machine()
    if machine is None:
        _say("GPU kernels are not used, since no version of NVIDIA's driver is known")
        return
    unchecked = wanted.keys() - read_verdicts(machine).keys()
    if not unchecked:
        return
    _say(
        f"checking {len(unchecked)} GPU kernels on {machine} before their first use, which takes a few"
        f" minutes at most (once; {KERNELS_VARIABLE}=xla goes without)"
    )
    try:
        verdicts = prove(wanted, machine)
    except (JrecError, OSError) as error:
        _say(f"GPU kernels could not be checked, so XLA computes: {error}")
        return
    rejected: dict[str, list[str]] = {}
    for one, verdict in verdicts.items():
        if verdict.choice == "xla":
            rejected.setdefault(str(verdict), []).append(str(one))
    taken = sum(verdict.choice == "pallas" for verdict in verdicts.values())
    reasons = [f"{', '.join(classes)}: {why}" for why, classes in rejected.items()]
    _say("; ".join([f"{taken} of {len(verdicts)} are right and faster than XLA", *reasons]))


def _agree(classes: Sequence[KernelClass]) -> None:
    """Lets processes that run one program use only the kernels that all of them chose."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    mode, taken = kernels_mode(), verdicts.let_in(classes)
    own = [mode == "pallas" or (mode == "auto" and one in taken) for one in classes]
    every = np.atleast_2d(multihost_utils.process_allgather(np.array(own)))
    verdicts.agree(one for one, all_chose in zip(classes, every.all(axis=0), strict=True) if all_chose)


def _keep(folder: pathlib.Path, classes: Sequence[KernelClass], *, resume: bool, overwrite: bool) -> None:
    """Lets a resumed run take the kernels that it began with, since kernels and XLA add in different orders.

    A kernel that the run began with but that its verdict now rejects, as on another GPU, is not used: a message says
    so, and XLA computes instead, so bits may differ from an uninterrupted run's.
    """
    path, taken, began = folder / KERNELS_FILE, verdicts.let_in(classes), TrainedRun(folder).began
    if resume and began:
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
    elif (overwrite or not began) and jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_json(path, {"taken": sorted(map(str, taken))}, kind="jrec-run-kernels", version=1)


def _say(line: str) -> None:
    print(f"jrec: {line}", file=sys.stderr)
