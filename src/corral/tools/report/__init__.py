"""Reports on run directories: one HTML file, or one picture."""

from corral.tools.report.page import write_report
from corral.tools.report.plot import write_plot

__all__ = ["write_plot", "write_report"]
