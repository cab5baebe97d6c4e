"""Rows of host memory that several processes share: who has them, and where a batch finds them."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from jrec.errors import ProcessError
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.run.placement.host_owners import ALONE, BLOCK_ROWS, HostOwners
from jrec.run.placement.peers import _HELLO, Closed, Peers, _accept, _listen


def stack_of(rows):
    tables = [TableConfig(name="t", rows=rows, dim=4)]
    return EmbeddingLayout.build(tables, [FeatureConfig(name="t", table="t")], planned=True).members[0]


def some_rows(rng, stack):
    return np.unique(rng.integers(0, stack.rows, rng.integers(0, 60)))


def exchanges(processes):
    """What every process has to talk to the others."""
    ends = {p: {} for p in range(processes)}
    for p in range(processes):
        for q in range(p):
            ends[p][q], ends[q][p] = socket.socketpair()
    return [Peers(p, ends[p]) for p in range(processes)]


def together(peers, function):
    """The results of ``function(process, its exchange)`` for all processes at the same time, errors among them."""
    results = {}

    def run(process):
        try:
            results[process] = function(process, peers[process])
        except (ProcessError, Closed) as error:
            results[process] = error

    threads = [threading.Thread(target=run, args=(process,)) for process in range(len(peers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[process] for process in range(len(peers))]


def closed(peers):
    for one in peers:
        one.close()


# Arrays between processes.


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_every_process_gets_what_the_others_sent(processes):
    rng, peers = np.random.default_rng(processes), exchanges(processes)
    for _ in range(3):
        sent = [
            [
                [rng.integers(0, 2**31, rng.integers(0, 9), dtype) for dtype in (np.int32, np.int64)]
                for _ in range(processes)
            ]
            for _ in range(processes)
        ]
        sent[0][1][0] = rng.integers(0, 2**31, 400_000, np.int32)  # more than sockets hold
        sent[1][0][1] = rng.integers(0, 2**62, 400_000, np.int64)
        came = together(peers, lambda p, one, sent=sent: one.exchange(sent[p]))
        for p in range(processes):
            for q in range(processes):
                for expected, found in zip(sent[q][p], came[p][q], strict=True):
                    assert found.dtype == expected.dtype
                    np.testing.assert_array_equal(found, expected)
    counts = [rng.integers(0, 100, (3, 7)) for _ in range(processes)]
    for most in together(peers, lambda p, one: one.most(counts[p])):
        np.testing.assert_array_equal(most, np.max(counts, axis=0))
    closed(peers)


def test_processes_that_end_or_are_out_of_step_are_named():
    peers = exchanges(3)
    peers[1]._round = 7
    errors = together(peers, lambda p, one: one.exchange([[], [], []]))
    says = "process 1 is at round 7 of an exchange, but this one, process 0, at round 0: they do not read the same"
    assert says in str(errors[0])
    closed(peers)
    peers = exchanges(3)
    peers[2].close()
    errors = together(peers, lambda p, one: one.exchange([[], [], []]))
    for error in errors[:2]:
        assert "process 2 of 3 ended while batches were prepared; look at its output" in str(error)
    assert isinstance(errors[2], Closed)
    closed(peers)


def test_a_wait_ends_when_the_exchange_is_closed():
    first, second = exchanges(2)
    timer = threading.Timer(0.1, first.close)
    timer.start()
    with pytest.raises(Closed):
        first.exchange([[], []])
    timer.join()
    second.close()


# Who has a row.


@pytest.mark.parametrize(("rows", "processes"), [(1, 2), (85, 2), (1000, 3), (700_001, 4), (50_000_000, 2)])
def test_every_row_has_one_process_and_ranges_are_those_rows(rows, processes):
    stack, rng = stack_of(rows), np.random.default_rng(rows)
    cuts = np.unique(rng.integers(0, rows + 1, 8))
    ranges = np.stack([cuts[:-1], cuts[1:]], axis=1)[::2] if cuts.size > 1 else np.array([[0, rows]])
    some = np.unique(rng.integers(0, rows, 5000))
    inside = ((some[:, None] >= ranges[:, 0]) & (some[:, None] < ranges[:, 1])).any(axis=1)
    total = 0
    for process in range(processes):
        owners = HostOwners(processes=processes, process=process, devices=2)
        mine = owners.ranges(stack, ranges)
        assert (mine[:, 1] > mine[:, 0]).all()
        assert (mine[1:, 0] >= mine[:-1, 1]).all()
        total += int(np.diff(mine).sum())
        found = (
            ((some[:, None] >= mine[:, 0]) & (some[:, None] < mine[:, 1])).any(axis=1)
            if mine.size < 10_000
            else (inside & (owners.of(stack, some) == process))
        )
        np.testing.assert_array_equal(found, inside & (owners.of(stack, some) == process))
    assert total == int(np.diff(ranges).sum())
    if rows >= 16 * processes * BLOCK_ROWS:
        assert (np.diff(owners.of(stack, np.arange(BLOCK_ROWS))) == 0).all()
    np.testing.assert_array_equal(ALONE.ranges(stack, ranges), ranges)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_that_ask_each_other_find_what_one_that_knows_all_finds(processes):
    rng, peers = np.random.default_rng(processes), exchanges(processes)
    stacks = {name: stack_of(rows) for name, rows in (("a", 900), ("b", 5), ("c", 40_000))}
    owners = [HostOwners(processes=processes, process=p, devices=3) for p in range(processes)]
    for _ in range(4):
        asked = [
            {
                n: np.unique(rng.integers(0, s.rows, rng.integers(0, 60))).astype(s.address_dtype)
                for n, s in stacks.items()
            }
            for _ in range(processes)
        ]
        every = {name: np.unique(np.concatenate([of[name] for of in asked])) for name in stacks}
        found = together(peers, lambda p, one, asked=asked: owners[p].placed_by_all(stacks, asked[p], one))
        lines = {name: max(of[name][2].lines for of in found) for name in stacks}
        for p in range(processes):
            for name, stack in stacks.items():
                device, line, read = owners[p].whole(stack, every[name])
                where = np.searchsorted(every[name], asked[p][name])
                np.testing.assert_array_equal(found[p][name][0], device[where])
                np.testing.assert_array_equal(found[p][name][1], line[where])
                np.testing.assert_array_equal(found[p][name][2].addresses, read.addresses)
                assert found[p][name][2].addresses.dtype == stack.address_dtype
                assert read.lines == lines[name]
                # Every row has a place of its own, among the devices of the process that reads it.
                assert np.unique(np.stack([device, line]), axis=1).shape[1] == every[name].size
                here = device // 3 == p
                np.testing.assert_array_equal(every[name][here], read.addresses)
                np.testing.assert_array_equal(read.addresses[line[here] * 3 + device[here] % 3], read.addresses)
                assert (line < read.lines).all()
    closed(peers)


# Connections of processes.


def test_a_stranger_takes_no_process_s_place():
    token, connections = bytes(range(16)), {}
    with _listen("127.0.0.1", backlog=8) as listener:
        place = listener.getsockname()
        assert place[0] == "127.0.0.1"

        def call(said):
            caller = socket.create_connection(place, timeout=5)
            caller.sendall(said)
            return caller

        strangers = [call(said) for said in (_HELLO.pack(bytes(16), 1, 0), b"GET / HTTP/1.1\r\n\r\n" * 3)]
        other_place = call(_HELLO.pack(token, 2, 0))
        own = call(_HELLO.pack(token, 1, 0))
        _accept(listener, token, {(1, 0)}, connections, 5.0)
        assert list(connections) == [(1, 0)]
        assert connections[1, 0].getpeername() == own.getsockname()
        for refused in (*strangers, other_place):
            with contextlib.suppress(ConnectionResetError):
                assert refused.recv(1) == b""
        for end in (*strangers, other_place, own, connections[1, 0]):
            end.close()


def test_a_process_may_say_who_it_is_in_pieces():
    token, connections = bytes(range(16)), {}
    hello = _HELLO.pack(token, 1, 0)
    with _listen("127.0.0.1", backlog=8) as listener:
        own = socket.create_connection(listener.getsockname(), timeout=5)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.sendall(hello[:10])
        later = threading.Timer(0.2, own.sendall, [hello[10:]])
        later.start()
        _accept(listener, token, {(1, 0)}, connections, 5.0)
        assert connections[1, 0].getpeername() == own.getsockname()
        later.join()
        for end in (own, connections[1, 0]):
            end.close()


def test_a_listener_at_an_address_that_is_forwarded_takes_any():
    with _listen("192.0.2.1", backlog=1) as listener:  # of documentation: no machine has it
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
