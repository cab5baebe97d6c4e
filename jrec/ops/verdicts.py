"""Verdicts on the GPU kernels: where each one was found right and faster than XLA, and what is chosen from that.

``jrec kernels check`` (``jrec.selfcheck``) runs every kernel on small cases in processes of their own and keeps what it
found in one file of the user's cache folder. This module only reads that file. A verdict holds for one GPU, driver,
JAX and state of jrec's kernels; anything else has none, and is computed by XLA.

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
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self, get_args

import jax

from jrec.environment import cache_folder
from jrec.errors import ConfigError, JrecError
from jrec.files import load_json
from jrec.ops.local_gpu import Gpu, local_gpu

Choice = Literal["xla", "pallas"]
Mode = Literal["auto", "xla", "pallas"]
Reason = Literal["faster", "slower", "wrong", "crashed", "timed out", "does not compile", "not covered", "not timed"]

KERNELS_VARIABLE = "JREC_KERNELS"
FILE = "kernels.json"
FORMAT, VERSION = "jrec-kernel-verdicts", 1
COMMAND = "jrec kernels check"

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
      kernel_class: The class.
      right: Whether all results were within tolerance of float64 and of XLA's, and two runs gave the same bits.
      reason: "faster" and "slower" of a right kernel; what was wrong of any other.
      kernel_seconds: Median device seconds of one call of the kernel in the timed cases, or None.
      xla_seconds: The same of XLA.
      error: The largest error found, as a fraction of what is tolerated, or None.
      detail: What went wrong, for people.
      date: When it was found, ISO 8601.
    """

    kernel_class: KernelClass
    right: bool
    reason: Reason
    kernel_seconds: float | None = None
    xla_seconds: float | None = None
    error: float | None = None
    detail: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if self.reason not in get_args(Reason):
            raise ValueError(f"reason={self.reason!r} is unknown; choose one of {', '.join(get_args(Reason))}")
        if self.right != (self.reason in ("faster", "slower", "not timed")):
            raise ValueError(f"a verdict of right={self.right} cannot have the reason {self.reason!r}")

    @property
    def choice(self) -> Choice:
        """The kernel where it is right and was measured faster, else XLA."""
        return "pallas" if self.right and self.reason == "faster" else "xla"

    def to_dict(self) -> dict[str, Any]:
        """In JSON types."""
        return {**dataclasses.asdict(self), "kernel_class": str(self.kernel_class)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The verdict that ``to_dict`` gave.

        Raises:
          ValueError, TypeError, KeyError: If the content is none.
        """
        kernel_class = KernelClass.parse(content["kernel_class"])
        return cls(**{**content, "kernel_class": kernel_class})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What verdicts hold for.

    Attributes:
      gpu: The device's name.
      driver: NVIDIA's driver version.
      jax: The version of jax.
      jaxlib: The version of jaxlib.
      jrec: The version of jrec.
      sources: A digest of the sources of jrec's kernels and ops, which change between releases.
    """

    gpu: str
    driver: str
    jax: str
    jaxlib: str
    jrec: str
    sources: str

    @classmethod
    def of(cls, gpu: Gpu) -> Self:
        """The present installation on that GPU."""
        from jrec import __version__

        jax, jaxlib = importlib.metadata.version("jax"), importlib.metadata.version("jaxlib")
        return cls(gpu=gpu.kind, driver=gpu.driver, jax=jax, jaxlib=jaxlib, jrec=__version__, sources=sources_digest())


@functools.cache
def sources_digest() -> str:
    """Of the files that kernels and XLA's side of the comparison are made from: ``jrec/pallas`` and ``jrec/ops``."""
    root = pathlib.Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted([*root.glob("pallas/**/*.py"), *root.glob("ops/**/*.py")]):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def verdict_file() -> pathlib.Path:
    """Where verdicts are kept."""
    return cache_folder() / FILE


class DamagedVerdictsError(JrecError):
    """A file of verdicts that cannot be read."""


def read_all(path: pathlib.Path) -> dict[Machine, dict[KernelClass, Verdict]]:
    """The verdicts of every machine; none where there is no file.

    Raises:
      DamagedVerdictsError: If the file cannot be read, or is no file of verdicts.
    """
    if not path.exists():
        return {}
    remedy = f"run `{COMMAND}`, which writes it anew"
    content = load_json(path, kind=FORMAT, version=VERSION, error=DamagedVerdictsError, remedy=remedy)
    try:
        by_machine: dict[Machine, dict[KernelClass, Verdict]] = {}
        for entry in content["machines"]:
            verdicts = [Verdict.from_dict(verdict) for verdict in entry["verdicts"]]
            by_machine[Machine(**entry["machine"])] = {verdict.kernel_class: verdict for verdict in verdicts}
        return by_machine
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedVerdictsError(f"{path} is damaged ({error!r}); {remedy}") from error


def read_verdicts(path: pathlib.Path, machine: Machine) -> dict[KernelClass, Verdict]:
    """A machine's verdicts; a file that cannot be read is as none, with one warning in the log."""
    try:
        return read_all(path).get(machine, {})
    except DamagedVerdictsError as error:
        _warn_once(f"verdicts on GPU kernels are ignored, and XLA computes instead: {error}")
        return {}


@functools.cache
def _known(path: pathlib.Path, gpu: Gpu) -> Mapping[KernelClass, Verdict]:
    return read_verdicts(path, Machine.of(gpu))


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

    The local GPU's verdict decides; where no GPU is (a program compiled for one elsewhere), XLA, unless
    ``JREC_KERNELS`` says otherwise. Never starts JAX's backend.

    Raises:
      ConfigError: If JREC_KERNELS has an unknown value.
    """
    mode = kernels_mode()
    if mode != "auto":
        _choices[kernel] = mode
        return mode
    gpu = local_gpu()
    if gpu is None:
        return "xla"
    if kernel not in _known(verdict_file(), gpu):
        _say_unchecked(kernel, gpu)
    chosen: Choice = "pallas" if kernel in let_in([kernel]) else "xla"
    if chosen == "pallas" and _agreed is None and _one_of_many():
        _warn_once(
            "GPU kernels are not used in this program of several processes, which must all choose the same ones; call"
            f" jrec.ops.verdicts.agree with the classes that all of them may use, or set {KERNELS_VARIABLE}=pallas"
        )
        chosen = "xla"
    _choices[kernel] = chosen
    return chosen


def let_in(classes: Iterable[KernelClass]) -> frozenset[KernelClass]:
    """The classes whose verdict on the local GPU, and all processes' agreement (see ``agree``), let kernels run."""
    known = local_verdicts()
    taken = frozenset(
        kernel_class for kernel_class in classes if kernel_class in known and known[kernel_class].choice == "pallas"
    )
    return taken if _agreed is None else taken & _agreed


def _one_of_many() -> bool:
    """Whether the program runs in several processes; only called where a GPU is, whose backend then runs or will."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _say_unchecked(kernel: KernelClass, gpu: Gpu) -> None:
    """Once a process: the first class without a verdict speaks for all."""
    if _said_unchecked:
        return
    _said_unchecked.append(kernel)
    logger.warning(
        f"jrec's GPU kernel {str(kernel)!r} was never checked on this {gpu.kind} with this driver and these"
        f" versions, so XLA computes instead, as for any other without a verdict; `{COMMAND}` checks and times them,"
        " once"
    )


def local_verdicts() -> Mapping[KernelClass, Verdict]:
    """The verdicts that hold for the local GPU; none without one."""
    gpu = local_gpu()
    return {} if gpu is None else _known(verdict_file(), gpu)


def choices() -> Mapping[KernelClass, Choice]:
    """What ``gpu_choice`` answered in this process, for programs that may run on a GPU."""
    return dict(_choices)


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
