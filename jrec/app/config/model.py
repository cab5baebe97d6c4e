"""The ``[model]`` section: the kind of a model, and the keys that several kinds read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, override

from jrec.app.config.typed_toml import Amount, Auto, Choices, Open, Range, Section, Width
from jrec.app.models import kind as kinds
from jrec.errors import ConfigError

if TYPE_CHECKING:
    from jrec.regression import Numbers

Dtype = Literal["float32", "bfloat16", "float16"]
Pooling = Literal["sum", "mean", "sqrtn", "max", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureOverride(Section):
    """``[model.features.NAME]``: one categorical feature's own settings.

    Attributes:
      pooling: How the rows of the feature's ids become one vector, in place of ``model.pooling``.
    """

    pooling: Pooling


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumbersSection(Section):
    """``[model.numbers]``: how outputs become numbers, where the label is one (``jrec.regression.Numbers``).

    Attributes:
      location: What is added; "auto" is the mean of the training labels, and 0 with loss "poisson".
      scale: What outputs are multiplied by, above 0; "auto" is the labels' standard deviation in training, and with
        loss "poisson" their mean.
      huber_delta: From which error on the loss "huber" is linear, in units of ``scale``; above 0.
    """

    location: Annotated[float, Auto()] | None = None
    scale: Annotated[float, Range(minimum=0), Auto()] | None = None
    huber_delta: Amount = 1.0

    def check_above_0(self, where: str) -> None:
        """Raises ConfigError where what has to be above 0 is 0; ``where`` is the section's name."""
        for key in ("scale", "huber_delta"):
            if getattr(self, key) == 0:
                raise ConfigError(f"{where}.{key} is 0.0; it must be above 0")

    def by(self, loss: str) -> Numbers:
        """How outputs that are trained by a loss are numbers, once "auto" is settled."""
        from jrec.regression import Numbers

        location = 0.0 if self.location is None else self.location
        scale = 1.0 if self.scale is None else self.scale
        return Numbers(link="log" if loss == "poisson" else "identity", location=location, scale=scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTaskSection(Section):
    """``[model.multi_task]``: the heads of a dataset with several labels (``jrec.nn.MultiTaskConfig``).

    The layers of ``model.top_mlp`` but its last, the logit, are what the tasks share.

    Attributes:
      tasks: The tasks, which are the dataset's labels; the first is the one by which steps are compared, unless
        ``evaluate.early_stopping.task`` names another. Empty takes them from the dataset.
      experts: 1 for a shared bottom. More for MMoE: as many MLPs of the layers that are shared, of whose outputs each
        task reads a mean with weights by a gate of its own.
      tower_mlp: Widths of each task's own layers before its logit; empty for none.
      weights: How much each task's loss counts, by task; 1 unless given. The loss is the sum of these times the mean
        loss over the examples whose label of the task is known: cross entropy, or what ``losses`` says.
      losses: By task whose label is a number, what training makes smaller: "squared" error, unless given, "huber" or
        "poisson", as of ``model.loss``.
      numbers: By task whose label is a number, how outputs become numbers, as ``model.numbers``.
    """

    tasks: tuple[str, ...] = ()
    experts: Annotated[int, Range(minimum=1, maximum=1024)] = 1
    tower_mlp: tuple[Width, ...] = (32,)
    weights: Mapping[str, Amount] = dataclasses.field(default_factory=dict)
    losses: Mapping[str, Literal["squared", "huber", "poisson"]] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, NumbersSection] = dataclasses.field(default_factory=dict)

    @override
    def check(self) -> None:
        if not all(self.tasks) or len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"model.multi_task.tasks is {list(self.tasks)}; name each task once")
        for key in ("weights", "losses", "numbers"):
            if self.tasks and (unknown := sorted(getattr(self, key).keys() - {*self.tasks})):
                raise ConfigError(
                    f"model.multi_task.{key} names {unknown[0]!r}, but the tasks are {', '.join(self.tasks)}"
                )
        for task, section in self.numbers.items():
            section.check_above_0(f"model.multi_task.numbers.{task}")
        if self.tasks and not any(self.weight_by_task.values()):
            raise ConfigError("model.multi_task.weights are all 0, so that there is nothing to train; raise one")

    @property
    def weight_by_task(self) -> dict[str, float]:
        """The weight of every task."""
        return {task: self.weights.get(task, 1.0) for task in self.tasks}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """``[model]``: a model of clicks, one that ranks items, or a network of one's own (``factory``).

    Attributes:
      kind: "dlrm"; "tbsm", a DLRM tower on every step of a history with attention over them; "din", a history's items
        weighed by what they have to do with the target; "hstu" or "sasrec", an encoder of a user's items that tells
        the next one (``sequence``); or "two_tower", a tower for users and one for items (``two_tower``). The last three
        read of the keys below only ``embedding_dim``, ``table_dtype``, ``compute_dtype``, ``dropout`` and their own;
        "two_tower" also ``pooling`` and ``features``.
      embedding_dim: Elements of an embedding.
      bottom_mlp: Widths of the layers over the dense features, without the input. Under interaction "dot" and "fm" the
        last must equal ``embedding_dim``. Empty for a dataset without dense features.
      top_mlp: Widths of the layers over the interaction; the last is 1, the logit.
      interaction: "dot" products of all pairs (strict lower triangle), plain "concat"enation, "fm" (DeepFM), or "dcn"
        (DCN-v2); see ``jrec.nn.DLRMConfig``.
      wide: Whether first-order terms, a weight of every id and of every dense feature, join the logit. Rows then have
        one more element than ``embedding_dim``.
      cross_layers: Cross layers of "dcn".
      cross_rank: Rank of their weight matrices; 0 for full ones.
      dot_with: What the top MLP reads beside dot products: the "bottom" MLP's output, or also the concatenated
        "embeddings". "auto" is "bottom", or "embeddings" where the dataset has no dense features.
      pooling: How the ids of a multi-hot feature are combined, unless ``features`` overrides it. "none" keeps one
        vector per id: a DLRM sees such a feature as as many features as its longest list has ids.
      table_dtype: The dtype of stored rows. Sums always accumulate in float32.
      compute_dtype: The dtype of the MLPs' computation.
      dropout: The rate of dropout in training after each hidden layer of the bottom and top MLPs, those that another
        layer of theirs follows.
      batch_norm: Whether these layers have BatchNorm before their ReLU, over the real examples of the whole batch.
      dense_boundaries: By dense feature, ascending numbers such as its quantiles, at least two. The bottom MLP then has
        an input for each piece between two of them, 0 below, 1 above and linear between, in place of the value, whose
        scale no longer matters.
      calibrate: Whether every evaluation in training fits a scale of the logit to the first of ``evaluate.splits``, by
        which the model predicts from then on, and a shift by which its mean prediction is right on as many examples of
        training (of packs, none). It changes no ranking; probabilities that became too extreme or too timid are put
        right.
      label_smoothing: How far the loss moves labels towards one half: at 0.1 a click is trained as 0.95, no click as
        0.05, so that no logit grows without end. Scores and reports take the labels as they are.
      loss: What training makes smaller: "log_loss" of clicks; or, where the label is a number, "squared" error,
        "huber", which counts errors beyond ``numbers.huber_delta`` less, or "poisson" for counts, whose predictions are
        never negative. "auto" is "log_loss", or "squared" of numbers.
      members: How many models are trained side by side on parts of the same rows, each with layers of its own; the
        logit is the mean of theirs, as of an ensemble. Rows have ``members`` times as many elements. On small logs it
        ranks and predicts better than one model with rows as large.
      features: Settings of single categorical features, by name.
      sections: The kind's own section, by its name, such as ``[model.tbsm]``.
      multi_task: The heads of a dataset with several labels.
      numbers: How outputs become numbers, where the label is one.
      factory: A function that makes another network, as "package.module:function", see ``jrec.app.models.factory``; ""
        for none. Of the keys above only ``embedding_dim``, ``pooling``, ``table_dtype``, ``features``,
        ``label_smoothing``, ``loss``, ``numbers``, ``weights``, ``losses`` and ``numbers`` of ``multi_task`` and, for
        "two_tower", ``kind`` and its section are then read.
      options: The factory's own keyword arguments.
    """

    kind: Annotated[str, Choices(kinds.names)] = "dlrm"
    embedding_dim: Annotated[int, Range(minimum=1, maximum=4096)] = 16
    bottom_mlp: tuple[Width, ...] = (64, 16)
    top_mlp: tuple[Width, ...] = (64, 1)
    interaction: Literal["dot", "concat", "fm", "dcn"] = "dot"
    wide: bool = False
    cross_layers: Annotated[int, Range(minimum=1, maximum=64)] = 3
    cross_rank: Annotated[int, Range(minimum=0, maximum=65536)] = 0
    dot_with: Literal["auto", "bottom", "embeddings"] = "auto"
    pooling: Pooling = "sum"
    table_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    dropout: Annotated[float, Range(minimum=0, below=1)] = 0.0
    batch_norm: bool = False
    dense_boundaries: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    calibrate: bool = False
    label_smoothing: Annotated[float, Range(minimum=0, below=1)] = 0.0
    loss: Literal["auto", "log_loss", "squared", "huber", "poisson"] = "auto"
    members: Annotated[int, Range(minimum=1, maximum=64)] = 1
    features: Mapping[str, FeatureOverride] = dataclasses.field(default_factory=dict)
    sections: Annotated[Mapping[str, Section], Open(kinds.SectionNames(), kinds.section_class)] = dataclasses.field(
        default_factory=dict
    )
    multi_task: MultiTaskSection = dataclasses.field(default_factory=MultiTaskSection)
    numbers: NumbersSection = dataclasses.field(default_factory=NumbersSection)
    factory: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @override
    def check(self) -> None:
        kind = self.of_kind
        self.numbers.check_above_0("model.numbers")
        self._settle_sections(kind)
        if self.factory:
            self._check_factory(kind)
            return
        if self.options:
            raise ConfigError(
                f"model.options has {', '.join(self.options)}, but model.factory, whose arguments they are, is not set"
            )
        if kind.keys is not None and (odd := self._set_besides(("kind", *kind.keys, kind.section_name))):
            raise ConfigError(f"{odd} set, but model.kind is {self.kind!r}, which does not read that; leave it out")
        kind.check(self)

    def _settle_sections(self, kind: kinds.ModelKind[Section]) -> None:
        """Leaves the kind's own section; refuses others in which something is set."""
        own = kind.section_name
        for name, section in self.sections.items():
            if name != own and section != type(section)():
                readers = " or ".join(map(repr, kinds.kinds_with(name)))
                raise ConfigError(
                    f"model.{name} is set, but model.kind is {self.kind!r}; set model.kind to {readers}, or leave it"
                    " out"
                )
        settled = {} if kind.section is None else {own: self.sections.get(own) or kind.section()}
        object.__setattr__(self, "sections", settled)

    @property
    def of_kind(self) -> kinds.ModelKind[Section]:
        """The kind of model, which knows all that depends on it."""
        return kinds.kind_of(self)

    @property
    def numbers_by_label(self) -> dict[str, Numbers]:
        """How outputs are numbers, by task whose label is one; under "" where there is one label."""
        if self.multi_task.tasks:
            heads = self.multi_task
            losses = {task: heads.losses[task] for task in heads.tasks if task in heads.losses}
            return {task: heads.numbers.get(task, NumbersSection()).by(loss) for task, loss in losses.items()}
        return {} if self.loss in ("auto", "log_loss") else {"": self.numbers.by(self.loss)}

    def _check_factory(self, kind: kinds.ModelKind[Section]) -> None:
        """Refuses keys that only the networks of jrec read."""
        if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", self.factory):
            raise ConfigError(f"model.factory is {self.factory!r}, not package.module:function")
        of_kind = ("kind", kind.section_name) if kind.takes_factory else ("label_smoothing", "loss", "numbers")
        if dataclasses.replace(self.multi_task, tasks=(), weights={}, losses={}, numbers={}) == MultiTaskSection():
            of_kind = (*of_kind, "multi_task")
        if odd := self._set_besides((*kinds.FACTORY_KEYS, *of_kind)):
            raise ConfigError(
                f"{odd} set, but model.factory is {self.factory}, whose model does not read that; leave it out, or give"
                " it to the factory as a key of [model.options]"
            )

    def _set_besides(self, read: Collection[str]) -> str:
        """The keys that are set besides those that are read, for a message: "model.wide is"; "" for none."""
        default, own = ModelConfig().to_dict(), self.to_dict()
        odd = [f"model.{key}" for key in default if key not in read and own[key] != default[key]]
        return f"{', '.join(odd)} {'is' if len(odd) == 1 else 'are'}" if odd else ""

    @property
    def table_dim(self) -> int:
        """Elements of a table's row: of each member an embedding, and the first-order weight of a wide model."""
        return self.members * (self.embedding_dim + self.wide)
