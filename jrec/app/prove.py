"""Trains the same steps wherever rows may lie, and compares what comes out, to the last bit.

Each way is a run of `jrec train` in a process of its own, on as many virtual devices of the CPU as it says. What has to
be equal to the bit is a row in host memory beside one on the device, and a run that was killed and resumed beside one
that was not. Several devices add float32 numbers in another order than one does: their results are close.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

import numpy as np

from jrec.app.config import TrainConfig, save_config
from jrec.app.report.logs import METRICS_FILE, read_records
from jrec.app.run_record import CHECKPOINT_FOLDER, manifests
from jrec.checkpoint import Saved
from jrec.errors import ConfigError, JrecError
from jrec.progress import Progress

PIECE = 1 << 18  # rows that are read at a time
WITHIN = 2e-2
"""The greatest difference of a loss, by the loss, that the order of float32 sums is taken for."""
FIRST, SAME, CLOSE = "the others are beside it", "the same bits", "close"
_QUIET = (
    "log.every_steps=1", "log.tensorboard=false", "log.to=[]", "log.progress='off'", "log.trace=false",
    "evaluate.every_steps=0", "evaluate.early_stopping.patience=0", "evaluate.final_splits=[]",
    "evaluate.baselines='off'", "checkpoint.keep_best=false", "checkpoint.keep=2", "init_from=''",
)  # fmt: skip
_HARDWARE = """\
devices = {devices}
memory = "1TB"
lookup = "20GB/s"
within = "5GB/s"
all_reduce = "5GB/s"
"""


class ProofError(JrecError):
    """A way to train that could not be tried, or whose result is another one than it must be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train the same steps.

    Attributes:
      name: As the table names it.
      keys: Overrides of the configuration.
      devices: How many virtual devices.
      killed: Whether the run is killed on the way, and resumed.
      planned: Whether rows lie as a plan of `jrec plan` says.
      like: The way whose bits it has to have; "" for one whose sums are in an order of its own.
    """

    name: str
    keys: tuple[str, ...] = ()
    devices: int = 1
    killed: bool = False
    planned: bool = False
    like: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a way came to.

    Attributes:
      way: The way.
      losses: (steps,) float64, the loss of each step.
      digests: Short SHA-256 of the "losses", the "rows" of all tables, and the "dense" arrays.
      loss_difference: The greatest relative difference of a loss from the first way's.
      row_difference: The greatest difference of an element of a row from the first way's, by the greatest element.
      seconds: How long its processes took.
    """

    way: Way
    losses: np.ndarray
    digests: dict[str, str]
    loss_difference: float
    row_difference: float
    seconds: float


def ways(config: TrainConfig, devices: Sequence[int]) -> list[Way]:
    """The ways that a configuration can be trained in, the first on one device.

    Args:
      config: The run's configuration.
      devices: Numbers of devices.

    Raises:
      ConfigError: If a number of devices does not divide the batch, or the configuration is of packs.
    """
    if config.schedule != "plain":
        raise ConfigError(f"schedule is {config.schedule!r}, but jrec prove trains by 'plain'; leave it out")
    if odd := [number for number in devices if config.data.batch_size % (number * config.data.micro_batches)]:
        raise ConfigError(
            f"data.batch_size is {config.data.batch_size}, which {odd[0]} devices cannot share"
            f" (data.micro_batches is {config.data.micro_batches}); choose another number of --devices"
        )
    first = Way(name="one device", keys=("tables.tier='sharded'",))
    chosen_ways = [
        first,
        dataclasses.replace(first, name="one device, killed and resumed", killed=True, like=first.name),
        Way(name="rows in host memory", keys=("tables.tier='host'",), like=first.name),
    ]
    for number in sorted(set(devices) - {1}):
        on_all = f"mesh.devices={number}"
        several = Way(name=f"{number} devices", keys=(*first.keys, on_all), devices=number)
        name = several.name
        chosen_ways += [
            several,
            dataclasses.replace(several, name=f"{name}, killed and resumed", killed=True, like=name),
            Way(name=f"{name}, rows in host memory", keys=("tables.tier='host'", on_all), devices=number, like=name),
        ]
        if _plannable(config):
            chosen_ways.append(dataclasses.replace(several, name=f"{name}, by a plan", planned=True))
    return chosen_ways


def prove(
    config: TrainConfig,
    path: pathlib.Path,
    overrides: Sequence[str],
    folder: pathlib.Path,
    *,
    steps: int,
    devices: Sequence[int],
    progress: Progress | None = None,
) -> Iterator[Result]:
    """Trains in every way, and compares each with the first.

    Args:
      config: The configuration.
      path: Its file.
      overrides: What is changed in it.
      folder: An empty folder for the runs.
      steps: How many steps each takes.
      devices: Numbers of devices.
      progress: Shows how many ways are done.

    Yields:
      What each came to, the first way first.

    Raises:
      ProofError: If a way cannot be trained.
      ConfigError: As ``ways``.
    """
    chosen = ways(config, devices)
    base = [*overrides, *_QUIET, f"max_steps={steps}", f"epochs={config.epochs}", "plan=''", "mesh.devices=0"]
    base.append(f"checkpoint.every_steps={max(1, steps // 4)}")
    first: Result | None = None
    with (progress or Progress(False)).stage("prove", len(chosen)) as advance:
        for number, way in enumerate(chosen):
            out, begin = folder / f"{number:02}", time.perf_counter()
            keys = [*base, *way.keys, *_planned(way, config, folder), f"out={str(out)!r}"]
            _train(path, keys, way, out)
            result = _result(way, out, None if first is None else folder / "00", first, time.perf_counter() - begin)
            first = first or result
            advance(number + 1)
            yield result


def verdict(result: Result, before: dict[str, Result]) -> str:
    """Whether a way came to what it has to: ``FIRST``, ``SAME``, ``CLOSE``, or what is wrong.

    Args:
      result: What it came to.
      before: What the ways before it came to, by name.
    """
    if not before:
        return FIRST
    if not (like := result.way.like):
        return CLOSE if result.loss_difference <= WITHIN else "another model"
    return SAME if result.digests == before[like].digests else f"not the bits of {like!r}"


def holds(verdict: str) -> bool:
    """Whether a verdict is as it has to be."""
    return verdict in (FIRST, SAME, CLOSE)


def _plannable(config: TrainConfig) -> bool:
    try:
        config.model.of_kind.check_plan("it")
    except ConfigError:
        return False
    return True


def _planned(way: Way, config: TrainConfig, folder: pathlib.Path) -> list[str]:
    """The override that names the way's plan, which is made here."""
    if not way.planned:
        return []
    hardware, plan = folder / f"{way.devices}.toml", folder / f"{way.devices}.plan"
    hardware.write_text(_HARDWARE.format(devices=way.devices), encoding="utf-8")
    save_config(config, own := folder / "config.toml")
    _run(["plan", config.data.path, "--hardware", str(hardware), "--config", str(own), "--out", str(plan)], way)
    return [f"plan={str(plan)!r}"]


def _train(path: pathlib.Path, keys: Sequence[str], way: Way, out: pathlib.Path) -> None:
    arguments = ["train", str(path), *keys]
    if way.killed:
        _killed(arguments, way, out)
        arguments.append("--resume")
    _run(arguments, way)


def _killed(arguments: Sequence[str], way: Way, out: pathlib.Path) -> None:
    """Begins a run and kills it once it has a checkpoint, so that the rest is trained after it was resumed."""
    process, errors = _start(arguments, way)
    while process.poll() is None:
        if manifests(out / CHECKPOINT_FOLDER):
            # No handler sees this one: the resumed run has only what was on disk.
            process.send_signal(signal.SIGKILL)
            process.wait()
            errors.close()
            return
        time.sleep(0.002)
    _check(process, errors, way)
    raise ProofError(f"{way.name}: the run had taken all its steps before it could be killed; give it more --steps")


def _run(arguments: Sequence[str], way: Way) -> None:
    _check(*_start(arguments, way), way)


def _start(arguments: Sequence[str], way: Way) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """The process of a command, and what it writes to its standard error."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={way.devices}")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, "-m", "jrec", *arguments]
    # A file: of a pipe that nobody reads while it trains, it would wait for room after 64 KiB.
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (``_check`` closes it)
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors), errors


def _check(process: subprocess.Popen[bytes], errors: IO[bytes], way: Way) -> None:
    process.wait()
    with errors:
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if process.returncode:
        lines = said.strip().splitlines() or [f"its process ended with code {process.returncode}"]
        raise ProofError(f"{way.name}: {lines[-1].removeprefix('jrec: ')}")


def _result(way: Way, out: pathlib.Path, first: pathlib.Path | None, before: Result | None, seconds: float) -> Result:
    records = read_records(out / METRICS_FILE)
    losses = np.array([record["loss"] for record in records if record["split"] == "train"], np.float64)
    saved = _saved(out)
    other = None if first is None else _saved(first)
    digests, difference = _compared(saved, other)
    digests = {"losses": _short(hashlib.sha256(losses.tobytes()).hexdigest()), **digests}
    apart = 0.0
    if before is not None:
        if len(losses) != len(before.losses):
            raise ProofError(f"{way.name}: {len(losses)} steps were taken, but {len(before.losses)} on one device")
        apart = float(np.max(np.abs(losses - before.losses) / np.maximum(np.abs(before.losses), 1e-12), initial=0))
    return Result(
        way=way, losses=losses, digests=digests, loss_difference=apart, row_difference=difference, seconds=seconds
    )


def _saved(out: pathlib.Path) -> Saved:
    return Saved(manifests(out / CHECKPOINT_FOLDER)[-1].parent)


def _compared(saved: Saved, other: Saved | None) -> tuple[dict[str, str], float]:
    """Digests of the rows and of the dense arrays, and the greatest difference of an element of a row."""
    rows, dense, difference, greatest = hashlib.sha256(), hashlib.sha256(), 0.0, 0.0
    for name in sorted(saved.manifest.tables):
        count = saved.manifest.tables[name].shape.rows
        for begin in range(0, count, PIECE):
            numbers = np.arange(begin, min(begin + PIECE, count))
            values = saved.table(name).read("values", numbers)
            rows.update(values.tobytes())
            if other is not None:
                theirs = other.table(name).read("values", numbers).astype(np.float64)
                difference = max(difference, float(np.max(np.abs(values.astype(np.float64) - theirs), initial=0)))
                greatest = max(greatest, float(np.max(np.abs(theirs), initial=0)))
    for path, array in sorted(_weights(saved).items()):
        dense.update(path.encode() + array.tobytes())
    digests = {"rows": _short(rows.hexdigest()), "dense": _short(dense.hexdigest())}
    return digests, difference / greatest if greatest else 0.0


def _weights(saved: Saved) -> dict[str, np.ndarray]:
    """The dense arrays that every way has: parameters and their optimizer's slots."""
    return {path: np.asarray(array) for path, array in saved.arrays().items() if path.startswith("state")}


def _short(digest: str) -> str:
    return digest[:12]


def pairs(results: Iterable[Result]) -> Iterator[tuple[Result, str]]:
    """Each result with its verdict."""
    before: dict[str, Result] = {}
    for result in results:
        yield result, verdict(result, before)
        before[result.way.name] = result
