"""DIN (Zhou et al. 2018): a history's items count by how much they have to do with the target (``jrec.nn.DIN``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, override

from jrec.app.config.typed_toml import Section, Width
from jrec.app.models.clicks import ClickKind, boundaries, check_histories, task_heads
from jrec.errors import ConfigError

if TYPE_CHECKING:
    from jrec.app.config import ModelConfig
    from jrec.app.models.kind import EmbeddingOptions
    from jrec.data.schema import Schema
    from jrec.nn.optimizer import SparseModel
    from jrec.ops.layout import EmbeddingLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class DINSection(Section):
    """``[model.din]``: the histories and their attention (``jrec.nn.DIN``).

    ``bottom_mlp`` over the dense features and ``top_mlp`` over everything stay in ``[model]``.

    Attributes:
      histories: By feature of the target, the list feature of the same table with the history's items.
      attention_mlp: Hidden widths of the MLP that gives an item its weight, from the item, the target, their difference
        and their product.
      normalized: Whether the weights of a history sum to 1. The paper's do not: their sum is how strong an interest is.
    """

    histories: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention_mlp: tuple[Width, ...] = (36,)
    normalized: bool = False


class DINKind(ClickKind[DINSection]):
    """``model.kind = "din"``."""

    section, section_name = DINSection, "din"
    keys = (
        "embedding_dim", "bottom_mlp", "top_mlp", "pooling", "table_dtype", "compute_dtype", "dropout", "batch_norm",
        "dense_boundaries", "calibrate", "features", "multi_task", "label_smoothing", "loss", "numbers",
    )  # fmt: skip

    @override
    def check_own(self, model: ModelConfig) -> None:
        check_histories(self, model, self.own(model).histories)
        if not self.own(model).attention_mlp:
            raise ConfigError("model.din.attention_mlp is [], but a weight needs a hidden layer; give one, as in [36]")

    @override
    def unpooled(self, model: ModelConfig) -> Mapping[str, str]:
        return self.own(model).histories

    @override
    def network(
        self, model: ModelConfig, schema: Schema, layout: EmbeddingLayout, embeddings: EmbeddingOptions
    ) -> SparseModel:
        from jrec.nn import DIN

        own = self.own(model)
        return DIN(
            layout,
            histories=own.histories,
            num_dense=len(schema.dense),
            bottom_mlp=model.bottom_mlp,
            attention_mlp=own.attention_mlp,
            top_mlp=model.top_mlp,
            normalized=own.normalized,
            compute_dtype=model.compute_dtype,
            dropout=model.dropout,
            batch_norm=model.batch_norm,
            dense_boundaries=boundaries(model, schema),
            calibrated=model.calibrate,
            multi_task=task_heads(model, model.multi_task) if model.multi_task.tasks else None,
            **embeddings,
        )


KIND = DINKind("din")
