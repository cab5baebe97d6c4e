"""Two towers: a vector for a user and one for an item, of any features of a dataset (``jrec.nn.TwoTower``)."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Unpack, override

from jrec.app.config.typed_toml import Range, Section, Width
from jrec.app.models.clicks import pooled_features
from jrec.app.models.ranking import RANKING_KEYS, RankingKind, check_ranked, feature_named, of_features
from jrec.data.schema import Schema, Table
from jrec.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from jrec.app.config import ModelConfig, TrainConfig
    from jrec.app.evaluate import RestoredRun
    from jrec.app.models.catalogue import Catalogue
    from jrec.app.models.kind import EmbeddingOptions
    from jrec.data.dataset_packer import PackerOptions
    from jrec.data.identity import Identity
    from jrec.data.packers import AnyPacker
    from jrec.nn.optimizer import Loss, SparseModel
    from jrec.ops.layout import EmbeddingLayout
    from jrec.run.export import Exportable
    from jrec.serving.format import Retrieval
    from jrec.sharding import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerSection(Section):
    """``[model.two_tower]``: what kind "two_tower" reads, and how it is trained (``jrec.nn.TwoTower``).

    Each line's own item is told from the items of all other lines of the batch; of a dataset with labels, by the lines
    with label 1.

    Attributes:
      user, item: The features of each tower, categorical and dense ones of the dataset. Lists of ids are pooled, as
        ``pooling`` and ``features`` say.
      id: The feature among ``item`` whose values are ranked, of one id an example.
      history: A list feature among ``user`` of the same table, whose items ``evaluate.leave_out_history`` leaves out of
        the ranking; "" for none.
      user_mlp, item_mlp: Widths of each tower's layers; the last, the vector's, is the same in both.
      temperature: What cosines of vectors are divided by, to be logits of the softmax.
      log_q: Whether the logarithm of an item's share in training is taken off its scores, so that frequent items are
        not pushed away for being negatives often. The share counts all of the table's accesses.
    """

    user: tuple[str, ...] = ()
    item: tuple[str, ...] = ()
    id: str = ""
    history: str = ""
    user_mlp: tuple[Width, ...] = (128, 64)
    item_mlp: tuple[Width, ...] = (128, 64)
    temperature: Annotated[float, Range(above=0, maximum=1000)] = 0.05
    log_q: bool = True


class TwoTowerKind(RankingKind[TwoTowerSection]):
    """``model.kind = "two_tower"``."""

    section, section_name = TwoTowerSection, "two_tower"
    keys = (*RANKING_KEYS, "pooling", "features")
    takes_factory = True
    exports_vectors = True

    @override
    def item(self, model: ModelConfig) -> str:
        return self.own(model).id

    @override
    def history(self, model: ModelConfig) -> str:
        return self.own(model).history

    @override
    def requested(self, model: ModelConfig) -> tuple[str, ...]:
        return self.own(model).user

    @override
    def check(self, model: ModelConfig) -> None:
        own = self.own(model)
        for key in ("user", "item"):
            if not getattr(own, key):
                raise ConfigError(
                    f"model.two_tower.{key} is empty; name the features of the {key} tower, as {key} ="
                    f' ["{key}"], of the dataset that data.path names'
                )
        names = [*own.user, *own.item]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"{repeated[0]!r} is named twice in model.two_tower.user and item; a feature is of one tower"
            )
        for key, tower in (("id", own.item), ("history", own.user)):
            if (name := getattr(own, key)) not in tower and (name or key == "id"):
                side = "item" if key == "id" else "user"
                raise ConfigError(
                    f"model.two_tower.{key} is {name!r}, but must be one of model.two_tower.{side} = {list(tower)}"
                )
        if not own.user_mlp or not own.item_mlp or own.user_mlp[-1] != own.item_mlp[-1]:
            raise ConfigError(
                f"model.two_tower.user_mlp is {list(own.user_mlp)} and item_mlp {list(own.item_mlp)}; give both a"
                " layer, and last layers of one width, that of the vectors"
            )
        by_feature = {f"model.features.{name}": feature.pooling for name, feature in model.features.items()}
        poolings = {"model.pooling": model.pooling, **by_feature}
        if unpooled := [key for key, pooling in poolings.items() if pooling == "none"]:
            raise ConfigError(f"{unpooled[0]} is 'none', but a tower reads one vector of each feature; pool it")

    @override
    def schema(self, model: ModelConfig, schema: Schema) -> Schema:
        own = self.own(model)
        for key in ("user", "item"):
            for name in (name for name in getattr(own, key) if name not in schema.feature_names):
                raise ConfigError(
                    f"model.two_tower.{key} names {name!r}, but the features of the dataset are"
                    f" {', '.join(schema.feature_names)}; name some of them"
                )
        read = of_features(schema, (*own.user, *own.item))
        item = feature_named(read, own.id, "two_tower.id")
        if not item.one_hot:
            raise ConfigError(
                f"model.two_tower.id is {own.id!r}, which has several ids; name a feature of one id an example"
            )
        if own.history:
            history = feature_named(read, own.history, "two_tower.history")
            if history.one_hot or history.table != item.table:
                raise ConfigError(
                    f"model.two_tower.history is {own.history!r} of table {history.table!r}, but must be a list of ids"
                    f" of table {item.table!r}, as model.two_tower.id = {own.id!r} is"
                )
        if not any(feature.name in own.user for feature in read.categorical):
            raise ConfigError(
                f"model.two_tower.user is {list(own.user)}, dense features alone; name a categorical one, too"
            )
        check_ranked(read.table(item.table), self.name)
        read.check_numbered(
            "model.kind is 'two_tower', which reads tables of as many rows from the first step to the last"
        )
        return read

    @override
    def reads(self, model: ModelConfig) -> str:
        return "the features of its towers"

    @override
    def layout(self, config: TrainConfig, schema: Schema, plan: Plan | None) -> EmbeddingLayout:
        from jrec.app.tables import layout_of

        return layout_of(config, schema, plan, pooled_features(config.model, schema))

    @override
    def network(
        self, model: ModelConfig, schema: Schema, layout: EmbeddingLayout, embeddings: EmbeddingOptions
    ) -> SparseModel:
        from jrec.nn import TwoTower, TwoTowerConfig

        own, dense = self.own(model), {feature.name for feature in schema.dense}
        towers = TwoTowerConfig(
            user=tuple(name for name in own.user if name not in dense),
            item=tuple(name for name in own.item if name not in dense),
            user_dense=len(dense.intersection(own.user)),  # the dense features of ``schema`` are the user's first
            item_dense=len(dense.intersection(own.item)),
            user_mlp=own.user_mlp,
            item_mlp=own.item_mlp,
            dropout=model.dropout,
            compute_dtype=model.compute_dtype,
        )
        return TwoTower(layout, towers, **embeddings)

    @override
    def misfit(self, model: ModelConfig, shapes: object, examples: int) -> str:
        user, item = (shapes.get(key) for key in ("user", "item")) if isinstance(shapes, dict) else (None, None)
        fits = user is not None and user == item and len(user) == 2 and user[0] == examples
        return "" if fits else 'a dictionary with "user" and "item", both float32 of shape (batch, dim)'

    @override
    def loss(self, model: ModelConfig, schema: Schema) -> Loss:
        from jrec.app.models.next_items import TARGET
        from jrec.app.models.user_items import LOG_Q
        from jrec.nn import two_tower_loss

        own = self.own(model)
        log_q = LOG_Q if own.log_q else ""
        return two_tower_loss(TARGET, log_q=log_q, by_label=schema.labels, temperature=own.temperature)

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
        """Packs lines of a user and an item, and items without users and the reverse."""
        from jrec.app.models.user_items import UserItemPacker
        from jrec.data.dataset_packer import dataset_packer

        own, table = self.own(config.model), self.item_table(config.model, schema)
        log_q = _log_shares(schema, table) if training and own.log_q else None
        extras, on_bad_id = UserItemPacker.names(training=training, log_q=log_q is not None), config.data.on_bad_id
        packer = dataset_packer(config.data.path, schema, layout, on_bad_id=on_bad_id, extras=extras, **options)
        return UserItemPacker(packer, item=own.id, history=own.history, log_q=log_q)

    @override
    def catalogue(
        self, folder: pathlib.Path, config: TrainConfig, schema: Schema, trained_on: Identity, *, keep: bool = False
    ) -> Catalogue:
        from jrec.app.models.catalogue import catalogue_of

        return catalogue_of(folder, config, schema, trained_on, keep=keep)

    @override
    def further_examples(self, model: ModelConfig, schema: Schema) -> int:
        return self.item_table(model, schema).rows  # whose vectors take about what as many examples take

    @override
    def exportable_items(self, run: RestoredRun, source: Exportable, retrieval: Retrieval, table: Table) -> Exportable:
        from jrec.app.models.rank_items import item_vectors
        from jrec.nn import TwoTower
        from jrec.ops.layout import TableConfig
        from jrec.serving.format import ExportError

        name = f"{table.name}.vectors"
        if name in {other.name for other in run.schema.tables}:
            raise ExportError(
                f"table {name!r} is called as that of the vectors of {table.name!r}; give it another name"
            )
        assert run.catalogue is not None
        if not isinstance(run.model, TwoTower):
            raise ExportError(
                f"model.factory is {run.config.model.factory}, but only jrec.nn.TwoTower can be exported as two towers;"
                " `jrec predict --k` ranks by yours"
            )
        vectors = item_vectors(run.reading)
        return dataclasses.replace(
            source,
            model=run.model.for_users(),
            rows=lambda table_name, rows: vectors[rows] if table_name == name else source.rows(table_name, rows),
            # No row is left out: a catalogue has only items that training told apart.
            retrieval=dataclasses.replace(retrieval, table=name, left_out_row=None, items=table.name),
            vectors=TableConfig(name=name, rows=len(vectors), dim=vectors.shape[1], dtype=run.config.model.table_dtype),
            items=run.catalogue.rows,
        )


def _log_shares(schema: Schema, table: Table) -> np.ndarray:
    """(rows,) float32, the logarithm of the share of training's accesses that each row has."""
    import numpy as np

    from jrec.app.models.catalogue import training_counts

    if (counts := training_counts(schema, table)) is None:
        raise ConfigError(
            f"model.two_tower.log_q is true, but {schema.folder or schema.name} has no counts of table {table.name!r};"
            " set it to false, or prepare the dataset again"
        )
    # A row that training never reads would have a share of 0, whose logarithm is infinite.
    return np.log(np.maximum(counts, 1) / max(counts.sum(), 1)).astype(np.float32)


KIND = TwoTowerKind("two_tower")
