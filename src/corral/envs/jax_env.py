"""Envs written in JAX, such as Brax's and MuJoCo Playground's, as tensor vector envs; DLPack shares the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch.utils.dlpack import from_dlpack

from corral.core.devices import find_tensor_device
from corral.core.tree import Tree
from corral.envs.tensor_env import TensorVectorEnv
from corral.errors import CheckpointError, ConfigError, EnvError

_OF_WRAPPERS = ("truncation", "episode_done", "first_obs", "first_pipeline_state", "first_data")
"""Ends of the names under which wrappers of Brax and MuJoCo Playground note what this class does itself."""


class JaxVectorEnv(TensorVectorEnv):
    """N sub-envs of an env of JAX, which one compiled function steps and resets.

    The env has `reset(key)` and `step(state, action)`, functions of a single sub-env that return a state with the
    attributes `obs`, `reward` and `done`, and the attribute `action_size`. So do the envs of Brax (Freeman et al.,
    arXiv:2106.13281) and of MuJoCo Playground (Zakka et al., arXiv:2502.08844); their wrappers for training are left
    out. Actions are in [-1, 1].

    A sub-env whose episode has ended begins at a new state, which `reset` draws for all sub-envs of that step; Brax's
    own wrapper returns to the first state of the sub-env.

    Args:
        env: The env of a single sub-env.
        num_envs: Number of sub-envs N.
        device: Device of all tensors; JAX must have a device of this kind.
        max_episode_steps: Steps after which an episode is truncated.
        obs_key: Key of the part of a dict of observations that the policy sees, such as `"state"` of Playground; with
            `None` it sees all parts.
        seed: Seed of the states until the first `reset` with a seed.

    Attributes:
        env: The same.

    Raises:
        ConfigError: The object is no such env or has several sub-envs already, its state has other parts after a step
            than after a reset, there is no such key, or JAX has no such device.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int,
        device: str | torch.device = "cpu",
        max_episode_steps: int = 1000,
        obs_key: str | None = None,
        seed: int | None = None,
    ) -> None:
        """Find the spaces; the first reset and the first step compile."""
        for name, value in (("num_envs", num_envs), ("max_episode_steps", max_episode_steps)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"JaxVectorEnv: {name} must be an int of at least 1, not {value!r}.")
        self.env, self.num_envs = env, num_envs
        self.device = find_tensor_device(device)
        self._jax_device = _find_jax_device(self.device)
        self._key = self._make_key(seed)
        state = _find_state(env, self._key)
        if obs_key is not None and not (isinstance(state.obs, Mapping) and obs_key in state.obs):
            known = f"have the keys {sorted(state.obs)}" if isinstance(state.obs, Mapping) else "are no dict"
            raise ConfigError(f"JaxVectorEnv: obs_key={obs_key!r}: the observations {known}.")
        self.single_observation_space = _space_of(_part(state.obs, obs_key))
        self.single_action_space = spaces.Box(-1.0, 1.0, (int(env.action_size),), np.float32)
        self._reset, self._step = _compile(env, state, num_envs, max_episode_steps, obs_key)
        self._carry: Any = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Reset all sub-envs; see `TensorVectorEnv.reset`. There are no options."""
        if seed is not None:
            self._key = self._make_key(seed)
        elif self._carry is not None:
            self._key = self._carry[-1]
        self._carry, obs = self._reset(self._key)
        return self._to_torch(obs), {}

    def step(self, actions: torch.Tensor) -> tuple[Tree, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Step all sub-envs; see `TensorVectorEnv.step`. Every step gives `final_obs` of all sub-envs.

        Raises:
            EnvError: The env has not been reset, or the actions have another shape.
        """
        import jax

        if self._carry is None:
            raise EnvError("JaxVectorEnv was stepped before its first reset: call reset().")
        shape = (self.num_envs, *(self.single_action_space.shape or ()))
        if actions.shape != shape:
            raise EnvError(f"JaxVectorEnv needs actions of shape {list(shape)}, not {list(actions.shape)}.")
        self._carry, *given = self._step(self._carry, jax.dlpack.from_dlpack(actions.detach().contiguous()))
        obs, rewards, terminated, truncated, final = self._to_torch(given)
        return obs, rewards, terminated, truncated, {"final_obs": final}

    # State.

    def get_state(self) -> dict[str, Any]:
        """Return the states, the steps of each episode and the random key as arrays.

        Raises:
            EnvError: The env has not been reset.
        """
        import jax

        if self._carry is None:
            raise EnvError("JaxVectorEnv has no state before its first reset: call reset().")
        return {"leaves": [np.array(_plain(leaf)) for leaf in jax.tree.leaves(self._carry)]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`.

        Raises:
            CheckpointError: The state is of another env or another number of sub-envs.
        """
        import jax

        wanted, form = jax.tree.flatten(self._reset(self._key)[0])
        saved, plain = state["leaves"], map(_plain, wanted)
        if [(leaf.shape, leaf.dtype) for leaf in saved] != [(leaf.shape, leaf.dtype) for leaf in plain]:
            raise CheckpointError(
                f"JaxVectorEnv: the state is not of {self.num_envs} sub-envs of {type(self.env).__name__}."
            )
        leaves = [
            jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array
            for array, leaf in zip(saved, wanted, strict=True)
        ]
        self._carry = jax.device_put(jax.tree.unflatten(form, leaves), self._jax_device)

    def _to_torch(self, arrays: Any) -> Any:
        """Return tensors that share the memory of arrays, which nothing writes."""
        import jax

        if self.device.type == "cpu":  # a GPU orders its streams itself
            arrays = jax.block_until_ready(arrays)
        return jax.tree.map(from_dlpack, arrays)

    def _make_key(self, seed: int | None) -> Any:
        import jax

        number = int(np.random.SeedSequence(seed).generate_state(1)[0])
        return jax.device_put(jax.random.PRNGKey(number), self._jax_device)


def _find_state(env: Any, key: Any) -> Any:
    """Return the shapes and dtypes of the state of a single sub-env after a step.

    Raises:
        ConfigError: The object is no env of a single sub-env, or the state has other parts or shapes after a reset.
    """
    import jax

    name, remedy = type(env).__name__, "give it the env of a single sub-env, without wrappers for training"
    try:
        first = jax.eval_shape(env.reset, key)
        after = jax.eval_shape(env.step, first, jax.ShapeDtypeStruct((int(env.action_size),), np.float32))
        numbers = {"reward": first.reward, "done": first.done, "reward after a step": after.reward}
        numbers |= {"done after a step": after.done}
    except Exception as error:
        raise ConfigError(
            f"JaxVectorEnv: {name} has not the interface of Brax's envs ({type(error).__name__}: {error}): {remedy}."
        ) from error
    for what, number in numbers.items():
        if number.shape:
            raise ConfigError(f"JaxVectorEnv: the {what} of {name} has the shape {list(number.shape)}: {remedy}.")
    info = getattr(first, "info", None)
    for entry in info if isinstance(info, Mapping) else ():
        if str(entry).endswith(_OF_WRAPPERS):
            raise ConfigError(f"JaxVectorEnv: a wrapper of {name} writes {entry!r} into the info: {remedy}.")
    before, then = _shapes_in(first), _shapes_in(after)
    for path in [*before, *then]:
        shapes = before.get(path, "missing"), then.get(path, "missing")
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"JaxVectorEnv: the state of {name} must have the same parts after reset and step: {path} is "
                f"{shapes[0]} and {shapes[1]}."
            )
    return after


def _shapes_in(state: Any) -> dict[str, Any]:
    """Return the shape of each array in a state, by its path."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path).lstrip("."): leaf.shape for path, leaf in leaves}


def _compile(
    env: Any, state: Any, num_envs: int, max_episode_steps: int, obs_key: str | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the compiled functions of a reset and of a step of all sub-envs.

    The carry of the steps has the states, the steps of each episode, and the key of the next reset.
    """
    import jax
    from jax import numpy as jnp

    def draw(key: Any) -> Any:
        states = jax.vmap(env.reset)(jax.random.split(key, num_envs))
        return jax.tree.map(lambda leaf, known: leaf if _is_key(leaf) else leaf.astype(known.dtype), states, state)

    def show(obs: Any) -> Any:
        return jax.tree.map(_narrowed, _part(obs, obs_key))

    def reset(key: Any) -> tuple[Any, Any]:
        key, used = jax.random.split(key)
        states = draw(used)
        return (states, jnp.zeros(num_envs, jnp.int32), key), show(states.obs)

    def step(carry: Any, actions: Any) -> tuple[Any, ...]:
        states, num_steps, key = carry
        after, num_steps = jax.vmap(env.step)(states, actions), num_steps + 1
        terminated, truncated = after.done.astype(bool), num_steps >= max_episode_steps
        ended = terminated | truncated
        key, used = jax.random.split(key)

        def choose(new: Any, old: Any) -> Any:
            if old.shape[:1] != (num_envs,):  # states of MuJoCo Playground hold arrays [0] that `vmap` does not batch
                return old
            return jnp.where(ended.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        following = jax.tree.map(choose, jax.lax.cond(ended.any(), lambda: draw(used), lambda: after), after)
        carry = following, jnp.where(ended, 0, num_steps), key
        return carry, show(following.obs), _narrowed(after.reward), terminated, truncated, show(after.obs)

    return jax.jit(reset), jax.jit(step)


def _find_jax_device(device: torch.device) -> Any:
    import jax

    kind = {"cuda": "gpu"}.get(device.type, device.type)
    try:
        return jax.devices(kind)[device.index or 0]
    except (RuntimeError, IndexError) as error:
        raise ConfigError(
            f"JaxVectorEnv: device={str(device)!r}, and JAX has no such device ({error}): install JAX for it, or set "
            "device='cpu'."
        ) from error


def _space_of(obs: Any) -> spaces.Space[Any]:
    """Return the space of observations of a single sub-env, given their shapes."""
    if isinstance(obs, Mapping):
        return spaces.Dict({key: _space_of(part) for key, part in obs.items()})
    dtype = np.dtype(obs.dtype)  # bfloat16 is of no kind that NumPy knows
    if dtype.kind == "b":
        return spaces.MultiBinary(obs.shape)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return spaces.Box(bounds.min, bounds.max, obs.shape, dtype.type)
    return spaces.Box(-np.inf, np.inf, obs.shape, np.float32)


def _part(obs: Any, obs_key: str | None) -> Any:
    return obs if obs_key is None else obs[obs_key]


def _narrowed(leaf: Any) -> Any:
    """Return floats as float32; bfloat16 and float64 are no dtypes of observations."""
    import jax

    return leaf.astype(np.float32) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) else leaf


def _is_key(leaf: Any) -> bool:
    import jax

    return bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(leaf: Any) -> Any:
    """Return an array of numbers, which random keys of a type of their own are not."""
    import jax

    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
