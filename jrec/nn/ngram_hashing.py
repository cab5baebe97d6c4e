"""Hashes of published n-gram memories, to the bit: which rows of a shipped table a text reads (arXiv 2601.07372, 2.2).

All of them multiply each token of an n-gram by an odd number of its place, take the XOR of the products as 64 bits, and
reduce it modulo a prime of its own for each head, whose rows lie one head below the other in one table. They differ in
how the numbers are drawn, in whether tokens that read alike are one, and in where an n-gram ends.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.json_values import JsonObject

_LAYER_SEEDS = 10_007  # between the seeds of two layers, in every scheme
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_SPACE_TOKEN, _REPLACEMENT = "\ue000", "\ufffd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGramHashing:
    """Which rows of one layer's table the n-grams of a text read, as a published model has it.

    Schemes:

    - "engram": DeepSeek's demo (deepseek-ai/Engram, ``engram_demo_v1.py``) and the "deepseek" variant of Megatron-LM
      (#7231). Multipliers come from NumPy's PCG64 by seed and layer. Negative ids are hashed like any other.
    - "deepseek-v4.1": the same numbers, but an n-gram ends at an absent (negative) token: it, and all before it, read
      as ``pad_id``.
    - "maxtext": ``layers/engram.py`` of MaxText follows the demo, with multipliers of 32 bits, which are others.
    - "qwen-ple": per-layer embeddings of Qwen3.8 (``qwen4_exp`` of transformers, "qwen" of Megatron-LM). Multipliers
      come from splitmix64, and an n-gram ends at the end of a text: ``pad_id`` is its token. No tokens are merged. The
      rows are padded to a multiple of 128.

    nanochat's hash (#854), a sum of products modulo one prime for all slots, is not here.

    Attributes:
      scheme: One of the names above.
      vocabulary: Tokens that are hashed: after ``compressed_vocabulary`` where the model has it, ``lookup.max() + 1``.
        Multipliers depend on it.
      head_rows: Least number of rows of a head, for n = 2, 3, …: each head has the next prime that no head before it
        has, in the layers before, too.
      heads: Hashes of each n-gram.
      pad_id: What stands before a text's begin, as a hashed token: ``lookup[pad token]``.
      layers: The numbers of all layers with a memory, in the model's order.
      layer: The layer of this table.
      seed: The model's.

    Raises:
      ValueError: If a value is out of range, the layer is none of the layers, or a table has 2^31 rows or more.

    Example:
      >>> hashing = NGramHashing.preset("deepseek-v4.1-flash", layer=14)
      >>> hashing.sizes, hashing.slots, hashing.rows
      ((2, 3, 4), 24, 384016682)
    """

    scheme: str
    vocabulary: int
    head_rows: tuple[int, ...]
    heads: int
    pad_id: int
    layers: tuple[int, ...] = (0,)
    layer: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scheme not in _SCHEMES:
            raise ValueError(f"scheme={self.scheme!r} is unknown; choose one of {', '.join(_SCHEMES)}")
        if self.layer not in self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layer={self.layer} must be one of layers={self.layers}, each of which is there once")
        if not 0 <= self.pad_id < self.vocabulary < 2**31:
            raise ValueError(f"pad_id={self.pad_id} must be a token of vocabulary={self.vocabulary}, below 2^31")
        if not self.head_rows or min(self.head_rows) < 2 or self.heads < 1:
            raise ValueError(f"head_rows={self.head_rows} must be at least 2 for each n, and heads={self.heads} 1")
        if max(self.head_rows) >= 2**31 or self.rows >= 2**31:
            raise ValueError(f"the table of head_rows={self.head_rows}, heads={self.heads} must have below 2^31 rows")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> NGramHashing:
        """The hashing of a published model, with what ``changes`` name in place of the model's own values.

        Args:
          name: "engram-demo", "deepseek-v4.1-flash" or "qwen3.8-flash-next".
          **changes: Attributes. The demo's ``vocabulary`` is its tokenizer's, compressed, and Qwen's ``pad_id`` its
            ``eos_token_id``: give them.

        Raises:
          ValueError: If there is no such preset, or an attribute is missing or out of range.
        """
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
        values = PRESETS[name] | changes
        fields = dataclasses.fields(cls)
        unset = [f.name for f in fields if f.name not in values and f.default is dataclasses.MISSING]
        if unset:
            raise ValueError(f"preset {name!r} does not say {', '.join(unset)}; give it as an argument")
        return cls(**values)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The n of the n-grams, which end at a token."""
        return tuple(range(2, len(self.head_rows) + 2))

    @property
    def slots(self) -> int:
        """Rows that are read for each token: the heads of n = 2, then of n = 3, …"""
        return len(self.head_rows) * self.heads

    @property
    def primes(self) -> tuple[int, ...]:
        """The rows of each slot."""
        before = self.layers[: self.layers.index(self.layer) + 1]
        return _primes(self.head_rows, self.heads, len(before))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each slot in the table."""
        return tuple(itertools.accumulate(self.primes[:-1], initial=0))

    @property
    def rows(self) -> int:
        """Rows of the table, with those that only pad it."""
        multiple = _SCHEMES[self.scheme].row_multiple
        return -(-sum(self.primes) // multiple) * multiple

    @property
    def multipliers(self) -> tuple[int, ...]:
        """By which the token at each distance is multiplied, the token itself first; odd."""
        return _SCHEMES[self.scheme].multipliers(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scheme:
    """How numbers are drawn, and at which tokens before it an n-gram ends; None where at none."""

    multipliers: Callable[[NGramHashing], tuple[int, ...]]
    ends_at: Callable[[Any, int], Any] | None = None
    row_multiple: int = 1


def hashed_rows(hashing: NGramHashing, tokens: jax.Array | np.ndarray) -> Any:
    """``ngram_rows`` of a published scheme; ``tokens`` are checked already."""
    if isinstance(tokens, jax.Array):
        return _rows_on_device(hashing, tokens)
    tokens = tokens.astype(np.int64)
    multipliers, primes, offsets = hashing.multipliers, hashing.primes, hashing.offsets
    rows, mixed = [], np.zeros_like(tokens)
    for distance, before in enumerate(_window(np, hashing, tokens)):
        mixed = mixed ^ (before * np.int64(multipliers[distance]))
        rows += [mixed % primes[slot] + offsets[slot] for slot in _slots(hashing, distance + 1)]
    return np.where((tokens >= 0)[:, :, None], np.stack(rows, axis=2), -1).astype(np.int32)


def _rows_on_device(hashing: NGramHashing, tokens: jax.Array) -> jax.Array:
    """The same in 32 bits: JAX has no 64 bits unless a program turns them on for all of its arrays."""
    tokens = tokens.astype(jnp.int32)
    multipliers, primes, offsets = hashing.multipliers, hashing.primes, np.array(hashing.offsets, np.int32)
    high = low = jnp.zeros_like(tokens, jnp.uint32)
    rows = []
    for distance, before in enumerate(_window(jnp, hashing, tokens)):
        product = _wide_product(before, multipliers[distance])
        high, low = high ^ product[0], low ^ product[1]
        if slots := _slots(hashing, distance + 1):
            rest = _signed_remainder(high, low, primes[slots.start : slots.stop])
            rows.append(rest.astype(jnp.int32) + offsets[None, None, slots.start : slots.stop])
    return jnp.where((tokens >= 0)[:, :, None], jnp.concatenate(rows, axis=2), jnp.int32(-1))


def _slots(hashing: NGramHashing, size: int) -> range:
    """The slots of n-grams of ``size`` tokens."""
    begin = hashing.heads * (size - 2)
    return range(max(begin, 0), max(begin + hashing.heads, 0))


def _window[A: (jax.Array, np.ndarray)](xp: Any, hashing: NGramHashing, tokens: A) -> Iterator[A]:
    """The tokens at each distance before a token, nearest first: (batch, length) each."""
    yield tokens
    ended, ends_at = None, _SCHEMES[hashing.scheme].ends_at
    for distance in range(1, max(hashing.sizes)):
        pads = ((0, 0), (distance, 0))
        # Padded and then cut, which is right for texts shorter than the distance, too: nothing of them is left.
        before = xp.pad(tokens, pads, constant_values=hashing.pad_id)[:, : tokens.shape[1]]
        if ends_at is not None:
            ends = ends_at(before, hashing.pad_id)
            ended = ends if ended is None else ended | ends
            # The nearest come first, so that an end covers every token farther away, also those of the text before.
            before = xp.where(ended, xp.asarray(hashing.pad_id, tokens.dtype), before)
        yield before


def _wide_product(tokens: jax.Array, multiplier: int) -> tuple[jax.Array, jax.Array]:
    """The product modulo 2^64 of int32 tokens and a number, as its high and its low 32 bits, uint32."""
    above, below = divmod(multiplier, 2**32)
    low = tokens.astype(jnp.uint32)
    sign = jnp.where(tokens < 0, jnp.uint32(2**32 - 1), jnp.uint32(0))  # the high half of a token of 64 bits
    # Halves of 16 bits: their products fit 32.
    halves = low & jnp.uint32(0xFFFF), low >> 16
    factors = jnp.uint32(below & 0xFFFF), jnp.uint32(below >> 16)
    crossed = halves[0] * factors[1], halves[1] * factors[0]
    lowest = halves[0] * factors[0]
    middle = (lowest >> 16) + (crossed[0] & jnp.uint32(0xFFFF)) + (crossed[1] & jnp.uint32(0xFFFF))
    carried = halves[1] * factors[1] + (crossed[0] >> 16) + (crossed[1] >> 16) + (middle >> 16)
    # Modulo 2^32 each; the product of the two high halves would begin at 2^64.
    high = carried + low * jnp.uint32(above) + sign * jnp.uint32(below)
    return high, (lowest & jnp.uint32(0xFFFF)) | (middle << 16)


def _signed_remainder(high: jax.Array, low: jax.Array, primes: Sequence[int]) -> jax.Array:
    """What int64 numbers leave modulo primes below 2^31, (…, primes) uint32, never negative, as Python's ``%``."""
    prime = np.array(primes, np.uint32)[None, None, :]
    # A remainder has at most as many bits as the greatest prime, so this many digits fit beside it in 32.
    step = 32 - max(primes).bit_length()
    rest = high[:, :, None] % prime
    for stop in range(32, 0, -step):
        width = min(step, stop)
        digits = (low >> (stop - width)) & jnp.uint32(2**width - 1)
        rest = ((rest << width) | digits[:, :, None]) % prime
    # A negative number is its bits less 2^64. Both terms below are at most the prime, so that their sum fits.
    wrapped = np.array([p - 2**64 % p for p in primes], np.uint32)[None, None, :]
    return jnp.where((high >> 31 == 1)[:, :, None], (rest + wrapped) % prime, rest)


def compressed_vocabulary(texts: Sequence[str], pieces: Sequence[str] | None = None) -> np.ndarray:
    r"""Numbers for tokens, by which those that read alike, such as " The" and "the", are one (Engram, 2.2).

    A text is normalized as the demo does: NFKC, NFD, without accents and other marks, in lower case, runs of white
    space as one space, and none around it. What is left empty stands for itself. Python's Unicode tables decide: the
    older ones of the tokenizers library (0.23.3) leave some 550 characters of Unicode 9 and later as they are. Whether
    that matters is easily seen: ``lookup.max() + 1`` is the size of the model's compressed vocabulary, 99,092 of
    DeepSeek-V4.1.

    Args:
      texts: What each token decodes to, by itself, special tokens included.
      pieces: The tokenizer's own strings for the tokens, by which those that are no whole characters are told apart.

    Returns:
      (tokens,) int32: the new number of each, in the order in which they first appear.

    Raises:
      ValueError: If a text is no whole characters and there are no pieces, or not one for each text.

    Example:
      >>> compressed_vocabulary(["the", " The", "Caf\u00e9", "cafe", " ", "\n"]).tolist()
      [0, 0, 1, 1, 2, 2]
    """
    if pieces is not None and len(pieces) != len(texts):
        raise ValueError(f"there are {len(texts):,} texts, but {len(pieces):,} pieces; give one for each token")
    numbers: dict[str, int] = {}
    lookup = np.empty(len(texts), np.int32)
    for token, text in enumerate(texts):
        if _REPLACEMENT not in text:
            key = _normalized(text) or text
        elif pieces is not None:
            key = pieces[token]
        else:
            raise ValueError(f"token {token} decodes to {text!r}, which is no whole character; give the pieces, too")
        lookup[token] = numbers.setdefault(key, len(numbers))
    return lookup


def compress_tokens[A: (jax.Array, np.ndarray)](lookup: np.ndarray, tokens: A) -> A:
    """Tokens by their new numbers; negative ones stay as they are.

    Args:
      lookup: (tokens,) int32 of ``compressed_vocabulary``.
      tokens: Integers of any shape, NumPy's or JAX's.

    Returns:
      The numbers, int32, of the kind and the shape of ``tokens``.
    """
    xp: Any = jnp if isinstance(tokens, jax.Array) else np
    tokens = xp.asarray(tokens)
    # An absent token reads entry 0, which is thrown away below: index -1 would be the last token's.
    new = xp.asarray(lookup, np.int32)[xp.where(tokens < 0, xp.zeros_like(tokens), tokens)]
    return xp.where(tokens < 0, tokens.astype(np.int32), new)


def _normalized(text: str) -> str:
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # All marks, spacing ones too: "accents" of the tokenizer's library include the vowels of Indic scripts.
    plain = "".join(c for c in decomposed if unicodedata.category(c)[0] != "M")
    # By single characters: str.lower() of a whole text has another sigma at the end of a word.
    lower = "".join(c.lower() for c in plain)
    words = lower.replace("\t", " ").replace("\r", " ").replace("\n", " ")
    while "  " in words:
        words = words.replace("  ", " ")
    if words == " ":
        return words
    return words.strip(_WHITE_SPACE).replace(_SPACE_TOKEN, " ")


@functools.cache
def _primes(head_rows: tuple[int, ...], heads: int, layers: int) -> tuple[int, ...]:
    """The primes of the last of some layers."""
    taken: set[int] = set()
    primes: list[int] = []
    for _ in range(layers):
        primes = []
        for least in head_rows:
            candidates = (n for n in itertools.count(least) if n not in taken and _is_prime(n))
            primes += list(itertools.islice(candidates, heads))
            taken.update(primes)
    return tuple(primes)


def _is_prime(number: int) -> bool:
    """Miller and Rabin's test; these bases decide all numbers below 3,215,031,751."""
    if number < 2 or any(number % p == 0 for p in (2, 3, 5, 7)):
        return number in (2, 3, 5, 7)
    twos = ((number - 1) & -(number - 1)).bit_length() - 1
    powers = (pow(base, (number - 1) >> twos, number) for base in (2, 3, 5, 7))
    return all(
        power == 1 or any(pow(power, 2**square, number) == number - 1 for square in range(twos)) for power in powers
    )


def _drawn_multipliers(hashing: NGramHashing, dtype: type[np.signedinteger] = np.int64) -> tuple[int, ...]:
    """Odd numbers whose product with any token fits ``dtype``."""
    bound = max(1, int(np.iinfo(dtype).max) // hashing.vocabulary // 2)
    rng = np.random.default_rng(hashing.seed + _LAYER_SEEDS * hashing.layer)
    return tuple(2 * int(n) + 1 for n in rng.integers(0, bound, size=max(hashing.sizes), dtype=dtype))


def _split_mix_multipliers(hashing: NGramHashing) -> tuple[int, ...]:
    """The same range by splitmix64; the layer counts memories, not blocks."""
    bound = max(1, (2**63 - 1) // hashing.vocabulary // 2)
    first = hashing.seed + _LAYER_SEEDS * hashing.layers.index(hashing.layer)
    states = (first + _GAMMA * (place + 1) for place in range(max(hashing.sizes)))
    return tuple(2 * (_split_mix(state) % bound) + 1 for state in states)


_GAMMA = 0x9E3779B97F4A7C15


def _split_mix(state: int) -> int:
    state = (state + _GAMMA) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


_SCHEMES = {
    "engram": _Scheme(multipliers=_drawn_multipliers),
    "deepseek-v4.1": _Scheme(multipliers=_drawn_multipliers, ends_at=lambda before, pad_id: before < 0),
    "maxtext": _Scheme(multipliers=functools.partial(_drawn_multipliers, dtype=np.int32)),
    "qwen-ple": _Scheme(
        multipliers=_split_mix_multipliers,
        ends_at=lambda before, pad_id: (before < 0) | (before == pad_id),
        row_multiple=128,
    ),
}

PRESETS: dict[str, JsonObject] = {
    "engram-demo": {
        "scheme": "engram",
        "head_rows": (646_400, 646_400),
        "heads": 8,
        "pad_id": 2,
        "layers": (1, 15),
        "layer": 1,
    },
    "deepseek-v4.1-flash": {
        "scheme": "deepseek-v4.1",
        "vocabulary": 99_092,
        "head_rows": (16_000_000,) * 3,
        "heads": 8,
        "pad_id": 2,
        "layers": (1, 14),
        "layer": 1,
    },
    "qwen3.8-flash-next": {
        "scheme": "qwen-ple",
        "vocabulary": 248_320,
        "head_rows": (20_000_000,) * 2,
        "heads": 8,
        "layers": (2,),
        "layer": 2,
        "seed": 1234,
    },
}
"""What ``NGramHashing.preset`` knows of each model: row counts, seeds and layers as its configuration has them."""
