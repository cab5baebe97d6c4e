"""Import paths of version 0.1.0 that moved: they work for one version more, and warn.

Remove this file, and its line in ``jrec/__init__.py``, with the next version.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

MOVED = {
    "jrec.train.report.metrics": "jrec.metrics",
    "jrec.train": "jrec.app",
    "jrec.commands": "jrec.app.commands",
    "jrec.imports": "jrec.app.imports",
    "jrec.ray": "jrec.app.ray",
    "jrec.data.fae.pack": "jrec.prepare.fae_pack",
    "jrec.data.prepare": "jrec.prepare.prepare",
    "jrec.data.readers": "jrec.prepare.readers",
    "jrec.data.reorder": "jrec.prepare.reorder",
    "jrec.data.synth": "jrec.prepare.synth",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the module that has an old one's place now, the same object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if not fullname.startswith("jrec."):  # first on the path: a checkout may still have the old folders, empty
            return None
        old = next((old for old in MOVED if f"{fullname}.".startswith(f"{old}.")), None)
        if old is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=MOVED[old] + fullname[len(old) :])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        now = str(spec.origin)
        warnings.warn(f"{spec.name} is {now} now; the old name goes with the next version", FutureWarning, stacklevel=2)
        module = importlib.import_module(now)
        spec.loader_state = module.__spec__  # the import system is about to replace it by ``spec``
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Finder())
