"""Reads files of tensors, of ``torch.save`` or safetensors, without PyTorch and without running anything of them.

A file of ``torch.save`` is a zip archive: ``NAME/data.pkl`` is a pickle of the saved object, whose tensors name
*storages*, each a member ``NAME/data/KEY`` of raw elements. Members are not compressed, so tensors are views of the
mapped file.
"""

from __future__ import annotations

import math
import os
import pathlib
import stat
import struct
import zipfile
import zlib

import numpy as np

from jrec.app.imports.torch_pickle import Storage, Tensor, Value, read_pickle
from jrec.errors import CheckpointError
from jrec.table_files.safetensors import is_safetensors, tensors_of

_MOST_PICKLE_BYTES = 64 << 20
_MOST_NAME_CHARACTERS = 1000
_ENCRYPTED = 1
_LOCAL_HEADER, _LOCAL_HEADER_BYTES = b"PK\x03\x04", 30


class SortedTensors(dict[str, np.ndarray]):
    """Tensors by name, of a format that sorts them: their order is not the model's."""


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, or of a ``state_dict`` or an object's entry of that name of ``torch.save``.

    Entries of the dictionary that are no tensors, such as counters, are left out. CRCs of a ``torch.save`` file are
    compared, for which its tensors are read in full; safetensors files have none.

    Args:
      path: The file, whatever its ending; of PyTorch 1.6 or later.

    Returns:
      Read-only memory maps by name, of the stored dtypes; in the model's order from ``torch.save``, which safetensors
      files do not keep (``SortedTensors``).

    Raises:
      CheckpointError: If the file cannot be read, is damaged or of another form, or its pickle names anything beside
        tensors, dictionaries and NumPy scalars.
    """
    path = pathlib.Path(path)
    try:
        tensors = _tensors(path)
        for name in tensors:
            if not name.isprintable() or len(name) > _MOST_NAME_CHARACTERS:
                raise ValueError(f"a tensor's name, {name[:100]}, is too long or has characters that do not print")
    except ValueError as error:  # the text may be a stranger's
        text = "".join(c if c.isprintable() else "?" for c in str(error)[:500])
        raise CheckpointError(f"{path}: {text}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return tensors


def _tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        raise ValueError("it is empty, or no ordinary file")
    data = np.memmap(path, np.uint8, mode="r")
    if is_safetensors(data):
        return SortedTensors(tensors_of(data))
    if bytes(data[:4]) != _LOCAL_HEADER:
        raise ValueError(
            "it is no safetensors file, and no zip archive, as torch.save writes it since PyTorch 1.6; load it there"
            " and save it again"
        )
    return _Archive(path, data).tensors()


def _named(content: Value) -> dict[str, Tensor]:
    """The tensors of a dictionary, or of its entry ``state_dict``."""
    pairs = content if isinstance(content, list) else []
    inner = [value for key, value in pairs if key == "state_dict"]
    if inner:
        pairs = inner[-1] if isinstance(inner[-1], list) else []
    tensors: dict[str, Tensor] = {}
    for key, value in pairs:
        if isinstance(value, Tensor):
            if key is None or str(key) in tensors:
                raise ValueError(f"the name of a tensor, {key}, is no text, or that of another tensor")
            tensors[str(key)] = value
    if not tensors:
        raise ValueError("it holds no dictionary of tensors, alone or as 'state_dict'; save model.state_dict()")
    return tensors


class _Archive:
    """The members of a file that ``torch.save`` wrote, each checked when it is first used."""

    def __init__(self, path: pathlib.Path, data: np.ndarray):
        self._data = data
        try:
            with zipfile.ZipFile(path) as archive:
                members, directory = archive.infolist(), archive.start_dir
        except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OverflowError) as error:
            raise ValueError(f"its zip archive is damaged: {error}") from error
        self._members = {member.filename: member for member in members}
        starts = sorted({member.header_offset for member in members})
        if not len(members) == len(self._members) == len(starts):
            raise ValueError("its zip archive has two members of one name or in one place")
        self._ends = dict(zip(starts, [*starts[1:], directory], strict=True))
        pickles = [name for name in self._members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("it is a zip archive without one data.pkl; torch.save writes it")
        self._folder = pickles[0].removesuffix("data.pkl")
        self._used: dict[str, np.ndarray] = {}

    def tensors(self) -> dict[str, np.ndarray]:
        """The state_dict's tensors by name, as views of the file."""
        order = f"{self._folder}byteorder"
        if order in self._members and bytes(self._member(order)[:7]) != b"little":
            raise ValueError("it was written on a big-endian machine; save it again on another")
        content = self._member(f"{self._folder}data.pkl")
        if len(content) > _MOST_PICKLE_BYTES:
            raise ValueError(f"its pickle has {len(content):,} bytes; a state_dict has a few thousand")
        return {name: self._tensor(tensor) for name, tensor in _named(read_pickle(bytes(content))).items()}

    def _tensor(self, tensor: Tensor) -> np.ndarray:
        storage, first, shape, size = tensor.storage, tensor.first, tensor.shape, math.prod(tensor.shape)
        if first < 0 or min(shape, default=0) < 0 or first + size > storage.count:
            raise ValueError(f"a tensor of shape {shape} from element {first} on passes a storage of {storage.count}")
        step = 1
        for length, stride in zip(reversed(shape), reversed(tensor.strides), strict=True):
            if size and length > 1 and stride != step:
                raise ValueError(f"a tensor of shape {shape} has strides {tensor.strides}; save contiguous tensors")
            step *= length
        return self._storage(storage)[first : first + size].reshape(shape)

    def _storage(self, storage: Storage) -> np.ndarray:
        content = self._member(f"{self._folder}data/{storage.key}")
        size = storage.count * storage.dtype.itemsize
        if not 0 <= size <= len(content):
            raise ValueError(f"storage {storage.key} of {storage.count} elements is cut off")
        return content[:size].view(storage.dtype)

    def _member(self, name: str) -> np.ndarray:
        """A member's bytes, once they are found whole."""
        if name not in self._used:
            self._used[name] = self._found(name)
        return self._used[name]

    def _found(self, name: str) -> np.ndarray:
        if (member := self._members.get(name)) is None:
            raise ValueError(f"it is damaged: member {name} is missing")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            raise ValueError(f"member {name} is compressed or encrypted; torch.save does not do so")
        start = member.header_offset
        header = bytes(self._data[start : start + _LOCAL_HEADER_BYTES]) if start >= 0 else b""
        if len(header) < _LOCAL_HEADER_BYTES or header[:4] != _LOCAL_HEADER:
            raise ValueError(f"it is damaged: member {name} has no header")
        begin = start + _LOCAL_HEADER_BYTES + sum(struct.unpack("<HH", header[26:]))
        if not member.file_size == member.compress_size <= self._ends[start] - begin:
            raise ValueError(f"it is damaged: member {name} is cut off, or overlaps another")
        content = self._data[begin : begin + member.file_size]
        # PyTorch writes 0 where it was told to compute no CRCs (torch.serialization.set_crc32_options).
        if member.CRC and zlib.crc32(content) != member.CRC:
            raise ValueError(f"it is damaged: member {name} has another CRC")
        return content
