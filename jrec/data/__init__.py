"""Datasets: schemas, preparation of raw logs, synthetic data, and the loader."""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.data.dataset_packer import dataset_packer as dataset_packer
    from jrec.data.dataset_packer import pack_encoded as pack_encoded
    from jrec.data.encoded_columns import EncodedColumns as EncodedColumns
    from jrec.data.growing import GrowingVocabulary as GrowingVocabulary
    from jrec.data.growing import Growth as Growth
    from jrec.data.loader import Loader as Loader
    from jrec.data.loader import LoaderConfig as LoaderConfig
    from jrec.data.loader import make_loader as make_loader
    from jrec.data.packing import pack_batch as pack_batch
    from jrec.data.schema import DatasetError as DatasetError
    from jrec.data.schema import Schema as Schema
    from jrec.data.value_rows import load_vocabularies as load_vocabularies
    from jrec.prepare.encoder import Encoder as Encoder

__getattr__, __dir__, __all__ = attach(__name__)
