"""Names of a package that are imported when first used, so that light uses of it stay light (PEP 562)."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable

_IMPORT = re.compile(r"^    from ([\w.]+) import (\w+) as \2$", re.MULTILINE)


def attach(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, by the imports under its ``if TYPE_CHECKING:``.

    So each name is written once, where type checkers read it, too; ``lazy_loader.attach_stub`` does the same by a stub
    file. ``from PACKAGE import NAME as NAME`` may name a module of the package.
    """
    module = sys.modules[package]
    with open(str(module.__file__), encoding="utf-8") as file:  # noqa: PTH123 (pathlib takes longer than all the rest)
        homes = {name: home for home, name in _IMPORT.findall(file.read())}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name]) if homes[name] != package else None
        value = getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{homes[name]}.{name}")
        setattr(module, name, value)
        return value

    return get, lambda: sorted(homes), sorted(homes)
