"""DLRM (Naumov et al. 2019), with DeepFM and DCN-v2 among its interactions."""

from __future__ import annotations

from typing import TYPE_CHECKING, override

from jrec.app.config.typed_toml import Section
from jrec.app.models.clicks import ClickKind, check_interaction, dense_part
from jrec.json_values import JsonObject

if TYPE_CHECKING:
    from jrec.app.config import ModelConfig
    from jrec.app.models.kind import EmbeddingOptions
    from jrec.data.schema import Schema
    from jrec.nn.optimizer import SparseModel
    from jrec.ops.layout import EmbeddingLayout


class DLRMKind(ClickKind[Section]):
    """``model.kind = "dlrm"``; all its keys stand in ``[model]``."""

    takes_factory = True

    @override
    def check_own(self, model: ModelConfig) -> None:
        check_interaction(model)

    @override
    def network(
        self, model: ModelConfig, schema: Schema, layout: EmbeddingLayout, embeddings: EmbeddingOptions
    ) -> SparseModel:
        from jrec.nn import DLRM, DLRMConfig

        own = {key: getattr(model, key) for key in ("wide", "cross_layers", "cross_rank", "dot_with", "members")}
        return DLRM(DLRMConfig(**dense_part(model, schema), **own), layout, **embeddings)

    @override
    def misfit(self, model: ModelConfig, shapes: object, examples: int) -> str:
        if tasks := model.multi_task.tasks:
            fits = shapes == dict.fromkeys(tasks, (examples,))
            return "" if fits else f"a dictionary by task ({', '.join(tasks)}), of float32 of shape (batch,)"
        return "" if shapes == (examples,) else "one logit an example, float32 of shape (batch,)"

    @override
    def identity(self, model: ModelConfig, num_dense: int) -> JsonObject:
        keys = super().identity(model, num_dense)
        joins = model.dot_with == "embeddings" or (model.dot_with == "auto" and not num_dense)
        return keys | ({"dot_with": "embeddings"} if model.interaction == "dot" and joins else {})


KIND = DLRMKind("dlrm")
