"""The offsets that native kernels read XLA's structures at, against the header that this jaxlib ships."""

import ctypes
import pathlib
import re

import jax.ffi
import numba
import pytest
from numba import types

from jrec.native import ffi

HEADER = (pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
SIZES = {"int32_t": 4, "uint32_t": 4, "int": 4, "size_t": 8, "int64_t": 8}
SIZES |= dict.fromkeys(
    re.findall(r"\} (XLA_FFI_\w+);", "".join(re.findall(r"enum \{.*?\} \w+;", HEADER, re.DOTALL))), 4
)
SIZES |= {new: SIZES[old] for old, new in re.findall(r"typedef (u?int\d+_t) (XLA_FFI_\w+);", HEADER) if old in SIZES}


def layout(name):
    """({field: offset}, size) of a structure, by the rules of 64-bit C."""
    (body,) = re.findall(rf"struct {name} \{{(.*?)\n\}}[^,]*?;", HEADER, re.DOTALL)
    offsets, end, widest = {}, 0, 1
    for line in re.sub(r"//[^\n]*", "", body).split(";"):
        if function := re.search(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", line):
            field, size, align = function[1], 8, 8
        elif declared := re.search(r"(?:const )?(\w+)( ?\*+)? ?(\w+)\s*$", line):
            kind, pointer, field = declared.groups()
            size = 8 if pointer else SIZES.get(kind) or layout(kind)[1]
            align = min(size, 8)
        else:
            continue
        end = -(-end // align) * align
        offsets[field], end, widest = end, end + size, max(widest, align)
    return offsets, -(-end // widest) * widest


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("XLA_FFI_CallFrame", {"extension_start": ffi._EXTENSION, "api": ffi._API, "ctx": ffi._CONTEXT,
                               "args": ffi._ARGS, "rets": ffi._RESULTS, "attrs": ffi._ATTRS}),
        ("XLA_FFI_Api", {"XLA_FFI_Error_Create": ffi._ERROR_CREATE, "XLA_FFI_Error_Destroy": ffi._ERROR_DESTROY,
                         "XLA_FFI_ThreadPool_Schedule": ffi._SCHEDULE,
                         "XLA_FFI_ThreadPool_NumThreads": ffi._NUM_THREADS}),
        ("XLA_FFI_Args", {"size": 16, "args": 32}),
        ("XLA_FFI_Rets", {"size": 16, "rets": 32}),
        ("XLA_FFI_Attrs", {"attrs": 40}),
        ("XLA_FFI_Scalar", {"value": 8}),
        ("XLA_FFI_Buffer", {"dtype": 16, "data": 24, "rank": 32, "dims": 40}),
        ("XLA_FFI_InternalExtension", {"type": 8}),
        ("XLA_FFI_Metadata_Extension", {"metadata": 24}),
        ("XLA_FFI_Metadata", {"api_version": 8}),
        ("XLA_FFI_Api_Version", {"major_version": 16, "minor_version": 20}),
        ("XLA_FFI_Error_Create_Args", {"message": 16, "errc": 24}),
        ("XLA_FFI_Error_Destroy_Args", {"error": 16}),
        ("XLA_FFI_ThreadPool_Schedule_Args", {"ctx": 16, "task": 24, "data": 32}),
        ("XLA_FFI_ThreadPool_NumThreads_Args", {"ctx": 16, "num_threads": 24}),
    ],
)  # fmt: skip
def test_offsets_are_those_of_the_header(name, fields):
    offsets, _ = layout(name)
    assert {field: offsets[field] for field in fields} == fields


def test_sizes_are_those_of_the_header():
    assert layout("XLA_FFI_Args")[1] == layout("XLA_FFI_Rets")[1] == ffi._LIST_SIZE
    assert layout("XLA_FFI_CallFrame")[0]["future"] == ffi._FRAME_SIZE  # later fields are of no concern
    sizes = {"Error_Create": 32, "Error_Destroy": 24, "ThreadPool_NumThreads": 32, "ThreadPool_Schedule": 40}
    assert {name: layout(f"XLA_FFI_{name}_Args")[1] for name in sizes} == sizes


def test_an_error_needs_no_memory():
    """What a handler says where there is none left; without its error XLA would take the results as they are."""
    said = []

    def create(words):
        size, extension, text, code = (ctypes.c_int64 * 4).from_address(words)
        said.append((size, extension, ctypes.string_at(text), code))
        return 7

    @numba.cfunc(types.int64(types.int64))
    def out_of_memory(frame):
        return ffi.error(frame, ffi.no_memory(), ffi.RESOURCE_EXHAUSTED)

    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(create)
    api, frame = (ctypes.c_int64 * 32)(), (ctypes.c_int64 * 21)()
    api[ffi._ERROR_CREATE // 8] = ctypes.cast(function, ctypes.c_void_p).value
    frame[ffi._API // 8] = ctypes.addressof(api)
    assert out_of_memory.ctypes(ctypes.addressof(frame)) == 7
    assert said == [(32, 0, b"jrec: out of memory in a native kernel", ffi.RESOURCE_EXHAUSTED)]
    assert "malloc" not in out_of_memory.inspect_llvm()
