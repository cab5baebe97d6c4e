"""Exports and deltas damaged at random: refused by an error that names the file, or scored to the same bits.

Raw mutations change bytes of any file. Structural ones change a value of ``manifest.json`` or ``schema.json``, or bytes
of an array, and compute all checksums anew, as a program with a defect would write them. Then numbers may be others, so
that of arrays (and of how the schema says that values were prepared) only the kind of the outcome is checked.
"""

import contextlib
import hashlib
import json
import random
import warnings

import mutations
import numpy as np
import pytest
from export_cases import SIZES, made_exports, sealed

from jrec import serving
from jrec.errors import JrecError
from jrec.serving.format import MANIFEST, identity

COUNT, SLOW = 500, 5000
COLUMNS = {
    "price": [0.5, 3.0, np.nan, 7.25],
    "user": ["u1", "u2", "unknown", "u7"],
    "item": ["i1", "i2", "i3", "unknown"],
    "history": [["i1", "i2", "i3"], [], ["i5", "unknown"], ["i1"]],
    "strengths": [[1.0, 0.5, 2.0], [], [1.0, 0.25], [0.125]],
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return made_exports(tmp_path_factory.mktemp("exports"), deltas=("delta1",))


@pytest.fixture(scope="module", autouse=True)
def _compiled(exports):
    """What is compiled of a program is shared while a model uses it."""
    return serving.load(exports / "whole", batch_sizes=SIZES[:1])


def score(folder, kind):
    """Scores of raw columns, by the export alone or after its delta."""
    deltas = [folder / "delta1"] if kind == "delta" else []
    return serving.load(folder / "whole", deltas, batch_sizes=SIZES[:1])(COLUMNS)


def resealed(rng, folder, path, content):
    """Files by path, of which that at the path is damaged and all checksums fit; and whether scores stay the same."""
    text = json.loads((folder / MANIFEST).read_text())
    strict, files = True, {}
    if path.name == MANIFEST:
        text = mutations.change(rng, text)
    elif path.name == "schema.json":
        before, tree = json.loads(content), mutations.change(rng, json.loads(content))
        strict = tree.get("provenance") == before["provenance"]
        with contextlib.suppress(ValueError, RecursionError):
            tree = sealed(tree)
        files[path] = mutations.as_json(tree)
    else:
        strict, files[path] = False, rng.choice(mutations.RAW)(rng, content)
    if isinstance(text.get("files"), dict) and files:
        text["files"][path.relative_to(folder).as_posix()] = hashlib.sha256(files[path]).hexdigest()
    with contextlib.suppress(ValueError, RecursionError):
        text["id"] = identity({k: v for k, v in text.items() if k not in ("format", "version", "sha256")})
        text = sealed(text)
    return files | {folder / MANIFEST: mutations.as_json(text)}, strict


def outcome(folder, kind, expected, names, *, strict):
    """None where the damage was refused, or changed nothing that counts; else what happened instead."""
    try:
        with mutations.bounded(), warnings.catch_warnings():
            if not strict:  # numbers that were never trained overflow
                warnings.simplefilter("ignore", RuntimeWarning)
            scores = score(folder, kind)
    except (JrecError, ValueError) as error:
        named = any(name in str(error) for name in names) or (not strict and isinstance(error, JrecError))
        return None if named else f"an error that names no file: {error}"
    except (Exception, MemoryError) as error:
        return f"{type(error).__module__}.{type(error).__name__}: {str(error)[:300]}"
    if not strict:
        return None if scores.shape == expected.shape else "scores of another shape"
    return None if np.array_equal(scores, expected) else "other scores"


def attack(folder, kind, count, seed):
    """The mutations that were neither refused nor harmless."""
    rng, bad = random.Random(f"{kind} {seed}"), []
    damaged = folder / ("whole" if kind == "whole" else "delta1")
    expected = score(folder, kind)
    files = sorted(path for path in damaged.rglob("*") if path.is_file())
    texts, arrays = ([path for path in files if path.suffix == suffix] for suffix in (".json", ".npy"))
    names = [str(folder), *(path.name for path in files)]
    for number in range(count):
        path = rng.choice((rng.choice(files), rng.choice(texts), rng.choice(texts), rng.choice(arrays)))
        content = path.read_bytes()
        if path.suffix in (".json", ".npy") and rng.random() < 0.7:
            changed, strict = resealed(rng, damaged, path, content)
        else:
            changed, strict = {path: rng.choice(mutations.RAW)(rng, content)}, True
        before = {place: place.read_bytes() for place in changed}
        try:
            for place, new in changed.items():
                place.write_bytes(new)
            found = outcome(folder, kind, expected, names, strict=strict)
        finally:
            for place, old in before.items():
                place.write_bytes(old)
        if found is not None:
            bad.append(f"{kind}, mutation {number} of {path.name} ({'strict' if strict else 'resealed'}): {found}")
    return bad


@pytest.mark.parametrize("kind", ["whole", "delta"])
def test_damaged_exports_are_refused_or_scored_the_same(exports, kind):
    bad = attack(exports, kind, COUNT // 2, seed=0)
    assert not bad, "\n".join(bad)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "delta"])
def test_many_damaged_exports_are_refused_or_scored_the_same(exports, kind):
    bad = attack(exports, kind, SLOW // 2, seed=1)
    assert not bad, "\n".join(bad)
