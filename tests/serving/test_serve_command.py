"""`corral serve` as a user has it: a run in a process of its own, and simulators that connect to it."""

from __future__ import annotations

import importlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gymnasium.spaces import Box, Discrete
from simulators import free_ports, runner_of

import warm
from at_least import all_of
from console_script import corral_command
from corral import ExternalEnv, PPOConfig
from corral.algorithms.registry import config_from_dict
from corral.core.settings import path_of
from corral.runners.serving.client import MultiAgentPolicyClient, PolicyClient, drive
from corral.testing import CountingEnv
from corral.tools.cli.experiment import read_experiment
from corral.tools.cli.main import main
from corral.tools.cli.parser import make_parser
from corral.tools.cli.serve import EXTERNAL, serve_config

DEADLINE_S = 120.0
TINY = ["--set", "training.train_batch_size_per_learner=64", "--set", "training.minibatch_size=64"]
TINY += ["--set", "rl_module.model_config.fcnet_hiddens=[4]", "--set", "training.num_epochs=1", "--seed", "3"]
SERVE = ["serve", "--algo", "PPO", "--env", "corral.testing:CountingEnv", "--num-envs", "2", *TINY]


class Server:
    """A process of `corral serve`."""

    def __init__(self, arguments: list[str], directory: Path) -> None:
        self.process = warm.Popen(corral_command(*arguments), cwd=directory)

    @property
    def printed(self) -> str:
        return "".join(self.process.printed())

    def wait(self) -> int | None:
        self.process.communicate(DEADLINE_S)
        return self.process.returncode


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """Start servers that end with the test."""
    servers: list[Server] = []

    def start(*arguments: str) -> Server:
        servers.append(Server([*arguments], tmp_path))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.wait()


def test_the_first_command_of_the_page_needs_only_a_file_with_the_spaces(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "external-simulators.md").read_text(encoding="utf-8")
    command = page.partition("```sh\n")[2].partition("```")[0]
    text, _, after = command.partition("<<'END'\n")[2].partition("END\n")
    assert command.startswith("cat > robot.yaml") and after.startswith("corral serve --config robot.yaml --num-envs 8")
    (tmp_path / "robot.yaml").write_text(text)
    config = config_from_dict({k: v for k, v in read_experiment(tmp_path / "robot.yaml").items() if k != "stop"})
    serve_config(config, {"address": "127.0.0.1:0"}, 8)
    with runner_of(config) as runner:
        assert runner.env.single_observation_space == Box(-np.inf, np.inf, (4,))
        assert runner.env.single_action_space == Discrete(2) and runner.env.num_envs == 8


def test_settings_of_a_policy_server_stay_however_its_class_is_named() -> None:
    settings = {"spaces_of": "CartPole-v1", "token_file": "token", "client_timeout_s": 5.0}
    for env in (ExternalEnv, path_of(ExternalEnv), EXTERNAL):  # the second one is in config.yaml of a run from Python
        config = PPOConfig().environment(env, env_config=settings)
        serve_config(config, {"address": "127.0.0.1:1"}, None)
        assert config.env_config == {**settings, "address": "127.0.0.1:1"} and config.env is env
        assert config.evaluation_config == {}


class Player:
    """A simulator in a thread, which plays until the training is over."""

    def __init__(self, address: str, num_envs: int = 2, **settings: Any) -> None:
        self.num_steps, self.error = 0, None
        self._arguments = address, num_envs, settings
        self.thread = threading.Thread(target=self._play, daemon=True)
        self.thread.start()

    def _play(self) -> None:
        address, num_envs, settings = self._arguments
        try:
            with PolicyClient(address, num_envs, **settings) as client:
                self.num_steps = drive(client, [CountingEnv() for _ in range(num_envs)])
        except BaseException as error:
            self.error = error

    def join(self) -> int:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive() and self.error is None
        return self.num_steps


def results(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "result.jsonl").read_text(encoding="utf-8").splitlines()]


def wait_for_results(run: Path, count: int, server: Server) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not (run / "result.jsonl").exists() or len(results(run)) < count:
        assert time.monotonic() < ends_s and server.process.poll() is None, server.printed
        time.sleep(0.02)


def test_simulators_train_the_policy_of_a_run(serve: Any, tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    server = serve(*SERVE, "--unix", str(socket), "--stop", "training_iteration=3", "--run-dir", "run")
    player = Player(f"unix:{socket}")
    assert server.wait() == 0, server.printed
    assert f'PolicyClient("unix:{socket}")' in server.printed
    assert "corral evaluate run\n" in server.printed
    last = results(tmp_path / "run")[-1]
    sampled = last["num_env_steps_sampled_lifetime"]
    assert 3 * 64 <= sampled <= player.join() <= sampled + 2
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert config["environment"]["env"] == EXTERNAL
    assert main(["evaluate", str(tmp_path / "run"), "--env", "corral.testing:CountingEnv", "--episodes", "2"]) == 0


def test_a_server_that_is_killed_continues_and_its_simulator_finds_it_again(serve: Any, tmp_path: Path) -> None:
    socket, run = tmp_path / "socket", tmp_path / "run"
    command = [*SERVE, "--unix", str(socket), "--stop", "training_iteration=12", "--resume-or-start", "run"]
    command += ["--set", "checkpointing.checkpoint_every_s=0.001"]
    server = serve(*command)
    player = Player(f"unix:{socket}")
    wait_for_results(run, 4, server)
    server.process.kill()
    assert server.wait() == -signal.SIGKILL
    again = serve(*command)
    assert again.wait() == 0, again.printed
    assert "sub-envs 0 to 1: its episodes are played by other programs, which begin new ones" in again.printed
    lines = results(run)
    assert [line["training_iteration"] for line in lines] == list(range(1, 13))
    counts = [line["num_env_steps_sampled_lifetime"] for line in lines]
    assert all(64 <= now - before < 64 + 2 for before, now in zip([0, *counts], counts, strict=False))
    assert player.join() >= counts[-1]


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_its_simulators(serve: Any, tmp_path: Path, number: signal.Signals) -> None:
    socket, run = tmp_path / "socket", tmp_path / "run"
    server = serve(*SERVE, "--unix", str(socket), "--stop", "training_iteration=100000", "--run-dir", "run")
    player = Player(f"unix:{socket}")
    wait_for_results(run, 2, server)
    server.process.send_signal(number)
    assert server.wait() == 128 + number
    assert "corral serve --resume run" in server.printed
    assert player.join() > 0
    assert not socket.exists()


@pytest.mark.slow
def test_a_signal_ends_a_server_that_waits_for_its_first_simulator(serve: Any, tmp_path: Path) -> None:
    server = serve(*SERVE, "--port", "0", "--stop", "training_iteration=1", "--run-dir", "run")
    ends_s = time.monotonic() + DEADLINE_S
    while "Simulators connect to 127.0.0.1:" not in server.printed:
        assert time.monotonic() < ends_s and server.process.poll() is None, server.printed
        time.sleep(0.02)
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 130


@pytest.mark.slow
def test_runners_in_processes_have_ports_of_their_own(serve: Any, tmp_path: Path) -> None:
    port = free_ports(2)
    server = serve(
        *SERVE, "--port", str(port), "--stop", "training_iteration=3", "--run-dir", "run",
        "--set", "env_runners.num_env_runners=2", "--set", "engine.engine_name=process",
    )  # fmt: skip
    players = [Player(f"127.0.0.1:{port + i}") for i in range(2)]
    assert server.wait() == 0, server.printed
    addresses = re.findall(r"Simulators connect to (\S+),", server.printed)
    assert addresses == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    sampled = results(tmp_path / "run")[-1]["num_env_steps_sampled_lifetime"]
    assert sampled >= 3 * 64
    assert all_of(player.join() > 0 for player in players)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SERVE, "--stop", "training_iteration=1", "--unix", "s", "--port", "5"], "leave --host and --port out"),
        ([*SERVE, "--stop", "training_iteration=1", "--seeds", "0-2"], "serve one run at a time"),
        ([*SERVE, "--stop", "training_iteration=1", "--env", "CartPol-v1"], "Did you mean 'CartPole-v1'"),
        ([*SERVE, "--stop", "training_iteration=1", "--token-file", "none"], "token_file"),
        ([*SERVE, "--stop", "training_iteration=1", "--certificate", "none", "--key", "none"], "TLS"),
        ([*SERVE, "--stop", "training_iteration=1", "--host", "300.1.1.1"], "cannot listen at 300.1.1.1:5555"),
        ([*SERVE, "--stop", "training_iteration=1", "--port", "99999"], "must be 'host:port'"),
        (SERVE, "no stop criterion"),
        (["serve", "--algo", "PPO", "--stop", "training_iteration=1"], "no env"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_an_env_without_arguments_is_evaluated_without_the_arguments_of_the_server() -> None:
    config = PPOConfig().environment("CartPole-v1").evaluation(evaluation_interval=1, evaluation_duration=1)
    serve_config(config, {"address": "127.0.0.1:0"}, None)
    with config.build() as algorithm:
        assert algorithm.evaluate()["env_runners"]["num_episodes"] == 1


def test_evaluation_stays_in_the_env_that_the_experiment_names() -> None:
    config = PPOConfig().environment(CountingEnv, env_config={"episode_len": 7}).evaluation(evaluation_interval=1)
    serve_config(config, {"address": "127.0.0.1:0"}, None)
    assert config.env == EXTERNAL and config.num_envs_per_env_runner == 16
    evaluated = config.evaluation_config
    assert evaluated["env"] is CountingEnv and evaluated["env_config"] == {"episode_len": 7}
    assert config.env_config["action_space"]["type"] == "Discrete"
    before = dict(config.env_config)
    serve_config(config, {"address": "127.0.0.1:1"}, 4)  # when the run continues
    assert config.env_config == {**before, "address": "127.0.0.1:1"} and config.num_envs_per_env_runner == 4


PAIR = '''
import numpy as np
from gymnasium import spaces

from corral import MultiAgentEnv


class Pair(MultiAgentEnv):
    """The agents 0 and 1 act together for three steps; the observations of agent 1 have another shape."""

    possible_agents = (0, 1)
    observation_spaces = {agent: spaces.Box(0, 9, (1 + agent,), np.float32) for agent in (0, 1)}
    action_spaces = {0: spaces.Discrete(2), 1: spaces.Box(-1, 1, (2,), np.float32)}

    def _obs(self):
        return {agent: np.full(1 + agent, self.t, np.float32) for agent in (0, 1)}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._obs(), {}

    def step(self, actions):
        assert all(self.action_spaces[agent].contains(actions[agent]) for agent in (0, 1))
        self.t += 1
        return self._obs(), {0: 1.0, 1: 2.0}, {"__all__": self.t == 3}, {"__all__": False}, {}
'''
SERVED_PAIR = """
algo: PPO
environment: {env: "pair:Pair"}
multi_agent: {policies: {"0": {}, "1": {}}}
training: {train_batch_size_per_learner: 64, minibatch_size: 64, num_epochs: 1}
rl_module: {model_config: {fcnet_hiddens: [4]}}
"""


@pytest.mark.slow
def test_an_experiment_of_several_agents_is_served(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pair.py").write_text(PAIR, encoding="utf-8")
    (tmp_path / "experiment.yaml").write_text(SERVED_PAIR, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("pair").Pair
    socket = tmp_path / "socket"
    command = ["serve", "--config", "experiment.yaml", "--num-envs", "2", "--unix", str(socket)]
    server = serve(*command, "--stop", "training_iteration=2", "--run-dir", "run")
    with MultiAgentPolicyClient(f"unix:{socket}", 2) as client:
        num_steps = drive(client, [made(), made()])
    assert server.wait() == 0, server.printed
    assert f'for instance with MultiAgentPolicyClient("unix:{socket}").' in server.printed
    last = results(tmp_path / "run")[-1]
    assert 128 <= last["num_env_steps_sampled_lifetime"] <= num_steps
    assert last["env_runners"]["episode_return_mean"] == 9.0
    assert last["env_runners"]["agent_episode_return_mean"] == {"0": 3.0, "1": 6.0}
    monkeypatch.chdir(tmp_path)
    for env in ([], ["--env", "pair:Pair"]):  # which takes no settings of a server
        assert main(["evaluate", "run", *env, "--episodes", "2"]) == 0
        assert "9.00" in capsys.readouterr().out


SHARED = {
    "--config": "c.yaml", "--tuned": "CartPole-v1", "--algo": "DQN", "--env": "CartPole-v1", "--data": "d",
    "--record": "r", "--stop": "training_iteration=1", "--seed": "5", "--seeds": "0-1", "--parallel": "2",
    "--set": "training.lr=1", "--run-dir": "a", "--resume": "b", "--resume-or-start": "c", "--checkpoint-every": "3",
    "--logger": "csv", "--tensorboard": None, "--quiet": None, "--end-with-input": None,
}  # fmt: skip


@pytest.mark.parametrize("option", SHARED)
def test_serve_takes_the_options_of_train(option: str) -> None:
    given = [option, *([] if SHARED[option] is None else [str(SHARED[option])])]
    train, serve = (vars(make_parser().parse_args([command, *given])) for command in ("train", "serve"))
    own = {"host", "port", "unix", "num_envs", "token_file", "certificate", "key", "command", "run"}
    assert {name: value for name, value in serve.items() if name not in own} == {
        name: value for name, value in train.items() if name not in own
    }
    without = vars(make_parser().parse_args(["serve"]))
    assert serve != without


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--host", "0.0.0.0"], {"address": "0.0.0.0:5555"}),
        (["--port", "7"], {"address": "127.0.0.1:7"}),
        (["--port", "0"], {"address": "127.0.0.1:0"}),
        (["--host", "::1", "--port", "7"], {"address": "[::1]:7"}),
        (["--unix", "s"], {"address": "unix:s"}),
        (["--token-file", "t"], {"token_file": "t"}),
        (["--certificate", "c", "--key", "k"], {"certificate": "c", "key": "k"}),
        (["--num-envs", "5"], {}),
    ],
)
def test_own_options_are_settings_of_the_env(
    arguments: list[str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from corral.tools.cli import serve

    changed = PPOConfig().environment(CountingEnv)
    monkeypatch.setattr(serve, "run_training", lambda options, prepare, built: prepare(changed))
    serve.run(make_parser().parse_args(["serve", *arguments]))
    found = {name: changed.env_config[name] for name in expected}
    assert {name: Path(value).name if name != "address" else value for name, value in found.items()} == expected
    assert changed.num_envs_per_env_runner == (5 if "--num-envs" in arguments else 16)
