"""CRC-32C (Castagnoli), the checksum of zarr's chunks, without the GIL."""

from __future__ import annotations

import functools

import numpy as np
from numba import types

from jrec.native.compile import kernel, pointer
from jrec.native.memory import get_u64

_POLYNOMIAL = 0x82F63B78  # reversed


def crc32c(data: bytes | np.ndarray) -> int:
    """The checksum of bytes, or of a C-contiguous array's bytes."""
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
    start, aligned = pointer(raw), -raw.ctypes.data % 8
    head = min(aligned, raw.size)
    words = (raw.size - head) // 8
    # Up to the first multiple of 8: the kernel loads whole words, which are aligned as it says.
    remainder = _slowly(raw[:head], 0xFFFFFFFF)
    remainder = _remainder.call(start + head, words, pointer(_tables()), remainder) & 0xFFFFFFFF
    return _slowly(raw[head + 8 * words :], remainder) ^ 0xFFFFFFFF


def _slowly(data: np.ndarray, crc: int) -> int:
    table = _tables()[0]
    for byte in data.tolist():
        crc = (crc >> 8) ^ int(table[(crc ^ byte) & 0xFF])
    return crc


@functools.cache
def _tables() -> np.ndarray:
    """(16, 256) uint64: what a byte adds to the remainder 0 to 15 bytes later (slicing by 16)."""
    line = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        line = np.where(line & 1, (line >> 1) ^ np.uint64(_POLYNOMIAL), line >> 1)
    tables = [line]
    for _ in range(15):
        tables.append(line[tables[-1] & 0xFF] ^ (tables[-1] >> 8))
    return np.stack(tables)


@kernel(types.int64(types.int64, types.int64, types.int64, types.int64))
def _remainder(data, words, tables, crc):
    """The remainder behind 8-byte words at ``data``, aligned, after a remainder ``crc``."""
    mask, byte_bits, remainder, at = np.uint64(0xFF), np.uint64(8), np.uint64(crc), 0
    # Slicing by 16, after Kounavis and Berry (2005): sixteen independent look-ups in place of a chain of sixteen.
    while at + 2 <= words:
        low, high, remainder = get_u64(data, at) ^ remainder, get_u64(data, at + 1), np.uint64(0)
        for byte in range(8):
            remainder ^= get_u64(tables, (15 - byte) * 256 + np.int64(low & mask))
            remainder ^= get_u64(tables, (7 - byte) * 256 + np.int64(high & mask))
            low >>= byte_bits
            high >>= byte_bits
        at += 2
    if at < words:
        low, remainder = get_u64(data, at) ^ remainder, np.uint64(0)
        for byte in range(8):
            remainder ^= get_u64(tables, (7 - byte) * 256 + np.int64(low & mask))
            low >>= byte_bits
    return np.int64(remainder)
