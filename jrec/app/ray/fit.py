"""``fit``: a run of ``jrec train`` by Ray Train's workers, which restart it from its last checkpoint when one dies."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypedDict

from jrec.app.ray.executor import require_ray
from jrec.errors import ConfigError, ProcessError
from jrec.outputs import check_local


class _Call(TypedDict):
    """What a worker is told.

    Attributes:
      words: Arguments of ``jrec train``.
      folder: The folder that it runs in.
      devices: Devices of a process.
      gpus: Whether these are GPUs.
    """

    words: list[str]
    folder: str
    devices: int
    gpus: bool


def fit(
    config: str,
    overrides: Sequence[str] = (),
    *,
    workers: int | tuple[int, int],
    devices: int = 1,
    gpus: bool = False,
    restarts: int = 3,
    resources: Mapping[str, float] | None = None,
) -> pathlib.Path:
    """Trains on a Ray cluster: every worker is a process of ``jrec train --resume``.

    All workers see the same files under the same paths, the folder where this is called among them. A worker that dies
    ends the others; Ray starts all of them anew, and they go on from the last checkpoint. Uses the cluster that the
    process is connected to, the one at ``RAY_ADDRESS``, or else starts one on this machine.

    Args:
      config: What ``jrec train`` takes: a TOML file, or the name of one that comes with jrec.
      overrides: ``section.key=value``; not ``mesh.devices``, which is ``workers * devices``.
      workers: How many processes; or the fewest and the most, to go on with as many as the cluster has room for.
      devices: Devices of each process; on CPUs more than one are virtual.
      gpus: Whether the devices are GPUs, which Ray then reserves.
      restarts: How often Ray starts the workers anew.
      resources: What Ray reserves for each worker besides GPUs; by default one CPU.

    Returns:
      The run folder, with the report.

    Raises:
      ConfigError: If the configuration is wrong or Ray is not installed.
      OutputError: If ``out`` is a URI.
      ProcessError: If the run has failed more often than ``restarts``.
    """
    from jrec.app.config import load_config

    if set_by_hand := [one for one in overrides if one.partition("=")[0].strip() == "mesh.devices"]:
        raise ConfigError(f"{set_by_hand[0]} is given, but mesh.devices is workers * devices here; leave it out")
    run = load_config(config, list(overrides))
    check_local(run.out)
    train, on_jax = require_ray("ray.train"), require_ray("ray.train.v2.jax")
    folder = pathlib.Path.cwd() / run.out
    reserved = {"CPU": 1, **(resources or {}), **({"GPU": devices} if gpus else {})}
    call: _Call = {"words": [config, *overrides], "folder": str(pathlib.Path.cwd()), "devices": devices, "gpus": gpus}
    trainer = on_jax.JaxTrainer(
        _work,
        train_loop_config=call,
        # jrec joins its processes itself, once it has compared what they are about to run.
        jax_config=on_jax.JaxConfig(),
        scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=gpus, resources_per_worker=reserved),
        run_config=train.RunConfig(
            name=f"{folder.name}.ray",  # Ray's own records, beside the run folder
            storage_path=str(folder.parent),
            failure_config=train.FailureConfig(max_failures=restarts),
        ),
    )
    try:
        trainer.fit()
    except require_ray("ray.train.v2.api.exceptions").TrainingFailedError as error:
        why = " ".join(str(getattr(error, "worker_failures", None) or error).split())[:500]
        raise ProcessError(f"the run in {folder} has failed {restarts + 1} times; at last: {why}") from error
    return folder


def _work(call: _Call) -> None:
    """One worker: meets the others and runs ``jrec train`` in a process of its own.

    Ray Train calls this in a thread, where JAX's flags cannot be set any more and signals not be handled.
    """
    train, util, collective = (require_ray(f"ray.{name}") for name in ("train", "util", "train.collective"))
    context = train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    own = f"{util.get_node_ip_address()}:{_free_port()}" if rank == 0 else None
    coordinator = collective.broadcast_from_rank_zero(own)
    command = [sys.executable, "-m", "jrec.app.ray.worker", "train", *call["words"]]
    command += [f"mesh.devices={workers * call['devices']}", "--resume"]
    if workers > 1:
        command += ["--coordinator", str(coordinator), "--processes", str(workers), "--process", str(rank)]
    environment = dict(os.environ)
    if not call["gpus"]:
        environment["JAX_PLATFORMS"] = "cpu"
        flag = f"--xla_force_host_platform_device_count={call['devices']}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
    # Nothing is written to the pipe: it closes with this process, however that ends, and the child ends then.
    child = subprocess.Popen(command, cwd=call["folder"], env=environment, stdin=subprocess.PIPE)
    if code := child.wait():
        raise ProcessError(f"process {rank} of {workers} ended with exit code {code}; its output is in Ray's logs")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
