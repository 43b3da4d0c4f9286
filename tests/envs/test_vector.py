"""From what `.environment(...)` was given to a vector env."""

from __future__ import annotations

import copy
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from corral import PPOConfig
from corral.envs import env_ids
from corral.envs.masked_resets import infos_by_env
from corral.envs.sync_vector import SyncVectorEnv
from corral.envs.vector import EnvContext, make_vector_env, resolve_env
from corral.errors import ConfigError, EnvError, MissingPackageError, SubEnvError
from corral.testing import CountingEnv

Make = Callable[..., VectorEnv[Any, Any, Any]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[VectorEnv[Any, Any, Any]] = []

    def make(env: Any, env_config: dict[str, Any] | None = None, **settings: Any) -> VectorEnv[Any, Any, Any]:
        made.append(make_vector_env(env, EnvContext(env_config or {}), **{"num_envs": 2, **settings}))
        return made[-1]

    yield make
    for env in made:
        env.close()


def time_limit_of_3(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(env, 3)


class TestVectorization:
    def test_auto_takes_the_native_entry_point(self, make: Make) -> None:
        env = make("CartPole-v1", num_envs=4)
        assert isinstance(env, CartPoleVectorEnv)
        assert env.num_envs == 4

    @pytest.mark.parametrize(
        "settings",
        [{"num_envs": 1}, {"vectorization": "sync"}, {"wrappers": [time_limit_of_3]}],
        ids=["one env", "sync by name", "a wrapper"],
    )
    def test_otherwise_steps_one_env_after_the_other(self, make: Make, settings: dict[str, Any]) -> None:
        assert isinstance(make("CartPole-v1", **settings), SyncVectorEnv)

    def test_an_id_without_a_native_entry_point_is_sync(self, make: Make) -> None:
        assert isinstance(make("MountainCar-v0"), SyncVectorEnv)

    def test_wrappers_go_around_every_sub_env_first_one_innermost(self, make: Make) -> None:
        env = make(
            "CartPole-v1", vectorization="sync", wrappers=[time_limit_of_3, gym.wrappers.RecordEpisodeStatistics]
        )
        for sub_env in env.envs:  # type: ignore[attr-defined]
            assert isinstance(sub_env, gym.wrappers.RecordEpisodeStatistics)
            assert isinstance(sub_env.env, gym.wrappers.TimeLimit)

    def test_default_number_of_envs(self, make: Make) -> None:
        assert make(CountingEnv, num_envs=None, default_num_envs=3).num_envs == 3

    def test_async_runs_a_process_each_and_leaves_none(self) -> None:
        before = set(multiprocessing.active_children())
        env = make_vector_env(CountingEnv, EnvContext({"stagger": True}), num_envs=2, vectorization="async")
        assert len(set(multiprocessing.active_children()) - before) == 2
        env.reset(seed=0)
        obs, rewards, *_ = env.step(np.zeros(2, int))
        assert obs.tolist() == [[0, 1], [0, 1]]
        assert rewards.tolist() == [1, 1]
        env.close()
        assert set(multiprocessing.active_children()) == before

    @pytest.mark.parametrize("vectorization", ["sync", "async"])
    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    def test_autoreset_mode_is_the_one_asked_for(self, make: Make, vectorization: str, mode: str) -> None:
        env = make(CountingEnv, {"episode_length": 1}, vectorization=vectorization, autoreset_mode=mode)
        assert env.metadata["autoreset_mode"] == AutoresetMode[mode.upper()]
        env.reset(seed=0)
        obs, _, terminated, *_ = env.step(np.zeros(2, int))
        assert terminated.all()
        assert obs[:, 1].tolist() == ([1, 1] if mode == "next_step" else [0, 0])


class KeywordEnv(CountingEnv):
    def __init__(self, size: int, depth: int = 1) -> None:
        super().__init__()
        self.size, self.depth = size, depth


class KeywordOnlyEnv(CountingEnv):
    def __init__(self, *, size: int = 0) -> None:
        super().__init__()
        self.size = size


class ContextEnv(CountingEnv):
    def __init__(self, env_config: EnvContext) -> None:
        super().__init__()
        self.size = env_config["size"]


def config_factory(env_config: EnvContext) -> KeywordEnv:
    return KeywordEnv(env_config["size"])


class TestEnvConfig:
    def test_reaches_an_id_as_keyword_arguments(self, make: Make) -> None:
        env = make("CartPole-v1", {"sutton_barto_reward": True}, num_envs=1)
        env.reset(seed=0)
        assert env.step(np.zeros(1, int))[1].tolist() == [0.0]  # 1.0 without the setting

    def test_reaches_a_native_vector_env(self, make: Make) -> None:
        env = make("CartPole-v1", {"sutton_barto_reward": True})
        env.reset(seed=0)
        assert env.step(np.zeros(2, int))[1].tolist() == [0.0, 0.0]

    @pytest.mark.parametrize(
        "env", [ContextEnv, config_factory, KeywordEnv, KeywordOnlyEnv, lambda conf: KeywordEnv(conf["size"])]
    )
    def test_reaches_classes_and_factories(self, make: Make, env: Any) -> None:
        vector_env = make(env, {"size": 7})
        assert vector_env.get_attr("size") == (7, 7)

    def test_reaches_several_keywords(self, make: Make) -> None:
        vector_env = make(KeywordEnv, {"size": 7, "depth": 2})
        assert vector_env.get_attr("depth") == (2, 2)

    def test_a_factory_without_arguments_needs_none(self, make: Make) -> None:
        assert make(lambda: KeywordEnv(3)).get_attr("size") == (3, 3)

    def test_context_says_where_the_env_lives(self) -> None:
        seen: list[tuple[int, int, int]] = []

        def factory(env_config: EnvContext) -> CountingEnv:
            seen.append((env_config.worker_index, env_config.num_workers, env_config.vector_index))
            return CountingEnv(env_config)

        make_vector_env(factory, EnvContext({}, worker_index=2, num_workers=4), num_envs=3).close()
        assert seen == [(2, 4, 0), (2, 4, 0), (2, 4, 1), (2, 4, 2)]  # the first one is checked, and closed

    def test_context_reaches_the_processes_of_async(self, make: Make) -> None:
        env = make(CountingEnv, {"episode_length": 1, "stagger": True}, vectorization="async", num_envs=3)
        env.reset(seed=0)
        assert env.step(np.zeros(3, int))[2].tolist() == [True, False, False]

    def test_an_env_that_cannot_be_made_is_named_with_its_index(self) -> None:
        def factory(env_config: EnvContext) -> CountingEnv:
            if env_config.vector_index == 1:
                raise OSError("no simulator")
            return CountingEnv(env_config)

        for vectorization in ("sync", "async"):
            before = set(multiprocessing.active_children())
            with pytest.raises(EnvError, match=r"'factory'.*sub-env 1.*no simulator"):
                make_vector_env(factory, EnvContext({}), num_envs=2, vectorization=vectorization)
            assert set(multiprocessing.active_children()) == before


class TestResolve:
    def test_import_path(self, make: Make) -> None:
        env = make("corral.testing:CountingEnv", {"episode_length": 1})
        env.reset()
        assert env.step(np.zeros(2, int))[2].all()

    def test_unknown_id_suggests_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown env id 'CartPol-v1'\. Did you mean 'CartPole-v1'\?"):
            resolve_env("CartPol-v1")

    @pytest.mark.parametrize(
        ("env_id", "hint"),
        [
            ("ALE/No-such-game-v5", r"It is in another package: run `pip install 'corral\[atari\]'`\.$"),
            ("NoSuchGameNoFrameskip-v4", r"run `pip install 'corral\[atari\]'`\.$"),
            ("FetchReach-v2", r"run `pip install 'gymnasium-robotics'`\.$"),
            ("MiniGrid-Empty-5x5-v0", r"run `pip install 'minigrid'`\.$"),
            ("LunarLander-v2", r"Did you mean 'LunarLander-v3'\?$"),
            ("Blackjack-v0", r"Did you mean 'Blackjack-v1'\?$"),
            ("CartPole", r"Did you mean 'CartPole-v1'\?$"),
            ("halfcheetah", r"Did you mean 'HalfCheetah-v5'\?$"),
            (
                "Nothing-like-this-v0",
                r"pprint_registry\(\) shows all ids; an id of another package is 'package:Name-v0'",
            ),
        ],
    )
    def test_an_unknown_id_says_in_one_line_what_to_write_or_to_install(
        self, env_id: str, hint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(env_ids, "find_spec", lambda name: None)
        for name, spec in list(gym.registry.items()):  # of packages that another test has imported
            if str(spec.entry_point).startswith(("minigrid", "gymnasium_robotics")):
                monkeypatch.delitem(gym.registry, name)
        with pytest.raises(ConfigError, match=hint) as caught:
            PPOConfig().environment(env_id).validate()
        assert "\n" not in str(caught.value)

    def test_the_installed_package_of_an_id_is_imported(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(env_ids, "PACKAGES", (env_ids.Package(r"Maze-", "package_of_mazes", "mazes"),))
        file = tmp_path / "package_of_mazes.py"
        file.write_text("import gymnasium\ngymnasium.register('Maze-v0', entry_point='corral.testing:CountingEnv')\n")
        with monkeypatch.context() as patch:
            patch.setattr(gym.envs.registration, "registry", dict(gym.registry))
            patch.setattr(gym, "registry", gym.envs.registration.registry)
            with pytest.raises(ConfigError, match=r"unknown env id 'Maze-v1'.*'Maze-v0'"):
                resolve_env("Maze-v1")
            assert resolve_env("Maze-v0") == "Maze-v0"

    @pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")
    @pytest.mark.parametrize(
        ("env_id", "module_name", "hint"),
        [
            ("LunarLander-v3", "Box2D", r"'LunarLander-v3' cannot be made here: Box2D is not installed.*pip install"),
            ("Hopper-v5", "mujoco", r"'Hopper-v5' cannot be made.*run `pip install \"corral\[mujoco\]\"`\.$"),
            ("Hopper-v3", "mujoco_py", r"cannot be made here: .*(robotics|MuJoCo).* Did you mean 'Hopper-v5'\?$"),
            ("phys2d/CartPole-v0", "jax", r"No module named 'jax'. Run `pip install jax`."),
        ],
    )
    def test_a_missing_package_is_named_in_one_line(
        self, env_id: str, module_name: str, hint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if module_name == "mujoco":
            for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
                monkeypatch.delitem(sys.modules, name)
            monkeypatch.setitem(sys.modules, "mujoco", None)
        elif find_spec(module_name) is not None:
            pytest.skip(f"{module_name} is installed")
        kind: type[Exception] = MissingPackageError
        if module_name == "mujoco_py":  # newer versions of Gymnasium say with another error that these envs have moved
            with pytest.raises((gym.error.DependencyNotInstalled, ImportError)) as of_gymnasium:
                gym.make(env_id)
            kind = MissingPackageError if isinstance(of_gymnasium.value, gym.error.DependencyNotInstalled) else EnvError
        with pytest.raises(kind, match=hint) as caught:
            PPOConfig().environment(env_id).build()
        assert "\n" not in str(caught.value)

    def test_unknown_module_is_named(self) -> None:
        with pytest.raises(
            ConfigError, match=r"'no_such_package:.*' cannot be imported: No module named 'no_such_package'"
        ):
            resolve_env("no_such_package:Env")

    def test_unknown_name_in_a_module_is_named(self) -> None:
        with pytest.raises(ConfigError, match="CountingEnvv"):
            resolve_env("corral.testing:CountingEnvv")

    def test_an_env_object_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="id, a class or a factory, got CountingEnv"):
            resolve_env(CountingEnv())

    def test_a_factory_of_something_else_is_refused(self) -> None:
        with pytest.raises(EnvError, match=r"a corral\.MultiAgentEnv or an env of PettingZoo, got int"):
            make_vector_env(lambda: 3, EnvContext({}), num_envs=1)


def ready(env_config: EnvContext) -> VectorEnv[Any, Any, Any]:
    mode = env_config.get("mode", AutoresetMode.NEXT_STEP)
    return gym.vector.SyncVectorEnv([CountingEnv] * 3, autoreset_mode=mode)


class TestReadyVectorEnv:
    @pytest.mark.parametrize("num_envs", [None, 3])
    def test_is_taken_as_it_is(self, make: Make, num_envs: int | None) -> None:
        env = make(ready, num_envs=num_envs)
        assert type(env) is gym.vector.SyncVectorEnv
        assert env.num_envs == 3

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"num_envs": 2}, ["num_envs_per_env_runner=2", "VectorEnv of 3"]),
            ({"autoreset_mode": "same_step"}, ["autoreset_mode='same_step'", "NEXT_STEP"]),
            ({"vectorization": "async"}, ["vectorization='async'", "returned a VectorEnv"]),
            ({"wrappers": [time_limit_of_3]}, ["time_limit_of_3", "returned a VectorEnv"]),
        ],
    )
    def test_contradictions_name_both_settings(self, settings: dict[str, Any], words: list[str]) -> None:
        with pytest.raises(ConfigError) as caught:
            make_vector_env(ready, EnvContext({}), **{"num_envs": None, **settings})
        for word in ["'ready'", *words]:
            assert word in str(caught.value)

    def test_an_unknown_autoreset_mode_is_refused(self) -> None:
        def unsaid(config: Any) -> Any:
            made = ready(config)
            made.metadata = {}
            return made

        with pytest.raises(EnvError, match="autoreset_mode"):
            make_vector_env(unsaid, EnvContext({}), num_envs=None)


class SpaceEnv(gym.Env[Any, Any]):
    """Observations drawn from any space, episodes of random length, and infos of every kind."""

    action_space: Any = spaces.Discrete(3)

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {"started": True, "note": "reset"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        draw = self.np_random.random()
        obs = self.observation_space.sample()
        return obs, draw + float(action), bool(draw < 0.2), bool(draw > 0.8), {"draw": draw, "nested": {"n": 3}}


AGREEMENT_SPACES = {
    "box": spaces.Box(-1, 1, (2, 3), np.float32),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "multi_binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(-1, 1, (2,), np.float32)}),
    "tuple": spaces.Tuple((spaces.MultiDiscrete([2, 2]), spaces.Box(-1, 1, (1,), np.float64))),
    "nested": spaces.Dict({"x": spaces.Tuple((spaces.Discrete(2), spaces.Dict({"y": spaces.MultiBinary(2)})))}),
}


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare nested observations and infos, dtypes included."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, tuple) or (isinstance(theirs, np.ndarray) and theirs.dtype == object):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)
    elif theirs is None:
        assert ours is None
    else:
        np.testing.assert_array_equal(ours, theirs, strict=isinstance(theirs, np.ndarray))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("space", AGREEMENT_SPACES.values(), ids=AGREEMENT_SPACES)
def test_sync_agrees_with_gymnasium_step_for_step(space: spaces.Space[Any], mode: AutoresetMode) -> None:
    def both(cls: Any) -> Any:
        return cls([lambda: SpaceEnv(copy.deepcopy(space))] * 3, autoreset_mode=mode)

    ours, theirs = both(SyncVectorEnv), both(gym.vector.SyncVectorEnv)

    def by_env(returned: Any) -> Any:
        return *returned[:-1], {i: info for i, info in infos_by_env(returned[-1], 3).items() if info}

    assert_same(ours.reset(seed=5), by_env(theirs.reset(seed=5)))
    ours.action_space.seed(0)
    ends = 0
    for _ in range(40):
        actions = ours.action_space.sample()
        stepped = ours.step(actions)
        assert_same(stepped, by_env(theirs.step(actions)))
        ends += int((stepped[2] | stepped[3]).sum())
    assert ends > 10


def test_sync_observations_may_be_kept() -> None:
    env = SyncVectorEnv([CountingEnv] * 2)
    first, _ = env.reset()
    second = env.step(np.zeros(2, int))[0]
    env.step(np.zeros(2, int))
    assert first[:, 1].tolist() == [0, 0]
    assert second[:, 1].tolist() == [1, 1]


def test_sync_reset_forgets_which_episodes_had_ended() -> None:
    env = SyncVectorEnv([lambda: CountingEnv({"episode_length": 1})] * 2)
    env.reset()
    assert env.step(np.zeros(2, int))[2].all()
    env.reset()
    assert env.step(np.zeros(2, int))[1].tolist() == [1, 1]  # a step, not the autoreset that was due


class GlobalRandomEnv(CountingEnv):
    """An env that draws from NumPy's global generator, as many do."""

    def _obs(self) -> NDArray[np.float32]:
        return np.random.random(2).astype(np.float32)


def test_async_leaves_the_global_generators_of_this_process_alone(make: Make) -> None:
    np.random.seed(5)
    make(CountingEnv, vectorization="async", seed=3)
    assert np.random.random() == np.random.RandomState(5).random()


def test_processes_of_async_do_not_share_a_random_stream(make: Make) -> None:
    def first_obs(seed: int) -> NDArray[np.float32]:
        obs, _ = make(GlobalRandomEnv, num_envs=3, vectorization="async", seed=seed).reset(seed=0)
        rows: NDArray[np.float32] = obs.copy()
        return rows

    assert len(np.unique(first_obs(5)[:, 0])) == 3
    np.testing.assert_array_equal(first_obs(5), first_obs(5))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_sub_envs_whose_spaces_differ_are_refused_by_name(make: Make, vectorization: str) -> None:
    def uneven(context: EnvContext) -> gym.Env[Any, Any]:
        return SpaceEnv(spaces.Box(0, 1, (2 + context.vector_index,), np.float32))

    with pytest.raises(EnvError, match="env 'uneven'"):
        make(uneven, num_envs=2, vectorization=vectorization)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_ready_vector_env_that_raises_at_first_is_named(make: Make, method: str) -> None:
    def broken(context: EnvContext) -> gym.vector.VectorEnv[Any, Any, Any]:
        def fail(*_: Any, **__: Any) -> Any:
            raise OSError("no display")

        env = gym.make_vec("CartPole-v1", num_envs=2)
        setattr(env, method, fail)
        return env

    with pytest.raises(EnvError, match=rf"env 'broken' raised in its first {method}\(\).*no display"):
        make(broken, num_envs=None)


def test_integers_that_do_not_fit_are_refused_and_not_wrapped_around(make: Make) -> None:
    class WideEnv(CountingEnv):
        observation_space = spaces.Box(0, 255, (2,), np.uint8)

        def _obs(self) -> NDArray[Any]:
            return np.full(2, 100 * self._t, np.uint16)

    env = make(WideEnv, num_envs=1, vectorization="sync", check=False, env_config={"episode_length": 10})
    env.reset(seed=0)
    env.step(np.array([0]))
    env.step(np.array([0]))
    with pytest.raises(SubEnvError, match="uint8"):
        env.step(np.array([0]))  # 300 would become 44
