"""Corral: reinforcement learning from one config, on one laptop or many machines.

Names are imported when they are first used, so that `import corral` costs neither torch nor ray.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from corral.moved import MovedModules

__version__ = "0.2.0"

if TYPE_CHECKING:
    from corral import coordination as coordination
    from corral.algorithms.algorithm import Algorithm as Algorithm
    from corral.algorithms.appo import APPO as APPO
    from corral.algorithms.appo import APPOConfig as APPOConfig
    from corral.algorithms.bc import BC as BC
    from corral.algorithms.bc import BCConfig as BCConfig
    from corral.algorithms.config.config import AlgorithmConfig as AlgorithmConfig
    from corral.algorithms.cql import CQL as CQL
    from corral.algorithms.cql import CQLConfig as CQLConfig
    from corral.algorithms.crossq import CrossQ as CrossQ
    from corral.algorithms.crossq import CrossQConfig as CrossQConfig
    from corral.algorithms.dqn import DQN as DQN
    from corral.algorithms.dqn import DQNConfig as DQNConfig
    from corral.algorithms.dreamerv3 import DreamerV3 as DreamerV3
    from corral.algorithms.dreamerv3 import DreamerV3Config as DreamerV3Config
    from corral.algorithms.impala import IMPALA as IMPALA
    from corral.algorithms.impala import IMPALAConfig as IMPALAConfig
    from corral.algorithms.iql import IQL as IQL
    from corral.algorithms.iql import IQLConfig as IQLConfig
    from corral.algorithms.marwil import MARWIL as MARWIL
    from corral.algorithms.marwil import MARWILConfig as MARWILConfig
    from corral.algorithms.ppo import PPO as PPO
    from corral.algorithms.ppo import PPOConfig as PPOConfig
    from corral.algorithms.pqn import PQN as PQN
    from corral.algorithms.pqn import PQNConfig as PQNConfig
    from corral.algorithms.registry import register_algorithm as register_algorithm
    from corral.algorithms.sac import SAC as SAC
    from corral.algorithms.sac import SACConfig as SACConfig
    from corral.algorithms.stopping import Below as Below
    from corral.algorithms.td3 import DDPG as DDPG
    from corral.algorithms.td3 import TD3 as TD3
    from corral.algorithms.td3 import DDPGConfig as DDPGConfig
    from corral.algorithms.td3 import TD3Config as TD3Config
    from corral.algorithms.tqc import TQC as TQC
    from corral.algorithms.tqc import TQCConfig as TQCConfig
    from corral.callbacks.callback import Callback as Callback
    from corral.callbacks.callback import make_multi_callbacks as make_multi_callbacks
    from corral.compat.sb3.models import from_sb3 as from_sb3
    from corral.core.metrics.summary import summary as summary
    from corral.core.returns import gae as gae
    from corral.data.episodes.episode import SingleAgentEpisode as SingleAgentEpisode
    from corral.data.episodes.multi_agent_episode import MultiAgentEpisode as MultiAgentEpisode
    from corral.engines import make_engine as make_engine
    from corral.envs.agent_copies import make_multi_agent as make_multi_agent
    from corral.envs.episode_resets import EpisodeReset as EpisodeReset
    from corral.envs.multi_agent_env import MultiAgentEnv as MultiAgentEnv
    from corral.envs.tasks import TaskSettableEnv as TaskSettableEnv
    from corral.envs.tensor_env import TensorVectorEnv as TensorVectorEnv
    from corral.envs.vector import EnvContext as EnvContext
    from corral.exploration.base import Exploration as Exploration
    from corral.learners.learner import Learner as Learner
    from corral.learners.settings import LearningSpec as LearningSpec
    from corral.learners.settings import UpdateSettings as UpdateSettings
    from corral.modules.heuristic import HeuristicModule as HeuristicModule
    from corral.modules.heuristic import RandomModule as RandomModule
    from corral.modules.module import Module as Module
    from corral.modules.transforms.observations import ClipObservations as ClipObservations
    from corral.modules.transforms.observations import FlattenObservations as FlattenObservations
    from corral.modules.transforms.observations import NormalizeObservations as NormalizeObservations
    from corral.modules.transforms.rewards import ClipRewards as ClipRewards
    from corral.modules.transforms.rewards import NormalizeRewards as NormalizeRewards
    from corral.modules.transforms.temporal import FrameStack as FrameStack
    from corral.modules.transforms.temporal import PrevActionsPrevRewards as PrevActionsPrevRewards
    from corral.modules.transforms.transform import TemporalTransform as TemporalTransform
    from corral.modules.transforms.transform import Transform as Transform
    from corral.runners.evaluation.rounds import RoundPlan as RoundPlan
    from corral.runners.evaluation.rounds import play_round as play_round
    from corral.runners.evaluation.statistics import summarize_episodes as summarize_episodes
    from corral.runners.requests import SampleRequest as SampleRequest
    from corral.runners.runner import EnvRunner as EnvRunner
    from corral.runners.runner_group import EnvRunnerGroup as EnvRunnerGroup
    from corral.runners.serving.external_env import ExternalEnv as ExternalEnv
    from corral.runs.policies.estimate_return import OffPolicyEvaluation as OffPolicyEvaluation
    from corral.runs.policies.estimate_return import estimate_return as estimate_return
    from corral.runs.policies.policy import Policy as Policy
    from corral.runs.policies.policy import load_policy as load_policy
    from corral.tools.playing.evaluate import PolicyEvaluation as PolicyEvaluation
    from corral.tools.playing.evaluate import evaluate_policy as evaluate_policy

_HOMES = {
    "APPO": "corral.algorithms.appo",
    "APPOConfig": "corral.algorithms.appo",
    "Algorithm": "corral.algorithms.algorithm",
    "AlgorithmConfig": "corral.algorithms.config.config",
    "BC": "corral.algorithms.bc",
    "BCConfig": "corral.algorithms.bc",
    "Below": "corral.algorithms.stopping",
    "CQL": "corral.algorithms.cql",
    "CQLConfig": "corral.algorithms.cql",
    "Callback": "corral.callbacks.callback",
    "ClipObservations": "corral.modules.transforms.observations",
    "ClipRewards": "corral.modules.transforms.rewards",
    "CrossQ": "corral.algorithms.crossq",
    "CrossQConfig": "corral.algorithms.crossq",
    "DDPG": "corral.algorithms.td3",
    "DDPGConfig": "corral.algorithms.td3",
    "DQN": "corral.algorithms.dqn",
    "DQNConfig": "corral.algorithms.dqn",
    "DreamerV3": "corral.algorithms.dreamerv3",
    "DreamerV3Config": "corral.algorithms.dreamerv3",
    "EnvContext": "corral.envs.vector",
    "EnvRunner": "corral.runners.runner",
    "EnvRunnerGroup": "corral.runners.runner_group",
    "EpisodeReset": "corral.envs.episode_resets",
    "Exploration": "corral.exploration.base",
    "ExternalEnv": "corral.runners.serving.external_env",
    "FlattenObservations": "corral.modules.transforms.observations",
    "FrameStack": "corral.modules.transforms.temporal",
    "HeuristicModule": "corral.modules.heuristic",
    "IMPALA": "corral.algorithms.impala",
    "IMPALAConfig": "corral.algorithms.impala",
    "IQL": "corral.algorithms.iql",
    "IQLConfig": "corral.algorithms.iql",
    "Learner": "corral.learners.learner",
    "LearningSpec": "corral.learners.settings",
    "MARWIL": "corral.algorithms.marwil",
    "MARWILConfig": "corral.algorithms.marwil",
    "Module": "corral.modules.module",
    "MultiAgentEnv": "corral.envs.multi_agent_env",
    "MultiAgentEpisode": "corral.data.episodes.multi_agent_episode",
    "NormalizeObservations": "corral.modules.transforms.observations",
    "NormalizeRewards": "corral.modules.transforms.rewards",
    "OffPolicyEvaluation": "corral.runs.policies.estimate_return",
    "PPO": "corral.algorithms.ppo",
    "PPOConfig": "corral.algorithms.ppo",
    "PQN": "corral.algorithms.pqn",
    "PQNConfig": "corral.algorithms.pqn",
    "Policy": "corral.runs.policies.policy",
    "PolicyEvaluation": "corral.tools.playing.evaluate",
    "PrevActionsPrevRewards": "corral.modules.transforms.temporal",
    "RandomModule": "corral.modules.heuristic",
    "RoundPlan": "corral.runners.evaluation.rounds",
    "SAC": "corral.algorithms.sac",
    "SACConfig": "corral.algorithms.sac",
    "SampleRequest": "corral.runners.requests",
    "SingleAgentEpisode": "corral.data.episodes.episode",
    "TD3": "corral.algorithms.td3",
    "TD3Config": "corral.algorithms.td3",
    "TQC": "corral.algorithms.tqc",
    "TQCConfig": "corral.algorithms.tqc",
    "TaskSettableEnv": "corral.envs.tasks",
    "TemporalTransform": "corral.modules.transforms.transform",
    "TensorVectorEnv": "corral.envs.tensor_env",
    "Transform": "corral.modules.transforms.transform",
    "UpdateSettings": "corral.learners.settings",
    "estimate_return": "corral.runs.policies.estimate_return",
    "evaluate_policy": "corral.tools.playing.evaluate",
    "from_sb3": "corral.compat.sb3.models",
    "gae": "corral.core.returns",
    "load_policy": "corral.runs.policies.policy",
    "make_engine": "corral.engines",
    "make_multi_agent": "corral.envs.agent_copies",
    "make_multi_callbacks": "corral.callbacks.callback",
    "play_round": "corral.runners.evaluation.rounds",
    "register_algorithm": "corral.algorithms.registry",
    "summarize_episodes": "corral.runners.evaluation.statistics",
    "summary": "corral.core.metrics.summary",
}

_MODULES = ("coordination",)

sys.meta_path.append(MovedModules)

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"corral.{name}")
    if name not in _HOMES:
        from corral.errors import nearest_name

        close = None if name.startswith("_") else nearest_name(name, __all__)
        hint = "" if close is None else f". Did you mean {close!r}?"
        raise AttributeError(f"module 'corral' has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
