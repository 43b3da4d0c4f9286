"""RLlib's names at their module paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rllib_scripts import Run

from corral.compat.rllib import table

PACKAGE = Path(table.__file__).parent


def test_neither_corral_nor_installing_imports_anything_heavy() -> None:
    code = """
import sys, corral
assert not any(name.startswith("corral.compat") for name in sys.modules)
from corral.compat.rllib import install
install()
install()
print(*[name for name in ("torch", "ray", "gymnasium", "numpy") if name in sys.modules])
print(sum(type(finder).__name__ == "RLlibFinder" for finder in sys.meta_path))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


def test_installing_after_rllib_itself_is_an_error() -> None:
    code = """
import sys, types
sys.modules["ray.rllib"] = types.ModuleType("ray.rllib")
from corral.compat.rllib import install
install()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "InstallationError: ray.rllib is imported already" in done.stderr
    assert "before the first import of ray.rllib" in done.stderr


def test_a_name_that_needs_no_torch_does_not_import_it(tmp_path: Path) -> None:
    script = """
import sys
from ray.rllib.core import Columns
print(Columns.OBS, "torch" in sys.modules)
"""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "corral.compat.rllib", str(tmp_path / "script.py")]  # `run` begins with torch
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["obs", "False"]


@pytest.mark.slow
def test_a_name_is_one_object_at_all_its_paths(run: Run) -> None:
    run(
        """
import pickle
from ray.rllib.core import Columns
from ray.rllib.core.columns import Columns as again
import ray.rllib.env.multi_agent_env as envs
from ray.rllib.env import MultiAgentEnv
from ray.rllib import env
from ray.rllib.utils import override
from ray.rllib.utils.annotations import override as same
import corral, ray, ray.tune
assert Columns is again and override is same
assert MultiAgentEnv is envs.MultiAgentEnv is env.MultiAgentEnv is ray.rllib.env.MultiAgentEnv is corral.MultiAgentEnv
assert ray.__file__ and ray.tune.__file__  # the rest of Ray is Ray's own
assert "make_multi_agent" in dir(envs)
assert b"corral" in pickle.dumps(Columns) and pickle.loads(pickle.dumps(Columns)) is Columns
assert (Columns.TERMINATEDS, Columns.ACTION_LOGP, Columns.NEXT_OBS) == ("terminateds", "action_logp", "new_obs")
"""
    )


@pytest.mark.slow_cases("annotation")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from ray.rllib.models.torch.torch_modelv2 import TorchModelV2", "ModelV2 and its catalog, which are refused"),
        ("from ray.rllib.policy.torch_policy import TorchPolicy", "Policy classes of the old API, which are refused"),
        ("from ray.rllib.algorithms.ppo.ppo_tf_policy import PPOTF2Policy", "TensorFlow, which Corral does not use"),
        (
            "from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import vtrace_torch",
            "use corral.core.returns.vtrace",
        ),
        ("from ray.rllib.core.models.specs.specs_dict import SpecDict", "ModelV2 and its catalog"),
        ("from ray.rllib.algorithms.dreamerv3.utils import debugging", "the parts of which RLlib's DreamerV3 is made"),
        ("from ray.rllib.evaluation.postprocessing import compute_advantages", "use episodes in callbacks"),
        ("from ray.rllib.examples.algorithms.mappo.mappo import MAPPOConfig", "multi_agent(critic_sees=...)"),
        ("from ray.rllib.utils.annotations import overrides", "Did you mean 'override'?"),
        ("import ray.rllib.utils.annotation", "Did you mean 'utils.annotations'?"),
    ],
)
def test_a_name_that_is_not_served_says_what_it_belongs_to(run: Run, line: str, words: str) -> None:
    done = run(f"try:\n    {line}\nexcept ImportError as error:\n    print(type(error).__name__, error)\n")
    assert done.stdout.startswith("NotServedError")
    assert words in done.stdout


def test_an_attribute_that_is_not_served_is_an_attribute_error(run: Run) -> None:
    done = run(
        """
import ray.rllib.utils.annotations as annotations
assert not hasattr(annotations, "overrides") and not hasattr(annotations, "__wrapped__")
print(annotations.overrides)
""",
        code=1,
    )
    assert "UnknownAttributeError" in done.stderr
    assert "Did you mean 'override'?" in done.stderr


def test_examples_are_loaded_from_the_files_of_ray(run: Run) -> None:
    pytest.importorskip("ray")
    run(
        """
from ray.rllib.examples.envs.classes.multi_agent import GuessTheNumberGame, make_multi_agent
from ray.rllib.examples.envs.classes.simple_corridor import SimpleCorridor
from ray.rllib.examples.env.simple_corridor import SimpleCorridor as older
import corral, sys
assert issubclass(GuessTheNumberGame, corral.MultiAgentEnv) and make_multi_agent is corral.make_multi_agent
assert older is SimpleCorridor and SimpleCorridor.__module__ == "ray.rllib.examples.envs.classes.simple_corridor"
assert SimpleCorridor({"corridor_length": 5}).reset()[0].shape == (1,)
assert "ray.rllib.algorithms.algorithm" not in sys.modules
from ray.rllib.models.torch.misc import same_padding
assert same_padding((4, 4), 3, 1)[1] == (4, 4)
"""
    )


def test_without_ray_examples_name_the_extra(run: Run) -> None:
    done = run("from ray.rllib.examples.envs.classes.simple_corridor import SimpleCorridor", with_ray=False, code=1)
    assert "from the files of Ray, which is not installed: pip install 'corral[rllib]'" in done.stderr


def test_every_name_of_the_table_is_there() -> None:
    entries = [(module, name, *entry) for module in table.MODULES for name, entry in table.entries(module).items()]
    assert len(entries) > 400
    missing = [
        f"{module}.{name}: {home} has no {target}"
        for module, name, home, target in entries
        if ("." not in home and not (PACKAGE / f"{home}.py").exists()) or not hasattr(table.home_module(home), target)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
@pytest.mark.parametrize("package", ["algorithms", "agents"])
def test_each_algorithm_has_a_module_of_its_name(package: str, name: str) -> None:
    served = table.MODULES[f"{package}.{name}.{name}"].split()
    assert {name.upper(), f"{name.upper()}Config"} <= set(served)
