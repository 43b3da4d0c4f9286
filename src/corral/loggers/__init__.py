"""Loggers and the run directory: what a run leaves on disk."""

from corral.loggers.base import Logger
from corral.loggers.files import CSVLogger, JSONLinesLogger, default_loggers
from corral.loggers.run import Run
from corral.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "JSONLinesLogger", "Logger", "Run", "TensorBoardLogger", "default_loggers"]
