"""Weights of RLlib's modules in files: written by a module or a checkpoint, and given to modules of another run."""

from __future__ import annotations

import pytest
from rllib_scripts import Run

SCRIPT = """
import os, sys, numpy as np, torch, gymnasium as gym
from torch import nn
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module import MultiRLModule, MultiRLModuleSpec, RLModule, RLModuleSpec
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule

class Net(TorchRLModule, ValueFunctionAPI):
    def setup(self):
        size = self.model_config["size"]
        self.body = nn.Linear(self.observation_space.shape[0], size)
        self.pi, self.vf = nn.Linear(size, self.action_space.n), nn.Linear(size, 1)

    def _forward(self, batch, **kwargs):
        return {Columns.ACTION_DIST_INPUTS: self.pi(torch.tanh(self.body(batch[Columns.OBS])))}

    def compute_values(self, batch, embeddings=None):
        return self.vf(torch.tanh(self.body(batch[Columns.OBS]))).squeeze(-1)

env = gym.make("CartPole-v1")
obs = {"obs": torch.ones(2, 4)}
base = PPOConfig().environment("CartPole-v1").training(train_batch_size=64, minibatch_size=32, num_epochs=1)

def logits(module):
    return module.forward_inference(obs)["action_dist_inputs"].detach().numpy()

# A user's module, saved by itself.
spaces = dict(observation_space=env.observation_space, action_space=env.action_space)
saved = RLModuleSpec(module_class=Net, model_config={"size": 5}, **spaces).build()
path = saved.save_to_path("net")
again = RLModule.from_checkpoint(path)
assert type(again) is Net and np.allclose(logits(again), logits(saved))
other = RLModuleSpec(module_class=Net, model_config={"size": 5}, **spaces).build()
assert not np.allclose(logits(other), logits(saved))
other.restore_from_path(path)
assert np.allclose(logits(other), logits(saved))

spec = RLModuleSpec(module_class=Net, model_config={"size": 5}, load_state_path=path)
algo = base.copy().rl_module(rl_module_spec=spec).build_algo()
assert np.allclose(logits(algo.get_module()), logits(saved))
algo.stop()

# RLlib's default class, saved by itself.
from ray.rllib.algorithms.ppo.torch.ppo_torch_rl_module import PPOTorchRLModule
given = dict(module_class=PPOTorchRLModule, model_config={"fcnet_hiddens": [6]}, catalog_class=PPOCatalog)
saved = RLModuleSpec(**given, **spaces).build()
spec = RLModuleSpec(**given, load_state_path=saved.save_to_path("default"))
algo = base.copy().rl_module(rl_module_spec=spec).build_algo()
assert np.allclose(logits(algo.get_module()), logits(saved))
assert algo.train()["training_iteration"] == 1
algo.stop()

# Default modules of a checkpoint, one of several agents and all of them.
algo = base.copy().build_algo()
algo.train()
directory = os.path.join(algo.save_to_path("checkpoint"), "learner_group", "learner", "rl_module")
trained = logits(algo.get_module())
algo.stop()

from ray.rllib.env.multi_agent_env import make_multi_agent
several = (base.copy().environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    .multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent, episode, **kwargs: "ab"[agent]))
specs = {
    "a": RLModuleSpec(load_state_path=os.path.join(directory, "default_policy"), catalog_class=PPOCatalog),
    "b": RLModuleSpec(),
}
algo = several.copy().rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs)).build_algo()
assert np.allclose(logits(algo.get_module("a")), trained) and not np.allclose(logits(algo.get_module("b")), trained)
both = os.path.join(algo.save_to_path("both"), "learner_group", "learner", "rl_module")
weights = {name: logits(algo.get_module(name)) for name in "ab"}
algo.stop()

modules = MultiRLModule.from_checkpoint(both)
assert set(modules.keys()) == {"a", "b"} and np.allclose(logits(modules["b"]), weights["b"])
spec = MultiRLModuleSpec(rl_module_specs={name: RLModuleSpec() for name in "ab"}, load_state_path=both)
algo = several.copy().rl_module(rl_module_spec=spec).build_algo()
assert all(np.allclose(logits(algo.get_module(name)), weights[name]) for name in "ab")
algo.stop()
print("done")
"""


@pytest.mark.slow
def test_modules_start_with_weights_from_files(run: Run) -> None:
    assert "done" in run(SCRIPT).stdout


@pytest.mark.slow
def test_a_directory_without_a_module_is_named(run: Run) -> None:
    script = """
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module import RLModuleSpec
PPOConfig().environment("CartPole-v1").rl_module(rl_module_spec=RLModuleSpec(load_state_path="nothing")).build_algo()
"""
    assert "nothing holds no module" in run(script, code=1).stderr


@pytest.mark.slow
def test_a_catalog_of_a_user_is_refused(run: Run) -> None:
    script = """
from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module import RLModuleSpec
class MyCatalog(PPOCatalog):
    pass
spec = RLModuleSpec(catalog_class=MyCatalog)
PPOConfig().environment("CartPole-v1").rl_module(rl_module_spec=spec).build_algo()
"""
    assert "catalogs of your own are not served" in run(script, code=1).stderr
