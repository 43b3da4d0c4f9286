"""Ready curricula: callbacks that choose the tasks of training."""

from corral.curriculum.learning_progress import LearningProgressSampler
from corral.curriculum.thresholds import ThresholdCurriculum

__all__ = ["LearningProgressSampler", "ThresholdCurriculum"]
