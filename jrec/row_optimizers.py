"""Row optimizers: name, hyperparameters, slots, and the mathematics of one step on the touched rows of a table.

Each equals the optax optimizer of its name on a table where every row is touched, and leaves untouched rows and their
slots bit-identical (*lazy*). A step is written once, in terms of ``StepMath``: XLA runs it on gathered rows, the GPU
kernels on register tiles. Only the CPU's native kernels have a wording of their own (``jrec.native.optimizer_steps``).

Common to all, in this order: the gradient is multiplied by ``gradient_scale`` (one over the loss scale), clipped to the
row norm ``max_row_norm``, and ``weight_decay * row`` is added (L2, on touched rows).

Importing this module does not import JAX, since configurations are read before JAX is loaded.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from jrec.bounds import Range

if TYPE_CHECKING:
    import jax

Slots = dict[str, "jax.Array"]
Schedule = Callable[[Any], Any]  # step number -> learning rate, as optax.Schedule
SlotShape = Literal["element", "row"]  # (rows, dim) or (rows,)
BagGradients = Literal["float32", "bfloat16"]


def slot_bytes(slots: Mapping[str, SlotShape], dim: int) -> int:
    """Bytes of one row's slots."""
    return sum(4 * (dim if shape == "element" else 1) for shape in slots.values())


class StepMath(Protocol):
    """What a step may use besides arithmetic, on *values*, a number per element, and *row scalars*, a number per row.

    In XLA values are (n, dim) float32 and row scalars (n,) or (); in a GPU kernel both are register tiles.
    """

    @property
    def learning_rate(self) -> jax.Array:
        """Row scalars: the learning rate of this step."""
        ...

    @property
    def gradient_scale(self) -> jax.Array:
        """Row scalars: what gradients are multiplied by."""
        ...

    def spread(self, scalars: jax.Array) -> jax.Array:
        """Row scalars as values, or in a shape that broadcasts with values."""
        ...

    def clipped(self, values: jax.Array, norm: float) -> jax.Array:
        """Values whose rows of a greater Euclidean norm are scaled down to it."""
        ...

    def row_mean(self, values: jax.Array) -> jax.Array:
        """Means along rows, as row scalars."""
        ...

    def unbiased(self, values: jax.Array, moment: int) -> jax.Array:
        """Values over entry ``moment`` of the optimizer's ``bias_corrections``."""
        ...

    def sqrt(self, x: jax.Array, /) -> jax.Array:
        """Elementwise square roots."""
        ...

    def rsqrt(self, x: jax.Array, /) -> jax.Array:
        """Elementwise ``1 / sqrt(x)``."""
        ...

    def where(self, condition: jax.Array, x: jax.Array, y: float, /) -> jax.Array:
        """``x`` where the condition holds, ``y`` elsewhere."""
        ...


def _hyperparameter(default: float | None, **bounds: float) -> Any:
    return dataclasses.field(default=default, metadata={"bounds": Range(**bounds)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """Base of the row optimizers.

    An optimizer defines its slots, ``slot_terms`` and ``row_change``. One whose step is of another form overrides
    ``step_rows`` instead; it then runs through XLA only, and costs an array of new rows and slots on a GPU.

    Attributes:
      learning_rate: A float, or an optax schedule of the step number.
      weight_decay: L2 factor added to the gradient of touched rows.
      max_row_norm: Gradient rows of greater Euclidean norm are scaled down to it; None for no clipping.

    Raises:
      ValueError: If a hyperparameter is out of range.
    """

    learning_rate: float | Schedule = dataclasses.field(metadata={"bounds": Range(minimum=0)})
    weight_decay: float = _hyperparameter(0.0, minimum=0)
    max_row_norm: float | None = _hyperparameter(None, above=0)

    name: ClassVar[str]  # in configurations
    optax_name: ClassVar[str | None] = None  # the optax function that computes the same on dense arrays
    slots: ClassVar[Mapping[str, SlotShape]] = {}  # name -> shape, of the subclass

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, bounds = getattr(self, field.name), field.metadata.get("bounds")
            if bounds is not None and isinstance(value, numbers.Real) and value not in bounds:
                raise ValueError(f"{field.name} of {type(self).__name__} is {value}, but must be {bounds}")

    @property
    def has_terms(self) -> bool:
        """Whether the step is given by ``slot_terms`` and ``row_change``."""
        return type(self).step_rows is RowOptimizer.step_rows

    @classmethod
    def hyperparameters(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The hyperparameters that not every row optimizer has: fields with a default and, in ``metadata``, bounds."""
        common = {field.name for field in dataclasses.fields(RowOptimizer)}
        return tuple(field for field in dataclasses.fields(cls) if field.name not in common)

    def slot_terms(self, gradients: jax.Array, math: StepMath) -> dict[str, tuple[float | None, jax.Array]]:
        """What the step makes of each slot: ``decay * slot + increment``.

        Args:
          gradients: Values, prepared (see the module).
          math: What the step may use.

        Returns:
          By slot, the decay (None for one) and the increment, values or row scalars.
        """
        del gradients, math
        return {}

    def row_change(self, gradients: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """What the step subtracts from rows.

        Args:
          gradients: Values, prepared (see the module).
          slots: The new slots of the rows, values or row scalars each.
          math: What the step may use.

        Returns:
          Values.
        """
        raise NotImplementedError(f"{type(self).__name__} must define slot_terms and row_change, or step_rows")

    def step_rows(self, rows: jax.Array, gradients: jax.Array, slots: Slots, math: StepMath) -> tuple[jax.Array, Slots]:
        """One step on gathered rows.

        Args:
          rows: Values.
          gradients: Values, prepared (see the module).
          slots: Values or row scalars each.
          math: What the step may use.

        Returns:
          The new rows and slots.
        """
        new_slots = {}
        for name, (decay, increment) in self.slot_terms(gradients, math).items():
            new_slots[name] = slots[name] + increment if decay is None else increment + decay * slots[name]
        return rows - self.row_change(gradients, new_slots, math), new_slots

    def prepare(self, rows: jax.Array, gradients: jax.Array, math: StepMath) -> jax.Array:
        """Unscales, clips and decays the gradients of rows; all are values."""
        gradients = gradients * math.spread(math.gradient_scale)
        if self.max_row_norm is not None:
            gradients = math.clipped(gradients, self.max_row_norm)
        if self.weight_decay:
            gradients = gradients + self.weight_decay * rows
        return gradients

    def bias_corrections(self, count: Any) -> tuple[Any, Any]:
        """What ``StepMath.unbiased`` divides the first and the second moment by.

        Args:
          count: () float32, of JAX or NumPy: the number of the step, from 1.

        Returns:
          Two numbers like ``count``, or 1.0.
        """
        del count
        return 1.0, 1.0

    def initial_slot(self, name: str) -> float:
        """What slot ``name`` starts as."""
        del name
        return 0.0

    def init(self, table: jax.Array) -> Slots:
        """Fresh slots for a table of (rows, dim), float32."""
        import jax.numpy as jnp

        return {
            name: jnp.full(table.shape if shape == "element" else table.shape[:1], self.initial_slot(name), jnp.float32)
            for name, shape in self.slots.items()
        }

    def learning_rate_at(self, step: jax.Array) -> jax.Array:
        """The learning rate of step number ``step``, from 0, () float32."""
        import jax
        import jax.numpy as jnp

        if not callable(self.learning_rate):
            return jnp.asarray(self.learning_rate, jnp.float32)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
            return jnp.asarray(self.learning_rate(step), jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(RowOptimizer):
    """Stochastic gradient descent: ``row -= lr * g`` (``optax.sgd``)."""

    name: ClassVar[str] = "sgd"
    optax_name: ClassVar[str | None] = "sgd"

    def row_change(self, gradients: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """The change that the step subtracts from rows."""
        del slots
        return math.spread(math.learning_rate) * gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(RowOptimizer):
    """SGD with momentum: ``trace = g + momentum * trace; row -= lr * trace`` (``optax.sgd(momentum=...)``)."""

    momentum: float = _hyperparameter(0.9, minimum=0, below=1)
    nesterov: bool = False

    name: ClassVar[str] = "momentum"
    optax_name: ClassVar[str | None] = "sgd"
    slots: ClassVar[Mapping[str, SlotShape]] = {"trace": "element"}

    def slot_terms(self, gradients: jax.Array, math: StepMath) -> dict[str, tuple[float | None, jax.Array]]:
        """The decay and increment of ``trace``."""
        del math
        return {"trace": (self.momentum, gradients)}

    def row_change(self, gradients: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """The change that the step subtracts from rows."""
        trace = slots["trace"]
        return math.spread(math.learning_rate) * (gradients + self.momentum * trace if self.nesterov else trace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Accumulating(RowOptimizer):
    """What both Adagrads share.

    The gradient of a row is a mean over the examples of a batch, often below 1e-5. optax's defaults, an accumulator of
    0.1 and an ``eps`` of 1e-7 under the root, would outweigh it for a whole run; an accumulator of 0 and 1e-14, which
    compares with a gradient of 1e-7, do not.
    """

    eps: float = _hyperparameter(1e-14, above=0)
    initial_accumulator: float = _hyperparameter(0.0, minimum=0)

    def initial_slot(self, name: str) -> float:
        """The initial accumulator."""
        return self.initial_accumulator

    def _inverse_root(self, total: jax.Array, math: StepMath) -> jax.Array:
        return math.where(total > 0, math.rsqrt(total + self.eps), 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(_Accumulating):
    """Adagrad: ``sum += g**2; row -= lr * g / sqrt(sum + eps)`` (``optax.adagrad``, with other defaults)."""

    name: ClassVar[str] = "adagrad"
    optax_name: ClassVar[str | None] = "adagrad"
    slots: ClassVar[Mapping[str, SlotShape]] = {"sum": "element"}

    def slot_terms(self, gradients: jax.Array, math: StepMath) -> dict[str, tuple[float | None, jax.Array]]:
        """The decay and increment of ``sum``."""
        del math
        return {"sum": (None, gradients * gradients)}

    def row_change(self, gradients: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """The change that the step subtracts from rows."""
        return math.spread(math.learning_rate) * gradients * self._inverse_root(slots["sum"], math)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(_Accumulating):
    """Row-wise Adagrad: one accumulator a row, ``sum += mean(g**2)``; a dim-th of Adagrad's memory.

    The field's standard for embedding tables (FBGEMM's ``EXACT_ROWWISE_ADAGRAD``), with optax's place for ``eps``.
    """

    name: ClassVar[str] = "rowwise_adagrad"
    slots: ClassVar[Mapping[str, SlotShape]] = {"sum": "row"}

    def slot_terms(self, gradients: jax.Array, math: StepMath) -> dict[str, tuple[float | None, jax.Array]]:
        """The decay and increment of ``sum``."""
        return {"sum": (None, math.row_mean(gradients * gradients))}

    def row_change(self, gradients: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """The change that the step subtracts from rows."""
        return math.spread(math.learning_rate * self._inverse_root(slots["sum"], math)) * gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSProp(RowOptimizer):
    """RMSprop: ``nu = decay * nu + (1 - decay) * g**2; row -= lr * g / sqrt(nu + eps)`` (``optax.rmsprop``)."""

    decay: float = _hyperparameter(0.9, minimum=0, below=1)
    eps: float = _hyperparameter(1e-14, above=0)  # as Adagrad's, and for its reason

    name: ClassVar[str] = "rmsprop"
    optax_name: ClassVar[str | None] = "rmsprop"
    slots: ClassVar[Mapping[str, SlotShape]] = {"nu": "element"}

    def slot_terms(self, gradients: jax.Array, math: StepMath) -> dict[str, tuple[float | None, jax.Array]]:
        """The decay and increment of ``nu``."""
        del math
        return {"nu": (self.decay, (1 - self.decay) * (gradients * gradients))}

    def row_change(self, gradients: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """The change that the step subtracts from rows."""
        return math.spread(math.learning_rate) * gradients * math.rsqrt(slots["nu"] + self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowWiseRMSProp(RMSProp):
    """RMSprop with one mean square a row, ``nu = decay * nu + (1 - decay) * mean(g**2)``; a dim-th of its memory."""

    name: ClassVar[str] = "rowwise_rmsprop"
    optax_name: ClassVar[str | None] = None
    slots: ClassVar[Mapping[str, SlotShape]] = {"nu": "row"}

    def slot_terms(self, gradients: jax.Array, math: StepMath) -> dict[str, tuple[float | None, jax.Array]]:
        """The decay and increment of ``nu``."""
        return {"nu": (self.decay, (1 - self.decay) * math.row_mean(gradients * gradients))}

    def row_change(self, gradients: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """The change that the step subtracts from rows."""
        return math.spread(math.learning_rate * math.rsqrt(slots["nu"] + self.eps)) * gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(RowOptimizer):
    """Lazy Adam: ``optax.adam`` on touched rows, the bias correction counting the table's steps.

    ``mu = b1 * mu + (1 - b1) * g``, ``nu = b2 * nu + (1 - b2) * g**2``, and with ``t = step + 1``
    ``row -= lr * (mu / (1 - b1**t)) / (sqrt(nu / (1 - b2**t)) + eps)``. Untouched rows keep ``mu`` and ``nu``.
    """

    b1: float = _hyperparameter(0.9, minimum=0, below=1)
    b2: float = _hyperparameter(0.999, minimum=0, below=1)
    eps: float = _hyperparameter(1e-8, above=0)

    name: ClassVar[str] = "adam"
    optax_name: ClassVar[str | None] = "adam"
    slots: ClassVar[Mapping[str, SlotShape]] = {"mu": "element", "nu": "element"}

    def bias_corrections(self, count: Any) -> tuple[Any, Any]:
        """See the base class: ``1 - b1**count`` and ``1 - b2**count``."""
        return 1 - self.b1**count, 1 - self.b2**count

    def slot_terms(self, gradients: jax.Array, math: StepMath) -> dict[str, tuple[float | None, jax.Array]]:
        """The decays and increments of ``mu`` and ``nu``."""
        del math
        return {
            "mu": (self.b1, (1 - self.b1) * gradients),
            "nu": (self.b2, (1 - self.b2) * (gradients * gradients)),
        }

    def row_change(self, gradients: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """The change that the step subtracts from rows."""
        mean, deviation = math.unbiased(slots["mu"], 0), math.sqrt(math.unbiased(slots["nu"], 1))
        return math.spread(math.learning_rate) * (mean / (deviation + self.eps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowWiseAdam(Adam):
    """Lazy Adam with one second moment a row, ``nu = b2 * nu + (1 - b2) * mean(g**2)``: half of Adam's memory.

    FBGEMM's ``PARTIAL_ROWWISE_ADAM``.
    """

    name: ClassVar[str] = "rowwise_adam"
    optax_name: ClassVar[str | None] = None
    slots: ClassVar[Mapping[str, SlotShape]] = {"mu": "element", "nu": "row"}

    def slot_terms(self, gradients: jax.Array, math: StepMath) -> dict[str, tuple[float | None, jax.Array]]:
        """The decays and increments of ``mu`` and ``nu``."""
        return {
            "mu": (self.b1, (1 - self.b1) * gradients),
            "nu": (self.b2, (1 - self.b2) * math.row_mean(gradients * gradients)),
        }

    def row_change(self, gradients: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """The change that the step subtracts from rows."""
        return super().row_change(gradients, {**slots, "nu": math.spread(slots["nu"])}, math)


RowOptimizers = RowOptimizer | Callable[[str], RowOptimizer | None]
"""One optimizer of all tables, or a function from a table's (or a stack's) name to its own, None for a frozen one."""


def optimizer_of(optimizers: RowOptimizers | None, name: str) -> RowOptimizer | None:
    """The optimizer of a table or stack; None where it has none."""
    return optimizers(name) if callable(optimizers) else optimizers


ROW_OPTIMIZERS: Mapping[str, type[RowOptimizer]] = {
    kind.name: kind for kind in (SGD, Momentum, Adagrad, RowWiseAdagrad, RMSProp, Adam, RowWiseRMSProp, RowWiseAdam)
}
"""jrec's row optimizers by their names in configurations."""
