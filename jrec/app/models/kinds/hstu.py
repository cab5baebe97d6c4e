"""HSTU, and with ``sasrec.py`` SASRec: an encoder of a user's items that tells the next one (``jrec.nn.NextItem``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Unpack, override

from jrec.app.config.typed_toml import Range, Section
from jrec.app.models.ranking import RankingKind, check_ranked, feature_named
from jrec.data.schema import Schema, Table
from jrec.errors import ConfigError

if TYPE_CHECKING:
    from jrec.app.config import ModelConfig, TrainConfig
    from jrec.app.evaluate import RestoredRun
    from jrec.app.models.kind import EmbeddingOptions
    from jrec.data.dataset_packer import PackerOptions
    from jrec.data.packers import AnyPacker
    from jrec.nn.optimizer import Loss, SparseModel
    from jrec.ops.layout import EmbeddingLayout
    from jrec.run.export import Exportable
    from jrec.serving.format import Retrieval
    from jrec.sharding import Plan

_BATCH, _EVAL_BATCH = 128, 512  # examples are whole histories


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceSection(Section):
    """``[model.sequence]``: what kinds "hstu" and "sasrec" read, and how they are trained (``jrec.nn.NextItem``).

    At every position of a history the model is to tell the item that comes next from sampled ones, or from all.

    Attributes:
      history: The list feature with a user's items in order of time, as the schema's ``history`` makes it.
      item: The feature of the same table with the item that comes after them.
      blocks: Layers.
      heads: Attention heads of a layer.
      attention_dim: Elements of a head's queries and keys; 0 for ``embedding_dim`` by ``heads``.
      hidden_dim: HSTU: elements of a head's values and gates, 0 for ``embedding_dim`` by ``heads``. SASRec: the hidden
        width of the position-wise layers, 0 for ``embedding_dim``.
      negatives: Which items each position's next one is told from: "batch", all that are drawn for a batch;
        "position", items drawn for this position only; "all", every item of the table, without drawing.
      sampled: Items that are drawn, uniformly from the table, for each example of a batch, or with ``negatives``
        "position" for each position of a history; not with "all".
      temperature: What cosines of vectors are divided by, to be logits of the softmax.
      normalize: HSTU: what a layer's sums over the history are divided by, "maximum" for the most items of a history,
        as in the paper, or "length" for the items that it has.
      ages: HSTU: whether it reads how long ago the items of a history were, where the dataset's schema names ages.
    """

    history: str = "history"
    item: str = "item"
    blocks: Annotated[int, Range(minimum=1, maximum=256)] = 2
    heads: Annotated[int, Range(minimum=1, maximum=256)] = 1
    attention_dim: Annotated[int, Range(minimum=0, maximum=65536)] = 0
    hidden_dim: Annotated[int, Range(minimum=0, maximum=65536)] = 0
    negatives: Literal["batch", "position", "all"] = "batch"
    sampled: Annotated[int, Range(minimum=1, maximum=2**16)] = 8
    temperature: Annotated[float, Range(above=0, maximum=1000)] = 0.05
    normalize: Literal["maximum", "length"] = "maximum"
    ages: bool = True

    @override
    def check(self) -> None:
        if self.negatives == "all" and self.sampled != type(self).sampled:
            raise ConfigError(
                f"model.sequence.sampled is {self.sampled}, but with model.sequence.negatives = 'all' no item is drawn;"
                " leave one of them out"
            )
        if self.history == self.item:
            raise ConfigError(
                f"model.sequence.history and model.sequence.item are both {self.item!r}; name two of them"
            )


class NextItemKind(RankingKind[SequenceSection]):
    """``model.kind = "hstu"`` or ``"sasrec"``.

    Args:
      encoder: Which of the two.
    """

    section, section_name = SequenceSection, "sequence"
    before: ClassVar[Mapping[str, object]] = {"ages": True, "negatives": "batch", "normalize": "maximum"}

    def __init__(self, encoder: Literal["hstu", "sasrec"]):
        super().__init__(encoder)
        self._encoder: Literal["hstu", "sasrec"] = encoder

    @override
    def item(self, model: ModelConfig) -> str:
        return self.own(model).item

    @override
    def history(self, model: ModelConfig) -> str:
        return self.own(model).history

    @override
    def requested(self, model: ModelConfig) -> tuple[str, ...]:
        return (self.history(model),)

    @override
    def reads_columns(self, schema: Schema) -> bool:
        return any(feature.aged for feature in schema.categorical)

    @override
    def check(self, model: ModelConfig) -> None:
        own = self.own(model)
        if self._encoder != "hstu" and own.normalize != type(own).normalize:
            raise ConfigError(
                f"model.sequence.normalize is {own.normalize!r}, but model.kind {self.name!r} has attention by softmax,"
                " which needs no divisor; leave it out, or use model.kind = 'hstu'"
            )
        if model.embedding_dim % own.heads and not (own.attention_dim and own.hidden_dim):
            raise ConfigError(
                f"model.sequence.heads is {own.heads}, which does not divide model.embedding_dim ="
                f" {model.embedding_dim}; use another number of heads, or give model.sequence.attention_dim and"
                " model.sequence.hidden_dim"
            )

    @override
    def settled(self, config: TrainConfig) -> dict[str, Section]:
        # By identity: a size that a file or a program gives is another object than the default, also where it is equal.
        data, kind = config.data, type(config.data)
        batch_size = _BATCH if data.batch_size is kind.batch_size else data.batch_size
        scored = data.eval_batch_size
        if scored is kind.eval_batch_size:
            # Batches have room for the negatives of training, which may be more than all else.
            scored = _EVAL_BATCH if self.own(config.model).negatives == "batch" else batch_size
        data = dataclasses.replace(data, batch_size=batch_size, eval_batch_size=scored)
        return {**super().settled(config), "data": data}

    @override
    def schema(self, model: ModelConfig, schema: Schema) -> Schema:
        own = self.own(model)
        history, item = (feature_named(schema, getattr(own, key), f"sequence.{key}") for key in ("history", "item"))
        if history.one_hot or history.scaled:
            raise ConfigError(
                f"model.sequence.history is {own.history!r}, which is {'weighted' if history.scaled else 'one id'};"
                " name a list of ids in order of time, as `jrec prepare csv` makes it by"
                ' history = {by = "user", of = "item", length = 200}'
            )
        if not item.one_hot or item.table != history.table:
            raise ConfigError(
                f"model.sequence.item is {own.item!r} of table {item.table!r}, but must be a feature of one id an"
                f" example, of table {history.table!r}, as model.sequence.history = {own.history!r} is"
            )
        table = schema.table(item.table)
        check_ranked(table, self.name)
        if not (self._encoder == "hstu" and own.ages):
            history = dataclasses.replace(history, weighted=False, aged=None)
        return dataclasses.replace(
            schema, dense=(), categorical=(history, item), tables=(table,), tasks=(), labels=False
        )

    @override
    def reads(self, model: ModelConfig) -> str:
        return f"{self.history(model)} and {self.item(model)}"

    @override
    def layout(self, config: TrainConfig, schema: Schema, plan: Plan | None) -> EmbeddingLayout:
        from jrec.app.models.next_items import feature_names
        from jrec.app.tables import layout_of
        from jrec.ops.layout import FeatureConfig

        own = self.own(config.model)
        history = next(f for f in schema.categorical if f.name == own.history)
        lengths = (history.max_length, history.max_length, self._negatives(config, schema, history.max_length))
        features = [
            FeatureConfig(name=name, table=history.table, max_length=most, pooling="none")
            for name, most in zip(feature_names(own.history, own.item), lengths, strict=True)
        ]
        return layout_of(config, schema, plan, features)

    def _negatives(self, config: TrainConfig, schema: Schema, length: int) -> int:
        """An example's part of what positions are told from."""
        own, table = self.own(config.model), self.item_table(config.model, schema)
        if own.negatives == "all":
            return -(-(table.rows - (table.oov_row is not None)) // config.data.batch_size)
        return own.sampled * (length if own.negatives == "position" else 1)

    @override
    def network(
        self, model: ModelConfig, schema: Schema, layout: EmbeddingLayout, embeddings: EmbeddingOptions
    ) -> SparseModel:
        from jrec.app.models.next_items import feature_names
        from jrec.nn import NextItem, SequenceConfig

        own = self.own(model)
        encoder = SequenceConfig(
            kind=self._encoder,
            blocks=own.blocks,
            heads=own.heads,
            attention_dim=own.attention_dim or None,
            hidden_dim=own.hidden_dim or None,
            dropout=model.dropout,
            normalize=own.normalize,
            compute_dtype=model.compute_dtype,
        )
        return NextItem(layout, encoder, names=feature_names(own.history, own.item), **embeddings)

    @override
    def loss(self, model: ModelConfig, schema: Schema) -> Loss:
        from jrec.nn import next_item_loss

        own = self.own(model)
        return next_item_loss(temperature=own.temperature, negatives=own.negatives)

    @override
    def packer(
        self,
        config: TrainConfig,
        schema: Schema,
        layout: EmbeddingLayout,
        *,
        training: bool,
        **options: Unpack[PackerOptions],
    ) -> AnyPacker:
        from jrec.app.models.next_items import NextItemPacker

        table = self.item_table(config.model, schema)
        history = next(feature for feature in schema.categorical if feature.name == self.history(config.model))
        return NextItemPacker(
            layout,
            history=history.name,
            item=self.item(config.model),
            rows=table.rows,
            oov_row=table.oov_row,
            seed=config.seed if training else None,
            aged=bool(history.aged),
            negatives=self.own(config.model).negatives,
            batch_size=config.data.batch_size,
            on_bad_id=config.data.on_bad_id,
            # Growing tables and weights do not go with this kind (``check_ranked``, ``jrec.app.dataset``).
            cast=options.get("cast", "none"),
        )

    @override
    def exportable_items(self, run: RestoredRun, source: Exportable, retrieval: Retrieval, table: Table) -> Exportable:
        from jrec.data.blocks import age_columns

        assert source.schema is not None  # ``exportable`` gave it
        ages = age_columns(source.schema)
        return dataclasses.replace(source, retrieval=retrieval, dense=(*source.dense, *ages), widths=ages)


KIND = NextItemKind("hstu")
