"""What a type checker says about the setters of configs: `make check` runs mypy over this file, and nothing runs it.

Each line with `type: ignore` must be refused for the reason that it names: mypy reports a comment that it does not
need. All other lines are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from corral import AlgorithmConfig, DDPGConfig, DQNConfig, PPOConfig, SACConfig, TD3Config
from corral.testing import CountingEnv

ppo: PPOConfig = (
    PPOConfig()
    .environment("CartPole-v1", env_config={"gravity": 9.8}, disable_env_checking=True)
    .env_runners(num_env_runners=2, num_envs_per_env_runner=None, rollout_fragment_length="auto")
    .training(lr=[[0, 1e-3], [1000, 0]], gamma=0.9, lambda_=0.95, kl_target=None, optimizer="sgd")
    .exploration(explore=False, exploration_config={"type": "StochasticSampling"})
    .rl_module(model_config={"fcnet_hiddens": [32]})
    .learners(num_learners=1, num_threads=2)
    .callbacks(on_train_result=print, on_error="log")
    .fault_tolerance(env_step_timeout_s=3)
    .reporting(min_time_s_per_iteration=1)
    .debugging(seed=0, log_level="DEBUG")
    .engine("process", start_timeout_s=30)
)
dqn: DQNConfig = DQNConfig().environment(CountingEnv).training(lr=1e-3, n_step=3, double_q=False, tau=0.5)
sac: SACConfig = SACConfig().training(actor_lr=[(0, 1e-3)], twin_q=True, replay_buffer_config={"capacity": 10})
td3: TD3Config = TD3Config().training(critic_lr=1e-3, policy_delay=3, target_noise=0.1)
ddpg: DDPGConfig = DDPGConfig().training(actor_lr=1e-4, target_noise_clip=0.3)
agents = PPOConfig().multi_agent(policies={"main", "other"}, policies_to_train=["main"], count_steps_by="agent_steps")
agents.multi_agent(policies=["main", "other"], policies_to_train={"main"}, policy_mapping_fn=lambda agent, episode: "a")
agents.multi_agent(policies=("main",), policies_to_train=lambda module_id: module_id == "main")
agents.multi_agent(policies={"main": {}, "other": None, "rules": {"model_config": {"fcnet_hiddens": [8]}}})
agents.multi_agent(policies=dict.fromkeys(["main", "other"]), policies_to_train=None)
agents.multi_agent(shared_layers={"policy_encoder": ["main", "other"], "value_encoder": [["a", "b"], ["c", "d"]]})
agents.multi_agent(algorithm_config_overrides_per_module={"main": {"lr": 1e-4}})

PPOConfig().multi_agent(policies="main")  # type: ignore[arg-type]
PPOConfig().multi_agent(policies={"main": 3})  # type: ignore[dict-item]
PPOConfig().multi_agent(policies_to_train=3)  # type: ignore[arg-type]
PPOConfig().multi_agent(shared_layers=["main"])  # type: ignore[arg-type]
PPOConfig().training(lrr=1)  # type: ignore[call-arg]
DQNConfig().training(lrr=1)  # type: ignore[call-arg]
SACConfig().training(lrr=1)  # type: ignore[call-arg]
PPOConfig().training(double_q=True)  # type: ignore[call-arg]
DQNConfig().training(clip_param=0.1)  # type: ignore[call-arg]
TD3Config().training(initial_alpha=1.0)  # type: ignore[call-arg]
DDPGConfig().training(initial_alpha=1.0)  # type: ignore[call-arg]
SACConfig().training(dueling=True)  # type: ignore[call-arg]
PPOConfig().training(lr="fast")  # type: ignore[arg-type]
DQNConfig().training(td_error_loss_fn="l1")  # type: ignore[arg-type]
PPOConfig().environment("CartPole-v1", env_confg={})  # type: ignore[call-arg]
DQNConfig().environment("CartPole-v1", seed=1)  # type: ignore[call-arg]
SACConfig().env_runners(num_workers=2)  # type: ignore[call-arg]
PPOConfig().env_runners(vectorization="Sync")  # type: ignore[arg-type]
PPOConfig().engine("threads")  # type: ignore[arg-type]


@dataclass(kw_only=True)
class Own(AlgorithmConfig):
    patience: int = 3


@dataclass(kw_only=True)
class OwnPPO(PPOConfig):
    patience: int = 3

    def training(self, **settings: Any) -> Self:
        return super().training(**settings)


own: Own = Own().training(patience=4, lr=1e-3).env_runners(num_env_runners=1)
own_ppo: OwnPPO = OwnPPO().environment("CartPole-v1").training(patience=4, clip_param=0.1)
own.patience = 5
Own().env_runners(num_workers=2)  # type: ignore[call-arg]
