"""The environment of processes that tests start: devices of their own number, compiled for as in the tests."""

import os

COMPILES = ("XLA_FLAGS", "JREC_KERNEL_CACHE", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


def compiling(*names: str) -> dict[str, str]:
    """What a child with an environment of its own needs to compile as this process does, and to have what is compiled.

    Args:
      names: The only variables to take; none: all.
    """
    return {name: os.environ[name] for name in names or COMPILES if name in os.environ}


def with_devices(count: int) -> dict[str, str]:
    """The environment of a child that has so many virtual CPU devices and, but for that, the XLA flags of this process.

    Without these flags a child would compile as users do, in twice the time, and share no compiled program with tests.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"  # the last one counts
    return {**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
