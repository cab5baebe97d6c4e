"""Which GPU kernels are compiled for. Mosaic GPU asks JAX's default device, and so do they."""

from __future__ import annotations

from jax.extend import backend

HOPPER = 9  # of whose capabilities the tensor cores' wgmma is: Blackwell has other instructions in its place
_OLDEST, _NEWEST = 8, 10  # majors that tests/test_aot_capabilities.py compiles for


def capability() -> tuple[int, int]:
    """The compute capability (major, minor) of JAX's default device.

    Where that is no GPU, Hopper's, which Mosaic GPU compiles for there.

    Raises:
      NotImplementedError: On an AMD GPU.
    """
    device = backend.get_default_device()
    said = getattr(device, "compute_capability", "9.0")
    if not said[:1].isdigit():  # ROCm says "gfx942"
        raise NotImplementedError(
            f"Pallas kernels run on NVIDIA GPUs, and this is {device.device_kind} ({said}); use implementation='xla' or"
            " None"
        )
    major, _, minor = said.partition(".")
    return int(major), int(minor or 0)


def check_capability() -> None:
    """Raises NotImplementedError on a GPU that kernels are not compiled for."""
    major, minor = capability()
    if not _OLDEST <= major <= _NEWEST:
        raise NotImplementedError(
            f"Pallas kernels are compiled for GPUs of compute capability {_OLDEST}.0 to {_NEWEST}.3, and this one has"
            f" {major}.{minor}; use implementation='xla' or None"
        )
