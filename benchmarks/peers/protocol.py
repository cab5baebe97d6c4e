"""The line protocol between a benchmark and a peer's process; this side runs in the peer.

Requests and answers are JSON, one a line, on the process's stdin and stdout. Arrays travel as .npy files in a folder
that both sides see. Needs only the standard library and NumPy, and Python 3.11.

    {"op": "versions"}                                        -> {"value": {"torch": "2.13.0", ...}}
    {"op": "setup", "case": C, "folder": D, "options": {...}} -> {"value": null}
    {"op": "run", "action": A, "calls": N}                    -> {"value": seconds per call}
    {"op": "call", "action": A, "folder": D}                  -> {"value": null}, arrays saved to D
    anything that fails                                       -> {"error": "what, and the traceback"}
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Actions = Mapping[str, Callable[[], Any]]
Case = Callable[[dict[str, np.ndarray], dict[str, Any]], Actions]


def save_arrays(folder: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Saves each array as NAME.npy."""
    for name, array in arrays.items():
        np.save(pathlib.Path(folder) / f"{name}.npy", np.asarray(array), allow_pickle=False)


def load_arrays(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Loads every .npy file of a folder, by name."""
    return {path.stem: np.load(path, allow_pickle=False) for path in sorted(pathlib.Path(folder).glob("*.npy"))}


def serve(cases: Mapping[str, Case], *, distributions: tuple[str, ...]) -> None:
    """Answers requests until stdin ends.

    Args:
      cases: by name, functions of (arrays, options) that give the actions of a set-up case; an action returns nothing
        or a mapping of arrays. One called "synchronize" is called before the clock is read, for asynchronous devices.
      distributions: installed distributions whose versions the benchmark reports.
    """
    # Libraries print to stdout as they like; the protocol keeps the real one and gives them stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    actions: Actions = {}

    def answer(request: dict[str, Any]) -> Any:
        nonlocal actions
        if request["op"] == "versions":
            return {name: importlib.metadata.version(name) for name in distributions}
        if request["op"] == "setup":
            actions = {}  # frees the arrays of the case before
            actions = cases[request["case"]](load_arrays(request["folder"]), request["options"])
            return None
        action = actions[request["action"]]
        if request["op"] == "call":
            save_arrays(request["folder"], action() or {})
            return None
        synchronize = actions.get("synchronize", lambda: None)
        synchronize()
        start = time.perf_counter()
        for _ in range(request["calls"]):
            action()
        synchronize()
        return (time.perf_counter() - start) / request["calls"]

    for line in sys.stdin:
        try:
            reply = {"value": answer(json.loads(line))}
        except Exception as error:  # the benchmark raises it again on its side
            reply = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
