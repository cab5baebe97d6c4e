"""Tables whose gradients are rows: ``jax.grad`` of a lookup has the size of what was looked up, not of the table.

    table = Table(jax.random.normal(key, (100_000_000, 16)))
    gradients = jax.grad(lambda table: loss(embedding_bag(table, ids)))(table)      # RowGradients
    table, slots = row_step(optimizer, table, slots, gradients, step=step)          # in place under donation

A ``Table`` is a value of a JAX type of its own (``jax.experimental.hijax``), whose cotangent is a ``RowGradients``: the
bags that were looked up and the gradients of their sums, a gather-reduce that is not done yet (Tensor Casting,
Algorithm 3). Rows are summed where somebody looks at them; an optimizer's step fuses that with its update.

Everything of jrec that touches ``jax.experimental.hijax`` is in this file. What JAX 0.11.2 does not do for such types:

* ``jax.checkpoint`` of a lookup, and under ``jax.jit`` the gradient of a ``lax.cond`` around one, fail inside JAX; look
  up outside of them.
* ``jax.shard_map`` of a table must be under ``jax.jit``, and its gradient be taken inside (``summed_over``).
* ``jax.device_put`` takes no such values; make the table of an array that is where it should be.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import hijax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from jrec.ops.arrays import RoundingKey, Slots, Step
from jrec.ops.dispatch import Implementation
from jrec.ops.doors import check_count, checked_optimizer, checked_slots, checked_step, checked_table
from jrec.ops.gather_reduce import lookup_of_table
from jrec.ops.joined_bags import joined, merged
from jrec.ops.row_update import casted_gather_reduce, casted_update
from jrec.ops.tensor_cast import cast_of
from jrec.ops.types import Bags, Cast, TreeStructure
from jrec.row_optimizers import RowOptimizer

_NO_ARITHMETIC = (
    "a jrec.Table has no arithmetic, which would make an array of its size; step it by jrec.optax, whose optimizers"
    " have weight_decay of their own, with jrec.optax.apply_updates, or jrec.nn.Optimizer in Flax NNX. table.array is"
    " the array"
)
_NO_INDEX = (
    "a jrec.Table has no rows to pick, whose gradient would be of its size; look ids up by jrec.embedding_bag(table,"
    " ids). table.array is the array"
)
Part = tuple[Bags, jax.Array]
"""Bags that were looked up, and the gradients of their sums, (num_bags, dim) float32."""


class Table:
    """Rows of an embedding table, a leaf of JAX's trees; ``jax.grad`` gives ``RowGradients`` for it.

    Args:
      rows: (rows, dim) float32, bfloat16 or float16.
      capacity: The most distinct rows that a gradient has; gradients of more are NaN. Only a table that is looked up in
        a loop (``lax.scan``, ``lax.while_loop``) needs one, since what a loop sums up has one size throughout. None for
        as many as there are lookups.
      implementation: As of ``embedding_bag``, for lookups and updates alike.

    Attributes:
      array: (rows, dim), the rows as an array, as a softmax over all rows needs it. Its gradient is of that size, too.
      shape, dtype, ndim, size, nbytes: Of the array.

    Raises:
      ValueError: If the rows are no such array, or the capacity is not positive.

    Example:
      >>> table = Table(jnp.zeros((1_000_000, 4)))
      >>> loss = lambda table: jrec.embedding_bag(table, jnp.array([[7, 3], [3, -1]], jnp.int32)).sum()
      >>> rows, gradients = jax.grad(loss)(table).rows()  # of the rows that were read, padded to four lookups
      >>> rows.tolist(), gradients.shape
      ([3, 7, 1000000, 1000000], (4, 4))
    """

    __slots__ = ("array", "capacity", "implementation")
    array: jax.Array
    capacity: int | None
    implementation: Implementation | None
    __array_ufunc__ = None  # NumPy's numbers leave arithmetic to this class

    def __new__(
        cls, rows: jax.Array, *, capacity: int | None = None, implementation: Implementation | None = None
    ) -> Table:
        """A table, or what stands for one where the rows stand for an array."""
        if capacity is not None:
            check_count("capacity", capacity, 1)
        array = checked_table(rows, "rows")
        count, dim = array.shape
        table = TableType(count, dim, np.dtype(array.dtype), capacity, implementation)
        return _Make(table)(array) if isinstance(array, Tracer) else _unchecked_table(array, table)

    @property
    def type(self) -> TableType:
        """Its type, as ``jax.typeof`` gives it."""
        rows, dim = self.array.shape
        return TableType(rows, dim, np.dtype(self.array.dtype), self.capacity, self.implementation)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim)."""
        return self.type.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the rows."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.type.size

    @property
    def nbytes(self) -> int:
        """The bytes of its array."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        # Without it NumPy makes an array of one object.
        return np.array(self.array, dtype, copy=copy)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_NO_ARITHMETIC)

    def __getitem__(self, _: object) -> NoReturn:
        raise TypeError(_NO_INDEX)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __matmul__ = __rmatmul__ = _refuse

    def block_until_ready(self) -> Table:
        """Waits for the rows; returns the table."""
        self.array.block_until_ready()
        return self

    def __reduce__(self) -> tuple[Callable[..., Table], tuple[jax.Array]]:  # copies and pickles
        options = {"capacity": self.capacity, "implementation": self.implementation}
        return functools.partial(Table, **options), (self.array,)

    def __repr__(self) -> str:
        return str(jax.typeof(self))


class RowGradients:
    """The gradient of a ``Table``: of each row that was looked up, the sum over its lookups, not computed yet.

    Two of one table may be added, and one be multiplied by a number.

    Attributes:
      parts: What was looked up, and the gradients of it; several parts are a sum.
      table: The type of the table.
    """

    __slots__ = ("parts", "table")
    __array_ufunc__ = None  # NumPy's numbers leave arithmetic to this class

    def __init__(self, parts: Sequence[Part], table: TableType):
        self.parts, self.table = tuple(parts), table

    def rows(self) -> tuple[jax.Array, jax.Array]:
        """The rows that were looked up, (n,) int32, ascending, and their gradients, (n, dim) float32.

        Behind the last row are padding, the number of the table's rows, and zeros.
        """
        return _rows(self)

    def array(self) -> jax.Array:
        """(rows, dim) float32: the gradient as an ordinary one, of the table's size."""
        return _dense(self)

    def squared_norm(self) -> jax.Array:
        """() float32, the sum of squares, as of ``array()``."""
        return _squared_norm(self)

    def casted(self) -> RowGradients:
        """The same, with its lookups sorted by row once for all who sum them."""
        return _casted(self)

    def summed_over(self, axis_name: str) -> RowGradients:
        """Inside ``shard_map`` or ``pmap``: the sum over the devices of an axis, as ``jax.lax.psum`` of arrays."""
        return _summed_over(self, axis_name)

    def __add__(self, other: RowGradients) -> RowGradients:
        return _added(self, other)

    def __radd__(self, other: object) -> RowGradients:
        return _added_to(self, other)

    def __mul__(self, factor: jax.Array | float) -> RowGradients:
        return _scaled(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: jax.Array | float) -> RowGradients:
        return _scaled(self, 1 / divisor)

    def __neg__(self) -> RowGradients:
        return _scaled(self, -1.0)

    def __pow__(self, power: object) -> NoReturn:
        return _no_array(self)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(f"{self!r} is no array; its rows() are arrays, and its array() is of the table's size")

    @property
    def real(self) -> NoReturn:
        """Refused: ``optax.tree.norm`` asks for it."""
        return _no_array(self)

    def block_until_ready(self) -> RowGradients:
        """Waits for the arrays; returns the gradients."""
        jax.block_until_ready(self.parts)
        return self

    def __repr__(self) -> str:
        return str(jax.typeof(self))


# The types


@dataclasses.dataclass(frozen=True)
class TableType(hijax.HiType):
    """The JAX type of a ``Table``.

    Attributes:
      rows, dim, dtype: Of its array.
      capacity, implementation: As of ``Table``.
    """

    rows: int
    dim: int
    dtype: np.dtype
    capacity: int | None = None
    implementation: Implementation | None = None
    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim)."""
        return self.rows, self.dim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.rows * self.dim

    @override
    def lo_ty(self) -> list[hijax.AbstractValue]:
        return [hijax.ShapedArray((self.rows, self.dim), self.dtype)]

    @override
    def lower_val(self, hi_val: Table, /) -> list[jax.Array]:
        return [hi_val.array]

    @override
    def raise_val(self, *lo_vals: jax.Array) -> Table:
        return _unchecked_table(lo_vals[0], self)

    @override
    def to_tangent_aval(self) -> RowGradientsType:
        if self.capacity is None:
            return RowGradientsType(self, None)
        # A loop carries the sum, so that its type may not depend on how much was added: as many bags of one id as the
        # capacity.
        row = hijax.ShapedArray((self.capacity, 1), np.dtype("int32"))
        gradient = hijax.ShapedArray((self.capacity, self.dim), np.dtype("float32"))
        return RowGradientsType(self, _Sizes.of([(Bags(ids=row), gradient)]))  # pyright: ignore[reportArgumentType]

    @override
    def shard(self, mesh: object, manual_axes: object, check_vma: bool, spec: object) -> TableType:
        return self

    @override
    def unshard(self, mesh: object, check_vma: bool, spec: object) -> TableType:
        return self

    @override
    def nospec(self, mesh: object, check_vma: bool, all_names: object) -> TableSpec:
        return TableSpec()

    array = hijax.aval_property(lambda table: _array(table))

    def str_short(self, short_dtypes: bool = False, **_: object) -> str:
        """As JAX's messages name it."""
        room = "" if self.capacity is None else f", capacity {self.capacity}"
        return f"Table[{self.dtype.name}[{self.rows},{self.dim}]{room}]"

    __repr__ = __str__ = str_short

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_NO_ARITHMETIC)

    _add = _radd = _sub = _rsub = _mul = _rmul = _truediv = _rtruediv = _neg = _matmul = _rmatmul = _refuse

    def _getitem(self, *_: object) -> NoReturn:
        raise TypeError(_NO_INDEX)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The types of the arrays of all parts, and how they make parts."""

    structure: TreeStructure
    avals: tuple[hijax.ShapedArray, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[Bags, jax.Array | hijax.ShapedArray]]) -> _Sizes:
        leaves, structure = jax.tree.flatten(tuple(parts))
        avals = (leaf if isinstance(leaf, hijax.ShapedArray) else jax.typeof(leaf) for leaf in leaves)
        return cls(structure, tuple(hijax.ShapedArray(aval.shape, aval.dtype) for aval in avals))


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradientsType(hijax.HiType):
    """The JAX type of ``RowGradients``.

    The type of a table does not say how many lookups there will be, so that its cotangent's sizes are open, None; every
    value has a type with sizes. An open type equals a type of any size, which JAX asks where it checks a cotangent. Two
    types with sizes are equal only where these are, so that no compiled program is taken for another.
    """

    table: TableType
    sizes: _Sizes | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowGradientsType) or self.table != other.table:
            return False
        return self.sizes is None or other.sizes is None or self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.table)

    @override
    def lo_ty(self) -> list[hijax.AbstractValue]:
        return [] if self.sizes is None else list(self.sizes.avals)

    @override
    def lower_val(self, hi_val: RowGradients, /) -> list[jax.Array]:
        return jax.tree.leaves(hi_val.parts)

    @override
    def raise_val(self, *lo_vals: jax.Array) -> RowGradients:
        parts = () if self.sizes is None else jax.tree.unflatten(self.sizes.structure, lo_vals)
        return RowGradients(parts, self.table)

    @override
    def to_tangent_aval(self) -> RowGradientsType:
        return self

    @override
    def vspace_zero(self) -> RowGradients:
        # Zeros of no lookups are of another size than any sum; a loop, which would begin with them, is why capacities
        # exist.
        return RowGradients((), self.table) if self.table.capacity is None else _Nothing(self.table)()

    @override
    def vspace_add(self, x: RowGradients, y: RowGradients) -> RowGradients:
        return _added(x, y)

    @override
    def shard(self, mesh: object, manual_axes: object, check_vma: bool, spec: object) -> RowGradientsType:
        return self

    @override
    def unshard(self, mesh: object, check_vma: bool, spec: object) -> RowGradientsType:
        return self

    @override
    def nospec(self, mesh: object, check_vma: bool, all_names: object) -> TableSpec:
        return TableSpec(len(self.lo_ty()))

    rows = hijax.aval_method(lambda gradients: _rows(gradients))
    array = hijax.aval_method(lambda gradients: _dense(gradients))
    squared_norm = hijax.aval_method(lambda gradients: _squared_norm(gradients))
    casted = hijax.aval_method(lambda gradients: _casted(gradients))
    summed_over = hijax.aval_method(lambda gradients, axis_name: _summed_over(gradients, axis_name))
    real = hijax.aval_property(lambda gradients: _no_array(gradients))
    _add = staticmethod(lambda gradients, other: _added(gradients, other))
    _radd = staticmethod(lambda gradients, other: _added_to(gradients, other))
    _mul = _rmul = staticmethod(lambda gradients, factor: _scaled(gradients, factor))
    _truediv = staticmethod(lambda gradients, divisor: _scaled(gradients, 1 / divisor))
    _neg = staticmethod(lambda gradients: _scaled(gradients, -1.0))
    _pow = staticmethod(lambda gradients, power: _no_array(gradients))

    def str_short(self, short_dtypes: bool = False, **_: object) -> str:
        """As JAX's messages name it."""
        name = f"RowGradients[{self.table.rows},{self.table.dim}]"
        if self.sizes is None:
            return name
        parts = jax.tree.unflatten(self.sizes.structure, self.sizes.avals)
        if not parts:  # what JAX names where a loop begins with this sum, and would go on with another size
            return f"{name} of no lookups (looked up in a loop, a jrec.Table needs a capacity)"
        return f"{name} of {'+'.join(str(bags.capacity) for bags, _ in parts)} lookups"

    __repr__ = __str__ = str_short


class TableSpec(hijax.HiPspec):
    """How ``jax.shard_map`` divides a ``Table``: every device has all of it.

    Example:
      >>> jax.shard_map(step, in_specs=(TableSpec(), P("d")), out_specs=TableSpec(), check_vma=False)  # doctest: +SKIP
    """

    def __init__(self, leaves: int = 1):
        self._leaves = leaves

    @override
    def to_lo(self) -> tuple[PartitionSpec, ...]:
        """Of each of its arrays."""
        return (PartitionSpec(),) * self._leaves

    @override
    def to_tangent_spec(self) -> TableSpec:
        """Refused: JAX cannot sum the gradients of the devices."""
        raise NotImplementedError("jax.grad of a shard_map with a jrec.Table; take the gradient inside of it")

    @override
    def to_ct_spec(self) -> TableSpec:
        """Refused, as ``to_tangent_spec``."""
        return self.to_tangent_spec()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableSpec) and self._leaves == other._leaves

    def __hash__(self) -> int:
        return hash(self._leaves)


hijax.register_hitype(Table, lambda table: table.type)
hijax.register_hitype(RowGradients, lambda g: RowGradientsType(g.table, _Sizes.of(g.parts)))


# The operations


class _Operation(hijax.HiPrim):
    """A primitive: ``expand`` says in arrays what it computes. JAX makes its parameters attributes."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, operands: tuple[PyTree, ...], result: PyTree, **params: object):
        # Two primitives of one class are equal by their parameters alone, and stand for different programs by operands.
        self.in_avals, self.out_aval, self.params = operands, result, {"operands": operands, **params}
        super().__init__()

    def batch(self, axis_data: object, args: object, dims: object) -> NoReturn:
        raise NotImplementedError(
            "jax.vmap of the gradient of a jrec.Table, or over tables; map the loss, and take the gradient of its sum"
        )

    def vjp_fwd(self, nonzero: object, *args: object) -> tuple[PyTree, PyTree]:
        raise NotImplementedError("a second derivative by a jrec.Table; take it by an array of the rows that matter")


class _Lookup(_Operation):
    """Sums of rows over bags; ``leaves`` are the arrays of ``Bags`` in the canonical forms of ``lookup``."""

    lin, linearized = hijax.linearize_from_jvp

    def __init__(self, table: TableType, leaves: tuple[hijax.AbstractValue, ...], structure: TreeStructure):
        bags = jax.tree.unflatten(structure, leaves)
        result = hijax.ShapedArray((bags.num_bags, table.dim), np.dtype("float32"))
        super().__init__((table, leaves), result, table=table, structure=structure, leaves=leaves)

    def expand(self, table: Table, leaves: tuple[jax.Array, ...]) -> jax.Array:
        bags = jax.tree.unflatten(self.structure, leaves)
        return _sums(table.array, bags, self.table.implementation)

    def vjp_fwd(self, nonzero: PyTree[bool], table: Table, leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, PyTree]:
        # The rows stay alive for the backward pass only where the weights' gradients are wanted.
        weights = any(nonzero[1])
        return self(table, leaves), (table if weights else None, leaves)

    def vjp_bwd_retval(self, residuals: PyTree, gradient: jax.Array) -> tuple[RowGradients, tuple[PyTree, ...]]:
        table, leaves = residuals
        zeros = [hijax.Zero(aval.to_ct_aval()) for aval in self.leaves]
        if table is not None and (weights := _weights_at(self.structure)) is not None:
            zeros[weights] = _WeightGradients(self, jax.typeof(gradient))(table, leaves, gradient)
        return _Defer(self, jax.typeof(gradient))(leaves, gradient), tuple(zeros)

    def jvp(self, primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        (table, leaves), (moved, moved_leaves) = primals, tangents
        result = self(table, leaves)
        # The sums are linear in the rows and in the weights: the two terms of the product rule, either of which may be
        # zero.
        changes = []
        if not isinstance(moved, hijax.Zero):
            changes.append(_Pick(self, jax.typeof(moved))(moved, leaves))
        weights = _weights_at(self.structure)
        if weights is not None and not isinstance(moved_leaves[weights], hijax.Zero):
            changes.append(self(table, (*leaves[:weights], moved_leaves[weights], *leaves[weights + 1 :])))
        if not changes:
            return result, hijax.Zero(self.out_aval.to_tangent_aval())
        return result, changes[0] if len(changes) == 1 else changes[0] + changes[1]

    def batch(self, axis_data: Any, args: PyTree, dims: PyTree) -> tuple[jax.Array, int]:
        (table, leaves), (of_table, of_leaves) = args, dims
        if of_table is not None:
            raise NotImplementedError("jax.vmap over jrec.Tables; give it the rows of all of them in one table")
        leaves = [
            jnp.broadcast_to(leaf, (axis_data.size, *leaf.shape)) if axis is None else jnp.moveaxis(leaf, axis, 0)
            for leaf, axis in zip(leaves, of_leaves, strict=True)
        ]
        # One lookup of all examples' bags, so that the backward pass is one too, and a row that two examples read steps
        # once.
        bags = merged(jax.tree.unflatten(self.structure, leaves))
        sums = look_up(table, bags)
        return sums.reshape(axis_data.size, *self.out_aval.shape), 0


class _Defer(_Operation):
    """A lookup's backward pass: row gradients that are not summed yet, or of as many rows as the table's capacity."""

    def __init__(self, lookup: _Lookup, gradient: hijax.ShapedArray):
        table, structure = lookup.table, lookup.structure
        result = table.to_ct_aval()
        if result.sizes is None:
            bags = jax.tree.unflatten(structure, lookup.leaves)
            result = RowGradientsType(table, _Sizes.of([(bags, gradient)]))
        super().__init__((lookup.leaves, gradient), result, table=table, structure=structure)

    def expand(self, leaves: tuple[jax.Array, ...], gradient: jax.Array) -> RowGradients:
        parts = ((jax.tree.unflatten(self.structure, leaves), gradient.astype(jnp.float32)),)
        return _within_capacity(RowGradients(parts, self.table))


class _WeightGradients(_Operation):
    """The gradients of a lookup's weights: of each, its row times its bag's gradient."""

    def __init__(self, lookup: _Lookup, gradient: hijax.ShapedArray):
        weights = lookup.leaves[_weights_at(lookup.structure)]
        params = {"table": lookup.table, "structure": lookup.structure}
        super().__init__((lookup.table, lookup.leaves, gradient), weights.to_ct_aval(), **params)

    def expand(self, table: Table, leaves: tuple[jax.Array, ...], gradient: jax.Array) -> jax.Array:
        bags = jax.tree.unflatten(self.structure, leaves)

        def sums(weights: jax.Array) -> jax.Array:
            weighted = dataclasses.replace(bags, weights=weights, cast=None)
            return _sums(table.array, weighted, self.table.implementation)

        return jax.vjp(sums, bags.weights)[1](gradient)[0]


class _Pick(_Operation):
    """A lookup's tangent: the same sums, of the rows of a tangent of the table."""

    def __init__(self, lookup: _Lookup, moved: RowGradientsType):
        super().__init__((moved, lookup.leaves), lookup.out_aval, lookup=lookup, structure=lookup.structure)

    def expand(self, moved: RowGradients, leaves: tuple[jax.Array, ...]) -> jax.Array:
        bags, (numbers, values) = jax.tree.unflatten(self.structure, leaves), _summed(moved)
        if not len(numbers):
            return jnp.zeros(self.out_aval.shape, jnp.float32)
        # A tangent has only some rows; where a looked-up row is none of them, nothing changes.
        place = jnp.minimum(jnp.searchsorted(numbers, bags.ids), len(numbers) - 1).astype(jnp.int32)
        place = jnp.where((numbers[place] == bags.ids) & (bags.ids >= 0), place, -1)
        return _sums(values, dataclasses.replace(bags, ids=place, cast=None), None)


class _Make(_Operation):
    """A table of an array that a traced function computes."""

    lin, linearized = hijax.linearize_from_jvp

    def __init__(self, table: TableType):
        super().__init__((table.lo_ty()[0],), table, table=table)

    def expand(self, array: jax.Array) -> Table:
        return _unchecked_table(array, self.table)

    def vjp_fwd(self, nonzero: object, array: jax.Array) -> tuple[Table, tuple[()]]:
        return self(array), ()

    def vjp_bwd_retval(self, residuals: object, gradients: RowGradients) -> tuple[jax.Array]:
        return (_dense(gradients).astype(self.table.dtype),)

    def jvp(self, primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        (moved,) = tangents
        if isinstance(moved, hijax.Zero):
            return self(*primals), hijax.Zero(self.table.to_tangent_aval())
        return self(*primals), _OfAll(self.table, jax.typeof(moved))(moved)


class _Array(_Operation):
    """The rows as an array; the backward pass makes a gradient of all of them."""

    lin, linearized = hijax.linearize_from_jvp

    def __init__(self, table: TableType):
        super().__init__((table,), table.lo_ty()[0], table=table)

    def expand(self, table: Table) -> jax.Array:
        return table.array

    def vjp_fwd(self, nonzero: object, table: Table) -> tuple[jax.Array, tuple[()]]:
        return self(table), ()

    def vjp_bwd_retval(self, residuals: object, gradient: jax.Array) -> tuple[RowGradients]:
        return (_OfAll(self.table, jax.typeof(gradient))(gradient),)

    def jvp(self, primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        (moved,) = tangents
        if isinstance(moved, hijax.Zero):
            return self(*primals), hijax.Zero(self.out_aval.to_tangent_aval())
        return self(*primals), _dense(moved).astype(self.table.dtype)


class _OfAll(_Operation):
    """The gradient of all rows, from an array of the table's size."""

    def __init__(self, table: TableType, gradient: hijax.ShapedArray):
        if table.capacity is not None and table.capacity < table.rows:
            raise ValueError(
                f"the gradient of table.array has all {table.rows:,} rows, but the table's capacity is"
                f" {table.capacity:,}; leave it out"
            )
        ids = hijax.ShapedArray((table.rows, 1), np.dtype("int32"))
        values = hijax.ShapedArray((table.rows, table.dim), np.dtype("float32"))
        sizes = _Sizes.of([(Bags(ids=ids), values)])  # pyright: ignore[reportArgumentType]
        result = table.to_ct_aval() if table.capacity is not None else RowGradientsType(table, sizes)
        super().__init__((gradient,), result, table=table)

    def expand(self, gradient: jax.Array) -> RowGradients:
        numbers = jnp.arange(self.table.rows, dtype=jnp.int32)
        return _within_capacity(_of_rows(self.table, numbers, gradient.astype(jnp.float32)))


class _Nothing(_Operation):
    """The gradient of no row, of a table with a capacity."""

    def __init__(self, table: TableType):
        super().__init__((), table.to_ct_aval(), table=table)

    def expand(self) -> RowGradients:
        return _nothing(self.table)


class _OfGradients(_Operation):
    """A function of row gradients to arrays."""

    def __init__(self, gradients: RowGradientsType, function: Callable[[RowGradients], PyTree]):
        result = jax.tree.map(
            lambda array: hijax.ShapedArray(array.shape, array.dtype),
            jax.eval_shape(lambda *arrays: function(gradients.raise_val(*arrays)), *gradients.lo_ty()),
        )
        super().__init__((gradients,), result, function=function)

    def expand(self, gradients: RowGradients) -> PyTree[jax.Array]:
        return self.function(gradients)


class _ToGradients(_Operation):
    """A function of row gradients of one table, and arrays, to row gradients of it."""

    def __init__(
        self,
        operands: tuple[hijax.HiType | hijax.ShapedArray, ...],
        function: Callable[..., RowGradients],
        static: tuple[object, ...] = (),
    ):
        table = next(operand.table for operand in operands if isinstance(operand, RowGradientsType))

        def parts(*arrays: Sequence[jax.Array]) -> Sequence[Part]:
            values = [operand.raise_val(*own) for operand, own in zip(operands, arrays, strict=True)]
            return function(*values, *static).parts

        # A primitive must say the sizes of its result before it is computed, and they are whatever the function makes
        # of it.
        shapes = jax.eval_shape(parts, *(operand.lo_ty() for operand in operands))
        leaves, structure = jax.tree.flatten(shapes)
        avals = tuple(hijax.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves)
        result = RowGradientsType(table, _Sizes(structure, avals))
        super().__init__(operands, result, function=function, static=static)

    def expand(self, *operands: object) -> RowGradients:
        return self.function(*operands, *self.static)


class _Step(_Operation):
    """An optimizer's step on the rows that were looked up."""

    def __init__(self, optimizer: RowOptimizer, table: TableType, *operands: PyTree):
        slots = operands[1]
        super().__init__((table, *operands), (table, slots), optimizer=optimizer)

    def expand(
        self,
        table: Table,
        gradients: RowGradients,
        slots: tuple[jax.Array, ...],
        step: jax.Array,
        key: tuple[jax.Array, ...],
        rate: tuple[jax.Array, ...],
    ) -> tuple[Table, tuple[jax.Array, ...]]:
        # Operands of a primitive have places and no names; ``row_step`` flattened the slots in this order.
        names = sorted(self.optimizer.slots)
        # Nothing was looked up: kernels take no arrays without elements.
        if not any(bags.capacity for bags, _ in gradients.parts):
            return table, slots
        cast, weights, of_bags = _joint(gradients)
        optimizer = dataclasses.replace(self.optimizer, learning_rate=lambda _: rate[0]) if rate else self.optimizer
        rows, new_slots = casted_update(
            optimizer,
            table.array,
            dict(zip(names, slots, strict=True)),
            cast,
            of_bags,
            weights=weights,
            step=step,
            rounding_key=key[0] if key else None,
            implementation=table.implementation,
        )
        return _unchecked_table(rows, jax.typeof(table)), tuple(new_slots[name] for name in names)


# What callers use


def is_table(value: object) -> TypeGuard[Table]:
    """Whether a value is a ``Table``, or stands for one where a function is traced."""
    return isinstance(value, Table) or isinstance(getattr(value, "aval", None), TableType)


def is_row_gradients(value: object) -> TypeGuard[RowGradients]:
    """Whether a value is ``RowGradients``, or stands for some."""
    return isinstance(value, RowGradients) or isinstance(getattr(value, "aval", None), RowGradientsType)


def look_up(table: Table, bags: Bags) -> jax.Array:
    """Sums of rows, (num_bags, dim) float32, of int32 bags; ``jrec.embedding_bag`` is the door."""
    leaves, structure = jax.tree.flatten(bags)
    leaves = tuple(map(jnp.asarray, leaves))
    avals = tuple(map(jax.typeof, leaves))
    return _Lookup(jax.typeof(table), avals, structure)(table, leaves)


def row_step(
    optimizer: RowOptimizer,
    table: Table,
    slots: Slots,
    gradients: RowGradients,
    *,
    step: Step = 0,
    rounding_key: RoundingKey | None = None,
) -> tuple[Table, Slots]:
    """One step of a row optimizer on the rows that were looked up (``casted_update``); in place under donation.

    Args:
      optimizer: The row optimizer.
      table: A ``Table``.
      slots: As ``optimizer.init(table.array)`` makes them.
      gradients: The table's ``RowGradients``.
      step: () int32, how many steps were taken before.
      rounding_key: (2,) uint32, a new one for every step, for stochastic rounding of 16-bit rows; None rounds to
        nearest.

    Returns:
      The new table and slots.

    Raises:
      ValueError: If the slots or gradients are of another optimizer or table.
    """
    checked_optimizer(optimizer)
    of_table, of_gradients = jax.typeof(table), jax.typeof(gradients)
    if not isinstance(of_table, TableType):
        raise ValueError(f"table is of type {of_table}, but must be a jrec.Table")
    if not isinstance(of_gradients, RowGradientsType) or of_gradients.table != of_table:
        raise ValueError(f"gradients are {of_gradients}, but must be the jrec.RowGradients of {of_table}")
    shaped = jax.ShapeDtypeStruct(of_table.shape, of_table.dtype)
    _check_slots(optimizer, shaped, slots)
    own = tuple(jnp.asarray(slots[name]) for name in sorted(optimizer.slots))
    key = () if rounding_key is None else (jnp.asarray(rounding_key),)
    step = checked_step(step)
    optimizer, rate = _without_rate(optimizer, step)
    operands = (gradients, own, step, key, rate)
    table, own = _Step(optimizer, of_table, *jax.tree.map(jax.typeof, operands))(table, *operands)
    return table, dict(zip(sorted(optimizer.slots), own, strict=True))


def _without_rate(optimizer: RowOptimizer, step: jax.Array) -> tuple[RowOptimizer, tuple[jax.Array, ...]]:
    """An optimizer for a primitive to keep, and its learning rate where that is no plain number.

    Schedules and arrays may hold tracers, as ``optax.inject_hyperparams`` makes them, which must be operands.
    """
    rate = optimizer.learning_rate
    if isinstance(rate, numbers.Real) or not optimizer.takes_schedule:
        return optimizer, ()
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
        value = jnp.asarray(rate(step) if callable(rate) else rate, jnp.float32)
    return dataclasses.replace(optimizer, learning_rate=0.0), (value,)


def _check_slots(optimizer: RowOptimizer, table: jax.ShapeDtypeStruct, slots: object) -> None:
    if not isinstance(slots, Mapping) or sorted(slots) != sorted(optimizer.slots):
        raise ValueError(
            f"{type(optimizer).__name__} keeps slots {sorted(optimizer.slots)}; make them with"
            " optimizer.init(table.array)"
        )
    checked_slots(optimizer, table, slots)


def _no_array(gradients: RowGradients) -> NoReturn:
    raise TypeError(
        f"{jax.typeof(gradients)} is no array, as optax takes it for; the optimizers of tables, and norms and clipping"
        " of their gradients, are in jrec.optax"
    )


def _array(table: Table) -> jax.Array:
    return _Array(jax.typeof(table))(table)


def _rows(gradients: RowGradients) -> tuple[jax.Array, jax.Array]:
    return _OfGradients(jax.typeof(gradients), _summed)(gradients)


def _dense(gradients: RowGradients) -> jax.Array:
    return _OfGradients(jax.typeof(gradients), _scattered)(gradients)


def _squared_norm(gradients: RowGradients) -> jax.Array:
    return _OfGradients(jax.typeof(gradients), _squares)(gradients)


def _casted(gradients: RowGradients) -> RowGradients:
    return _ToGradients((jax.typeof(gradients),), _with_cast)(gradients)


def _added(gradients: RowGradients, other: RowGradients) -> RowGradients:
    first, second = jax.typeof(gradients), jax.typeof(other)
    if not isinstance(second, RowGradientsType) or first.table != second.table:
        raise TypeError(
            f"row gradients are added to those of the same table, but {first} were added to {second}; the optimizers"
            " of tables are in jrec.optax"
        )
    return _ToGradients((first, second), _sum)(gradients, other)


def _added_to(gradients: RowGradients, other: object) -> RowGradients:
    if isinstance(other, int) and other == 0:  # what ``sum`` and ``optax.tree.add`` begin with
        return gradients
    raise TypeError(f"{jax.typeof(gradients)} is added to row gradients of its table, not to {type(other).__name__}")


def _scaled(gradients: RowGradients, factor: ArrayLike) -> RowGradients:
    factor = jnp.asarray(factor, jnp.float32)
    if factor.shape:
        raise TypeError(f"row gradients are multiplied by a single number, not by an array of shape {factor.shape}")
    return _ToGradients((jax.typeof(gradients), jax.typeof(factor)), _times)(gradients, factor)


def _summed_over(gradients: RowGradients, axis_name: str) -> RowGradients:
    return _ToGradients((jax.typeof(gradients),), _gathered, (axis_name,))(gradients)


# In arrays


def _unchecked_table(rows: jax.Array, like: TableType) -> Table:
    table = object.__new__(Table)
    table.array, table.capacity, table.implementation = rows, like.capacity, like.implementation
    return table


def _weights_at(structure: TreeStructure) -> int | None:
    """Which leaf of bags the weights are."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    return numbered.weights


def _sums(rows: jax.Array, bags: Bags, implementation: Implementation | None) -> jax.Array:
    return lookup_of_table(rows, bags.ids, bags.offsets, weights=bags.weights, implementation=implementation)


def _of_rows(table: TableType, numbers: jax.Array, values: jax.Array) -> RowGradients:
    """The gradients of single rows; negative numbers are none."""
    return RowGradients(((Bags(ids=numbers[:, None]), values),), table)


def _nothing(table: TableType) -> RowGradients:
    assert table.capacity is not None
    numbers = jnp.full((table.capacity,), -1, jnp.int32)
    return _of_rows(table, numbers, jnp.zeros((table.capacity, table.dim), jnp.float32))


def _joint(gradients: RowGradients) -> tuple[Cast, jax.Array | None, jax.Array]:
    """The cast of the lookups of all parts, their weights, and the gradients of all bags."""
    table, parts = gradients.table, gradients.parts
    if len(parts) == 1:
        bags, of_bags = parts[0]
    else:
        # A row that several lookups read takes one step, by the sum of its gradients: so all parts are cast together.
        bags, of_bags = joined([bags for bags, _ in parts]), jnp.concatenate([values for _, values in parts])
    return cast_of(bags, table.rows, implementation=table.implementation), bags.weights, of_bags


def _summed(gradients: RowGradients) -> tuple[jax.Array, jax.Array]:
    """The rows, (n,) int32, and their gradients, (n, dim) float32."""
    if not gradients.parts:
        return jnp.zeros((0,), jnp.int32), jnp.zeros((0, gradients.table.dim), jnp.float32)
    cast, weights, of_bags = _joint(gradients)
    values = casted_gather_reduce(cast, of_bags, weights, implementation=gradients.table.implementation)
    return cast.rows, values


def _scattered(gradients: RowGradients) -> jax.Array:
    numbers, values = _summed(gradients)
    # Padding is the number of the rows, one past the last, which "drop" leaves out; -1 would be the last row.
    return jnp.zeros(gradients.table.shape, jnp.float32).at[numbers].add(values, mode="drop")


def _squares(gradients: RowGradients) -> jax.Array:
    return jnp.sum(jnp.square(_summed(gradients)[1]))


def _with_cast(gradients: RowGradients) -> RowGradients:
    # The type of a table with a capacity has no place for a cast.
    if not gradients.parts or gradients.table.capacity is not None:
        return gradients
    if len(gradients.parts) == 1:
        ((bags, values),) = gradients.parts
    else:
        bags = joined([bags for bags, _ in gradients.parts])
        values = jnp.concatenate([values for _, values in gradients.parts])
    cast = cast_of(bags, gradients.table.rows, implementation=gradients.table.implementation)
    return RowGradients(((dataclasses.replace(bags, cast=cast), values),), gradients.table)


def _sum(gradients: RowGradients, other: RowGradients) -> RowGradients:
    return _within_capacity(RowGradients((*gradients.parts, *other.parts), gradients.table))


def _times(gradients: RowGradients, factor: jax.Array) -> RowGradients:
    # Of the bags' gradients, before any sum: sums are linear in them.
    return RowGradients([(bags, values * factor) for bags, values in gradients.parts], gradients.table)


def _gathered(gradients: RowGradients, axis_name: str) -> RowGradients:
    """The parts of all devices of an axis."""
    parts = []
    for bags, values in gradients.parts:
        # A cast is of one device's lookups alone.
        bags, values = jax.tree.map(
            lambda array: jax.lax.all_gather(array, axis_name), (dataclasses.replace(bags, cast=None), values)
        )
        parts.append((merged(bags), values.reshape(-1, values.shape[-1])))
    return _within_capacity(RowGradients(parts, gradients.table))


def _within_capacity(gradients: RowGradients) -> RowGradients:
    """The gradients of a table with a capacity in as many rows; NaN where they are more."""
    table = gradients.table
    if (most := table.capacity) is None:
        return gradients
    if not gradients.parts:
        return _nothing(table)
    bags = joined([bags for bags, _ in gradients.parts])
    of_bags = jnp.concatenate([values for _, values in gradients.parts])
    cast = cast_of(bags, table.rows, unique_capacity=most, implementation=table.implementation)
    values = casted_gather_reduce(cast, of_bags, bags.weights, implementation=table.implementation)
    # Padding becomes absent lookups: the gradient is looked at as bags of one id.
    numbers = jnp.where(jnp.arange(most) < cast.num_unique, cast.rows, -1)
    return _of_rows(table, numbers, jnp.where(cast.num_unique > most, jnp.nan, values))
