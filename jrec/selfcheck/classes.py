"""Which kernel classes there are to check: all that users are likely to meet, or only one model's."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence

from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.tt.shape import TTShape
from jrec.ops.verdicts import CAST, KernelClass
from jrec.selfcheck.trials import OPTIMIZERS

DTYPES = ("float32", "bfloat16", "float16")
_DIMS = (16, 32, 64, 128, 256)
_FEW_DIMS = (64, 128)
_FIRST = ("RowWiseAdagrad", "SGD", "Adam")  # the optimizers of most models
_TT_SHAPES = (TTShape.search(1_000_000, 16, ranks=32), TTShape.search(1_000_000, 64, ranks=32))


def all_classes() -> tuple[KernelClass, ...]:
    """The classes of usual models, those that most of them need first; a run checks its own besides."""
    rest = [name for name in OPTIMIZERS if name not in _FIRST]
    classes = [CAST]
    for dtype, dims, optimizers in (
        ("float32", _DIMS, _FIRST),
        ("bfloat16", _DIMS, _FIRST),
        ("float32", _FEW_DIMS, rest),
        ("float16", _FEW_DIMS, _FIRST),
    ):
        for dim in dims:
            classes += _of_rows(dim, dtype, optimizers)
    for shape in _TT_SHAPES:
        classes += _of_cores(shape)
    return tuple(dict.fromkeys(classes))


def classes_of(
    layout: EmbeddingLayout, *, optimizer: Callable[[str], str | None], padded: bool = False
) -> tuple[KernelClass, ...]:
    """What a model on this layout may run on a GPU, the most frequent first.

    Args:
      layout: The model's tables.
      optimizer: By table, the class name of its rows' optimizer; None where they are not updated.
      padded: Whether stored rows are padded to a multiple of 16 bytes.
    """
    from jrec.ops.storage import padded_dim

    classes = [CAST]
    for stack in layout.members:
        if stack.compressed:
            for table in stack.tables:
                assert table.tt_shape is not None
                classes += _of_cores(table.tt_shape)
            classes += _sums(stack.dim, "float32")
            continue
        itemsize = 4 if stack.dtype == "float32" else 2
        dim = padded_dim(stack.dim, itemsize) if padded else stack.dim
        # Activations and gradients are summed in float32 whatever the table's dtype.
        names = (optimizer(table.name) for table in stack.tables)
        of_rows = _of_rows(dim, stack.dtype, [name for name in names if name is not None])
        classes += [*_sums(dim, "float32"), *of_rows]
    return tuple(dict.fromkeys(sorted(classes, key=lambda kernel_class: kernel_class.kernel == "row_update")))


def _sums(dim: int, dtype: str) -> list[KernelClass]:
    return [KernelClass(kernel="gather_reduce", dtype=dtype, dim=dim)]


def _of_rows(dim: int, dtype: str, optimizers: Iterable[str]) -> Iterator[KernelClass]:
    yield from _sums(dim, dtype)
    for optimizer in optimizers:
        for kernel in ("casted_update", "row_update"):
            yield KernelClass(kernel=kernel, dtype=dtype, dim=dim, optimizer=optimizer)


def _of_cores(shape: TTShape) -> list[KernelClass]:
    """Products of every level, and sums of rows that are made of them; cores are widened to float32 before."""
    classes, height = [], shape.core_shapes[0][2]
    for _, rank, columns, right_rank in shape.core_shapes[1:]:
        dim = (height, rank, columns, right_rank)
        classes.append(KernelClass(kernel="tt_products", dtype="float32", dim=dim))
        height *= columns
    return [*classes, *_sums(shape.dim, "float32")]


def select(classes: Sequence[KernelClass], patterns: Sequence[str]) -> tuple[KernelClass, ...]:
    """Those that a pattern names: words of a class ("gather_reduce", "64", "Adam"), or its text with ``*`` and ``?``.

    A pattern of several words wants all of them; a pattern that is a whole class is that class, known or not.

    Raises:
      ConfigError: If a pattern names none.
    """
    selected: list[KernelClass] = []
    for pattern in patterns:
        words = pattern.split()
        matching = [
            kernel_class
            for kernel_class in classes
            if fnmatch.fnmatchcase(str(kernel_class), pattern)
            or all(
                any(fnmatch.fnmatchcase(word_of_class, word) for word_of_class in str(kernel_class).split())
                for word in words
            )
        ]
        selected += matching or _parsed(pattern, classes)
    return tuple(dict.fromkeys(selected))


def _parsed(pattern: str, classes: Sequence[KernelClass]) -> list[KernelClass]:
    known = {kernel_class.kernel for kernel_class in classes}
    try:
        kernel_class = KernelClass.parse(pattern)
    except ValueError:
        kernel_class = None
    if kernel_class is None or kernel_class.kernel not in known or kernel_class.dtype not in (*DTYPES, "int32"):
        raise ConfigError(
            f"--only {pattern!r} names no kernel class; give words of one, such as 'gather_reduce', 'bfloat16' or"
            " 'casted_update 64', or a whole one, such as 'casted_update float32 48 Adam'"
        )
    return [kernel_class]
