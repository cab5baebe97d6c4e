"""What a kind of model is: everything that depends on it is asked of one object, and no other code tells kinds apart.

``[model] kind = "NAME"`` is ``jrec/app/models/kinds/NAME.py``, whose ``KIND`` is a ``ModelKind``: a new kind is a new
file. Most derive from ``ClickKind`` (a probability for each line) or ``RankingKind`` (the best of many items).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import pathlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

from jrec.app.models import kinds
from jrec.errors import ConfigError
from jrec.json_values import JsonObject

# Only for types: a configuration is checked, and its kind asked, before JAX is loaded (docs/resuming.md).
if TYPE_CHECKING:
    import jax
    from flax import nnx

    from jrec.app.config import ModelConfig, TrainConfig
    from jrec.app.config.typed_toml import Section
    from jrec.app.evaluate import RestoredRun
    from jrec.app.models.catalogue import Catalogue
    from jrec.app.models.predictor import Predictor
    from jrec.app.models.reading import Reading
    from jrec.app.report.ranking import AnyScores
    from jrec.app.report.running_auc import NoRunningAuc, RunningAuc
    from jrec.batch import Batch
    from jrec.data.dataset_packer import PackerOptions
    from jrec.data.identity import Identity
    from jrec.data.loader_source import BlockWatch
    from jrec.data.packers import AnyPacker
    from jrec.data.schema import Schema
    from jrec.nn.optimizer import Loss, SparseModel
    from jrec.nn.tt_stack import TTOptions
    from jrec.ops.dispatch import Implementation
    from jrec.ops.layout import EmbeddingLayout
    from jrec.run.export import Exportable
    from jrec.sharding import Plan

FACTORY_KEYS = ("factory", "options", "embedding_dim", "pooling", "table_dtype", "features")
"""The keys of ``[model]`` that say something of a network by ``model.factory``."""

type Predictions = Iterable[tuple[Any, Batch]]
"""What a model's ``logits`` returned, a tree of arrays, each with this process's own batch, in order."""


class EmbeddingOptions(TypedDict):
    """Keyword arguments of ``jrec.nn.EmbeddingCollection``, which every network passes on."""

    implementation: Implementation | None
    tt: TTOptions
    key: jax.Array
    rngs: nnx.Rngs


class ModelKind[S: Section](abc.ABC):
    """A kind of model.

    Args:
      name: The value of ``model.kind``.

    Attributes:
      section: The class of the kind's own section, ``[model.SECTION_NAME]``; None for none.
      section_name: That name.
      keys: The keys of ``[model]`` that it reads beside its section; None for all that have no kind of their own.
      before: By newer key of the section, the value of models from before it, with which checkpoints do not record it.
      metrics: What ``evaluate.early_stopping.metric`` may be; the first is the default.
      scores_lines: Whether each line is scored by its label, which may be a number, and by its weight.
      needs_labels: Whether it trains and is scored by the dataset's labels.
      takes_factory: Whether ``model.factory`` may make its network.
      exports_vectors: Whether an export has vectors that the model makes, for which its rows are read, and which no
        delta can follow.
    """

    section: ClassVar[type[Section] | None] = None
    section_name: ClassVar[str] = ""
    keys: ClassVar[tuple[str, ...] | None] = None
    before: ClassVar[Mapping[str, object]] = {}
    metrics: ClassVar[tuple[str, ...]]
    scores_lines: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = True
    takes_factory: ClassVar[bool] = False
    exports_vectors: ClassVar[bool] = False

    def __init__(self, name: str):
        self.name = name

    def own(self, model: ModelConfig) -> S:
        """The kind's own section of a configuration."""
        return model.sections[self.section_name]  # pyright: ignore[reportReturnType] (``ModelConfig.check`` put it there)

    # The configuration

    @abc.abstractmethod
    def check(self, model: ModelConfig) -> None:
        """Refuses keys that do not go together; ``model.factory`` is not set.

        Raises:
          ConfigError: Names the keys and their values.
        """

    def settled(self, config: TrainConfig) -> Mapping[str, Section]:
        """Sections of the run's configuration in place of its own, where the defaults do not suit the kind."""
        del config
        return {}

    def check_run(self, config: TrainConfig) -> None:
        """Refuses what the kind cannot be trained with, as ``check``."""
        metric = config.evaluate.early_stopping.metric
        if metric not in self.metrics:
            raise ConfigError(
                f"evaluate.early_stopping.metric is {metric!r}, which model.kind {self.name!r} does not have; choose"
                f" one of {', '.join(self.metrics)}"
            )

    def check_plan(self, subject: str) -> None:
        """Refuses to plan for a kind whose lookups no profile counts.

        Raises:
          ConfigError: Says it of ``subject``, and what to do.
        """
        del subject

    # The dataset

    def schema(self, model: ModelConfig, schema: Schema) -> Schema:
        """The schema with only what the model reads; the same object where that is everything.

        Raises:
          ConfigError: If a feature that the configuration names is not there, or cannot be read so.
        """
        del model
        return schema

    def reads(self, model: ModelConfig) -> str:
        """The features that it reads, for a message; "" for all."""
        del model
        return ""

    def unread(self, model: ModelConfig, schema: Schema) -> str:
        """The features of a whole dataset that the model does not read, for a message; "" for none."""
        names = set(schema.feature_names) - set(self.schema(model, schema).feature_names)
        return ", ".join(name for name in schema.feature_names if name in names)

    def keeps_ids(self, model: ModelConfig) -> str:
        """The feature whose ids ``data.oov_rate`` leaves as they are; "" for none."""
        del model
        return ""

    def inputs(self, model: ModelConfig, schema: Schema) -> list[str]:
        """The features that predictions depend on, of those that it reads; dense ones first."""
        del model
        return schema.feature_names

    # The model

    @abc.abstractmethod
    def layout(self, config: TrainConfig, schema: Schema, plan: Plan | None) -> EmbeddingLayout:
        """The tables of a model on a dataset, each in its tier.

        Raises:
          ConfigError: If the tables cannot be placed, or the configuration names features that are not there.
        """

    @abc.abstractmethod
    def network(
        self, model: ModelConfig, schema: Schema, layout: EmbeddingLayout, embeddings: EmbeddingOptions
    ) -> SparseModel:
        """The model.

        Args:
          model: The ``[model]`` section.
          schema: What the model reads.
          layout: Its tables.
          embeddings: Keyword arguments of ``EmbeddingCollection``.

        Raises:
          ValueError: If the configuration does not fit the dataset.
        """

    def misfit(self, model: ModelConfig, shapes: object, examples: int) -> str:
        """What a factory's network is to return in place of outputs of these shapes; "" where they fit.

        Args:
          model: The ``[model]`` section.
          shapes: A tree of the outputs' shapes.
          examples: The batch size.
        """
        raise NotImplementedError(f"model.kind {self.name!r} takes no factory")

    @abc.abstractmethod
    def loss(self, model: ModelConfig, schema: Schema) -> Loss:
        """What a step makes smaller."""

    def identity(self, model: ModelConfig, num_dense: int) -> JsonObject:
        """What a checkpoint records of the model: the keys that it reads, less those that earlier versions lack."""
        del num_dense
        assert self.keys is not None, "a kind that reads every key says which of them its networks depend on"
        keys = dataclasses.asdict(model)
        read = {key: keys[key] for key in ("kind", *self.keys)}
        return read | ({self.section_name: self.own_identity(model)} if self.section_name else {})

    def own_identity(self, model: ModelConfig) -> JsonObject:
        """The kind's own section in ``identity``."""
        keys: JsonObject = dataclasses.asdict(self.own(model))  # pyright: ignore[reportArgumentType] (a dataclass)
        # A checkpoint from before a key has no value of it: at the value of that time, identities are equal without it.
        return {key: value for key, value in keys.items() if key not in self.before or value != self.before[key]}

    @abc.abstractmethod
    def packer(
        self,
        config: TrainConfig,
        schema: Schema,
        layout: EmbeddingLayout,
        *,
        training: bool,
        **options: Unpack[PackerOptions],
    ) -> AnyPacker:
        """What packs a dataset's columns into batches.

        Args:
          config: The run's configuration.
          schema: What the model reads.
          layout: Its tables.
          training: Whether to train; else to predict.
          options: Further arguments of ``dataset_packer``.
        """

    def watch(self, model: ModelConfig) -> BlockWatch | None:
        """What sees the blocks of training examples as they are read, and refuses some; None for nothing."""
        del model

    # Scores and predictions

    @abc.abstractmethod
    def scores(
        self, predictions: Predictions, reading: Reading, *, check: bool, on_batch: Callable[[], None]
    ) -> AnyScores:
        """The scores of this process's examples.

        Args:
          predictions: Of this process's examples.
          reading: What is scored.
          check: Whether an output that is NaN or infinite raises here.
          on_batch: Called after each batch.

        Raises:
          DivergedError: If ``check`` and an output is NaN or infinite.
        """

    def scorer(self, reading: Reading) -> Callable[..., AnyScores]:
        """``scores`` of a run that takes no step meanwhile, without ``reading``: for many splits of one model."""
        return functools.partial(self.scores, reading=reading)

    @abc.abstractmethod
    def importance_metrics(self, config: TrainConfig, task: str = "") -> Mapping[str, tuple[int, str, str]]:
        """The metrics that tell how important features are, by key of ``Evaluation.to_dict``; the first sorts them.

        Each with 1 where a rise makes it worse, or -1 where a fall does, and what texts call that change, and its unit.
        """

    @abc.abstractmethod
    def running_auc(self, config: TrainConfig, devices: int | None) -> RunningAuc | NoRunningAuc:
        """What the progress bar shows of the last steps; ``devices`` of the mesh, None for none."""

    def catalogue(
        self,
        folder: pathlib.Path,
        config: TrainConfig,
        schema: Schema,
        trained_on: Identity,
        *,
        keep: bool = False,
    ) -> Catalogue | None:
        """The items that are ranked, where the model makes their vectors; arguments as of ``catalogue_of``."""
        del folder, config, schema, trained_on, keep

    def further_examples(self, model: ModelConfig, schema: Schema) -> int:
        """What an evaluation computes beside a split's examples, in examples."""
        del model, schema
        return 0

    @abc.abstractmethod
    def predictor(self, run: RestoredRun) -> Predictor[Any]:
        """What makes predictions with a restored run."""

    def exportable(self, run: RestoredRun, source: Exportable) -> Exportable:
        """What of a run is exported, of what every kind has."""
        del run
        return source

    # The report

    def units(self, config: TrainConfig) -> dict[str, str]:
        """Units of the metrics that only this kind has."""
        del config
        return {}

    def sections(self, config: TrainConfig, scores: Mapping[str, AnyScores]) -> JsonObject:
        """Sections of ``metrics.json`` that only this kind has."""
        del config, scores
        return {}

    @abc.abstractmethod
    def comparisons(
        self, config: TrainConfig, schema: Schema, scores: Mapping[str, AnyScores], *, whole: bool, slices: bool
    ) -> JsonObject:
        """The sections ``baselines``, ``groups`` and ``slices``; arguments as of ``comparison_sections``."""


@functools.cache
def names() -> tuple[str, ...]:
    """The values of ``model.kind``: the modules of ``jrec.app.models.kinds``, wherever its path leads."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(kinds.__path__)))


@functools.cache
def kind_named(name: str) -> ModelKind[Section]:
    """The kind of a name among ``names()``; only its own file is loaded."""
    return importlib.import_module(f"jrec.app.models.kinds.{name}").KIND


def kind_of(model: ModelConfig) -> ModelKind[Section]:
    """The kind of a configuration's model."""
    return kind_named(model.kind)


def kinds_with(section_name: str) -> list[str]:
    """The kinds that read a section ``[model.SECTION_NAME]``."""
    if section_name in names() and kind_named(section_name).section_name == section_name:
        return [section_name]  # without loading the others
    return [name for name in names() if section_name and kind_named(name).section_name == section_name]


def section_class(section_name: str) -> type[Section]:
    """The class of ``[model.SECTION_NAME]``, of ``section_names()``."""
    section = kind_named(kinds_with(section_name)[0]).section
    assert section is not None
    return section


class SectionNames:
    """The names of all kinds' sections; whether one is there is told without loading more than its kind."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(kinds_with(name))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(filter(None, (kind_named(name).section_name for name in names()))))

    def __len__(self) -> int:
        return len(list(iter(self)))
