"""Names for what JSON and TOML files hold, as ``json.loads`` and ``tomllib.loads`` return it.

The type of a value follows from its key, which only the reader knows. Files with a fixed form are decoded by types
(``jrec.files.decode``); these names are for what has none: sections of reports, descriptions of runs, free tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""An object of JSON types, or a table of TOML."""
JsonMapping = Mapping[str, Any]
"""The same where it is only read."""
