"""The ``[mesh]`` section: how many devices train together, and how rows travel between them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jrec.run.options import MeshOptions
from jrec.train.config.typed_toml import Range, Section


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section, MeshOptions):
    """``[mesh]``: several devices train one model: dense parameters on all of them, every row where the plan says.

    No key changes a result, beyond the order of float32 sums. ``MeshOptions`` explains the other keys.

    Attributes:
      devices: The number of devices of all processes together; 0 or 1 trains on one device, without a mesh.
    """

    devices: Annotated[int, Range(minimum=0, maximum=2**15 - 1)] = 0

    @property
    def on(self) -> bool:
        """Whether there is a mesh."""
        return self.devices > 1
