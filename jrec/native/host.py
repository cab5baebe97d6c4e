"""The native kernels on NumPy arrays, multi-threaded: for the loader's casts and for tables in host memory."""

from jrec.native.host_cast import tensor_cast as tensor_cast
from jrec.native.host_segments import casted_update as casted_update
from jrec.native.host_segments import gather_reduce as gather_reduce
from jrec.native.host_segments import row_update as row_update
