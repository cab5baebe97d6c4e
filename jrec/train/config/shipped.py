"""The configurations that come with jrec: the papers' models, by name."""

from __future__ import annotations

import difflib
import os
import pathlib

from jrec.errors import ConfigError

_PACKAGE = pathlib.Path(__file__).resolve().parents[2]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # of an installed jrec, and of a clone


def shipped_configs() -> dict[str, pathlib.Path]:
    """The configurations that come with jrec, by name, such as "criteo-kaggle"."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    files = [] if folder is None else sorted(folder.glob("*.toml"))
    return {file.stem.replace("_", "-"): file for file in files}


def find_config(path: str | os.PathLike[str]) -> pathlib.Path:
    """A configuration file, or the one that comes with jrec by this name.

    Args:
      path: A file; or, where there is no such file, a name without folder and suffix, with "-" or "_".

    Raises:
      ConfigError: If it is neither and looks like a name; the message has the nearest name.
    """
    file = pathlib.Path(path)
    if file.exists() or file.suffix or len(file.parts) != 1:
        return file
    shipped = shipped_configs()
    if (known := shipped.get(file.name.replace("_", "-"))) is not None:
        return known
    near = difflib.get_close_matches(file.name.replace("_", "-"), shipped, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"{path}: there is no such configuration file, and none of this name comes with jrec; {advice}jrec has"
        f" {', '.join(shipped) or 'none'}"
    )
