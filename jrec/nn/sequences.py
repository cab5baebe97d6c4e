"""Sequential recommenders over a table's rows: HSTU (Zhai et al. 2024, arXiv 2402.17152) and SASRec (Kang and McAuley
2018, arXiv 1808.09781), trained to tell each next item of a history from sampled ones, or from all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jrec.batch import Batch
from jrec.nn.embeddings import EmbeddingCollection
from jrec.nn.full_softmax import full_softmax
from jrec.nn.losses import all_examples, mean_of_positions, sampled_softmax
from jrec.nn.optimizer import Loss
from jrec.nn.tt_stack import TTOptions
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.types import Bags

Negatives = Literal["batch", "position", "all"]
TIME_BUCKETS = 128
_BUCKET = 0.301  # of the natural logarithm of seconds: 2.3 buckets each time that the gap doubles


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """A causal encoder of histories.

    Attributes:
      kind: "hstu", whose attention weighs items by SiLU, without a softmax, and gates what it gathers; or "sasrec", a
        pre-norm transformer.
      blocks: Layers.
      heads: Attention heads of a layer.
      attention_dim: Elements of a head's queries and keys; None for the rows' dim by ``heads``.
      hidden_dim: HSTU: elements of a head's values and gates, None for the rows' dim by ``heads``. SASRec: the hidden
        width of the position-wise layers, None for the rows' dim.
      dropout: The rate of dropout of inputs and layers.
      normalize: HSTU: what a layer's sums over the history are divided by, "maximum" for the most positions, as in the
        paper, or "length" for the items that the history has.
      compute_dtype: The dtype of the layers' computation; parameters stay float32.

    Raises:
      ValueError: If a number is out of range.
    """

    kind: Literal["hstu", "sasrec"] = "hstu"
    blocks: int = 2
    heads: int = 1
    attention_dim: int | None = None
    hidden_dim: int | None = None
    dropout: float = 0.2
    normalize: Literal["maximum", "length"] = "maximum"
    compute_dtype: DTypeLike = "float32"

    def __post_init__(self) -> None:
        if self.kind not in ("hstu", "sasrec"):
            raise ValueError(f"kind {self.kind!r} is unknown; choose 'hstu' or 'sasrec'")
        if self.normalize not in ("maximum", *(["length"] if self.kind == "hstu" else [])):
            raise ValueError(
                f"normalize is {self.normalize!r}; choose 'maximum' or 'length', which kind 'hstu' alone has"
            )
        for name in ("blocks", "heads", "attention_dim", "hidden_dim"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")


class Remembered(NamedTuple):
    """What a layer remembers of positions, so that later ones need not compute it again.

    Attributes:
      keys: (batch, positions, heads, elements of a head's keys), of the layers' dtype.
      values: (batch, positions, heads, elements of a head's values).
    """

    keys: Any
    values: Any


class View(NamedTuple):
    """Which positions are asked, and what each of them sees.

    Attributes:
      places: (1 or batch, queries) int32, the positions.
      allowed: (batch, queries, positions) bool, which positions each of them reads.
      passed: Of that shape int32, buckets of the time in between; None without times.
    """

    places: jax.Array
    allowed: jax.Array
    passed: jax.Array | None

    def beside(self, before: Remembered | None, own: Remembered) -> Remembered:
        """Keys and values of all positions: those that are asked have their own, the others what is remembered."""
        if before is None:
            return own
        # Places behind the room are of padding, which is dropped: nothing may be written over the last position.
        example = jnp.arange(self.places.shape[0], dtype=jnp.int32)[:, None]
        return Remembered(
            *(kept.at[example, self.places].set(new, mode="drop") for kept, new in zip(before, own, strict=True))
        )


class HSTUBlock(nnx.Module):
    """One layer of HSTU: pointwise projection, spatial aggregation, pointwise transformation (Equations 1 to 3).

    Args:
      dim: Elements of a position's vector.
      length: Positions; the aggregation is divided by it, as in the paper, unless ``config.normalize`` is "length".
      config: The encoder's configuration.
      rngs: Its ``params`` and ``dropout`` streams.
    """

    def __init__(self, dim: int, length: int, config: SequenceConfig, *, rngs: nnx.Rngs):
        self.heads, self.length, self.normalize = config.heads, length, config.normalize
        self.qk = config.attention_dim or _of_head(dim, config.heads)
        self.value = config.hidden_dim or _of_head(dim, config.heads)
        width, dtype = config.heads * (2 * self.value + 2 * self.qk), config.compute_dtype
        self.norm = nnx.LayerNorm(dim, use_bias=False, use_scale=False, dtype=dtype, rngs=rngs)
        small = jax.nn.initializers.normal(0.02)
        self.split = nnx.Linear(dim, width, use_bias=False, kernel_init=small, dtype=dtype, rngs=rngs)
        gathered = config.heads * self.value
        self.norm_gathered = nnx.LayerNorm(gathered, use_bias=False, use_scale=False, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(config.dropout, rngs=rngs)
        self.out = nnx.Linear(gathered, dim, kernel_init=jax.nn.initializers.xavier_uniform(), dtype=dtype, rngs=rngs)
        self.position_bias = nnx.Param(0.02 * jax.random.normal(rngs.params(), (2 * length - 1,)))
        self.time_bias = nnx.Param(0.02 * jax.random.normal(rngs.params(), (TIME_BUCKETS,)))

    def __call__(self, x: jax.Array, view: View, before: Remembered | None = None) -> tuple[jax.Array, Remembered]:
        """(batch, queries, dim) to the same, and the queries' own keys and values; see ``SequenceEncoder``."""
        batch, length, _ = x.shape
        gates, values, queries, keys = jnp.split(
            jax.nn.silu(self.split(self.norm(x))).reshape(batch, length, self.heads, -1),
            [self.value, 2 * self.value, 2 * self.value + self.qk],
            axis=3,
        )
        own = Remembered(keys, values)
        keys, values = view.beside(before, own)
        scores = jnp.einsum("bihd,bjhd->bhij", queries, keys) + self._bias(view).astype(queries.dtype)
        divisor = self.length if self.normalize == "maximum" else _items(view.allowed, scores.dtype)
        weights = jax.nn.silu(scores) / divisor
        # Masked behind the SiLU: it has no normalization over positions, by which a masked score would drop out.
        weights = jnp.where(view.allowed[:, None], weights, jnp.zeros((), scores.dtype))
        gathered = jnp.einsum("bhij,bjhd->bihd", weights, values).reshape(batch, length, -1)
        gated = gates.reshape(batch, length, -1) * self.norm_gathered(gathered)
        return x + self.out(self.drop(gated)), own

    def _bias(self, view: View) -> jax.Array:
        """(1 or batch, 1, queries, positions) float32, by the distance of two positions, and of their times."""
        # Distances run from 1 - length to length - 1, and the parameters begin at the least.
        apart = jnp.arange(view.allowed.shape[2], dtype=jnp.int32)[None, None, :] - view.places[:, :, None]
        bias = self.position_bias[...][apart + (self.length - 1)][:, None]
        return bias if view.passed is None else bias + self.time_bias[...][view.passed][:, None]


class SASRecBlock(nnx.Module):
    """One layer of SASRec: attention of normed queries to the inputs, then a position-wise network.

    Args:
      dim: Elements of a position's vector.
      length: Positions.
      config: The encoder's configuration.
      rngs: Its ``params`` and ``dropout`` streams.
    """

    def __init__(self, dim: int, length: int, config: SequenceConfig, *, rngs: nnx.Rngs):
        del length
        self.heads, self.qk = config.heads, config.attention_dim or _of_head(dim, config.heads)
        dtype, hidden = config.compute_dtype, config.hidden_dim or dim
        self.norm, self.norm_between = (nnx.LayerNorm(dim, dtype=dtype, rngs=rngs) for _ in range(2))
        width = config.heads * self.qk
        self.query, self.key, self.value = (nnx.Linear(dim, width, dtype=dtype, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(width, dim, dtype=dtype, rngs=rngs)
        self.hidden = nnx.Linear(dim, hidden, dtype=dtype, rngs=rngs)
        self.back = nnx.Linear(hidden, dim, dtype=dtype, rngs=rngs)
        self.drops = nnx.List([nnx.Dropout(config.dropout, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array, view: View, before: Remembered | None = None) -> tuple[jax.Array, Remembered]:
        """(batch, queries, dim) to the same, and the queries' own keys and values. Times do not count."""
        normed = self.norm(x)
        queries, *own = [layer(inputs).reshape(*x.shape[:2], self.heads, -1) for layer, inputs in
                         ((self.query, normed), (self.key, x), (self.value, x))]  # fmt: skip
        own = Remembered(*own)
        keys, values = view.beside(before, own)
        scores = jnp.einsum("bihd,bjhd->bhij", queries, keys) / math.sqrt(self.qk)
        # The least number, not -inf: an empty history's positions may read none, and their softmax stays finite.
        scores = jnp.where(view.allowed[:, None], scores, jnp.finfo(scores.dtype).min)
        weights = self.drops[0](jax.nn.softmax(scores, axis=3))
        x = normed + self.out(jnp.einsum("bhij,bjhd->bihd", weights, values).reshape(*x.shape[:2], -1))
        x = self.norm_between(x)
        return x + self.drops[2](self.back(self.drops[1](jax.nn.relu(self.hidden(x))))), own


class SequenceEncoder(nnx.Module):
    """From the rows of a history to a vector of each position, of what came up to it.

    Histories begin at position 0, in order of time; what follows their end is padding, which changes nothing.

    Args:
      dim: Elements of a row, and of a position's vector.
      length: The most positions.
      config: The layers.
      rngs: Its ``params`` and ``dropout`` streams.
    """

    def __init__(self, dim: int, length: int, config: SequenceConfig, *, rngs: nnx.Rngs):
        block = {"hstu": HSTUBlock, "sasrec": SASRecBlock}[config.kind]
        self.dtype = jnp.dtype(config.compute_dtype)
        start = jax.nn.initializers.truncated_normal(dim**-0.5)
        self.positions = nnx.Param(start(rngs.params(), (length, dim), jnp.float32))
        self.drop = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List([block(dim, length, config, rngs=rngs) for _ in range(config.blocks)])

    def __call__(
        self,
        rows: jax.Array,
        present: jax.Array,
        times: jax.Array | None = None,
        asked: jax.Array | None = None,
    ) -> jax.Array:
        """Encodes histories.

        Args:
          rows: (batch, length, dim) float32.
          present: (batch, length) bool, which positions hold an item.
          times: (batch, length) int32 or float32, seconds from any fixed moment, for HSTU's bias by time; None without
            times.
          asked: When what follows a position is asked for, in the shape and dtype of ``times``: the next item's time,
            as far as it may be known. None for ``times``.

        Returns:
          (batch, length, dim) float32; of padding whatever comes out.
        """
        length, dim = rows.shape[1:]
        # Times the root of their size, as the Transformer's embeddings (Vaswani et al. 2017, section 3.4).
        x = self.drop((rows * math.sqrt(dim) + self.positions[...][None, :length]).astype(self.dtype))
        allowed = jnp.tril(jnp.ones((1, length, length), bool)) & present[:, None, :]
        passed = None if times is None else _buckets(times, times if asked is None else asked)
        view = View(jnp.arange(length, dtype=jnp.int32)[None], allowed, passed)
        for block in self.blocks:
            x, _ = block(x, view)
        return x.astype(jnp.float32)

    @property
    def can_extend(self) -> bool:
        """Whether positions stay as they are when others follow: not where sums are divided by a history's length."""
        return not any(isinstance(block, HSTUBlock) and block.normalize == "length" for block in self.blocks)

    def remembered(self) -> list[Remembered]:
        """For each layer the shapes, without batch and positions, and dtypes of what it remembers of a position."""
        return [
            Remembered(*(jax.ShapeDtypeStruct((block.heads, width), self.dtype) for width in widths))
            for block in self.blocks
            for widths in [(block.qk, block.value if isinstance(block, HSTUBlock) else block.qk)]
        ]

    def extend(
        self,
        rows: jax.Array,
        first: jax.Array,
        before: Sequence[Remembered],
        times: jax.Array | None = None,
        asked: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Remembered]]:
        """Encodes positions behind others, of which layers remember keys and values.

        The same as ``__call__`` gives at these positions, up to the order of sums, in a time that grows with the
        positions rather than their square.

        Args:
          rows: (batch, queries, dim) float32, of the positions from ``first`` on; finite behind a history's end, too.
          first: (batch,) int32, how many positions are remembered.
          before: For each layer what it remembers, (batch, positions, ...); from ``first`` on any finite numbers.
          times: (batch, positions) times, of ``rows``, too; None without times.
          asked: (batch, queries) times that are asked for, as of ``__call__``.

        Returns:
          (batch, queries, dim) float32, and for each layer the keys and values of these positions.

        Raises:
          ValueError: If a layer divides by the length of the history, so that positions change with what follows.
        """
        if not self.can_extend:
            raise ValueError(
                "a history's positions change with its length where HSTU divides by it (normalize='length'), so that"
                " what is remembered of them does not hold; encode the whole history"
            )
        count, dim = rows.shape[1:]
        places = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        known = jnp.minimum(places, self.positions.shape[0] - 1)  # what is behind a history's end has no place
        x = self.drop((rows * math.sqrt(dim) + self.positions[...][known]).astype(self.dtype))
        every = jnp.arange(before[0].keys.shape[1], dtype=jnp.int32)
        passed = None if times is None or asked is None else _buckets(times, asked)
        view = View(places, every[None, None, :] <= places[:, :, None], passed)
        own = []
        for block, kept in zip(self.blocks, before, strict=True):
            x, new = block(x, view, kept)
            own.append(new)
        return x.astype(jnp.float32), own


def _buckets(times: jax.Array, asked: jax.Array) -> jax.Array:
    """(batch, queries, positions) int32 below ``TIME_BUCKETS``, by the logarithm of the seconds in between."""
    passed = jnp.abs(asked[:, :, None] - times[:, None, :]).astype(jnp.float32)
    bucket = (jnp.log(jnp.maximum(passed, 1)) / _BUCKET).astype(jnp.int32)
    return jnp.minimum(bucket, TIME_BUCKETS - 1)


class NextItem(nnx.Module):
    """What a user turns to next, by the history: an encoder over a table of items, trained by ``next_item_loss``.

    The layout has three features of one table with pooling "none": the history, at each of its positions the item that
    came next, and the items to tell it from (``next_item_layout``).

    HSTU's bias by time reads how old the items are: one dense column, (examples, length) floats, how many seconds
    before the example's moment each item of the history was, 0 behind its end. Without a dense column there is no such
    bias. An item is asked for at its own moment, the last one at the example's.

    Args:
      layout: The layout of the embedding tables.
      config: The encoder's layers.
      names: What the layout calls the history, the next items and the sampled ones.
      implementation: The implementation of the embedding ops; None for the platform's fastest.
      tt: Options of tensor-train tables.
      key: The key of the initial rows; see ``EmbeddingCollection``. None draws one.
      rngs: Its ``params`` and ``dropout`` streams.

    Raises:
      ValueError: If the features are others.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        config: SequenceConfig,
        *,
        names: tuple[str, str, str] = ("history", "next", "sampled"),
        implementation: Implementation | None = None,
        tt: TTOptions | None = None,
        key: jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        features = {name: places[0][0].features[places[0][1]].config for name, places in layout.places.items()}
        tables = {feature.table for feature in features.values()}
        if features.keys() != set(names) or len(tables) != 1 or any(f.pooling != "none" for f in features.values()):
            raise ValueError(
                f"the layout must have the features {names[0]}, {names[1]} and {names[2]} of one table with pooling"
                f" 'none', as next_item_layout makes it; it has {', '.join(sorted(features))} of"
                f" {', '.join(sorted(tables))}"
            )
        self.embeddings = EmbeddingCollection(layout, implementation=implementation, tt=tt, key=key, rngs=rngs)
        self.names = names
        dim = layout.places[names[0]][0][0].dim
        self.encoder = SequenceEncoder(dim, features[names[0]].max_length, config, rngs=rngs)
        self.deterministic = False  # set by ``train`` and ``eval``, as nnx.Dropout's

    def logits(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], bags: Mapping[str, Bags]
    ) -> dict[str, jax.Array]:
        """Vectors of length one, float32, whose products are scores.

        Args:
          dense: (batch, length) float32, the ages of the history's items in seconds, or (batch, 0) without.
          activations, bags: As of any ``SparseModel``.

        Returns:
          In training "positions" (batch, length, dim), "next" (batch, length, dim), "sampled" (batch, k, dim), and
          "counts" (batch, length) bool, the positions with a next item. In eval mode only "user" (batch, dim), of the
          last position; of an empty history zeros.
        """
        rows, masks = self.embeddings.features(activations, bags), self.embeddings.masks(bags)
        history, following, sampled = self.names
        times = asked = None
        if dense.shape[1]:
            if dense.shape != masks[history].shape:
                raise ValueError(
                    f"dense is {dense.shape}, but a NextItem reads the ages of the {masks[history].shape[1]} items of"
                    f" {history!r}: give one dense column of that many numbers an example, or none"
                )
            # Ages count back from the example; attention wants times that
            # ascend, and the time that is asked for: the next item's.
            times, asked = -dense, -jnp.pad(dense[:, 1:], ((0, 0), (0, 1)))
        encoded = unit(self.encoder(rows[history], masks[history], times, asked))
        if self.deterministic:
            # Histories begin at position 0 without gaps, so that their number of items is where the last one lies.
            last = jnp.sum(masks[history], axis=1) - 1
            user = jnp.take_along_axis(encoded, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
            return {"user": jnp.where(last[:, None] >= 0, user, 0)}
        counts = masks[history] & masks[following]
        return {
            "positions": encoded, "next": unit(rows[following]), "sampled": unit(rows[sampled]), "counts": counts,
        }  # fmt: skip

    def remembered(self) -> list[Remembered] | None:
        """What ``extend`` needs of a position (``SequenceEncoder.remembered``); None where it does not go."""
        return self.encoder.remembered() if self.encoder.can_extend else None

    def extend(
        self,
        rows: jax.Array,
        first: jax.Array,
        count: jax.Array,
        before: Sequence[Remembered],
        times: jax.Array | None = None,
        asked: jax.Array | None = None,
    ) -> tuple[dict[str, jax.Array], list[Remembered]]:
        """What ``logits`` returns in eval mode, by what is remembered of each history's begin.

        Args:
          rows: (batch, queries, dim) float32, the rows of the items that follow; behind the last one zeros.
          first: (batch,) int32, of how many items keys and values are remembered.
          count: (batch,) int32, how many follow.
          before, times, asked: As of ``SequenceEncoder.extend``. An item is asked for at the next one's time, the last
            at the example's.

        Returns:
          "user" (batch, dim) of length one, of an empty history zeros; and for each layer the keys and values of the
          positions of ``rows``.
        """
        encoded, own = self.encoder.extend(rows, first, before, times, asked)
        last = jnp.maximum(count - 1, 0)[:, None, None]
        user = unit(jnp.take_along_axis(encoded, last, axis=1)[:, 0])
        return {"user": jnp.where(first[:, None] + count[:, None] > 0, user, 0)}, own


def next_item_layout(items: int, *, dim: int, length: int, sampled: int, table: str = "item") -> EmbeddingLayout:
    """The layout of a ``NextItem``: a table of items, read by history, next and sampled.

    Args:
      items: Rows of the table.
      dim: Elements of a row.
      length: The most items of a history.
      sampled: Items of an example's "sampled", by the ``negatives`` of ``next_item_loss``: "batch" as many as are drawn
        for an example; "position" ``length`` times what is drawn for a position; "all" the items by the examples of a
        batch, rounded up.
      table: The table's name.
    """
    lengths = {"history": length, "next": length, "sampled": sampled}
    return EmbeddingLayout.build(
        [TableConfig(name=table, rows=items, dim=dim)],
        [FeatureConfig(name=n, table=table, max_length=most, pooling="none") for n, most in lengths.items()],
    )


def next_item_loss(*, temperature: float = 0.05, negatives: Negatives = "batch") -> Loss:
    """The loss of ``NextItem``: softmax at every position, its mean over the positions of the whole batch.

    Args:
      temperature: What products of vectors of length one are divided by.
      negatives: What each position's next item is told from. "batch": the sampled items of all examples, on all
        devices, to be drawn uniformly. "position": items of its own, also drawn uniformly, those of a history's first
        position first. "all": every item, a block at a time (``full_softmax``). The "sampled" of a batch's examples are
        then all items, each once, in any order and -1 behind their end. Where examples are too few for them, fill the
        batch up with empty histories of weight 0 (``weight`` of ``Run.feed``).

    Returns:
      A loss of batches whose ``extras`` are "next" and "sampled", the same numbers as the features'.

    Raises:
      ValueError: If ``negatives`` is another word; in a step, if "sampled" is no multiple of the positions.
    """
    if negatives not in get_args(Negatives):
        raise ValueError(f"negatives is {negatives!r}; choose one of {', '.join(get_args(Negatives))}")

    def loss(outputs: dict[str, jax.Array], batch: Batch) -> jax.Array:
        (_, length, dim), counts, drawn = outputs["next"].shape, outputs["counts"], batch.extras["sampled"]
        rows = outputs["sampled"].reshape(-1, dim)
        queries, following = (outputs[name].reshape(-1, dim) for name in ("positions", "next"))
        softmax = {"positive_ids": batch.extras["next"].reshape(-1), "temperature": temperature}
        if negatives == "all":
            losses = full_softmax(queries, following, rows, row_ids=drawn.reshape(-1), **softmax)
        elif negatives == "position":
            each, rest = divmod(drawn.shape[1], length)
            if rest:
                raise ValueError(
                    f"an example has {drawn.shape[1]} sampled items, no multiple of its {length} positions"
                )
            own, ids = rows.reshape(-1, each, dim), drawn.reshape(-1, each)
            losses = sampled_softmax(queries, following, own, negative_ids=ids, **softmax)
        else:
            ids = jnp.where(batch.mask[:, None] > 0, drawn, -1).reshape(-1)
            losses = sampled_softmax(queries, following, all_examples(rows), negative_ids=all_examples(ids), **softmax)
        return mean_of_positions(losses.reshape(counts.shape), counts, batch.mask)

    return loss


def _items(allowed: jax.Array, dtype: DTypeLike) -> jax.Array:
    """(batch, 1, 1, 1): the items of each history, which its last position may all read; 1 where there are none."""
    return jnp.maximum(jnp.sum(allowed[:, -1], axis=1), 1).astype(dtype)[:, None, None, None]


def _of_head(dim: int, heads: int) -> int:
    if dim % heads:
        raise ValueError(f"the rows' dim {dim} is no multiple of {heads} heads; give attention_dim and hidden_dim")
    return dim // heads


def unit(vectors: jax.Array) -> jax.Array:
    """Vectors of length one; zeros stay zeros, with a gradient of zeros."""
    squares = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    # Zeros by a scale of 0: by a bound alone their gradient would be a million times what comes in, and a row that was
    # set to zeros would end far off after one step.
    return vectors * jnp.where(squares > 0, jax.lax.rsqrt(jnp.maximum(squares, 1e-12)), 0)
