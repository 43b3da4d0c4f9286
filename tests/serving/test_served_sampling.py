"""What a runner makes of the episodes that simulators play, compared with what the simulators wrote down."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
from simulators import Simulator, Step, address_of, end, runner_of, served, steps_of

from at_least import all_of
from corral import DQNConfig
from corral.modules.inference import RowStates
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.runners.served_stepping import join_entries
from corral.runners.serving.client import ClientError, PolicyClient
from corral.runners.serving.messages import Entries


def test_the_columns_hold_what_simulators_of_different_paces_did() -> None:
    with runner_of(served(num_envs=8)) as runner:
        simulators = [
            Simulator(address_of(runner), 0, 4).start(),
            Simulator(address_of(runner), 1, 1, pause_s=0.003).start(),
            Simulator(address_of(runner), 2, 2, pause_s=0.001).start(),
        ]
        rollouts = []
        for n in (300, 1, 257, 400):
            nothing = runner.sample(num_timesteps=0)
            assert (len(nothing), nothing.num_env_steps, nothing.rewards.shape) == (0, 0, (0, 8))
            rollouts.append(runner.sample(num_timesteps=n))
        end(runner, *simulators)
    assert [rollout.num_env_steps for rollout in rollouts] == [int(rollout.valid.sum()) for rollout in rollouts]
    assert runner.num_env_steps_sampled_lifetime == sum(rollout.num_env_steps for rollout in rollouts)
    assert all(0 <= rollout.num_env_steps - n < 8 for rollout, n in zip(rollouts, (300, 1, 257, 400), strict=True))

    learned = [step for rollout in rollouts for _, step in steps_of(rollout)]
    played = {step.obs: step for simulator in simulators for steps in simulator.episodes.values() for step in steps}
    assert len({step.obs for step in learned}) == len(learned)  # none is counted twice
    assert all(played[step.obs] == step for step in learned)
    # What is missing was reported after the last sample, or not at all: at the end of what each env played.
    missing = played.keys() - {step.obs for step in learned}
    for obs in missing:
        client, env, episode, t = obs
        assert not [o for o in played if o[:2] == (client, env) and o[2:] > (episode, t) and o not in missing]


def test_episodes_are_whole_and_their_statistics_exact() -> None:
    with runner_of(served(num_envs=4)) as runner:
        simulators = [Simulator(address_of(runner), i, 2, pause_s=0.001 * i).start() for i in range(2)]
        seen: dict[str, list[Step]] = {}
        lanes: dict[str, set[int]] = {}
        returns: list[float] = []
        for n in (100, 150, 200):
            rollout = runner.sample(num_timesteps=n)
            returns += runner.last_statistics.returns.tolist()
            for episode in rollout.episodes():
                obs, actions, rewards = episode.get_observations(), episode.get_actions(), episode.get_rewards()
                chunk = [
                    Step(tuple(o.tolist()), int(a), float(r), False, False, tuple(n.tolist()))
                    for o, a, r, n in zip(obs[:-1], actions, rewards, obs[1:], strict=True)
                ]
                assert episode.t_started == len(seen.get(episode.id_, []))
                seen.setdefault(episode.id_, []).extend(chunk)
                assert episode.get_return() == pytest.approx(sum(step.reward for step in seen[episode.id_]))
                lanes.setdefault(episode.id_, set()).add(episode.env_index)
                if episode.is_done:
                    seen[episode.id_][-1].terminated = episode.is_terminated
                    seen[episode.id_][-1].truncated = episode.is_truncated
        end(runner, *simulators)
    assert all_of(len(found) == 1 for found in lanes.values())
    by_first = {steps[0].obs: steps for steps in seen.values()}
    complete = 0
    for simulator in simulators:
        for steps in simulator.episodes.values():
            if (found := by_first.get(steps[0].obs)) is None:
                continue
            assert found == steps[: len(found)]
            complete += found[-1].terminated or found[-1].truncated
            if found[-1].terminated or found[-1].truncated:
                assert len(found) == len(steps)
                assert any(abs(sum(step.reward for step in steps) - value) < 1e-9 for value in returns)
    assert complete == len(returns) > 10


def test_a_simulator_that_stalls_costs_the_others_nothing() -> None:
    with runner_of(served(num_envs=3)) as runner:
        may_go = threading.Event()

        def stall() -> Any:
            with PolicyClient(address_of(runner)) as client:
                actions = client.begin(np.zeros((1, 4), np.float32))
                may_go.wait(60)
                return len(actions)

        thread, found = run_in_thread(stall)
        simulator = Simulator(address_of(runner), 1, 2).start()
        rollout = runner.sample(num_timesteps=200)
        may_go.set()
        thread.join(10)
        end(runner, simulator)
    assert found == [1]
    assert rollout.num_env_steps >= 200


def test_an_observation_that_waits_gets_the_weights_of_the_next_sample() -> None:
    with runner_of(served(num_envs=1)) as runner:
        simulator = Simulator(address_of(runner), 0, 1).start()
        runner.sample(num_timesteps=10)
        runner.set_weights({}, 7)
        second = runner.sample(num_timesteps=10)
        end(runner, simulator)
    assert second.weights_version == 7
    assert simulator.versions.count(0) == 10 - 1  # the first action answered `begin`
    assert set(simulator.versions[9:]) == {7}


def run_in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    """Run a function in a thread, and return the thread and the list that its result or exception is put into."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def answer(runner: EnvRunner, thread: threading.Thread) -> None:
    """Answer the last message of a simulator, for which no more steps are wanted, and wait until its thread ends."""
    while thread.is_alive():
        runner.collect(SampleRequest(num_timesteps=1, time_limit_s=0.05))
        thread.join(0.05)


def rows(*values: float) -> Any:
    return np.array([[value] * 4 for value in values], np.float32)


def test_what_a_simulator_gave_up_ends_its_episode_and_no_step_links_it_to_the_next_one() -> None:
    with runner_of(served(num_envs=1)) as runner:

        def play() -> None:
            with PolicyClient(address_of(runner)) as client:
                client.begin(rows(0))
                client.step(rows(1), [1.0])
                client.step(rows(2), [1.0])  # its action is not carried out
                client.drop()
                client.begin(rows(10))
                client.step(rows(11), [2.0], [True])
                client.begin(rows(20))
                client.step(rows(21), [4.0])

        thread, found = run_in_thread(play)
        rollout = runner.sample(num_timesteps=4)
        returns = runner.last_statistics.returns.tolist()
        answer(runner, thread)
    assert found == [None]
    episodes = rollout.episodes()
    assert [episode.get_observations()[:, 0].tolist() for episode in episodes] == [[0, 1, 2], [10, 11], [20, 21]]
    assert [(episode.is_terminated, episode.is_truncated) for episode in episodes] == [
        (False, False),
        (True, False),
        (False, False),
    ]
    assert len({episode.id_ for episode in episodes}) == 3
    assert returns == [2.0]  # of the episode that ended


@pytest.mark.parametrize("how", ["bye", "cut"])
def test_a_simulator_that_leaves_costs_its_episode_and_no_more(how: str) -> None:
    with runner_of(served(num_envs=2, reconnect_timeout_s=0.2)) as runner:

        def leave() -> None:
            client = PolicyClient(address_of(runner))
            client.begin(rows(0))
            client.step(rows(1), [1.0])
            if how == "bye":
                client.close()
            else:
                client._disconnect()

        thread, found = run_in_thread(leave)
        simulator = Simulator(address_of(runner), 5, 1, pause_s=0.002).start()
        rollout = runner.sample(num_timesteps=300)
        thread.join(10)
        assert found == [None]
        end(runner, simulator)
        server = runner.env.server  # type: ignore[attr-defined]
        assert server.num_dropped == 1
    chunks = {tuple(episode.get_observations()[0]): episode for episode in rollout.episodes()}
    assert len(chunks[0.0, 0.0, 0.0, 0.0]) == 1
    assert not chunks[0.0, 0.0, 0.0, 0.0].is_done


@pytest.mark.parametrize("num_episodes", [1, 7])
def test_whole_episodes_are_the_first_that_begin(num_episodes: int) -> None:
    with runner_of(served(num_envs=6)) as runner:
        simulators = [Simulator(address_of(runner), i, 2, pause_s=0.002 * i).start() for i in range(2)]
        runner.sample(num_timesteps=40)  # so that episodes are under way, which count no more
        rollout = runner.collect(SampleRequest(num_episodes=num_episodes))
        again = runner.collect(SampleRequest(num_episodes=num_episodes))
        end(runner, *simulators)
    played = {steps[0].obs: steps for simulator in simulators for steps in simulator.episodes.values()}
    firsts = []
    for found in (rollout, again):
        episodes = found.episodes()
        assert len(episodes) == num_episodes
        for episode in episodes:
            first = tuple(episode.get_observations()[0].tolist())
            assert episode.is_done and first[3] == 0.0
            assert episode.get_return() == pytest.approx(sum(step.reward for step in played[first]))
            firsts.append(first)
    assert len(set(firsts)) == 2 * num_episodes


def test_complete_episodes_are_played_to_their_ends() -> None:
    config = served(num_envs=3).env_runners(batch_mode="complete_episodes")
    with runner_of(config) as runner:
        simulator = Simulator(address_of(runner), 0, 3).start()
        for _ in range(3):
            rollout = runner.sample(num_timesteps=60)
            assert rollout.num_env_steps >= 60
            assert all_of(episode.is_done and episode.t_started == 0 for episode in rollout.episodes())
        end(runner, simulator)


def test_actions_of_the_simulator_itself_are_learned_from_off_policy_only() -> None:
    taken = np.array([0, 1, 2, 1])

    def play(address: str) -> Any:
        with PolicyClient(address) as client:
            obs = np.arange(20, dtype=np.float32).reshape(5, 4)
            begins = [True, False, False, False]
            return client.exchange([0] * 4, obs[:4], rewards=[0, 1, 2, 3], begins=begins, actions=taken), client.step(
                obs[4:], [4.0]
            )

    with runner_of(served(DQNConfig(), num_envs=1)) as runner:
        thread, found = run_in_thread(lambda: play(address_of(runner)))
        rollout = runner.sample(num_timesteps=4)
        answer(runner, thread)
    own, asked = found[0]
    assert len(own) == 0 and len(asked) == 1
    assert rollout.actions[:4, 0].tolist() == taken.tolist()
    assert rollout.rewards[:4, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert rollout.obs[:5, 0, 0].tolist() == [0.0, 4.0, 8.0, 12.0, 16.0]

    with runner_of(served(num_envs=2)) as runner:
        thread, found = run_in_thread(lambda: play(address_of(runner)))
        simulator = Simulator(address_of(runner), 1).start()
        runner.sample(num_timesteps=50)
        thread.join(10)
        end(runner, simulator)
    assert isinstance(found[0], ClientError) and "off-policy algorithm such as DQN" in str(found[0])


def test_the_state_of_a_memory_is_the_one_of_the_same_episode_played_in_one_piece() -> None:
    config = served(num_envs=3).rl_module(
        model_config={"use_lstm": True, "max_seq_len": 4, "lstm_cell_size": 6, "fcnet_hiddens": [8]}
    )
    with runner_of(config) as runner:
        simulators = [Simulator(address_of(runner), i, 1 + i, pause_s=0.001 * i).start() for i in range(2)]
        inference = runner.inference
        found = []
        for n in (80, 90):
            rollout = runner.sample(num_timesteps=n)
            for t, lane in np.argwhere(rollout.valid).tolist():
                state = {name: leaf[t, lane] for name, leaf in rollout.states.items()}
                found.append((tuple(rollout.obs[t, lane].tolist()), state, rollout.dist_inputs[t, lane]))
        end(runner, *simulators)
        assert len(found) >= 170
        # Play each episode again, alone, from a state of zeros.
        by_episode: dict[tuple[float, ...], list[Any]] = {}
        for obs, state, outputs in found:
            by_episode.setdefault(obs[:3], []).append((obs, state, outputs))
        num_checked = 0
        for steps in by_episode.values():
            steps.sort(key=lambda step: step[0][3])
            memory = RowStates(runner.module, 1)
            begins = np.array([True])
            for obs, state, outputs in steps:
                memory.begin(begins)
                begins = np.array([False])
                expected = memory.step(inference, np.array([obs], np.float32))
                for name, leaf in memory.before.items():
                    np.testing.assert_allclose(leaf[0], state[name], atol=1e-5)
                np.testing.assert_allclose(expected[0], outputs, atol=1e-5)
                num_checked += 1
    assert num_checked == len(found)


def test_callbacks_see_the_episodes_of_the_simulator() -> None:
    trace: list[Any] = []
    config = served(num_envs=2)
    config.callbacks(
        on_episode_created=lambda episode, env_index: trace.append(("created", env_index, len(episode))),
        on_episode_start=lambda episode, env_index: trace.append(("start", episode.get_observations()[0, 0])),
        on_episode_step=lambda episode: trace.append(("step", episode.get_rewards(-1), episode.t)),
        on_episode_end=lambda episode: trace.append(("end", episode.get_return(), len(episode), episode.is_terminated)),
    )
    with runner_of(config) as runner:

        def play() -> None:
            with PolicyClient(address_of(runner), 2) as client:
                client.begin(rows(5), envs=[1])
                client.step(rows(6), [1.0], envs=[1])
                client.step(rows(7), [2.0], envs=[1])
                client.step(rows(8), [4.0], [True], envs=[1], next_obs=rows(9))
                client.step(rows(10), [8.0], envs=[1])

        thread, found = run_in_thread(play)
        runner.sample(num_timesteps=2)
        runner.sample(num_timesteps=2)
        answer(runner, thread)
    assert found == [None]
    assert trace == [
        ("created", 1, 0),
        ("start", 5.0),
        ("step", 1.0, 1),
        ("step", 2.0, 2),
        ("step", 4.0, 3),
        ("end", 7.0, 3, True),
        ("created", 1, 0),
        ("start", 9.0),
        ("step", 8.0, 1),
    ]


def test_a_simulator_without_a_legal_action_is_cut_off() -> None:
    mask = {"type": "Box", "shape": [3], "low": 0, "high": 1, "dtype": "int8"}
    config = served(num_envs=2, observation_space={"type": "Dict", "spaces": [["action_mask", mask], ["obs", OBS_1]]})

    def play(address: str, masks: list[list[int]]) -> list[int]:
        actions = []
        with PolicyClient(address) as client:
            for t, one in enumerate(masks):
                obs = {"action_mask": np.array([one], np.int8), "obs": np.array([[t]], np.float32)}
                actions.append(int((client.begin(obs) if t == 0 else client.step(obs, [1.0]))[0]))
        return actions

    with runner_of(config) as runner:
        address = address_of(runner)
        thread, found = run_in_thread(lambda: play(address, [[1, 0, 0], [0, 0, 0]]))
        other, legal = run_in_thread(lambda: play(address, [[0, 0, 1], [0, 1, 0]] * 10))
        runner.sample(num_timesteps=19)
        thread.join(10)
        answer(runner, other)
    assert isinstance(found[0], ClientError) and "action_mask allows no action" in str(found[0])
    assert legal == [[2, 1] * 10]


OBS_1 = {"type": "Box", "shape": [1], "low": "-inf", "high": "inf", "dtype": "float32"}


def test_a_message_that_ends_one_episode_and_is_refused_links_it_to_no_other() -> None:
    mask = {"type": "Box", "shape": [3], "low": 0, "high": 1, "dtype": "int8"}
    config = served(num_envs=2, observation_space={"type": "Dict", "spaces": [["action_mask", mask], ["obs", OBS_1]]})

    def seen(value: float, masks: list[list[int]]) -> Any:
        return {"action_mask": np.array(masks, np.int8), "obs": np.full((2, 1), value, np.float32)}

    def play(address: str) -> Any:
        try:
            with PolicyClient(address, 2) as client:
                client.begin(seen(1, [[1, 1, 1]] * 2))
                client.step(seen(2, [[1, 1, 1]] * 2), [1.0, 1.0])
                client.step(seen(3, [[1, 1, 1], [0, 0, 0]]), [1.0, 1.0], [True, False])
        except ClientError as error:
            refused = str(error)
        with PolicyClient(address, 2) as client:  # which gets the same seats
            client.begin(seen(10, [[1, 1, 1]] * 2))
            client.step(seen(11, [[1, 1, 1]] * 2), [2.0, 2.0], [True, True])
        return refused

    with runner_of(config) as runner:
        thread, found = run_in_thread(lambda: play(address_of(runner)))
        rollout = runner.sample(num_timesteps=4)
        returns, lengths = runner.last_statistics.returns.tolist(), runner.last_statistics.lengths.tolist()
        answer(runner, thread)
    assert "action_mask allows no action" in found[0]
    steps = [
        (rollout.obs["obs"][t, n, 0], rollout.obs["obs"][t + 1, n, 0], rollout.rewards[t, n])
        for t, n in np.argwhere(rollout.valid).tolist()
    ]
    assert steps == [(1.0, 2.0, 1.0)] * 2 + [(10.0, 11.0, 2.0)] * 2
    assert (returns, lengths) == ([2.0, 2.0], [1, 1])
    assert len({episode.id_ for episode in rollout.episodes()}) == 4


def test_an_episode_that_does_not_count_is_played_and_nobody_learns_from_it() -> None:
    trace: list[Any] = []
    config = served(DQNConfig(), num_envs=2)
    config.callbacks(
        on_episode_start=lambda episode: trace.append(float(episode.get_observations()[0, 0])),
        on_episode_step=lambda episode: trace.append(float(episode.get_rewards(-1))),
        on_episode_end=lambda episode: trace.append(("end", episode.get_return())),
    )

    def play(address: str) -> list[int]:
        with PolicyClient(address, 2) as client:  # env 1 plays an episode that does not count
            found = [client.exchange([0, 1], rows(0, 10), begins=[True, True], counts=[True, False])]
            found.append(client.step(rows(1, 11), [1.0, 100.0]))
            found.append(client.step(rows(2, 12), [2.0, 200.0], [True, True], next_obs=rows(20, 30)))
            found.append(client.step(rows(21, 31), [4.0, 8.0]))
            found.append(client.step(rows(22, 32), [16.0, 32.0], [False, True]))
            return [len(actions) for actions in found]

    with runner_of(config) as runner:
        thread, found = run_in_thread(partial(play, address_of(runner)))
        rollout = runner.sample(num_timesteps=6)
        returns = runner.last_statistics.returns.tolist()
        answer(runner, thread)
        assert runner.num_env_steps_sampled_lifetime == 6
    assert found == [[2, 2, 2, 2, 1]]
    steps = sorted(step.obs[0] for _, step in steps_of(rollout))
    assert steps == [0, 1, 20, 21, 30, 31]
    assert sorted(returns) == [3.0, 40.0]
    assert trace == [0.0, 1.0, 2.0, ("end", 3.0), 20.0, 30.0, 4.0, 8.0, 16.0, 32.0, ("end", 40.0)]


def test_which_episodes_count_is_said_by_each_client_for_itself() -> None:
    def begun(counts: list[bool] | None) -> Entries:
        [yes, no] = np.ones(2, np.bool_), np.zeros(2, np.bool_)
        said = None if counts is None else np.array(counts)
        return Entries(np.arange(2), np.zeros((2, 1)), np.zeros(2), yes, no, no, counts=said)

    whole = join_entries([begun(None), begun([False, True]), begun(None)])
    assert whole.counts is not None and whole.counts.tolist() == [True, True, False, True, True, True]
    assert join_entries([begun(None), begun(None)]).counts is None


def test_any_episode_takes_the_place_of_one_that_was_dropped() -> None:
    def play(address: str) -> None:
        with PolicyClient(address, 2) as client:
            client.exchange([0], rows(0), begins=[True])
            client.drop([0])  # and nobody plays in this env again
            client.exchange([1], rows(10), begins=[True])
            client.exchange([1], rows(11), rewards=[3.0], terminated=[True])

    with runner_of(served(num_envs=2)) as runner:
        thread, found = run_in_thread(partial(play, address_of(runner)))
        rollout = runner.collect(SampleRequest(num_episodes=1, time_limit_s=20.0))
        answer(runner, thread)
    assert found == [None]
    assert [step.reward for _, step in steps_of(rollout)] == [3.0]


@pytest.mark.parametrize("leaves", [True, False])
def test_episodes_that_do_not_count_are_none_of_those_that_are_wanted(leaves: bool) -> None:
    def play(address: str) -> None:
        with PolicyClient(address, 1) as client:
            for number in range(4):
                client.exchange([0], rows(number), begins=[True], counts=[number % 2 == 1])
                client.step(rows(number), [float(number)])
                if leaves and number % 2 == 0:
                    client.drop()
                else:
                    client.step(rows(number), [0.5], [True])

    with runner_of(served(num_envs=2)) as runner:
        thread, _ = run_in_thread(partial(play, address_of(runner)))
        rollout = runner.sample(num_episodes=2)
        returns = runner.last_statistics.returns.tolist()
        answer(runner, thread)
    assert returns == [1.5, 3.5]
    assert [step.obs[0] for _, step in steps_of(rollout)] == [1, 1, 3, 3]


def test_clients_that_act_themselves_and_others_keep_their_actions_in_one_batch() -> None:
    def play(address: str, number: float, action: int | None) -> list[int]:
        taken = []
        with PolicyClient(address) as client:
            for t in range(40):
                obs = np.array([[number, t, 0, 0]], np.float32)
                own = None if action is None else np.array([action])
                found = client.exchange([0], obs, begins=[t == 0], rewards=[float(t)], actions=own)
                taken.append(int(found[0]) if action is None else action)
        return taken

    config = served(DQNConfig(), num_envs=4).exploration(exploration_config={"type": "Random"})
    with runner_of(config) as runner:
        address = address_of(runner)
        players = [run_in_thread(partial(play, address, float(i), action)) for i, action in enumerate([0, None, 2, 1])]
        rollout = runner.sample(num_timesteps=4 * 39)
        for thread, _ in players:
            answer(runner, thread)
    learned = {step.obs[:2]: step.action for _, step in steps_of(rollout)}
    assert len(learned) == 4 * 39
    for number, (_, found) in enumerate(players):
        assert [learned[number, t] for t in range(39)] == found[0][:39]
    # Nobody knows how likely a client took its own actions. The exploration chose others there, which do not count.
    of_others = rollout.obs[:-1, :, 0] == 1
    np.testing.assert_allclose(rollout.logp[rollout.valid & of_others], -np.log(3), rtol=1e-6)
    assert np.isnan(rollout.logp[rollout.valid & ~of_others]).all()


def test_dqn_replays_the_steps_of_each_simulator_as_they_were() -> None:
    config = served(DQNConfig(), num_envs=4).training(replay_buffer_config={"capacity": 4096})
    with config.build() as algorithm:
        address = address_of(algorithm.env_runner)
        simulators = [Simulator(address, i, 2, pause_s=0.001 * i).start() for i in range(2)]
        buffer = algorithm.replay_buffers["default_policy"]
        for n in (50, 70, 90):
            buffer.add(algorithm.env_runner.sample(num_timesteps=n))
        end(algorithm.env_runner, *simulators)
        batch = buffer.sample(2000)
    played = {step.obs: step for simulator in simulators for steps in simulator.episodes.values() for step in steps}
    for i in range(len(batch["rewards"])):
        step = played[tuple(batch["obs"][i].tolist())]
        assert tuple(batch["next_obs"][i].tolist()) == step.next_obs
        assert batch["rewards"][i] == pytest.approx(step.reward)
        assert bool(batch["terminated"][i]) == step.terminated


def test_what_was_sampled_does_not_wait_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[Any] = []
    with runner_of(served(num_envs=2)) as runner:
        simulator, allocate = Simulator(address_of(runner), 5, 2).start(), runner.stepping.allocate

        def noted(num_rows: int) -> Any:
            made = allocate(num_rows)
            records.append(weakref.ref(made))
            return made

        monkeypatch.setattr(runner.stepping, "allocate", noted)
        gc.disable()
        try:
            for _ in range(3):
                runner.sample(num_timesteps=20)
            assert len(records) == 3
            assert [record() for record in records[:2]] == [None, None]
        finally:
            gc.enable()
        end(runner, simulator)
