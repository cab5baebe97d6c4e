"""Exported models: load one, and score raw columns with it, without the run that trained it.

Names are imported when first used, so that ``jrec serve`` refuses what is no export before JAX is loaded.
"""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.serving.answers import Best as Best
    from jrec.serving.answers import CandidateScores as CandidateScores
    from jrec.serving.answers import Scored as Scored
    from jrec.serving.edit import write_delta as write_delta
    from jrec.serving.format import ExportError as ExportError
    from jrec.serving.format import Manifest as Manifest
    from jrec.serving.ids import Ids as Ids
    from jrec.serving.model import Model as Model
    from jrec.serving.model import load as load
    from jrec.serving.quantize import dequantize as dequantize
    from jrec.serving.quantize import quantize as quantize

__getattr__, __dir__, __all__ = attach(__name__)
