"""Scripts for recorded data in the manner of RLlib's examples: recording, BC, MARWIL, and PPO after BC."""

from __future__ import annotations

from pathlib import Path

import pytest
from rllib_scripts import Run

DATA = Path(__file__).parent / "data_of_rllib"

PROCESS = ("--no-tune", "--num-env-runners=0", "--num-learners=0", "--stop-iters=3")
"""Options with which a script runs in one process."""

BEGIN = f"""
from pathlib import Path
import gymnasium as gym
import numpy as np
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN, EVALUATION_RESULTS
from ray.rllib.utils.test_utils import add_rllib_example_script_args, run_rllib_example_script_experiment

DATA = Path({str(DATA)!r})
"""


@pytest.fixture(autouse=True)
def with_files() -> None:
    pytest.importorskip("pyarrow")


@pytest.mark.slow
def test_bc_on_cartpole_evaluates_while_it_learns(run: Run) -> None:
    done = run(
        BEGIN
        + """
parser = add_rllib_example_script_args()
args = parser.parse_args()
data_path = "local://" / DATA / "cartpole_table"
config = (
    BCConfig()
    .environment("CartPole-v1")
    .offline_data(
        input_=[data_path.as_posix()],
        input_read_method_kwargs={"override_num_blocks": 2},
        map_batches_kwargs={"concurrency": 2, "num_cpus": 1},
        iter_batches_kwargs={"prefetch_batches": 1, "local_shuffle_buffer_size": None},
        dataset_num_iters_per_learner=5,
    )
    .training(train_batch_size_per_learner=1024, lr=0.0008 * (args.num_learners or 1) ** 0.5)
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32, 32]))
    .evaluation(
        evaluation_interval=3,
        evaluation_num_env_runners=1,
        evaluation_duration=5,
        evaluation_parallel_to_training=True,
    )
)
metric = f"{EVALUATION_RESULTS}/{ENV_RUNNER_RESULTS}/{EPISODE_RETURN_MEAN}"
result = run_rllib_example_script_experiment(config, args, stop={metric: 350.0, "training_iteration": 3})
assert result[EVALUATION_RESULTS][ENV_RUNNER_RESULTS][EPISODE_RETURN_MEAN] > 5
numbers = result["learners"]["default_policy"]
assert 0 < numbers["policy_loss"] == numbers["total_loss"] < 0.7
assert numbers["num_module_steps_trained_lifetime"] == 3 * 5 * 1024
assert result["num_env_steps_sampled_lifetime"] == 3 * 1024
""",
        *PROCESS,
    )
    assert done.stdout.splitlines()[-1] == "Stop criterion (training_iteration=3) fulfilled!"


def test_marwil_and_bc_with_spaces_and_no_env(run: Run) -> None:
    run(
        BEGIN
        + """
from ray.rllib.algorithms.marwil.marwil_learner import LEARNER_RESULTS_MOVING_AVG_SQD_ADV_NORM_KEY as NORM
from ray.rllib.algorithms.marwil.torch.marwil_torch_learner import (
    LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY,
    MARWILTorchLearner,
)
from ray.rllib.core.learner.learner import POLICY_LOSS_KEY, VF_LOSS_KEY

bounds = np.array([4.8, np.inf, 0.41887903, np.inf])
for config in (MARWILConfig().training(beta=0.7, vf_coeff=0.5), BCConfig()):
    config.api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
    config.environment(
        observation_space=gym.spaces.Box(-bounds, bounds, shape=(4,), dtype=np.float32),
        action_space=gym.spaces.Discrete(2),
    )
    config.training(lr=1e-3, gamma=0.99, train_batch_size_per_learner=50)
    config.offline_data(
        input_=[(DATA / "cartpole_episodes").as_posix()],
        input_read_episodes=True,
        input_read_batch_size=5,
        dataset_num_iters_per_learner=1,
    )
    config.debugging(seed=1)
    assert config.learner_class is MARWILTorchLearner
    algo = config.build()
    first = algo.train()["learners"]["default_policy"]
    for _ in range(20):
        result = algo.train()
    numbers = result["learners"]["default_policy"]
    if config.ALGORITHM == "MARWIL":
        assert numbers[POLICY_LOSS_KEY] < first[POLICY_LOSS_KEY]
        assert abs(numbers[NORM] - 100.0) < 1e-3 and numbers[VF_LOSS_KEY] < first[VF_LOSS_KEY]
        assert numbers[LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY] < 1
    else:
        # The actions of these episodes are random: ln 2 is the loss of who knows that.
        assert abs(numbers[POLICY_LOSS_KEY] - np.log(2)) < 0.06 and VF_LOSS_KEY not in numbers
    assert result["num_env_steps_sampled_lifetime"] == 21 * 50
    assert algo.compute_single_action(np.zeros(4, np.float32)) in (0, 1)
    try:
        algo.offline_data
    except AttributeError as error:
        assert "algo.native.data has it" in str(error)
    path = algo.save_to_path()
    again = type(algo).from_checkpoint(path)
    assert np.isclose(again.train()["learners"]["default_policy"][POLICY_LOSS_KEY],
                      algo.train()["learners"]["default_policy"][POLICY_LOSS_KEY])
    again.stop()
    algo.stop()
"""
    )


@pytest.mark.slow
def test_a_learner_class_changes_the_loss_of_bc(run: Run) -> None:
    run(
        BEGIN
        + """
from ray.rllib.algorithms.marwil.torch.marwil_torch_learner import MARWILTorchLearner

class Doubled(MARWILTorchLearner):
    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        base = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        self.metrics.log_value((module_id, "rows"), len(batch["obs"]), window=1)
        return 2 * base

config = BCConfig().environment("CartPole-v1").offline_data(
    input_=str(DATA / "cartpole_table"), dataset_num_iters_per_learner=2
)
config.training(train_batch_size_per_learner=40, learner_class=Doubled)
algo = config.build()
numbers = algo.train()["learners"]["default_policy"]
assert np.isclose(numbers["total_loss"], 2 * numbers["policy_loss"]) and numbers["rows"] == 40
algo.stop()
"""
    )


RECORDING = (
    BEGIN
    + """
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.core.columns import Columns

parser = add_rllib_example_script_args(default_timesteps=200000, default_reward=350.0)
parser.set_defaults(checkpoint_at_end=True, max_concurrent_trials=1)
args = parser.parse_args()
config = (
    PPOConfig()
    .env_runners(num_env_runners=0)
    .environment("CartPole-v1")
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True))
    .training(lr=0.0003, num_epochs=2, vf_loss_coeff=0.01, train_batch_size=500)
    .evaluation(evaluation_interval=1, evaluation_config=PPOConfig.overrides(explore=False))
)
trained = config.copy(copy_frozen=False).build()
trained.train()
checkpoint = trained.save().checkpoint.path
trained.stop()

config.offline_data(
    output="local://" + str(Path("recorded").absolute()) + "/",
    output_write_episodes=False,
    output_max_rows_per_file=100,
    output_write_remaining_data=True,
    output_compress_columns=[Columns.OBS, Columns.ACTIONS],
)
config.evaluation(
    evaluation_num_env_runners=NUM_RUNNERS,
    evaluation_duration=12,
    evaluation_duration_unit="episodes",
    evaluation_interval=1,
    evaluation_parallel_to_training=False,
    evaluation_config=PPOConfig.overrides(explore=False),
)
algo = config.build()
algo.restore_from_path(checkpoint, component=COMPONENT_RL_MODULE)
returns = []
for i in range(3):
    res = algo.evaluate()
    assert res[ENV_RUNNER_RESULTS]["num_episodes"] == 12
    returns.append(res[ENV_RUNNER_RESULTS][EPISODE_RETURN_MEAN])
algo.stop()

bc = BCConfig().environment("CartPole-v1").offline_data(input_=["recorded"], dataset_num_iters_per_learner=1).build()
data = bc.native.data["default_policy"]
assert data.num_episodes == 36 and np.isclose(data.episode_return_mean, np.mean(returns)), (data, returns)
bc.train()
bc.stop()
"""
)


@pytest.mark.slow
def test_evaluation_records_a_trained_policy(run: Run) -> None:
    run(RECORDING.replace("NUM_RUNNERS", "0"))


@pytest.mark.slow
def test_evaluation_runners_in_processes_record_and_ray_data_reads_it(run: Run) -> None:
    pytest.importorskip("ray.data")
    run(
        RECORDING.replace("NUM_RUNNERS", "2")
        + """
import ray
ds = ray.data.read_parquet("local://" + str(Path("recorded").absolute()))
assert ds.count() == data.num_steps + data.num_episodes  # with a row for each final observation
"""
    )


@pytest.mark.slow
def test_bc_runs_in_tune_by_its_name(run: Run) -> None:
    pytest.importorskip("ray")
    run(
        BEGIN
        + """
from ray import tune

config = (
    BCConfig()
    .environment("CartPole-v1")
    .training(lr=tune.grid_search([0.001, 0.0001]), train_batch_size_per_learner=64)
    .offline_data(input_=[(DATA / "cartpole_table").as_posix()], dataset_num_iters_per_learner=1)
)
for space in (config, config.to_dict()):
    found = tune.Tuner("BC", param_space=space, run_config=tune.RunConfig(stop={"training_iteration": 2})).fit()
    assert len(found) == 2 and not found.errors
    assert all(each.metrics["num_env_steps_sampled_lifetime"] == 128 for each in found)
"""
    )


@pytest.mark.slow
def test_ppo_continues_from_a_module_of_bc(run: Run) -> None:
    run(
        BEGIN
        + """
from torch import nn
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_LEARNER_GROUP, COMPONENT_RL_MODULE
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.base import ENCODER_OUT
from ray.rllib.core.models.configs import MLPEncoderConfig, MLPHeadConfig
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

class BCModel(TorchRLModule):
    def setup(self):
        self._encoder = MLPEncoderConfig(
            input_dims=[4], hidden_layer_dims=[32, 32], hidden_layer_activation="relu", output_layer_dim=None
        ).build(framework="torch")
        self._pi = MLPHeadConfig(
            input_dims=[32], hidden_layer_dims=[16], hidden_layer_activation="relu", output_layer_dim=2,
            output_layer_activation="linear",
        ).build(framework="torch")

    def _forward_inference(self, batch, **kwargs):
        return {Columns.ACTION_DIST_INPUTS: self._pi(self._encoder(batch)[ENCODER_OUT])}

    def _forward_exploration(self, batch, **kwargs):
        return self._forward_inference(batch)

    def _forward_train(self, batch, **kwargs):
        BCModel.num_trained = getattr(BCModel, "num_trained", 0) + 1
        return self._forward_inference(batch)

class PPOModel(BCModel, ValueFunctionAPI):
    def setup(self):
        super().setup()
        self._vf = MLPHeadConfig(
            input_dims=[32], hidden_layer_dims=[16], hidden_layer_activation="relu",
            hidden_layer_weights_initializer=nn.init.zeros_, hidden_layer_bias_initializer=nn.init.zeros_,
            output_layer_dim=1, output_layer_activation="linear",
            output_layer_weights_initializer=nn.init.zeros_, output_layer_bias_initializer=nn.init.zeros_,
        ).build(framework="torch")

    def _forward_train(self, batch, **kwargs):
        features = self._encoder(batch)[ENCODER_OUT]
        return {Columns.ACTION_DIST_INPUTS: self._pi(features), Columns.VF_PREDS: self._vf(features).squeeze(-1)}

    def compute_values(self, batch, embeddings=None):
        if embeddings is None:
            embeddings = self._encoder(batch)[ENCODER_OUT]
        return self._vf(embeddings).squeeze(-1)

config = (
    BCConfig()
    .environment("CartPole-v1")
    .offline_data(input_=[(DATA / "cartpole_table").as_posix()], dataset_num_iters_per_learner=None)
    .training(train_batch_size_per_learner=30, lr=0.01)
    .rl_module(rl_module_spec=RLModuleSpec(module_class=BCModel))
    .debugging(seed=1)
)
algo = config.build()
losses = [algo.train()["learners"]["default_policy"]["policy_loss"] for _ in range(60)]
assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.02  # one loss is of 30 rows, whose actions are random
assert BCModel.num_trained >= 180  # the loss is of forward_train
modules = Path(algo.save_to_path()) / COMPONENT_LEARNER_GROUP / COMPONENT_LEARNER / COMPONENT_RL_MODULE
checkpoint = modules / "default_policy"
weights = algo.get_weights()["default_policy"]
algo.stop()

config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0)
    .training(lr=0.00002, num_epochs=1, vf_loss_coeff=0.01, train_batch_size=300)
    .rl_module(rl_module_spec=RLModuleSpec(module_class=PPOModel, load_state_path=checkpoint))
)
ppo = config.build()
loaded = ppo.get_weights()["default_policy"]
assert loaded.keys() > weights.keys() and all(np.array_equal(loaded[name], weights[name]) for name in weights)
assert all((loaded[name] == 0).all() for name in loaded.keys() - weights.keys())
assert ppo.evaluate()[ENV_RUNNER_RESULTS][EPISODE_RETURN_MEAN] > 5
ppo.train()
ppo.stop()
"""
    )


def test_names_that_are_not_served_say_what_to_use(run: Run) -> None:
    done = run(
        """
for line in (
    "from ray.rllib.offline.json_writer import JsonWriter",
    "from ray.rllib.algorithms.dreamerv3.torch.models import world_model",
):
    try:
        exec(line)
    except ImportError as error:
        print(str(error))
"""
    )
    first, second = done.stdout.splitlines()
    assert "use .offline_data(input_=...) and .offline_data(output=...), with a prelearner_class" in first
    assert second.endswith("use `DreamerV3Config`, whose networks and losses are Corral's.")
