"""TBSM (Ishkhanov et al. 2020): a DLRM tower on every step of a history, with attention over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, override

from jrec.app.config.typed_toml import Range, Section, Width
from jrec.app.models.clicks import ClickKind, check_histories, check_interaction, dense_part
from jrec.errors import ConfigError
from jrec.json_values import JsonObject

if TYPE_CHECKING:
    from jrec.app.config import ModelConfig
    from jrec.app.models.kind import EmbeddingOptions
    from jrec.data.schema import Schema
    from jrec.nn.optimizer import SparseModel
    from jrec.ops.layout import EmbeddingLayout


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
      top_with: What the top MLP sees beside the target: only the steps' weighted sum ("context"), or also the
        steps' products with the target ("products").
    """

    histories: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tower_mlp: tuple[Width, ...] = (15, 15)
    attention_mlp: tuple[Width, ...] = (15, 15)
    inner: Literal["dot", "indefinite", "definite"] = "definite"
    heads: Annotated[int, Range(minimum=1, maximum=1024)] = 1
    top_with: Literal["context", "products"] = "context"


class TBSMKind(ClickKind[TBSMSection]):
    """``model.kind = "tbsm"``."""

    section, section_name = TBSMSection, "tbsm"
    before: ClassVar[Mapping[str, object]] = {"top_with": "context"}

    @override
    def check_own(self, model: ModelConfig) -> None:
        check_interaction(model)
        unsupported = model.wide or model.dot_with != "auto" or model.members > 1
        if model.interaction not in ("dot", "concat") or unsupported:
            raise ConfigError(
                f"model.kind is 'tbsm', but model.interaction is {model.interaction!r}, model.wide {model.wide},"
                f" model.dot_with {model.dot_with!r} and model.members {model.members}; a TBSM has interaction 'dot' or"
                " 'concat' and none of the others"
            )
        own = self.own(model)
        if own.histories and not (model.bottom_mlp and own.tower_mlp):
            raise ConfigError(
                f"model.bottom_mlp is {list(model.bottom_mlp)} and model.tbsm.tower_mlp {list(own.tower_mlp)};"
                " a TBSM needs a layer of each"
            )
        check_histories(self, model, own.histories)

    @override
    def one_logit(self, model: ModelConfig) -> dict[str, str]:
        heads = self.own(model).heads
        return {"model.tbsm.heads": f"{heads}"} if heads > 1 else {}

    @override
    def unpooled(self, model: ModelConfig) -> Mapping[str, str]:
        return self.own(model).histories

    @override
    def network(
        self, model: ModelConfig, schema: Schema, layout: EmbeddingLayout, embeddings: EmbeddingOptions
    ) -> SparseModel:
        from jrec.nn import TBSM, TBSMConfig

        own = self.own(model)
        keys = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
        keys["histories"] = tuple(own.histories.items())
        return TBSM(TBSMConfig(**dense_part(model, schema), **keys), layout, **embeddings)

    @override
    def identity(self, model: ModelConfig, num_dense: int) -> JsonObject:
        return super().identity(model, num_dense) | {"tbsm": self.own_identity(model)}


KIND = TBSMKind("tbsm")
