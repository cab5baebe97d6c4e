"""FAE's calibrator: which rows are hot, within a budget, and the file that says so."""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.access.calibrate.calibrator import CalibrateOptions as CalibrateOptions
    from jrec.access.calibrate.calibrator import calibrate as calibrate
    from jrec.access.calibrate.file import Calibration as Calibration
    from jrec.access.calibrate.file import CalibrationError as CalibrationError
    from jrec.access.calibrate.sample import SampleOptions as SampleOptions

__getattr__, __dir__, __all__ = attach(__name__)
