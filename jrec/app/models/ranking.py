"""Kinds that find the best of many items for a user, in place of a probability for each line."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, override

from jrec.app.models.kind import ModelKind
from jrec.data.schema import KEEP_LAST, LISTS, CategoricalFeature, Schema, Table
from jrec.errors import ConfigError
from jrec.json_values import JsonObject

if TYPE_CHECKING:
    from jrec.app.config import ModelConfig, TrainConfig
    from jrec.app.config.typed_toml import Section
    from jrec.app.evaluate import RestoredRun
    from jrec.app.models.best import RankingPredictor
    from jrec.app.models.kind import Predictions
    from jrec.app.models.reading import Reading
    from jrec.app.report.ranking import AnyScores, RankScores
    from jrec.app.report.running_auc import NoRunningAuc
    from jrec.run.export import Exportable
    from jrec.serving.format import Retrieval

RANKING_KEYS = ("embedding_dim", "table_dtype", "compute_dtype", "dropout")
"""The keys of ``[model]`` that every kind of this form reads."""


class RankingKind[S: Section](ModelKind[S]):
    """A kind whose model gives each user a vector, {"user": (batch, dim)}, to compare with the vectors of all items.

    A new one says which features it reads (``schema``, ``item``, ``history``, ``requested``), and how its network, loss
    and batches are made.
    """

    keys = RANKING_KEYS
    metrics = ("ndcg", "hr", "mrr")
    needs_labels = False

    @abc.abstractmethod
    def item(self, model: ModelConfig) -> str:
        """The feature with the item that a user is to find."""

    @abc.abstractmethod
    def history(self, model: ModelConfig) -> str:
        """The feature with a user's items, which may be left out of the ranking; "" for none."""

    @abc.abstractmethod
    def requested(self, model: ModelConfig) -> tuple[str, ...]:
        """The features that a user is told by, in predictions and requests."""

    def reads_columns(self, schema: Schema) -> bool:
        """Whether requests have the columns of the dataset's log, in place of lists of one feature's values."""
        del schema
        return True

    @override
    def settled(self, config: TrainConfig) -> dict[str, Section]:
        stopping = config.evaluate.early_stopping
        # The section's default is a metric of clicks; another one is the user's choice, which ``check_run`` judges.
        if stopping.metric != type(stopping).metric:
            return {}
        stopping = dataclasses.replace(stopping, metric=self.metrics[0])
        return {"evaluate": dataclasses.replace(config.evaluate, early_stopping=stopping)}

    @override
    def check_run(self, config: TrainConfig) -> None:
        super().check_run(config)
        if config.schedule != "plain":
            raise ConfigError(
                f"schedule is {config.schedule!r}, but model.kind {self.name!r} trains by 'plain'; leave it out"
            )
        if config.data.micro_batches > 1:
            raise ConfigError(
                f"data.micro_batches is {config.data.micro_batches}, but model.kind {self.name!r} tells an item"
                " from others of the whole batch, of which a slice has only some; leave it out"
            )
        if config.evaluate.group:
            raise ConfigError(
                f"evaluate.group is {config.evaluate.group!r}, but model.kind {self.name!r} ranks items and has no AUC;"
                " leave it out"
            )

    @override
    def check_plan(self, subject: str) -> None:
        raise ConfigError(
            f"{subject} has model.kind {self.name!r}, whose lookups no profile counts; train it without a plan:"
            " mesh.devices deals the rows to the devices in turn"
        )

    @override
    def keeps_ids(self, model: ModelConfig) -> str:
        return self.item(model)

    def item_table(self, model: ModelConfig, schema: Schema) -> Table:
        """The table whose rows are ranked, of the features that the model reads."""
        item = self.item(model)
        return schema.table(next(feature.table for feature in schema.categorical if feature.name == item))

    def request_schema(self, model: ModelConfig, schema: Schema) -> Schema:
        """The schema of what is needed to rank for a user, without labels.

        Args:
          model: The ``[model]`` section.
          schema: The features that the model reads.
        """
        names = self.requested(model)
        read = of_features(schema, names, and_table=self.item_table(model, schema).name)
        options = schema.preparation.get("format_options")
        # What turns a request into rows: the seed of keys and how lists are cut or, for requests in the columns of a
        # log, its preparation with the csv schema of only these columns.
        provenance: JsonObject = {"options": {"key_seed": schema.key_seed}, LISTS: KEEP_LAST}
        if self.reads_columns(read) and isinstance(options, Mapping) and "schema" in options:
            columns = _columns_of(options["schema"], names)
            provenance = {**schema.preparation, "format_options": {**options, "schema": columns}}
        return dataclasses.replace(read, provenance=provenance, labels=False, splits={})

    @override
    def inputs(self, model: ModelConfig, schema: Schema) -> list[str]:
        requested = self.requested(model)  # an item's own features are those of the catalogue, or its row
        return [name for name in schema.feature_names if name in requested]

    @override
    def scores(
        self, predictions: Predictions, reading: Reading, *, check: bool, on_batch: Callable[[], None]
    ) -> RankScores:
        return self.scorer(reading)(predictions, check=check, on_batch=on_batch)

    @override
    def scorer(self, reading: Reading) -> Callable[..., RankScores]:
        from jrec.app.models.rank_items import ItemRanker

        ranker = ItemRanker(reading)

        def scores(predictions: Predictions, *, check: bool, on_batch: Callable[[], None]) -> RankScores:
            del check  # its outputs are checked one by one in any case
            return ranker.scores(predictions, on_batch=on_batch)

        return scores

    @override
    def importance_metrics(self, config: TrainConfig, task: str = "") -> dict[str, tuple[int, str, str]]:
        from jrec.app.report.ranking import metric_names

        first = config.evaluate.at[0]
        named = metric_names((first,))
        return {key: (-1, f"{named[key][0]} falls by", named[key][1]) for key in (f"ndcg@{first}", f"hr@{first}")}

    @override
    def running_auc(self, config: TrainConfig, devices: int | None) -> NoRunningAuc:
        from jrec.app.report.running_auc import NoRunningAuc

        return NoRunningAuc()

    @override
    def predictor(self, run: RestoredRun) -> RankingPredictor:
        from jrec.app.models.best import RankingPredictor

        return RankingPredictor(run, self)

    @override
    def exportable(self, run: RestoredRun, source: Exportable) -> Exportable:
        model, table = run.config.model, self.item_table(run.config.model, run.schema)
        from jrec.serving.format import Retrieval

        schema = self.request_schema(model, run.schema)
        retrieval = Retrieval(
            history=self.history(model),
            table=table.name,
            leaves_out_history=run.config.evaluate.leave_out_history and bool(self.history(model)),
            left_out_row=table.oov_row,
        )
        dense = tuple(feature.name for feature in schema.dense)
        requested = tuple(feature.name for feature in schema.categorical)
        ranking = dataclasses.replace(source, schema=schema, dense=dense, requested=requested)
        return self.exportable_items(run, ranking, retrieval, table)

    @abc.abstractmethod
    def exportable_items(self, run: RestoredRun, source: Exportable, retrieval: Retrieval, table: Table) -> Exportable:
        """What is exported, with the items to rank: the rows of ``table``, or vectors that the model makes."""

    @override
    def units(self, config: TrainConfig) -> dict[str, str]:
        from jrec.app.report.ranking import units

        return units(config.evaluate.at)

    @override
    def sections(self, config: TrainConfig, scores: Mapping[str, AnyScores]) -> JsonObject:
        from jrec.app.report.ranking import RankScores

        candidates = next((one.candidates for one in scores.values() if isinstance(one, RankScores)), 0)
        left_out = config.evaluate.leave_out_history and bool(self.history(config.model))
        at = list(config.evaluate.at)
        return {"ranking": {"at": at, "candidates": candidates, "history_left_out": left_out}}

    @override
    def comparisons(
        self, config: TrainConfig, schema: Schema, scores: Mapping[str, AnyScores], *, whole: bool, slices: bool
    ) -> JsonObject:
        from jrec.app.baselines.measure import wanted
        from jrec.app.baselines.popular_items import popular_items

        compared = whole and wanted(config.evaluate.baselines, schema)
        return {"baselines": popular_items(config, schema, list(scores))} if compared else {}


def ranking_kind(model: ModelConfig) -> RankingKind[Any]:
    """The kind of a model that ranks items."""
    kind = model.of_kind
    assert isinstance(kind, RankingKind), f"model.kind {kind.name!r} ranks no items"
    return kind


def of_features(schema: Schema, names: Collection[str], *, and_table: str = "") -> Schema:
    """The schema with some features, dense ones in the order of the names, and their tables, and without tasks."""
    dense = {feature.name: feature for feature in schema.dense}
    categorical = tuple(feature for feature in schema.categorical if feature.name in names)
    tables = {feature.table for feature in categorical} | {and_table}
    return dataclasses.replace(
        schema,
        # A two-tower network takes the user's dense features first, as the names have them.
        dense=tuple(dense[name] for name in names if name in dense),
        categorical=categorical,
        tables=tuple(table for table in schema.tables if table.name in tables),
        tasks=(),
    )


def feature_named(schema: Schema, name: str, key: str) -> CategoricalFeature:
    """The categorical feature that ``model.KEY`` names.

    Raises:
      ConfigError: If there is none of that name.
    """
    named = next((feature for feature in schema.categorical if feature.name == name), None)
    if named is None:
        raise ConfigError(
            f"model.{key} is {name!r}, but the categorical features of the dataset are"
            f" {', '.join(feature.name for feature in schema.categorical)}; name one of them"
        )
    return named


def check_ranked(table: Table, kind: str) -> None:
    """Refuses tables whose rows do not stand for the same items from the first step to the last.

    Raises:
      ConfigError: Names the table and the remedy.
    """
    if table.growing:
        raise ConfigError(
            f"model.kind is {kind!r}, which ranks the rows of table {table.name!r}, but that table grows; prepare it"
            " without --growing"
        )
    if table.bijection is not None:
        raise ConfigError(
            f"model.kind is {kind!r}, which ranks the rows of table {table.name!r}, but `jrec reorder` renumbered them;"
            " train on the dataset from before it"
        )
    # The row for unknown values is not ranked, and one item alone needs no ranking.
    if table.rows < 2 + (table.oov_row is not None):
        raise ConfigError(
            f"table {table.name!r} has {table.rows} row(s), among which there is nothing to rank; prepare more lines,"
            " or by a smaller --min-count"
        )


def _columns_of(stored: object, names: Collection[str]) -> JsonObject:
    """A stored csv schema with only the columns of some features."""
    from jrec.prepare.readers.delimited import read_stored, schema_of_features, stored_schema

    schema = read_stored(stored, where="schema.json: provenance.format_options.schema", error=ConfigError)
    return stored_schema(schema_of_features(schema, names))
