"""What an evaluation reads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jrec.app.config import TrainConfig
    from jrec.app.models.catalogue import Catalogue
    from jrec.data.schema import Schema
    from jrec.run.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A run, and what its scores depend on besides.

    Attributes:
      run: The run, as its last step left it.
      config: Its configuration.
      schema: What its model reads of the dataset that is scored.
      catalogue: The items to rank, where a tower makes their vectors (``ModelKind.catalogue``); else None.
    """

    run: Run
    config: TrainConfig
    schema: Schema
    catalogue: Catalogue | None = None
