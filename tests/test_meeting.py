"""Processes meet, compare what they are about to do, and learn that another one is gone; here as threads."""

import contextlib
import queue
import socket
import threading
import time

import pytest

from jrec.errors import ConfigError, ProcessError
from jrec.train import meeting
from jrec.train.lifeline import Lifeline
from jrec.train.meeting import Role, differences, meet

FACTS = {"seed": "0", "optimizer.learning_rate": "0.1"}


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def together(port, facts, *, refusals=None, wait=10.0, numbers=None):
    """What ``meet`` gives or raises in each of some processes, and how long all took."""
    count = len(facts)
    results: list = [None] * count

    def one(place):
        number = place if numbers is None else numbers[place]
        role = Role(host="localhost", port=port, processes=count, process=number)
        try:
            results[place] = meet(role, facts[place], refusal=(refusals or {}).get(place), wait=wait)
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in range(count)]
    for thread in reversed(threads):  # process 0 comes last
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
    return results


@contextlib.contextmanager
def met(port, count):
    found = together(port, [FACTS] * count)
    assert all(isinstance(of, meeting.Meeting) for of in found), found
    yield found
    for of in found:
        of.free_port()
        for line in of.lines.values():
            line.close()


def test_processes_that_agree_meet_and_free_the_port(port):
    with met(port, 3) as found:
        assert [sorted(of.lines) for of in found] == [[1, 2], [0], [0]]
        found[0].free_port()
        socket.create_server(("", port)).close()  # as JAX's coordinator will, with the connections open


def test_a_difference_names_the_key_the_values_and_the_processes_in_all(port):
    facts = [FACTS, FACTS | {"optimizer.learning_rate": "0.2"}, FACTS | {"extra": "1"}]
    for error in together(port, facts):
        assert isinstance(error, ConfigError)
        assert "optimizer.learning_rate is 0.1 in process 0, 2 and 0.2 in process 1" in str(error)
        assert "extra is not set in process 0, 1 and 1 in process 2" in str(error)


def test_many_differences_are_not_all_listed():
    said = differences([{}, {f"key{n}": "1" for n in range(9)}])
    assert said is not None
    assert said.count("process 1") == 5
    assert "and 4 more" in said


def test_a_process_that_cannot_start_ends_all(port):
    for error in together(port, [FACTS] * 2, refusals={1: "there is no such file"}):
        assert "process 1 of 2 cannot start: there is no such file" in str(error)


def test_processes_of_other_numbers_are_refused_in_all(port):
    for error in together(port, [FACTS] * 3, numbers=[0, 1, 1], wait=3.0):
        assert "--process 1" in str(error)


def test_who_does_not_come_is_named(port):
    role = Role(host="localhost", port=port, processes=3, process=0)
    with pytest.raises(ConfigError, match=r"process\(es\) 1, 2 of 3 did not come to localhost:\d+ within 0.3 s"):
        meet(role, FACTS, wait=0.3)
    with pytest.raises(ProcessError, match=r"process 0 was not reached at localhost:\d+ within 0.3 s"):
        meet(Role(host="localhost", port=port, processes=3, process=1), FACTS, wait=0.3)


def test_a_port_that_another_program_has_is_said_to_be(port):
    with socket.create_server(("", port)) as other:
        with pytest.raises(ProcessError, match=r"another program uses that port; choose another port"):
            meet(Role(host="localhost", port=port, processes=2, process=0), FACTS)

        def answer():
            connection, _ = other.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProcessError, match=r"is no process 0 of a run"):
            meet(Role(host="localhost", port=port, processes=2, process=1), FACTS)
        thread.join()


def test_other_programs_at_the_port_do_no_harm(port):
    def scan():
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=5) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")

    timer = threading.Timer(0.05, scan)
    timer.start()
    with met(port, 2):
        timer.join()


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


def test_an_unknown_host_is_named():
    with pytest.raises(ConfigError, match=r"there is no host 'no\.such\.host\.invalid'"):
        meet(Role(host="no.such.host.invalid", port=7000, processes=2, process=1), FACTS)


def lifelines(found, **options):
    ends = [queue.Queue() for _ in found]
    return [Lifeline(of, end=end.put, **options) for of, end in zip(found, ends, strict=True)], ends


def test_a_process_that_says_nothing_ends_all_others(port):
    with met(port, 3) as found:
        _, ends = lifelines(found[:2], silence=3.0, grace=0.1)  # process 2 is stopped
        for end in ends:
            line = end.get(timeout=10)
            assert "process 2 of 3 has not answered for 3 s" in line
            assert "--resume" in line


def test_a_process_that_dies_is_known_at_once_and_its_reason_told(port):
    with met(port, 3) as found:
        lines, ends = lifelines(found, grace=0.2)
        began = time.monotonic()
        lines[1].fail("the loss became nan")
        found[1].lines[0].close()
        for end in (ends[0], ends[2]):
            assert "process 1 of 3 ended with an error: the loss became nan" in end.get(timeout=5)
        assert time.monotonic() - began < 3
        assert "process 1 of 3" in (lines[2].lost() or "")
        assert ends[1].empty()


def test_processes_that_are_through_may_go(port):
    with met(port, 2) as found:
        lines, ends = lifelines(found, grace=0.0)
        lines[1].finish()
        time.sleep(0.2)
        found[1].lines[0].socket.shutdown(socket.SHUT_RDWR)
        time.sleep(0.5)
        assert lines[0].lost() is None
        assert all(end.empty() for end in ends[:1])
