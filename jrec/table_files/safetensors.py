"""Safetensors files, one or several with an index: read by memory maps, and written tensor by tensor or row by row.

A file is eight bytes with the length of a JSON header, the header, and the tensors' bytes. The ``safetensors`` package
is not used: its NumPy reader copies every tensor into memory, and its writer takes whole tensors. Tests compare with
it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import stat
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np

from jrec.errors import CheckpointError
from jrec.files import parse_json, stays_inside
from jrec.outputs import Place, new_folder

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
"""The NumPy dtype of each name in a header."""
INDEX = "model.safetensors.index.json"
"""Where a folder says which file holds which tensor."""
SHARD_BYTES = 5_000_000_000

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 16 << 20  # of 100,000 tensors; decoded, it takes at most 20 times as much memory
_MOST_DIMS = 64
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=_MOST_DIMS)]
    data_offsets: tuple[_Count, _Count]


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a safetensors file, or of a folder of them with an index, by name.

    A tensor is a read-only memory map: what of it is used is read when it is used. The header of a shard is read when
    the first of its tensors is asked for: in a folder, only the shards of the wanted tensors have to be there.

    Args:
      path: A file, an index, or a folder with one index or one file.

    Raises:
      CheckpointError: If the file, or the index, cannot be read or is damaged; when a tensor is asked for, also if its
        shard is missing, damaged, or does not hold it.

    Example:
      >>> write_tensors("weights", {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)})
      >>> tensors = Tensors("weights")
      >>> list(tensors), tensors["a.weight"][1].tolist()
      (['a.weight'], [3.0, 4.0, 5.0])
    """

    def __init__(self, path: Place):
        self.path = pathlib.Path(path)
        file = _only_file(self.path) if self.path.is_dir() else self.path
        self._opened: dict[pathlib.Path, dict[str, np.ndarray]] = {}
        if file.suffix == ".json":
            self._files = {name: file.parent / shard for name, shard in _weight_map(file).items()}
        else:
            self._files = dict.fromkeys(self._tensors_of(file), file)

    def __getitem__(self, name: str) -> np.ndarray:
        file = self._files[name]
        tensors = self._tensors_of(file, needed_for=name)
        if name not in tensors:
            raise CheckpointError(f"{file} does not hold tensor {_shown(name)}, which the index says; fetch both anew")
        return tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def file_of(self, name: str) -> pathlib.Path:
        """The file that holds a tensor."""
        return self._files[name]

    def _tensors_of(self, file: pathlib.Path, needed_for: str = "") -> dict[str, np.ndarray]:
        if file not in self._opened:
            self._opened[file] = opened(file, tensors_of, needed_for)
        return self._opened[file]


def is_safetensors(data: np.ndarray) -> bool:
    """Whether a file's bytes, (size,) uint8, are meant to be this format: its header begins with a brace."""
    return bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + 1]) == b"{"


def tensors_of(data: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a file, in the order of their bytes, as views of these.

    Args:
      data: The file's bytes, (size,) uint8.

    Raises:
      ValueError: If the header is damaged or does not fit the file.
    """
    begin, (entries, _) = _header(data)
    content = data[begin:]
    tensors, end = dict[str, np.ndarray](), 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        if (dtype := DTYPES.get(entry.dtype)) is None:
            raise ValueError(f"tensor {_shown(name)} is of dtype {entry.dtype[:20]!r}; known are {', '.join(DTYPES)}")
        # As the format demands: tensors one behind the other, so that no byte is two tensors' or nobody's.
        if not end == begin <= stop <= len(content):
            raise ValueError(f"tensor {_shown(name)} is cut off, or does not begin where the one before it ends")
        if math.prod(entry.shape) * dtype.itemsize != stop - begin:
            raise ValueError(
                f"tensor {_shown(name)} of {entry.dtype} and shape {entry.shape} has {stop - begin:,} bytes"
            )
        tensors[name] = content[begin:stop].view(dtype).reshape(entry.shape)
        end = stop
    if end != len(content):
        raise ValueError(f"{len(content) - end:,} bytes at its end belong to no tensor")
    return tensors


def metadata_of(data: np.ndarray) -> tuple[dict[str, str], int]:
    """What a file says of itself in texts, and where its tensors' bytes begin; errors as of ``tensors_of``."""
    begin, (_, metadata) = _header(data)
    return metadata, begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor that is to be written."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """The size of one index of its first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class ShardWriter:
    """The files of a folder of tensors, whose rows are written in any order.

    Args:
      folder: The folder, which exists and is empty.
      specs: All tensors.
      shard_bytes: A file of this many bytes takes no further tensor.
    """

    def __init__(self, folder: pathlib.Path, specs: Iterable[TensorSpec], *, shard_bytes: int = SHARD_BYTES):
        shards = _shards(list(specs), shard_bytes)
        self._folder, self._places = folder, dict[str, tuple[pathlib.Path, int, TensorSpec]]()
        for number, shard in enumerate(shards, 1):
            path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
            shard = _wide_first(shard)
            begin = _write_header(path, shard)
            for spec in shard:
                self._places[spec.name] = path, begin, spec
                begin += spec.nbytes

    def write(self, name: str, first: int, rows: np.ndarray) -> None:
        """Writes rows of a tensor from row ``first`` on; they have its dtype, and its shape behind the first axis."""
        path, begin, spec = self._places[name]
        if rows.dtype != spec.dtype or rows.shape[1:] != spec.shape[1:] or first + len(rows) > spec.shape[0]:
            raise ValueError(
                f"rows of {name!r} are {rows.dtype}{list(rows.shape)} from {first} on, not of {spec.dtype} and"
                f" {list(spec.shape)}"
            )
        with path.open("r+b") as file:
            file.seek(begin + first * spec.row_bytes)
            file.write(np.ascontiguousarray(rows).view(np.uint8).data)

    def finish(self) -> None:
        """Writes the index."""
        total = sum(spec.nbytes for _, _, spec in self._places.values())
        files = {name: path.name for name, (path, _, _) in sorted(self._places.items())}
        content = {"metadata": {"total_size": total}, "weight_map": files}
        (self._folder / INDEX).write_text(json.dumps(content, indent=1), encoding="utf-8")


def write_tensors(out: Place, tensors: Mapping[str, np.ndarray], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes tensors as a folder of safetensors files with an index, which appears whole or not at all.

    Args:
      out: The folder, which is not there or empty.
      tensors: Arrays of one axis at least, by name.
      shard_bytes: A file of this many bytes takes no further tensor.

    Raises:
      OutputError: If the folder cannot be written, or holds something.
      ValueError: If there is no tensor, or one of a dtype that the format lacks.
    """
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    specs = [TensorSpec(name=name, dtype=array.dtype, shape=array.shape) for name, array in arrays.items()]
    check_specs(specs)
    with new_folder(out, {"tensors": len(specs)}, kind="folder of tensors") as folder:
        writer = ShardWriter(folder, specs, shard_bytes=shard_bytes)
        for name, array in arrays.items():
            writer.write(name, 0, array)
        writer.finish()


def encoded_tensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A whole file of some tensors, or none, of any shapes and of dtypes of ``DTYPES``."""
    specs = [TensorSpec(name=name, dtype=array.dtype, shape=array.shape) for name, array in tensors.items()]
    specs = _wide_first(specs)
    return b"".join([header_of(specs), *(tensors[spec.name].tobytes() for spec in specs)])


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Refuses what the format cannot hold.

    Raises:
      ValueError: If there is no tensor, or one without an axis or of an unknown dtype.
    """
    if not specs:
        raise ValueError("there are no tensors to write")
    for spec in specs:
        if spec.dtype not in DTYPES.values() or not spec.shape:
            raise ValueError(
                f"tensor {_shown(spec.name)} is {spec.dtype}{list(spec.shape)}; give an array of one axis at least and"
                f" of {', '.join(str(dtype) for dtype in DTYPES.values())}"
            )


def _wide_first(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Wide elements first, so that each tensor begins at a multiple of its element's size."""
    return sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))


def _shards(specs: list[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    shards, size = [list[TensorSpec]()], 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _write_header(path: pathlib.Path, specs: Sequence[TensorSpec]) -> int:
    """Makes a file of its final size with the header in it; returns where the first tensor begins."""
    header = header_of(specs)
    with path.open("xb") as file:
        file.write(header)
        # A file with a hole, which rows fill in any order; it takes no more room than what is written.
        file.truncate(len(header) + sum(spec.nbytes for spec in specs))
    return len(header)


def header_of(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str] = types.MappingProxyType({}), *, size: int = 0
) -> bytes:
    """What stands in a file before the tensors, whose bytes follow in this order.

    Args:
      specs: The tensors.
      metadata: Further texts about the file.
      size: How many bytes it has at least.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries, end = {}, 0
    for spec in specs:
        offsets = [end, end + spec.nbytes]
        entries[spec.name] = {"dtype": names[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        end += spec.nbytes
    # transformers refuses files that do not say of which framework they are.
    header = json.dumps({"__metadata__": {"format": "pt", **metadata}, **entries}).encode()
    # By blanks, as the format pads: JSON takes them.
    header = header.ljust(size - _LENGTH_BYTES)
    header += b" " * (-len(header) % _LENGTH_BYTES)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def _only_file(folder: pathlib.Path) -> pathlib.Path:
    """The index of a folder, or its one file."""
    for ending in (".safetensors.index.json", ".safetensors"):
        files = sorted(path for path in folder.iterdir() if path.name.endswith(ending))
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(path.name for path in files[:5])
            raise CheckpointError(f"{folder} has {len(files)} files *{ending} ({names}); give the path of one")
    raise CheckpointError(f"{folder} has no *.safetensors.index.json and no *.safetensors; give the folder of a model")


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    try:
        content = parse_json(index.read_bytes())
        files = msgspec.convert(content["weight_map"], dict[str, str])
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{index} is damaged or no index of safetensors ({error!r}); fetch it anew") from error
    for name, file in files.items():
        if not stays_inside(file):
            raise CheckpointError(
                f"{index} names the file {file[:100]!r} for tensor {_shown(name)}, which is none inside of its folder"
            )
    return files


def opened[T](file: pathlib.Path, read: Callable[[np.ndarray], T], needed_for: str = "") -> T:
    """What ``read`` makes of a file's bytes, (size,) uint8, which are mapped into memory.

    Raises:
      CheckpointError: If the file is missing or cannot be read, or ``read`` raises a ValueError.
    """
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise ValueError("it is empty, or no ordinary file")
        return read(np.memmap(file, np.uint8, mode="r"))
    except FileNotFoundError as error:
        why = f", which the index names for tensor {_shown(needed_for)}; fetch it into {file.parent}"
        raise CheckpointError(f"{file} is missing{why if needed_for else ''}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is no whole safetensors file: {error}; fetch it anew") from error


def _header(data: np.ndarray) -> tuple[int, tuple[dict[str, _Entry], dict[str, str]]]:
    """Where the tensors' bytes begin, and what the header says of tensors and file."""
    length = int.from_bytes(bytes(data[:_LENGTH_BYTES]), "little")
    if len(data) < _LENGTH_BYTES or length > min(_MOST_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise ValueError(f"its header has {length:,} bytes, more than the file or than {_MOST_HEADER_BYTES:,}")
    begin = _LENGTH_BYTES + length
    return begin, _entries(bytes(data[_LENGTH_BYTES:begin]))


def _entries(header: bytes) -> tuple[dict[str, _Entry], dict[str, str]]:
    try:
        # A name that is there twice would hide one of two tensors, each reader's choice which.
        content = json.loads(header.decode(), object_pairs_hook=_unique)
        metadata = msgspec.convert(content.pop("__metadata__", None), dict[str, str] | None)
        return msgspec.convert(content, dict[str, _Entry]), metadata or {}
    except (msgspec.MsgspecError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {str(error)[:500]}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    by_key = dict(pairs)
    if len(by_key) < len(pairs):
        raise ValueError("it has a key twice")
    return by_key


def _shown(name: str) -> str:
    """A tensor's name in a message: a stranger's text, without characters that do not print."""
    return repr(name[:100])
