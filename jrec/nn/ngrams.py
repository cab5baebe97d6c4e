"""Rows for hashed n-grams of token ids, gated into a language model's hidden states (Engram, arXiv 2601.07372).

The table may have hundreds of millions of rows, of which a step reads a few for each token: they are looked up and
updated like any others, in any tier, while an ``nnx.Embed`` has a gradient and optimizer slots of the table's size.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jrec.nn.ngram_hashing import NGramHashing, hashed_rows
from jrec.ops.layout import FeatureConfig, TableConfig, Tier


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGramConfig:
    """Which n-grams have rows, and where.

    Attributes:
      rows: Rows of the table, of which each of the ``slots`` has an equal share.
      dim: Elements of a row.
      sizes: The n of the n-grams, which end at a token.
      heads: Hashes of each n-gram: two n-grams that share a row in one rarely share another's.
      seed: The hashes' seed; another one gives other hashes.
      hashing: A published scheme in place of jrec's own, which then says ``rows``, ``sizes`` and ``heads``; see ``of``.

    Raises:
      ValueError: If a number is out of range, or not what the published scheme has.
    """

    rows: int
    dim: int
    sizes: tuple[int, ...] = (2, 3)
    heads: int = 4
    seed: int = 0
    hashing: NGramHashing | None = None

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or self.heads < 1:
            raise ValueError(f"sizes={self.sizes} must name an n of at least 1, and heads={self.heads} be at least 1")
        if not self.slots <= self.rows < 2**31:
            raise ValueError(f"rows={self.rows:,} must be from {self.slots}, one a slot, to below 2^31")
        scheme = self.hashing
        if scheme is not None and (self.rows, self.sizes, self.heads) != (scheme.rows, scheme.sizes, scheme.heads):
            raise ValueError(
                f"rows={self.rows:,}, sizes={self.sizes}, heads={self.heads} must be those of the hashing,"
                f" {scheme.rows:,}, {scheme.sizes}, {scheme.heads}; NGramConfig.of(hashing, dim=…) takes them over"
            )

    @classmethod
    def of(cls, hashing: NGramHashing, *, dim: int) -> NGramConfig:
        """The n-grams of a published scheme, in rows of ``dim`` elements."""
        return cls(rows=hashing.rows, dim=dim, sizes=hashing.sizes, heads=hashing.heads, hashing=hashing)

    @property
    def slots(self) -> int:
        """Rows that are read for each token."""
        return len(self.sizes) * self.heads

    def table(self, name: str = "ngram", *, tier: Tier = "sharded", dtype: str = "float32") -> TableConfig:
        """The table, for ``EmbeddingLayout.build``."""
        return TableConfig(name=name, rows=self.rows, dim=self.dim, tier=tier, dtype=dtype)

    def feature(self, length: int, name: str = "ngram", *, table: str = "ngram") -> FeatureConfig:
        """The feature for a text of ``length`` tokens; its ids are ``ngram_rows``, flattened."""
        return FeatureConfig(name=name, table=table, max_length=length * self.slots, pooling="none")


def ngram_rows[A: (jax.Array, np.ndarray)](config: NGramConfig, tokens: A) -> A:
    """The rows of the n-grams that end at each token: the same from NumPy, in a loader, and from JAX, in a step.

    Args:
      config: The n-grams.
      tokens: (batch, length) integers, NumPy's or JAX's; negative ones are absent. What lies before a text's begin
        counts as a token of its own. A published scheme takes them as ``compress_tokens`` returns them, where the model
        has a compressed vocabulary.

    Returns:
      (batch, length, slots) int32, of the kind of ``tokens``; -1 where the token is absent.

    Raises:
      ValueError: If the tokens are no integers of two axes.

    Example:
      >>> ngram_rows(NGramConfig(rows=1000, dim=8, sizes=(2,), heads=2), np.array([[5, 6, 5, 6, -1]]))[0].tolist()
      [[37, 860], [483, 934], [237, 775], [483, 934], [-1, -1]]
    """
    xp: Any = jnp if isinstance(tokens, jax.Array) else np
    tokens = xp.asarray(tokens)
    if tokens.ndim != 2 or not xp.issubdtype(tokens.dtype, xp.integer):
        raise ValueError(f"tokens must be integers of shape (batch, length), but are {tokens.dtype}{tokens.shape}")
    if config.hashing is not None:
        return hashed_rows(config.hashing, tokens)
    # 0 before the begin, and for absent tokens, whichever negative number stands for them.
    number = xp.where(tokens < 0, xp.uint32(0), tokens.astype(xp.uint32) + xp.uint32(1))
    share, rows = config.rows // config.slots, []
    for size in config.sizes:
        before = [xp.pad(number, ((0, 0), (distance, 0)))[:, : number.shape[1]] for distance in reversed(range(size))]
        for head in range(config.heads):
            hashed = xp.full_like(number, _mixed_int(config.seed * 1_000_003 + size * 1_009 + head))
            for token in before:
                hashed = _mixed(xp, hashed ^ _mixed(xp, token))
            rows.append((hashed % xp.uint32(share)).astype(xp.int32) + xp.int32(share * len(rows)))
    return xp.where((tokens >= 0)[:, :, None], xp.stack(rows, axis=2), xp.int32(-1))


class NGramMemory(nnx.Module):
    """Gates the rows of a token's n-grams by its hidden state, and smooths them over the tokens before (Engram, 2.3).

      >>> memory = NGramMemory(NGramConfig(rows=1000, dim=8), 16, rngs=nnx.Rngs(0))
      >>> rows = jnp.ones((2, 5, memory.config.slots, 8))
      >>> hidden = jnp.ones((2, 5, 16))
      >>> (hidden + memory(hidden, rows)).shape
      (2, 5, 16)

    Args:
      config: The n-grams.
      hidden_dim: Elements of a hidden state.
      width: Tokens that the convolution sees, as far apart as the longest n-gram is long.
      gate: What of the agreement of hidden state and rows goes into the sigmoid: itself ("sigmoid"), or, as in
        DeepSeek's and Qwen's code, the root of its absolute value, of at least 1e-6, with its sign ("signed_sqrt").
      use_bias: Whether keys and values have biases, as DeepSeek's demo has them.
      dtype: The dtype of the computation; parameters are float32.
      rngs: Its ``params`` stream.

    Raises:
      ValueError: If there is no such gate.
    """

    def __init__(
        self,
        config: NGramConfig,
        hidden_dim: int,
        *,
        width: int = 4,
        gate: Literal["sigmoid", "signed_sqrt"] = "sigmoid",
        use_bias: bool = False,
        dtype: DTypeLike = "float32",
        rngs: nnx.Rngs,
    ):
        if gate not in ("sigmoid", "signed_sqrt"):
            raise ValueError(f"gate={gate!r} is unknown; choose 'sigmoid' or 'signed_sqrt'")
        self.config, self.hidden_dim, self.gate = config, hidden_dim, gate
        inputs = config.slots * config.dim
        self.key = nnx.Linear(inputs, hidden_dim, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.value = nnx.Linear(inputs, hidden_dim, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(hidden_dim, dtype=dtype, rngs=rngs) for _ in range(3)])
        # A causal convolution of each element by itself; zeros, so that training begins with the gated rows alone.
        self.smooth = nnx.Param(jnp.zeros((width, hidden_dim)))

    def __call__(self, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        """What to add to the hidden states, (batch, length, hidden_dim).

        Args:
          hidden: (batch, length, hidden_dim).
          rows: (batch, length, slots, dim), or flattened as a feature has them, (batch, length * slots, dim).
        """
        rows = rows.reshape(*hidden.shape[:2], -1)
        agreement = jnp.sum(self.norms[0](hidden) * self.norms[1](self.key(rows)), axis=2, keepdims=True)
        agreement = agreement / math.sqrt(self.hidden_dim)
        if self.gate == "signed_sqrt":
            agreement = jnp.sign(agreement) * jnp.sqrt(jnp.maximum(jnp.abs(agreement), 1e-6))
        gated = jax.nn.sigmoid(agreement) * self.value(rows)
        normed, length, apart = self.norms[2](gated), hidden.shape[1], max(self.config.sizes)
        taps = self.smooth[...].astype(normed.dtype)
        before = [jnp.pad(normed, ((0, 0), (i * apart, 0), (0, 0)))[:, :length] for i in range(taps.shape[0])]
        smoothed = sum(tap[None, None, :] * values for tap, values in zip(taps, before, strict=True))
        return gated + jax.nn.silu(smoothed)


def _mixed[A: (jax.Array, np.ndarray)](xp: Any, x: A) -> A:
    """MurmurHash3's final mix of 32 bits, which spreads every bit over all."""
    x = x ^ (x >> xp.uint32(16))
    x = x * xp.uint32(0x85EBCA6B)
    x = x ^ (x >> xp.uint32(13))
    x = x * xp.uint32(0xC2B2AE35)
    return x ^ (x >> xp.uint32(16))


def _mixed_int(x: int) -> int:
    return int(_mixed(np, np.array([x % 2**32], np.uint32))[0])
