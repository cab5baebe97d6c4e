"""Kinds that give each line a probability, or one for each of several labels, or a number."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, override

from jrec.app.models.kind import ModelKind
from jrec.app.models.targets import Number, Probability, target_of, targets_of
from jrec.errors import ConfigError
from jrec.json_values import JsonObject

if TYPE_CHECKING:
    from jrec.app.config import ModelConfig, TrainConfig
    from jrec.app.config.model import MultiTaskSection
    from jrec.app.config.typed_toml import Section
    from jrec.app.evaluate import RestoredRun
    from jrec.app.models.kind import Predictions
    from jrec.app.models.reading import Reading
    from jrec.app.models.scored import ClickPredictor
    from jrec.app.report.ranking import AnyScores
    from jrec.app.report.running_auc import NoRunningAuc, RunningAuc
    from jrec.data.columns import Column
    from jrec.data.dataset_packer import PackerOptions
    from jrec.data.loader_source import BlockWatch
    from jrec.data.packers import AnyPacker
    from jrec.data.schema import CategoricalFeature, Schema
    from jrec.nn import MultiTaskConfig
    from jrec.nn.dense_encoding import Boundaries
    from jrec.nn.optimizer import Loss
    from jrec.ops.layout import EmbeddingLayout, FeatureConfig
    from jrec.run.export import Exportable
    from jrec.sharding import Plan


class ClickKind[S: Section](ModelKind[S]):
    """A kind whose model gives each example a logit, (batch,) float32, or by task a dictionary of them.

    A new one says how its network is made (``network``), which keys do not go with it (``check``), and, where it reads
    histories step by step, which features those are (``unpooled``).
    """

    metrics = (*Probability.metrics, *Number.metrics)
    scores_lines = True

    @override
    def check(self, model: ModelConfig) -> None:
        for name, own in model.dense_boundaries.items():
            if len(own) < 2 or any(not low < high for low, high in itertools.pairwise(own)):
                raise ConfigError(
                    f"model.dense_boundaries.{name} is {list(own)}; give at least two numbers in ascending order, or"
                    " leave the feature out"
                )
        if model.table_dim > 4096:
            raise ConfigError(
                f"model.embedding_dim = {model.embedding_dim} with model.wide = {str(model.wide).lower()} and"
                f" model.members = {model.members} makes rows of {model.table_dim:,} elements; the most are 4,096"
            )
        if not model.top_mlp or model.top_mlp[-1] != 1:
            raise ConfigError(f"model.top_mlp is {list(model.top_mlp)}, but its last width must be 1, the logit")
        self.check_own(model)
        if model.multi_task.tasks:
            self.check_tasks(model)

    def check_own(self, model: ModelConfig) -> None:
        """Refuses keys that do not go with this kind, as ``check``."""

    def check_tasks(self, model: ModelConfig) -> None:
        """Refuses keys that are of one logit, as ``check``; there are several labels."""
        odd = {"model.wide": model.wide, "model.calibrate": model.calibrate, "model.batch_norm": model.batch_norm}
        odd = {key: "true" for key, is_set in odd.items() if is_set}
        odd |= {"model.interaction": "'fm'"} if model.interaction == "fm" else {}
        for key, value in (odd | self.one_logit(model)).items():
            raise ConfigError(
                f"{key} is {value}, which is of models with one label, but there are {len(model.multi_task.tasks)}"
                f" (model.multi_task.tasks: {', '.join(model.multi_task.tasks)}); leave it out"
            )
        if len(model.top_mlp) < 2:
            raise ConfigError(
                f"model.top_mlp is {list(model.top_mlp)}, but its layers before the logit are what tasks share"
                " (model.multi_task); give at least one, as in [64, 1]"
            )

    def one_logit(self, model: ModelConfig) -> dict[str, str]:
        """Further keys that are set and only make sense for one logit, with their values."""
        del model
        return {}

    def unpooled(self, model: ModelConfig) -> Mapping[str, str]:
        """By feature of the target the history, of the same table, that the network reads step by step."""
        del model
        return {}

    @override
    def layout(self, config: TrainConfig, schema: Schema, plan: Plan | None) -> EmbeddingLayout:
        from jrec.app.tables import layout_of

        model, names = config.model, [f.name for f in schema.categorical]
        histories = self.unpooled(model)
        features = pooled_features(model, schema, set(histories.values()))
        if unknown := sorted({*histories, *histories.values()} - set(names)):
            raise ConfigError(
                f"model.{self.section_name}.histories names {unknown[0]!r}, but the categorical features of the dataset"
                f" are {', '.join(names)}"
            )
        return layout_of(config, schema, plan, features)

    @override
    def importance_metrics(self, config: TrainConfig, task: str = "") -> Mapping[str, tuple[int, str, str]]:
        return targets_of(config.model)[task].importance if task else target_of(config.model).importance

    @override
    def loss(self, model: ModelConfig, schema: Schema) -> Loss:
        if not (heads := model.multi_task).tasks:
            return target_of(model).loss()
        from jrec.nn import multi_task_loss

        return multi_task_loss(
            heads.weight_by_task,
            label=heads.tasks[0],
            label_smoothing=model.label_smoothing,
            number_losses={task: own.loss() for task, own in targets_of(model).items() if isinstance(own, Number)},
        )

    @override
    def identity(self, model: ModelConfig, num_dense: int) -> JsonObject:
        if self.keys is not None:
            keys = super().identity(model, num_dense)
            # Keys of the loss are no part of what a prediction is.
            for key in ("label_smoothing", "loss", "numbers"):
                keys.pop(key, None)
            for key in _OF_LOSS:
                keys.get("multi_task", {}).pop(key, None)
            return keys | _identity_of_numbers(model)
        keys = dataclasses.asdict(model)
        del keys["factory"], keys["options"], keys["sections"]
        for key in _OF_LOSS:
            del keys["multi_task"][key]
        del keys["label_smoothing"], keys["loss"], keys["numbers"]
        # Keys are left out at the values that earlier versions had without them, and where nothing reads them, so that
        # checkpoints of these versions still fit.
        if not model.multi_task.tasks:
            del keys["multi_task"]
        if keys["members"] == 1:
            del keys["members"]
        for key in ("wide", "dropout", "batch_norm", "dense_boundaries", "calibrate"):
            if not keys[key]:
                del keys[key]
        if model.interaction != "dcn":
            del keys["cross_layers"], keys["cross_rank"]
        del keys["dot_with"]
        return keys | _identity_of_numbers(model)

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
        from jrec.data.dataset_packer import dataset_packer

        return dataset_packer(config.data.path, schema, layout, on_bad_id=config.data.on_bad_id, **options)

    @override
    def watch(self, model: ModelConfig) -> BlockWatch | None:
        histories = [*self.unpooled(model).values()]
        return functools.partial(self._check_steps, histories) if len(histories) > 1 else None

    def _check_steps(self, histories: Sequence[str], block: int, columns: Mapping[str, Column]) -> None:
        """Refuses histories whose values are not of the same steps, as ``BlockWatch``."""
        import numpy as np

        from jrec.data.columns import ListColumn
        from jrec.data.schema import DatasetError

        lists = {name: column for name in histories if isinstance(column := columns[name], ListColumn)}
        lengths = {name: np.diff(column.offsets) for name, column in lists.items()}
        for (first, one), (second, other) in itertools.pairwise(lengths.items()):
            if (unlike := np.flatnonzero(one != other)).size:
                sizes = (
                    f"{one[unlike[0]]} and {other[unlike[0]]} values in example {unlike[0]} of training block {block}"
                )
                raise DatasetError(
                    f"{first!r} and {second!r} have {sizes}, but a step of model.{self.section_name}.histories is one"
                    " value of each: datasets of earlier versions leave out values that are missing; prepare the log"
                    " again, with histories of one user and length, which have a blank there"
                )

    @override
    def scores(
        self, predictions: Predictions, reading: Reading, *, check: bool, on_batch: Callable[[], None]
    ) -> AnyScores:
        from jrec.run.evaluation import collected

        model = reading.config.model
        tasks, numbers = model.multi_task.tasks, model.numbers_by_label
        return collected(predictions, tasks=tasks, numbers=numbers, check=check, on_batch=on_batch)

    @override
    def running_auc(self, config: TrainConfig, devices: int | None) -> RunningAuc | NoRunningAuc:
        return target_of(config.model).running_auc(config, devices)

    @override
    def predictor(self, run: RestoredRun) -> ClickPredictor:
        from jrec.app.models.scored import ClickPredictor

        return ClickPredictor(run)

    @override
    def comparisons(
        self, config: TrainConfig, schema: Schema, scores: Mapping[str, AnyScores], *, whole: bool, slices: bool
    ) -> JsonObject:
        from jrec.app.comparisons import of_labels
        from jrec.app.report.ranking import RankScores

        own = {split: one for split, one in scores.items() if not isinstance(one, RankScores)}
        return of_labels(config, schema, own, whole=whole, slices=slices)

    @override
    def exportable(self, run: RestoredRun, source: Exportable) -> Exportable:
        return dataclasses.replace(source, numbers=run.config.model.numbers_by_label)

    @override
    def sections(self, config: TrainConfig, scores: Mapping[str, AnyScores]) -> JsonObject:
        from jrec.app.report.numbers import sections

        target = target_of(config.model)
        return sections(target) if scores and isinstance(target, Number) else {}


_OF_LOSS = ("weights", "losses", "numbers")
"""Keys of ``model.multi_task`` that are no part of what a prediction is."""


def _identity_of_numbers(model: ModelConfig) -> JsonObject:
    """What a checkpoint records of how outputs are numbers."""
    by_label = {task: dataclasses.asdict(numbers) for task, numbers in model.numbers_by_label.items()}
    if "" in by_label:
        return {"numbers": by_label[""]}
    return {"task_numbers": by_label} if by_label else {}


def pooled_features(model: ModelConfig, schema: Schema, unpooled: Collection[str] = ()) -> list[FeatureConfig]:
    """The categorical features as ``[model]`` pools them, or with a vector a step where they are among ``unpooled``.

    Raises:
      ConfigError: If ``[model.features]`` names a feature that is not there.
    """
    names = [feature.name for feature in schema.categorical]
    if unknown := sorted(set(model.features) - set(names)):
        raise ConfigError(
            f"model.features.{unknown[0]}: the dataset has no categorical feature of that name, only {', '.join(names)}"
        )
    return [_pooled(model, feature, unpooled) for feature in schema.categorical]


def _pooled(model: ModelConfig, feature: CategoricalFeature, unpooled: Collection[str]) -> FeatureConfig:
    from jrec.ops.layout import FeatureConfig

    override = model.features.get(feature.name)
    pooling = model.pooling if override is None else override.pooling
    return FeatureConfig(
        name=feature.name,
        table=feature.table,
        max_length=feature.max_length,
        fixed_length=feature.fixed_length,
        weighted=feature.scaled,
        pooling="none" if feature.name in unpooled else pooling,
    )


def dense_part(model: ModelConfig, schema: Schema) -> dict[str, Any]:
    """What ``DLRMConfig`` and ``TBSMConfig`` take alike.

    Raises:
      ConfigError: If ``model.dense_boundaries`` names a feature that the dataset has not.
    """
    of_tasks = {"top_mlp": (), "multi_task": task_heads(model, model.multi_task)} if model.multi_task.tasks else {}
    return {
        "num_dense": len(schema.dense),
        "bottom_mlp": model.bottom_mlp,
        "top_mlp": model.top_mlp,
        "interaction": model.interaction,
        "compute_dtype": model.compute_dtype,
        "dropout": model.dropout,
        "batch_norm": model.batch_norm,
        "dense_boundaries": boundaries(model, schema),
        "calibrated": model.calibrate,
        **of_tasks,
    }


def task_heads(model: ModelConfig, heads: MultiTaskSection) -> MultiTaskConfig:
    """The heads of a model with several labels, which share the layers of ``top_mlp`` but the logit."""
    from jrec.nn import MultiTaskConfig

    return MultiTaskConfig(
        tasks=heads.tasks,
        experts=heads.experts,
        # The last width is the logit's, which every task's own tower has; ``check_tasks`` leaves a layer before it.
        expert_mlp=model.top_mlp[:-1],
        tower_mlp=heads.tower_mlp,
        compute_dtype=model.compute_dtype,
        dropout=model.dropout,
    )


def boundaries(model: ModelConfig, schema: Schema) -> Boundaries:
    """Boundaries by dense feature, in the order of the dataset's.

    Raises:
      ConfigError: If a feature is not of the dataset.
    """
    names = [feature.name for feature in schema.dense]
    if unknown := sorted(set(model.dense_boundaries) - set(names)):
        raise ConfigError(
            f"model.dense_boundaries names {unknown[0]!r}, but the dataset's dense features are"
            f" {', '.join(names) or 'none'}"
        )
    return tuple(model.dense_boundaries.get(name, ()) for name in names) if model.dense_boundaries else ()


def check_histories(kind: ClickKind[Section], model: ModelConfig, histories: Mapping[str, str]) -> None:
    """Refuses a kind of histories without one, and histories that are pooled.

    Raises:
      ConfigError: Names the key.
    """
    if not histories:
        raise ConfigError(
            f"model.kind is {kind.name!r}, but model.{kind.section_name}.histories is empty; name the history of a"
            ' feature, as histories = {item_id = "item_history"}'
        )
    pooled_ones = sorted(name for name, feature in model.features.items() if feature.pooling != "none")
    if clashing := [name for name in pooled_ones if name in histories.values()]:
        raise ConfigError(
            f"model.features.{clashing[0]} is pooled, but model.{kind.section_name}.histories has it as a history"
        )


def check_interaction(model: ModelConfig) -> None:
    """Refuses widths that do not fit the interaction, and keys that it does not read.

    Raises:
      ConfigError: Names the key.
    """
    one_dim = model.interaction in ("dot", "fm")
    if one_dim and model.bottom_mlp and model.bottom_mlp[-1] != model.embedding_dim:
        raise ConfigError(
            f"model.bottom_mlp is {list(model.bottom_mlp)}, but under {model.interaction} interaction its last width"
            f" must equal model.embedding_dim = {model.embedding_dim}"
        )
    for key, default, interaction in (
        ("cross_layers", 3, "dcn"),
        ("cross_rank", 0, "dcn"),
        ("dot_with", "auto", "dot"),
    ):
        if getattr(model, key) != default and model.interaction != interaction:
            raise ConfigError(
                f"model.{key} is {getattr(model, key)!r}, but model.interaction is {model.interaction!r}; set it to"
                f" {interaction!r}, or leave model.{key} out"
            )
