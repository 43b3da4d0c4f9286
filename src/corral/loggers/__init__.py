"""Loggers and the run directory: the files that a run writes."""

from corral.core.result_values import classify
from corral.loggers.base import Logger
from corral.loggers.files import CSVLogger, JSONLinesLogger, default_loggers
from corral.loggers.images import ImageLogger
from corral.loggers.mlflow import MLflowLogger
from corral.loggers.run import Run
from corral.loggers.tensorboard import TensorBoardLogger
from corral.loggers.trackio import TrackioLogger
from corral.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "ImageLogger",
    "JSONLinesLogger",
    "Logger",
    "MLflowLogger",
    "Run",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "classify",
    "default_loggers",
]
