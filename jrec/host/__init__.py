"""The host tier: tables larger than the device, in host memory."""

from jrec.host.paging import MemoryLimit as MemoryLimit
from jrec.host.table import HostTable as HostTable
