"""Reads the pickle of a ``torch.save`` file: which tensors it names, and where their elements are.

``pickle`` is never called: the opcodes that ``torch.save`` writes for dictionaries of tensors move values on a stack
here, all others are refused, and a name is only ever compared with those that PyTorch writes. ``torch.load`` with
``weights_only=True`` would be less code of ours, but importing would then take an installed PyTorch, which nothing else
of jrec does.

Nothing is hashed, compared or printed that could be deep: a dictionary is the list of its pairs, tuples that no tensor
has are dropped, and what no tensor needs (floats, bytes, lists …) becomes None as soon as it is read. So memory and
time grow with the number of opcodes, which has a limit.
"""

from __future__ import annotations

import dataclasses
import io
import pickletools
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

_STORAGES: Mapping[str, type] = {
    "torch.FloatStorage": np.float32,
    "torch.DoubleStorage": np.float64,
    "torch.HalfStorage": np.float16,
    "torch.BFloat16Storage": ml_dtypes.bfloat16,
    "torch.LongStorage": np.int64,
    "torch.IntStorage": np.int32,
    "torch.ShortStorage": np.int16,
    "torch.CharStorage": np.int8,
    "torch.ByteStorage": np.uint8,
    "torch.BoolStorage": np.bool_,
}
# Called for a NumPy scalar, such as a loss.
_SCALARS = {"_codecs.encode", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype"}
_CALLED = {
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.Size",
}
_NAMES = {*_STORAGES, *_SCALARS, *_CALLED}
_MOST_OPCODES = 1_000_000  # a tensor takes 30; two that make and remember an empty dictionary take 200 bytes, the most
_MOST_DIMS = 16
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclasses.dataclass(frozen=True)
class Storage:
    """``count`` elements of ``dtype`` in the archive's member ``data/KEY``."""

    key: str
    dtype: np.dtype
    count: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a storage's elements from ``first`` on. Numbers are as the file has them, unchecked."""

    storage: Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Name:
    name: str


type Dictionary = list[tuple[str | int | None, Value]]
"""Keys and values in the order in which they were set; the key is None if it is neither text nor a whole number."""
type Value = str | int | _Name | Storage | Tensor | tuple[Value, ...] | Dictionary | None


def read_pickle(data: bytes) -> Value:
    """The pickled object, as far as tensors go.

    Raises:
      ValueError: If it is cut off, or has what ``torch.save`` does not write for dictionaries of tensors.
    """
    reader = _Reader(data)
    for _ in range(_MOST_OPCODES):
        if reader.step():
            return reader.pop()
    raise ValueError(f"its pickle has over {_MOST_OPCODES:,} opcodes; save model.state_dict() alone")


class _Reader:
    """The stack of values, the marks on it and the remembered values."""

    def __init__(self, data: bytes):
        self._file = io.BytesIO(data)
        self._stack: list[Value] = []
        self._marks: list[int] = []
        self._memo: dict[object, Value] = {}

    def pop(self) -> Value:
        """Takes the last value off the stack."""
        if not self._stack:
            raise ValueError("its pickle takes a value where there is none")
        return self._stack.pop()

    def step(self) -> bool:
        """Carries an opcode out; returns whether it was the last one."""
        code = self._file.read(1)
        opcode = _OPCODES.get(code)
        push = self._stack.append
        match opcode and opcode.name:
            case "STOP":
                return True
            case "PROTO" | "FRAME":
                self._argument(opcode)
            case "MARK":
                self._marks.append(len(self._stack))
            case "BINGET" | "LONG_BINGET":
                push(self._recalled(self._argument(opcode)))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[self._argument(opcode)] = self._last()
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._last()
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                push(str(self._argument(opcode)))
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "INT" | "LONG":
                push(_number(self._argument(opcode)))
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                push(_tuple(self._popped(_TUPLES[name])))
            case "TUPLE":
                push(_tuple(self._marked()))
            case "BINPERSID":
                push(_storage(self.pop()))
            case "GLOBAL":
                push(_name([self._file.readline()[:-1].decode(errors="replace") for _ in range(2)]))
            case "STACK_GLOBAL":
                push(_name(self._popped(2)))
            case "REDUCE":
                push(_called(*self._popped(2)))
            case "BUILD":
                target, _ = self._popped(2)
                push(_built(target))
            case "EMPTY_DICT":
                push([])
            case "SETITEM":
                self._set(self._popped(2))
            case "SETITEMS":
                self._set(self._marked())
            case "APPEND":
                self.pop()
            case "APPENDS" | "ADDITEMS":
                self._marked()
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_LIST" | "EMPTY_SET":
                push(None)
            case "BINFLOAT" | "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
                self._argument(opcode)
                push(None)
            case "FROZENSET":
                self._marked()
                push(None)
            case name:
                fault = "is cut off" if not code else f"has {name or code}, which torch.save does not write for tensors"
                raise ValueError(f"its pickle {fault}")
        return False

    def _argument(self, opcode: pickletools.OpcodeInfo | None) -> object:
        """Reads an opcode's argument. Its length cannot pass the data's, which are in memory already."""
        assert opcode is not None
        assert opcode.arg is not None
        try:
            return opcode.arg.reader(self._file)
        except ValueError as error:
            raise ValueError(f"its pickle is damaged: {error}") from error

    def _last(self) -> Value:
        value = self.pop()
        self._stack.append(value)
        return value

    def _popped(self, count: int) -> list[Value]:
        return [self.pop() for _ in range(count)][::-1]

    def _marked(self) -> list[Value]:
        """Takes the values that came after the last mark, which it forgets."""
        if not self._marks:
            raise ValueError("its pickle takes the values after a mark where there is none")
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _recalled(self, index: object) -> Value:
        if index not in self._memo:
            raise ValueError(f"its pickle recalls value {index}, which it has not remembered")
        return self._memo[index]

    def _set(self, items: list[Value]) -> None:
        target = self._last()
        if not isinstance(target, list) or len(items) % 2:
            raise ValueError("its pickle sets items of what is no dictionary")
        keys = (key if isinstance(key, (str, int)) else None for key in items[::2])
        target.extend(zip(keys, items[1::2], strict=True))


def _number(number: object) -> int | None:
    """A whole number of 64 bits. Longer ones, such as the state of a random generator, and bools are not needed."""
    return number if type(number) is int and abs(number) < 1 << 63 else None


def _tuple(items: list[Value]) -> Value:
    """Arguments that have a shape among them are the deepest tuples that a tensor needs."""
    deep = any(isinstance(item, tuple) and any(isinstance(i, tuple) for i in item) for item in items)
    return None if deep or len(items) > _MOST_DIMS else tuple(items)


def _name(parts: Sequence[Value]) -> _Name:
    name = ".".join(part if isinstance(part, str) else "?" for part in parts)
    if name not in _NAMES:
        raise ValueError(
            f"it asks for {name[:100]}, which is not run: only tensors and dictionaries are read. Save"
            " model.state_dict() of a model on one process, without its modules"
        )
    return _Name(name)


def _storage(reference: Value) -> Storage:
    match reference:
        case ("storage", _Name(name), str(key), _, int(count)) if name in _STORAGES:
            return Storage(key, np.dtype(_STORAGES[name]), count)
    raise ValueError("its pickle refers to what is no storage of a known kind")


def _called(function: Value, arguments: Value) -> Value:
    """What PyTorch's function of that name gives."""
    name = function.name if isinstance(function, _Name) else None
    match name, arguments:
        case name, _ if name in _SCALARS:
            return None
        case "collections.OrderedDict", ():
            return []
        case "torch._utils._rebuild_tensor_v2", (
            Storage() as storage,
            int(first),
            tuple(shape),
            tuple(strides),
            *_,
        ) if len(shape) == len(strides):
            return Tensor(storage, first, _integers(shape), _integers(strides))
        case "torch._utils._rebuild_parameter", (Tensor() as tensor, *_):
            return tensor
        case "torch.Size", (tuple(shape),):
            return shape
    raise ValueError(f"its pickle calls {name or 'what is no function'} with other arguments than torch.save does")


def _built(target: Value) -> Value:
    """Leaves attributes out: a state_dict's ``_metadata``, and what the dtype of a NumPy scalar has."""
    if target is None or isinstance(target, list):
        return target
    raise ValueError("its pickle sets attributes of what has none")


def _integers(values: tuple[Value, ...]) -> tuple[int, ...]:
    integers = tuple(value for value in values if isinstance(value, int))
    if len(integers) < len(values):
        raise ValueError("a tensor's shape or strides are no whole numbers")
    return integers
