"""Processes that join JAX, compare what they are about to do, and learn that another one is gone."""

import contextlib
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import types

import jax
import pytest

from jrec.app.commands import eval as eval_command
from jrec.app.commands.processes import Company
from jrec.app.processes import lifeline
from jrec.app.processes.lifeline import Lifeline
from jrec.app.processes.meeting import Role, differences, join
from jrec.app.processes.mesh_processes import one_of_many
from jrec.cli import main
from jrec.errors import ConfigError, ProcessError

FACTS = {"seed": "0", "optimizer.learning_rate": "0.1"}


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


# Who is who.


@pytest.mark.parametrize(
    ("address", "processes", "process", "said"),
    [
        ("localhost", 2, 0, "give HOST:PORT"),
        ("localhost:http", 2, 0, "give HOST:PORT"),
        ("localhost:70000", 2, 0, "give HOST:PORT"),
        ("localhost:7000", 2, 2, "--process is 2; processes are numbered from 0 to --processes - 1 = 1"),
        ("localhost:7000", 0, 0, "--processes is 0"),
    ],
)
def test_roles_that_make_no_sense(address, processes, process, said):
    with pytest.raises(ConfigError, match=said):
        Role.of(address, processes, process)


# Joining.


def test_a_port_that_another_program_has_is_said_to_be():
    with socket.create_server(("", 0)) as other:
        role = Role(host="localhost", port=other.getsockname()[1], processes=2, process=0)
        with pytest.raises(ProcessError, match=r"another program uses that port; choose another port"):
            join(role)


def test_an_unknown_host_is_named():
    with pytest.raises(ConfigError, match=r"there is no host 'no\.such\.host\.invalid'"):
        join(Role(host="no.such.host.invalid", port=7000, processes=2, process=1))


def test_process_0_that_does_not_come_is_named(port):
    with pytest.raises(ProcessError, match=r"process 0 was not reached at localhost:\d+ within 0.3 s"):
        join(Role(host="localhost", port=port, processes=2, process=1), wait=0.3)


JOINING = """
import os, sys
from jrec.errors import JrecError
from jrec.app.processes.meeting import Role, join
port, processes, process, wait = map(int, sys.argv[1:])
try:
    join(Role(host="localhost", port=port, processes=processes, process=process), wait=wait)
except JrecError as error:
    print(error, flush=True)
os._exit(0)
"""


def joining(port, processes, process, wait, **environment):
    command = [sys.executable, "-c", JOINING, *map(str, (port, processes, process, wait))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env={**os.environ, **environment}, **pipes)


def test_who_does_not_come_is_named(port):
    alone = joining(port, 2, 0, 1).communicate(timeout=60)[0]
    assert re.fullmatch(r"process 1 of 2 did not come to localhost:\d+ within 1 s; start all .*\n", alone), alone


def test_one_that_waits_learns_that_process_0_has_given_up(port):
    waiting = joining(port, 3, 1, 100)
    first = joining(port, 3, 0, 5).communicate(timeout=60)[0]
    assert "one or more of the processes 1, 2 of 3 did not come" in first
    said = waiting.communicate(timeout=60)[0]
    assert re.fullmatch(r"process 0 at localhost:\d+ ended before all processes had come; look .*\n", said), said


CERTIFICATES = """
openssl req -x509 -newkey rsa:2048 -nodes -keyout authority.key -out authority.pem -days 2 -subj /CN=authority
openssl req -newkey rsa:2048 -nodes -keyout key.pem -out request -subj /CN=localhost
echo subjectAltName=DNS:localhost > extension
openssl x509 -req -in request -CA authority.pem -CAkey authority.key -CAcreateserial -out chain.pem -days 2 \\
    -extfile extension
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates by openssl")
def test_with_certificates_only_their_holders_join(port, tmp_path):
    subprocess.run(["bash", "-ec", CERTIFICATES], cwd=tmp_path, check=True, capture_output=True)
    files = {"CERT": "chain.pem", "KEY": "key.pem", "CA": "authority.pem"}
    own = {f"JAX_MTLS_{kind}_FILE": str(tmp_path / name) for kind, name in files.items()}
    holders = [joining(port, 2, process, 60, **own) for process in range(2)]
    assert [holder.communicate(timeout=100)[0] for holder in holders] == ["", ""]
    holder, stranger = joining(port, 2, 0, 5, **own), joining(port, 2, 1, 4)
    assert "process 1 of 2 did not come" in holder.communicate(timeout=60)[0]
    assert "process 0 of 2 did not come" in stranger.communicate(timeout=60)[0]


# Comparing.


def test_a_difference_names_the_key_the_values_and_the_processes():
    said = differences([FACTS, FACTS | {"optimizer.learning_rate": "0.2"}, FACTS | {"extra": "1"}])
    assert said is not None
    assert "optimizer.learning_rate is 0.1 in process 0, 2 and 0.2 in process 1" in said
    assert "extra is not set in process 0, 1 and 1 in process 2" in said
    assert differences([FACTS] * 3) is None


def test_many_differences_are_not_all_listed():
    said = differences([{}, {f"key{n}": "1" for n in range(9)}])
    assert said is not None
    assert said.count("process 1") == 5
    assert "and 4 more" in said


# Watching, here in threads and with a dictionary for JAX's key-value store.


class Store(dict):
    """The part of JAX's distributed client that the lifeline uses; `stopped` holds calls, as a stopped process 0."""

    def __init__(self):
        super().__init__()
        self.going = threading.Event()
        self.going.set()

    def key_value_set(self, key, value, allow_overwrite=False):
        self.going.wait()
        assert allow_overwrite
        self[key] = value

    def key_value_dir_get(self, prefix):
        self.going.wait()
        return [(key, value) for key, value in self.copy().items() if key.startswith(prefix)]


class Watching(Lifeline):
    """Notes the line that it would end the process with."""

    def __init__(self, process, processes, store, **options):
        self.lines = queue.Queue()
        role = Role(host="localhost", port=7000, processes=processes, process=process)
        super().__init__(role, store, **{"beat": 0.05, "silence": 2.0, "grace": 0.1, **options})

    def end(self, line):
        self.lines.put(line)


def test_a_process_that_says_nothing_ends_all_others():
    store = Store()
    for one in [Watching(process, 3, store) for process in (0, 1)]:
        line = one.lines.get(timeout=10)
        assert "process 2 of 3 has not answered for 2 s" in line
        assert "--resume" in line


def test_process_0_that_is_stopped_is_the_one_to_blame():
    store = Store()
    others = [Watching(process, 3, store) for process in (1, 2)]
    Watching(0, 3, store)
    time.sleep(0.5)
    store.going.clear()
    for one in others:
        assert "process 0 of 3 has not answered for 2 s" in one.lines.get(timeout=10)


def test_the_reason_of_a_process_that_fails_is_told_at_once():
    store = Store()
    zero, one, two = (Watching(process, 3, store) for process in range(3))
    began = time.monotonic()
    store.key_value_set("jrec/life/seven", "failed", allow_overwrite=True)  # of no process
    one.fail("the loss\x1b[2J became\nnan")
    for other in (zero, two):
        assert "process 1 of 3 ended with an error: the loss?[2J became nan" in other.lines.get(timeout=5)
    assert time.monotonic() - began < 3
    assert (two.lost() or "").startswith("process 1 of 3")
    assert one.lines.empty()


def test_a_process_that_another_one_took_along_names_that_one():
    store = Store()
    zero, one = (Watching(process, 3, store) for process in range(2))
    one.fail("process 2 of 3 has not answered for 5 s")
    assert zero.lines.get(timeout=5).startswith("process 2 of 3 has not answered for 5 s, so this one, process 0,")


def test_after_a_collective_failed_the_silent_one_is_named_sooner():
    store = Store()
    zero, two = Watching(0, 3, store, silence=60.0), Watching(2, 3, store, silence=60.0)
    time.sleep(0.2)
    assert zero.lost() is None
    assert (zero.lost(1.0) or "").startswith("process 1 of 3 has not answered for 1 s")
    assert two.lost() is None


def test_a_silent_process_is_told_from_one_that_failed(monkeypatch):
    """The exit code says whether the same command, repeated, may succeed; also where the news comes by another one."""
    ended = queue.Queue()
    monkeypatch.setattr(lifeline.os, "_exit", ended.put)
    monkeypatch.setattr(Lifeline, "leave", lambda self: None)
    for why, code in (
        ("process 2 of 3 has not answered for 5 s, as a killed or stopped one does", 75),
        ("the disk is full: process 2 of 3 has not answered for 5 s", 2),
        ("process 2 of 3 lost another one: RESOURCE_EXHAUSTED", 2),
    ):
        store, options = Store(), {"beat": 0.05, "silence": 20.0, "grace": 0.1}
        Lifeline(Role(host="localhost", port=7000, processes=3, process=0), store, **options)
        Watching(1, 3, store).fail(why)
        assert ended.get(timeout=5) == code


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        ("process 1 of 2 has not answered for 5 s, as a killed or stopped one does", 75),
        ("process 1 of 2 ended with an error: the disk is full", 2),
        (None, 2),
    ],
)
def test_the_command_ends_with_the_code_of_what_it_lost(monkeypatch, capsys, lost, code):
    company = Company(Role(host="localhost", port=7000, processes=2, process=0))
    company._joining, company._lifeline = True, types.SimpleNamespace(lost=lambda seconds: lost, fail=lambda why: None)

    def run(args):
        error = ProcessError("process 0 of 2 lost another one: Gloo")
        raise company.failed(error) or error

    monkeypatch.setattr(eval_command, "run", run)
    assert main(["eval", "run", "data"]) == code
    assert company._code == code
    assert (lost or "lost another one: Gloo") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        ("UNKNOWN: Gloo context initialization failed: Connection refused", "machines reach each other at all ports"),
        ("UNKNOWN: Gloo all-reduce failed: Connection closed by peer", "--resume goes on from the last checkpoint"),
    ],
)
def test_a_network_that_lets_nobody_through_is_told_from_a_process_that_is_gone(monkeypatch, failure, advice):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ProcessError, match=advice) as raised, one_of_many():
        raise jax.errors.JaxRuntimeError(failure)
    assert failure in str(raised.value)


def test_processes_that_are_through_may_go():
    store = Store()
    zero, one = Watching(0, 2, store, silence=0.5), Watching(1, 2, store)
    one.finish()
    with contextlib.suppress(queue.Empty):
        pytest.fail(zero.lines.get(timeout=1.5))
    assert zero.lost() is None


def test_process_0_leaves_last():
    """JAX's coordinator is in it, without which JAX would end the others by a signal."""
    store = Store()
    zero, one = Watching(0, 2, store, grace=60.0), Watching(1, 2, store)
    zero.fail("the disk is full")
    leaving = threading.Thread(target=zero.leave)
    leaving.start()
    one.lines.get(timeout=5)
    time.sleep(0.5)
    assert leaving.is_alive()
    one.leave()
    leaving.join(5)
    assert not leaving.is_alive()
