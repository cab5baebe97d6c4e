"""The log and the report of a run: metrics, sections from the run's parts, and plots."""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.app.report.terminal import summary as summary
    from jrec.app.report.writing import write_report as write_report

__getattr__, __dir__, __all__ = attach(__name__)
