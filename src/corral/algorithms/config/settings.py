"""The groups of settings, each of which is in the room that reads it."""

from __future__ import annotations

from corral.callbacks.config import CallbacksSettings
from corral.core.config import DebuggingSettings, EngineSettings, ExplorationSettings, FaultToleranceSettings
from corral.core.metrics.config import ReportingSettings
from corral.data.offline.config import OfflineDataSettings
from corral.envs.config import EnvironmentSettings
from corral.learners.config import LearnersSettings, TrainingSettings
from corral.modules.config import MultiAgentSettings, RLModuleSettings
from corral.runners.config import EnvRunnersSettings
from corral.runners.evaluation.config import EvaluationSettings
from corral.runs.checkpoint.config import CheckpointingSettings

GROUPS: dict[str, type] = {
    "environment": EnvironmentSettings,
    "env_runners": EnvRunnersSettings,
    "training": TrainingSettings,
    "exploration": ExplorationSettings,
    "rl_module": RLModuleSettings,
    "learners": LearnersSettings,
    "callbacks": CallbacksSettings,
    "evaluation": EvaluationSettings,
    "multi_agent": MultiAgentSettings,
    "offline_data": OfflineDataSettings,
    "fault_tolerance": FaultToleranceSettings,
    "reporting": ReportingSettings,
    "checkpointing": CheckpointingSettings,
    "debugging": DebuggingSettings,
    "engine": EngineSettings,
}

# Settings that the setter of their group also accepts without a name: `.environment("CartPole-v1")`.
MAIN_SETTINGS = {"environment": "env", "rl_module": "module_class", "engine": "engine_name"}
