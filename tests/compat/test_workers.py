"""Workers serve RLlib's names before they unpickle anything, on all engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from rllib_scripts import Run

# The env is a class of Ray's example files, whose module path starts with `ray.rllib`, so a worker without the finder
# could not unpickle it, or would import RLlib itself.
TRAINS = """
import sys
from ray.rllib.core.columns import Columns
from ray.rllib.examples.envs.classes.simple_corridor import SimpleCorridor
from corral import PPOConfig

class Named(SimpleCorridor):
    column = Columns

def where(runner):
    import ray.rllib.utils.metrics
    finders = sum(type(finder).__name__ == "RLlibFinder" for finder in sys.meta_path)
    return finders, type(ray.rllib).__name__, ray.rllib.utils.metrics.EPISODE_RETURN_MEAN

{before}
config = (
    PPOConfig().environment(Named, env_config={{"corridor_length": 5}})
    .env_runners(num_env_runners=1, num_envs_per_env_runner=1)
    .training(train_batch_size_per_learner=100, minibatch_size=50, num_epochs=1)
    .engine("{engine}")
)
with config.build() as algo:
    assert algo.train()["engine"] == "{engine}"
    print(algo.env_runner_group.foreach_env_runner(where))
"""
EXPECTED = "[(1, 'ServedModule', 'episode_return_mean')]"


@pytest.mark.slow
def test_processes_unpickle_classes_of_the_examples_and_of_the_script(run: Run) -> None:
    pytest.importorskip("ray")
    assert EXPECTED in run(TRAINS.format(before="", engine="process")).stdout


INIT = "import ray; ray.init(address='local', num_cpus=2, include_dashboard=False, log_to_driver=False)"


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(INIT, id="ray_was_started", marks=pytest.mark.slow),
        # Ray does not tell its workers, so the engine's actors have to.
        pytest.param("import os; del os.environ['RAY_RUNTIME_ENV_HOOK']", id="engine", marks=pytest.mark.slow),
    ],
)
def test_ray_actors_unpickle_classes_of_the_examples(run: Run, before: str) -> None:
    pytest.importorskip("ray")
    assert EXPECTED in run(TRAINS.format(before=before, engine="ray")).stdout


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_all_workers_of_ray_serve_the_names(run: Run) -> None:
    pytest.importorskip("ray")
    done = run(
        """
import os
import ray
import ray.rllib
from ray.rllib.examples.envs.classes.simple_corridor import SimpleCorridor
from ray.tune.registry import ENV_CREATOR, _global_registry, get_trainable_cls, register_env

def own_setup():
    os.environ["OWN_SETUP"] = "1"

register_env("corridor", lambda config: SimpleCorridor(config))
ray.init(
    address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
    runtime_env={"worker_process_setup_hook": own_setup},
)

@ray.remote
def task(env):
    import ray.rllib
    return type(ray.rllib).__name__, env.__name__, os.environ.get("OWN_SETUP")

print(ray.get(task.remote(SimpleCorridor)))
print(_global_registry.get(ENV_CREATOR, "corridor")({"corridor_length": 4}).end_pos)
print(get_trainable_cls("DreamerV3").__name__)
""",
    )
    assert "('ServedModule', 'SimpleCorridor', '1')\n4\n" in done.stdout
    assert "DreamerV3" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def test_each_layer_holds_with_a_runner_in_another_process(run: Run, engine: str) -> None:
    pytest.importorskip("ray")
    done = run([str(Path(__file__).with_name("layers_in_workers.py")), engine], timeout_s=400)
    assert done.stdout.count("holds:") == 9
