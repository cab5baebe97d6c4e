"""The ``[model]`` section: a DLRM, a TBSM or a model of one's own."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, override

from jrec.errors import ConfigError
from jrec.train.config.typed_toml import Range, Section, Width

Dtype = Literal["float32", "bfloat16", "float16"]
Pooling = Literal["sum", "mean", "sqrtn", "max", "none"]
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
class ModelConfig(Section):
    """``[model]``: the DLRM or TBSM, or a model of one's own (``factory``).

    Attributes:
      kind: "dlrm", or "tbsm", a DLRM tower on every step of a history with attention over them.
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
        which the model predicts from then on. It changes no ranking and not the mean prediction; probabilities that
        became too extreme or too timid are put right.
      members: How many models are trained side by side on parts of the same rows, each with layers of its own; the
        logit is the mean of theirs, as of an ensemble. Rows have ``members`` times as many elements. On logs of up to
        some million examples it ranks and predicts better than one model with as large rows.
      features: Settings of single categorical features, by name.
      tbsm: The rest of a TBSM.
      factory: A function that makes another model, as "package.module:function", see ``jrec.train.factory``; "" for
        none. Of the keys above only ``embedding_dim``, ``pooling``, ``table_dtype`` and ``features`` are then read.
      options: The factory's own keyword arguments.
    """

    kind: Literal["dlrm", "tbsm"] = "dlrm"
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
        if self.kind == "tbsm":
            self._check_tbsm()

    def _check_factory(self) -> None:
        """Refuses keys that only the models of jrec read."""
        if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", self.factory):
            raise ConfigError(f"model.factory is {self.factory!r}, not package.module:function")
        default, own = ModelConfig().to_dict(), self.to_dict()
        if odd := [f"model.{key}" for key in default if key not in OWN_MODEL_KEYS and own[key] != default[key]]:
            raise ConfigError(
                f"{', '.join(odd)} {'is' if len(odd) == 1 else 'are'} set, but model.factory is {self.factory}, whose"
                " model does not read that; leave it out, or give it to the factory as a key of [model.options]"
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
