"""Names for what generates a kernel's code.

llvmlite declares no types, and those that a checker infers from its decorators are wrong: it takes ``builder.add`` to
return None. So these are ``Any`` to a checker; the names say which object is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Builder = Any
"""``llvmlite.ir.IRBuilder``, at the place where the next instruction goes."""
Value = Any
"""``llvmlite.ir.Value``: a constant, an argument, or the result of an instruction."""
Values = Sequence[Value]
"""The arguments of an intrinsic, or other values in their order."""
Intrinsic = Callable[..., Any]
"""What numba's ``intrinsic`` makes: kernels call it with the arguments behind the typing context."""
