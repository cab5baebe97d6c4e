"""Which rows are accessed how often: counts of a dataset, exact or sampled, and of a running training."""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.access.count import exact_profile as exact_profile
    from jrec.access.count import sampled_profile as sampled_profile
    from jrec.access.monitor import AccessMonitor as AccessMonitor
    from jrec.access.power_law import power_law_profile as power_law_profile
    from jrec.access.profile import AccessProfile as AccessProfile
    from jrec.access.profile import ProfileError as ProfileError
    from jrec.access.profile import TableProfile as TableProfile

__getattr__, __dir__, __all__ = attach(__name__)
