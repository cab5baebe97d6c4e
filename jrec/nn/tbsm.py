"""TBSM (Ishkhanov et al. 2020, arXiv 2008.11922): a DLRM tower on every step of a history, attention, and a top MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.nn.calibration import Calibration
from jrec.nn.dense_encoding import Boundaries, check_boundaries, encoded_width, piecewise_linear
from jrec.nn.embeddings import EmbeddingCollection
from jrec.nn.interaction import dot_interaction
from jrec.nn.mlp import MLP, check_rate
from jrec.nn.multi_task import MultiTaskConfig, MultiTaskHeads
from jrec.nn.tt_stack import TTOptions
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import EmbeddingLayout, FeatureConfig
from jrec.ops.types import Bags

Inner = Literal["dot", "indefinite", "definite"]
TopWith = Literal["context", "products"]
_EPSILON = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class TBSMConfig:
    """The dense part of a TBSM.

    FAE's Table I writes the dense part of RMC1 as "1-16 & 22-15-15" and "30-60-1". In these words:

    * 1-16, ``bottom_mlp`` (16,): the one dense input of a step is its place in time, ``place / (steps + 1)``, and 16
      is the embedding dim;
    * 22-15-15, ``tower_mlp`` (15, 15): a step has four vectors: its place, user, item and category. Their 6 dot
      products beside the first vector's 16 elements are the 22 inputs; the 15 outputs are the step's vector z;
    * 30-60-1, ``top_mlp`` (60, 1): 30 is the context of 15 beside the target's z of 15.

    The MLP of the time-series layer is not in that table; it is 20-15-15-20, ``attention_mlp`` (15, 15), in the
    authors' script (bench/tbsm_bench.sh of facebookresearch/tbsm), for histories of 20.

    Attributes:
      histories: Pairs of a feature of the target and the feature, of the same table, with the history's steps.
      num_dense: Dense features of an example; they join the place in every step's bottom MLP.
      bottom_mlp: Layer sizes after the dense inputs; the last must be the embedding dim for "dot".
      tower_mlp: Layer sizes after the interaction of a step.
      attention_mlp: Hidden layer sizes of the time-series layer's MLP.
      top_mlp: Layer sizes after context and target; the last must be 1, the logit.
      interaction: How a step's vectors interact, "dot" or "concat"; see ``DLRMConfig``.
      inner: The product of the steps with the target; see ``TimeSeriesLayer``.
      heads: Time-series layers, each with its own parameters and top MLP. The probabilities of several go through one
        more MLP, of ``heads + 4`` hidden units.
      top_with: What the top MLP sees beside the target's vector: only the "context", as in the paper, or the steps'
        "products" with the target, too. These tell the top MLP directly that a step is like the target; through
        the context it has to learn that from weights and target, for which a small log has too few examples.
      compute_dtype: The dtype of every computation but the projection onto the sphere; parameters stay float32.
      dropout: The rate of dropout after the hidden layers of the bottom and top MLPs, those that another layer follows,
        in training.
      batch_norm: Whether these layers have BatchNorm before their ReLU; in the bottom MLP over all steps and targets.
      dense_boundaries: The boundaries of each dense feature's pieces; see ``DLRMConfig``.
      calibrated: Whether a scale and a shift of the logit apply in eval mode (``Calibration``).
      multi_task: Heads for several tasks in place of the top MLP; ``top_mlp`` is then (), and logits are a dictionary
        by task.
    """

    histories: tuple[tuple[str, str], ...]
    num_dense: int = 0
    bottom_mlp: tuple[int, ...] = (16,)
    tower_mlp: tuple[int, ...] = (15, 15)
    attention_mlp: tuple[int, ...] = (15, 15)
    top_mlp: tuple[int, ...] = (60, 1)
    interaction: Literal["dot", "concat"] = "dot"
    inner: Inner = "definite"
    heads: int = 1
    top_with: TopWith = "context"
    compute_dtype: str = "float32"
    dropout: float = 0.0
    batch_norm: bool = False
    dense_boundaries: Boundaries = ()
    calibrated: bool = False
    multi_task: MultiTaskConfig | None = None

    def __post_init__(self) -> None:
        check_rate(self.dropout)
        check_boundaries(self.dense_boundaries, self.num_dense)
        if not self.histories:
            raise ValueError("histories is empty; name the history of at least one feature of the target")
        if self.multi_task is not None:
            self._check_multi_task()
        elif not self.top_mlp or self.top_mlp[-1] != 1:
            raise ValueError(f"top_mlp {list(self.top_mlp)} must end in 1, the logit")
        if not self.bottom_mlp or not self.tower_mlp:
            raise ValueError(
                f"bottom_mlp {list(self.bottom_mlp)} and tower_mlp {list(self.tower_mlp)} need a layer each"
            )
        known = {"interaction": ("dot", "concat"), "inner": get_args(Inner), "top_with": get_args(TopWith)}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; choose {' or '.join(choices)}")
        if self.heads < 1:
            raise ValueError(f"heads is {self.heads}; there must be at least one")

    def _check_multi_task(self) -> None:
        odd = {"top_mlp": bool(self.top_mlp), "calibrated": self.calibrated, "batch_norm": self.batch_norm}
        if named := [name for name, is_set in odd.items() if is_set]:
            raise ValueError(f"{named[0]} is given beside multi_task, whose heads do not read it; leave it out")
        if self.heads > 1:
            raise ValueError(f"heads is {self.heads}, but of one time-series layer multi_task makes the tasks' logits")

    @property
    def history_of(self) -> dict[str, str]:
        """Histories by feature of the target."""
        return dict(self.histories)


class TBSM(nnx.Module):
    """Time-based sequence model: ``model(batch)`` gives the logit that a user turns to the target after the history.

    One DLRM, the *tower*, makes each step's vector from its place in time, its own features and the features that all
    steps share (such as the user). Vectors are projected onto the unit sphere. Time-series layers weigh the history's
    steps by their products with the target's vector (``TimeSeriesLayer``), and a top MLP sees their sum beside it, with
    ``top_with`` "products" those products, too.

    The steps of a history are in order of time. It may be shorter than ``max_length``, or empty: padding never changes
    a logit, and gets no gradient. A step counts where all features of ``histories`` have an id.

    Args:
      config: The dense part's configuration.
      layout: The layout of the embedding tables (``EmbeddingLayout.build``). Histories have pooling "none"; a feature
        of the target reads the table of its history, so that an item has one vector wherever it stands.
      implementation: The implementation of the embedding ops; None for the platform's fastest.
      pad_rows: Whether rows of embedding tables are padded; see ``EmbeddingCollection``.
      tt: Options of the tensor-train tables.
      unique_capacities: How many unique rows of a batch fit, by stack; see ``EmbeddingCollection``.
      key: The key of the initial rows; see ``EmbeddingCollection``. None draws one.
      rngs: Its ``params`` stream initializes everything; dropout needs a ``dropout`` stream, too.

    Raises:
      ValueError: If histories, features and dims do not fit together.
    """

    def __init__(
        self,
        config: TBSMConfig,
        layout: EmbeddingLayout,
        *,
        implementation: Implementation | None = None,
        pad_rows: bool | None = None,
        tt: TTOptions | None = None,
        unique_capacities: Mapping[str, int] | None = None,
        key: jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.steps = history_steps(config, layout)
        self.own = tuple(name for name in layout.order if name not in config.history_of.values())
        self.embeddings = EmbeddingCollection(
            layout,
            implementation=implementation,
            pad_rows=pad_rows,
            tt=tt,
            unique_capacities=unique_capacities,
            key=key,
            rngs=rngs,
        )
        dtype = jnp.dtype(config.compute_dtype)
        options = {"dtype": dtype, "dropout": config.dropout, "batch_norm": config.batch_norm}
        inputs = 1 + encoded_width(config.dense_boundaries, config.num_dense)
        self.bottom = MLP((inputs, *config.bottom_mlp), activate_last=True, **options, rngs=rngs)
        self.tower = MLP((tower_width(config, layout), *config.tower_mlp), activate_last=True, dtype=dtype, rngs=rngs)
        width = config.tower_mlp[-1]
        self.attention = nnx.List(
            TimeSeriesLayer(width, self.steps, config.attention_mlp, inner=config.inner, dtype=dtype, rngs=rngs)
            for _ in range(config.heads)
        )
        inputs = 2 * width + (self.steps if config.top_with == "products" else 0)
        if config.multi_task is None:
            self.top = nnx.List(
                MLP((inputs, *config.top_mlp), activate_last=False, **options, rngs=rngs) for _ in range(config.heads)
            )
        else:
            self.tasks = MultiTaskHeads(inputs, config.multi_task, rngs=rngs)
        joint = (config.heads, config.heads + 4, 1)
        self.joint = MLP(joint, activate_last=False, dtype=dtype, rngs=rngs) if config.heads > 1 else None
        self.calibration = Calibration() if config.calibrated else None

    def __call__(self, batch: Batch) -> PyTree[jax.Array]:
        """Logits, (batch,) float32, or a dictionary of them by task."""
        activations, _ = self.embeddings.lookup(batch.bags)
        return self.logits(batch.dense, activations, batch.bags, mask=batch.mask)

    def logits(
        self,
        dense: jax.Array,
        activations: Mapping[str, jax.Array],
        bags: Mapping[str, Bags],
        *,
        mask: jax.Array | None = None,
    ) -> PyTree[jax.Array]:
        """Phase two: from dense features (batch, num_dense) and looked-up activations to logits, (batch,) float32, or
        to a dictionary of them by task.

        ``mask``, (batch,) float32, is 0 for examples that BatchNorm leaves out; None leaves out none.
        """
        dtype = jnp.dtype(self.config.compute_dtype)
        dense = piecewise_linear(dense, self.config.dense_boundaries)
        vectors = {name: x.astype(dtype) for name, x in self.embeddings.features(activations, bags).items()}
        masks = self.embeddings.masks(bags)
        present = jnp.all(jnp.stack([masks[name] for _, name in self.config.histories]), axis=0)
        place = places(present)
        real = jnp.ones(dense.shape[0], bool) if mask is None else mask > 0
        of_steps, of_target = self._bottoms(dense, place, present & real[:, None], real)
        history = self._vectors(of_steps, {n: vectors[self.config.history_of.get(n, n)] for n in self.own})
        target = self._vectors(of_target, {n: vectors[n] for n in self.own})[:, 0]
        # One-hot by position and place. Without ``present`` padding would be counted: its place is that of the step
        # after it, where one follows.
        taken = present[:, :, None] & (place[:, :, None] == jnp.arange(self.steps, dtype=jnp.int32)[None, None, :])
        read = []
        for attention in self.attention:
            context, products = attention.attend(target, history, taken.astype(dtype))
            inputs = [context, target, *((products,) if self.config.top_with == "products" else ())]
            read.append(jnp.concatenate(inputs, axis=1))
        if self.config.multi_task is not None:
            return self.tasks(read[0])
        heads = [top(each, mask=real) for top, each in zip(self.top, read, strict=True)]
        logits = heads[0] if self.joint is None else self.joint(jax.nn.sigmoid(jnp.concatenate(heads, axis=1)))
        logits = logits[:, 0].astype(jnp.float32)
        return logits if self.calibration is None else self.calibration(logits)

    def _bottoms(
        self, dense: jax.Array, place: jax.Array, present: jax.Array, real: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The bottom MLP of the steps and of the target, (batch, steps, width) and (batch, 1, width).

        Args:
          dense: (batch, num_dense) float32.
          place: (batch, steps) int32, the steps' places in time; the target's is the one after them.
          present: (batch, steps) bool, which of them hold a step of a real example.
          real: (batch,) bool, which examples are real.
        """
        last = jnp.full_like(place[:, :1], self.steps)
        if not self.config.batch_norm:
            return self._bottom(dense, place, None), self._bottom(dense, last, None)
        # Together: predictions normalize both by one stored mean.
        counted = jnp.concatenate([present, real[:, None]], axis=1)
        both = self._bottom(dense, jnp.concatenate([place, last], axis=1), counted.reshape(-1))
        return both[:, :-1], both[:, -1:]

    def _bottom(self, dense: jax.Array, place: jax.Array, counted: jax.Array | None) -> jax.Array:
        """The bottom MLP, (batch, n, width), of n places, of which those ``counted``, (batch * n,), make statistics."""
        batch, n = place.shape
        dtype = jnp.dtype(self.config.compute_dtype)
        time = place.astype(dtype) / (self.steps + 1)
        inputs = time[:, :, None]
        if dense.shape[1]:  # XLA crashes on CPUs when a program of several devices reads an array without elements
            inputs = jnp.concatenate([inputs, _each_step(dense.astype(dtype), n)], axis=2)
        return self.bottom(inputs.reshape(batch * n, -1), mask=counted).reshape(batch, n, -1)

    def _vectors(self, bottom: jax.Array, features: Mapping[str, jax.Array]) -> jax.Array:
        """The tower: vectors of steps, (batch, n, width), of length 1.

        Args:
          bottom: (batch, n, width), the bottom MLP's output.
          features: The features by name, (batch, n, dim) for one of steps, (batch, dim) for one that all steps share.
        """
        batch, n, width = bottom.shape
        bottom = bottom.reshape(batch * n, width)
        own = [(x if x.ndim == 3 else _each_step(x, n)).reshape(batch * n, -1) for x in features.values()]
        if self.config.interaction == "dot":
            parts = [bottom, dot_interaction(jnp.stack([bottom, *own], axis=1))]
        else:
            parts = [bottom, *own]
        return on_sphere(self.tower(jnp.concatenate(parts, axis=1))).reshape(batch, n, -1)


def _each_step(values: jax.Array, n: int) -> jax.Array:
    """(batch, dim) to (batch, n, dim)."""
    return jnp.broadcast_to(values[:, None, :], (values.shape[0], n, values.shape[1]))


def history_steps(config: TBSMConfig, layout: EmbeddingLayout) -> int:
    """The longest history, in steps.

    Raises:
      ValueError: If targets and histories do not fit the layout's features.
    """
    features = {config.name: config for config, _ in layout.features}
    for target, history in config.histories:
        if missing := [name for name in (target, history) if name not in features]:
            raise ValueError(f"histories names feature {missing[0]!r}, but the features are {', '.join(features)}")
        _check_history(features[target], features[history])
    named = [name for pair in config.histories for name in pair]
    if len(set(named)) < len(named):
        raise ValueError(f"histories {config.history_of} names a feature twice; each has one history, or is one")
    for name, feature in features.items():
        if feature.pooling == "none" and name not in config.history_of.values():
            raise ValueError(f"feature {name!r} has pooling 'none', but is in no histories; pool it, or name it")
    lengths = {name: features[name].max_length for _, name in config.histories}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"histories must have one max_length, but they have {lengths}")
    return next(iter(lengths.values()))


def _check_history(target: FeatureConfig, history: FeatureConfig) -> None:
    if target.table != history.table:
        raise ValueError(
            f"{target.name!r} reads table {target.table!r} and its history {history.name!r} table {history.table!r};"
            " they must share one"
        )
    if history.pooling != "none":
        raise ValueError(f"the history {history.name!r} has pooling {history.pooling!r}; give it pooling 'none'")


def tower_width(config: TBSMConfig, layout: EmbeddingLayout) -> int:
    """Inputs of the tower's MLP.

    Raises:
      ValueError: On dims that a dot interaction cannot join.
    """
    histories = config.history_of.values()
    dims = [dim for config, dim in layout.features if config.name not in histories]
    bottom = config.bottom_mlp[-1]
    if config.interaction == "concat":
        return bottom + sum(dims)
    if len(widths := {*dims, bottom}) > 1:
        raise ValueError(
            f"a dot interaction needs one dim for all features and the last bottom layer, but they are"
            f" {sorted(widths)}; give all tables the dim of the last bottom layer, or use interaction 'concat'"
        )
    count = len(dims) + 1
    return bottom + count * (count - 1) // 2


class TimeSeriesLayer(nnx.Module):
    """One head: a context vector from the steps of a history, weighted by an MLP over their products with the target.

    The products are ``z_i' w`` (inner "dot"), ``z_i' A w`` ("indefinite") or ``z_i' A'A w`` ("definite"), with a square
    matrix of parameters A. An MLP of ``steps`` inputs, ``mlp`` hidden layers with ReLU and ``steps`` sigmoid outputs
    turns them into weights. Its inputs are places in time, the latest step last: a shorter history has zeros before it.

    Args:
      width: The vectors' width.
      steps: The longest history, in steps.
      mlp: Widths of the hidden layers.
      inner: The inner product.
      dtype: The dtype of the computation; parameters are float32.
      rngs: Its ``params`` stream initializes the parameters.
    """

    def __init__(self, width: int, steps: int, mlp: Sequence[int], *, inner: Inner, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.inner: Inner = inner
        self.dtype = dtype
        start = jax.nn.initializers.normal(width**-0.5)
        self.matrix = None if inner == "dot" else nnx.Param(start(rngs.params(), (width, width), jnp.float32))
        self.mlp = MLP((steps, *mlp, steps), activate_last=False, dtype=dtype, rngs=rngs)

    def __call__(self, target: jax.Array, history: jax.Array, place: jax.Array) -> jax.Array:
        """The context, (batch, width); see ``attend``."""
        return self.attend(target, history, place)[0]

    def attend(self, target: jax.Array, history: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The context, and the products that its weights are made of.

        Args:
          target: (batch, width).
          history: (batch, steps, width), in any order.
          place: (batch, steps, steps) of the vectors' dtype, 1 where a step of the history takes a place in time; all 0
            for padding, which then contributes nothing.

        Returns:
          (batch, width), the context, and (batch, steps), the products by place in time, 0 where there is no step.
        """
        products = jnp.einsum("bld,bd->bl", history, self._transformed(target))
        # A sum with one term: it moves each step's product to its place in time, and leaves zeros where there is no
        # step.
        products = jnp.einsum("bl,blq->bq", products, place)
        weights = jax.nn.sigmoid(self.mlp(products))
        return jnp.einsum("bl,bld->bd", jnp.einsum("bq,blq->bl", weights, place), history), products

    def _transformed(self, target: jax.Array) -> jax.Array:
        """The vectors that the steps are multiplied with, (batch, width): the target under the inner product."""
        if self.matrix is None:
            return target
        matrix = self.matrix[...].astype(self.dtype)
        moved = jnp.einsum("de,be->bd", matrix, target)
        return jnp.einsum("ed,be->bd", matrix, moved) if self.inner == "definite" else moved


def places(present: jax.Array) -> jax.Array:
    """The places of histories' steps in time: the last step has the last place, whatever the history's length.

    Args:
      present: (batch, steps) bool, which positions hold a step, in order of time.

    Returns:
      (batch, steps) int32, from 0 to steps - 1; any number up to ``steps`` at positions without a step.
    """
    following = jnp.flip(jnp.cumsum(jnp.flip(present, axis=1), axis=1, dtype=jnp.int32), axis=1)
    return present.shape[1] - following


def on_sphere(vectors: jax.Array) -> jax.Array:
    """Vectors of length 1, (..., width); zeros stay zeros, and their gradient is finite."""
    squares = jnp.sum(jnp.square(vectors.astype(jnp.float32)), axis=-1, keepdims=True)
    return (vectors.astype(jnp.float32) * jax.lax.rsqrt(jnp.maximum(squares, _EPSILON**2))).astype(vectors.dtype)
