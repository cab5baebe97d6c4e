"""The environment of processes that tests start: devices of their own number, compiled for as in the tests."""

import os


def with_devices(count: int) -> dict[str, str]:
    """The environment of a child that has so many virtual CPU devices and, but for that, the XLA flags of this process.

    Without these flags a child would compile as users do, in twice the time, and share no compiled program with tests.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"  # the last one counts
    return {**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
