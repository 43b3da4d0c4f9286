"""Reports on run directories: one HTML file, or one picture."""

from corral.report.page import write_report
from corral.report.plot import write_plot

__all__ = ["write_plot", "write_report"]
