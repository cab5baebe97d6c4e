"""Raw click logs: files, formats, and the parser that they share."""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.data.readers.avazu import Avazu as Avazu
    from jrec.data.readers.criteo import Criteo as Criteo
    from jrec.data.readers.delimited import Delimited as Delimited
    from jrec.data.readers.delimited_schema import load_schema as load_schema
    from jrec.data.readers.movielens import MovieLens as MovieLens
    from jrec.data.readers.movielens import MovieLensOptions as MovieLensOptions
    from jrec.data.readers.source import CategoricalSpec as CategoricalSpec
    from jrec.data.readers.source import Chunk as Chunk
    from jrec.data.readers.source import Source as Source
    from jrec.data.readers.taobao import SequenceOptions as SequenceOptions
    from jrec.data.readers.taobao import Taobao as Taobao
    from jrec.data.readers.taobao import TaobaoSequences as TaobaoSequences

__getattr__, __dir__, __all__ = attach(__name__)
