"""Writes files as ``torch.save`` does, without PyTorch: a pickle in a zip archive, beside the tensors' storages."""

import collections
import io
import pickle
import struct
import sys
import types
import unittest.mock
import zipfile

import numpy as np

STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int32": "IntStorage",
    "int64": "LongStorage",
}


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    return b"J" + struct.pack("<i", value)


def integers(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def name(module, attribute):
    return b"c" + f"{module}\n{attribute}\n".encode()


def tensor(key, array, *, shape=None, strides=None, count=None, first=0):
    """The opcodes of a tensor whose storage is called ``key``; ``shape`` as opcodes."""
    steps = [s // array.itemsize for s in array.strides] if strides is None else strides
    storage = b"(" + text("storage") + name("torch", STORAGES[str(array.dtype)]) + text(key) + text("cpu")
    storage += number(array.size if count is None else count) + b"tQ"
    ordered = name("collections", "OrderedDict") + b")R"
    arguments = b"(" + storage + number(first) + (shape or integers(array.shape)) + integers(steps) + b"\x89" + ordered
    return name("torch._utils", "_rebuild_tensor_v2") + arguments + b"tR"


def dictionary(items):
    """The opcodes of an OrderedDict of texts and opcodes, with an attribute as a state_dict has one."""
    pairs = b"".join(text(key) + value for key, value in items.items())
    return name("collections", "OrderedDict") + b")R(" + pairs + b"u" + b"}" + text("_metadata") + b"}sb"


def write(path, content, storages, *, compression=zipfile.ZIP_STORED):
    """Writes a pickle of the opcodes ``content``, and storages by key."""
    return write_pickle(path, b"\x80\x02" + content + b".", storages, compression=compression)


def write_pickle(path, pickled, storages, *, compression=zipfile.ZIP_STORED):
    """Writes a pickle, and storages by key."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for key, array in storages.items():
            archive.writestr(f"archive/data/{key}", array.tobytes())
    return path


def save(path, tensors, *, inside=None, protocol=2):
    """Saves a state_dict; as entry ``inside`` of a dictionary with other entries where that is given."""
    arrays = {str(n): np.ascontiguousarray(a) for n, a in enumerate(tensors.values())}
    state = collections.OrderedDict(zip(tensors, arrays.values(), strict=True))
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    content = state
    if inside:
        optimizer = {"state": {0: {"step": 7, "sum": arrays["0"]}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
        other = {"iter": 7, "loss": np.float64(0.5), "seed": 1 << 70, "best": None, "done": False, (1, 2): b"\0"}
        content = other | {"opt_state_dict": optimizer, inside: state, "time": 1.5}
    return write_pickle(path, pickled(content, arrays, protocol), arrays)


def pickled(content, arrays, protocol=2):
    """The pickle that ``torch.save`` makes: by Python's pickler, with names of PyTorch in the place of its objects."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    rebuild = utils._rebuild_tensor_v2 = lambda: None
    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    for kind in STORAGES.values():
        setattr(torch, kind, type(kind, (), {"__module__": "torch"}))
    keys = {id(array): key for key, array in arrays.items()}

    class Storage:
        def __init__(self, array):
            self.array = array

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            if not isinstance(obj, Storage):
                return None
            array = obj.array
            return ("storage", getattr(torch, STORAGES[str(array.dtype)]), keys[id(array)], "cpu", array.size)

        def reducer_override(self, obj):
            if not isinstance(obj, np.ndarray):
                return NotImplemented
            steps = tuple(s // obj.itemsize for s in obj.strides)
            arguments = (Storage(obj), 0, obj.shape, steps, False, collections.OrderedDict())
            return rebuild, arguments

    file = io.BytesIO()
    with unittest.mock.patch.dict(sys.modules, {"torch": torch, "torch._utils": utils}):
        Pickler(file, protocol).dump(content)
    return file.getvalue()
