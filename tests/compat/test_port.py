"""`python -m corral.compat.rllib --port` prints a file that needs no RLlib and gives the same run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rllib_scripts import Run

import warm

EXAMPLES = Path(__file__).parents[2] / "examples" / "porting"
PAIRS = ("cartpole", "own_module", "two_agents")

ENV = """
import gymnasium as gym
import numpy as np

STEP = 1

class Corridor(gym.Env):
    observation_space = gym.spaces.Box(0.0, 10.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config=None):
        self.length = (config or {}).get("length", 4)

    def reset(self, *, seed=None, options=None):
        self.position = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.position = max(0, self.position + (STEP if action == 1 else -STEP))
        done = self.position >= self.length
        return np.array([self.position], np.float32), -0.1, done, False, {}
"""
SMALL = """
    .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    .training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1, lr=0.01)
    .rl_module(model_config={"fcnet_hiddens": [16]})
    .debugging(seed=3)
"""
TRAIN = """
algo = config.build_algo()
for _ in range(3):
    print(algo.train()["env_runners"]["episode_return_mean"])
algo.stop()
"""
TRAIN_NATIVE = """
with config.build() as algo:
    for _ in range(3):
        print(algo.train()["env_runners"]["episode_return_mean"])
"""


def run_python(path: Path) -> str:
    """Return what a script prints that has neither Ray nor RLlib's names."""
    without_ray = "import runpy, sys; sys.modules['ray'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = warm.run([sys.executable, "-c", without_ray, str(path)])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def print_port(run: Run, tmp_path: Path, script: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `--port` with a script text."""
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    return run(["--port", str(tmp_path / "script.py")], code=code)


def ported(run: Run, tmp_path: Path, script: str) -> tuple[str, str]:
    """Return the file that `--port` prints for a script, and what it prints with three iterations in place of one."""
    text = print_port(run, tmp_path, script).stdout
    config, _, _ = text.partition('if __name__ == "__main__":')
    (tmp_path / "ported.py").write_text(config + TRAIN_NATIVE, encoding="utf-8")
    return text, run_python(tmp_path / "ported.py")


@pytest.mark.slow_cases("two_agents", "own_module")
@pytest.mark.parametrize("name", PAIRS)
def test_both_files_of_a_worked_port_print_the_same(name: str, run: Run) -> None:
    of_rllib = run([str(EXAMPLES / f"{name}_rllib.py")]).stdout
    native = warm.run([sys.executable, str(EXAMPLES / f"{name}.py")])
    assert native.stdout == of_rllib
    assert len(of_rllib.splitlines()) >= 4


@pytest.mark.slow
def test_the_printed_file_gives_the_same_returns_with_what_the_script_defines(run: Run, tmp_path: Path) -> None:
    script = f"""
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN
from ray.tune.registry import register_env
{ENV}
unused = 7

def count(result):
    return result[ENV_RUNNER_RESULTS][EPISODE_RETURN_MEAN]

class Mine(RLlibCallback):
    @override(RLlibCallback)
    def on_train_result(self, *, algorithm, result, **kwargs):
        result["counted"] = count(result)

register_env("corridor", lambda config: Corridor(config))
config = (
    PPOConfig()
    .environment("corridor", env_config={{"length": 3}})
    .callbacks(Mine, on_episode_end=lambda episode, metrics_logger, **kw: metrics_logger.log_value("t", episode.t))
    {SMALL}
)
"""
    text, returns = ported(run, tmp_path, script + TRAIN)
    assert returns == run(script + TRAIN).stdout
    assert "ray" not in text.replace("array", "")
    for line in (
        '.environment(lambda config: Corridor(config), env_config={"length": 3})',
        "from corral import Callback as RLlibCallback, PPOConfig",
        "ENV_RUNNER_RESULTS = 'env_runners'",
        "STEP = 1",
        "def count(result):",
    ):
        assert line in text, line
    assert "unused" not in text


@pytest.mark.slow
def test_several_agents_and_a_set_of_policies(run: Run, tmp_path: Path) -> None:
    script = f"""
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env import make_multi_agent
from ray.rllib.policy.policy import PolicySpec

Copies = make_multi_agent("CartPole-v1")
config = (
    PPOConfig()
    .environment(Copies, env_config={{"num_agents": 2}})
    .multi_agent(policies={{"b", "a", "c"}}, policy_mapping_fn=lambda agent_id, episode, **kw: "ab"[agent_id])
    {SMALL}
)
"""
    text, returns = ported(run, tmp_path, script + TRAIN)
    assert returns == run(script + TRAIN).stdout
    assert '.environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})' in text
    assert 'policies={"a": {}, "b": {}, "c": {}}' in text


@pytest.mark.slow
def test_options_of_the_script_have_the_parsed_values_also_in_lambdas(run: Run, tmp_path: Path) -> None:
    script = f"""
import argparse
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.registry import register_env
{ENV}
parser = argparse.ArgumentParser()
parser.add_argument("--length", type=int, default=9)
args = parser.parse_args(["--length=3"])
register_env("corridor", lambda config: Corridor({{"length": args.length, **config}}))
config = (
    PPOConfig()
    .environment("corridor")
    {SMALL}
)
"""
    text, returns = ported(run, tmp_path, script + TRAIN)
    assert "args = argparse.Namespace(length=3)" in text
    assert returns == run(script + TRAIN).stdout


@pytest.mark.slow
def test_a_variable_that_the_script_changes_has_the_value_of_the_build(run: Run, tmp_path: Path) -> None:
    script = f"""
from ray.rllib.algorithms.ppo import PPOConfig
{ENV}
LENGTHS = []
for length in (2, 3):
    LENGTHS.append(length)
def make(config):
    return Corridor({{"length": LENGTHS[-1]}})
from ray.tune.registry import register_env
register_env("corridor", make)
config = (
    PPOConfig()
    .environment("corridor")
    {SMALL}
)
"""
    text, returns = ported(run, tmp_path, script + TRAIN)
    assert "LENGTHS = [2, 3]" in text
    assert returns == run(script + TRAIN).stdout


@pytest.mark.slow
def test_a_lambda_for_policies_to_train_keeps_its_meaning(run: Run, tmp_path: Path) -> None:
    script = f"""
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env import make_multi_agent
config = (
    PPOConfig()
    .environment(make_multi_agent("CartPole-v1"), env_config={{"num_agents": 2}})
    .multi_agent(
        policies=["a", "b"],
        policy_mapping_fn=lambda agent_id, episode, **kw: "ab"[agent_id],
        policies_to_train=lambda module_id, batch=None: module_id != "a",
    )
    {SMALL}
)
"""
    train = "algo = config.build_algo()\nprint([key for key in algo.train()['learners'] if len(key) == 1])\n"
    print_port(run, tmp_path, script + train)
    text = run(["--port", str(tmp_path / "script.py")]).stdout.partition("if __name__")[0]
    native = "with config.build() as algo:\n    print([key for key in algo.train()['learners'] if len(key) == 1])\n"
    (tmp_path / "ported.py").write_text(text + native, encoding="utf-8")
    assert run_python(tmp_path / "ported.py") == run(script + train).stdout == "['b']\n"


def test_other_algorithms_and_transforms(run: Run, tmp_path: Path) -> None:
    script = """
from ray.rllib.algorithms.dqn import DQNConfig
config = (
    DQNConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0, observation_filter="MeanStdFilter", rollout_fragment_length=4)
    .training(
        num_steps_sampled_before_learning_starts=50, lr=1e-3, epsilon=[(0, 1.0), (100, 0.1)], n_step=2,
        replay_buffer_config={"type": "PrioritizedEpisodeReplayBuffer", "capacity": 500, "alpha": 0.6, "beta": 0.4},
    )
    .reporting(min_sample_timesteps_per_iteration=60)
    .debugging(seed=3)
)
"""
    text, returns = ported(run, tmp_path, script + TRAIN)
    assert returns == run(script + TRAIN).stdout
    assert "transforms=[NormalizeObservations()]" in text and '"use_layernorm": False' in text


@pytest.mark.slow
def test_what_has_no_native_form_is_listed_with_a_section_of_the_page(run: Run) -> None:
    text = run(["--port", str(EXAMPLES / "own_module_rllib.py")]).stdout
    assert "- RLModule Small with model_config={'width': 32}: write a corral.Module" in text
    assert "- learner class SmallOutputsLearner" in text
    page = (EXAMPLES.parents[1] / "docs" / "port-an-rllib-script.md").read_text(encoding="utf-8")
    titles = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", page, flags=re.MULTILINE)}
    source = Path(EXAMPLES.parents[1], "src/corral/compat/rllib/port.py").read_text(encoding="utf-8")
    named = set(re.findall(r'leave_out\([^)]*"([a-z-]+)"\)', source)) | set(re.findall(r"PAGE\}#([a-z-]+)", source))
    assert named and named <= titles


@pytest.mark.slow
def test_functions_that_only_the_running_script_has_are_left_out(run: Run, tmp_path: Path) -> None:
    script = f"""
from ray.rllib.algorithms.ppo import PPOConfig
{ENV}
def make(length):
    def start(episode, **kwargs):
        episode.custom_data["length"] = length
    return start

def make_config(number):
    return (
        PPOConfig()
        .environment(Corridor)
        .callbacks(on_episode_start=make(5), on_episode_end=lambda episode, **kw: print(number))
        {SMALL}
    )
config = make_config(4)
"""
    text, _ = ported(run, tmp_path, script + TRAIN)
    assert "defined while the script runs" in text
    assert "reads number, local variables" in text.replace("a local variable", "local variables")
    assert ".callbacks(" not in text


def test_old_arguments_of_callbacks_are_left_out_by_name(run: Run, tmp_path: Path) -> None:
    script = """
from ray.rllib.algorithms.callbacks import DefaultCallbacks
from ray.rllib.algorithms.ppo import PPOConfig
class Mine(DefaultCallbacks):
    def on_episode_end(self, *, worker, base_env, policies, episode, **kwargs):
        pass
PPOConfig().environment("CartPole-v1").callbacks(Mine).build()
"""
    text = print_port(run, tmp_path, script).stdout
    assert "- Mine: on_episode_end" in text and "'worker'" in text
    assert ".callbacks(" not in text


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
def test_the_first_trial_of_a_search_with_tune_is_ported_with_its_stop(run: Run) -> None:
    text = run(["--port", str(EXAMPLES / "two_agents_rllib.py"), "--tune"]).stdout
    assert "lr is the first of [0.002, 0.0005]" in text
    assert "lr=0.002," in text
    assert 'algo.fit(stop={"training_iteration": 2})' in text


@pytest.mark.slow
def test_classes_and_connectors_that_change_the_run_are_never_left_out_silently(run: Run, tmp_path: Path) -> None:
    script = """
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
class Mine(PPO):
    def get_state(self, *args, **kwargs):
        return super().get_state(*args, **kwargs)
class Scale(ConnectorV2):
    def __call__(self, *, batch, **kwargs):
        return batch
config = PPOConfig(algo_class=Mine).environment("CartPole-v1").env_runners(num_env_runners=0)
config.training(learner_connector=lambda obs_space, action_space: Scale())
config.build_algo()
"""
    text = print_port(run, tmp_path, script).stdout
    assert "- algorithm class Mine: write an algorithm" in text
    assert "- learner connector: " in text


@pytest.mark.slow
def test_a_script_that_builds_nothing_and_one_that_fails(run: Run, tmp_path: Path) -> None:
    start = "from ray.rllib.algorithms.ppo import PPOConfig\nPPOConfig()"
    nothing = print_port(run, tmp_path, start + "\nprint('text')", code=1)
    assert nothing.stdout == ""
    assert "text\n" in nothing.stderr and "built no algorithm" in nothing.stderr
    fails = print_port(run, tmp_path, start + ".training(lrr=1)", code=1)
    assert "lrr" in fails.stderr and "Traceback" in fails.stderr


def test_a_centralised_critic_of_rllib_is_told_the_setting(run: Run, tmp_path: Path) -> None:
    # The names of RLlib's own script, whose first line that is not served does not say what it is for.
    script = """
from ray.rllib.algorithms.ppo.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.ppo_torch_policy import PPOTorchPolicy
class CentralizedValueMixin:
    def __init__(self):
        self.compute_central_vf = self.model.central_value_function
"""
    for told in (print_port(run, tmp_path, script, code=1), run([str(tmp_path / "script.py")], code=1)):
        assert "Policy classes of the old API" in told.stderr
        assert 'corral.PPOConfig().multi_agent(critic_sees="all")' in told.stderr
    other = print_port(run, tmp_path, script.partition("class ")[0], code=1)
    assert "critic_sees" not in other.stderr
