"""The configuration of a training run: ``load_config`` reads it from TOML and ``section.key=value`` overrides.

Sections: ``[data]``, ``[model]``, ``[tables]`` (``tables``), ``[optimizer]``, ``[optimizer.embedding]`` and
``[lr_schedule]`` (``optimizer``), ``[fae]`` (``fae``), ``[evaluate]``, ``[checkpoint]``, ``[log]`` and
``[mesh]`` (``mesh``). Only ``data.path`` has no default.
This module imports no JAX.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, override

from jrec.errors import ConfigError
from jrec.outputs import write_file
from jrec.train.config.fae import FAEConfig
from jrec.train.config.mesh import MeshConfig
from jrec.train.config.optimizer import LRScheduleConfig, OptimizerConfig
from jrec.train.config.overrides import read_tables
from jrec.train.config.shipped import find_config
from jrec.train.config.tables import TablesConfig
from jrec.train.config.tbsm import TBSMSection
from jrec.train.config.typed_toml import Auto, Range, Section, describe

Count = Annotated[int, Range(minimum=0)]
Positive = Annotated[int, Range(minimum=1)]
Width = Annotated[int, Range(minimum=1, maximum=65536)]
BatchSize = Annotated[int, Range(minimum=1, maximum=2**24)]  # room is made for whole batches
Ahead = Annotated[int, Range(minimum=0, maximum=1024)]  # threads, or batches under way
Dtype = Literal["float32", "bfloat16", "float16"]
OWN_MODEL_KEYS = ("factory", "options", "embedding_dim", "pooling", "table_dtype", "features")
"""The keys of ``[model]`` that say something of a model by ``model.factory``."""
Pooling = Literal["sum", "mean", "sqrtn", "max", "none"]
SplitName = Literal["train", "valid", "test"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """``[data]``: the dataset and how it is loaded.

    Attributes:
      path: A dataset folder made by ``jrec prepare`` or ``jrec synth``.
      batch_size, eval_batch_size: Examples in a step.
      micro_batches: In how many slices of a batch, or of each device's part, the MLPs see the examples, one after
        another, so that their activations take the memory of one. A step stays one step of the whole batch.
      window_blocks: Blocks held in memory at a time, within which examples are shuffled; 0 keeps the order of the log.
      workers: Threads that read and pack batches; 0 does it between the steps. The batches do not depend on it.
      prefetch: Batches made ahead of the step.
      cast: Where the cast of a batch is computed: by the loader on the "host", or by the step on the "device".
      on_bad_id: How out-of-range ids are handled: an error ("raise"), the last row ("clip") or the table's
        out-of-vocabulary row ("oov").
      drop_remainder: Whether to leave out an epoch's last training batch if it is not full, instead of padding it.
    """

    path: str
    batch_size: BatchSize = 2048
    eval_batch_size: BatchSize = 8192
    micro_batches: Annotated[int, Range(minimum=1, maximum=2**24)] = 1
    window_blocks: Annotated[int, Range(minimum=0, maximum=2**20)] = 16
    workers: Ahead = 2
    prefetch: Ahead = 4
    cast: Literal["host", "device"] = "host"
    on_bad_id: Literal["raise", "clip", "oov"] = "raise"
    drop_remainder: bool = False

    @override
    def check(self) -> None:
        if not self.path:
            raise ConfigError("data.path is empty; give the folder of a dataset made by `jrec prepare` or `jrec synth`")
        if self.batch_size % self.micro_batches:
            raise ConfigError(
                f"data.batch_size is {self.batch_size}, which data.micro_batches = {self.micro_batches} do not divide;"
                " use a multiple of them"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureOverride(Section):
    """``[model.features.NAME]``: one categorical feature's own settings."""

    pooling: Pooling


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
        one_dim = self.interaction in ("dot", "fm")
        if one_dim and self.bottom_mlp and self.bottom_mlp[-1] != self.embedding_dim:
            raise ConfigError(
                f"model.bottom_mlp is {list(self.bottom_mlp)}, but under {self.interaction} interaction its last width"
                f" must equal model.embedding_dim = {self.embedding_dim}"
            )
        if self.wide and self.embedding_dim == 4096:
            raise ConfigError("model.embedding_dim is 4096, but the greatest with model.wide = true is 4095")
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
        """Elements of a table's row: of an embedding, and the first-order weight of a wide model."""
        return self.embedding_dim + self.wide

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
        if self.interaction not in ("dot", "concat") or self.wide or self.dot_with != "auto":
            raise ConfigError(
                f"model.kind is 'tbsm', but model.interaction is {self.interaction!r}, model.wide {self.wide} and"
                f" model.dot_with {self.dot_with!r}; a TBSM has interaction 'dot' or 'concat' and none of the others"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStoppingSection(Section):
    """``[evaluate.early_stopping]``: when training ends before its last step, and which step is the best.

    Attributes:
      metric: The metric of the first of ``evaluate.splits`` by which steps are compared.
      patience: Evaluations in a row without a better one after which training ends; 0 never ends it early.
    """

    metric: Literal["auc", "log_loss"] = "auc"
    patience: Count = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """``[evaluate]``: when the model is evaluated, on which splits, and what its scores are compared with.

    Attributes:
      every_steps: Steps between evaluations during training; 0 evaluates only at the end. "auto" evaluates up to 16
        times, on at most 8 batches each, as often as costs a few per cent of training; never with schedule "fae",
        whose schedules report a split's loss themselves.
      splits: The splits for evaluations during training.
      batches: The most batches of each split that they read; 0 for all.
      final_splits: The splits for the evaluation at the end, read in full; splits that the dataset lacks are left out.
      early_stopping: When to end training early.
      baselines: Whether the report compares the model with logistic regression and with popularity, which are fitted to
        the training split on the CPU; "auto" does up to 10 million training examples.
      group: A categorical feature of one id an example, such as a user: the report then has AUC by its values (GAUC).
    """

    every_steps: Annotated[int, Range(minimum=0), Auto()] | None = None
    splits: tuple[SplitName, ...] = ("valid",)
    batches: Count = 0
    final_splits: tuple[SplitName, ...] = ("valid", "test")
    early_stopping: EarlyStoppingSection = dataclasses.field(default_factory=EarlyStoppingSection)
    baselines: Literal["auto", "on", "off"] = "auto"
    group: str = ""

    @override
    def check(self) -> None:
        if self.early_stopping.patience and not (self.splits and self.every_steps != 0):
            raise ConfigError(
                f"evaluate.early_stopping.patience is {self.early_stopping.patience}, but evaluate.every_steps is"
                f" {self.every_steps} and evaluate.splits {list(self.splits)}; training can end early only by"
                " evaluations: give evaluate.every_steps, or leave it out"
            )
        if self.every_steps and not self.splits:
            raise ConfigError(f"evaluate.every_steps is {self.every_steps}, but evaluate.splits is empty")
        for name, splits in (("splits", self.splits), ("final_splits", self.final_splits)):
            if len(set(splits)) < len(splits):
                raise ConfigError(f"evaluate.{name} is {list(splits)}; name each split once")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """``[checkpoint]``: when checkpoints are written, and which are kept.

    Attributes:
      every_steps: Steps between checkpoints; 0 writes only one at the end.
      keep: How many of the latest are kept.
      keep_best: Whether to write one at every evaluation that is the best so far by
        ``evaluate.early_stopping.metric``, and keep the best besides the latest; the final scores are then its own.
    """

    every_steps: Count = 0
    keep: Positive = 2
    keep_best: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """``[log]``: a run's log, progress bar and trace.

    Attributes:
      every_steps: Steps between metric records.
      tensorboard: Whether to write TensorBoard files too.
      progress: The progress bar; "auto" shows it on a terminal.
      trace: Whether to write when each stage of the host tier worked on which batch, as ``trace.json`` in the
        run's folder, for https://ui.perfetto.dev.
    """

    every_steps: Positive = 50
    tensorboard: bool = True
    progress: Literal["auto", "on", "off"] = "auto"
    trace: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """A whole training run.

    Attributes:
      name: The run's name; the file's name without ``.toml`` unless given.
      seed: The seed of the initial parameters, the order of the data and stochastic rounding.
      epochs: Passes over the training split.
      max_steps: The most steps of the run; 0 for no limit.
      out: The run folder, ``runs/NAME`` unless given.
      schedule: The order of training batches: "plain" takes them as the loader shuffles them; "fae" interleaves hot and
        cold ones of a dataset that `jrec fae pack` wrote, keeps hot rows on the device, and all others in host memory
        (``tables.tier`` is then "host").
      deterministic: Whether a GPU must compute the same bits every time. Tables' rows do so by default; this also makes
        XLA keep to one algorithm for the products of dense layers, and to sums in a fixed order, which may cost speed.
        On a CPU all bits are the same anyway.
      init_from: A run folder, a folder of ``Run.save``, or one checkpoint in either, whose model, rows and optimizer
        slots the run begins with, on a dataset whose rows mean the same; "" begins with fresh ones.
      plan: The file of the plan that assigns rows to devices (``jrec plan``), for a mesh; without one, the rows of
        every table are dealt to the devices in turn.
    """

    data: DataConfig
    name: str = "run"
    seed: Annotated[int, Range(minimum=0, maximum=2**32 - 1)] = 0
    epochs: Positive = 1
    max_steps: Count = 0
    out: str = ""
    schedule: Literal["plain", "fae"] = "plain"
    deterministic: bool = False
    init_from: str = ""
    plan: str = ""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    tables: TablesConfig = dataclasses.field(default_factory=TablesConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lr_schedule: LRScheduleConfig = dataclasses.field(default_factory=LRScheduleConfig)
    fae: FAEConfig = dataclasses.field(default_factory=FAEConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    @override
    def check(self) -> None:
        if not re.fullmatch(r"[\w][\w.+-]*", self.name):
            raise ConfigError(f"name is {self.name!r}; use letters, digits, '_', '.', '+' and '-', and no '.' at first")
        if self.schedule == "fae" and not self.plan:
            object.__setattr__(self, "tables", dataclasses.replace(self.tables, tier="host"))
        if not self.out:
            object.__setattr__(self, "out", f"runs/{self.name}")
        if self.checkpoint.keep_best and not (self.evaluate.splits and self.evaluate.every_steps != 0):
            raise ConfigError(
                f"checkpoint.keep_best is true, but evaluate.every_steps is {self.evaluate.every_steps} and"
                f" evaluate.splits {list(self.evaluate.splits)}; evaluations decide which checkpoint is the best: give"
                " evaluate.every_steps, or leave it out"
            )

    @property
    def planned(self) -> bool:
        """Whether a plan places every row; else all rows of a table live in one place, on one device.

        Runs on several devices and runs with separate hot rows always have one.
        """
        return self.mesh.on or bool(self.plan) or self.schedule == "fae"


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> TrainConfig:
    """Reads a run's configuration.

    Args:
      path: A TOML file, or the name of one that comes with jrec (``shipped_configs``).
      overrides: ``section.key=value`` texts that win over the file; see ``jrec.train.config.overrides.read_tables``.
        ``model=package.module:function`` is short for ``model.factory=...``.

    Returns:
      The configuration with every default filled in.

    Raises:
      ConfigError: If the file cannot be read, or a key is unknown, ill-typed, missing or out of range. The message
        names the file or the override, the key, its valid values, and for unknown keys the nearest valid one.
    """
    path = find_config(path)
    content, origins = read_tables(path, map(_with_factory, overrides))
    if isinstance(content.get("schedule"), Mapping):
        raise ConfigError(f"{origins['schedule']}: the section [schedule] is called [lr_schedule]; rename it")
    if "name" not in content:
        content["name"] = re.sub(r"[^\w.+-]|^[.+-]+", "_", pathlib.Path(path).stem)
    return TrainConfig.from_dict(content, origins)


def _with_factory(override: str) -> str:
    key, equals, value = override.partition("=")
    return (
        f"model.factory={value}"
        if equals and key.strip() == "model" and ":" in value and "{" not in value
        else override
    )


def save_config(config: TrainConfig, path: str | os.PathLike[str]) -> None:
    """Writes the resolved configuration as TOML, atomically; ``load_config`` reads an equal one back."""
    write_file(path, config.to_toml())


def differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ, with both values; None stands for a key that is not set."""
    before, after = old.flatten(), new.flatten()
    everything = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in everything if before.get(key) != after.get(key)}


def key_help() -> str:
    """Every key with its default and valid values, one per line, for ``jrec train --help``."""
    rows = list(describe(TrainConfig))
    width = max(len(f"{key} = {default}") for key, _, default in rows)
    return "\n".join(f"  {f'{key} = {default}' if default else key:<{width}}  {kind}" for key, kind, default in rows)
