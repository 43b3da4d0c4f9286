"""What scripts of users do besides training: annotations, actions with memory, exports, and mistakes."""

from __future__ import annotations

import pytest
from rllib_scripts import Run


@pytest.mark.slow
def test_names_of_the_older_stack_annotate_callbacks(run: Run) -> None:
    run(
        """
from ray.rllib import BaseEnv, Policy, SampleBatch
from ray.rllib.algorithms.callbacks import DefaultCallbacks
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.base_env import BaseEnv as again
from ray.rllib.evaluation import Episode, MultiAgentEpisode, RolloutWorker
from ray.rllib.evaluation.episode import Episode as same
from ray.rllib.evaluation.episode_v2 import EpisodeV2
from ray.rllib.policy import Policy as other
from ray.rllib.policy.policy import Policy as third

assert again is BaseEnv and same is Episode is EpisodeV2 and other is third is Policy
seen = set()

class Checks(DefaultCallbacks):
    def on_episode_start(
        self, *, worker: RolloutWorker, base_env: BaseEnv, policies: dict[str, Policy], episode: Episode, **kwargs
    ):
        seen.add((isinstance(base_env, BaseEnv), isinstance(episode, Episode)))
        seen.add(isinstance(policies["default_policy"], Policy))

config = PPOConfig().environment("CartPole-v1").callbacks(Checks).rollouts(num_rollout_workers=0)
algo = config.training(train_batch_size=50, minibatch_size=50, num_epochs=1).build()
algo.train()
assert seen == {(True, True), True}, seen

for refused in (lambda: type("Own", (Policy,), {}), lambda: Policy.from_checkpoint("path")):
    try:
        refused()
    except ValueError as error:
        print(error)
for name in ("export_policy_checkpoint", "export_policy_model"):
    try:
        getattr(algo, name)
    except AttributeError as error:
        assert "not in Corral: " in str(error)
    else:
        raise AssertionError(name)
saved = algo.save()
assert saved.checkpoint.path in f"saved in {saved}"
"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True])
def test_lists_of_states_act_as_trees_do(run: Run, shares: bool) -> None:
    run(
        f"""
import numpy as np
from ray.rllib.algorithms.ppo import PPOConfig

model = {{"use_lstm": True, "lstm_cell_size": 8, "vf_share_layers": {shares}}}
config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).training(model=model)
algo = config.debugging(seed=1).build()
policy = algo.get_policy()
assert policy.is_recurrent() and [part.shape for part in policy.get_initial_state()] == [(8,), (8,)]
state, tree, obs = [np.zeros(8), np.zeros(8)], algo.get_module().get_initial_state(), np.ones(4, np.float32)
for _ in range(3):
    action, state, _ = algo.compute_single_action(obs, state=state, explore=False)
    expected, tree, _ = algo.compute_single_action(obs, tree, explore=False)
    assert action == expected and isinstance(state, list)
    np.testing.assert_array_equal(state, [tree["h"], tree["c"]])
assert np.abs(state).min() > 0
try:
    algo.compute_single_action(obs, state[:1])
except ValueError as error:
    assert "['h', 'c']" in str(error)
else:
    raise AssertionError
"""
    )


@pytest.mark.slow
def test_a_module_without_values_says_what_to_define(run: Run) -> None:
    done = run(
        """
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

class Own(TorchRLModule):
    def setup(self):
        self.layer = torch.nn.Linear(4, 2)

    def _forward(self, batch, **kwargs):
        return {"action_dist_inputs": self.layer(batch["obs"])}

config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
config.rl_module(rl_module_spec=RLModuleSpec(Own)).training(train_batch_size=50, minibatch_size=50)
config.build().train()
""",
        code=1,
    )
    assert "Own.compute_values" in done.stderr
    assert "derive the class from ValueFunctionAPI" in done.stderr


@pytest.mark.slow
def test_runners_in_processes_make_registered_envs_again(run: Run) -> None:
    run(
        """
import gymnasium
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.registry import register_env

register_env("own", lambda config: gymnasium.make("CartPole-v1", max_episode_steps=config.get("steps", 20)))

def make_shorter(runner):
    runner.config.environment(env_config={"steps": 4})
    runner.make_env()
    return runner.env.envs[0].spec.max_episode_steps

config = PPOConfig().environment("own").env_runners(num_env_runners=1)
algo = config.training(train_batch_size=50, minibatch_size=50, num_epochs=1).build()
algo.train()
assert algo.env_runner_group.foreach_env_runner(make_shorter, local_env_runner=False) == [4]
algo.train()
algo.stop()
"""
    )
