"""Reads tensors that ``torch.save`` wrote, without PyTorch and without running what the file's pickle asks for.

The file is a zip archive: ``NAME/data.pkl`` is a pickle of the saved object, whose tensors name *storages*, each a
member ``NAME/data/KEY`` of raw elements. Only the handful of names that PyTorch writes for tensors and dictionaries are
known here, and they stand for inert objects. Any other name, as one that would run code, is refused. Storages are not
compressed, so tensors are memory maps of the file.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, override

import ml_dtypes
import numpy as np

from jrec.errors import CheckpointError

_STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_MOST_PICKLE_BYTES = 256 << 20
_LOCAL_HEADER, _LOCAL_HEADER_BYTES = b"PK\x03\x04", 30


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a file that ``torch.save`` wrote: of a ``state_dict``, or of an object's entry of that name.

    Entries of the dictionary that are no tensors, such as counters, are left out.

    Args:
      path: The file, of PyTorch 1.6 or later.

    Returns:
      Read-only memory maps by name, in the file's order, of the stored dtypes.

    Raises:
      CheckpointError: If the file cannot be read, is of another form, or its pickle names anything beside tensors,
        dictionaries and NumPy scalars.
    """
    path = pathlib.Path(path)
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            content = _Archive(path, archive, file).load()
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is no zip archive, as torch.save writes it since PyTorch 1.6; load it there and save it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    tensors = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(tensors, dict) or not any(isinstance(value, np.ndarray) for value in tensors.values()):
        raise CheckpointError(
            f"{path} holds no dictionary of tensors, alone or as 'state_dict'; save model.state_dict()"
        )
    return {str(name): value for name, value in tensors.items() if isinstance(value, np.ndarray)}


class _Inert:
    """Stands for an object that is not needed; takes whatever a pickle does with it."""

    def __init__(self, *arguments: object):
        del arguments

    def __call__(self, *arguments: object) -> _Inert:
        del arguments
        return self

    def __setstate__(self, state: object) -> None:
        """Leaves the state out."""


class _Ordered(dict[Any, Any]):
    """Stands for an ``OrderedDict``, whose attributes are left out."""

    def __setstate__(self, state: object) -> None:
        """Leaves the state out."""


@dataclasses.dataclass(frozen=True)
class _StorageType:
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class _Storage:
    """Elements of the file: ``count`` of ``dtype`` from byte ``begin`` on."""

    path: pathlib.Path
    begin: int
    count: int
    dtype: np.dtype

    def tensor(self, first: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
        """A contiguous tensor of the storage."""
        size = math.prod(shape)
        wanted, step = [], 1
        for length in reversed(shape):
            wanted.insert(0, step)
            step *= max(length, 1)
        if size and any(s != w for s, w, n in zip(strides, wanted, shape, strict=True) if n > 1):
            raise ValueError(f"a tensor of shape {shape} has strides {strides}; save contiguous tensors")
        if first < 0 or min(shape, default=0) < 0 or first + size > self.count:
            raise ValueError(f"a tensor of shape {shape} from element {first} on passes a storage of {self.count}")
        if not size:
            return np.zeros(shape, self.dtype)
        begin = self.begin + first * self.dtype.itemsize
        return np.memmap(self.path, self.dtype, mode="r", offset=begin, shape=shape)


def _rebuilt(storage: object, first: object, shape: object, strides: object, *rest: object) -> np.ndarray:
    """Stands for ``torch._utils._rebuild_tensor_v2``."""
    del rest
    if not isinstance(storage, _Storage) or not isinstance(first, int):
        raise TypeError("a tensor has no storage")
    return storage.tensor(first, _integers(shape), _integers(strides))


def _integers(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(isinstance(value, int) for value in values):
        raise TypeError(f"{values!r} is no shape")
    return values


def _parameter(data: object, *rest: object) -> object:
    """Stands for ``torch._utils._rebuild_parameter``."""
    del rest
    return data


_KNOWN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Ordered,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): tuple,
    ("_codecs", "encode"): _Inert(),  # within NumPy scalars
    **{(f"numpy.{core}.multiarray", "scalar"): _Inert() for core in ("core", "_core")},
    ("numpy", "dtype"): _Inert(),
    **{("torch", name): _StorageType(np.dtype(dtype)) for name, dtype in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Unpickles tensors and dictionaries, and refuses all else before anything of it is called."""

    def __init__(self, archive: _Archive, data: bytes):
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._archive = archive

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (known := _KNOWN.get((module_name, global_name))) is None:
            raise CheckpointError(
                f"{self._archive.path} asks for {module_name}.{global_name}, which is not run: only tensors and"
                " dictionaries are read. Save model.state_dict() of a model on one process, without its modules"
            )
        return known

    @override
    def persistent_load(self, pid: Any, /) -> _Storage:
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, _StorageType) or not isinstance(count, int):
            raise TypeError(f"{pid!r} is no storage")
        return self._archive.storage(str(key), count, storage.dtype)


class _Archive:
    """The members of a file that ``torch.save`` wrote."""

    def __init__(self, path: pathlib.Path, archive: zipfile.ZipFile, file: BinaryIO):
        self.path, self._archive, self._file = path, archive, file
        pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{path} is a zip archive without one data.pkl; torch.save writes it")
        self._pickle, self._folder = pickles[0], pickles[0].removesuffix("data.pkl")
        self._bytes = path.stat().st_size

    def load(self) -> Any:
        """The pickled object, with memory maps in the place of tensors."""
        order = f"{self._folder}byteorder"
        if order in self._archive.namelist() and self._archive.read(order) != b"little":
            raise CheckpointError(f"{self.path} was written on a big-endian machine; save it again on another")
        if (size := self._archive.getinfo(self._pickle).file_size) > _MOST_PICKLE_BYTES:
            raise CheckpointError(f"{self.path}: its pickle has {size:,} bytes; a state_dict has a few thousand")
        try:
            return _Unpickler(self, self._archive.read(self._pickle)).load()
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged pickle leads to
            raise CheckpointError(f"{self.path} is damaged, or no state_dict: {error}") from error

    def storage(self, key: str, count: int, dtype: np.dtype) -> _Storage:
        """Where a storage's elements lie in the file."""
        member = self._archive.getinfo(f"{self._folder}data/{key}")
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"storage {key} is compressed; torch.save does not do so")
        self._file.seek(member.header_offset)
        header = self._file.read(_LOCAL_HEADER_BYTES)
        name, extra = struct.unpack("<HH", header[26:30])
        begin = member.header_offset + _LOCAL_HEADER_BYTES + name + extra
        size = count * dtype.itemsize
        if header[:4] != _LOCAL_HEADER or count < 0 or size > member.file_size or begin + size > self._bytes:
            raise ValueError(f"storage {key} of {count} elements is cut off")
        return _Storage(self.path, begin, count, dtype)
