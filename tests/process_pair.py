"""Two processes of two devices each that run one program, for tests of ``jrec.distribute``."""

import pathlib
import socket
import subprocess
import sys

import jax

PROCESSES = 2


def run_pair(program: str, folder: pathlib.Path) -> None:
    """Runs a program of this folder in two processes, with PORT PROCESS FOLDER, until both have ended well."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, pathlib.Path(__file__).with_name(program), str(port)]
    children = [
        subprocess.Popen([*command, str(process), str(folder)], stderr=subprocess.PIPE, text=True)
        for process in range(PROCESSES)
    ]
    for child in children:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors[-2000:]


def join_pair() -> tuple[int, pathlib.Path, jax.sharding.Mesh]:
    """Joins the other process; returns this one's number, the folder, and a mesh of all four devices."""
    port, process, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=PROCESSES, process_id=process)
    return process, folder, jax.make_mesh((4,), ("x",))
