"""The check that a replay buffer stores the frames of stacked images once, for any env with stacks of 4."""

from __future__ import annotations

from typing import Any

import numpy as np

from at_least import at_least
from corral.data.replay import ReplayBuffer


def check_frames_are_stored_once(runner: Any) -> None:
    """Draw from a buffer that stores frames once, and compare with the rollouts of a runner of Pong."""
    whole, stacked = (ReplayBuffer(200, frame_stack=k, seed=0) for k in (1, 4))
    seen: set[tuple[bytes, bytes]] = set()
    for _ in range(4):
        rollout = runner.sample(num_timesteps=25)
        whole.add(rollout)
        stacked.add(rollout)
        for t, i in np.argwhere(rollout.valid).tolist():
            following = rollout.final_obs.get((t, i), rollout.obs[t + 1, i])
            seen.add((rollout.obs[t, i].tobytes(), following.tobytes()))
    assert stacked.nbytes < 0.3 * whole.nbytes
    drawn = stacked.sample(100)
    assert drawn["obs"].shape == (100, 4, 84, 84)
    pairs = zip(drawn["obs"], drawn["next_obs"], strict=True)
    assert all((obs.tobytes(), following.tobytes()) in seen for obs, following in at_least(1, pairs))
