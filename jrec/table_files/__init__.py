"""Tables in safetensors files, as language models are published: read row by row, and written as their rows come."""

from jrec.table_files.overlays import write_overlay as write_overlay
from jrec.table_files.safetensors import Tensors as Tensors
from jrec.table_files.safetensors import write_tensors as write_tensors
from jrec.table_files.scales import dequantized as dequantized
from jrec.table_files.scales import quantized as quantized
from jrec.table_files.tables import StoredTable as StoredTable
from jrec.table_files.tables import TableFormat as TableFormat
from jrec.table_files.write import write_table as write_table
