"""From a sweep's lines to tuning entries: what won, by how much, and whether that is more than noise."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from jrec.pallas import measured
from jrec.pallas.measured import Entry, Key

# The case that decides on each kind of kernel; the update's has ids as they come, hot and rare ones.
DECIDES = {"padded": "forward", "ragged": "ragged", "update": "update, mixed"}
TRUSTED_SPREAD = 0.1  # of the times of one point: above, the machine was busy, and nothing follows

Point = Mapping[str, Any]
"""What the sweep prints as ``{"tuning": …}``; see ``benchmarks.gpu_tune``."""


def points(lines: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The sweep's points among other lines."""
    return [line["tuning"] for line in lines if isinstance(line.get("tuning"), dict)]


def config_key(config: Mapping[str, Any]) -> str:
    """A config as text, equal for equal configs."""
    return json.dumps(dict(config), sort_keys=True)


def best(points: Iterable[Point], **wanted: Any) -> Point | None:
    """The fastest point whose fields have the wanted values; the default where it is as fast to within its spread."""
    matching = [p for p in points if all(p[name] == value for name, value in wanted.items())]
    if not matching:
        return None
    fastest = min(matching, key=lambda p: p["us"])
    for point in matching:
        if point["default"] and point["us"] <= fastest["us"] * (1 + max(point["spread"], fastest["spread"])):
            return point
    return fastest


def entries(points: Iterable[Point]) -> dict[Key, Entry]:
    """The configs that beat the default by more than the spread of both, with their evidence.

    A GPU, dim and kind of kernel whose default was not measured, or was measured on a busy machine, gives no entry.
    """
    points = list(points)
    made: dict[Key, Entry] = {}
    for key in _keys(points):
        outcome = _outcome(points, key)
        if outcome is not None and not outcome[0]["default"]:
            winner, default = outcome
            made[key] = Entry(config=dict(winner["config"]), evidence=_evidence(winner, default))
    return made


def _keys(points: Iterable[Point]) -> list[Key]:
    return list(dict.fromkeys((p["gpu"], p["dim"], p["itemsize"], p["kind"]) for p in points))


def _outcome(points: list[Point], key: Key) -> tuple[Point, Point] | None:
    """(winner, default) of a key; None where the default was not measured, or on a busy machine."""
    gpu, dim, itemsize, kind = key
    wanted = {"gpu": gpu, "dim": dim, "itemsize": itemsize, "kind": kind, "case": DECIDES[kind]}
    winner = best(points, **wanted)
    default = next((p for p in points if p["default"] and all(p[n] == v for n, v in wanted.items())), None)
    if winner is None or default is None or default["spread"] > TRUSTED_SPREAD:
        return None
    return winner, default


def _evidence(winner: Point, default: Point) -> dict[str, Any]:
    return {
        "us": winner["us"],
        "default_us": default["us"],
        "spread": max(winner["spread"], default["spread"]),
        "case": winner["workload"],
        "default_config": dict(default["config"]),
        **{name: winner[name] for name in ("commit", "driver", "jax")},
    }


def apply(lines: Iterable[Mapping[str, Any]], path: pathlib.Path = measured.PATH) -> dict[Key, Entry]:
    """Rewrites the file of entries: the sweep's replace older ones with the same key.

    An older entry stays where the sweep measured nothing, and where it was the default of the sweep and won again.
    Otherwise the sweep contradicts it, and it goes.

    Returns:
      The entries of the sweep.
    """
    swept = points(lines)
    new = entries(swept)
    kept = measured.read(path) if path.is_file() else {}
    for key in _keys(swept):
        outcome = _outcome(swept, key)
        if outcome is not None and not _holds(kept.get(key), outcome[0]["config"]):
            kept.pop(key, None)
    measured.write(path, {**kept, **new})
    return new


def _holds(entry: Entry | None, config: Mapping[str, Any]) -> bool:
    return entry is not None and all(config.get(name) == value for name, value in entry.config.items())
