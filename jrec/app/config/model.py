"""The ``[model]`` section: a DLRM, a TBSM, a model that ranks items or a model of one's own."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, override

from jrec.app.config.typed_toml import Amount, Range, Section, Width
from jrec.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
Pooling = Literal["sum", "mean", "sqrtn", "max", "none"]
Kind = Literal["dlrm", "tbsm", "hstu", "sasrec", "two_tower"]
_RANKING = ("kind", "embedding_dim", "table_dtype", "compute_dtype", "dropout")
_SEQUENCES = (*_RANKING, "sequence")
RANKING_KEYS = {
    "hstu": _SEQUENCES,
    "sasrec": _SEQUENCES,
    "two_tower": (*_RANKING, "pooling", "features", "two_tower"),
}
"""By kind that ranks items, the keys of ``[model]`` that it reads."""
OWN_MODEL_KEYS = ("factory", "options", "embedding_dim", "pooling", "table_dtype", "features")
"""The keys of ``[model]`` that say something of a model by ``model.factory``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureOverride(Section):
    """``[model.features.NAME]``: one categorical feature's own settings.

    Attributes:
      pooling: How the rows of the feature's ids become one vector, in place of ``model.pooling``.
    """

    pooling: Pooling


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
        cross entropy over the examples whose label of the task is known.
    """

    tasks: tuple[str, ...] = ()
    experts: Annotated[int, Range(minimum=1, maximum=1024)] = 1
    tower_mlp: tuple[Width, ...] = (32,)
    weights: Mapping[str, Amount] = dataclasses.field(default_factory=dict)

    @override
    def check(self) -> None:
        if not all(self.tasks) or len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"model.multi_task.tasks is {list(self.tasks)}; name each task once")
        if self.tasks and (unknown := sorted(self.weights.keys() - {*self.tasks})):
            raise ConfigError(
                f"model.multi_task.weights names {unknown[0]!r}, but the tasks are {', '.join(self.tasks)}"
            )
        if self.tasks and not any(self.weight_by_task.values()):
            raise ConfigError("model.multi_task.weights are all 0, so that there is nothing to train; raise one")

    @property
    def weight_by_task(self) -> dict[str, float]:
        """The weight of every task."""
        return {task: self.weights.get(task, 1.0) for task in self.tasks}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceSection(Section):
    """``[model.sequence]``: what kinds "hstu" and "sasrec" read, and how they are trained (``jrec.nn.NextItem``).

    At every position of a history the model is to tell the item that comes next from sampled ones.

    Attributes:
      history: The list feature with a user's items in order of time, as the schema's ``history`` makes it.
      item: The feature of the same table with the item that comes after them.
      blocks: Layers.
      heads: Attention heads of a layer.
      attention_dim: Elements of a head's queries and keys; 0 for ``embedding_dim`` by ``heads``.
      hidden_dim: HSTU: elements of a head's values and gates, 0 for ``embedding_dim`` by ``heads``. SASRec: the hidden
        width of the position-wise layers, 0 for ``embedding_dim``.
      sampled: Items that are drawn for each example of a batch, uniformly from the table; all of a batch's are the
        negatives of every position.
      temperature: What cosines of vectors are divided by, to be logits of the softmax.
      ages: HSTU: whether it reads how long ago the items of a history were, where the dataset's schema names ages.
    """

    history: str = "history"
    item: str = "item"
    blocks: Annotated[int, Range(minimum=1, maximum=256)] = 2
    heads: Annotated[int, Range(minimum=1, maximum=256)] = 1
    attention_dim: Annotated[int, Range(minimum=0, maximum=65536)] = 0
    hidden_dim: Annotated[int, Range(minimum=0, maximum=65536)] = 0
    sampled: Annotated[int, Range(minimum=1, maximum=2**16)] = 8
    temperature: Annotated[float, Range(above=0, maximum=1000)] = 0.05
    ages: bool = True

    @override
    def check(self) -> None:
        if self.history == self.item:
            raise ConfigError(
                f"model.sequence.history and model.sequence.item are both {self.item!r}; name two of them"
            )


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
        not pushed away for being negatives often. The share is that of the table's accesses.
    """

    user: tuple[str, ...] = ()
    item: tuple[str, ...] = ()
    id: str = ""
    history: str = ""
    user_mlp: tuple[Width, ...] = (128, 64)
    item_mlp: tuple[Width, ...] = (128, 64)
    temperature: Annotated[float, Range(above=0, maximum=1000)] = 0.05
    log_q: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """``[model]``: the DLRM or TBSM, a model that ranks items, or a model of one's own (``factory``).

    Attributes:
      kind: "dlrm", or "tbsm", a DLRM tower on every step of a history with attention over them; "hstu" or "sasrec", an
        encoder of a user's items that tells the next one (``sequence``), or "two_tower", a tower for users and one for
        items (``two_tower``). These three read of the keys below only ``embedding_dim``, ``table_dtype``,
        ``compute_dtype``, ``dropout`` and their own; "two_tower" also ``pooling`` and ``features``.
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
      members: How many models are trained side by side on parts of the same rows, each with layers of its own; the
        logit is the mean of theirs, as of an ensemble. Rows have ``members`` times as many elements. On small logs it
        ranks and predicts better than one model with rows as large.
      features: Settings of single categorical features, by name.
      tbsm: The rest of a TBSM.
      sequence: The rest of "hstu" and "sasrec".
      two_tower: The rest of "two_tower".
      multi_task: The heads of a dataset with several labels.
      factory: A function that makes another model, as "package.module:function", see ``jrec.app.models.factory``; ""
        for none. Of the keys above only ``embedding_dim``, ``pooling``, ``table_dtype`` and ``features`` are then read.
      options: The factory's own keyword arguments.
    """

    kind: Kind = "dlrm"
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
    members: Annotated[int, Range(minimum=1, maximum=64)] = 1
    features: Mapping[str, FeatureOverride] = dataclasses.field(default_factory=dict)
    tbsm: TBSMSection = dataclasses.field(default_factory=TBSMSection)
    sequence: SequenceSection = dataclasses.field(default_factory=SequenceSection)
    two_tower: TwoTowerSection = dataclasses.field(default_factory=TwoTowerSection)
    multi_task: MultiTaskSection = dataclasses.field(default_factory=MultiTaskSection)
    factory: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @override
    def check(self) -> None:
        if self.factory:
            self._check_factory()
            return
        if self.options:
            raise ConfigError(
                f"model.options has {', '.join(self.options)}, but model.factory, whose arguments they are, is not set"
            )
        if self.ranks:
            self._check_ranking()
            return
        for name, own in self.dense_boundaries.items():
            if len(own) < 2 or any(not low < high for low, high in itertools.pairwise(own)):
                raise ConfigError(
                    f"model.dense_boundaries.{name} is {list(own)}; give at least two numbers in ascending order, or"
                    " leave the feature out"
                )
        one_dim = self.interaction in ("dot", "fm")
        if one_dim and self.bottom_mlp and self.bottom_mlp[-1] != self.embedding_dim:
            raise ConfigError(
                f"model.bottom_mlp is {list(self.bottom_mlp)}, but under {self.interaction} interaction its last width"
                f" must equal model.embedding_dim = {self.embedding_dim}"
            )
        if self.table_dim > 4096:
            raise ConfigError(
                f"model.embedding_dim = {self.embedding_dim} with model.wide = {str(self.wide).lower()} and"
                f" model.members = {self.members} makes rows of {self.table_dim:,} elements; the most are 4,096"
            )
        self._check_interaction()
        if not self.top_mlp or self.top_mlp[-1] != 1:
            raise ConfigError(f"model.top_mlp is {list(self.top_mlp)}, but its last width must be 1, the logit")
        if self.kind == "dlrm" and self.tbsm != TBSMSection():
            raise ConfigError("model.tbsm is set, but model.kind is 'dlrm'; set model.kind to 'tbsm', or leave it out")
        if self.sequence != SequenceSection():
            raise ConfigError(
                f"model.sequence is set, but model.kind is {self.kind!r}; set model.kind to 'hstu' or 'sasrec', or"
                " leave it out"
            )
        if self.two_tower != TwoTowerSection():
            raise ConfigError(
                f"model.two_tower is set, but model.kind is {self.kind!r}; set model.kind to 'two_tower', or leave it"
                " out"
            )
        if self.kind == "tbsm":
            self._check_tbsm()
        if self.multi_task.tasks:
            self._check_multi_task()

    def _check_factory(self) -> None:
        """Refuses keys that only the models of jrec read."""
        if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", self.factory):
            raise ConfigError(f"model.factory is {self.factory!r}, not package.module:function")
        if odd := self._set_besides(OWN_MODEL_KEYS):
            raise ConfigError(
                f"{odd} set, but model.factory is {self.factory}, whose model does not read that; leave it out, or give"
                " it to the factory as a key of [model.options]"
            )

    def _check_ranking(self) -> None:
        """Refuses keys that other models read."""
        if odd := self._set_besides(RANKING_KEYS[self.kind]):
            raise ConfigError(f"{odd} set, but model.kind is {self.kind!r}, which does not read that; leave it out")
        if self.kind == "two_tower":
            self._check_towers()
            return
        own = self.sequence
        if self.embedding_dim % own.heads and not (own.attention_dim and own.hidden_dim):
            raise ConfigError(
                f"model.sequence.heads is {own.heads}, which does not divide model.embedding_dim ="
                f" {self.embedding_dim}; use another number of heads, or give model.sequence.attention_dim and"
                " model.sequence.hidden_dim"
            )

    def _check_towers(self) -> None:
        own = self.two_tower
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
        pooled = {f"model.features.{name}": feature.pooling for name, feature in self.features.items()}
        if whole := [key for key, pooling in {"model.pooling": self.pooling, **pooled}.items() if pooling == "none"]:
            raise ConfigError(f"{whole[0]} is 'none', but a tower reads one vector of each feature; pool it")

    def _set_besides(self, read: Collection[str]) -> str:
        """The keys that are set besides those that are read, for a message: "model.wide is"; "" for none."""
        default, own = ModelConfig().to_dict(), self.to_dict()
        odd = [f"model.{key}" for key in default if key not in read and own[key] != default[key]]
        return f"{', '.join(odd)} {'is' if len(odd) == 1 else 'are'}" if odd else ""

    @property
    def ranks(self) -> bool:
        """Whether the model ranks items for a user, in place of a click's probability."""
        return not self.factory and self.kind in RANKING_KEYS

    @property
    def ranked(self) -> str:
        """Of a model that ranks items, the feature with the item that a user is to find."""
        return self.two_tower.id if self.kind == "two_tower" else self.sequence.item

    @property
    def history(self) -> str:
        """Of a model that ranks items, the feature with a user's items, which may be left out; "" for none."""
        return self.two_tower.history if self.kind == "two_tower" else self.sequence.history

    def _check_multi_task(self) -> None:
        """Refuses keys that are of one logit."""
        odd = {"model.wide": self.wide, "model.calibrate": self.calibrate, "model.batch_norm": self.batch_norm}
        odd = {key: "true" for key, given in odd.items() if given}
        odd |= {"model.members": f"{self.members}"} if self.members > 1 else {}
        odd |= {"model.interaction": "'fm'"} if self.interaction == "fm" else {}
        odd |= {"model.tbsm.heads": f"{self.tbsm.heads}"} if self.tbsm.heads > 1 else {}
        for key, value in odd.items():
            raise ConfigError(
                f"{key} is {value}, which is of models with one label, but there are {len(self.multi_task.tasks)}"
                f" (model.multi_task.tasks: {', '.join(self.multi_task.tasks)}); leave it out"
            )
        if len(self.top_mlp) < 2:
            raise ConfigError(
                f"model.top_mlp is {list(self.top_mlp)}, but its layers before the logit are what tasks share"
                " (model.multi_task); give at least one, as in [64, 1]"
            )

    @property
    def table_dim(self) -> int:
        """Elements of a table's row: of each member an embedding, and the first-order weight of a wide model."""
        return self.members * (self.embedding_dim + self.wide)

    def _check_interaction(self) -> None:
        """Refuses keys that the interaction does not read."""
        for key, default, interaction in (
            ("cross_layers", 3, "dcn"),
            ("cross_rank", 0, "dcn"),
            ("dot_with", "auto", "dot"),
        ):
            if getattr(self, key) != default and self.interaction != interaction:
                raise ConfigError(
                    f"model.{key} is {getattr(self, key)!r}, but model.interaction is {self.interaction!r}; set it to"
                    f" {interaction!r}, or leave model.{key} out"
                )

    def _check_tbsm(self) -> None:
        others = self.wide or self.dot_with != "auto" or self.members > 1
        if self.interaction not in ("dot", "concat") or others:
            raise ConfigError(
                f"model.kind is 'tbsm', but model.interaction is {self.interaction!r}, model.wide {self.wide},"
                f" model.dot_with {self.dot_with!r} and model.members {self.members}; a TBSM has interaction 'dot' or"
                " 'concat' and none of the others"
            )
        if not self.tbsm.histories:
            raise ConfigError(
                "model.kind is 'tbsm', but model.tbsm.histories is empty; name the history of a feature, as"
                ' histories = {item_id = "item_history"}'
            )
        if not self.bottom_mlp or not self.tbsm.tower_mlp:
            raise ConfigError(
                f"model.bottom_mlp is {list(self.bottom_mlp)} and model.tbsm.tower_mlp {list(self.tbsm.tower_mlp)};"
                " a TBSM needs a layer of each"
            )
        pooled = sorted(name for name, feature in self.features.items() if feature.pooling != "none")
        if pooled := [name for name in pooled if name in self.tbsm.histories.values()]:
            raise ConfigError(f"model.features.{pooled[0]} is pooled, but model.tbsm.histories has it as a history")
