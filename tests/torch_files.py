"""Writes files as ``torch.save`` does, without PyTorch: a pickle in a zip archive, beside the tensors' storages."""

import struct
import zipfile

import numpy as np

STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
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


def tensor(key, array, *, strides=None, count=None, first=0):
    """The opcodes of a tensor whose storage is called ``key``."""
    steps = [s // array.itemsize for s in array.strides] if strides is None else strides
    storage = b"(" + text("storage") + name("torch", STORAGES[str(array.dtype)]) + text(key) + text("cpu")
    storage += number(array.size if count is None else count) + b"tQ"
    ordered = name("collections", "OrderedDict") + b")R"
    arguments = b"(" + storage + number(first) + integers(array.shape) + integers(steps) + b"\x89" + ordered + b"t"
    return name("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


def dictionary(items):
    """The opcodes of an OrderedDict of texts and opcodes, with an attribute as a state_dict has one."""
    pairs = b"".join(text(key) + value for key, value in items.items())
    return name("collections", "OrderedDict") + b")R(" + pairs + b"u" + b"}" + text("_metadata") + b"}sb"


def write(path, content, storages, *, compression=zipfile.ZIP_STORED):
    """Writes a pickle of the opcodes ``content``, and storages by key."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + content + b".")
        archive.writestr("archive/byteorder", "little")
        for key, array in storages.items():
            archive.writestr(f"archive/data/{key}", array.tobytes())
    return path


def save(path, tensors, *, inside=None):
    """Saves a state_dict; as entry ``inside`` of a dictionary with other entries where that is given."""
    arrays = {str(n): np.ascontiguousarray(a) for n, a in enumerate(tensors.values())}
    content = dictionary({key: tensor(str(n), arrays[str(n)]) for n, key in enumerate(tensors)})
    if inside:
        scalar = (
            name("numpy.core.multiarray", "scalar") + b"(" + name("numpy", "dtype") + b"(" + text("f8") + b"\x89\x88tR"
        )
        scalar += b"(" + number(3) + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        scalar += name("_codecs", "encode") + b"(" + text("\x00" * 8) + text("latin1") + b"tRtR"
        content = b"}(" + text("iter") + number(7) + text("loss") + scalar + text(inside) + content + b"u"
    return write(path, content, arrays)
