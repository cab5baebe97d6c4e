"""Verdicts on the GPU kernels: where each one was found right and faster than XLA, and what is chosen from that.

``jrec kernels check`` (``jrec.selfcheck``) compares kernels with XLA in a process of its own and keeps a verdict for
each kernel class in the user's cache folder: one file for each GPU, driver, JAX and state of jrec's sources. Whatever
has no verdict is computed by XLA.

``JREC_KERNELS`` overrides the choice, for ops whose implementation nobody named: "auto" goes by the verdicts, "xla"
and "pallas" always take that one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Literal, Self, get_args

import jax
from jax._src import xla_bridge

from jrec.environment import cache_folder
from jrec.errors import ConfigError, JrecError
from jrec.files import load_json, save_json
from jrec.json_values import JsonObject

Choice = Literal["xla", "pallas"]
Mode = Literal["auto", "xla", "pallas"]

KERNELS_VARIABLE = "JREC_KERNELS"
COMMAND = "jrec kernels check"
DRIVER = pathlib.Path("/proc/driver/nvidia/version")

_FORMAT, _VERSION = "jrec-kernel-verdicts", 2
_MODES: tuple[Mode, ...] = get_args(Mode)
logger = logging.getLogger("jrec")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelClass:
    """What one verdict covers: all calls for which the same code is compiled, but for sizes.

    Each dim compiles to code of its own (vector width, masks, registers), so a verdict on one says nothing about
    another, and ``dim`` is the dim itself.

    Attributes:
      kernel: "gather_reduce", "casted_update", "row_update", "tensor_cast" or "tt_products".
      dtype: The dtype of the rows that are read; "int32" for a cast.
      dim: Elements of a stored row, padding included; 1 for a cast; (height, rank, columns, right rank) for products
        of tensor-train levels.
      optimizer: The row optimizer's class name, for updates.
    """

    kernel: str
    dtype: str
    dim: int | tuple[int, ...]
    optimizer: str | None = None

    def __str__(self) -> str:
        dim = str(self.dim) if isinstance(self.dim, int) else "x".join(map(str, self.dim))
        return " ".join([self.kernel, self.dtype, dim, *([self.optimizer] if self.optimizer else [])])

    @classmethod
    def parse(cls, text: str) -> Self:
        """The class that ``str`` gave.

        Raises:
          ValueError: If the text is no kernel class.
        """
        kernel, dtype, dim, *optimizer = text.split()
        dims = tuple(map(int, dim.split("x")))
        (name,) = optimizer or (None,)
        return cls(kernel=kernel, dtype=dtype, dim=dims[0] if len(dims) == 1 else dims, optimizer=name)


CAST = KernelClass(kernel="tensor_cast", dtype="int32", dim=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check found of one kernel class.

    Attributes:
      right: Whether all results were XLA's, within tolerance, and two runs gave the same bits.
      ratio: The kernel's time by XLA's; below 1 the kernel is faster. None where it is not right or was not timed.
      why: Why the kernel is not used, where the ratio does not say it.
    """

    right: bool
    ratio: float | None = None
    why: str = ""

    @property
    def choice(self) -> Choice:
        """The kernel where it is right and was measured faster, else XLA."""
        return "pallas" if self.right and self.ratio is not None and self.ratio < 1 else "xla"

    def __str__(self) -> str:
        return self.why if self.ratio is None else f"{self.ratio:.2f} of XLA's time"


def local_machine() -> str | None:
    """What verdicts hold for in this process: its GPU, driver, versions, and the state of jrec's sources.

    None where JAX runs on no NVIDIA GPU, has not started yet (which this does not make it do), or the driver does not
    tell its version.
    """
    return _started_machine() if xla_bridge.backends_are_initialized() else None


@functools.cache
def _started_machine() -> str | None:
    from jrec import __version__

    try:
        gpu = jax.local_devices(backend="cuda")[0].device_kind
        # NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ...
        driver = re.search(r"\s(\d+\.\d[\d.]*)\s", DRIVER.read_text())
    except (RuntimeError, OSError):  # JAX runs on other platforms only, or the driver tells nothing
        return None
    if driver is None:
        return None
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "jaxlib"))
    return f"{gpu}, driver {driver[1]}, {versions}, jrec {__version__} ({sources_digest()})"


@functools.cache
def sources_digest() -> str:
    """A digest of the files that make up the kernels, XLA's side of the comparison, and the comparison itself."""
    root = pathlib.Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(
        path for part in ("pallas/**", "ops/**", "selfcheck/**", ".") for path in root.glob(f"{part}/*.py")
    ):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def verdict_file(machine: str) -> pathlib.Path:
    """Where a machine's verdicts are kept."""
    return cache_folder() / f"kernels-{hashlib.blake2b(machine.encode(), digest_size=8).hexdigest()}.json"


class _DamagedError(JrecError):
    pass


def read_verdicts(machine: str) -> dict[KernelClass, Verdict]:
    """A machine's verdicts; a file that is damaged is as none, with one warning in the log."""
    path = verdict_file(machine)
    if not path.exists():
        return {}
    remedy = f"run `{COMMAND}`, which writes it anew"
    try:
        content = load_json(path, kind=_FORMAT, version=_VERSION, error=_DamagedError, remedy=remedy, sealed=True)
        if content["machine"] != machine:
            raise _DamagedError(f"{path} is of another machine; {remedy}")
        return {KernelClass.parse(text): Verdict(**fields) for text, fields in content["kernels"].items()}
    except (_DamagedError, ValueError, TypeError, KeyError, AttributeError) as error:
        _warn_once(f"verdicts on GPU kernels are ignored, and XLA computes instead: {error}")
        return {}


def keep_verdicts(machine: str, verdicts: Mapping[KernelClass, Verdict]) -> None:
    """Writes a machine's verdicts, which replace those in its file.

    Raises:
      OSError: If the file cannot be written.
    """
    path = verdict_file(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    kernels = {str(kernel_class): dataclasses.asdict(verdict) for kernel_class, verdict in verdicts.items()}
    content = {"machine": machine, "kernels": kernels}
    save_json(path, content, kind=_FORMAT, version=_VERSION, sealed=True)
    reread()


_known = functools.cache(read_verdicts)


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning(line)


_agreed: frozenset[KernelClass] | None = None
_choices: dict[KernelClass, Choice] = {}
_said_unchecked: list[KernelClass] = []


def kernels_mode() -> Mode:
    """What JREC_KERNELS says.

    Raises:
      ConfigError: If it says something else than it may.
    """
    said = os.environ.get(KERNELS_VARIABLE) or "auto"
    for mode in _MODES:
        if said == mode:
            return mode
    raise ConfigError(f"{KERNELS_VARIABLE} is {said!r} in the environment; set it to one of {', '.join(_MODES)}")


def gpu_choice(kernel: KernelClass) -> Choice:
    """Which implementation a program that is traced now gets on NVIDIA GPUs, where nobody named one.

    The verdict on this process's GPU decides; where JAX runs on none (a program compiled for one elsewhere), XLA,
    unless ``JREC_KERNELS`` says otherwise. Never starts JAX's backend.

    Raises:
      ConfigError: If JREC_KERNELS has an unknown value.
    """
    mode = kernels_mode()
    if mode != "auto":
        _choices[kernel] = mode
        return mode
    machine = local_machine()
    if machine is None:
        return "xla"
    if kernel not in _known(machine) and not _said_unchecked:  # the first class without a verdict speaks for all
        _said_unchecked.append(kernel)
        logger.warning(
            f"jrec's GPU kernel {str(kernel)!r} was never checked on this machine ({machine}), so XLA computes instead,"
            f" as for any other without a verdict; `{COMMAND}` checks and times them, once"
        )
    chosen: Choice = "pallas" if kernel in let_in([kernel]) else "xla"
    if chosen == "pallas" and _agreed is None and jax.process_count() > 1:
        _warn_once(
            "GPU kernels are not used in this program of several processes, which must all choose the same ones; call"
            f" jrec.ops.verdicts.agree with the classes that all of them may use, or set {KERNELS_VARIABLE}=pallas"
        )
        chosen = "xla"
    _choices[kernel] = chosen
    return chosen


def let_in(classes: Iterable[KernelClass]) -> frozenset[KernelClass]:
    """The classes whose verdict on the local GPU, and all processes' agreement (see ``agree``), let kernels run."""
    machine = local_machine()
    known = {} if machine is None else _known(machine)
    taken = frozenset(one for one in classes if one in known and known[one].choice == "pallas")
    return taken if _agreed is None else taken & _agreed


def choices() -> dict[str, JsonObject]:
    """For a run's report: by class that was traced, what ``gpu_choice`` answered and the verdict behind it."""
    machine = local_machine()
    known = {} if machine is None else _known(machine)
    unchecked = Verdict(right=False, why="unchecked")
    return {
        str(kernel_class): {"chosen": chosen, **dataclasses.asdict(known.get(kernel_class, unchecked))}
        for kernel_class, chosen in _choices.items()
    }


def agree(classes: Iterable[KernelClass] | None) -> None:
    """Lets kernels of only these classes be chosen; None lifts that.

    Processes that run one program together must trace the same one: they call this with what all of them chose.
    """
    global _agreed
    _agreed = None if classes is None else frozenset(classes)


def reread() -> None:
    """Forgets what was read and chosen, and what was said once; for processes that just checked, and for tests."""
    _known.cache_clear()
    _warn_once.cache_clear()
    _said_unchecked.clear()
    _choices.clear()
