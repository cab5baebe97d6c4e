"""Damage for fuzz targets: of bytes as they are, and of the values inside JSON; and bounds for reading it."""

import contextlib
import copy
import json
import math
import pathlib
import random
import resource
import signal
from collections.abc import Iterator
from typing import Any

NUMBERS = (0, -1, 1, 2**31, 2**32, 2**62, 2**63, -(2**63), 10**400, 4.5, -0.5, 1e308, math.nan, math.inf)
ODD = (None, True, False, "", "x", "../../etc/passwd", "\ud800", "n" * 10_000, [], {}, [[]], {"x": 1}, [None] * 100)
SECONDS = 20  # that reading a damaged file may take
ROOM = 4 << 30  # bytes of address space that it may ask for
BOMB = "BOMB"  # stands for 50,000 nested lists, which json.dumps could not write


def mutations(content: bytes, seed: int | str, count: int) -> Iterator[bytes]:
    """Yields ``count`` damaged copies of ``content``, all different from it; the same ones for the same seed."""
    rng = random.Random(f"bytes {seed}")
    for _ in range(count):
        while (damaged := rng.choice(RAW)(rng, content)) == content:
            pass
        yield damaged


def json_mutations(content: dict, seed: int | str, count: int) -> Iterator[dict]:
    """Yields ``count`` copies of JSON content with one value replaced, removed, added, renamed or doubled.

    They can hold what JSON or Unicode forbids (NaN, integers of 400 digits, halves of characters): seal a copy where
    that works, and write it by ``as_json``.
    """
    rng = random.Random(f"JSON {seed}")
    for _ in range(count):
        while as_json(damaged := change(rng, content)) == as_json(content):
            pass
        yield damaged


def as_json(content: Any) -> bytes:
    """The text of what ``json_mutations`` yields."""
    text = json.dumps(content).replace(f'"{BOMB}"', "[" * 50_000 + "]" * 50_000)
    return text.encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Ends the reading of damage that takes too long, and lets it fail where it asks for too much memory."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"reading took more than {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def flip(rng: random.Random, content: bytes) -> bytes:
    """Flips one bit, or three."""
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 3)) if content else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out) or b"\0"


def truncate(rng: random.Random, content: bytes) -> bytes:
    """Cuts the end off."""
    size = len(content)
    return content[: rng.choice((0, 1, size // 2, max(size - 1, 0), rng.randrange(size)))] if content else b"\0"


def overwrite(rng: random.Random, content: bytes) -> bytes:
    """Fills up to 64 bytes with zeros, ones or digits."""
    at, size = rng.randrange(len(content) + 1), rng.choice((1, 8, 64))
    filling = rng.choice((b"\0", b"\xff", b"9")) * size
    return (content[:at] + filling + content[at + size :])[: max(len(content), 1)]


def exchange(rng: random.Random, content: bytes) -> bytes:
    """Exchanges two pieces of up to 64 bytes."""
    size = max(1, min(64, len(content) // 4))
    a, b = sorted(rng.randrange(max(len(content) - size, 0) + 1) for _ in range(2))
    if b < a + size:
        return content[size:] + content[:size]
    return content[:a] + content[b : b + size] + content[a + size : b] + content[a : a + size] + content[b + size :]


def splice(rng: random.Random, content: bytes) -> bytes:
    """Puts a copy of a piece somewhere else, or leaves a piece out."""
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    if rng.random() < 0.5:
        return content[:a] + content[b:]
    at, piece = rng.randrange(len(content) + 1), content[a:b][:1000]
    return content[:at] + piece + content[at:]


def append(rng: random.Random, content: bytes) -> bytes:
    """Adds 1 or 100 bytes."""
    return content + rng.randbytes(rng.choice((1, 100)))


RAW = (flip, flip, flip, truncate, overwrite, exchange, splice, append)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value of nested JSON, containers too; of long lists, the first three items'."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for index in range(min(len(value), 3)):
            yield from places(value[index], (*path, index))


def change(rng: random.Random, tree: Any) -> Any:
    """A copy of a JSON object with one place changed."""
    tree = copy.deepcopy(tree)
    path = rng.choice([p for p in places(tree) if p])
    parent = tree
    for step in path[:-1]:
        parent = parent[step]
    key = path[-1]
    what = rng.choice(("number", "number", "odd", "odd", "delete", "rename", "add", "double", "bomb", "flip"))
    if what == "number":
        parent[key] = rng.choice(NUMBERS)
    elif what == "odd":
        parent[key] = copy.deepcopy(rng.choice(ODD))
    elif what == "delete":
        del parent[key]
    elif what == "rename" and isinstance(parent, dict):
        parent[str(key) + "s"] = parent.pop(key)
    elif what == "add" and isinstance(parent, dict):
        parent["unheard_of"] = 1
    elif what == "double" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    elif what == "flip" and isinstance(parent[key], int | float):
        parent[key] = -parent[key] if rng.random() < 0.5 else parent[key] + 1
    else:
        parent[key] = BOMB
    return tree
