"""Raw click logs: files, formats, and the parser that they share."""

from jrec.data.readers.avazu import Avazu
from jrec.data.readers.criteo import Criteo
from jrec.data.readers.delimited import Delimited
from jrec.data.readers.delimited_schema import load_schema
from jrec.data.readers.movielens import MovieLens, MovieLensOptions
from jrec.data.readers.source import CategoricalSpec, Chunk, Source
from jrec.data.readers.taobao import SequenceOptions, Taobao, TaobaoSequences

__all__ = [
    "Avazu",
    "CategoricalSpec",
    "Chunk",
    "Criteo",
    "Delimited",
    "MovieLens",
    "MovieLensOptions",
    "SequenceOptions",
    "Source",
    "Taobao",
    "TaobaoSequences",
    "load_schema",
]
