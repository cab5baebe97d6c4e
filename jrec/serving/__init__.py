"""Exported models: load one, and score raw columns with it, without the run that trained it."""

from jrec.serving.format import ExportError as ExportError
from jrec.serving.format import Manifest as Manifest
from jrec.serving.ids import Ids as Ids
from jrec.serving.model import Model as Model
from jrec.serving.model import load as load
from jrec.serving.quantize import dequantize as dequantize
from jrec.serving.quantize import quantize as quantize
