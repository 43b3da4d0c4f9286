"""Type aliases that scripts use in annotations. They only name what a value is: nothing checks them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Optional, TypeVar, Union

import gymnasium as gym

# Arrays, tensors and nested structures of them.
TensorType = Any
TensorStructType = Union[TensorType, dict, tuple]  # type: ignore[type-arg]  # noqa: UP007
TensorShape = tuple[int, ...] | list[int]
NetworkType = Any
DeviceType = Any
StateDict = dict[str, Any]
SpaceStruct = gym.Space[Any] | dict[str, Any] | tuple[Any, ...]

# Ids.
AgentID = Hashable
EnvID = int | str
EpisodeID = int | str
ModuleID = str
PolicyID = str
UnrollID = int

# Configs.
AlgorithmConfigDict = dict
PartialAlgorithmConfigDict = dict
ModelConfigDict = dict
EnvConfigDict = dict
FromConfigSpec = Any
ConvFilterSpec = list[Any]
LearningRateOrSchedule = float | list[Any]
RLModuleSpecType = Any

# Envs and episodes.
EnvType = Any
EnvCreator = Callable[[Any], Optional[EnvType]]  # noqa: UP045
EnvActionType = Any
EnvInfoDict = dict
EnvObsType = Any
EpisodeType = Any
MultiAgentDict = dict[AgentID, Any]
MultiEnvDict = dict[EnvID, MultiAgentDict]
TaskType = Any

# Policies, modules and learners.
AgentToModuleMappingFn = Callable[..., ModuleID]
GradInfoDict = dict
IsPolicyToTrain = Callable[..., bool]
LearnerStatsDict = dict
LocalOptimizer = Any
ModelGradients = Any
ModelInputDict = dict[str, TensorType]
ModelWeights = dict
MultiAgentPolicyConfigDict = dict[PolicyID, Any]
NamedParamDict = dict[str, Any]
Optimizer = Any
Param = Any
ParamDict = dict[Hashable, Any]
ParamList = list[Any]
ParamRef = Hashable
PolicyOutputType = tuple[Any, ...]
PolicyState = dict[str, Any]
ResultDict = dict
SampleBatchType = Any
ShouldModuleBeUpdatedFn = Any
StateBatches = list[list[Any]]
ViewRequirementsDict = dict[str, Any]

FileType = Any
T = TypeVar("T")
