"""Multi-agent envs in vector envs and in the host of a runner: processes, restarts, resets, tasks and states."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral import PPOConfig
from corral.core.plain import is_same
from corral.core.seeding import runner_seeds
from corral.core.tree import copy_nested, named_leaves
from corral.envs.env_host import EnvHost
from corral.envs.host_state import get_host_state, set_host_state
from corral.envs.multi_agent_env import MultiAgentEnv
from corral.envs.seats import SeatsSpace
from corral.envs.vector import EnvContext, make_vector_env
from corral.errors import ConfigError, EnvError, SubEnvError
from random_agents import RandomAgents

VECTORIZATIONS = ["sync", "async"]


class Turns(MultiAgentEnv):
    """Two agents act in turn and see the time, the start, the task, and who acts. It fails where it is told to."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.possible_agents = ["black", "white"]
        self.observation_space, self.action_space = spaces.Box(-99, 99, (3,), np.float32), spaces.Discrete(5)
        self.length, self.bad = config.get("length", 5), config.get("bad")
        self.fails_at = config.get("fails_at", -1) if getattr(config, "vector_index", 0) == 1 else -1
        self.counts = config.setdefault("counts", {"steps": 0})
        self.task, self.t, self.start, self.resets = 0, 0, 0, []

    def get_task(self) -> int:
        return self.task

    def set_task(self, task: int) -> None:
        self.task = task

    def get_state(self) -> dict[str, Any]:
        return {"task": self.task, "t": self.t, "start": self.start}

    def set_state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def _see(self) -> dict[str, Any]:
        agent = self.possible_agents[self.t % 2]
        return {agent: np.float32([self.t, self.start, self.task])}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.resets.append((seed, options, self.task))
        self.t, self.start = 0, (options or {}).get("start", int(self.np_random.integers(50)))
        return self._see(), {}

    def step(self, action_dict: dict[str, Any]) -> Any:  # type: ignore[override]
        assert [*action_dict] == [self.possible_agents[self.t % 2]]
        self.counts["steps"] += 1
        if self.counts["steps"] == self.fails_at:
            raise ValueError("out of luck")
        self.t += 1
        rewards = {agent: float(action_dict.get(agent, -1)) for agent in self.possible_agents}
        if self.bad is not None and self.t == 3:
            rewards["nobody"] = 1.0
        return self._see(), rewards, {"__all__": self.t == self.length}, {"__all__": False}, {"black": {"t": self.t}}


def config(env: Any = Turns, vectorization: str = "sync", **settings: Any) -> PPOConfig:
    made = PPOConfig().environment(env, disable_env_checking=True)
    made.env_runners(num_envs_per_env_runner=2, vectorization=vectorization).debugging(seed=1)  # type: ignore[arg-type]
    return made.copy(**settings)


@pytest.fixture
def make_host() -> Iterator[Any]:
    hosts: list[EnvHost] = []

    def make(of: PPOConfig, **given: Any) -> EnvHost:
        def restarted(failure: SubEnvError) -> None:
            host.count_restart(failure, 0)

        host = EnvHost(
            of,
            0,
            runner_seeds(1, 0, 0, False)[0],
            **{  # type: ignore[arg-type]
                "env_created": lambda env, context: None,
                "sub_env_created": lambda sub_env, context, index: None,
                "sub_env_restarted": restarted,
                "needs_sub_envs": False,
                "has_own_process": False,
                **given,
            },
        )
        hosts.append(host)
        host.make()
        return host

    yield make
    for host in hosts:
        host.close()


def play(host: EnvHost, num_steps: int, *, seed: int = 0) -> list[Any]:
    """Return what steps with random actions give."""
    host.env.action_space.seed(seed)
    return [copy_nested(host.step(host.env.action_space.sample())) for _ in range(num_steps)]


def assert_same(one: Any, other: Any) -> None:
    assert len(one) == len(other)
    for first, second in zip(one, other, strict=True):
        *arrays, infos = first
        *others, other_infos = second
        for (path, leaf), (_, twin) in zip(named_leaves(tuple(arrays)), named_leaves(tuple(others)), strict=True):
            np.testing.assert_array_equal(leaf, twin, err_msg=path)
            assert leaf.dtype == twin.dtype
        assert is_same(infos, other_infos)


@pytest.mark.parametrize("env", [Turns, RandomAgents])
def test_processes_give_the_same_arrays(make_host: Any, env: Any) -> None:
    env_config = {"num_kinds": 2, "length": 4}
    hosts = [make_host(config(env, vectorization, env_config=env_config)) for vectorization in VECTORIZATIONS]
    assert isinstance(hosts[0].env.single_observation_space, SeatsSpace)
    assert hosts[0].env.single_observation_space.seats == hosts[1].env.single_observation_space.seats
    assert_same(*([(*host.reset(),)] for host in hosts))
    played = [play(host, 60) for host in hosts]
    assert_same(*played)
    assert sum(step[2].sum() + step[3].sum() for step in played[0]) > 5


def test_sub_envs_are_reset_in_steps_of_their_own() -> None:
    with pytest.raises(
        ConfigError, match=r"autoreset_mode='same_step' contradicts env 'Turns', which has several agents"
    ):
        make_vector_env(Turns, EnvContext({}), num_envs=2, autoreset_mode="same_step")


class TestFailures:
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_errors_name_env_sub_env_step_and_agent(self, make_host: Any, vectorization: str) -> None:
        host = make_host(config(vectorization=vectorization, env_config={"bad": True}))
        host.reset()
        play(host, 2)
        with pytest.raises(SubEnvError) as raised:
            play(host, 1)
        message = str(host.error("step", 2, raised.value))
        assert message.startswith("env 'Turns', sub-env 0, step 2: raised in step(): rewards have agent 'nobody'")

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_a_restarted_sub_env_has_new_seats(
        self, make_host: Any, vectorization: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        given = {"env_config": {"fails_at": 4, "length": 9}, "restart_failed_sub_environments": True}
        host = make_host(config(vectorization=vectorization, **given))
        host.reset()
        host.set_tasks([7])
        with caplog.at_level(logging.WARNING, "corral"):
            steps = play(host, 6)
        assert host.restarts.num_restarts == 1 and "ValueError: out of luck. It was restarted" in caplog.text
        shown = [int(obs["obs"]["block_0"][1].max(axis=0)[0]) for obs, *_ in steps]
        assert shown == [1, 2, 3, 0, 1, 2]
        obs, rewards, *_ = steps[3]
        assert obs["observed"][1].tolist() == [1, 0] and obs["rewards"][1].tolist() == [0, 0] and rewards[1] == 0.0
        assert obs["obs"]["block_0"][1, 0, 2] == 7.0  # the task
        assert [int(obs["obs"]["block_0"][0].max(axis=0)[0]) for obs, *_ in steps] == [1, 2, 3, 4, 5, 6]

    def test_the_check_at_start_names_agent_and_field(self) -> None:
        class Wrong(Turns):
            def step(self, action_dict: dict[str, Any]) -> Any:
                return {"white": np.zeros(2)}, {}, {"__all__": False}, {}, {}

        with pytest.raises(
            EnvError, match=r"env 'Wrong'.*step\(\).*observation of agent 'white' must have shape \(3,\)"
        ):
            make_vector_env(Wrong, EnvContext({}), num_envs=2)

    def test_agents_without_spaces_are_found_when_the_env_is_made(self) -> None:
        class Spaceless(Turns):
            def __init__(self, config: dict[str, Any]) -> None:
                super().__init__(config)
                self.action_space = None

        with pytest.raises(EnvError, match="env 'Spaceless': agent 'black' has no action space"):
            make_vector_env(Spaceless, EnvContext({}), num_envs=1, check=False)

    def test_envs_that_are_no_multi_agent_env_are_told_to_be_one(self) -> None:
        class Foreign(gym.Env[Any, Any]):
            possible_agents = ("a", "b")
            observation_space = action_space = None  # type: ignore[assignment]

        with pytest.raises(EnvError, match=r"observation_space must be .* Several agents need a corral\.MultiAgentEnv"):
            make_vector_env(Foreign, EnvContext({}), num_envs=1)
        with pytest.raises(EnvError, match=r"expected .* a corral\.MultiAgentEnv or an env of PettingZoo, got dict"):
            make_vector_env(lambda: {}, EnvContext({}), num_envs=1)

    def test_observations_that_lose_precision_are_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        class Doubles(Turns):
            def _see(self) -> dict[str, Any]:
                return {agent: obs.astype(np.float64) for agent, obs in super()._see().items()}

        with caplog.at_level(logging.WARNING, "corral"):
            make_vector_env(Doubles, EnvContext({}), num_envs=2).close()
        [message] = [record.message for record in caplog.records]
        assert "env 'Doubles': observation must have dtype float32, got float64" in message


class TestSubEnvs:
    @pytest.mark.parametrize("resets", [None, lambda episode_index: {"seed": episode_index}])
    def test_user_code_is_given_the_env_of_the_user(self, make_host: Any, resets: Any) -> None:
        announced: list[Any] = []
        created = {"sub_env_created": lambda sub_env, context, index: announced.append(sub_env)}
        host = make_host(config(env_reset_fn=resets), **created)
        assert [type(env) for env in announced] == [Turns, Turns]
        assert host.sub_env(1) is announced[1]
        assert host.foreach(lambda env: type(env).__name__) == ["Turns", "Turns"]
        assert host.env.envs[0].unwrapped is announced[0]  # type: ignore[attr-defined]

    def test_wrappers_of_the_user_are_around_the_dicts_of_the_agents(self, make_host: Any) -> None:
        class Doubled(gym.Wrapper[Any, Any, Any, Any]):
            def step(self, action: Any) -> Any:
                obs, rewards, *rest = self.env.step(action)
                return obs, {agent: 2 * reward for agent, reward in rewards.items()}, *rest

        wrappers = [Doubled, lambda env: gym.wrappers.TimeLimit(env, 3)]
        host = make_host(config(wrappers=wrappers))
        host.reset()
        steps = [copy.deepcopy(host.step({"block_0": np.array([[2, 3], [2, 3]])})) for _ in range(3)]
        assert [obs["rewards"][0].tolist() for obs, *_ in steps] == [[4, -2], [-2, 6], [4, -2]]
        assert [truncated.tolist() for _, _, _, truncated, _ in steps] == [[False] * 2, [False] * 2, [True] * 2]

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_tasks_and_reset_arguments_reach_the_env(self, make_host: Any, vectorization: str) -> None:
        def choose(episode_index: int, env_index: int) -> dict[str, Any]:
            return {"seed": 10 * episode_index + env_index, "options": {"start": 40}, "task": 5 + episode_index}

        given = {"env_reset_fn": choose, "env_config": {"length": 2}}
        host = make_host(config(vectorization=vectorization, **given))
        obs, _ = host.reset()
        assert obs["obs"]["block_0"][:, 0].tolist() == [[0, 40, 5]] * 2
        play(host, 3)
        assert host.get_tasks() == [6, 6]
        assert host.foreach(lambda env: env.resets) == [
            [(0, {"start": 40}, 5), (10, {"start": 40}, 6)],
            [(1, {"start": 40}, 5), (11, {"start": 40}, 6)],
        ]

    def test_a_registered_multi_agent_env(self) -> None:
        gym.register("corral-tests/Turns-v0", entry_point=lambda **kwargs: Turns(kwargs), max_episode_steps=4)
        try:
            env = make_vector_env("corral-tests/Turns-v0", EnvContext({"length": 9}), num_envs=2)
        finally:
            del gym.registry["corral-tests/Turns-v0"]
        env.reset(seed=0)
        ends = [env.step(env.action_space.sample())[3].tolist() for _ in range(4)]
        assert ends == [[False, False]] * 3 + [[True, True]]


class TestStates:
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_an_episode_continues_exactly(self, make_host: Any, vectorization: str) -> None:
        host = make_host(config(vectorization=vectorization))
        host.reset()
        resets_next = np.logical_or(*play(host, 13)[-1][2:4])
        state = copy_nested(get_host_state(host))
        expected = play(host, 30, seed=5)
        other = make_host(config(vectorization=vectorization))
        assert set_host_state(other, state, resets_next, [None] * 2) == [""] * 2
        assert_same(play(other, 30, seed=5), expected)

    def test_who_has_ended_is_part_of_the_state(self, make_host: Any) -> None:
        class Survivor(Turns):
            """Black ends at once, and white plays on."""

            def _see(self) -> dict[str, Any]:
                both = {agent: np.float32([self.t, 0, 0]) for agent in self.possible_agents}
                return both if self.t == 0 else {"white": both["white"]}

            def step(self, action_dict: dict[str, Any]) -> Any:
                assert len(action_dict) == (2 if self.t == 0 else 1)
                self.t += 1
                return self._see(), {"white": 1.0}, {"black": self.t == 1, "__all__": self.t == 9}, {}, {}

        host = make_host(config(Survivor))
        host.reset()
        play(host, 3)
        state = copy_nested(get_host_state(host))
        other = make_host(config(Survivor))
        assert set_host_state(other, state, np.zeros(2, np.bool_), [None] * 2) == [""] * 2
        seated = other.env.envs[0]  # type: ignore[attr-defined]
        assert seated.ended.tolist() == [True, False] and seated.acting.tolist() == [False, True]
        obs, _, terminated, *_ = play(other, 6)[-1]
        assert terminated.all() and obs["rewards"].tolist() == [[0.0, 1.0]] * 2

    def test_an_env_without_a_state_begins_its_episode_again(self, make_host: Any) -> None:
        class Forgetful(Turns):
            get_state = set_state = None  # type: ignore[assignment]

        host = make_host(config(Forgetful))
        host.reset()
        play(host, 7)
        state = copy_nested(get_host_state(host))
        other = make_host(config(Forgetful))
        assert set_host_state(other, state, np.zeros(2, np.bool_), ["too long"] * 2) == ["too long"] * 2
        obs, _ = other.reset()
        assert obs["observed"].tolist() == [[1, 0]] * 2 and obs["obs"]["block_0"][:, 0, 0].tolist() == [0, 0]
        play(other, 7)  # whoever has to act is asked
