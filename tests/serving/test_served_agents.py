"""Episodes of several agents that simulators play, against episodes built by hand from what their envs gave."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from simulators import Playing, Stranger, address_of, free_ports, runner_of

from agent_steps import AGENTS, build, module_of
from at_least import all_of
from corral import APPOConfig, DQNConfig, ExternalEnv, PPOConfig
from corral.core.space_descriptions import describe_space
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
from corral.errors import ConfigError
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.runners.serving.client import ClientError, EpisodesLost, MultiAgentPolicyClient, PolicyClient, drive
from random_agents import RandomAgents
from scripted_agents import ScriptedAgents
from seen_by_critics import assert_seen, numbers_of_all
from watched_episodes import Watching, WatchingWholes, assert_same


def config(num_envs: int, *, apart: bool = False, **callbacks: Any) -> PPOConfig:
    env = ScriptedAgents(apart=apart)
    both = {"observation_spaces": env.observation_spaces, "action_spaces": env.action_spaces}
    config = PPOConfig().environment(ExternalEnv, env_config={"address": "127.0.0.1:0", **both})
    config.env_runners(num_envs_per_env_runner=num_envs)
    config.multi_agent(policies={"main", "other"}, policy_mapping_fn=module_of)
    return config.callbacks(**callbacks).debugging(seed=0)


@dataclass
class Simulator(Playing):
    """A client that plays scripted episodes in some envs, each at a pace of its own.

    Sometimes it gives one up, or plays one that does not count; `counted` are the others, by env.
    """

    runner: EnvRunner
    number: int
    num_envs: int
    pause_s: float = 0.0
    drops: float = 0.0
    skips: float = 0.0
    apart: bool = False
    envs: list[ScriptedAgents] = field(default_factory=list)
    counted: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(self.number)
        self.envs = [ScriptedAgents(100 + 10 * self.number + i, apart=self.apart) for i in range(self.num_envs)]
        self.may_play = threading.Event()

    def connect_and_play(self) -> None:
        with MultiAgentPolicyClient(address_of(self.runner), self.num_envs) as client:
            self.may_play.wait(30)
            self._play(client)

    def _play(self, client: MultiAgentPolicyClient) -> None:
        actions: dict[int, Any] = {}
        while True:
            time.sleep(self.pause_s)
            entries: dict[str, list[Any]] = defaultdict(list)
            for env in [env for env in range(self.num_envs) if self._rng.random() < 0.6] or [0]:
                if env in actions and self._rng.random() < self.drops:
                    client.drop([env])
                    del actions[env]
                if env in actions and not self._step(env, actions[env], entries):
                    continue
                obs, infos = self.envs[env].reset()
                counts = not self.skips or bool(self._rng.random() >= self.skips)
                if counts:
                    self.counted[env].append(self.envs[env].log)
                self._add(entries, env, obs, {}, {}, {}, infos, True, counts)
            envs = entries.pop("envs")
            found = client.exchange(envs, entries.pop("obs"), **entries)
            actions |= dict(zip(envs, found, strict=True))

    def _step(self, env: int, actions: Any, entries: Any) -> bool:
        """Step an env, and return whether its episode ended."""
        played = self.envs[env]
        obs, rewards, terminated, truncated, infos = played.step(actions)
        script = played.script
        if played.t == len(script) and not (terminated["__all__"] or truncated["__all__"]):  # nobody is left
            flags = terminated if any(terminated.values()) else truncated
            (terminated, truncated)[flags is truncated]["__all__"] = True
        self._add(entries, env, obs, rewards, terminated, truncated, infos, False, True)
        return bool(terminated["__all__"] or truncated["__all__"])

    @staticmethod
    def _add(entries: Any, env: int, *parts: Any) -> None:
        names = ("envs", "obs", "rewards", "terminated", "truncated", "infos", "begins", "counts")
        for name, part in zip(names, (env, *parts), strict=True):
            entries[name].append(part)


@contextmanager
def played_by(runner: EnvRunner, *simulators: Simulator) -> Iterator[list[ScriptedAgents]]:
    """Start simulators one after the other, so that they get seats in this order, and yield the envs of the seats."""
    for count, simulator in enumerate(simulators, 1):
        simulator.start()
        while len(runner.env.server.sessions) < count:  # type: ignore[attr-defined]
            runner.env.server.receive(0.01)  # type: ignore[attr-defined]
            assert simulator.thread.is_alive(), simulator.error
    for simulator in simulators:
        simulator.may_play.set()
    yield [env for simulator in simulators for env in simulator.envs]
    runner.stop()
    for simulator in simulators:
        simulator.join()


def by_hand(played: Any, num_steps: int | None = None) -> MultiAgentEpisode:
    """Return an episode that an env played, or its first steps."""
    played.outputs = [{} for _ in played.actions]
    episode: MultiAgentEpisode = build(played, 0, num_steps)
    return episode


@pytest.mark.slow_cases("3-", "120-")
@pytest.mark.parametrize(
    ("apart", "drops", "skips"), [(False, 0.0, 0.0), (True, 0.0, 0.0), (False, 0.03, 0.0), (False, 0.02, 0.4)]
)
@pytest.mark.parametrize("num_timesteps", [3, 25, 120])
def test_chunks_of_rollouts_join_to_the_episodes(num_timesteps: int, apart: bool, drops: float, skips: float) -> None:
    """Agents join late, take turns, and end alone, in envs of different paces.

    Some of the episodes are given up, or do not count.
    """
    joined: dict[str, MultiAgentEpisode] = {}
    of_seat: dict[int, list[str]] = defaultdict(list)
    counted = 0
    with runner_of(config(4, apart=apart, on_sample_end=lambda: None)) as runner:
        simulators = [
            Simulator(runner, 0, 2, drops=drops, skips=skips, apart=apart),
            Simulator(runner, 1, 1, pause_s=0.002, drops=drops, skips=skips, apart=apart),
            Simulator(runner, 2, 1, skips=skips, apart=apart),
        ]
        with played_by(runner, *simulators):
            for _ in range(360 // num_timesteps):
                rollout = runner.sample(num_timesteps=num_timesteps)
                assert 0 <= rollout.num_env_steps - num_timesteps < 4
                counted += rollout.num_env_steps
                agent_steps = [agent for part in rollout.modules.values() for agent in part]  # type: ignore[attr-defined]
                assert rollout.num_agent_steps == sum(map(len, agent_steps))  # type: ignore[attr-defined]
                for episode in rollout:
                    episode.validate()
                    if episode.id_ in joined:
                        joined[episode.id_].concat_episode(episode)
                    else:
                        joined[episode.id_] = MultiAgentEpisode.from_state(episode.get_state())
                        of_seat[episode.env_index].append(episode.id_)
    assert counted == sum(map(len, joined.values())) == runner.num_env_steps_sampled_lifetime
    num_ended = num_dropped = 0
    seats = [simulator.counted[env] for simulator in simulators for env in range(simulator.num_envs)]
    for seat, ids in of_seat.items():
        played = [episode for episode in seats[seat] if len(episode)]  # some were given up at once
        for number, id_ in enumerate(ids):
            found = joined[id_]
            is_last = number == len(ids) - 1  # a simulator may continue after the last sample
            wanted = by_hand(played[number], len(found) if is_last else None)
            assert is_last or found.is_done == wanted.is_done
            if found.is_done:
                assert wanted.is_done
                assert found.get_return() == wanted.get_return()
                assert found.get_agent_returns() == wanted.get_agent_returns()
            num_ended += found.is_done
            num_dropped += not (found.is_done or is_last)
            assert_same(found, wanted)
    assert num_ended > 10 and (num_dropped > 2) == (drops > 0)


def test_the_mapping_knows_the_episodes_by_their_ids() -> None:
    """Also where some of them do not count, or are given up."""
    latest: dict[int, str] = {}
    seen: set[str] = set()

    def map_agent(agent: Any, episode: Any) -> str:
        latest[episode.env_index] = episode.id_
        return module_of(agent)

    def see(episode: Any) -> None:
        assert latest[episode.env_index] == episode.id_
        seen.add(episode.id_)

    made = config(2, on_episode_step=see).multi_agent(policy_mapping_fn=map_agent)
    with runner_of(made) as runner:
        with played_by(runner, Simulator(runner, 0, 2, drops=0.02, skips=0.4)):
            for _ in range(6):
                runner.sample(num_timesteps=40)
    assert len(seen) > 15


class WatchingSeats(Watching):
    """Knows the envs of the seats."""

    envs: list[ScriptedAgents]

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[int, int] = defaultdict(lambda: -1)

    def note(self, event: str, episode: Any, env_index: int) -> None:
        self.numbers[env_index] += event == "created"
        super().note(event, episode, env_index)

    def played_so_far(self, runner: Any, env_index: int) -> MultiAgentEpisode:
        return by_hand(self.envs[env_index].episodes[self.numbers[env_index]])


class WatchingWholeSeats(WatchingSeats, WatchingWholes):
    pass


@pytest.mark.slow_cases("25-0.0")
@pytest.mark.parametrize("watching_class", [WatchingSeats, WatchingWholeSeats])
@pytest.mark.parametrize(("num_timesteps", "drops"), [(4, 0.0), (25, 0.0), (12, 0.03)])
def test_events_of_the_episodes(watching_class: Any, num_timesteps: int, drops: float) -> None:
    """At each step the episode is what the env gave until then, its chunks in earlier rollouts included."""
    watching = watching_class()
    with runner_of(config(3, **watching.events())) as runner:
        simulators = Simulator(runner, 0, 2, drops=drops), Simulator(runner, 1, 1, pause_s=0.001)
        with played_by(runner, *simulators) as watching.envs:
            for _ in range(150 // num_timesteps):
                runner.sample(num_timesteps=num_timesteps)
    events_of: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for event, _, id_, t in watching.trace:
        events_of[id_].append((event, t))
    ended = [events for events in events_of.values() if events[-1][0] == "end"]
    for events in events_of.values():
        length = events[-1][1]
        steps = [("created", 0), ("start", 0), *(("step", t) for t in range(1, length + 1))]
        assert events == [*steps, ("end", length)] if events in ended else steps
    assert len(ended) > 8 and watching.num_hanging > 10


def test_events_where_samples_end_before_anybody_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that its time limit cuts off has chosen actions, whose steps come in a later one."""
    monkeypatch.setattr("corral.runners.served_stepping.WAIT_S", 0.005)
    watching = WatchingWholeSeats()
    num_empty = 0
    with runner_of(config(2, **watching.events())) as runner:
        simulators = Simulator(runner, 0, 1, pause_s=0.03), Simulator(runner, 1, 1, pause_s=0.02)
        with played_by(runner, *simulators) as watching.envs:
            ends_s = time.monotonic() + 60
            while sum(event == "end" for event, *_ in watching.trace) < 8 or num_empty < 20:
                assert time.monotonic() < ends_s
                rollout = runner.collect(SampleRequest(num_timesteps=1000, time_limit_s=0.004))
                num_empty += rollout.num_env_steps == 0
                for episode in rollout:
                    episode.validate()
    assert watching.num_hanging > 5


def test_evaluation_plays_so_many_episodes() -> None:
    with runner_of(config(3, on_sample_end=lambda: None)) as runner:
        with played_by(runner, Simulator(runner, 0, 2), Simulator(runner, 1, 1, pause_s=0.002)) as envs:
            runner.sample(num_timesteps=20)  # episodes that are unfinished then do not count
            rollout = runner.sample(num_episodes=7)
            assert len(runner.last_statistics.returns) == 7
            found = rollout.episodes()
            assert len(found) == 7 and all(episode.is_done and episode.env_t_started == 0 for episode in found)
            assert sorted(episode.get_return(include_hanging_rewards=True) for episode in found) == sorted(
                runner.last_statistics.returns
            )
            assert rollout.num_env_steps == sum(map(len, found))
            agent_steps = [len(agent) for episode in found for agent in episode.agent_episodes.values()]
            played = [by_hand(one) for env in envs for one in env.episodes if len(one)]
            by_return = {one.get_return(include_hanging_rewards=True): one for one in played}
            for episode in found:
                assert_same(episode, by_return[episode.get_return(include_hanging_rewards=True)])
            assert rollout.num_agent_steps == sum(agent_steps)  # type: ignore[attr-defined]


def test_returns_of_agents_and_modules_are_in_the_metrics() -> None:
    ended: list[MultiAgentEpisode] = []
    with runner_of(config(2, on_episode_end=lambda episode: ended.append(episode))) as runner:
        with played_by(runner, Simulator(runner, 0, 2)):
            runner.sample(num_timesteps=100)
            metrics = runner.metrics.reduce()
    for key, read in (("agent", MultiAgentEpisode.get_agent_returns), ("module", MultiAgentEpisode.get_module_returns)):
        found: dict[str, list[float]] = defaultdict(list)
        for episode in ended:
            for name, value in read(episode, include_hanging_rewards=True).items():  # type: ignore[operator]
                found[str(name)].append(value)
        means = metrics[f"{key}_episode_return_mean"]
        assert {name: means[name] for name in found} == pytest.approx({name: np.mean(v) for name, v in found.items()})
    assert metrics["num_clients"] == 1


# What a client may say.


def say(stranger: Stranger, **fields: Any) -> dict[str, Any]:
    stranger.say({"type": "steps", "id": 1, "envs": [0], **fields})
    return stranger.read()


def talk(config: PPOConfig, said: Any) -> Any:
    """Call a function with the address of a runner, which samples meanwhile, and return what it returns."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(said(address_of(runner)))
        except BaseException as error:
            found.append(error)

    with runner_of(config) as runner:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not found:
            runner.collect(SampleRequest(num_timesteps=1000, time_limit_s=0.1))
        thread.join(30)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@contextmanager
def greeted(address: str) -> Iterator[tuple[Stranger, dict[str, Any]]]:
    """Say hello as a client, and yield it with the answer."""
    stranger = Stranger(address)
    with stranger.socket:
        stranger.say({"type": "hello", "protocol": 1, "num_envs": 2})
        yield stranger, stranger.read()


A = {"dtype": "<f4", "shape": [1, 2], "data": np.zeros((1, 2), np.float32).tobytes()}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"obs": A}, "steps.obs this server has several agents: say it for each of them, under agents"),
        ({"actions": A}, "steps.actions clients of several agents take the actions that the server chooses"),
        ({}, "steps.agents is missing: this server has several agents"),
        ({"agents": {"z": {"obs": A}}}, "steps.agents.z is no agent of this server, which has a, b, 2, d"),
        ({"agents": {"a": 3}}, "steps.agents.a must be a map, got int"),
        ({"agents": {"a": {"seen": A}}}, "steps.agents.a.'seen' is no field"),
        ({"agents": {"a": {"obs": A, "entries": [0, 0]}}}, "steps.agents.a.entries names an entry twice"),
        ({"agents": {"a": {"obs": A, "entries": [1]}}}, r"steps.agents.a.entries\[0\] must be 0 to 0, got 1"),
        ({"agents": {"a": {"entries": [0]}}}, "steps.agents.a.obs is missing"),
        ({"agents": {"a": {"obs": {**A, "shape": [2, 1]}}}}, "steps.agents.a.obs "),
        ({"agents": {"a": {"obs": A, "rewards": [1.0]}}}, r"steps.agents.a.rewards\[0\] must be 0 where an episode"),
        ({"agents": {"a": {"obs": A, "terminated": [True]}}}, r"steps.agents.a.terminated\[0\] an agent cannot end"),
        ({"agents": {"a": {"obs": A, "rewards": []}}}, "steps.agents.a.rewards must have 1 entries as envs has"),
        ({"agents": {}, "envs": [0] * 5}, "steps.envs has 5 entries of 2 envs: an env has two at most"),
    ],
)
def test_refusals_name_the_agent_and_the_field(fields: dict[str, Any], message: str) -> None:
    def ask(address: str) -> Any:
        with greeted(address) as (stranger, welcome):
            assert welcome["agents"].keys() == {str(agent) for agent in AGENTS}
            assert welcome["agents"]["a"]["action_space"] == describe_space(ScriptedAgents().action_spaces["a"])
            return say(stranger, begins=[True], **fields)

    answer = talk(config(2), ask)
    assert answer["type"] == "error" and answer["code"] == "protocol"
    assert re.match(message, answer["message"])


def test_agents_that_ended_are_not_observed_again_and_an_episode_without_agents_is_over() -> None:
    ends = {"a": {"obs": A, "terminated": [True]}, "b": {"obs": A}}
    for second, problem in (
        ({"a": {"obs": A}, "b": {"obs": A}}, "steps.agents.a: has ended in entry 0, and is observed again."),
        ({"a": {"rewards": [2.0]}, "b": {"obs": A}}, "steps.agents.a: has ended in entry 0, and is given a reward"),
        ({"b": {"terminated": [True]}}, "steps.terminated[0]: all agents of the env have ended: say that"),
    ):

        def ask(address: str, second: Any = second) -> Any:
            with greeted(address) as (stranger, _):
                first = say(stranger, agents={"a": {"obs": A}, "b": {"obs": A}}, begins=[True])
                assert first["agents"].keys() == {"a", "b"} and first["agents"]["a"]["envs"] == [0]
                stranger.say({"type": "steps", "id": 2, "envs": [0], "agents": ends})
                assert stranger.read()["agents"].keys() == {"b"}
                stranger.say({"type": "steps", "id": 3, "envs": [0], "agents": second})
                return stranger.read()

        assert problem in talk(config(2), ask)["message"]


def test_episodes_that_are_given_up_at_once_need_no_steps() -> None:
    """However many of them come in one sample."""
    obs = [{"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}]

    def give_up(address: str) -> None:
        with MultiAgentPolicyClient(address) as client:
            for _ in range(100):
                client.begin(obs)
                client.drop()
            client.begin(obs)
            for reward in range(3):
                client.step(obs, [{"a": float(reward)}])

    with runner_of(config(1)) as runner:
        thread = threading.Thread(target=give_up, args=(address_of(runner),), daemon=True)
        thread.start()
        rollout = runner.sample(num_timesteps=3)
        [episode] = [episode for episode in rollout if len(episode)]
        assert list(episode.get_rewards()["a"]) == [0.0, 1.0, 2.0]
        assert runner.metrics.reduce()["num_episodes_dropped_by_clients"] == 100
        while thread.is_alive():
            runner.collect(SampleRequest(num_timesteps=1000, time_limit_s=0.05))


SEEN = {"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"obs": SEEN, "rewards": [{}]}, "obs must be a list of 1 dicts by agent, one for each entry, got {"),
        ({"obs": [SEEN, SEEN], "rewards": [{}]}, "obs must be a list of 1 dicts"),
        ({"obs": [SEEN], "rewards": []}, "rewards must be a list of 1 dicts"),
        ({"obs": [SEEN], "rewards": [1.0]}, "rewards must be a list of 1 dicts"),
        ({"obs": [SEEN], "rewards": [{}], "terminated": [True]}, "terminated must be a list of 1 dicts"),
    ],
)
def test_the_client_refuses_what_is_no_list_of_dicts(said: Any, problem: str) -> None:
    def step(address: str) -> None:
        with MultiAgentPolicyClient(address) as client:
            client.begin([SEEN])
            client.step(**said)

    with pytest.raises(ValueError, match=re.escape(problem)):
        talk(config(1), step)


def test_a_client_may_have_seats_that_are_not_neighbours() -> None:
    def play(address: str) -> Any:
        first, second = MultiAgentPolicyClient(address), MultiAgentPolicyClient(address)
        first.close()
        second.begin([SEEN])
        with second, MultiAgentPolicyClient(address, 2) as third:  # it has the seats 0 and 2
            third.begin([SEEN, {"a": SEEN["a"]}])
            return third.step([{"b": SEEN["b"]}, SEEN], [{}, {}])

    assert [actions.keys() for actions in talk(config(3), play)] == [{"b"}, {"a", "b"}]


def test_rewards_and_ends_of_nobody_are_refused() -> None:
    """`__common__` is for infos, and `__all__` for flags."""
    for name in ("__common__", "__all__"):

        def step(address: str, name: str = name) -> None:
            with MultiAgentPolicyClient(address) as client:
                client.begin([SEEN])
                client.step([SEEN], [{name: 1.0}])

        with pytest.raises(ClientError, match=f"steps.agents.{name} is no agent of this server"):
            talk(config(1), step)


def test_infos_of_agents_may_have_numbers_and_arrays_of_numpy() -> None:
    infos: list[Any] = []
    made = config(1, on_episode_step=lambda episode: infos.append(episode.get_infos()))

    def step(address: str) -> None:
        with MultiAgentPolicyClient(address) as client:
            client.begin([SEEN])
            said = {"a": {"x": np.float32(0.5), "y": np.arange(3)}, "__common__": {"z": np.bool_(True)}}
            client.exchange([0], [SEEN], infos=[said])
            with pytest.raises(TypeError, match="cannot send <object"):
                client.exchange([0], [SEEN], infos=[{"a": {"x": object()}}])

    talk(made, step)
    assert infos[-1]["a"][-1] == {"x": 0.5, "y": [0, 1, 2]} and infos[-1]["__common__"][-1] == {"z": True}


class SaysNothingAtTheEnd(RandomAgents):
    """Does not say that the episode is over where all of its agents have ended."""

    def step(self, actions: dict[str, int]) -> Any:
        obs, rewards, *flags, infos = super().step(actions)
        if len(self.dead) == len(self.possible_agents):
            flags = [{**of_all, "__all__": False} for of_all in flags]
        return obs, rewards, *flags, infos


def test_an_episode_without_agents_is_over_as_where_the_runner_steps_the_env() -> None:
    env = SaysNothingAtTheEnd({"num_agents": 2})
    both = {"observation_spaces": env.observation_spaces, "action_spaces": env.action_spaces}
    episodes: list[list[Any]] = []

    def play(address: str) -> None:
        with MultiAgentPolicyClient(address) as client:
            drive(client, [env])

    for which in (SaysNothingAtTheEnd, ExternalEnv):
        env_config = {"num_agents": 2} if which is SaysNothingAtTheEnd else {"address": "127.0.0.1:0", **both}
        made = PPOConfig().environment(which, env_config=env_config).env_runners(num_envs_per_env_runner=1)
        with runner_of(made.multi_agent(policies={"main"}).debugging(seed=0)) as runner:
            if which is ExternalEnv:
                threading.Thread(target=play, args=(address_of(runner),), daemon=True).start()
            found = runner.sample(num_timesteps=200).episodes()
            episodes.append([(len(one), one.is_terminated, one.is_truncated, one.get_return()) for one in found])
    assert episodes[0] == episodes[1] and len(episodes[0]) > 10


def test_clients_of_one_and_of_several_agents_are_told_apart() -> None:
    def act_locally(address: str) -> None:
        with MultiAgentPolicyClient(address, acts_locally=True) as client:
            client.begin([{"a": np.zeros(2, np.float32)}])

    with pytest.raises(ClientError, match="has several agents: use MultiAgentPolicyClient"):
        talk(config(3), PolicyClient)
    with pytest.raises(ClientError, match="clients of several agents cannot act themselves") as caught:
        talk(config(3), act_locally)
    assert caught.value.code == "policy"
    one = PPOConfig().environment(ExternalEnv, env_config={"address": "127.0.0.1:0", "spaces_of": "CartPole-v1"})
    with pytest.raises(ClientError, match="has one agent: use PolicyClient"):
        talk(one, MultiAgentPolicyClient)


def test_a_client_of_rllink_is_refused() -> None:
    def ask(address: str) -> Any:
        link = Stranger(address)
        with link.socket:
            link.socket.sendall(b"00000012" + b"x" * 12)
            return link.socket.recv(1 << 16)

    said = msgpack.unpackb(talk(config(3), ask)[8:])
    assert said["type"] == "ERROR: this server has several agents, and a client of RLlink has one."


@pytest.mark.parametrize(
    ("env_config", "problem"),
    [
        ({"observation_spaces": {"a": "x"}}, "got observation_spaces"),
        ({"observation_spaces": 3, "action_spaces": 3}, "observation_spaces must be a dict of spaces by agent, got 3"),
        ({"observation_spaces": {"a": "x"}, "action_spaces": {}}, r"observation_spaces\['a'\]: "),
    ],
)
def test_wrong_spaces_of_agents_are_refused(env_config: dict[str, Any], problem: str) -> None:
    config = PPOConfig().environment(ExternalEnv, env_config=env_config).multi_agent(policies={"main"})
    with pytest.raises(ConfigError, match=problem):
        EnvRunner(config)


def test_agents_without_a_legal_action_are_refused_and_others_take_legal_ones() -> None:
    masked = spaces.Dict({"action_mask": spaces.MultiBinary(3), "observations": spaces.Box(-1, 1, (1,), np.float32)})
    both = {"observation_spaces": dict.fromkeys("ab", masked), "action_spaces": dict.fromkeys("ab", spaces.Discrete(3))}
    config = PPOConfig().environment(ExternalEnv, env_config={"address": "127.0.0.1:0", **both}, action_masks=True)
    config.env_runners(num_envs_per_env_runner=1).multi_agent(policies={"main"}).debugging(seed=0)

    def play(address: str) -> Any:
        def see(*mask: int) -> Any:
            return {"action_mask": np.array(mask, np.int8), "observations": np.zeros(1, np.float32)}

        chosen = []
        with MultiAgentPolicyClient(address) as client:
            [actions] = client.begin([{"a": see(0, 1, 0), "b": see(1, 0, 0)}])
            for _ in range(20):
                chosen.append(actions)
                [actions] = client.step([{"a": see(0, 1, 0), "b": see(1, 0, 0)}], [{}])
            # Who has ended needs none.
            final, first = [{"a": see(0, 1, 0), "b": see(0, 0, 0)}], [{"a": see(0, 1, 0), "b": see(1, 0, 0)}]
            chosen += client.step(final, [{}], [{"__all__": True}], next_obs=first)
            assert client.step(final, [{}], [{"b": True}]) == [{"a": 1}]
            client.drop()
            client.begin(first)
            with pytest.raises(ClientError, match=r"steps\.agents\.b\.obs: entry 0: ") as caught:
                client.step([{"a": see(0, 1, 0), "b": see(0, 0, 0)}], [{}])
        return chosen, caught.value.code

    chosen, code = talk(config, play)
    assert chosen == [{"a": 1, "b": 0}] * 21 and code == "protocol"


def test_a_removed_module_lets_clients_begin_new_episodes() -> None:
    made = config(2)
    with runner_of(made) as runner:
        specs = made.module_specs(*runner.describe_env()[:2])
        first, second = Simulator(runner, 0, 1), Simulator(runner, 1, 1)
        with played_by(runner, first):
            runner.sample(num_timesteps=30)
            runner.set_modules(
                {"policies": {"main": {}}, "policy_mapping_fn": lambda agent_id, episode: "main"},
                {"main": specs["main"]},
            )
            runner.collect(SampleRequest(num_timesteps=1000, time_limit_s=0.3))
            with pytest.raises(EpisodesLost):
                first.join()
            first.error = None
            second.may_play.set()
            second.start()
            rollout = runner.sample(num_timesteps=30)
        second.join()
        assert rollout.modules.keys() == {"main"}  # type: ignore[attr-defined]


# Algorithms.

TRAINED = {
    "policies": {"even", "odd"},
    "policy_mapping_fn": lambda agent, episode: "odd" if agent in "a1 a3" else "even",
}


@contextmanager
def drivers(port: int, num_runners: int) -> Iterator[list[int]]:
    """Drive random episodes for each runner until the training is over, and yield the env steps of each."""
    counts, errors = [0] * num_runners, []

    def play(index: int) -> None:
        try:
            with MultiAgentPolicyClient(f"127.0.0.1:{port + index}", 2, retry_s=60.0) as client:
                counts[index] = drive(client, [RandomAgents({"seed": 10 * index + i}) for i in range(2)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=play, args=(index,), daemon=True) for index in range(num_runners)]
    for thread in threads:
        thread.start()
    yield counts
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors


@pytest.mark.slow_cases("IMPALA")
@pytest.mark.slow_cases("APPOConfig-2")
@pytest.mark.parametrize(
    ("algo", "num_runners"),
    [(PPOConfig, 0), pytest.param(PPOConfig, 2, marks=pytest.mark.slow), (DQNConfig, 0), (APPOConfig, 2)],
)
def test_algorithms_learn_from_agents_of_simulators(algo: Any, num_runners: int, tmp_path: Any) -> None:
    port = free_ports(max(1, num_runners))
    config = algo().environment(
        ExternalEnv, env_config={"spaces_of": "random_agents:RandomAgents", "address": f"127.0.0.1:{port}"}
    )
    config.env_runners(num_env_runners=num_runners, num_envs_per_env_runner=2, sample_timeout_s=60.0)
    config.multi_agent(**TRAINED).rl_module(model_config={"fcnet_hiddens": [8]}).debugging(seed=0)
    config.training(train_batch_size_per_learner=64)
    config.evaluation(
        evaluation_interval=2,
        evaluation_duration=3,
        evaluation_config={"env": "random_agents:RandomAgents", "env_config": {}},
    )
    if algo is DQNConfig:
        config.training(num_steps_sampled_before_learning_starts=30)
    if algo is not PPOConfig:
        config.reporting(min_sample_timesteps_per_iteration=100)
    driven = 0
    for iterations in (2, 4):
        with drivers(port, max(1, num_runners)) as counts:
            with config.build() as algorithm:
                where = {"resume": tmp_path} if iterations == 4 else {"run_dir": tmp_path}
                result = algorithm.fit(stop={"training_iteration": iterations}, progress=False, **where)
        driven += sum(counts)
        assert 0 < result["num_env_steps_sampled_lifetime"] <= driven
        assert result["training_iteration"] == iterations
        assert result["evaluation"]["env_runners"]["num_episodes"] == 3
        for module_id in ("even", "odd"):
            assert all_of(np.isfinite(v) for k, v in result["learners"][module_id].items() if k.endswith("loss"))
        assert result["env_runners"]["num_agent_steps_sampled_lifetime"] > result["num_env_steps_sampled_lifetime"]


@pytest.mark.parametrize("drops", [0.0, 0.03])
def test_central_critics_see_all_agents_of_clients(drops: float) -> None:
    settings = config(3).multi_agent(critic_sees=numbers_of_all)
    runner = EnvRunner(settings.freeze())
    # Of different paces, so that samples end while actions of some agents have not led to a step yet.
    paces = ((0, 2, 0.002), (1, 1, 0.0))
    simulators = [Simulator(runner, number, num_envs, pause_s, drops=drops) for number, num_envs, pause_s in paces]
    with played_by(runner, *simulators) as envs:
        rollouts = [runner.sample(num_timesteps=number) for number in (3, 40, 1, 25, *[2] * 10)]
    assert_seen([played for env in envs for played in env.episodes], rollouts, 100)
