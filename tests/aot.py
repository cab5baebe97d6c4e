"""Ahead-of-time compilation for an H200 on a machine without one, and running the result on the PTX machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import ptx_machine
import pytest
from jax._src.state.types import AbstractRef

import jrec.pallas.cast
import jrec.pallas.launch
import jrec.pallas.row_update
import jrec.pallas.tt.product
import jrec.pallas.tt.reduce
from benchmarks import ahead_of_time, ptxas
from benchmarks.ahead_of_time import CompiledKernel, Program, compile_for_h200, compile_program, dumped_ptx, shape
from jrec.pallas.launch import launch

mesh, sharding = ahead_of_time.mesh, ahead_of_time.sharding

compiled_variants: list[tuple[str, int, int]] = []
"""Name, registers, and registers by the other ptxas (0 without one) of the kernels of the test that runs."""


def needs_environment() -> pytest.MarkDecorator:
    """Skips where CUDA's compiler is not installed."""
    return pytest.mark.skipif(
        not ahead_of_time.is_available(),
        reason="compiling for an H200 needs jax[cuda13]: run -m aot with JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 in an"
        " environment made by scripts/setup.sh .venv-aot requirements/aot.txt",
    )


@functools.cache
def other_ptxas() -> pathlib.Path | None:
    """The ptxas that JREC_OTHER_PTXAS names: GPU machines have an older one than ``requirements/aot.txt``."""
    named = os.environ.get("JREC_OTHER_PTXAS")
    return pathlib.Path(named) if named else None


@contextlib.contextmanager
def ptx_machine_launches():
    """Kernels launched inside are compiled for an H200, and run on the PTX machine. Yields a list of their PTX."""
    modules: list[str] = []
    run = functools.partial(_launch_on_machine, modules)
    kernels = jrec.pallas
    with contextlib.ExitStack() as stack, jax.disable_jit():
        for home in (kernels.launch, kernels.cast, kernels.row_update, kernels.tt.product, kernels.tt.reduce):
            stack.enter_context(mock.patch.object(home, "launch", run))
        yield modules


def _launch_on_machine(modules, jobs, *, interpret):
    assert interpret is None
    leaves, tree = jax.tree.flatten([job.operands for job in jobs])
    distinct = list({id(leaf): leaf for leaf in leaves}.values())
    written = [i for i, leaf in enumerate(distinct) if _is_ref(leaf)]
    arrays = [np.array(leaf[...] if i in written else leaf) for i, leaf in enumerate(distinct)]

    def kernel(*arguments):
        refs = {
            id(leaf): jax.new_ref(a) if i in written else a
            for i, (leaf, a) in enumerate(zip(distinct, arguments, strict=True))
        }
        operands = tree.unflatten([refs[id(leaf)] for leaf in leaves])
        again = [dataclasses.replace(job, operands=of_job) for job, of_job in zip(jobs, operands, strict=True)]
        copy_of = {id(job): copy for job, copy in zip(jobs, again, strict=True)}
        again = [
            job if job.writes is None else dataclasses.replace(job, writes=copy_of[id(job.writes)]) for job in again
        ]
        return launch(again, interpret=None), [jax.freeze(refs[id(distinct[i])]) for i in written]

    with jax.disable_jit(False), dumped_ptx() as dumped:
        arguments = [shape(a.shape, a.dtype) for a in arrays]
        compiled = compile_for_h200(kernel, *arguments, donate_argnums=tuple(written), keep_unused=True)
    ((device, host),) = dumped
    modules.append(device)
    made = [[poisoned(out) for out in job.out_types] for job in jobs]
    new = [array for arrays in made for array in arrays]
    operands_ = _operands(compiled.as_text())
    buffers = [arrays[i] for i in operands_] + new  # results that alias an operand are not passed by the host code
    order, grid = _host_call(host)
    allowed = {k for k, b in enumerate(order) if b >= len(operands_) or operands_[b] in written}
    flat = [buffers[i].reshape(-1).view(np.uint8) for i in order]
    ptx_machine.Machine(ptx_machine.parse(device), flat, allowed).run(grid)
    for i in written:
        distinct[i][...] = jnp.asarray(arrays[i])
    return [tuple(jnp.asarray(array) for array in arrays) for arrays in made]


def poisoned(out: jax.ShapeDtypeStruct) -> np.ndarray:
    """Memory that nobody wrote: NaN, or a large integer."""
    poison = np.nan if jnp.issubdtype(out.dtype, jnp.floating) else jnp.iinfo(out.dtype).max // 3
    return np.full(out.shape, poison, out.dtype)


def _is_ref(leaf) -> bool:
    return isinstance(jax.typeof(leaf), AbstractRef)


def _operands(hlo: str) -> list[int]:
    """Which program parameter each operand of the only Mosaic call is."""
    parameters = {name: int(n) for name, n in re.findall(r"(%[\w.]+) = \S+ parameter\((\d+)\)", hlo)}
    aliases = dict(re.findall(r"(%[\w.]+) = \S+ bitcast\((%[\w.]+)\)", hlo))
    (call,) = [line for line in hlo.splitlines() if "custom-call(" in line and "mosaic_gpu" in line]
    names = re.findall(r"%[\w.]+", re.search(r"custom-call\((.*?)\), custom_call_target", call)[1])
    return [parameters[aliases.get(name, name)] for name in names]


def _host_call(host: str) -> tuple[list[int], int]:
    """Which buffer each kernel parameter is, and how many blocks are launched, from the host's LLVM code."""
    host = host.split("\n}")[0]
    places = {"%2": 0} | {v: int(i) for v, i in re.findall(r"(%\d+) = getelementptr ptr, ptr %2, i32 (\d+)", host)}
    buffers = {v: places[p] for v, p in re.findall(r"(%\d+) = load ptr, ptr (%\d+)", host)}
    slots = re.findall(r"(%\d+) = getelementptr \{[^}]*\}, ptr %\d+, i32 0, i32 (\d+)", host)
    stored = {p: v for v, p in re.findall(r"store ptr (%\d+), ptr (%\d+)", host)}
    order = [buffers[stored[place]] for place, _ in sorted(slots, key=lambda slot: int(slot[1]))]
    launched = re.search(r"@mosaic_gpu_launch_kernel\(ptr %0, i32 (\d+), i32 1, i32 1,", host)
    return order, int(launched[1])


def compile_checked(name, function, *arguments, **options) -> tuple[jax.stages.Compiled, dict[str, str]]:
    """``check_program``'s executable, and its PTX modules by the name of their kernel."""
    program = check_program(name, function, *arguments, **options)
    modules: dict[str, str] = {}
    for kernel in program.kernels:
        modules.setdefault(kernel.name, kernel.ptx)
    return program.executable, modules


def check_program(name, function, *arguments, **options) -> Program:
    """Compiles for an H200, counts the kernels, and checks what holds for every one of them, by both ptxas.

    Args:
      name: What is compiled, for the count and for messages.
      function: What to compile.
      *arguments: Made by ``shape``.
      **options: Options of ``jax.jit``.
    """
    return check_kernels(name, compile_program(function, *arguments, **options))


def check_kernels(name, program: Program) -> Program:
    """Checks what holds for every kernel of a program, by both ptxas, and counts them."""
    other = other_ptxas()
    for kernel in program.kernels:
        check_kernel(name, kernel)
        again = kernel.assembled_by(other) if other else None
        if again:
            check_kernel(f"{name}, by ptxas {ptxas.version(other)}", again)
        compiled_variants.append((kernel.name, kernel.registers, again.registers if again else 0))
    return program


def check_kernel(name, kernel: CompiledKernel, *, architecture: str = ahead_of_time.H200.architecture) -> None:
    """Asserts that a kernel of ``name`` keeps its values in registers and has no atomics."""
    label = f"{name}: {kernel.name}"
    assert f".target {architecture}\n" in kernel.ptx
    assert ".local" not in kernel.ptx, f"{label} keeps values in local memory"
    assert not re.search(r"\b(atom|red)\.", kernel.ptx), f"{label} has atomics"
    assert not kernel.spills, (
        f"{label} spills {kernel.spills} bytes of a thread's registers, of which it has {kernel.registers}"
    )
    assert not kernel.stack_bytes, f"{label} has a stack frame of {kernel.stack_bytes} bytes"
