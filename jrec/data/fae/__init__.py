"""Datasets packed for FAE: hot examples apart from cold ones (FAE, §III-B)."""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.data.fae.manifest import FaeManifest as FaeManifest
    from jrec.data.fae.manifest import HotSet as HotSet
    from jrec.data.fae.manifest import is_fae_folder as is_fae_folder
    from jrec.prepare.fae_pack import PackOptions as PackOptions

__getattr__, __dir__, __all__ = attach(__name__)
