"""What a plan is made for: devices, their memory, and what it costs to fetch a row from one another."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jrec.errors import ConfigError
from jrec.files import decode, load_toml
from jrec.json_values import JsonObject

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MAX_DEVICES = 4096  # a link is a number for every two of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    """A TOML file of hardware: sizes are bytes (a second), as numbers or with a unit."""

    name: str = ""
    devices: int | None = None
    devices_per_node: int | None = None
    memory: int | float | str | tuple[int | float | str, ...]
    lookup: int | float | str | None = None
    within: int | float | str | None = None
    between: int | float | str | None = None
    all_reduce: int | float | str
    host: int | float | str = 0
    fetch: tuple[tuple[float, ...], ...] | None = None
    tables_on: str | int | tuple[int | str, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Devices and links.

    Attributes:
      name: A name for people.
      memory: Bytes of every device that embedding tables, with optimizer slots, may take.
      fetch: OPER's L, seconds per byte: ``fetch[i][j]`` is what device ``i`` pays for a byte of a row of device ``j``;
        the diagonal is a local lookup.
      all_reduce: Bytes a second of a dense all-reduce over all devices (OPER's BW_AR).
      host: Bytes a second between a device and host memory; 0 where there is no host tier.
      tables_on: Numbers of the devices that keep the tables and run no dense model, while the others compute and keep
        none (Tensor Casting's memory-centric mode); empty where every device does both.

    Raises:
      ConfigError: On sizes that do not fit together, or values that are not positive.
    """

    name: str
    memory: tuple[int, ...]
    fetch: tuple[tuple[float, ...], ...]
    all_reduce: float
    host: float = 0.0
    tables_on: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", tuple(int(m) for m in self.memory))
        object.__setattr__(self, "tables_on", tuple(sorted(int(d) for d in self.tables_on)))
        object.__setattr__(self, "fetch", tuple(tuple(float(c) for c in row) for row in self.fetch))
        if not self.memory:
            raise ConfigError(f"hardware {self.name!r} has no devices; memory needs one figure a device")
        if len(self.fetch) != self.devices or any(len(row) != self.devices for row in self.fetch):
            raise ConfigError(f"hardware {self.name!r}: fetch must be {self.devices} rows of {self.devices} costs")
        if min(self.memory) <= 0:
            raise ConfigError(f"hardware {self.name!r}: memory {list(self.memory)} must be positive on every device")
        costs = np.array(self.fetch)
        if not (np.isfinite(costs).all() and (costs > 0).all()):
            raise ConfigError(f"hardware {self.name!r}: every cost in fetch must be a positive number of seconds")
        for key, least in (("all_reduce", 1e-300), ("host", 0.0)):
            if not least <= getattr(self, key) < float("inf"):
                raise ConfigError(f"hardware {self.name!r}: {key} is {getattr(self, key)} bytes a second")
        self._check_tables_on()

    def _check_tables_on(self) -> None:
        chosen = self.tables_on
        for device in chosen:
            if not 0 <= device < self.devices:
                raise ConfigError(
                    f"tables_on names device {device}, but hardware {self.name!r} has {self.devices}, numbered from 0"
                )
            if chosen.count(device) > 1:
                raise ConfigError(f"tables_on names device {device} twice")
        if len(chosen) == self.devices:
            raise ConfigError(
                f"tables_on names all {self.devices} devices of hardware {self.name!r}, so that none would compute;"
                " leave some out, or leave tables_on out for tables on all devices, which compute too"
            )

    @property
    def computes(self) -> tuple[bool, ...] | None:
        """(devices,) whether each device runs the dense model; None where all do and keep tables too."""
        return tuple(d not in self.tables_on for d in range(self.devices)) if self.tables_on else None

    @property
    def devices(self) -> int:
        """How many there are, OPER's M."""
        return len(self.memory)

    @functools.cached_property
    def L(self) -> np.ndarray:  # noqa: N802 - the paper's symbol
        """``fetch`` as a read-only (devices, devices) float64 array."""
        costs = np.array(self.fetch, np.float64)
        costs.setflags(write=False)
        return costs

    @property
    def remote(self) -> np.ndarray:
        """(devices, devices) bool: the links between different devices."""
        return ~np.eye(self.devices, dtype=bool)

    @property
    def p2p(self) -> float:
        """Bytes a second between two devices, the harmonic mean over links (OPER's BW_P2P); 0 for a single device."""
        # The mean of costs is the harmonic mean of bandwidths: what sending as much over every link takes.
        return float(1 / self.L[self.remote].mean()) if self.devices > 1 else 0.0

    def with_memory(self, memory: int | Sequence[int]) -> Hardware:
        """The same with another budget, one for all devices or one each."""
        each = (memory,) * self.devices if isinstance(memory, int) else tuple(memory)
        return dataclasses.replace(self, memory=each)

    def only(self, chosen: Sequence[int], name: str) -> Hardware:
        """Some of the devices, numbered from 0, all of which keep tables."""
        return dataclasses.replace(
            self,
            name=name,
            memory=tuple(self.memory[i] for i in chosen),
            fetch=tuple(tuple(self.fetch[i][j] for j in chosen) for i in chosen),
            tables_on=(),
        )

    def first(self, devices: int) -> Hardware:
        """The first devices, with the same work for each: those of ``tables_on`` keep the tables.

        Raises:
          ConfigError: If there are fewer, or ``tables_on`` names one of the others, or all of them.
        """
        if devices == self.devices:
            return self
        if not 1 <= devices <= self.devices:
            raise ConfigError(f"hardware {self.name!r} has {self.devices} devices, not {devices}")
        fewer = self.only(range(devices), f"{self.name}, {devices} devices")
        return dataclasses.replace(fewer, tables_on=self.tables_on)

    def to_json(self) -> JsonObject:
        """The fields, in JSON types; ``Hardware(**fields)`` is the inverse."""
        return dataclasses.asdict(self)


def grid(
    name: str,
    *,
    devices: int,
    devices_per_node: int | None = None,
    memory: int | Sequence[int],
    lookup: float,
    within: float,
    between: float | None = None,
    all_reduce: float,
    host: float = 0.0,
) -> Hardware:
    """Nodes of equal devices: one bandwidth within a node, one between nodes.

    Args:
      name: A name for people.
      devices: How many devices all nodes have together.
      devices_per_node: A divisor of ``devices``; None for one node.
      memory: Bytes for tables, one figure for all devices or one each.
      lookup: Bytes a second of gathering rows from a device's own memory.
      within, between: Bytes a second from device to device in one node and between nodes.
      all_reduce: Bytes a second of an all-reduce over all devices.
      host: Bytes a second between a device and host memory.

    Raises:
      ConfigError: On figures that do not describe a machine.
    """
    per_node = devices if devices_per_node is None else devices_per_node
    if not 1 <= devices <= MAX_DEVICES:
        raise ConfigError(f"hardware {name!r} has {devices} devices; give 1 to {MAX_DEVICES}")
    if per_node < 1 or devices % per_node:
        raise ConfigError(f"hardware {name!r}: {devices} devices do not make nodes of {per_node}")
    if per_node < devices and between is None:
        raise ConfigError(f"hardware {name!r} has {devices // per_node} nodes; say the bandwidth `between` them")
    speeds = {"lookup": lookup, "within": within, "between": within if between is None else between}
    for key, value in speeds.items():
        if not value > 0:
            raise ConfigError(f"hardware {name!r}: {key} is {value} bytes a second; it must be positive")
    node = np.arange(devices) // per_node
    costs = np.where(node[:, None] == node[None, :], 1 / speeds["within"], 1 / speeds["between"])
    # The diagonal is a lookup in the device's own memory, which no link carries.
    np.fill_diagonal(costs, 1 / lookup)
    return Hardware(
        name=name,
        memory=(memory,) * devices if isinstance(memory, int) else tuple(memory),
        fetch=tuple(map(tuple, costs.tolist())),
        all_reduce=all_reduce,
        host=host,
    )


def _presets() -> dict[str, Hardware]:
    """Makers' figures, in one direction; a fifth of the memory is left for the model, activations and buffers.

    A100 40 GB: 1.555 TB/s HBM, NVLink 3 at 300 GB/s, PCIe 4. H200: 141 GB, 4.8 TB/s, NVLink 4 at 450 GB/s, PCIe 5, one
    400 Gbit/s adapter a device. 4x4 is OPER's cluster: 4 NVLinks of 25 GB/s from A100 to A100, and 4.21 times the cost
    between nodes (Figure 8). All-reduce: what a ring through the slowest link reaches, as a rule three quarters of it.
    """
    gb = 10**9
    presets = (
        grid("dgx-a100", devices=8, memory=32 * gb, lookup=1555e9, within=300e9, all_reduce=225e9, host=31.5e9),
        grid("h200x8", devices=8, memory=112 * gb, lookup=4800e9, within=450e9, all_reduce=340e9, host=63e9),
        grid(
            "a100-4x4", devices=16, devices_per_node=4, memory=32 * gb, lookup=1555e9, within=100e9,
            between=100e9 / 4.21, all_reduce=18e9, host=31.5e9,
        ),
        grid(
            "h200-2x8", devices=16, devices_per_node=8, memory=112 * gb, lookup=4800e9, within=450e9, between=50e9,
            all_reduce=37e9, host=63e9,
        ),
    )  # fmt: skip
    return {hardware.name: hardware for hardware in presets}


MAX_BYTES = 2**60  # of memory, or per second: more than any machine has, far below what 64 bits hold
PRESETS: Mapping[str, Hardware] = _presets()


def parse_bytes(value: object, name: str = "size") -> float:
    """``"32GB"``, ``"1.5TB/s"``, ``"40GiB"`` or a number, in bytes (a second).

    Raises:
      ConfigError: If it is none of these.
    """
    size: float = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        size = value
    elif match := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmgt]i?)?b?(?:/s)?\s*", str(value).lower()):
        size = float(match[1]) * _UNITS[match[2] or ""]
    if not abs(size) <= MAX_BYTES:
        raise ConfigError(
            f"{name} is {str(value)[:40]!r}; give bytes up to 2^60 as a number or like 32GB, 40GiB, 1.5TB/s"
        )
    return size


def parse_devices(value: object, name: str) -> tuple[int, ...]:
    """``"4-7"``, ``"0,2,4-7"`` or a list of numbers, as numbers of devices.

    Raises:
      ConfigError: If it is none of these.
    """
    ranges = value if isinstance(value, list | tuple) else str(value).split(",")
    devices: list[int] = []
    for text in ranges:
        match = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", str(text))
        numbers = [] if match is None else [n for n in match.groups() if n is not None]
        if not numbers or any(len(n) > 5 for n in numbers) or int(numbers[-1]) < int(numbers[0]):
            raise ConfigError(f"{name} is {str(value)[:40]!r}; give numbers of devices like 4-7 or 0,2,4-7")
        devices.extend(range(int(numbers[0]), int(numbers[-1]) + 1))
    return tuple(devices)


def load_hardware(name: str | os.PathLike[str], *, devices: int | None = None) -> Hardware:
    """A preset, or the hardware that a TOML file describes.

    Args:
      name: A preset's name, or the path of a file that ends in ``.toml``.
      devices: Take only this many devices, the first ones; None for all.

    Raises:
      ConfigError: If there is no such preset, or the file is wrong.
    """
    text = os.fspath(name)
    if text in PRESETS:
        hardware = PRESETS[text]
    elif text.endswith(".toml"):
        hardware = _read(pathlib.Path(text))
    else:
        raise ConfigError(f"hardware {text!r} is unknown; give a .toml file or one of {', '.join(PRESETS)}")
    return hardware if devices is None else hardware.first(devices)


def _read(path: pathlib.Path) -> Hardware:
    content = load_toml(path, error=ConfigError)
    wanted = ("memory", "all_reduce", *(() if "fetch" in content else ("devices", "lookup", "within")))
    if missing := [key for key in wanted if key not in content]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}")
    file = decode(content, _File, where=str(path), error=ConfigError, remedy="see jrec plan --help", partial=True)

    def size(key: str) -> float:
        return parse_bytes(getattr(file, key), f"{path}: {key}")

    stated = file.memory if isinstance(file.memory, tuple) else (file.memory,)
    memory = [int(parse_bytes(m, f"{path}: memory")) for m in stated]
    apart = () if file.tables_on is None else parse_devices(file.tables_on, f"{path}: tables_on")
    name, all_reduce, host = file.name or path.stem, size("all_reduce"), size("host")
    try:
        if file.fetch is not None:
            if clash := [k for k in ("lookup", "within", "between", "devices_per_node") if k in content]:
                raise ConfigError(f"{path} has fetch and also {', '.join(clash)}; give one or the other")
            each = tuple(memory * len(file.fetch) if len(memory) == 1 else memory)
            return Hardware(name=name, memory=each, fetch=file.fetch, all_reduce=all_reduce, host=host, tables_on=apart)
        made = grid(
            name,
            devices=file.devices or 0,
            devices_per_node=file.devices_per_node,
            memory=memory[0] if len(memory) == 1 else memory,
            **{key: size(key) for key in ("lookup", "within", "between") if key in content},
            all_reduce=all_reduce,
            host=host,
        )
        return dataclasses.replace(made, tables_on=apart)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
