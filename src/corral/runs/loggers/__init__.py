"""Loggers and the run directory: the files that a run writes."""

from corral.core.result_values import classify
from corral.runs.loggers.base import Logger
from corral.runs.loggers.files import CSVLogger, JSONLinesLogger, default_loggers
from corral.runs.loggers.images import ImageLogger
from corral.runs.loggers.mlflow import MLflowLogger
from corral.runs.loggers.run import Run
from corral.runs.loggers.tensorboard import TensorBoardLogger
from corral.runs.loggers.trackio import TrackioLogger
from corral.runs.loggers.wandb import WandbLogger

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
