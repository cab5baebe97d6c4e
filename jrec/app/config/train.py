"""The configuration of a training run: ``TrainConfig``, and the sections that have no module of their own.

Only ``data.path`` has no default. This module imports no JAX.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Literal, override

from jrec import environment
from jrec.app.config.model import ModelConfig
from jrec.app.config.optimizer import LRScheduleConfig, OptimizerConfig
from jrec.app.config.tables import TablesConfig
from jrec.app.config.typed_toml import Ahead, Auto, Count, Positive, Range, Section
from jrec.data.moments import duration_seconds
from jrec.errors import ConfigError
from jrec.run.options import MeshOptions

BatchSize = Annotated[int, Range(minimum=1, maximum=2**24)]  # room is made for whole batches
_Percent = Annotated[int, Range(minimum=1, maximum=100)]
SplitName = Literal["train", "valid", "test"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """``[data]``: the dataset and how it is loaded.

    Attributes:
      path: A dataset folder made by ``jrec prepare`` or ``jrec synth``.
      batch_size, eval_batch_size: Examples in a step. Of a model of sequences, whose examples are whole histories, the
        defaults stand for 128 and 512.
      micro_batches: In how many slices of a batch, or of each device's part, the MLPs see the examples, one after
        another, so that their activations take the memory of one. A step stays one step of the whole batch.
      order: Training examples come "shuffled", or in the order of "time", the batches of several processes, too.
      half_life: A duration such as "7d" or "12h": in training an example counts half as much as one that much later,
        beside its weight (docs/order_of_time.md). "" counts all alike.
      window_blocks: Blocks held in memory at a time, within which examples are shuffled; 0 keeps the order of the log.
      workers: Threads that read and pack batches; 0 does it between the steps. The batches do not depend on it. "auto"
        is 2 or, of more than 4 cores, half of them up to 16.
      prefetch: Batches made ahead of the step.
      cast: Where the cast of a batch is computed: by the loader on the "host", or by the step on the "device"; "auto"
        is where the step runs: the host for CPUs, the device for GPUs.
      steps_per_dispatch: How many steps go to the device at once, with the bits of one by one, as far as no log record,
        evaluation or checkpoint comes between them. "auto" is up to 16 on a GPU whose memory holds all rows, else 1.
      on_bad_id: How out-of-range ids are handled: an error ("raise"), the last row ("clip") or the table's
        out-of-vocabulary row ("oov").
      oov_rate: The share of ids that become their table's out-of-vocabulary row in training, drawn anew in each batch.
        Where every value of training has a row of its own, nothing else trains that row, which later values meet. An
        item to rank keeps its row, and so do the ids of packs (schedule "fae").
      drop_remainder: Whether to leave out an epoch's last training batch if it is not full, instead of padding it.
    """

    path: str
    batch_size: BatchSize = 2048
    eval_batch_size: BatchSize = 8192
    micro_batches: Annotated[int, Range(minimum=1, maximum=2**24)] = 1
    order: Literal["shuffled", "time"] = "shuffled"
    half_life: str = ""
    window_blocks: Annotated[int, Range(minimum=0, maximum=2**20)] = 16
    workers: Annotated[int, Range(minimum=0, maximum=1024), Auto()] | None = None
    prefetch: Ahead = 4
    cast: Annotated[Literal["host", "device"], Auto()] | None = None
    steps_per_dispatch: Annotated[int, Range(minimum=1, maximum=4096), Auto()] | None = None
    on_bad_id: Literal["raise", "clip", "oov"] = "raise"
    oov_rate: Annotated[float, Range(minimum=0, below=1)] = 0.0
    drop_remainder: bool = False

    @property
    def shuffled(self) -> bool:
        """Whether training examples come in another order than by time."""
        return self.order == "shuffled" and self.window_blocks > 0

    @property
    def threads(self) -> int:
        """``workers``, of which "auto" asks the machine."""
        return min(16, max(2, environment.cores() // 2)) if self.workers is None else self.workers

    @override
    def check(self) -> None:
        if not self.path:
            raise ConfigError("data.path is empty; give the folder of a dataset made by `jrec prepare` or `jrec synth`")
        if self.batch_size % self.micro_batches:
            raise ConfigError(
                f"data.batch_size is {self.batch_size}, which data.micro_batches = {self.micro_batches} do not divide;"
                " use a multiple of them"
            )
        if self.half_life and duration_seconds(self.half_life) is None:
            raise ConfigError(
                f"data.half_life is {self.half_life!r}; give days, hours, minutes or seconds, such as '7d'"
            )
        if self.half_life and not self.shuffled:
            raise ConfigError(
                f"data.half_life is {self.half_life!r}, which tells the examples of a batch from each other, but those"
                " of a batch in the order of time are of one moment; leave it out, or leave out data.order and"
                " data.window_blocks"
            )

    @property
    def half_life_seconds(self) -> int:
        """``half_life`` in seconds; 0 for none."""
        return duration_seconds(self.half_life) or 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStoppingSection(Section):
    """``[evaluate.early_stopping]``: when training ends before its last step, and which step is the best.

    Attributes:
      metric: The metric of the first of ``evaluate.splits`` by which steps are compared: "auc", "log_loss", or
        "refinement", the log loss that the best scale and shift of the logits leave, whatever the split's click rate
        and training's are; of labels that are numbers "rmse", for which "auc" then stands, "mae", "xauc" or
        "poisson_deviance"; of a model that ranks items "ndcg", "hr" (both at the first of
        ``evaluate.at``) or "mrr", and "auc", the default, stands for "ndcg".
      patience: Evaluations in a row without a better one after which training ends; 0 never ends it early.
      task: Of several labels, the task whose metric it is; "" is the first. A sum over tasks would mix losses of rare
        and of frequent labels, and change with ``model.multi_task.weights``.
    """

    metric: Literal["auc", "log_loss", "refinement", "rmse", "mae", "xauc", "poisson_deviance", "ndcg", "hr", "mrr"] = (
        "auc"
    )
    patience: Count = 0
    task: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """``[evaluate]``: when the model is evaluated, on which splits, and what its scores are compared with.

    Attributes:
      every_steps: Steps between evaluations during training; 0 evaluates only at the end. "auto" evaluates up to 16
        times, on at most 8 batches each, as often as costs a few per cent of training; never with schedule "fae",
        whose schedules report a split's loss themselves.
      splits: The splits for evaluations during training; those without examples are left out.
      batches: The most batches of each split that they read; 0 for all.
      final_splits: The splits for the evaluation at the end, read in full; those without examples are left out.
      progressive: A duration such as "1d" or "12h": training in order of time (``data.order``) is cut into windows of
        it, and the model as it is scores each window before it learns from it (docs/order_of_time.md). "" does not.
      early_stopping: When to end training early.
      baselines: Whether the report compares the model with logistic regression and with popularity, which are fitted to
        the training split on the CPU, or a model that ranks items with popularity, transitions and EASE; "auto" does
        up to 10 million training examples.
      group: A categorical feature of one id an example, such as a user: the report then has AUC by its values (GAUC).
      importance: How often the report permutes each feature on the last of ``final_splits``, to tell how much worse the
        model is without what it says (docs/importance.md); 0 does not. It reads the scored checkpoint again, and scores
        up to 100,000 examples as often for each feature; `jrec eval --importance` does so later.
      at: Of a model that ranks items (``model.kind`` "hstu", "sasrec" or "two_tower"): the k of HR@k and NDCG@k.
      leave_out_history: Of such a model: whether the items of a history are left out where the item after it is ranked
        among all, and of predictions. An item that a user comes back to then counts as not found.
    """

    every_steps: Annotated[int, Range(minimum=0), Auto()] | None = None
    splits: tuple[SplitName, ...] = ("valid",)
    batches: Count = 0
    final_splits: tuple[SplitName, ...] = ("valid", "test")
    progressive: str = ""
    early_stopping: EarlyStoppingSection = dataclasses.field(default_factory=EarlyStoppingSection)
    baselines: Literal["auto", "on", "off"] = "auto"
    group: str = ""
    importance: Annotated[int, Range(minimum=0, maximum=1000)] = 0
    at: tuple[Annotated[int, Range(minimum=1, maximum=10_000)], ...] = (10,)
    leave_out_history: bool = True

    @override
    def check(self) -> None:
        if not self.at or len(set(self.at)) < len(self.at):
            raise ConfigError(f"evaluate.at is {list(self.at)}; give one k or more, each once, as [10, 50]")
        if self.early_stopping.patience and not (self.splits and self.every_steps != 0):
            raise ConfigError(
                f"evaluate.early_stopping.patience is {self.early_stopping.patience}, but evaluate.every_steps is"
                f" {self.every_steps} and evaluate.splits {list(self.splits)}; training can end early only by"
                " evaluations: give evaluate.every_steps, or leave it out"
            )
        if self.progressive and duration_seconds(self.progressive) is None:
            raise ConfigError(
                f"evaluate.progressive is {self.progressive!r}; give days, hours, minutes or seconds, such as '1d'"
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
      to: Services that get every record too: "wandb" (Weights & Biases) and "mlflow", which their environment
        variables direct, such as WANDB_MODE and MLFLOW_TRACKING_URI. What fails there is a warning, and ends no run.
      progress: The progress bar; "auto" shows it on a terminal, and elsewhere a line now and then.
      trace: Whether to write when each stage of the host tier worked on which batch, as ``trace.json`` in the
        run's folder, for https://ui.perfetto.dev.
    """

    every_steps: Positive = 50
    tensorboard: bool = True
    to: tuple[Literal["wandb", "mlflow"], ...] = ()
    progress: Literal["auto", "on", "off"] = "auto"
    trace: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class FAEConfig(Section):
    """``[fae]``, which counts where ``schedule`` is "fae"; see ``jrec.app.shuffle_scheduler``.

    Attributes:
      initial_rate: Per cent of an epoch's cold batches in the first schedule, before the same share of the hot ones.
      least_rate, greatest_rate: Bounds of the rate. At a rate of 1 hot and cold batches alternate one by one.
      patience: The number of successive falls of the loss after which the rate is doubled; the paper's u.
      split: The split whose loss decides. The paper takes its test set; the default keeps the test split for the final
        result.
      batches: How many evaluation batches of the split are read after each schedule; 0 for all.
    """

    initial_rate: _Percent = 50
    least_rate: _Percent = 1
    greatest_rate: _Percent = 100
    patience: Positive = 4
    split: Literal["valid", "test"] = "valid"
    batches: Count = 20

    @override
    def check(self) -> None:
        if not self.least_rate <= self.initial_rate <= self.greatest_rate:
            raise ConfigError(
                f"fae.initial_rate is {self.initial_rate}, outside of fae.least_rate = {self.least_rate} to"
                f" fae.greatest_rate = {self.greatest_rate}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section, MeshOptions):
    """``[mesh]``: several devices train one model: dense parameters on all of them, every row where the plan says.

    Results differ by the order of float32 sums, and by ``exchange_rows`` and ``exchange_gradients`` where they say so.

    Attributes:
      devices: The number of devices of all processes together; 0 or 1 trains on one device, without a mesh.
    """

    devices: Annotated[int, Range(minimum=0, maximum=2**15 - 1)] = 0

    @property
    def on(self) -> bool:
        """Whether there is a mesh."""
        return self.devices > 1


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
      callbacks: Functions, "package.module:function" each, that are called after log records, evaluations and
        checkpoints with an event (``jrec.app.callbacks.Event``); docs/training.md.
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
    callbacks: tuple[str, ...] = ()
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

        if self.data.order == "time" and self.schedule == "fae":
            raise ConfigError("data.order is 'time', but schedule 'fae' has an order of its own; leave one of them out")
        if self.data.half_life and self.schedule != "plain":
            raise ConfigError(
                f"data.half_life is {self.data.half_life!r}, but schedule {self.schedule!r} packs its examples without"
                " weights; leave one of them out"
            )
        if self.evaluate.progressive and (self.data.order != "time" or self.epochs > 1):
            raise ConfigError(
                f"evaluate.progressive is {self.evaluate.progressive!r}, which scores examples before the model learns"
                f" from them, but data.order is {self.data.order!r} and epochs {self.epochs}; set data.order = 'time'"
                " and epochs = 1"
            )

        kind = self.model.of_kind
        for name, section in kind.settled(self).items():
            object.__setattr__(self, name, section)
        kind.check_run(self)
        if self.model.calibrate and not self._evaluates:
            raise ConfigError(
                f"model.calibrate is true, but evaluate.every_steps is {self.evaluate.every_steps}, evaluate.splits"
                f" {list(self.evaluate.splits)} and schedule {self.schedule!r}, so nothing is evaluated in training, to"
                " which logits could be calibrated; give evaluate.every_steps, or leave it out with schedule 'plain'"
            )

    @property
    def _evaluates(self) -> bool:
        """Whether there are evaluations in training, as far as the configuration says."""
        by_default = self.schedule != "fae"
        every = self.evaluate.every_steps
        return bool(self.evaluate.splits) and (by_default if every is None else every > 0)

    @property
    def planned(self) -> bool:
        """Whether a plan places every row; else all rows of a table live in one place, on one device.

        Runs on several devices and runs with separate hot rows always have one.
        """
        return self.mesh.on or bool(self.plan) or self.schedule == "fae"
