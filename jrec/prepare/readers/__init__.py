"""Raw click logs: files, formats, and the parser that they share."""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.prepare.readers.avazu import Avazu as Avazu
    from jrec.prepare.readers.criteo import Criteo as Criteo
    from jrec.prepare.readers.delimited import Delimited as Delimited
    from jrec.prepare.readers.delimited_schema import load_schema as load_schema
    from jrec.prepare.readers.log_format import CategoricalSpec as CategoricalSpec
    from jrec.prepare.readers.log_format import Chunk as Chunk
    from jrec.prepare.readers.log_format import LogFormat as LogFormat
    from jrec.prepare.readers.movielens import MovieLens as MovieLens
    from jrec.prepare.readers.movielens import MovieLensOptions as MovieLensOptions
    from jrec.prepare.readers.taobao import SequenceOptions as SequenceOptions
    from jrec.prepare.readers.taobao import Taobao as Taobao
    from jrec.prepare.readers.taobao import TaobaoSequences as TaobaoSequences

__getattr__, __dir__, __all__ = attach(__name__)
