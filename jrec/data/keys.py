"""64-bit keys of categorical values: exact and reversible for ids as logs have them, hashed and checked for long texts.

The top byte of a key is its tag:

    0 … 7         the text itself, that many bytes; the missing value "" is key 0
    8             exactly 8 lower-case hexadecimal digits
    9             a decimal number without leading zeros, 8 digits or more, below 2^56
    0x80 … 0xff   a longer text: 63 bits of a hash. A second, independent 64-bit hash (the *fingerprint*) tells apart
                  two texts that share a key, see ``jrec.data.texts``

So equal texts have equal keys on every machine and in every run, and ``bucket`` is a stable hash of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

from jrec.data.canonical import canonical_ends
from jrec.kernel_cache import compiled

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = np.uint64(0)
_TAG_SHIFT = np.uint64(56)
_TAG_HEX = np.uint64(8) << _TAG_SHIFT
_TAG_DECIMAL = np.uint64(9) << _TAG_SHIFT
_TAG_TEXT = np.uint64(1) << np.uint64(63)
_PAYLOAD = (np.uint64(1) << _TAG_SHIFT) - np.uint64(1)
_ONE = np.uint64(1)
_FOUR = np.uint64(4)
_EIGHT = np.uint64(8)
_TEN = np.uint64(10)
_NIBBLE = np.uint64(15)
# Keys are stored, in vocabularies' files, growing tables and means: these constants must never change.
_KEY_SEED = np.uint64(0x9E3779B97F4A7C15)
_FINGERPRINT_SEED = np.uint64(0xD6E8FEB86659FD93)
_FINGERPRINT_STEP = np.uint64(0xA0761D6478BD642F)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# A look-up, because branches on random digits are mispredicted; 255 marks what is no digit.
_HEX_DIGITS = np.full(256, 255, np.uint64)
for _i, _c in enumerate(b"0123456789abcdef"):
    _HEX_DIGITS[_c] = _HEX_DIGITS[ord(chr(_c).upper())] = _i
_LOWER_HEX_DIGITS = _HEX_DIGITS.copy()
_LOWER_HEX_DIGITS[ord("A") : ord("F") + 1] = 255
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@numba.njit(nogil=True, inline="always")
def mix64(x):
    """The finalizer of splitmix64: a bijection of uint64 whose every output bit depends on every input bit."""
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


@compiled
def hash_text(buffer, start, end, seed):
    """The (key, fingerprint) of a text too long to be its own key; both uint64, the key with the text tag."""
    length = np.uint64(end - start)
    # The last word is not padded: but for the length, a text and the same behind a zero byte would share a key.
    key = mix64(_KEY_SEED ^ length ^ mix64(seed))
    fingerprint = mix64(_FINGERPRINT_SEED ^ length)
    word, filled = np.uint64(0), 0
    for i in range(start, end):
        word = (word << _EIGHT) | np.uint64(buffer[i])
        filled += 1
        if filled == 8 or i == end - 1:
            key = mix64(key ^ word) + _KEY_SEED
            fingerprint = mix64(fingerprint + word * _FINGERPRINT_STEP)
            word, filled = np.uint64(0), 0
    return mix64(key) | _TAG_TEXT, fingerprint


@numba.njit(nogil=True, inline="always")
def _hex8(buffer, start, digit_of):
    """(are all 8 characters digits by a table, the key of the digits)."""
    value, digits = np.uint64(0), np.uint64(0)
    first = np.uint64(start)  # unsigned: numba checks signed indices for being negative
    for i in range(8):
        digit = digit_of[buffer[first + np.uint64(i)]]
        digits |= digit
        value = (value << _FOUR) | digit
    return digits <= _NIBBLE, _TAG_HEX | value


@compiled
def hex8_keys(buffer, starts, ends):
    """(n,) uint64 keys of 8 hexadecimal digits of either case, or blanks, and whether the texts are such: (n,) bool."""
    keys = np.empty(starts.shape[0], np.uint64)
    valid = np.ones(starts.shape[0], np.bool_)
    for i in range(keys.shape[0]):
        if ends[i] - starts[i] == 8:
            valid[i], keys[i] = _hex8(buffer, starts[i], _HEX_DIGITS)
        else:
            valid[i], keys[i] = starts[i] == ends[i], MISSING
    return keys, valid


@compiled
def short_key(buffer, start, end):
    """(does the text have an exact key, that key)."""
    length = end - start
    if length <= 7:
        value = np.uint64(0)
        for i in range(start, end):
            value = (value << _EIGHT) | np.uint64(buffer[i])
        return True, (np.uint64(length) << _TAG_SHIFT) | value
    if length == 8:
        valid, key = _hex8(buffer, start, _LOWER_HEX_DIGITS)
        if valid:
            return True, key
    # 2^56 - 1 has 17 digits. A leading zero would be lost on the way back: such a text is hashed.
    if length <= 17 and buffer[start] != 48:
        value = np.uint64(0)
        for i in range(start, end):
            c = buffer[i]
            if c < 48 or c > 57:
                return False, MISSING
            value = value * _TEN + np.uint64(c - 48)
        if value <= _PAYLOAD:
            return True, _TAG_DECIMAL | value
    return False, MISSING


@compiled
def _write_decimal(value, negative, out, start):
    """Writes a number's digits at ``out[start:]``; returns where they end."""
    digits = 1
    rest = value
    while rest >= _TEN:
        rest //= _TEN
        digits += 1
    end = start + digits + (1 if negative else 0)
    if negative:
        out[start] = 45
    at = end - 1
    for _ in range(digits):
        out[at] = np.uint8(48 + value % _TEN)
        value //= _TEN
        at -= 1
    return end


@compiled
def integer_keys(values):
    """Keys of integers, the same as their decimal texts have.

    Args:
      values: (n,) int64, each of at most 56 bits, or negative and of at most 6 digits.

    Returns:
      (n,) uint64. Integers outside that range raise ValueError.
    """
    keys = np.empty(values.shape[0], np.uint64)
    scratch = np.empty(24, np.uint8)
    for i in range(values.shape[0]):
        value = values[i]
        end = _write_decimal(np.uint64(abs(value)), value < 0, scratch, 0)
        short, key = short_key(scratch, 0, end)
        if not short:
            raise ValueError("integer id outside -999,999 .. 2^56 - 1")
        keys[i] = key
    return keys


@compiled
def hash_texts(buffer, starts, ends, seed):
    """(n,) keys and, of texts whose keys are hashes, fingerprints of the texts that begin and end there."""
    keys = np.empty(starts.shape[0], np.uint64)
    fingerprints = np.zeros(starts.shape[0], np.uint64)
    for i in range(starts.shape[0]):
        if ends[i] - starts[i] == 8:  # in this loop a sixth of what a call of short_key takes: 2.3 ns, not 13.7
            short, keys[i] = _hex8(buffer, starts[i], _LOWER_HEX_DIGITS)
            if short:
                continue
        short, keys[i] = short_key(buffer, starts[i], ends[i])
        if not short:
            keys[i], fingerprints[i] = hash_text(buffer, starts[i], ends[i], seed)
    return keys, fingerprints


def text_key(text: str, seed: int = 0) -> int:
    """The key of one text, as the parser computes it."""
    buffer = np.frombuffer(text.encode("utf-8") or b"\0", np.uint8)
    length = len(text.encode("utf-8"))
    short, key = short_key(buffer, 0, length)
    return int(key if short else hash_text(buffer, 0, length, np.uint64(seed))[0])


def value_keys(values: np.ndarray | pa.Array, seed: int, *, canonical: bool = False) -> np.ndarray:
    """(n,) uint64 keys of integers or texts.

    Args:
      values: (n,) integers of NumPy, or texts as a LargeBinaryArray or LargeStringArray of Arrow, none of them null.
      seed: The seed of the hash of long texts.
      canonical: Whether texts are brought into one form first.
    """
    if isinstance(values, np.ndarray):
        if not values.size or (int(values.min()) > -1_000_000 and int(values.max()) < 2**56):
            return integer_keys(values.astype(np.int64))
        import pyarrow as pa

        # Out of the range of exact keys: by their texts, as a log has them, which uint64 past 2^63 would not survive as
        # int64.
        values = pa.array(values).cast(pa.large_string())
    buffer, starts, ends = Spans.of(values)
    if canonical:
        ends = canonical_ends(buffer, starts, ends)
    return hash_texts(buffer, starts, ends, np.uint64(seed))[0]


def crossed_keys(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Keys of combinations of values: of numbers below 2^56, hashes of the values' keys in their order.

    Of ten million combinations two share a number with a probability of 0.07 %.

    Args:
      columns: One or more, each (n,) uint64 keys; a missing value is a value as any other.

    Returns:
      (n,) uint64.
    """
    mixed = np.full(len(columns[0]), _KEY_SEED)
    for keys in columns:
        _mix_in(mixed, keys)
    # 56 bits, so that the combination is a number below 2^56, whose key is exact: no text of it need be kept.
    return integer_keys((mixed & _PAYLOAD).view(np.int64))


@compiled
def _mix_in(mixed, keys):
    """Makes each of (n,) hashes one of the same and a key."""
    for i in range(mixed.shape[0]):
        mixed[i] = mix64(mixed[i] ^ mix64(keys[i] + _FINGERPRINT_STEP)) + _KEY_SEED


class Spans(NamedTuple):
    """Texts in a buffer of uint8, and where each begins and ends in it, (n,) int64."""

    buffer: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, texts: pa.Array) -> Spans:
        """A copy of texts, a LargeStringArray or LargeBinaryArray without nulls."""
        _, ends, content = texts.buffers()
        if not len(texts):
            return cls(np.zeros(1, np.uint8), *np.zeros((2, 0), np.int64))
        bounds = np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        first, last = bounds[0], bounds[-1]
        # A copy, since kernels rewrite texts in place, and Arrow's buffers may be anybody's. Never empty: Arrow may
        # give no buffer.
        buffer = np.zeros(1, np.uint8) if first == last else np.frombuffer(content, np.uint8)[first:last].copy()
        bounds = bounds - first
        return cls(buffer, bounds[:-1], bounds[1:])

    def array(self) -> pa.Array:
        """The texts as a LargeStringArray, of bytes that need not be UTF-8."""
        import pyarrow as pa

        bounds = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        content = gather_texts(self.buffer, self.starts, self.ends)
        return pa.LargeStringArray.from_buffers(len(self.starts), pa.py_buffer(bounds), pa.py_buffer(content))


def gather_texts(buffer: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """(bytes,) uint8: texts one after the other."""
    out = np.empty(int((ends - starts).sum()), np.uint8)
    _copy(buffer, starts, ends, out)
    return out


@compiled
def _copy(buffer, starts, ends, out):
    """Copies the texts between ``starts`` and ``ends`` one after the other into ``out``."""
    at = 0
    for i in range(starts.shape[0]):
        for j in range(starts[i], ends[i]):
            out[at] = buffer[j]
            at += 1


def is_text(keys: np.ndarray) -> np.ndarray:
    """Which (n,) uint64 keys stand for texts that have to be looked up in the text store."""
    return keys >= _TAG_TEXT


@compiled
def decode_keys(keys, text_ends, text_bytes):
    """The texts of keys.

    Args:
      keys: (n,) uint64.
      text_ends: (number of text-tagged keys,) int64, where each of their texts ends in ``text_bytes``, in order.
      text_bytes: uint8, those texts one after the other.

    Returns:
      (n + 1,) int64 offsets and the uint8 bytes of all texts.
    """
    num_keys = keys.shape[0]
    offsets = np.empty(num_keys + 1, np.int64)
    # 17 digits are the longest text that a key holds by itself.
    out = np.empty(17 * num_keys + text_bytes.shape[0], np.uint8)
    at, text, text_start = 0, 0, 0
    offsets[0] = 0
    for i in range(num_keys):
        key = keys[i]
        tag = np.int64(key >> _TAG_SHIFT)
        payload = key & _PAYLOAD
        if tag <= 7:
            for j in range(tag):
                out[at] = np.uint8((payload >> np.uint64(8 * (tag - 1 - j))) & np.uint64(255))
                at += 1
        elif tag == 8:
            for j in range(8):
                digit = (payload >> np.uint64(4 * (7 - j))) & _NIBBLE
                out[at] = np.uint8(digit + np.uint64(48 if digit < _TEN else 87))
                at += 1
        elif tag == 9:
            at = _write_decimal(payload, False, out, at)
        else:
            for j in range(text_start, text_ends[text]):
                out[at] = text_bytes[j]
                at += 1
            text_start = text_ends[text]
            text += 1
        offsets[i + 1] = at
    return offsets, out[:at]


@compiled
def _bucket(key, modulus):
    """The bucket of one key, see ``buckets``; ``modulus`` is the number of buckets less one."""
    return np.uint32(0) if key == MISSING else np.uint32(_ONE + mix64(key) % modulus)


@compiled
def buckets(keys, num_buckets):
    """The stable hash bucket of each key: 0 for the missing value, else 1 + mix64(key) mod (num_buckets - 1).

    Args:
      keys: (n,) uint64.
      num_buckets: At least 2.

    Returns:
      (n,) uint32.
    """
    out = np.empty(keys.shape[0], np.uint32)
    modulus = np.uint64(num_buckets - 1)
    for i in range(keys.shape[0]):
        out[i] = _bucket(keys[i], modulus)
    return out


@compiled
def count_buckets(keys, counts):
    """Adds how often each hash bucket occurs among keys, in place; takes time per key, not per bucket.

    Args:
      keys: (n,) uint64.
      counts: (buckets,) int64, at least 2 buckets.
    """
    modulus = np.uint64(counts.shape[0] - 1)
    for i in range(keys.shape[0]):
        counts[_bucket(keys[i], modulus)] += 1
