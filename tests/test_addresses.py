"""Where processes reach each other, for machines whose names lead to themselves, and for several on a machine."""

import threading
import types

import pytest

from jrec.run import addresses

HERE = ("127.0.0.1", "127.0.1.1")  # the way from process 0's machine to itself, where its name leads to 127.0.1.1


class Store(dict):
    def key_value_set(self, key, value):
        assert key not in self
        self[key] = value


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        # By process: what it sees of itself and of process 0.
        ([HERE, HERE], ["127.0.1.1", "127.0.1.1"]),
        ([HERE, ("10.0.0.2", "10.0.0.1")], ["10.0.0.1", "10.0.0.2"]),
        ([HERE, ("10.0.0.2", "10.0.0.1"), HERE], ["10.0.0.1", "10.0.0.2", "10.0.0.1"]),
        ([HERE, HERE, ("10.0.0.2", "10.0.0.1")], ["10.0.0.1", "10.0.0.1", "10.0.0.2"]),
        ([("10.0.0.1", "10.0.0.1"), ("10.0.0.2", "10.0.0.1")], ["10.0.0.1", "10.0.0.2"]),
        ([("::1", "::1"), ("fd00::2", "fd00::1")], ["fd00::1", "fd00::2"]),
        ([HERE], ["127.0.1.1"]),
    ],
)
def test_addresses_are_those_by_which_the_others_come(monkeypatch, ways, expected):
    store, own = Store(), threading.local()

    def published(key, seconds):
        assert key in store or seconds > 0
        for _ in range(2000):
            if key in store:
                return store[key]
            threading.Event().wait(0.005)
        raise AssertionError(f"nobody set {key}")

    monkeypatch.setattr(addresses, "key_values", lambda: store)
    monkeypatch.setattr(addresses, "published", published)
    monkeypatch.setattr(addresses, "coordinator_host", lambda: "first")
    monkeypatch.setattr(
        addresses, "joined", lambda: types.SimpleNamespace(process_id=own.process, num_processes=len(ways))
    )
    monkeypatch.setattr(addresses, "_route", lambda host: ways[own.process])
    answers = {}

    def run(process):
        own.process = process
        answers[process] = addresses.own_address.__wrapped__()

    threads = [threading.Thread(target=run, args=(process,)) for process in range(len(ways))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers.get(process) for process in range(len(ways))] == expected
    assert [addresses.is_local(address) for address in ("127.0.1.1", "::1", "10.0.0.1")] == [True, True, False]
