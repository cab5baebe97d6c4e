"""Row optimizers: name, hyperparameters, slots, and the mathematics of one step on the touched rows of a table.

Each equals the optax optimizer of its name on a table where every row is touched, and leaves untouched rows and their
slots bit-identical (*lazy*); an *exact* one (``Exact``) equals it on every table. A step is written once, in terms of
``StepMath``: XLA runs it on gathered rows, the GPU kernels on register tiles. Only the CPU's native kernels have a
wording of their own (``jrec.native.optimizer_steps``).

Common to all, in this order: the gradient is multiplied by ``gradient_scale`` (one over the loss scale), clipped to the
row norm ``max_row_norm``, and ``weight_decay * row`` is added (L2, on touched rows).

Importing this module does not import JAX, since configurations are read before JAX is loaded.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from math import ceil, log, pi, sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from jrec.bounds import Range

if TYPE_CHECKING:
    import jax
    import numpy as np

Slots = dict[str, "jax.Array"]
type Number = jax.Array | np.floating | float  # a single one
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

    @property
    def taken(self) -> jax.Array:
        """Row scalars: how many steps were taken before; NaN from ``MOST_STEPS`` on. Only exact optimizers read it."""
        ...

    def tail(self, number: int | jax.Array, *, after: bool = False) -> jax.Array:
        """Row scalars: entry ``number`` of the optimizer's ``tail_numbers`` before this step, or after it."""
        ...

    def summed(self, term: Callable[[int | jax.Array], jax.Array], count: int, /) -> jax.Array:
        """The sum of ``term(0)`` to ``term(count - 1)``, in this order."""
        ...

    def power(self, base: float, exponents: jax.Array, /) -> jax.Array:
        """Row scalars: a number in [0, 1] to whole numbers below ``MOST_STEPS``; NaN of NaN."""
        ...

    def rounded(self, x: jax.Array, /) -> jax.Array:
        """``x``, which no compiler joins with a sum that it goes into: rows have the same bits in all programs."""
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


def _hyperparameter[T: float | None](default: T, **bounds: float) -> T:
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
    has_tail: ClassVar[bool] = False  # whether ``current`` rows are others than the table's
    takes_schedule: ClassVar[bool] = True  # whether the learning rate may be a schedule
    decays_gradients: ClassVar[bool] = True  # whether ``weight_decay`` is added to gradients, as optax's chains do
    slots: ClassVar[Mapping[str, SlotShape]] = {}  # name -> shape, of the subclass

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, bounds = getattr(self, field.name), field.metadata.get("bounds")
            if bounds is None or (value is None and field.default is None):
                continue
            scheduled = field.name == "learning_rate"
            if not (isinstance(value, numbers.Real) or hasattr(value, "dtype") or (scheduled and callable(value))):
                kinds = "a number, or a schedule of the step number" if scheduled else "a number"
                raise ValueError(f"{field.name} of {type(self).__name__} is {value!r}, but must be {kinds}")
            if isinstance(value, numbers.Real) and value not in bounds:
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
        # Before the clip: ``max_row_norm`` is a bound on the true gradient, whatever the loss was scaled by.
        gradients = gradients * math.spread(math.gradient_scale)
        if self.max_row_norm is not None:
            gradients = math.clipped(gradients, self.max_row_norm)
        if self.decays_gradients and self.weight_decay:
            gradients = gradients + self.weight_decay * rows
        return gradients

    def tail_numbers(self, step: jax.Array) -> jax.Array:
        """What ``current`` rows are computed with after ``step`` steps, () int32: (n,) float32; of ``Exact`` only."""
        import jax.numpy as jnp

        del step
        return jnp.zeros(0, jnp.float32)

    def current(self, rows: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """The rows that a lookup reads, values, where the table holds ``rows`` and their ``slots`` before this step."""
        del slots, math
        return rows

    def settled(self, rows: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """What the table holds of rows that a lookup before this step reads, with their slots then; values."""
        del slots, math
        return rows

    @property
    def slot_decays(self) -> Mapping[str, float]:
        """What a step without a gradient multiplies each slot by, of exact optimizers."""
        return {}

    @property
    def row_decay(self) -> float:
        """What a step without a gradient multiplies rows by."""
        return 1.0

    def bias_corrections(self, count: Number) -> tuple[Number, Number]:
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

        rate = self.learning_rate
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
            rate = jnp.asarray(rate(step) if callable(rate) else rate, jnp.float32)
        if rate.shape:
            raise ValueError(f"learning_rate of {type(self).__name__} is of shape {rate.shape}; give a single number")
        return rate


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
        # As in optax: where every gradient so far was zero, nothing moves.
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
        # The mean, not the sum, of squares: learning rates then mean the same for every dim, as in FBGEMM.
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

    def bias_corrections(self, count: Number) -> tuple[Number, Number]:
        """See the base class: ``1 - b1**count`` and ``1 - b2**count``."""
        # By the table's steps, not the row's: rows that are seldom touched are corrected as in optax, once for all.
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


MOST_STEPS = 1 << 24
"""Exact optimizers count steps in float32, as slots are; from this one on their rows are NaN."""


def taken_before(step: jax.Array) -> jax.Array:
    """``StepMath.taken`` of step number ``step``, () int32: () float32."""
    import jax.numpy as jnp

    # float32 holds each whole number up to 2^24; beyond it a count would stand still, and rows silently miss steps.
    return jnp.where(step < MOST_STEPS, step.astype(jnp.float32), jnp.float32(jnp.nan))


LAST = "last"
"""The slot of an exact optimizer that counts the steps of the table up to the row's last one."""
_NODES = 8  # of the quadrature: enough for 5e-7 with the default decays, whatever eps, gradients and step
_NEGLIGIBLE = 1e-8  # the share of a tail that is cut off
_CORE = 0.35  # the share of a tail's terms between whose ends the nodes lie


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact(RowOptimizer):
    """Base of the optimizers that step all rows of a table at the cost of those that are touched.

    A lazy optimizer leaves out what optax does to a row that a batch does not touch: its moments decay, and they still
    move it. Here a row is stepped for all steps that it missed when it is read or touched again. What it missed is not
    summed up step by step: the table holds each row *where it would come to rest* if no gradient came any more, so that
    the moments' remaining movement, the *tail*, is behind it; a read adds the part of the tail that is still to come.

      current = stored + tail(moments decayed to now, now);  after a step: stored = stepped - tail(moments, now + 1)

    A tail is a sum over future steps with numbers that all rows share, ``tail_numbers``, of any schedule: nothing is
    stored of a row but the number of its last step. A row that missed hundreds of steps costs no more than one that
    missed none.

    Whoever reads rows without their slots reads where they come to rest, which differs from the current row by what the
    moments of its last steps still move it.
    """

    has_tail: ClassVar[bool] = True
    decays_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise ValueError(
                f"weight_decay of {type(self).__name__} is {self.weight_decay}, but is added to gradients, which rows"
                " that no batch touches do not have; leave it out, or take ExactAdamW, which decays all rows"
            )

    def tail_of(self, slots: Slots, math: StepMath, *, after: bool) -> jax.Array:
        """Values: how far ``slots`` at this step, or after it, will still move their rows; they are subtracted."""
        raise NotImplementedError

    def decayed(self, slots: Slots, math: StepMath) -> tuple[Slots, jax.Array]:
        """The slots before this step, and how many steps the rows missed, row scalars."""
        missed = math.taken - slots[LAST]
        of_name = {}
        for name, decay in self.slot_decays.items():
            # A closed form: a row that missed a million steps costs as much as one that missed one.
            factor = math.power(decay, missed)
            of_name[name] = slots[name] * (math.spread(factor) if self.slots[name] == "element" else factor)
        return of_name, missed

    def current(self, rows: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """Rows as dense training has them before this step (``RowOptimizer``)."""
        decayed, missed = self.decayed(slots, math)
        return self._unsettled(rows, decayed, missed, math)

    def settled(self, rows: jax.Array, slots: Slots, math: StepMath) -> jax.Array:
        """Rows as they are stored between lookups (``RowOptimizer``)."""
        return rows - self.tail_of(slots, math, after=False) if self.has_tail else rows

    def _unsettled(self, rows: jax.Array, decayed: Slots, missed: jax.Array, math: StepMath) -> jax.Array:
        if self.row_decay != 1:
            # Rounded by itself, so that lookups and updates, which go on differently, see the same bits.
            rows = math.rounded(rows * math.spread(math.power(self.row_decay, missed)))
        return rows + math.rounded(self.tail_of(decayed, math, after=False)) if self.has_tail else rows

    def step_rows(self, rows: jax.Array, gradients: jax.Array, slots: Slots, math: StepMath) -> tuple[jax.Array, Slots]:
        """One step on gathered rows; see the class."""
        decayed, missed = self.decayed(slots, math)
        rows = self._unsettled(rows, decayed, missed, math)
        if self.row_decay != 1:
            rows = rows - (1 - self.row_decay) * rows
        rows, new_slots = RowOptimizer.step_rows(self, rows, gradients, decayed, math)
        if self.has_tail:
            rows = rows - self.tail_of(new_slots, math, after=True)
        # ``0 * missed`` gives the sum the shape of the rows, and keeps NaN, of too many steps, as NaN.
        return rows, {**new_slots, LAST: math.taken + 0 * missed + 1}


def _rates(optimizer: RowOptimizer, step: jax.Array, terms: int) -> jax.Array:
    """The learning rates of the next steps, (terms,) float32."""
    import jax
    import jax.numpy as jnp

    return jax.vmap(optimizer.learning_rate_at)(step + jnp.arange(terms, dtype=jnp.int32))


def _terms(ratio: float, subject: str) -> int:
    """How many terms of a tail count, each ``ratio`` of the one before.

    Raises:
      ValueError: If they do not become fewer.
    """
    # ln(1e-8) / ln(0.9995) is 36,800: longer sums are no longer cheap beside a step.
    if ratio >= 0.9995:
        raise ValueError(f"{subject}: an exact optimizer's rows would not come to rest within 36,000 steps")
    return 0 if ratio == 0 else ceil(log(_NEGLIGIBLE) / log(ratio))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactMomentum(Exact, Momentum):
    """``Momentum`` of all rows (``optax.sgd(momentum=...)``) at the cost of those that are touched; see ``Exact``."""

    name: ClassVar[str] = "exact_momentum"
    optax_name: ClassVar[str | None] = None
    slots: ClassVar[Mapping[str, SlotShape]] = {**Momentum.slots, LAST: "row"}

    def __post_init__(self) -> None:
        super().__post_init__()
        _terms(self.momentum, f"momentum is {self.momentum}")

    @property
    def slot_decays(self) -> Mapping[str, float]:
        """What a step without a gradient multiplies ``trace`` by."""
        return {"trace": self.momentum}

    def tail_numbers(self, step: jax.Array) -> jax.Array:
        """The sum of the coming steps' learning rates, each times the share of ``trace`` that is left: (1,)."""
        import jax.numpy as jnp

        terms = _terms(self.momentum, "")
        # Step k from now finds the trace decayed k + 1 times; Nesterov's applies the momentum once more.
        powers = [self.momentum ** (k + (2 if self.nesterov else 1)) for k in range(terms)]
        return jnp.sum(_rates(self, step, terms) * jnp.asarray(powers, jnp.float32))[None]

    def tail_of(self, slots: Slots, math: StepMath, *, after: bool) -> jax.Array:
        """What later steps without a gradient take off rows (``Exact``)."""
        return math.spread(math.tail(0, after=after)) * slots["trace"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactRMSProp(Exact, RMSProp):
    """``RMSProp`` of all rows (``optax.rmsprop``): ``nu`` decays in all steps. A row moves only where it is touched."""

    name: ClassVar[str] = "exact_rmsprop"
    optax_name: ClassVar[str | None] = None
    has_tail: ClassVar[bool] = False
    slots: ClassVar[Mapping[str, SlotShape]] = {**RMSProp.slots, LAST: "row"}

    @property
    def slot_decays(self) -> Mapping[str, float]:
        """What a step without a gradient multiplies ``nu`` by."""
        return {"nu": self.decay}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactAdam(Exact, Adam):
    """``optax.adam`` of all rows at the cost of those that are touched; see ``Exact``.

    With ``P_k = lr_k * (b1**k / (1 - b1**t)) * y_k`` and ``y_k = sqrt((1 - b2**t) / b2**k)`` of the k-th coming step,
    of number ``t``, the tail is ``mu * sum(P_k / (sqrt(nu) + eps * y_k))``: a smooth function of ``log y`` summed with
    weights that all rows share. It is computed as ``mu * sum(w_j / (sqrt(nu) + e_j))`` with 8 nodes and weights that
    give the same sums of polynomials up to degree 7 between them.
    """

    name: ClassVar[str] = "exact_adam"
    optax_name: ClassVar[str | None] = None
    slots: ClassVar[Mapping[str, SlotShape]] = {**Adam.slots, LAST: "row"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tail_terms()

    def _tail_terms(self) -> int:
        ratio = self.b1 / sqrt(self.b2) if self.b1 else 0.0
        most = (
            "sqrt(b2)"
            if self.row_decay == 1
            else f"sqrt(b2) * {self.row_decay:.4g}, the share of a row that decay leaves"
        )
        return _terms(ratio / self.row_decay, f"b1 is {self.b1} and b2 {self.b2}, but b1 must be below {most}")

    @property
    def slot_decays(self) -> Mapping[str, float]:
        """What a step without a gradient multiplies ``mu`` and ``nu`` by."""
        return {"mu": self.b1, "nu": self.b2}

    def tail_numbers(self, step: jax.Array) -> jax.Array:
        """The weights ``w_j`` and the nodes ``e_j`` of the class, (16,): Chebyshev's in ``log y``."""
        import jax.numpy as jnp
        import numpy as np

        terms = self._tail_terms()
        if terms == 0:
            return jnp.concatenate([jnp.zeros(_NODES, jnp.float32), jnp.ones(_NODES, jnp.float32)])
        k = np.arange(1, terms + 1)
        first, second = self.bias_corrections(step.astype(jnp.float32) + jnp.asarray(k, jnp.float32))
        shares = _rates(self, step, terms) * jnp.asarray((self.b1 / self.row_decay) ** k, jnp.float32) / first
        # Logarithms of y_k: with a small b2 its powers underflow float32 before the terms are negligible.
        logs = 0.5 * (jnp.log(second) - jnp.asarray(k * log(self.b2), jnp.float32))
        shares = shares * jnp.exp(logs)
        # Nodes lie where the weight is: the last terms are tiny, and a polynomial that fits the first ones serves them,
        # too.
        low, high = logs[0], logs[min(terms, max(2, ceil(_CORE * terms))) - 1]
        middle, half = (low + high) / 2, (high - low) / 2
        at = jnp.where(half > 0, (logs - middle) / jnp.where(half > 0, half, jnp.float32(1)), jnp.float32(0))
        # Chebyshev's polynomials of a point, and at the nodes, where they are orthogonal: so the weights are sums.
        polynomials = [jnp.ones_like(at), at]
        while len(polynomials) < _NODES:
            polynomials.append(2 * at * polynomials[-1] - polynomials[-2])
        moments = jnp.stack([jnp.sum(shares * polynomial) for polynomial in polynomials])
        angles = (2 * np.arange(_NODES) + 1) * pi / (2 * _NODES)
        # Discrete orthogonality of Chebyshev's polynomials at their nodes: weights from moments without a linear
        # system.
        at_nodes = np.cos(np.arange(_NODES) * angles[:, None]) * np.where(np.arange(_NODES) == 0, 1, 2) / _NODES
        weights = jnp.sum(jnp.asarray(at_nodes, jnp.float32) * moments[None, :], axis=1)
        nodes = jnp.float32(self.eps) * jnp.exp(middle + half * jnp.asarray(np.cos(angles), jnp.float32))
        return jnp.concatenate([weights, nodes])

    def tail_of(self, slots: Slots, math: StepMath, *, after: bool) -> jax.Array:
        """What later steps without a gradient take off rows (``Exact``)."""
        root = math.sqrt(slots["nu"])

        def term(j: int | jax.Array) -> jax.Array:
            weight, node = (math.spread(math.tail(number, after=after)) for number in (j, _NODES + j))
            return weight / (root + node)

        return slots["mu"] * math.summed(term, _NODES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactAdamW(ExactAdam):
    """``optax.adamw`` of all rows at the cost of those that are touched; see ``ExactAdam``.

    ``weight_decay`` is decoupled: every step multiplies every row by ``1 - learning_rate * weight_decay``.

    Raises:
      ValueError: If the learning rate is a schedule: what it has decayed rows by would have to be known of every step.
    """

    name: ClassVar[str] = "exact_adamw"
    takes_schedule: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if callable(self.learning_rate):
            raise ValueError(
                "learning_rate of ExactAdamW is a schedule, but rows that missed steps are decayed for all of them at"
                " once; give it a number, or ExactAdam a schedule"
            )
        if not 0 < self.row_decay <= 1:
            raise ValueError(
                f"learning_rate * weight_decay of ExactAdamW is {self.learning_rate * self.weight_decay}, but must be"
                " at least 0 and below 1"
            )
        # Not ``Exact``'s, which refuses weight decay: here it is decoupled, and rows that are not touched decay by a
        # power.
        RowOptimizer.__post_init__(self)
        self._tail_terms()

    @property
    def row_decay(self) -> float:
        """What a step without a gradient multiplies rows by."""
        assert not callable(self.learning_rate)
        return 1 - self.learning_rate * self.weight_decay


RowOptimizers = RowOptimizer | Callable[[str], RowOptimizer | None]
"""One optimizer of all tables, or a function from a table's (or a stack's) name to its own, None for a frozen one."""


def optimizer_of(optimizers: RowOptimizers | None, name: str) -> RowOptimizer | None:
    """The optimizer of a table or stack; None where it has none."""
    return optimizers(name) if callable(optimizers) else optimizers


ROW_OPTIMIZERS: Mapping[str, type[RowOptimizer]] = {
    kind.name: kind
    for kind in (
        SGD, Momentum, Adagrad, RowWiseAdagrad, RMSProp, Adam, RowWiseRMSProp, RowWiseAdam,
        ExactMomentum, ExactRMSProp, ExactAdam, ExactAdamW,
    )
}  # fmt: skip
"""jrec's row optimizers by their names in configurations."""
