"""Loggers and the run directory: the files that a run writes."""

from corral.loggers.base import Logger
from corral.loggers.files import CSVLogger, JSONLinesLogger, default_loggers
from corral.loggers.run import Run
from corral.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "JSONLinesLogger", "Logger", "Run", "TensorBoardLogger", "default_loggers"]
