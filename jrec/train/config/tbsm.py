"""The ``[model.tbsm]`` section: the parts of a TBSM that a DLRM lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from jrec.train.config.typed_toml import Range, Section

Width = Annotated[int, Range(minimum=1, maximum=65536)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TBSMSection(Section):
    """``[model.tbsm]``: the steps of a history and their attention (``jrec.nn.TBSMConfig``).

    ``bottom_mlp``, ``interaction`` and ``top_mlp`` stay in ``[model]``: the bottom MLP and the interaction apply to
    each step, the top MLP sees context and target.

    Attributes:
      histories: By feature of the target, the list feature of the same table with the history's steps in order of time.
      tower_mlp: Widths of the layers over the interaction of a step.
      attention_mlp: Hidden widths of the time-series layer's MLP.
      inner: The product of the steps with the target: "dot", or by a matrix A "indefinite" and by A'A "definite".
      heads: The number of time-series layers.
      top_with: What the top MLP sees beside the target: the steps' weighted sum alone ("context"), or the steps'
        products with the target, too ("products").
    """

    histories: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tower_mlp: tuple[Width, ...] = (15, 15)
    attention_mlp: tuple[Width, ...] = (15, 15)
    inner: Literal["dot", "indefinite", "definite"] = "definite"
    heads: Annotated[int, Range(minimum=1, maximum=1024)] = 1
    top_with: Literal["context", "products"] = "context"
