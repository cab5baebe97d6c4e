"""A transformer of bytes with or without an n-gram memory, of sizes that benchmarks choose, and text for it."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import sysconfig
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec
from jrec.nn import NGramConfig
from jrec.ops.layout import Tier

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a transformer and of its batches.

    Attributes:
      length, batch: Tokens of a text, and texts of a batch.
      width: Elements of a hidden state.
      hidden: Elements of a layer's hidden position-wise ones.
      layers, heads: Their number.
    """

    length: int = 64
    batch: int = 32
    width: int = 64
    hidden: int = 256
    layers: int = 2
    heads: int = 4


class _Layer(nnx.Module):
    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(shape.width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(shape.heads, shape.width, decode=False, rngs=rngs)
        self.up = nnx.Linear(shape.width, shape.hidden, rngs=rngs)
        self.down = nnx.Linear(shape.hidden, shape.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[:, :, 0]))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Dense(nnx.Module):
    """All but the tables: a memory of n-grams, if there is one, and then layers of attention."""

    def __init__(self, shape: Shape, ngrams: NGramConfig | None, *, rngs: nnx.Rngs):
        self.memory = None if ngrams is None else jrec.nn.NGramMemory(ngrams, shape.width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (shape.length, shape.width)))
        self.layers = nnx.List([_Layer(shape, rngs=rngs) for _ in range(shape.layers)])
        self.norm, self.out = nnx.RMSNorm(shape.width, rngs=rngs), nnx.Linear(shape.width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array, ngrams: jax.Array | None) -> jax.Array:
        """(batch, length, 256) scores of the next byte, by the rows of tokens and of n-grams."""
        x = tokens + self.positions[...][None]
        if self.memory is not None and ngrams is not None:
            x = x + self.memory(x, ngrams)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


class LanguageModel(nnx.Module):
    """The dense part over jrec's tables."""

    def __init__(self, shape: Shape, ngrams: NGramConfig | None, *, tier: Tier = "sharded", rngs: nnx.Rngs):
        byte = jrec.TableConfig(name="byte", rows=256, dim=shape.width, initial_bound=0.1)
        feature = jrec.FeatureConfig(name="byte", table="byte", max_length=shape.length, pooling="none")
        tables = [] if ngrams is None else [ngrams.table(tier=tier)]
        features = [] if ngrams is None else [ngrams.feature(shape.length)]
        self.embeddings = jrec.nn.EmbeddingCollection(
            jrec.EmbeddingLayout.build([byte, *tables], [feature, *features]), rngs=rngs
        )
        self.dense = Dense(shape, ngrams, rngs=rngs)

    def logits(self, dense: jax.Array, activations: Any, bags: Any) -> jax.Array:
        """(batch, length, 256)."""
        del dense
        rows = self.embeddings.features(activations, bags)
        return self.dense(rows["byte"], rows.get("ngram"))


def mean_loss(logits: jax.Array, following: jax.Array) -> jax.Array:
    """The mean cross entropy of the next bytes, in nats."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, following))


def pieces(text: np.ndarray, shape: Shape, count: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of texts with the byte that follows each, (batch, length + 1) uint8."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield text[rng.integers(0, len(text) - shape.length - 1, shape.batch)[:, None] + np.arange(shape.length + 1)]


def columns_of(piece: np.ndarray, ngrams: NGramConfig | None) -> dict[str, np.ndarray]:
    """A batch as ``Run.feed`` takes it."""
    columns = {"byte": piece[:, :-1].astype(np.int64), "next": piece[:, 1:].astype(np.int32)}
    if ngrams is not None:
        columns["ngram"] = jrec.nn.ngram_rows(ngrams, piece[:, :-1]).reshape(len(piece), -1)
    return columns


def python_sources() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of Python's library without its tests, train and valid: every eighth of the shuffled files is valid."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [path for path in library.rglob("*.py") if not LEFT_OUT & set(path.relative_to(library).parts)]
    files.sort(key=lambda path: path.relative_to(library).as_posix())
    random.Random(0).shuffle(files)
    train, valid = [path for n, path in enumerate(files) if n % 8], files[::8]
    joined = [np.frombuffer(b"".join(path.read_bytes() for path in part), np.uint8) for part in (train, valid)]
    return joined[0], joined[1]
