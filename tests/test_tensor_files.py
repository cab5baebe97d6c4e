"""Files of tensors made by strangers: read to the bit, or refused by one message in little memory, and never run."""

import io
import json
import os
import pathlib
import pickletools
import random
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch_files
from tensor_file_process import outcomes
from torch_files import dictionary, integers, name, number, tensor, text, write, write_pickle

from jrec.app.imports import read_state_dict
from jrec.app.imports.torch_pickle import read_pickle
from jrec.errors import CheckpointError

MUTATIONS = 500  # of each format
ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)
ARRAYS = {
    "emb_l.0.weight": ARRAY,
    "bot_l.0.bias": np.arange(3, dtype=np.float16),
    "bfloat16": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "double": np.linspace(0, 1, 5),
    "long": np.arange(4) - 2,
    "empty": np.zeros((0, 4), np.float32),
}


def described(tensors):
    return {key: [str(a.dtype), list(a.shape), a.tobytes().hex()] for key, a in tensors.items()}


def refused(path, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        read_state_dict(path)
    assert str(path) in str(caught.value)


# What is read.


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("inside", [None, "state_dict"])
def test_files_of_every_protocol_are_read(tmp_path, protocol, inside):
    found = read_state_dict(torch_files.save(tmp_path / "a.pt", ARRAYS, inside=inside, protocol=protocol))
    assert list(found) == list(ARRAYS)
    assert described(found) == described(ARRAYS)
    assert not any(array.flags.writeable for array in found.values())


def test_both_formats_are_read_whatever_the_ending(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "a.pt", {"format": "pt", "dtype": "F32", "shape": "any"})
    torch_files.save(tmp_path / "a.safetensors", ARRAYS)
    assert described(read_state_dict(tmp_path / "a.pt")) == described(ARRAYS)
    assert described(read_state_dict(tmp_path / "a.safetensors")) == described(ARRAYS)


def test_many_tensors_take_no_file_descriptors(tmp_path):
    arrays = {str(n): np.full(2, n, np.float32) for n in range(40)}
    path = torch_files.save(tmp_path / "a.pt", arrays)
    descriptors = pathlib.Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    found = read_state_dict(path)
    assert len(list(descriptors.iterdir())) <= before + 1
    assert described(found) == described(arrays)


def test_uncomputed_crcs_are_not_compared(tmp_path):
    path = torch_files.save(tmp_path / "a.pt", ARRAYS)
    data = bytearray(path.read_bytes())
    for at in range(len(data)):  # torch.serialization.set_crc32_options(False) writes 0
        if (size := {b"PK\x03\x04": 14, b"PK\x01\x02": 16}.get(bytes(data[at : at + 4]))) is not None:
            data[at + size : at + size + 4] = bytes(4)
    path.write_bytes(data)
    assert described(read_state_dict(path)) == described(ARRAYS)


# Pickles that are refused.


@pytest.mark.parametrize(
    ("module", "attribute"),
    [("os", "system"), ("builtins", "eval"), ("posix", "system"), ("torch", "load"), ("numpy", "load")],
)
def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path, module, attribute):
    target = tmp_path / "touched"
    attack = name(module, attribute) + b"(" + text(f"touch {target}") + b"tR"
    refused(write(tmp_path / "a.pt", attack, {}), rf"asks for {module}.{attribute}, which is not run")
    inside = dictionary({"emb_l.0.weight": attack})
    refused(write(tmp_path / "b.pt", inside, {}), "which is not run")
    assert not target.exists()


def test_a_dotted_name_does_not_pass(tmp_path):
    stacked = b"\x80\x04\x8c\x0bcollections\x8c\x1dOrderedDict.__init__.__self__\x93"
    refused(write_pickle(tmp_path / "a.pt", stacked + b".", {}), "which is not run")


def test_no_file_changes_how_the_next_one_is_read(tmp_path):
    whole = torch_files.save(tmp_path / "a.pt", {"a": ARRAY})
    integers = np.arange(12, dtype=np.int32)
    storage = b"(" + text("storage") + name("torch", "IntStorage") + text("0") + text("cpu") + number(12) + b"tQ"
    dtype = storage + b"}" + text("itemsize") + number(4) + b"sb"
    poison = name("torch", "FloatStorage") + b"}" + text("dtype") + dtype + b"sb"
    attack = dictionary({"a": tensor("0", integers), "b": poison})
    try:
        refused(write(tmp_path / "b.pt", attack, {"0": integers}), "sets attributes of what has none")
    finally:
        assert described(read_state_dict(whole)) == described({"a": ARRAY})


def test_damaged_files_are_refused(tmp_path):
    whole = {"0": ARRAY}

    def of(opcodes, storages=whole, **options):
        return write(tmp_path / "a.pt", dictionary({"a": opcodes}), storages, **options)

    np.testing.assert_array_equal(read_state_dict(of(tensor("0", ARRAY)))["a"], ARRAY)
    refused(of(tensor("0", ARRAY, count=13)), "cut off")
    refused(of(tensor("0", ARRAY, first=1)), "passes a storage of 12")
    refused(of(tensor("0", ARRAY, strides=[1, 3])), "save contiguous tensors")
    refused(of(tensor("0", ARRAY, strides=[1])), "other arguments")
    refused(of(tensor("0", ARRAY, shape=integers([-1, -12]))), "passes a storage")
    refused(of(tensor("1", ARRAY)), "data/1 is missing")
    refused(of(tensor("0", ARRAY), {"0": ARRAY[:2]}), "cut off")
    refused(of(tensor("0", ARRAY), compression=zipfile.ZIP_DEFLATED), "compressed")
    refused(of(b"K\x01"), "no dictionary of tensors")
    refused(of(tensor("0", ARRAY) + b"s" + tensor("0", ARRAY)), "no dictionary|a value where there is none")
    refused(write(tmp_path / "a.pt", b"R", {}), "a value where there is none")
    one = text("a") + tensor("0", ARRAY)
    refused(write(tmp_path / "a.pt", b"}(" + one + one + b"u", whole), "name of a tensor, a, is no text, or that")
    refused(write(tmp_path / "a.pt", b"}(" + text("a\x1b[2J") + tensor("0", ARRAY) + b"u", whole), "do not print")
    refused(write(tmp_path / "a.pt", b"}(" + text("a" * 2000) + tensor("0", ARRAY) + b"u", whole), "too long")
    refused(write(tmp_path / "a.pt", name("os\x1b[2J", "system"), {}), r"asks for os\?\[2J.system")


def test_depth_and_length_have_limits(tmp_path):
    assert read_pickle(tuples(1, b")") + b".") == ((),)
    assert read_pickle(tuples(2, b")") + b".") is None
    assert read_pickle(b"(" + b"N" * 17 + b"t.") is None
    refused(write(tmp_path / "a.pt", b"(" * 1_000_000, {}), "over 1,000,000 opcodes")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(b"\x80\x02}.")
    refused(path, "no safetensors file, and no zip archive")
    path.write_bytes(b"")
    refused(path, "empty, or no ordinary file")
    refused(tmp_path, "empty, or no ordinary file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "empty, or no ordinary file")  # and not waited for
    refused(tmp_path / "absent.pt", "cannot be read: No such file")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "")
    refused(path, "without one data.pkl")


# Zip archives that are refused.


def archive_with(path, change, *, member="archive/data/0"):
    """A whole file but for what ``change`` does to the directory's entry of a member before it is written."""
    file = io.BytesIO(torch_files.save(path, {"a": ARRAY, "b": ARRAY + 1}).read_bytes())
    with zipfile.ZipFile(file, "a") as archive:
        change(archive.getinfo(member), archive)
        archive._didModify = True
    path.write_bytes(file.getvalue())
    return path


def test_damaged_archives_are_refused(tmp_path):
    path = tmp_path / "a.pt"

    def changed(**values):
        def change(member, archive):
            for key, value in values.items():
                setattr(member, key, value)

        return archive_with(path, change)

    def same_place(member, archive):
        member.header_offset = archive.getinfo("archive/data/1").header_offset

    def twice(member, archive):
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data/0", b"")

    read_state_dict(changed())
    refused(changed(CRC=1), "archive/data/0 has another CRC")
    refused(changed(flag_bits=1), "encrypted")
    refused(changed(compress_type=zipfile.ZIP_DEFLATED), "compressed")
    refused(changed(file_size=40, compress_size=40), "CRC")
    refused(changed(file_size=60, compress_size=60), "overlaps another")
    refused(changed(file_size=60), "cut off")
    refused(changed(file_size=1 << 40, compress_size=1 << 40), "overlaps another")  # of Zip64
    refused(changed(header_offset=1 << 40), "is damaged")
    refused(changed(header_offset=7), "is damaged")
    refused(archive_with(path, same_place), "two members of one name or in one place")
    refused(archive_with(path, twice), "two members of one name or in one place")
    torch_files.save(path, {"a": ARRAY})
    data = bytearray(path.read_bytes())
    data[data.index(ARRAY.tobytes()) + 5] ^= 1
    path.write_bytes(data)
    refused(path, "archive/data/0 has another CRC")


# Safetensors files that are refused.


def safetensors_file(path, header, content=b"", *, length=None):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data) if length is None else length) + data + content)
    return path


def test_damaged_safetensors_files_are_refused(tmp_path):
    data = ARRAY.tobytes()

    def of(*tensors, content=data, **options):
        keys = ("dtype", "shape", "data_offsets")
        header = {f"t{n}": dict(zip(keys, tensor, strict=True)) for n, tensor in enumerate(tensors)}
        return safetensors_file(tmp_path / "a", header, content, **options)

    whole = ("F32", [3, 4], [0, 48])
    assert described(read_state_dict(of(whole))) == described({"t0": ARRAY})
    refused(of(whole, length=1 << 62), "its header has")
    refused(of(whole, content=data[:-1]), "cut off")
    refused(of(whole, content=data + b"\0"), "1 bytes at its end belong to no tensor")
    refused(of(("F32", [3, 4], [4, 52]), content=bytes(52)), "does not begin where")
    refused(of(whole, whole), "does not begin where")
    refused(of(("F32", [3, 2], [0, 24]), ("F32", [3, 2], [20, 44])), "does not begin where")
    refused(of(("F32", [3, 4], [48, 0])), "cut off|does not begin")
    refused(of(("F32", [3, 5], [0, 48])), "has 48 bytes")
    refused(of(("F32", [-3, -4], [0, 48])), "its header is damaged")
    refused(of(("F32", [1 << 62, 1 << 62], [0, 48])), "has 48 bytes")
    refused(of(("F32", [3, 4, *[1] * 90], [0, 48])), "its header is damaged")
    refused(of(("F4", [48], [0, 48])), "is of dtype 'F4'; known are")
    for header in (
        b"{",
        b"{}",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b'{"__metadata__": {"a": 1}}',
        b'{"\xff": 1}',
        b'{"a": 1, "a": 2}',
    ):
        refused(safetensors_file(tmp_path / "a", header, b"\0"), "header is damaged|belong to no tensor|codec")
    refused(safetensors_file(tmp_path / "a", {"a\n" * 999: 1}), "its header is damaged")
    twice = json.dumps({"t0": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
    refused(safetensors_file(tmp_path / "a", b'{"t0": {}, ' + twice[1:], data), "it has a key twice")


# What took memory, time or the process.


def tuples(times, within=b"N"):
    return within + b"\x85" * times


BINARY = {
    "a deep tuple as a key": b"}" + tuples(300_000) + b"Ns",
    "a deep tuple as a value": b"}" + text("a") + tuples(30_000) + b"s",
    "a deep tuple as a shape": b"}" + text("a") + tensor("0", ARRAY, shape=tuples(30_000)) + b"s",
    "a deep tuple as a storage": tuples(30_000) + b"Q",
    "a tuple doubled as a shape": b"}" + text("a") + tensor("0", ARRAY, shape=b"K\x01" + b"q\0h\0\x86" * 60) + b"s",
    "a tuple doubled as a storage": b"K\x01" + b"q\0h\0\x86" * 60 + b"Q",
    "a tuple doubled as a key": b"}" + b"K\x01" + b"q\0h\0\x86" * 60 + b"Ns",
    "deep dictionaries": b"}q\0" + (b"}q\1" + text("state_dict") + b"h\0sq\0") * 50_000,
    "dictionaries within themselves": b"}q\0" + text("state_dict") + b"h\0s",
    "a deep list": b"]" * 100_000 + b"a" * 99_999,
    "a far memo": b"}r" + struct.pack("<I", 0xFFFFFF00),
    "long bytes": b"B" + struct.pack("<I", 0xFFFFFF00) + b"a",
    "very long bytes": b"\x8e" + struct.pack("<Q", 1 << 40) + b"a",
    "a long text": b"X" + struct.pack("<I", 0xFFFFFF00) + b"a",
    "a very long text": b"\x8d" + struct.pack("<Q", 1 << 62) + b"a",
    "a long number": b"\x8b" + struct.pack("<i", (1 << 31) - 1) + b"a",
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n",
    "a large frame": b"\x95" + struct.pack("<Q", 1 << 60) + b"a",
    "many dictionaries": b"}\x94" * 600_000,
    "a text cut in a sequence": b"X\1\0\0\0\xff",
    "a key that is no text": b"}" + b"N" + tensor("0", ARRAY) + b"s",
    "a large storage": b"}" + text("a") + tensor("0", ARRAY, count=(1 << 31) - 1) + b"s",
    "a shape of nothing": b"}" + text("a") + tensor("0", ARRAY, shape=b"(K\0" + number(-1) + b"t") + b"s",
    "a missing memo": b"h\7",
    "a foreign opcode": b"2",
}


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    """What comes of each file, all read by one process."""
    folder = tmp_path_factory.mktemp("bombs")
    paths = [write(folder / key.replace(" ", "_"), opcodes, {"0": ARRAY}) for key, opcodes in BINARY.items()]
    opcodes = dictionary({"a": b"(" + b"N" * (16 << 20) + b"t"})
    paths.append(write(folder / "compressed", opcodes, {}, compression=zipfile.ZIP_DEFLATED))
    paths.append(safetensors_file(folder / "deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000))
    paths.append(safetensors_file(folder / "deep_lists", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
    paths.append(safetensors_file(folder / "large_header", b'{"a":0}', length=1 << 32))
    return outcomes(paths)


@pytest.mark.parametrize(
    "key", [*(key.replace(" ", "_") for key in BINARY), "compressed", "deep", "deep_lists", "large_header"]
)
def test_files_that_took_memory_or_the_process_are_refused(bombs, key):
    assert str(bombs[key]).startswith("refused: ")
    assert len(bombs[key]) < 1000
    assert key in bombs[key]


# Random mutations.


def mutated(data, rng):
    """Bytes changed, cut off, or put in another place."""
    kind, a, b, c = rng.randrange(4), *sorted(rng.randrange(len(data)) for _ in range(3))
    if kind == 0:
        return data[:c]
    if kind == 1:
        return data[:a] + data[b:c] + data[a:]
    if kind == 2:
        return data[:a] + data[b:]
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def mutated_opcodes(pickled, rng):
    """Opcodes left out, doubled, exchanged or replaced, or a byte of the pickle changed."""
    places = [place for _, _, place in pickletools.genops(pickled)]
    opcodes = [pickled[a:b] for a, b in zip(places, [*places[1:], len(pickled)], strict=True)]
    for _ in range(rng.randrange(1, 4)):
        a, b, kind = rng.randrange(len(opcodes)), rng.randrange(len(opcodes)), rng.randrange(5)
        if kind == 0:
            del opcodes[a]
        elif kind == 1:
            opcodes.insert(a, opcodes[b])
        elif kind == 2:
            opcodes[a], opcodes[b] = opcodes[b], opcodes[a]
        elif kind == 3:
            opcodes[a] = rng.choice([b"}", b"]", b"N", b"(", b"t", b"u", b"s", b"b", b"R", b"Q", b"0", b"2", b"h\0"])
        elif opcodes[a]:
            at = rng.randrange(len(opcodes[a]))
            opcodes[a] = opcodes[a][:at] + rng.randbytes(1) + opcodes[a][at + 1 :]
    return b"".join(opcodes)


def only_refused_or_read(found, least):
    """Whether all outcomes are expected ones, and ``least`` of both kinds at least."""
    unexpected = {key: out for key, out in found.items() if not isinstance(out, dict) and key not in out[:500]}
    assert not unexpected
    strange = {key: out for key, out in found.items() if not isinstance(out, dict) and not out.startswith("refused: ")}
    assert not strange
    read = {key: out for key, out in found.items() if isinstance(out, dict)}
    assert len(read) >= least
    assert len(found) - len(read) >= least
    return read


def test_mutations_of_torch_files(tmp_path):
    original = torch_files.save(tmp_path / "a.pt", ARRAYS, inside="state_dict")
    data, arrays = original.read_bytes(), {str(n): array for n, array in enumerate(ARRAYS.values())}
    with zipfile.ZipFile(original) as archive:
        pickled = archive.read("archive/data.pkl")
    raw, zipped = [], []
    for seed in range(MUTATIONS // 2):
        raw.append(tmp_path / f"raw{seed}")
        raw[-1].write_bytes(mutated(data, random.Random(seed)))
        changed = mutated_opcodes(pickled, random.Random(seed))
        zipped.append(write_pickle(tmp_path / f"zipped{seed}", changed, arrays))
    read = only_refused_or_read(outcomes([*raw, *zipped]), 10)
    for key, tensors in read.items():
        assert key.startswith("zipped") or tensors == described(ARRAYS), key


def test_mutations_of_safetensors_files(tmp_path):
    data = safetensors.numpy.save(ARRAYS, {"format": "pt"})
    begin = 8 + int.from_bytes(data[:8], "little")
    paths = []
    for seed in range(MUTATIONS):
        rng = random.Random(seed)
        paths.append(tmp_path / f"raw{seed}")
        if seed % 2:
            paths[-1].write_bytes(mutated(data, rng))
        else:
            safetensors_file(paths[-1], mutated(data[8:begin], rng), data[begin:])
    for key, tensors in only_refused_or_read(outcomes(paths), 10).items():
        assert tensors == described(safetensors.numpy.load_file(tmp_path / key)), key
