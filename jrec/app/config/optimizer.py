"""The ``[optimizer]`` and ``[lr_schedule]`` sections, and the optax objects that they describe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, override

from jrec.app.config.typed_toml import Amount, Choices, Count, Range, Section, toml_value
from jrec.errors import ConfigError, value_errors_are_config_errors
from jrec.row_optimizers import ROW_OPTIMIZERS, Adagrad, BagGradients, RowOptimizer, RowWiseAdagrad, SlotShape

if TYPE_CHECKING:
    import jax
    import optax
    from jax.typing import ArrayLike

Above0 = Annotated[float, Range(above=0)]
DENSE = Choices(lambda: [name for name, kind in ROW_OPTIMIZERS.items() if kind.optax_name is not None])
"""The optimizers of dense parameters: the row optimizers that optax has, too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rates(Section):
    """The keys that every optimizer has.

    Attributes:
      learning_rate: The learning rate, times the factor of ``[lr_schedule]``.
      weight_decay: What is added to a gradient for each unit of its parameter; of rows only of those that a step reads.
        With "exact_adamw" every step takes ``learning_rate * weight_decay`` of every row, as AdamW does.
    """

    learning_rate: Amount = 0.01
    weight_decay: Amount = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OwnRates(Section):
    """The keys that every optimizer has, where they may be left out.

    Attributes:
      learning_rate: The table's own learning rate.
      weight_decay: The table's own weight decay.
    """

    learning_rate: Amount | None = None
    weight_decay: Amount | None = None


_MEANINGS = {
    "momentum": "The share of the last update that goes on in the next one.",
    "nesterov": "Whether the momentum looks one step ahead.",
    "eps": "What keeps the division by a small accumulator finite.",
    "initial_accumulator": "What the accumulated squares of gradients begin with.",
    "decay": "The share of the mean square of gradients that is kept.",
    "b1": "The share of the mean gradient that is kept.",
    "b2": "The share of the mean square of gradients that is kept.",
}
"""What hyperparameters mean that only some optimizers have."""


def _own_hyperparameters() -> list[tuple[str, Any, None]]:
    """A field, None unless it is set, for every hyperparameter that only some row optimizers have."""
    fields = {field.name: field for kind in ROW_OPTIMIZERS.values() for field in kind.hyperparameters()}
    fields_of_all = []
    for name, field in fields.items():
        hint: Any = Annotated[type(field.default), field.metadata.get("bounds")]
        fields_of_all.append((name, hint | None, None))
    return fields_of_all


def _with_hyperparameters[T: Section](base: type[T]) -> type[T]:
    name, lines = f"{base.__name__}AndHyperparameters", []
    for key, meaning in _MEANINGS.items():
        defaults = (
            f"{toml_value(field.default)} for {optimizer}"
            for optimizer, kind in ROW_OPTIMIZERS.items()
            for field in kind.hyperparameters()
            if field.name == key
        )
        lines.append(f"  {key}: {meaning} Defaults: {', '.join(defaults)}.")
    doc = {"__doc__": "\n".join(["Hyperparameters that only some optimizers have.\n", "Attributes:", *lines])}
    fields = _own_hyperparameters()
    return dataclasses.make_dataclass(name, fields, bases=(base,), namespace=doc, frozen=True, kw_only=True)


def _defaults(section: Section, key: str, name: str) -> dict[str, Any]:
    """The defaults of an optimizer's own hyperparameters that are not set.

    Args:
      section: The section, with the hyperparameters of all optimizers, None where they are not set.
      key: The dotted key of the section.
      name: The optimizer.

    Raises:
      ConfigError: If a hyperparameter is set that the optimizer does not have.
    """
    taken = {field.name: field.default for field in ROW_OPTIMIZERS[name].hyperparameters()}
    values = {key: getattr(section, key) for key in sorted(key for key, _, _ in _own_hyperparameters())}
    for own, value in values.items():
        if own not in taken and value is not None:
            raise ConfigError(
                f"{key}.{own} is {value}, but {key}.name is {name!r}, which takes"
                f" {', '.join(['learning_rate', 'weight_decay', *taken])}"
            )
    return {own: default for own, default in taken.items() if values[own] is None}


_RatesAndHyperparameters: type[_Rates] = _with_hyperparameters(_Rates)
_OwnRatesAndHyperparameters: type[_OwnRates] = _with_hyperparameters(_OwnRates)


class _Optimizer(_RatesAndHyperparameters):
    """Hyperparameters of any optimizer; only those that ``name`` takes are set, the others are None."""

    SECTION: ClassVar[str]
    if TYPE_CHECKING:
        name: str

        def __getattr__(self, name: str) -> Any: ...

    @override
    def check(self) -> None:
        for key, value in _defaults(self, self.SECTION, self.name).items():
            object.__setattr__(self, key, value)

    def hyperparameters(self) -> dict[str, Any]:
        """``learning_rate``, ``weight_decay`` and this optimizer's other hyperparameters, by name."""
        own = (field.name for field in ROW_OPTIMIZERS[self.name].hyperparameters())
        return {key: getattr(self, key) for key in ("learning_rate", "weight_decay", *own)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LRScheduleConfig(Section):
    """``[lr_schedule]``: a factor on the learning rates, by step.

    The factor climbs linearly to 1 over ``warmup_steps``, stays there until ``decay_start``, and falls to
    ``end_factor`` over ``decay_steps``: along a straight line, half a cosine, or a polynomial of ``power`` (2 in the
    MLPerf reference implementation of DLRM).

    Attributes:
      kind: The shape of the decay; "constant" has none.
      warmup_steps: The length of the climb in steps.
      decay_start: The step at which the decay starts, not before ``warmup_steps``; 0 starts right after the warm-up.
      decay_steps: The length of the decay in steps; 0 lasts until the end of training.
      end_factor: The factor behind the decay.
      power: The exponent of the polynomial.
    """

    kind: Literal["constant", "warmup_linear", "warmup_cosine", "warmup_poly_decay"] = "constant"
    warmup_steps: Count = 0
    decay_start: Count = 0
    decay_steps: Count = 0
    end_factor: Annotated[float, Range(minimum=0, maximum=1)] = 0.0
    power: Above0 = 2.0

    @override
    def check(self) -> None:
        if 0 < self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"lr_schedule.decay_start is {self.decay_start}, before the end of the warm-up at"
                f" lr_schedule.warmup_steps = {self.warmup_steps}"
            )

    def check_length(self, total_steps: int, *, key: str = "lr_schedule") -> None:
        """Refuses a decay that lasts until the end of training but starts after it.

        Args:
          total_steps: Steps of the whole run.
          key: The dotted key of this section, for the message.

        Raises:
          ConfigError: If the decay starts after the last step; names both steps and the keys.
        """
        start = self.decay_start or self.warmup_steps
        if self.kind != "constant" and not self.decay_steps and total_steps <= start:
            raise ConfigError(
                f"{key}.kind is {self.kind!r}, but the decay would start at step {start:,} of a run of"
                f" {total_steps:,} steps; lower {key}.warmup_steps or {key}.decay_start, or set {key}.decay_steps"
            )

    def build(self, total_steps: int, *, first_step: int = 0, key: str = "lr_schedule") -> optax.Schedule:
        """The factor as a function of the step, counted from 0, for host integers and traced arrays alike.

        Args:
          total_steps: Steps of the whole run.
          first_step: Steps that the optimizer took before the run, which do not count.
          key: See ``check_length``.

        Returns:
          A schedule whose value, float32 (), multiplies every learning rate.

        Raises:
          ConfigError: If the decay lasts until the end of training but starts after it.
        """
        import jax.numpy as jnp

        self.check_length(total_steps, key=key)
        start = self.decay_start or self.warmup_steps
        length = self.decay_steps or total_steps - start
        if self.kind == "constant" and not self.warmup_steps:
            return _constant

        def factor(step: ArrayLike) -> jax.Array:
            count = jnp.asarray(step, jnp.float32) + (1 - first_step)
            up = jnp.minimum(count / max(self.warmup_steps, 1), 1.0)
            if self.kind == "constant":
                return up
            left = jnp.clip(1 - (count - start) / length, 0.0, 1.0)
            if self.kind == "warmup_cosine":
                left = 0.5 - 0.5 * jnp.cos(math.pi * left)
            elif self.kind == "warmup_poly_decay":
                left = left**self.power
            return up * (self.end_factor + (1 - self.end_factor) * left)

        return factor


def _constant(step: ArrayLike) -> jax.Array:
    import jax.numpy as jnp

    del step
    return jnp.float32(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptimizerConfig(_OwnRatesAndHyperparameters):
    """``[optimizer.embedding.tables.NAME]``: one table's own settings.

    Keys that are not set are as in ``[optimizer.embedding]``; under another ``name``, hyperparameters that only some
    optimizers have get their class's defaults. The settings also apply to the cores of a tensor-train table, except for
    a learning rate or weight decay in ``[tables.tt]``.

    Attributes:
      name: The row optimizer.
      max_row_norm: Gradient rows of greater Euclidean norm are scaled down to it.
      frozen: Whether the table's rows stay as they are, without slots.
      lr_schedule: The table's own ``[lr_schedule]``.
    """

    name: Annotated[str, Choices(ROW_OPTIMIZERS.keys)] | None = None
    max_row_norm: Above0 | None = None
    frozen: bool = False
    lr_schedule: LRScheduleConfig | None = None

    def given(self) -> dict[str, Any]:
        """The optimizer's fields that are set, by name."""
        fields = (field.name for field in dataclasses.fields(self) if field.name not in ("frozen", "lr_schedule"))
        return {name: value for name in fields if (value := getattr(self, name)) is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingOptimizerConfig(_Optimizer):
    """``[optimizer.embedding]``: how touched rows are updated (``jrec.row_optimizers``, which has the defaults).

    Attributes:
      name: The row optimizer.
      max_row_norm: Gradient rows of greater Euclidean norm are scaled down to it; no clipping unless given.
      stochastic_rounding: Whether updated rows of 16-bit tables (``model.table_dtype``) are rounded up or down with the
        probability that makes the mean right, from ``seed`` and the number of the step; false rounds to nearest, where
        small updates vanish. Tables of float32 are not rounded.
      bag_gradients: The dtype to which the loss's gradients of pooled rows are rounded before they are summed by row,
        in float32. "bfloat16" halves the bytes that a GPU's update gathers, and errs by at most 2^-9 of each gradient;
        tables of tensor trains take float32.
      tables: Settings of single tables, by name.
    """

    SECTION: ClassVar[str] = "optimizer.embedding"

    name: Annotated[str, Choices(ROW_OPTIMIZERS.keys)] = RowWiseAdagrad.name
    max_row_norm: Above0 | None = None
    stochastic_rounding: bool = True
    bag_gradients: BagGradients = "float32"
    tables: Mapping[str, TableOptimizerConfig] = dataclasses.field(default_factory=dict)

    @override
    def check(self) -> None:
        super().check()
        with value_errors_are_config_errors(self.SECTION):
            ROW_OPTIMIZERS[self.name](**self.hyperparameters())
        for table, own in self.tables.items():
            key = f"{self.SECTION}.tables.{table}"
            set_too = [*own.given(), *(["lr_schedule"] if own.lr_schedule is not None else [])]
            if own.frozen and set_too:
                raise ConfigError(f"{key}.{set_too[0]} is set, but {key}.frozen is true; leave out one of them")
            missing = _defaults(own, key, own.name or self.name)
            if own.name not in (None, self.name):
                for name, value in missing.items():
                    object.__setattr__(own, name, value)

    @override
    def hyperparameters(self) -> dict[str, Any]:
        """The keyword arguments of the row optimizer of this name."""
        return {**super().hyperparameters(), "max_row_norm": self.max_row_norm}

    def of(self, table: str) -> EmbeddingOptimizerConfig | None:
        """One table's optimizer settings; None if it is frozen."""
        own = self.tables.get(table, TableOptimizerConfig())
        if own.frozen:
            return None
        inherited = self.hyperparameters()
        if own.name not in (None, self.name):
            inherited = {key: inherited[key] for key in ("learning_rate", "weight_decay", "max_row_norm")}
        values = {"name": self.name, **inherited, **own.given()}
        own_to_all = {"stochastic_rounding": self.stochastic_rounding, "bag_gradients": self.bag_gradients}
        return EmbeddingOptimizerConfig(**own_to_all, **values)

    def group(self, table: str) -> str:
        """The ``TableConfig.group`` of a table: "" without settings of its own, else a table's name.

        Tables with equal settings share the name of the first of them in alphabetical order.
        """
        if table not in self.tables or self._trained(table) == self._trained(""):
            return ""
        return min(name for name in self.tables if self._trained(name) == self._trained(table))

    def _trained(self, table: str) -> tuple[EmbeddingOptimizerConfig | None, LRScheduleConfig | None]:
        own = self.tables.get(table, TableOptimizerConfig())
        return self.of(table), own.lr_schedule

    @property
    def exact(self) -> bool:
        """Whether any table has an exact optimizer, whose lookups read slots."""
        trained = (self, *(of_table for table in self.tables if (of_table := self.of(table)) is not None))
        return any(ROW_OPTIMIZERS[one.name].has_tail for one in trained)

    def slots(self, table: str) -> Mapping[str, SlotShape]:
        """The slots of a table's rows (``RowOptimizer.slots``)."""
        trained = self.of(table) if table in self.tables else self
        return {} if trained is None else ROW_OPTIMIZERS[trained.name].slots

    def build(self, factor: optax.Schedule) -> RowOptimizer:
        """The row optimizer of tables without settings of their own; ``of(table).build`` makes a single table's.

        Args:
          factor: The learning rate's factor, by step (``LRScheduleConfig.build``).
        """
        values, kind = self.hyperparameters(), ROW_OPTIMIZERS[self.name]
        rate = values.pop("learning_rate")
        if kind.takes_schedule:
            return kind(learning_rate=lambda step: rate * factor(step), **values)
        if factor is not _constant:
            raise ConfigError(
                f"{self.SECTION}.name is {self.name!r}, which takes no schedule of learning rates; set"
                ' lr_schedule.kind = "constant" without warmup_steps, or choose another name'
            )
        return kind(learning_rate=rate, **values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Optimizer):
    """``[optimizer]``: how the dense parameters are updated, and, in ``embedding``, the rows.

    Attributes:
      name: The optimizer of the dense parameters.
      max_global_norm: The greatest Euclidean norm of all gradients together (dense parameters, and the summed gradients
        of rows and cores), to which they are scaled down; no clipping unless given.
      embedding: The row optimizer.
    """

    SECTION: ClassVar[str] = "optimizer"

    name: Annotated[str, DENSE] = Adagrad.name
    max_global_norm: Above0 | None = None
    embedding: EmbeddingOptimizerConfig = dataclasses.field(default_factory=EmbeddingOptimizerConfig)

    def build(self, factor: optax.Schedule) -> optax.GradientTransformation:
        """The optax optimizer of the dense parameters.

        Args:
          factor: The learning rate's factor, by step (``LRScheduleConfig.build``).
        """
        import optax

        values = self.hyperparameters()
        rate, weight_decay = values.pop("learning_rate"), values.pop("weight_decay")
        if "initial_accumulator" in values:
            values["initial_accumulator_value"] = values.pop("initial_accumulator")
        make = getattr(optax, str(ROW_OPTIMIZERS[self.name].optax_name))
        optimizer = _under_standard_promotion(make(lambda step: rate * factor(step), **values))
        return optax.chain(optax.add_decayed_weights(weight_decay), optimizer) if weight_decay else optimizer


def _under_standard_promotion(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer where ``jax_numpy_dtype_promotion`` is "strict", under which optax's Adam cannot be traced."""
    import jax
    import optax

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)
