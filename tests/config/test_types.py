"""What a type checker says about scripts of users: mypy runs once, over all of them together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each line with a comment "# error: ..." is refused with a message that holds that text; all others are accepted.
SCRIPT = """
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

PPOConfig().multi_agent(policies="main")  # error: Argument "policies"
PPOConfig().multi_agent(policies={"main": 3})  # error: Dict entry 0 has incompatible type
PPOConfig().multi_agent(policies_to_train=3)  # error: Argument "policies_to_train"
PPOConfig().multi_agent(shared_layers=["main"])  # error: Argument "shared_layers"
PPOConfig().training(lrr=1)  # error: Unexpected keyword argument "lrr" for "training" of "PPOConfig"
DQNConfig().training(lrr=1)  # error: Unexpected keyword argument "lrr" for "training" of "DQNConfig"
SACConfig().training(lrr=1)  # error: Unexpected keyword argument "lrr" for "training" of "SACConfig"
PPOConfig().training(double_q=True)  # error: Unexpected keyword argument "double_q"
DQNConfig().training(clip_param=0.1)  # error: Unexpected keyword argument "clip_param"
TD3Config().training(initial_alpha=1.0)  # error: Unexpected keyword argument "initial_alpha"
DDPGConfig().training(initial_alpha=1.0)  # error: Unexpected keyword argument "initial_alpha"
SACConfig().training(dueling=True)  # error: Unexpected keyword argument "dueling"
PPOConfig().training(lr="fast")  # error: Argument "lr" to "training" of "PPOConfig" has incompatible type "str"
DQNConfig().training(td_error_loss_fn="l1")  # error: Argument "td_error_loss_fn"
PPOConfig().environment("CartPole-v1", env_confg={})  # error: Unexpected keyword argument "env_confg"
DQNConfig().environment("CartPole-v1", seed=1)  # error: Unexpected keyword argument "seed"
SACConfig().env_runners(num_workers=2)  # error: Unexpected keyword argument "num_workers"
PPOConfig().env_runners(vectorization="Sync")  # error: Argument "vectorization"
PPOConfig().engine("threads")  # error: Argument 1 to "engine"


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
Own().env_runners(num_workers=2)  # error: Unexpected keyword argument "num_workers"
"""


@pytest.mark.xdist_group("mypy")
def test_setters_are_typed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # The cache is the one of `make check`, so that only the script is new.
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-pretty", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found: dict[int, str] = {}
    for line, message in re.findall(r"script\.py:(\d+): error: (.*)", done.stdout):
        found[int(line)] = message
    lines = SCRIPT.splitlines()
    expected = {number: line.partition("# error: ")[2] for number, line in enumerate(lines, 1) if "# error: " in line}
    assert found.keys() == expected.keys(), done.stdout + done.stderr
    assert [message for number, message in expected.items() if message not in found[number]] == [], done.stdout


def test_what_a_type_checker_refuses_is_refused_at_runtime_too() -> None:
    from corral import AlgorithmConfig, PPOConfig

    with pytest.raises(TypeError):
        AlgorithmConfig().training(1)
    with pytest.raises(TypeError):
        PPOConfig().training(1)  # type: ignore[call-arg]
