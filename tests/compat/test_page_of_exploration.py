"""The code about exploration on RLlib's page "Advanced Python APIs" (2.10; Apache-2.0), as it stands there."""

from __future__ import annotations

import pytest
from rllib_scripts import Run

CONFIG = """
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

config = AlgorithmConfig().exploration(
    exploration_config={
        # Special `type` key provides class information
        "type": "StochasticSampling",
        # Add any needed constructor args here.
        "constructor_arg": "value",
    }
)
"""
# "constructor_arg" is a stub of the page: no class has it, which building an algorithm says.
USES_CONFIG = """
print(config.exploration_config["type"], config["exploration_config"]["constructor_arg"])
from ray.rllib.algorithms.ppo import PPOConfig
try:
    PPOConfig().environment("CartPole-v1").exploration(exploration_config=config.exploration_config).build()
except Exception as error:
    print(error)
"""

# Excerpts of config dicts. They are put into dicts here; the quotation marks in a comment are the page's.
OFF = """
# 1) Switching *off* exploration by default.
# Behavior: Calling `compute_action(s)` without explicitly setting its `explore`
# param will result in no exploration.
# However, explicitly calling `compute_action(s)` with `explore=True` will
# still(!) result in exploration (per-call overrides default).
"explore": False,
"""
ON = """
# 2) Switching *on* exploration by default.
# Behavior: Calling `compute_action(s)` without explicitly setting its
# explore param will result in exploration.
# However, explicitly calling `compute_action(s)` with `explore=False`
# will result in no(!) exploration (per-call overrides default).
"explore": True,
"""
EPSILON_GREEDY = """
# 3) Example exploration_config usages:
# a) DQN: see rllib/algorithms/dqn/dqn.py
"explore": True,
"exploration_config": {
   # Exploration sub-class by name or full path to module+class
   # (e.g. “ray.rllib.utils.exploration.epsilon_greedy.EpsilonGreedy”)
   "type": "EpsilonGreedy",
   # Parameters for the Exploration class' constructor:
   "initial_epsilon": 1.0,
   "final_epsilon": 0.02,
   "epsilon_timesteps": 10000,  # Timesteps over which to anneal epsilon.
},
"""
SOFT_Q = """
# b) DQN Soft-Q: In order to switch to Soft-Q exploration, do instead:
"explore": True,
"exploration_config": {
   "type": "SoftQ",
   # Parameters for the Exploration class' constructor:
   "temperature": 1.0,
},
"""
SAMPLING = """
# c) All policy-gradient algos and SAC: see rllib/algorithms/algorithm.py
# Behavior: The algo samples stochastically from the
# model-parameterized distribution. This is the global Algorithm default
# setting defined in algorithm.py and used by all PG-type algos (plus SAC).
"explore": True,
"exploration_config": {
   "type": "StochasticSampling",
   "random_timesteps": 0,  # timesteps at beginning, over which to act uniformly randomly
},
"""

METHOD = '''
    def get_exploration_action(self,
                               *,
                               action_distribution: ActionDistribution,
                               timestep: Union[TensorType, int],
                               explore: bool = True):
        """Returns a (possibly) exploratory action and its log-likelihood.

        Given the Model's logits outputs and action distribution, returns an
        exploratory action.

        Args:
            action_distribution: The instantiated
                ActionDistribution object to work with when creating
                exploration actions.
            timestep: The current sampling time step. It can be a tensor
                for TF graph mode, otherwise an integer.
            explore: True: "Normal" exploration behavior.
                False: Suppress all exploratory behavior and return
                a deterministic action.

        Returns:
            A tuple consisting of 1) the chosen exploration action or a
            tf-op to fetch the exploration action from the graph and
            2) the log-likelihood of the exploration action.
        """
'''

ACTS = """
import numpy as np
from ray.rllib.algorithms.dqn import DQN
from ray.rllib.algorithms.ppo import PPO

OBS = np.zeros(4, np.float32)
SMALL = {"num_workers": 0, "train_batch_size": 32, "timesteps_per_iteration": 40, "learning_starts": 16}

def actions(algo, **explore):
    alone = [algo.compute_single_action(OBS, **explore) for _ in range(40)]
    together = algo.compute_actions(dict.fromkeys(range(40), OBS), **explore)
    assert together.keys() == set(range(40))
    return len({*map(int, alone)}), len({*map(int, together.values())})

off = PPO(config={**dict(num_workers=0), **{%(off)s}}, env="CartPole-v1")
print("off:", actions(off), actions(off, explore=True), actions(off, explore=None))
on = PPO(config={**dict(num_workers=0), **{%(on)s}, **{%(sampling)s}}, env="CartPole-v1")
print("on:", actions(on), actions(on, explore=False))

for settings in ({%(greedy)s}, {%(soft)s}):
    algo = DQN(config={**SMALL, **settings}, env="CartPole-v1")
    result = algo.train()
    runners = result["env_runners"]
    print(settings["exploration_config"]["type"], runners.get("epsilon"), runners.get("temperature"))
    print(actions(algo), actions(algo, explore=False))

by_path = {%(greedy)s}
by_path["exploration_config"]["type"] = "ray.rllib.utils.exploration.epsilon_greedy.EpsilonGreedy"
algo = DQN(config={**SMALL, **by_path}, env="CartPole-v1")
print("by path:", round(algo.train()["env_runners"]["epsilon"], 3))
from ray.rllib.utils.exploration.epsilon_greedy import EpsilonGreedy
by_path["exploration_config"]["type"] = EpsilonGreedy
print("by class:", round(DQN(config={**SMALL, **by_path}, env="CartPole-v1").train()["env_runners"]["epsilon"], 3))
"""

# The body of the method is left out on the page. This one always takes action 1 while it explores.
OWN = (
    """
from typing import Union

import numpy as np
from ray.rllib.algorithms.dqn import DQN
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.utils.exploration.exploration import Exploration
from ray.rllib.utils.exploration.stochastic_sampling import StochasticSampling
from ray.rllib.utils.typing import TensorType

ActionDistribution = object

class Mine(StochasticSampling):
    def __init__(self, action_space, *, framework, policy_config, model, number, **kwargs):
        super().__init__(action_space, framework=framework, policy_config=policy_config, model=model, **kwargs)
        assert action_space.n == 2 and framework == "torch" and model is not None
        self.number = number
"""
    + METHOD
    + """
        actions = action_distribution.deterministic_sample()
        if explore:
            actions = np.full_like(actions, self.number)
        return actions, action_distribution.logp(actions)

config = {"num_workers": 0, "train_batch_size": 200, "sgd_minibatch_size": 200, "num_sgd_iter": 1}
config["exploration_config"] = {"type": Mine, "number": 1}
algo = PPO(config=config, env="CartPole-v1")
result = algo.train()
print("own:", result["episode_len_mean"] < 11, issubclass(Mine, Exploration))  # always right falls within 11 steps
print({int(algo.compute_single_action(np.zeros(4, np.float32))) for _ in range(20)})
"""
)


@pytest.mark.slow_cases("without_ray")
def test_exploration_is_set_as_on_the_page(run_in_both: Run) -> None:
    texts = {"off": OFF, "on": ON, "sampling": SAMPLING, "greedy": EPSILON_GREEDY, "soft": SOFT_Q}
    printed = run_in_both(CONFIG + USES_CONFIG + ACTS % texts + OWN).stdout
    lines = printed.splitlines()
    assert lines[0] == "StochasticSampling value"
    assert "unknown setting 'constructor_arg'" in lines[1]
    assert lines[2:4] == ["off: (1, 1) (2, 2) (1, 1)", "on: (2, 2) (1, 1)"]
    assert lines[4].startswith("EpsilonGreedy 0.99") and lines[6] == "SoftQ None 1.0"
    assert lines[5] == lines[7] == "(2, 2) (1, 1)"
    assert lines[8:10] == ["by path: 0.996", "by class: 0.996"]
    assert lines[10:] == ["own: True True", "{1}"]
