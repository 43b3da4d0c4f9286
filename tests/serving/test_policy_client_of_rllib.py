"""RLlib's `PolicyClient` against a policy server of Corral: what each call leads to in what is learned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simulators import address_of, runner_of, served

from corral import DQNConfig
from corral.compat.rllib.policy_clients import PolicyClient
from corral.data.episodes.rollout import Rollout
from corral.errors import ConfigError
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.runners.serving.client import ClientError, EpisodesLost

# One process exports the graphs of policies, each of them once.
pytestmark = pytest.mark.xdist_group("graphs")


def obs(value: float) -> Any:
    return np.full(4, value, np.float32)


def steps(rollout: Rollout) -> list[tuple[Any, ...]]:
    """Return observation, action, reward, end and next observation of the valid steps, ordered by observation."""
    found = [
        (
            float(rollout.obs[t, lane, 0]),
            int(rollout.actions[t, lane]),
            float(rollout.rewards[t, lane]),
            bool(rollout.terminated[t, lane]),
            bool(rollout.truncated[t, lane]),
            float(rollout.obs[t + 1, lane, 0]),
        )
        for t, lane in np.argwhere(rollout.valid).tolist()
    ]
    return sorted(found)


def play(
    runner: EnvRunner, work: Callable[[PolicyClient], Any], num_steps: int, mode: str = "remote"
) -> tuple[Rollout, Any, list[float]]:
    """Sample while a thread calls a client; return rollout, result or exception of the thread, and returns."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work(PolicyClient(f"http://{address_of(runner)}", inference_mode=mode)))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    rollout = runner.sample(num_timesteps=num_steps)
    returns = runner.last_statistics.returns.tolist()
    while thread.is_alive():
        runner.collect(SampleRequest(num_timesteps=1, time_limit_s=0.05))
        thread.join(0.05)
    return rollout, found[0], returns


MODES = pytest.mark.parametrize("mode", ["remote", "local"])


@MODES
def test_rewards_add_up_until_the_next_action_and_the_end_is_a_termination(mode: str) -> None:
    infos: list[Any] = []
    config = served(num_envs=2).callbacks(on_episode_step=lambda episode: infos.append(episode.get_infos(-1)))

    def work(client: PolicyClient) -> list[Any]:
        name = client.start_episode()
        client.log_returns(name, 50.0)  # before the first action, where RLlib drops it, too
        actions = [client.get_action(name, obs(0))]
        client.log_returns(name, 1.0, info={"count": np.int64(3), "place": np.zeros(2), "object": object()})
        client.log_returns(name, 0.25)
        actions.append(client.get_action(name, obs(1)))
        actions.append(client.get_action(name, obs(2)))  # no reward is 0
        client.log_returns(name, 4)
        client.end_episode(name, obs(3))
        with pytest.raises(ValueError, match="no episode"):
            client.get_action(name, obs(4))
        assert client.start_episode(name) == name  # which begins another episode
        actions.append(client.get_action(name, obs(10)))
        client.log_returns(name, 8.0)
        client.end_episode(name, obs(11))
        return actions

    with runner_of(config) as runner:
        rollout, actions, returns = play(runner, work, 4, mode)
    assert all(action.shape == () and action.dtype == np.int64 for action in actions)
    assert steps(rollout) == [
        (0.0, actions[0], 1.25, False, False, 1.0),
        (1.0, actions[1], 0.0, False, False, 2.0),
        (2.0, actions[2], 4.0, True, False, 3.0),
        (10.0, actions[3], 8.0, True, False, 11.0),
    ]
    assert returns == [5.25, 8.0]
    assert infos[0] == {"count": 3, "place": [0.0, 0.0]} and not infos[1]


@MODES
def test_episodes_at_the_same_time_take_a_seat_each_and_give_it_back(mode: str) -> None:
    def work(client: PolicyClient) -> Any:
        first, second = client.start_episode("first"), client.start_episode()
        with pytest.raises(ValueError, match="'first' is being played already"):
            client.start_episode("first")
        actions = client.get_action([first, second], {first: obs(0), second: obs(100)})
        for t in range(1, 4):
            for name, value in ((first, t), (second, 100 + t)):
                client.log_returns(name, float(value))
                actions[name, t] = client.get_action(name, obs(value))
        client.log_returns(first, 4.0)
        client.end_episode(first, obs(4))
        third = client.start_episode()  # in the seat of the first
        actions[third] = client.get_action(third, obs(200))
        with pytest.raises(ClientError, match="0 of 2 seats are free"):
            client.start_episode()
        client.log_returns(third, 1.0)
        client.end_episode(third, obs(201))
        client.end_episode(client.start_episode(), obs(0))  # an episode without an action leaves no trace
        return actions, first, second, third

    with runner_of(served(num_envs=2)) as runner:
        rollout, (actions, first, second, third), _ = play(runner, work, 8, mode)
    assert steps(rollout) == [
        (0.0, actions[first], 1.0, False, False, 1.0),
        (1.0, actions[first, 1], 2.0, False, False, 2.0),
        (2.0, actions[first, 2], 3.0, False, False, 3.0),
        (3.0, actions[first, 3], 4.0, True, False, 4.0),
        (100.0, actions[second], 101.0, False, False, 101.0),
        (101.0, actions[second, 1], 102.0, False, False, 102.0),
        (102.0, actions[second, 2], 103.0, False, False, 103.0),
        (200.0, actions[third], 1.0, True, False, 201.0),
    ]


@MODES
def test_logged_actions_are_learned_from_with_the_ones_of_the_policy(mode: str) -> None:
    def work(client: PolicyClient) -> list[int]:
        name, taken = client.start_episode(), []
        for t in range(6):
            if t % 2:
                client.log_action(name, obs(t), 2)
                taken.append(2)
            else:
                taken.append(int(client.get_action(name, obs(t))))
            client.log_returns(name, float(t))
        client.end_episode(name, obs(6))
        return taken

    with runner_of(served(DQNConfig(), num_envs=2)) as runner:
        rollout, taken, _ = play(runner, work, 6, mode)
    assert steps(rollout) == [(float(t), taken[t], float(t), t == 5, False, t + 1.0) for t in range(6)]


def test_an_on_policy_algorithm_refuses_logged_actions() -> None:
    def work(client: PolicyClient) -> Any:
        name = client.start_episode()
        with pytest.raises(ClientError, match="use an off-policy algorithm such as DQN or SAC"):
            client.log_action(name, obs(0), 1)
        with pytest.raises(ValueError, match="no episode"):  # it ended with the connection
            client.get_action(name, obs(0))
        name = client.start_episode()
        client.get_action(name, obs(5))
        client.log_returns(name, 1.0)
        return client.end_episode(name, obs(6))

    with runner_of(served(num_envs=1)) as runner:
        rollout, error, _ = play(runner, work, 1)
    assert error is None
    assert [step[0] for step in steps(rollout)] == [5.0]


@MODES
def test_episodes_without_training_are_not_learned_from(mode: str) -> None:
    def work(client: PolicyClient) -> int:
        for number in range(4):
            name = client.start_episode(training_enabled=number % 2 == 1)
            for t in range(2):
                client.get_action(name, obs(10 * number + t))
                client.log_returns(name, float(number))
            client.end_episode(name, obs(10 * number + 2))
        return number

    with runner_of(served(DQNConfig(), num_envs=1)) as runner:
        rollout, _, returns = play(runner, work, 4, mode)
    assert [step[0] for step in steps(rollout)] == [10.0, 11.0, 30.0, 31.0]
    assert returns == [2.0, 6.0]


@MODES
def test_threads_play_episodes_of_their_own(mode: str) -> None:
    def work(client: PolicyClient) -> int:
        def one(number: int) -> None:
            name = client.start_episode(str(number))
            for t in range(20):
                client.get_action(name, obs(100 * number + t))
                client.log_returns(name, 1.0)
            client.end_episode(name, obs(100 * number + 20))

        threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return sum(thread.is_alive() for thread in threads)

    with runner_of(served(num_envs=3)) as runner:
        rollout, num_alive, _ = play(runner, work, 60, mode)
    assert num_alive == 0
    assert [step[0] for step in steps(rollout)] == [100.0 * number + t for number in range(3) for t in range(20)]


def test_an_episode_that_the_server_lost_can_be_followed_by_another_one() -> None:
    def work(client: PolicyClient) -> Any:
        name = client.start_episode()
        client.get_action(name, obs(0))
        server = runner.env.server  # type: ignore[attr-defined]
        server._end_session(*server.sessions.values())  # as if the server had been started again
        client._playing[name].client._disconnect()
        with pytest.raises(EpisodesLost):
            client.get_action(name, obs(1))
        name = client.start_episode()
        client.get_action(name, obs(2))
        client.log_returns(name, 1.0)
        return client.end_episode(name, obs(3))

    with runner_of(served(num_envs=1)) as runner:
        rollout, error, _ = play(runner, work, 1)
    assert error is None
    assert [step[0] for step in steps(rollout)] == [2.0]


def test_the_server_acts_where_only_it_can(caplog: pytest.LogCaptureFixture) -> None:
    def work(client: PolicyClient) -> Any:
        name = client.start_episode()
        client.get_action(name, obs(0))
        client.log_returns(name, 1.0)
        return client.end_episode(name, obs(1))

    config = served(num_envs=1).rl_module(model_config={"use_lstm": True})
    with runner_of(config) as runner:
        rollout, error, _ = play(runner, work, 1, "local")
    assert error is None
    assert [step[0] for step in steps(rollout)] == [0.0]
    assert "the server chooses the actions, also with inference_mode='local': the policy cannot act" in caplog.text


def test_arguments_that_cannot_be_served_are_refused() -> None:
    for address in ("localhost", "http://localhost", "http://:9900", ""):
        with pytest.raises(ConfigError, match="address must be such as"):
            PolicyClient(address)
    with pytest.raises(ValueError, match="'local' or 'remote'"):
        PolicyClient("http://localhost:9900", inference_mode="both")
    with pytest.raises(ConfigError, match="speaks no HTTP"):
        PolicyClient("http://localhost:9900", session=object())

    def work(client: PolicyClient) -> Any:
        name = client.start_episode()
        client.get_action(name, obs(0))
        for settings in ({"multiagent_done_dict": {}}, {"reward": {"a": 1.0}}):
            with pytest.raises(ConfigError, match="of several agents"):
                client.log_returns(name, **{"reward": 1.0, **settings})
        return client.end_episode(name, obs(1))

    with runner_of(served(num_envs=1)) as runner:
        assert play(runner, work, 1)[1] is None
