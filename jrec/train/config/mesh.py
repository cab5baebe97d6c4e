"""The ``[mesh]`` section: how many devices train together, and how rows travel between them."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jrec.train.config.typed_toml import Range, Section


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """``[mesh]``: several devices train one model: dense parameters on all of them, every row where the plan says.

    No key changes a result, beyond the order in which float32 sums are taken.

    Attributes:
      devices: The number of devices of all processes together; 0 or 1 trains on one device, without a mesh.
      headroom: The first size of the buffers in which rows travel between devices, as a multiple of the rows in the
        run's first batches, where several processes train. Buffers grow when a batch needs it, which compiles the step
        once more.
      reduce: How the gradients of replicated rows are summed over the devices: only of the rows that some device
        touched ("local"), as an array of all replicated rows ("dense"), or row by row on every device ("all_gather").
      exchange: How lines of rows and sums travel between devices: with padding ("padded"), or without, which CPUs lack
        ("ragged"); "auto" takes ragged on GPUs and padded on CPUs.
      form: How other devices' rows are looked up: each unique row is fetched ("retrieve"), or ids are sent to the rows'
        owners, which pool them, so that only sums travel ("send": sum, mean and sqrtn pooling; others retrieve).
        "auto" decides for each feature by the bytes of both in the run's first batches.
    """

    devices: Annotated[int, Range(minimum=0, maximum=2**15 - 1)] = 0
    headroom: Annotated[float, Range(minimum=1)] = 1.5
    reduce: Literal["local", "dense", "all_gather"] = "local"
    exchange: Literal["auto", "padded", "ragged"] = "auto"
    form: Literal["auto", "retrieve", "send"] = "auto"

    @property
    def on(self) -> bool:
        """Whether there is a mesh."""
        return self.devices > 1
