"""The processes of one run: which one this is, how they join JAX, and whether they are about to run the same.

JAX's coordination service, which process 0 runs at ``--coordinator``, carries it all: processes register there, and its
key-value store holds what each is about to run (``jrec.app.processes.same_run``).
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from jrec.errors import ConfigError, ProcessError

WAIT_SECONDS = 300.0
"""How long a process waits for all others."""
_ANSWER_SECONDS = 60.0  # for what a process that has joined says next
_JAX_SILENCE_SECONDS = 120
"""JAX's own heartbeat, which ends a process by a signal; ``jrec.app.processes.lifeline`` is quicker and says why."""
_SHUTDOWN_SECONDS = 600  # how long the others wait at the end for the first process, which writes the report
_MOST_DIFFERENCES = 5
_ABSENT = "not set"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """Which process this is, and where process 0 listens.

    Attributes:
      host, port: Process 0's address.
      processes: The number of processes.
      process: This process's number, from 0.
    """

    host: str
    port: int
    processes: int
    process: int

    @staticmethod
    def of(coordinator: str, processes: int, process: int) -> Role:
        """The role of process ``process`` of ``processes``, with process 0 at HOST:PORT.

        Raises:
          ConfigError: If the address is not HOST:PORT, or there is no such process.
        """
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"--coordinator is {coordinator!r}; give HOST:PORT, such as localhost:7000")
        if processes < 1:
            raise ConfigError(f"--processes is {processes}; give the number of all processes, at least 1")
        if not 0 <= process < processes:
            raise ConfigError(
                f"--process is {process}; processes are numbered from 0 to --processes - 1 = {processes - 1}"
            )
        return Role(host=host.strip("[]"), port=int(port), processes=processes, process=process)

    @property
    def address(self) -> str:
        """Process 0's address as HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def role_of(coordinator: str | None, processes: int | None, process: int | None) -> Role:
    """Which of several processes this is.

    Args:
      coordinator: HOST:PORT at which process 0 listens; None to ask the cluster (Slurm, Open MPI) or the environment
        (JAX_COORDINATOR_ADDRESS).
      processes: The number of processes; None to ask the cluster.
      process: This process's number, from 0; None to ask the cluster.

    Raises:
      ConfigError: If a value is missing or invalid.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None or processes is None or process is None:
        from jax._src.clusters import ClusterEnv  # as jax.distributed.initialize asks it

        coordinator, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, processes, process, None, None, int(WAIT_SECONDS)
        )
    if coordinator is None or processes is None or process is None:
        values = {"--coordinator HOST:PORT": coordinator, "--processes N": processes, "--process I": process}
        missing = [name for name, value in values.items() if value is None]
        raise ConfigError(
            f"the processes of the run are not known: neither arguments nor a cluster say {' and '.join(missing)}. Give"
            " --coordinator HOST:PORT --processes N --process I, or start them by Slurm (srun)"
        )
    return Role.of(coordinator, processes, process)


def join(role: Role, *, wait: float = WAIT_SECONDS) -> None:
    """Joins all processes, so that JAX sees the devices of each. Call it before any other use of JAX.

    Args:
      role: Which process this is.
      wait: Seconds within which all must come.

    Raises:
      ConfigError: If not all come, or there is no such host.
      ProcessError: If the port is taken, or process 0 cannot be reached.
    """
    deadline = time.monotonic() + wait
    if role.process == 0:
        _check_port(role)
    else:
        _wait_for_first(role, wait)
    failures: list[Exception] = []
    # JAX ends the process by a signal when its own time is up, and hears no Ctrl-C before. So a thread joins, with more
    # time than the caller waits for it.
    joining = threading.Thread(target=_initialize, args=(role, wait, failures), daemon=True)
    joining.start()
    while joining.is_alive():
        joining.join(1.0)
        if not joining.is_alive():
            break
        if time.monotonic() > deadline:
            raise ConfigError(_absent(role, wait))
        # It listened before this process joined (``_wait_for_first``), so a refusal means that it has ended.
        if role.process and isinstance(_refusal_of(role), ConnectionRefusedError):
            raise ProcessError(f"process 0 at {role.address} ended before all processes had come; look at its output")
    if failures:
        raise ProcessError(f"the processes could not join at {role.address}: {failures[0]}") from failures[0]


def _initialize(role: Role, wait: float, failures: list[Exception]) -> None:
    import jax

    # On CPUs a process may have several devices; on GPUs the cluster assigns devices to processes.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # signals are AgreedStop's
    try:
        jax.distributed.initialize(
            role.address,
            role.processes,
            role.process,
            initialization_timeout=int(2 * wait + 60),
            heartbeat_timeout_seconds=_JAX_SILENCE_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
        _meet_on_the_way_to_the_first()
    except Exception as error:
        failures.append(error)


def _meet_on_the_way_to_the_first() -> None:
    """Has CPUs' collectives listen where the other processes come.

    By itself gloo listens where the machine's name leads, which is 127.0.1.1 on many: no other machine's process would
    find it. JAX has no option for it, but a factory of the CPU's client, which is not called before the first use.
    """
    from jax._src import xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    from jrec.run.addresses import family_of, own_address
    from jrec.run.processes import key_values

    address = own_address()
    try:
        socket.create_server((address, 0), family=family_of(address)).close()
    except OSError:  # another machine's, which forwards to this one: here the machine's name has to do
        return
    gloo = _jax.make_gloo_tcp_collectives(distributed_client=key_values(), hostname=address)
    xla_bridge.register_backend_factory(
        "cpu", functools.partial(xla_bridge.make_cpu_client, gloo), priority=0, fail_quietly=False
    )


def _check_port(role: Role) -> None:
    """Names a port that is taken, where JAX would only say that its server did not start."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", role.port))  # without listening: nobody takes it for process 0
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "another program uses that port" if taken else error.strerror or str(error)
            raise ProcessError(
                f"process 0 cannot listen at port {role.port} of --coordinator {role.address}: {why}; choose another"
                " port, the same for all processes"
            ) from error


def _wait_for_first(role: Role, wait: float) -> None:
    deadline = time.monotonic() + wait
    while (error := _refusal_of(role)) is not None:
        if isinstance(error, socket.gaierror):
            raise ConfigError(
                f"--coordinator is {role.address}, but there is no host {role.host!r} ({error.strerror}); give the name"
                " or the number of process 0's machine"
            ) from error
        if time.monotonic() > deadline:
            raise ProcessError(
                f"process 0 was not reached at {role.address} within {wait:g} s ({error.strerror or error}); start"
                " it, or give its address by --coordinator"
            ) from error
        # Whatever else the error is, process 0 may not have started yet.
        time.sleep(0.1)


def _refusal_of(role: Role) -> OSError | None:
    """Why nothing listens at process 0's address, or None."""
    try:
        socket.create_connection((role.host, role.port), timeout=5.0).close()
    except OSError as error:
        return error
    return None


def _absent(role: Role, wait: float) -> str:
    peers = [str(number) for number in range(role.processes) if number != role.process]
    who = f"process {peers[0]}" if len(peers) == 1 else f"one or more of the processes {', '.join(peers)}"
    return (
        f"{who} of {role.processes} did not come to {role.address} within {wait:g} s; start all of them at about the"
        " same time, each with a --process of its own, and look at their output"
        f"{'. If another program has that port, choose another one' if role.process else ''}"
    )


def compare(role: Role, facts: Mapping[str, str], *, refusal: str | None = None) -> None:
    """Tells the other processes, which have joined, what this one is about to run; process 0 compares.

    Args:
      role: Which process this is.
      facts: Values that must be equal in all processes, as text by name.
      refusal: Why this process cannot start, to tell the others; None if it can.

    Raises:
      ConfigError: In all processes, if facts differ or a process refused.
      ProcessError: If a process says nothing.
    """
    from jrec.run.processes import key_values, published

    own = {"facts": {"--processes": str(role.processes), **facts}, "refusal": refusal}
    key_values().key_value_set(f"jrec/facts/{role.process}", json.dumps(own))
    if role.process == 0:
        said = [json.loads(published(f"jrec/facts/{number}", _ANSWER_SECONDS)) for number in range(role.processes)]
        # A refusal first: who refuses tells no facts, which would all differ.
        refused = next((number for number, statement in enumerate(said) if statement["refusal"] is not None), None)
        if refused is not None:
            answer = f"process {refused} of {role.processes} cannot start: {said[refused]['refusal']}"
        else:
            answer = differences([statement["facts"] for statement in said]) or ""
        key_values().key_value_set("jrec/answer", answer)
    # Longer than process 0 waits for the facts of a process, so that its own error comes first.
    if answer := published("jrec/answer", 2 * _ANSWER_SECONDS):
        raise ConfigError(printable(answer))


def printable(text: str) -> str:
    """What another process said, as one line without what a terminal would act on."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def differences(facts: Sequence[Mapping[str, str]]) -> str | None:
    """Which facts differ, with their values and the processes that have them; None if all agree.

    Args:
      facts: By process, values as text by name.
    """
    names = dict.fromkeys(name for of_process in facts for name in of_process)
    different = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for process, of_process in enumerate(facts):
            holders.setdefault(of_process.get(name, _ABSENT), []).append(process)
        if len(holders) > 1:
            said = [f"{value} in process {', '.join(map(str, where))}" for value, where in holders.items()]
            different.append(f"{name} is {' and '.join(said)}")
    if not different:
        return None
    more = len(different) - _MOST_DIFFERENCES
    listed = "; ".join(different[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    return f"the processes would not train one model: {listed}. Start all of them alike, with the same data"
