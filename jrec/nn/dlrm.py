"""DLRM (Naumov et al. 2019): bottom MLP, embedding tables, feature interaction, top MLP; and DeepFM and DCN-v2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jrec.batch import Batch
from jrec.nn.calibration import Calibration
from jrec.nn.cross import CrossNetwork
from jrec.nn.dense_encoding import Boundaries, check_boundaries, encoded_width, piecewise_linear
from jrec.nn.embeddings import EmbeddingCollection
from jrec.nn.interaction import concat_interaction, dot_interaction, fm_interaction
from jrec.nn.mlp import MLP, check_rate
from jrec.nn.multi_task import MultiTaskConfig, MultiTaskHeads
from jrec.nn.tt_stack import TTOptions
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.types import Bags

Interaction = Literal["dot", "concat", "fm", "dcn"]
_Layers = tuple[MLP | None, MLP | MultiTaskHeads, CrossNetwork | None, nnx.Linear | None]
DotWith = Literal["auto", "bottom", "embeddings"]
_ONE_DIM = ("dot", "fm")
"""Interactions of vectors of one dim, among which the bottom MLP's output is one."""

_FIRST_ORDER_SCALE = 0.1
"""A first-order weight's gradient is the logit's, far greater than an embedding's. Under row-wise Adagrad, whose one
accumulator a row both share, this brings them to one order: test AUC of a sample of Criteo Kaggle, 0.768 in place of
0.732 (0.766 without first-order terms, 0.763 with weights in tables of their own)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    """The dense part of a DLRM.

    The ``interaction`` says what the top MLP reads. Every choice has the bottom MLP's output as one more vector:

    * "dot": the products of all pairs of vectors beside what ``dot_with`` says (DLRM, Naumov et al. 2019, section 2.1);
    * "concat": the vectors side by side;
    * "fm": the vectors side by side. The logit is the top MLP's output plus the sum of the pairs' products (DeepFM, Guo
      et al. 2017, arXiv 1703.04247; its first-order terms are ``wide``);
    * "dcn": the vectors side by side, crossed by ``CrossNetwork`` (DCN-v2, Wang et al. 2021, the stacked structure).

    Attributes:
      num_dense: Dense features of an example; 0 leaves the bottom MLP out.
      bottom_mlp: Layer sizes after the dense features; the last must be the embedding dim for "dot" and "fm". Under
        "concat" and "dcn" it may be empty: the dense features then join the vectors as they are.
      top_mlp: Layer sizes after the interaction; the last must be 1, the logit.
      interaction: "dot", "concat", "fm" or "dcn".
      wide: Whether first-order terms join the logit (Wide & Deep, Cheng et al. 2016): a weight of every id, and of
        every dense feature. A tenth of the last element of each row is then the id's weight, and not part of its
        embedding, so that a table of dim 17 has embeddings of 16. Weights are pooled as embeddings are; weights
        of positions are summed.
      cross_layers: Layers of the cross network of "dcn".
      cross_rank: Rank of their weight matrices; 0 for full matrices.
      dot_with: What joins the dot products: the output of the bottom MLP ("bottom"), or also the concatenated
        embeddings ("embeddings"). "auto" is "bottom" with dense features and "embeddings" without, where there would be
        only products.
      compute_dtype: The dtype of the MLPs and the interaction; parameters stay float32, and so do the terms that are
        summed outside the top MLP.
      dropout: The rate of dropout after the hidden layers of both MLPs, those that another layer follows, in training.
      batch_norm: Whether these layers have BatchNorm before their ReLU.
      dense_boundaries: The boundaries of each dense feature's pieces (``piecewise_linear``), none for one that the
        bottom MLP reads as it is; () leaves all as they are.
      calibrated: Whether a scale and a shift of the logit apply in eval mode (``Calibration``).
      members: How many models are trained side by side on parts of the same rows, each with its own layers and its own
        loss: member ``i`` has elements ``i * dim`` to ``(i + 1) * dim`` of each row, so that tables have ``members``
        times the dim of an embedding (multi-embedding, Guo et al. 2024, arXiv 2310.04400). Logits are (batch, members)
        in training, and their mean in eval mode: as of an ensemble of trainings (Lakshminarayanan et al. 2017), from
        one, with one lookup and one update of the rows.
      multi_task: Heads for several tasks in place of the top MLP; ``top_mlp`` is then (), and logits are a dictionary
        by task.
    """

    num_dense: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    interaction: Interaction = "dot"
    wide: bool = False
    cross_layers: int = 3
    cross_rank: int = 0
    dot_with: DotWith = "auto"
    compute_dtype: str = "float32"
    dropout: float = 0.0
    batch_norm: bool = False
    dense_boundaries: Boundaries = ()
    calibrated: bool = False
    members: int = 1
    multi_task: MultiTaskConfig | None = None

    def __post_init__(self) -> None:
        check_rate(self.dropout)
        check_boundaries(self.dense_boundaries, self.num_dense)
        if self.members < 1:
            raise ValueError(f"members is {self.members}; a model has at least one")
        if self.multi_task is not None:
            self._check_multi_task()
        elif not self.top_mlp or self.top_mlp[-1] != 1:
            raise ValueError(f"top_mlp {list(self.top_mlp)} must end in 1, the logit")
        for name, choices in (("interaction", get_args(Interaction)), ("dot_with", get_args(DotWith))):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} {value!r} is unknown; choose {', '.join(choices[:-1])} or {choices[-1]}")
        if self.num_dense and not self.bottom_mlp and self.interaction in _ONE_DIM:
            raise ValueError(f"bottom_mlp is empty, but there are {self.num_dense} dense features")

    def _check_multi_task(self) -> None:
        odd = {
            "top_mlp": bool(self.top_mlp),
            "wide": self.wide,
            "calibrated": self.calibrated,
            "interaction 'fm'": self.interaction == "fm",
            "batch_norm": self.batch_norm,
        }
        if named := [name for name, is_set in odd.items() if is_set]:
            raise ValueError(f"{named[0]} is given beside multi_task, whose heads do not read it; leave it out")

    @property
    def bottom_width(self) -> int:
        """Elements of the bottom MLP's output, or of the dense features that go without one."""
        return (self.dense_width, *self.bottom_mlp)[-1] if self.num_dense else 0

    @property
    def dense_width(self) -> int:
        """Inputs of the bottom MLP."""
        return encoded_width(self.dense_boundaries, self.num_dense)

    @property
    def joins_embeddings(self) -> bool:
        """Whether the concatenated embeddings join dot products."""
        return self.dot_with == "embeddings" or (self.dot_with == "auto" and not self.num_dense)


class DLRM(nnx.Module):
    """Deep learning recommendation model: ``model(batch)`` gives one click logit per example.

    A feature of pooling "none" enters the interaction as ``max_length`` vectors, one per position, like ``max_length``
    features of one id that read the same table: so the top MLP tells positions apart. Positions without an id are
    zeros, whose products are zero. A dot interaction of ``n`` vectors has ``n * (n - 1) / 2`` products, including the
    products between the positions of a feature.

    DeepFM is ``interaction="fm"`` with ``wide=True``, DCN-v2 ``interaction="dcn"``; see ``DLRMConfig``.

    Args:
      config: The dense part's configuration.
      layout: The layout of the embedding tables (``EmbeddingLayout.build``).
      implementation: The implementation of the embedding ops; None for the platform's fastest.
      pad_rows: Whether rows of embedding tables are padded; see ``EmbeddingCollection``.
      tt: Options of the tensor-train tables.
      unique_capacities: How many unique rows of a batch fit, by stack; see ``EmbeddingCollection``.
      key: The key of the initial rows; see ``EmbeddingCollection``. None draws one.
      rngs: Its ``params`` stream initializes everything; dropout needs a ``dropout`` stream, too.

    Raises:
      ValueError: If the interaction cannot join the features' dims.

    Example:
      >>> table = jrec.TableConfig(name="user", rows=1000, dim=17)
      >>> layout = jrec.EmbeddingLayout.build([table], [jrec.FeatureConfig(name="user", table="user")])
      >>> deep_fm = jrec.nn.DLRMConfig(num_dense=1, bottom_mlp=(16,), top_mlp=(32, 1), interaction="fm", wide=True)
      >>> model = jrec.nn.DLRM(deep_fm, layout, rngs=nnx.Rngs(0))
    """

    def __init__(
        self,
        config: DLRMConfig,
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
        self.embeddings = EmbeddingCollection(
            layout,
            implementation=implementation,
            pad_rows=pad_rows,
            tt=tt,
            unique_capacities=unique_capacities,
            key=key,
            rngs=rngs,
        )
        width = interaction_width(config, layout)
        make = functools.partial(_layers, config, width)
        layers = make(rngs) if config.members == 1 else nnx.split_rngs(splits=config.members)(nnx.vmap(make))(rngs)
        self.bottom, self.top, self.cross, self.first_order = layers
        self.calibration = Calibration() if config.calibrated else None
        self.deterministic = False  # set by ``train`` and ``eval``, as nnx.Dropout's

    def __call__(self, batch: Batch) -> PyTree[jax.Array]:
        """Logits, (batch,) float32, or by task; in training of ``config.members`` above 1 (batch, members)."""
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

        With ``config.members`` above 1 each is (batch, members) in training. ``mask``, (batch,) float32, is 0 for
        examples that BatchNorm leaves out; None leaves out none.
        """
        real = None if mask is None else mask > 0
        dense, members = piecewise_linear(dense, self.config.dense_boundaries), self.config.members
        groups = self.embeddings.vectors(activations, bags)
        layers = self.bottom, self.top, self.cross, self.first_order
        if members == 1:
            logits = _member_logits(self.config, layers, groups, dense, real)
        else:
            # Each group by itself, since dims may differ between groups: a member has a part of every row, whatever its
            # dim.
            parts = [g.reshape(*g.shape[:2], members, -1) for g in groups]
            logits = (_mean_logits if self.deterministic else _all_logits)(self.config, layers, parts, dense, real)
        return logits if self.calibration is None else self.calibration(logits)


def _all_logits(
    config: DLRMConfig, layers: _Layers, parts: list[jax.Array], dense: jax.Array, real: jax.Array | None
) -> PyTree[jax.Array]:
    """(batch, members) of embeddings (batch, vectors, members, dim), by layers whose arrays have a leading axis.

    Of several tasks a dictionary of them.
    """
    member = functools.partial(_member_logits, config)
    # All members see the same dense features and the same examples; only layers and parts of the rows are their own.
    return nnx.vmap(member, in_axes=(0, 2, None, None), out_axes=1)(layers, parts, dense, real)


def _mean_logits(
    config: DLRMConfig, layers: _Layers, parts: list[jax.Array], dense: jax.Array, real: jax.Array | None
) -> PyTree[jax.Array]:
    """(batch,), the mean of ``_all_logits`` in eval mode, one member after another: ONNX has no layers under vmap.

    Of several tasks a dictionary of them.
    """
    graph, streams, state = nnx.split(layers, nnx.RngState, ...)
    each = []
    for n in range(config.members):
        own = nnx.merge(graph, streams, jax.tree.map(lambda x, n=n: x[n], state))
        each.append(_member_logits(config, own, [g[:, :, n] for g in parts], dense, real))
    return jax.tree.map(lambda *logits: functools.reduce(jnp.add, logits) / config.members, *each)


def _member_logits(
    config: DLRMConfig, layers: _Layers, groups: list[jax.Array], dense: jax.Array, real: jax.Array | None
) -> PyTree[jax.Array]:
    """The logits of a member, (batch,) float32 or by task, by its layers and its part of the embeddings."""
    bottom_mlp, top, cross, first_order = layers
    dtype, terms = jnp.dtype(config.compute_dtype), list[jax.Array]()
    if config.wide:
        # Read before the cast below: they go into the logit as they are, and bfloat16 would round each of them to 8
        # bits.
        terms = [_FIRST_ORDER_SCALE * jnp.sum(g[..., -1].astype(jnp.float32), axis=1) for g in groups]
        terms = terms if first_order is None else [*terms, first_order(dense)[:, 0]]
        groups = [g[..., :-1] for g in groups]
    groups = [g.astype(dtype) for g in groups]
    bottom = dense.astype(dtype) if bottom_mlp is None else bottom_mlp(dense.astype(dtype), mask=real)
    bottom = bottom if config.num_dense else None
    if config.interaction == "fm":
        terms.append(fm_interaction(_vectors(bottom, groups)))
    joined = _interaction(config, bottom, groups)
    joined = joined if cross is None else cross(joined)
    if isinstance(top, MultiTaskHeads):
        return top(joined)
    logits = top(joined, mask=real)[:, 0].astype(jnp.float32)
    return functools.reduce(jnp.add, terms, logits)


def _interaction(config: DLRMConfig, bottom: jax.Array | None, groups: list[jax.Array]) -> jax.Array:
    """What the top MLP, or the cross network before it, reads, (batch, width)."""
    parts = [] if bottom is None else [bottom]
    if config.interaction == "dot":
        parts.append(dot_interaction(_vectors(bottom, groups)))
    if config.interaction != "dot" or config.joins_embeddings:
        parts.extend(concat_interaction(g) for g in groups)
    return jnp.concatenate(parts, axis=1)


def _layers(config: DLRMConfig, width: int, rngs: nnx.Rngs) -> _Layers:
    """Bottom MLP, top MLP over ``width`` inputs, cross network, and first-order terms of dense features."""
    dtype = jnp.dtype(config.compute_dtype)
    bottom_sizes = (config.dense_width, *config.bottom_mlp)
    options = {"dtype": dtype, "dropout": config.dropout, "batch_norm": config.batch_norm}
    has_mlp = config.num_dense and config.bottom_mlp
    bottom = MLP(bottom_sizes, activate_last=True, **options, rngs=rngs) if has_mlp else None
    if config.multi_task is None:
        top = MLP((width, *config.top_mlp), activate_last=False, **options, rngs=rngs)
    else:
        top = MultiTaskHeads(width, config.multi_task, rngs=rngs)
    crosses = {"layers": config.cross_layers, "rank": config.cross_rank, "dtype": dtype}
    cross = CrossNetwork(width, **crosses, rngs=rngs) if config.interaction == "dcn" else None
    linear = {"use_bias": False, "kernel_init": nnx.initializers.zeros_init()}
    weighs_dense = config.wide and config.num_dense
    return bottom, top, cross, nnx.Linear(config.dense_width, 1, **linear, rngs=rngs) if weighs_dense else None


def _vectors(bottom: jax.Array | None, groups: list[jax.Array]) -> jax.Array:
    """The bottom MLP's output and the embeddings as (batch, vectors, dim)."""
    return jnp.concatenate(groups if bottom is None else [bottom[:, None, :], *groups], axis=1)


def interaction_width(config: DLRMConfig, layout: EmbeddingLayout) -> int:
    """Inputs of the top MLP.

    Raises:
      ValueError: On dims that the interaction cannot join.
    """
    bottom, name = config.bottom_width, config.interaction
    members = config.members
    if odd := [(feature.name, dim) for feature, dim in layout.features if dim % members]:
        raise ValueError(
            f"the table of feature {odd[0][0]!r} has dim {odd[0][1]}, no multiple of members={members}, each of which"
            " has a part of every row"
        )
    if config.wide and (narrow := [feature.name for feature, dim in layout.features if dim == members]):
        raise ValueError(
            f"the table of feature {narrow[0]!r} has dim {members}, which a wide model takes for its first-order weight"
            f"{'' if members == 1 else 's'}; give it one more than the embedding's dim"
        )
    dims = [(feature.vectors, dim // members - config.wide) for feature, dim in layout.features]
    embeddings = sum(vectors * dim for vectors, dim in dims)
    if name in _ONE_DIM and len(widths := {dim for _, dim in dims} | ({bottom} if bottom else set())) > 1:
        raise ValueError(
            f"a {name} interaction needs one dim for all features and the last bottom layer, but they are"
            f" {sorted(widths)}; give all tables the dim of the last bottom layer, or use interaction 'concat'"
        )
    if name != "dot":
        return bottom + embeddings
    count = sum(vectors for vectors, _ in dims) + bool(bottom)
    return bottom + count * (count - 1) // 2 + (embeddings if config.joins_embeddings else 0)
