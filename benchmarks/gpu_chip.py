"""A Hopper GPU as ``benchmarks.gpu_model`` sees it: the constants that it assumes, and how many warps fit."""

from __future__ import annotations

import dataclasses

WARP = 32
BLOCK_WARPS = 4  # of every kernel of jrec's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Constants of a GPU. Nothing here was measured by jrec; ``sources`` says where each figure is from.

    Attributes:
      name: The GPU.
      multiprocessors: How many there are.
      clock: Cycles a second under load.
      hbm: Bytes a second that a large copy reaches.
      hbm_peak: Bytes a second of the data sheet.
      l2: Bytes a second from L2 to all multiprocessors.
      l2_bytes: L2 that random rows can count on.
      l1_bytes: L1 of a multiprocessor, without shared memory.
      hbm_latency: Seconds from a load to its use, from device memory.
      l2_latency: The same from L2.
      l1_latency: The same from L1.
      launch_gap: Seconds between the end of a kernel and the first instruction of the next in a command buffer.
      block_start: Seconds from a thread block's launch to its first load.
    """

    name: str
    multiprocessors: int = 132
    clock: float = 1.755e9
    hbm: float
    hbm_peak: float
    l2: float = 5.5e12
    l2_bytes: int = 40 << 20
    l1_bytes: int = 192 << 10
    hbm_latency: float = 650e-9
    l2_latency: float = 250e-9
    l1_latency: float = 35e-9
    launch_gap: float = 1.3e-6
    block_start: float = 300e-9


CHIPS = {
    "h100": Chip(name="NVIDIA H100 SXM", hbm=3.0e12, hbm_peak=3.35e12),
    "h200": Chip(name="NVIDIA H200", hbm=4.3e12, hbm_peak=4.8e12),
}

SOURCES = {
    "multiprocessors": "NVIDIA's H100 white paper, SXM5",
    "clock": "base of boost under memory load; the highest is 1.98 GHz",
    "hbm": "about 90 % of the data sheet, as published copy benchmarks reach",
    "hbm_peak": "NVIDIA's data sheets",
    "l2": "published microbenchmarks read 5.5 to 7 TB/s on H100s",
    "l2_bytes": "50 MB in two halves that each keep copies of hot lines; 40 MB is a guess",
    "l1_bytes": "256 KB a multiprocessor, less shared memory and what streams pass through; 192 KB is a guess",
    "hbm_latency": "published microbenchmarks, 600 to 700 ns",
    "l2_latency": "published microbenchmarks, 200 to 270 ns (the far half is the slower one)",
    "l1_latency": "published microbenchmarks, about 35 ns",
    "launch_gap": "kernels of one CUDA graph, 1 to 1.5 us",
    "block_start": "a guess",
}
"""Where each of a chip's constants is from: all are assumptions until a GPU was measured."""


def resident_blocks(*, registers: int, shared_bytes: int = 0, warps: int = BLOCK_WARPS) -> int:
    """Thread blocks that a Hopper multiprocessor holds at once; CUDA's occupancy calculator gives the same.

    Args:
      registers: Registers of a thread.
      shared_bytes: Shared memory of a block.
      warps: Warps of a block.
    """
    by_block = -(-registers * WARP // 256) * 256  # a warp's registers, in units of 256
    by_registers = 65_536 // by_block // 4 * 4 // warps  # warps are dealt to four schedulers
    by_shared = 233_472 // (-(-shared_bytes // 128) * 128 + 1024)  # CUDA keeps 1 KiB a block for itself
    return min(by_registers, by_shared, 64 // warps, 32)
