"""How a run works, beyond what it computes: results differ by the order of float32 sums, and by 16-bit links."""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any, Literal

from jrec.bounds import Range
from jrec.errors import ConfigError
from jrec.sharding.hardware import parse_bytes

LEAST_MEMORY = 2**20
"""The least ``HostOptions.memory``, in bytes."""

Ahead = Annotated[int, Range(minimum=0, maximum=1024)]
"""Threads, or batches under way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """How rows travel between the devices of a mesh.

    Attributes:
      headroom: The size of a step's buffers of rows, as a multiple of the rows in the run's first batches. A batch that
        needs more takes its rows in several windows.
      reduce: How the gradients of replicated rows are summed over the devices: only of the rows that some device
        touched ("local"), as an array of all replicated rows ("dense"), or row by row on every device ("all_gather").
      exchange: How lines of rows and sums travel between devices: with padding ("padded"), or without, which CPUs lack
        ("ragged"); "auto" takes padded, until both have been measured on GPUs.
      exchange_rows: The dtype in which rows, and sums of rows, travel to the devices that read them: "stored" for their
        own, or rounded to 16 bits, where they have more. float16 has 3 bits more than bfloat16, but ends at 65,504.
      exchange_gradients: The dtype in which the gradients of rows and sums travel back; they are summed in float32.
      form: How other devices' rows are looked up: each unique row is fetched ("retrieve"), or ids are sent to the rows'
        owners, which pool them, so that only sums travel ("send": sum, mean and sqrtn pooling; others retrieve).
        "auto" decides for each feature by the bytes of both in the run's first batches.
    """

    headroom: Annotated[float, Range(minimum=1)] = 1.5
    reduce: Literal["local", "dense", "all_gather"] = "local"
    exchange: Literal["auto", "padded", "ragged"] = "auto"
    exchange_rows: Literal["stored", "bfloat16", "float16"] = "stored"
    exchange_gradients: Literal["float32", "bfloat16"] = "float32"
    form: Literal["auto", "retrieve", "send"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Rows in host memory, and the pipeline between them and the device.

    Attributes:
      pipeline: Whether rows travel through the pipeline ("on"), or the host pools and updates them in place ("off"),
        which only a CPU without a plan can do; "auto" does the latter wherever it can.
      queue: Batches that may be under way between reading rows from the host and writing them back; 1 is sequential.
      cached_batches: How many batches' updated rows the device keeps, so that they need not travel again; at least
        ``queue - 1``. 0 for as many as ``queue``.
      folder: A folder for memory-mapped files of rows and slots, for tables larger than memory; "" for memory itself.
      memory: How much memory the files in ``folder`` may take in this process, as in "4GB"; rows are then read from the
        disk ahead of their batch's step. "" leaves it to the system which of their pages it keeps. Linux only.
      threads: Threads that read and write rows; 0 for all CPUs.
    """

    pipeline: Literal["auto", "on", "off"] = "auto"
    queue: Annotated[int, Range(minimum=1, maximum=1024)] = 3
    cached_batches: Ahead = 0
    folder: str = ""
    memory: str = ""
    threads: Ahead = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if reason := self.few_cached("cached_batches", "queue"):
            raise ConfigError(reason)
        self.memory_bytes("HostOptions.memory", "HostOptions.folder")

    def memory_bytes(self, memory: str, folder: str) -> int:
        """``memory`` in bytes, 0 for no limit, by these names for it and for the folder.

        Raises:
          ConfigError: If it is no size, too small for any table, or there is no folder.
        """
        if not self.memory:
            return 0
        size = int(parse_bytes(self.memory, memory))
        if size < LEAST_MEMORY:
            raise ConfigError(f"{memory} is {self.memory!r}, but must be at least 1MiB: a batch's rows have to fit")
        if not self.folder:
            raise ConfigError(
                f"{memory} is {self.memory!r}, but limits only tables in files; set {folder} to a folder on a fast"
                f" disk, or leave {memory} out"
            )
        return size

    def few_cached(self, cached: str, queue: str) -> str | None:
        """What is wrong with ``cached_batches`` beside ``queue``, by these names for them; None if nothing is."""
        if not self.cached_batches or self.cached_batches >= self.queue - 1:
            return None
        return (
            f"{cached} is {self.cached_batches}, but with {queue} = {self.queue} the rows of up to {self.queue - 1}"
            " batches are only on the device; set it to at least that, or to 0"
        )


def check_fields(options: Any) -> None:
    """Checks the fields of a dataclass by their annotations, ``Literal`` and ``Annotated[..., Range(...)]``.

    Raises:
      ConfigError: Naming the field, its value and the values that it takes.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        hint, value, name = hints[field.name], getattr(options, field.name), f"{type(options).__name__}.{field.name}"
        if typing.get_origin(hint) is Literal and value not in (choices := typing.get_args(hint)):
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")
        for bounds in getattr(hint, "__metadata__", ()):
            if isinstance(bounds, Range) and value not in bounds:
                raise ConfigError(f"{name} is {value!r}, but must be {bounds}")
