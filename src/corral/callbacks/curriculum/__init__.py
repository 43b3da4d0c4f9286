"""Ready curricula: callbacks that choose the tasks of training."""

from corral.callbacks.curriculum.learning_progress import LearningProgressSampler
from corral.callbacks.curriculum.thresholds import ThresholdCurriculum

__all__ = ["LearningProgressSampler", "ThresholdCurriculum"]
