"""The names of RLlib that are served: the object of each name, its module paths, and what is not served.

A home is a module of this package (`"config"`), or any other module (`"corral.envs.tasks"`).
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType

EXTRA = "pip install 'corral[rllib]'"

HOMES = {
    "algorithm": (
        "Algorithm PPO PPOConfig APPO APPOConfig IMPALA IMPALAConfig DQN DQNConfig SAC SACConfig TQC TQCConfig BC "
        "BCConfig MARWIL MARWILConfig CQL CQLConfig IQL IQLConfig DreamerV3 DreamerV3Config"
    ),
    "batches": "SampleBatch MultiAgentBatch concat_samples convert_ma_batch_to_sample_batch",
    "callbacks": "RLlibCallback DefaultCallbacks MultiCallbacks make_multi_callbacks",
    "catalogs": "Catalog PPOCatalog BCCatalog DQNCatalog SACCatalog TQCCatalog",
    "config": "AlgorithmConfig",
    "connectors": (
        "ConnectorV2 "
        "FlattenObservations MeanStdFilter FrameStackingEnvToModule FrameStackingLearner PrevActionsPrevRewards "
    ),
    "default_modules": "DefaultPPOTorchRLModule DefaultAPPOTorchRLModule DefaultBCTorchRLModule",
    "default_connectors": (
        "AddObservationsFromEpisodesToBatch AddColumnsFromEpisodesToTrainBatch "
        "AddNextObservationsFromEpisodesToTrainBatch AddInfosFromEpisodesToTrainBatch ComputeReturnsToGo "
        "AddOneTsToEpisodesAndTruncate GeneralAdvantageEstimation AddStatesFromEpisodesToBatch "
        "AddTimeDimToBatchAndZeroPad WriteObservationsToEpisodes AgentToModuleMapping BatchIndividualItems "
        "NumpyToTensor TensorToNumpy GetActions UnBatchToIndividualItems ModuleToAgentUnmapping "
        "RemoveSingleTsTimeRankFromBatch NormalizeAndClipActions ListifyDataForVectorEnv"
    ),
    "distributions": (
        "Distribution TorchCategorical TorchDeterministic TorchDiagGaussian TorchMultiCategorical "
        "TorchMultiDistribution TorchSquashedGaussian"
    ),
    "episodes": "SingleAgentEpisode MultiAgentEpisode",
    "episode_summaries": "RolloutMetrics collect_episodes summarize_episodes",
    "examples": (
        "add_rllib_example_script_args run_rllib_example_script_experiment should_stop check_learning_achieved"
    ),
    "learner": (
        "Learner TorchLearner PPOLearner PPOTorchLearner IMPALALearner IMPALATorchLearner APPOLearner APPOTorchLearner "
        "DQNTorchLearner SACTorchLearner TQCTorchLearner MARWILLearner MARWILTorchLearner CQLTorchLearner IQLLearner "
        "IQLTorchLearner make_target_network"
    ),
    "layers": "MLPEncoderConfig MLPHeadConfig",
    "lookback_buffers": "InfiniteLookbackBuffer",
    "metrics": "MetricsLogger ",
    "model_config": "DefaultModelConfig",
    "modules": (
        "RLModule TorchRLModule RLModuleSpec MultiRLModule MultiRLModuleSpec ValueFunctionAPI TargetNetworkAPI "
        "SelfSupervisedLossAPI InferenceOnlyAPI QNetAPI"
    ),
    "pipelines": "ConnectorPipelineV2 EnvToModulePipeline LearnerConnectorPipeline ModuleToEnvPipeline",
    "policies": "PolicySpec",
    "policy_clients": "PolicyClient",
    "policy_servers": "PolicyServerInput IOContext EnvRunnerServerForExternalInference",
    "policy_views": "Policy",
    "recorded_data": "OfflinePreLearner",
    "ray_registry": "_register_all ALGORITHMS",
    "rollout_ops": "synchronous_parallel_sample",
    "runners": (
        "EnvRunner SingleAgentEnvRunner MultiAgentEnvRunner EnvRunnerGroup WorkerSet RolloutWorker get_global_worker "
        "BaseEnv"
    ),
    "schedules": (
        "ConstantSchedule ExponentialSchedule LinearSchedule PiecewiseSchedule PolynomialSchedule Schedule Scheduler"
    ),
    "preprocessors": "SingleAgentObservationPreprocessor MultiAgentObservationPreprocessor",
    "corral.envs.agent_copies": "make_multi_agent",
    "corral.envs.multi_agent_env": "MultiAgentEnv",
    "corral.envs.pettingzoo_env": "PettingZooEnv ParallelPettingZooEnv",
    "corral.envs.tasks": "TaskSettableEnv",
    "corral.envs.vector": "EnvContext",
    "corral.errors": "EnvError",
    "corral.exploration.base": "Exploration Random StochasticSampling",
    "corral.exploration.bandits": "ThompsonSampling UpperConfidenceBound",
    "corral.exploration.curiosity": "Curiosity",
    "corral.exploration.distillation": "RND",
    "corral.exploration.epsilon": "EpsilonGreedy PerWorkerEpsilonGreedy SoftQ",
    "corral.exploration.noise": "GaussianNoise OrnsteinUhlenbeckNoise PerWorkerGaussianNoise "
    "PerWorkerOrnsteinUhlenbeckNoise",
    "corral.exploration.parameter_noise": "ParameterNoise",
    "corral.exploration.state_entropy": "RE3",
}
"""Names by home: a name is the same object at all its module paths."""

_PPO_KEYS = (
    "constants:LEARNER_RESULTS_CURR_ENTROPY_COEFF_KEY constants:LEARNER_RESULTS_CURR_KL_COEFF_KEY "
    "constants:LEARNER_RESULTS_KL_KEY constants:LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY "
    "constants:LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY"
)

_APPO_KEYS = (
    "constants:LEARNER_RESULTS_CURR_KL_COEFF_KEY constants:LEARNER_RESULTS_KL_KEY "
    "constants:LEARNER_RESULTS_MEAN_IS_KEY constants:LEARNER_RESULTS_VAR_IS_KEY"
)

_MARWIL_KEYS = (
    "constants:LEARNER_RESULTS_MOVING_AVG_SQD_ADV_NORM_KEY "
    "constants:LEARNER_RESULTS_VF_EXPLAINED_VARIANCE_KEY=LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY"
)

_COMMON = "AddObservationsFromEpisodesToBatch AddStatesFromEpisodesToBatch AddTimeDimToBatchAndZeroPad "
_COMMON += "AgentToModuleMapping BatchIndividualItems NumpyToTensor "

_OLD_EPISODES = "episodes:OldEpisode=Episode episodes:OldEpisode=EpisodeV2 MultiAgentEpisode"

MODULES = {
    "": "BaseEnv MultiAgentEnv Policy RolloutWorker batches:SampleBatch _register_all",
    # Algorithms and their configs.
    "agents.callbacks": "DefaultCallbacks MultiCallbacks RLlibCallback make_multi_callbacks",
    "agents.dqn": "DQN algorithm:DQN=DQNTrainer DQNConfig",
    "agents.dqn.dqn": "DQN algorithm:DQN=DQNTrainer DQNConfig",
    "agents.ppo": "PPO algorithm:PPO=PPOTrainer PPOConfig",
    "agents.ppo.ppo": "PPO algorithm:PPO=PPOTrainer PPOConfig",
    "agents.sac": "SAC algorithm:SAC=SACTrainer SACConfig",
    "agents.sac.sac": "SAC algorithm:SAC=SACTrainer SACConfig",
    "algorithms": (
        "Algorithm AlgorithmConfig PPO PPOConfig DQN DQNConfig SAC SACConfig APPO APPOConfig IMPALA IMPALAConfig "
        "algorithm:IMPALA=Impala algorithm:IMPALAConfig=ImpalaConfig BC BCConfig MARWIL MARWILConfig CQL CQLConfig IQL "
        "IQLConfig DreamerV3 DreamerV3Config"
    ),
    "algorithms.algorithm": "Algorithm AlgorithmConfig",
    "algorithms.algorithm_config": "AlgorithmConfig helpers:NotProvided",
    "algorithms.callbacks": "DefaultCallbacks MultiCallbacks RLlibCallback make_multi_callbacks",
    "algorithms.appo": "APPO APPOConfig",
    "algorithms.appo.appo": f"APPO APPOConfig {_APPO_KEYS}",
    "algorithms.appo.appo_learner": f"APPOLearner learner:APPOLearner=AppoLearner {_APPO_KEYS}",
    "algorithms.appo.appo_rl_module": "default_modules:DefaultAPPOTorchRLModule=APPORLModule",
    "algorithms.appo.default_appo_rl_module": "default_modules:DefaultAPPOTorchRLModule=DefaultAPPORLModule",
    "algorithms.appo.torch.appo_torch_learner": "APPOTorchLearner",
    "algorithms.appo.torch.appo_torch_rl_module": "default_modules:DefaultAPPOTorchRLModule=APPOTorchRLModule",
    "algorithms.appo.torch.default_appo_torch_rl_module": "DefaultAPPOTorchRLModule",
    "algorithms.bc": "BC BCConfig",
    "algorithms.bc.bc": "BC BCConfig",
    "algorithms.bc.bc_catalog": "BCCatalog",
    "algorithms.bc.torch.bc_torch_rl_module": "default_modules:DefaultBCTorchRLModule=BCTorchRLModule",
    "algorithms.bc.torch.default_bc_torch_rl_module": "DefaultBCTorchRLModule",
    "algorithms.cql": "CQL CQLConfig",
    "algorithms.cql.cql": "CQL CQLConfig",
    "algorithms.cql.torch.cql_torch_learner": "CQLTorchLearner",
    "algorithms.dqn": "DQN DQNConfig",
    "algorithms.dqn.dqn": "DQN DQNConfig",
    "algorithms.dqn.dqn_catalog": "DQNCatalog",
    "algorithms.dqn.dqn_rainbow_catalog": "catalogs:DQNCatalog=DQNRainbowCatalog",
    "algorithms.dqn.torch.dqn_torch_learner": "DQNTorchLearner",
    "algorithms.impala": "IMPALA IMPALAConfig algorithm:IMPALA=Impala algorithm:IMPALAConfig=ImpalaConfig",
    "algorithms.impala.impala": (
        "IMPALA IMPALAConfig algorithm:IMPALA=Impala algorithm:IMPALAConfig=ImpalaConfig "
        "constants:LEARNER_RESULTS_CURR_ENTROPY_COEFF_KEY"
    ),
    "algorithms.impala.impala_learner": (
        "IMPALALearner learner:IMPALALearner=ImpalaLearner constants:LEARNER_RESULTS_CURR_ENTROPY_COEFF_KEY"
    ),
    "algorithms.impala.torch.impala_torch_learner": "IMPALATorchLearner",
    "algorithms.iql": "IQL IQLConfig",
    "algorithms.iql.iql": "IQL IQLConfig",
    "algorithms.iql.iql_learner": "IQLLearner",
    "algorithms.iql.torch.iql_torch_learner": "IQLTorchLearner IQLLearner",
    "algorithms.marwil": "MARWIL MARWILConfig",
    "algorithms.marwil.marwil": "MARWIL MARWILConfig",
    "algorithms.marwil.marwil_learner": f"MARWILLearner {_MARWIL_KEYS}",
    "algorithms.marwil.torch.marwil_torch_learner": f"MARWILTorchLearner MARWILLearner {_MARWIL_KEYS}",
    "algorithms.ppo": "PPO PPOConfig PPOTorchLearner",
    "algorithms.ppo.ppo": f"PPO PPOConfig {_PPO_KEYS}",
    "algorithms.ppo.ppo_catalog": "PPOCatalog",
    "algorithms.ppo.ppo_learner": f"PPOLearner {_PPO_KEYS}",
    "algorithms.ppo.torch.default_ppo_torch_rl_module": "DefaultPPOTorchRLModule",
    "algorithms.ppo.torch.ppo_torch_learner": "PPOTorchLearner",
    "algorithms.ppo.torch.ppo_torch_rl_module": "default_modules:DefaultPPOTorchRLModule=PPOTorchRLModule",
    "algorithms.registry": "ALGORITHMS",
    "algorithms.dreamerv3": "DreamerV3 DreamerV3Config",
    "algorithms.dreamerv3.dreamerv3": "DreamerV3 DreamerV3Config",
    "algorithms.sac": "SAC SACConfig",
    "algorithms.sac.sac": "SAC SACConfig",
    "algorithms.sac.sac_catalog": "SACCatalog",
    "algorithms.sac.torch.sac_torch_learner": "SACTorchLearner",
    "algorithms.tqc": "TQC TQCConfig TQCCatalog",
    "algorithms.tqc.tqc": "TQC TQCConfig",
    "algorithms.tqc.tqc_catalog": "TQCCatalog",
    "algorithms.tqc.torch.tqc_torch_learner": "TQCTorchLearner",
    "callbacks.callbacks": "RLlibCallback",
    "callbacks.utils": "make_multi_callbacks",
    # Connectors.
    "connectors.common": f"{_COMMON}ModuleToAgentUnmapping TensorToNumpy FlattenObservations",
    "connectors.common.flatten_observations": "FlattenObservations",
    "connectors.common.frame_stacking": "connectors:FrameStackingEnvToModule=FrameStacking",
    "connectors.common.add_observations_from_episodes_to_batch": "AddObservationsFromEpisodesToBatch",
    "connectors.common.add_states_from_episodes_to_batch": "AddStatesFromEpisodesToBatch",
    "connectors.common.add_time_dim_to_batch_and_zero_pad": "AddTimeDimToBatchAndZeroPad",
    "connectors.common.agent_to_module_mapping": "AgentToModuleMapping",
    "connectors.common.batch_individual_items": "BatchIndividualItems",
    "connectors.common.module_to_agent_unmapping": "ModuleToAgentUnmapping",
    "connectors.common.numpy_to_tensor": "NumpyToTensor",
    "connectors.common.tensor_to_numpy": "TensorToNumpy",
    "connectors.connector_pipeline_v2": "ConnectorPipelineV2",
    "connectors.connector_v2": "ConnectorV2",
    "connectors.env_to_module": (
        f"{_COMMON}EnvToModulePipeline WriteObservationsToEpisodes "
        "FlattenObservations MeanStdFilter PrevActionsPrevRewards "
        "connectors:PrevActionsPrevRewards=PrevActionsPrevRewardsConnector "
        "connectors:FrameStackingEnvToModule=FrameStacking"
    ),
    "connectors.env_to_module.env_to_module_pipeline": "EnvToModulePipeline",
    "connectors.env_to_module.flatten_observations": "FlattenObservations",
    "connectors.env_to_module.frame_stacking": "FrameStackingEnvToModule",
    "connectors.env_to_module.mean_std_filter": "MeanStdFilter",
    "connectors.env_to_module.observation_preprocessor": (
        "SingleAgentObservationPreprocessor MultiAgentObservationPreprocessor "
        "preprocessors:SingleAgentObservationPreprocessor=ObservationPreprocessor"
    ),
    "connectors.env_to_module.prev_actions_prev_rewards": "PrevActionsPrevRewards",
    "connectors.env_to_module.write_observations_to_episodes": "WriteObservationsToEpisodes",
    "connectors.learner": (
        f"{_COMMON}LearnerConnectorPipeline AddColumnsFromEpisodesToTrainBatch AddInfosFromEpisodesToTrainBatch "
        "AddNextObservationsFromEpisodesToTrainBatch AddOneTsToEpisodesAndTruncate ComputeReturnsToGo "
        "GeneralAdvantageEstimation connectors:FrameStackingLearner=FrameStacking"
    ),
    "connectors.learner.add_columns_from_episodes_to_train_batch": "AddColumnsFromEpisodesToTrainBatch",
    "connectors.learner.add_infos_from_episodes_to_train_batch": "AddInfosFromEpisodesToTrainBatch",
    "connectors.learner.add_next_observations_from_episodes_to_train_batch": (
        "AddNextObservationsFromEpisodesToTrainBatch"
    ),
    "connectors.learner.add_one_ts_to_episodes_and_truncate": "AddOneTsToEpisodesAndTruncate",
    "connectors.learner.compute_returns_to_go": "ComputeReturnsToGo",
    "connectors.learner.general_advantage_estimation": "GeneralAdvantageEstimation",
    "connectors.learner.frame_stacking": "FrameStackingLearner",
    "connectors.learner.learner_connector_pipeline": "LearnerConnectorPipeline",
    "connectors.module_to_env": (
        "ModuleToEnvPipeline GetActions ListifyDataForVectorEnv ModuleToAgentUnmapping NormalizeAndClipActions "
        "RemoveSingleTsTimeRankFromBatch TensorToNumpy UnBatchToIndividualItems"
    ),
    "connectors.module_to_env.module_to_env_pipeline": "ModuleToEnvPipeline",
    "connectors.module_to_env.get_actions": "GetActions",
    "connectors.module_to_env.listify_data_for_vector_env": "ListifyDataForVectorEnv",
    "connectors.module_to_env.normalize_and_clip_actions": "NormalizeAndClipActions",
    "connectors.module_to_env.remove_single_ts_time_rank_from_batch": "RemoveSingleTsTimeRankFromBatch",
    "connectors.module_to_env.unbatch_to_individual_items": "UnBatchToIndividualItems",
    # Modules, learners and their constants.
    "core": "constants:*",
    "core.columns": "constants:Columns",
    "core.distribution.distribution": "Distribution",
    "core.distribution.torch.torch_distribution": (
        "TorchCategorical TorchDeterministic TorchDiagGaussian TorchMultiCategorical TorchMultiDistribution "
        "TorchSquashedGaussian"
    ),
    "core.learner.learner": (
        "Learner constants:POLICY_LOSS_KEY constants:VF_LOSS_KEY constants:ENTROPY_KEY constants:DEFAULT_OPTIMIZER "
        "constants:LR_KEY constants:LEARNER_RESULTS_CURR_LR_KEY"
    ),
    "core.learner": "Learner",
    "core.learner.torch.torch_learner": "TorchLearner",
    "core.learner.utils": "make_target_network",
    "core.models.catalog": "Catalog",
    "core.models.configs": "MLPEncoderConfig MLPHeadConfig",
    "core.models.base": "constants:ENCODER_OUT constants:ACTOR constants:CRITIC",
    "core.rl_module": "RLModule RLModuleSpec MultiRLModule MultiRLModuleSpec DefaultModelConfig",
    "core.rl_module.apis": (
        "ValueFunctionAPI TargetNetworkAPI SelfSupervisedLossAPI InferenceOnlyAPI QNetAPI "
        "constants:TARGET_NETWORK_ACTION_DIST_INPUTS"
    ),
    "core.rl_module.apis.inference_only_api": "InferenceOnlyAPI",
    "core.rl_module.apis.self_supervised_loss_api": "SelfSupervisedLossAPI",
    "core.rl_module.apis.target_network_api": "TargetNetworkAPI constants:TARGET_NETWORK_ACTION_DIST_INPUTS",
    "core.rl_module.apis.value_function_api": "ValueFunctionAPI",
    "core.rl_module.default_model_config": "DefaultModelConfig",
    "core.rl_module.marl_module": (
        "modules:MultiRLModule=MultiAgentRLModule modules:MultiRLModuleSpec=MultiAgentRLModuleSpec"
    ),
    "core.rl_module.multi_rl_module": "MultiRLModule MultiRLModuleSpec",
    "core.rl_module.rl_module": (
        "RLModule RLModuleSpec DefaultModelConfig modules:RLModuleSpec=SingleAgentRLModuleSpec"
    ),
    "core.rl_module.torch": "TorchRLModule",
    "core.rl_module.torch.torch_rl_module": "TorchRLModule",
    # Envs, runners and episodes.
    "env": "BaseEnv EnvContext MultiAgentEnv PettingZooEnv ParallelPettingZooEnv constants:INPUT_ENV_SPACES",
    "env.apis.task_settable_env": "TaskSettableEnv type_aliases:TaskType",
    "env.base_env": "BaseEnv",
    "env.env_context": "EnvContext",
    "env.env_runner": "EnvRunner constants:ENV_STEP_FAILURE helpers:StepFailedRecreateEnvError",
    "env.env_runner_group": "EnvRunnerGroup",
    "env.external.env_runner_server_for_external_inference": "EnvRunnerServerForExternalInference",
    "env.multi_agent_env": "MultiAgentEnv make_multi_agent constants:ENV_STATE",
    "env.multi_agent_env_runner": "MultiAgentEnvRunner",
    "env.multi_agent_episode": "MultiAgentEpisode",
    "env.policy_client": "PolicyClient",
    "env.policy_server_input": "PolicyServerInput",
    "env.single_agent_env_runner": "SingleAgentEnvRunner",
    "env.single_agent_episode": "SingleAgentEpisode",
    "env.tcp_client_inference_env_runner": (
        "policy_servers:EnvRunnerServerForExternalInference=TcpClientInferenceEnvRunner"
    ),
    "env.utils": "helpers:try_import_pyspiel helpers:try_import_open_spiel helpers:_gym_env_creator",
    "env.utils.infinite_lookback_buffer": "InfiniteLookbackBuffer",
    "env.vector.vector_multi_agent_env": "corral.envs.sync_vector:SyncVectorEnv=VectorMultiAgentEnv",
    "env.wrappers.pettingzoo_env": "PettingZooEnv ParallelPettingZooEnv",
    "evaluation": f"RolloutWorker WorkerSet {_OLD_EPISODES}",
    "evaluation.episode": _OLD_EPISODES,
    "evaluation.episode_v2": _OLD_EPISODES,
    "evaluation.metrics": "RolloutMetrics collect_episodes summarize_episodes",
    "evaluation.postprocessing": "constants:Postprocessing",
    "evaluation.rollout_worker": "RolloutWorker get_global_worker",
    "evaluation.worker_set": "WorkerSet",
    "examples.utils": "add_rllib_example_script_args run_rllib_example_script_experiment should_stop",
    "execution": "synchronous_parallel_sample",
    "execution.rollout_ops": "synchronous_parallel_sample",
    "offline": "OfflinePreLearner",
    "offline.io_context": "IOContext",
    "offline.offline_data": "OfflinePreLearner",
    "offline.offline_prelearner": "OfflinePreLearner recorded_data:SCHEMA",
    "policy": "Policy PolicySpec",
    "policy.policy": "Policy PolicySpec",
    "policy.sample_batch": (
        "SampleBatch MultiAgentBatch concat_samples convert_ma_batch_to_sample_batch constants:DEFAULT_POLICY_ID"
    ),
    # Helpers.
    "utils": "helpers:* constants:LARGE_INTEGER constants:SMALL_NUMBER PiecewiseSchedule ConstantSchedule "
    "ExponentialSchedule LinearSchedule PolynomialSchedule",
    "utils.annotations": (
        "helpers:override helpers:is_overridden helpers:PublicAPI helpers:DeveloperAPI helpers:ExperimentalAPI "
        "helpers:OldAPIStack helpers:OverrideToImplementCustomLogic "
        "helpers:OverrideToImplementCustomLogic_CallToSuperRecommended"
    ),
    "utils.debug": "helpers:update_global_seed_if_necessary",
    "utils.debug.deterministic": "helpers:update_global_seed_if_necessary",
    "utils.deprecation": "helpers:DEPRECATED_VALUE helpers:Deprecated helpers:deprecation_warning",
    "utils.error": "EnvError helpers:UnsupportedSpaceException helpers:MultiAgentEnvError helpers:NotSerializable",
    "utils.exploration": (
        "Curiosity EpsilonGreedy Exploration GaussianNoise OrnsteinUhlenbeckNoise ParameterNoise "
        "PerWorkerEpsilonGreedy PerWorkerGaussianNoise PerWorkerOrnsteinUhlenbeckNoise RE3 Random SoftQ "
        "StochasticSampling ThompsonSampling UpperConfidenceBound"
    ),
    "utils.exploration.curiosity": "Curiosity",
    "utils.exploration.epsilon_greedy": "EpsilonGreedy",
    "utils.exploration.exploration": "Exploration",
    "utils.exploration.gaussian_noise": "GaussianNoise",
    "utils.exploration.ornstein_uhlenbeck_noise": "OrnsteinUhlenbeckNoise",
    "utils.exploration.parameter_noise": "ParameterNoise",
    "utils.exploration.per_worker_epsilon_greedy": "PerWorkerEpsilonGreedy",
    "utils.exploration.per_worker_gaussian_noise": "PerWorkerGaussianNoise",
    "utils.exploration.per_worker_ornstein_uhlenbeck_noise": "PerWorkerOrnsteinUhlenbeckNoise",
    "utils.exploration.random": "Random",
    "utils.exploration.random_encoder": "RE3",
    "utils.exploration.soft_q": "SoftQ",
    "utils.exploration.stochastic_sampling": "StochasticSampling",
    "utils.exploration.thompson_sampling": "ThompsonSampling",
    "utils.exploration.upper_confidence_bound": "UpperConfidenceBound",
    "utils.framework": (
        "helpers:try_import_torch helpers:try_import_tf helpers:try_import_tfp helpers:try_import_jax "
        "helpers:convert_to_tensor helpers:get_activation_fn helpers:get_device helpers:get_variable"
    ),
    "utils.from_config": "helpers:from_config helpers:NotProvided",
    "utils.gym": ("helpers:try_import_gymnasium_and_gym helpers:convert_old_gym_space_to_gymnasium_space"),
    "utils.lambda_defaultdict": "helpers:LambdaDefaultDict",
    "utils.metrics": "constants:*",
    "utils.metrics.learner_info": "constants:LEARNER_INFO constants:LEARNER_STATS_KEY",
    "utils.metrics.metrics_logger": "MetricsLogger",
    "utils.numpy": "numpy_helpers:* constants:LARGE_INTEGER constants:SMALL_NUMBER constants:MAX_LOG_NN_OUTPUT "
    "constants:MIN_LOG_NN_OUTPUT",
    "utils.schedules": (
        "ConstantSchedule ExponentialSchedule LinearSchedule PiecewiseSchedule PolynomialSchedule Schedule"
    ),
    "utils.schedules.scheduler": "Scheduler",
    "utils.serialization": "helpers:convert_numpy_to_python_primitives",
    "utils.spaces.space_utils": "space_helpers:*",
    "utils.test_utils": (
        "add_rllib_example_script_args run_rllib_example_script_experiment should_stop check_learning_achieved "
        "helpers:check helpers:check_train_results helpers:check_train_results_new_api_stack "
        "helpers:check_compute_single_action helpers:framework_iterator"
    ),
    "utils.torch_utils": "torch_helpers:* torch_helpers:_dynamo_is_available constants:FLOAT_MAX constants:FLOAT_MIN",
    "utils.typing": "type_aliases:*",
}
"""Served names by module path below `ray.rllib`. `home:Name` names another home than `HOMES`, `home:Name=Old` serves
the object under an old name, and `home:*` stands for all public names of the home."""

MOVED = {
    "examples.env": "examples.envs.classes",
    "examples.envs.classes.two_step_game": "examples.envs.classes.multi_agent.two_step_game",
    "examples.learners.classes.custom_loss_fn_learner": "examples.learners.classes.custom_ppo_loss_fn_learner",
    "examples.learners.classes.vpg_learner": "examples.learners.classes.vpg_torch_learner",
    "examples.rl_module": "examples.rl_modules.classes",
    "examples.rl_modules.classes.vpg_rlm": "examples.rl_modules.classes.vpg_torch_rlm",
    "examples.rl_module.random_rl_module": "examples.rl_modules.classes.random_rlm",
}
"""Packages, or modules, of older versions, and where their files are now."""

FROM_RAY = (
    "core.testing",
    "env.wrappers",
    "examples",
    "models.torch.misc",
    "models.utils",
    "utils.images",
    "utils.spaces.flexdict",
    "utils.spaces.repeated",
    "utils.spaces.simplex",
)
"""Modules and packages that are loaded from the files of the installed Ray, so that they use the names served here."""

NOT_SERVED = (
    # Pattern of the dotted path with the name, what it belongs to, and what to do instead.
    (
        r"mappo|[Ss]hared_?[Cc]ritic|[Cc]entralized_?[Cc]ritic",
        "a critic that sees all agents, which is a setting in Corral",
        "use corral.PPOConfig().multi_agent(critic_sees=...), see docs/multi-agent.md",
    ),
    (
        r"(^|[.])tf([._]|$)|_tf_|_tf$|[.]TF|Tf[A-Z]|TF[12A-Z]|tf_utils|eager",
        "TensorFlow, which Corral does not use",
        "use torch",
    ),
    (
        r"^evaluation|^execution|postprocessing|rollout_ops|SampleBatchBuilder|collect_metrics",
        "samplers and execution plans of the old API, which are not served",
        "use episodes in callbacks, and Algorithm.training_step for what happens in an iteration",
    ),
    (
        r"ModelV2|ModelChecker|^models([.]|$)|modelv2|core[.]models|Catalog|catalog|examples[.](_old_api_stack[.])?models",
        "ModelV2 and its catalog, which are refused",
        "set .rl_module(model_config=DefaultModelConfig(...)), or write a TorchRLModule",
    ),
    (
        r"^policy|Policy$|_policy($|[.])|examples[.](_old_api_stack[.])?policy|ViewRequirement|examples[.]_old_api_stack",
        "Policy classes of the old API, which are refused",
        "choose an algorithm's config, and write a TorchRLModule for a network of your own",
    ),
    (
        r"vtrace|make_time_major",
        "V-trace as functions on tensors, which are not served",
        "use corral.core.returns.vtrace, or super().compute_loss_for_module(...) in a learner class",
    ),
    (
        r"CircularBuffer|impala_learner|appo_learner|appo[.]utils|impala[.]utils",
        "threads and queues of IMPALA and APPO, which Corral has in another form",
        "set learner_queue_size, simple_queue_size or circular_buffer_num_batches in .training(...)",
    ),
    (
        r"dreamer",
        "the parts of which RLlib's DreamerV3 is made",
        "use `DreamerV3Config`, whose networks and losses are Corral's",
    ),
    (
        r"^algorithms[.](r2d2|pg|a3c|a2c|ddpg|td3|maml|es|ars|apex)([.]|$)|^agents|MAML|[Mm]eta|[Dd]ifferentiable",
        "an algorithm that is not built",
        "use PPOConfig, DQNConfig or SACConfig, or a native one such as corral.TD3Config",
    ),
    (
        r"offline|[.](bc|marwil)([.]|$)|Json(Reader|Writer)|Dataset|estimators",
        "reading, writing and evaluating recorded data with classes of your own, which is not served",
        "use .offline_data(input_=...) and .offline_data(output=...), with a prelearner_class for other columns",
    ),
    (
        r"^connectors[.](agent|action|connector([.]|$)|registry)|AgentConnector|ActionConnector",
        "connectors of the old API, which are refused",
        "use .env_runners(env_to_module_connector=...), or a transform of Corral",
    ),
    (
        r"^connectors[.]",
        "connectors that are not built",
        "use one of ray.rllib.connectors.env_to_module, or write a ConnectorV2",
    ),
    (
        r"[Rr]eplay|Storage|segment_tree",
        "replay buffers as classes, which are not served",
        "set .training(replay_buffer_config={...})",
    ),
    (
        r"^utils[.]exploration|Exploration$",
        "exploration classes that are not built",
        "use another type in .exploration(exploration_config={...}), or derive from Exploration",
    ),
    (
        r"env[.](external|vector_env|base_env|vector)|VectorEnv|BaseEnv|ExternalEnv",
        "envs of the old API, which are not served",
        "use gymnasium.Env, gymnasium.vector.VectorEnv or MultiAgentEnv, or a PolicyClient in a simulator",
    ),
)

_ENTRY = re.compile(r"(?:(?P<home>[\w.]+):)?(?P<name>\w+|[*])(?:=(?P<alias>\w+))?")
_HOME_OF = {name: home for home, names in HOMES.items() for name in names.split()}


def home_module(home: str) -> ModuleType:
    """Import and return the module of a home."""
    return importlib.import_module(home if "." in home else f"{__package__}.{home}")


def entries(module: str) -> dict[str, tuple[str, str]]:
    """Return the names of a served module that are listed one by one: home and name there, by the name served."""
    found = [_ENTRY.fullmatch(entry) for entry in MODULES.get(module, "").split()]
    matches = [match for match in found if match is not None and match["name"] != "*"]
    return {m["alias"] or m["name"]: (m["home"] or _HOME_OF[m["name"]], m["name"]) for m in matches}


def open_homes(module: str) -> list[str]:
    """Return the homes whose public names a served module has."""
    return re.findall(r"([\w.]+):[*]", MODULES.get(module, ""))


def public_names(module: ModuleType) -> list[str]:
    """Return the names of a home that `home:*` stands for."""
    listed = getattr(module, "__all__", None)
    return sorted(
        listed
        if listed is not None
        else (name for name in dir(module) if not name.startswith("_") and name != "annotations")
    )


def is_served(module: str) -> bool:
    """Return whether the table has a module, or modules below it; the empty string is `ray.rllib` itself."""
    return module in MODULES or any(known.startswith(f"{module}.") for known in (*MODULES, *FROM_RAY))


def find_hint(source: str) -> str:
    """Return what the source of a script asks for under names of its own, and the setting for it; else nothing."""
    if re.search(r"central_value_function|[Cc]entraliz\w*[Cc]ritic|[Ss]hared_?[Cc]ritic", source):
        return (
            "The script gives PPO a critic that sees all agents, which is a setting in Corral: leave out its classes, "
            'and set corral.PPOConfig().multi_agent(critic_sees="all"), or a function; see docs/multi-agent.md.'
        )
    return ""


def why_not_served(path: str) -> str:
    """Return what a path that is not served belongs to, and what to use instead; the empty string if nobody knows."""
    for pattern, feature, remedy in NOT_SERVED:
        if re.search(pattern, path):
            return f"It belongs to {feature}: {remedy}."
    return ""
