"""Writes messages of RLlink as Ray sends them, for tests; `make samples` calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "rllink_messages"


class Written:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.data = b""

    def sendall(self, data: bytes) -> None:
        self.data += data


def episodes() -> dict[str, Any]:
    """Return messages by name: an episode of six steps in three chunks, and one that is cut off in NumPy's form."""
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    def step(episode: Any, t: int, **ends: bool) -> None:
        outputs = {"action_dist_inputs": np.array([0.5, t, -1], np.float32), "action_logp": np.float32(-0.5 - t)}
        obs = np.full(4, t + 1, np.float32)
        episode.add_env_step(obs, np.int64(t % 3), 10.0 + t, infos={}, extra_model_outputs=outputs, **ends)

    first = SingleAgentEpisode(id_="first", observations=[np.zeros(4, np.float32)])
    step(first, 0)
    step(first, 1)
    second = first.cut(len_lookback_buffer=1)
    step(second, 2)
    step(second, 3)
    third = second.cut()
    step(third, 4)
    step(third, 5, terminated=True)
    other = SingleAgentEpisode(id_="other", observations=[np.full(4, 20, np.float32)])
    step(other, 20)
    step(other, 21, truncated=True)
    return {
        "ping": {"type": "PING"},
        "get_config": {"type": "GET_CONFIG"},
        "episodes_1": {"type": "EPISODES", "episodes": [first.get_state()], "timesteps": 2},
        "episodes_2": {"type": "EPISODES", "episodes": [second.get_state()], "timesteps": 2},
        "episodes_3": {"type": "EPISODES", "episodes": [third.get_state(), other.to_numpy().get_state()]},
    }


def main() -> None:
    """Write the files."""
    from ray.rllib.env.external.rllink import send_rllink_message

    HERE.mkdir(exist_ok=True)
    for name, message in episodes().items():
        written = Written()
        send_rllink_message(written, message)
        (HERE / f"{name}.bin").write_bytes(written.data)


if __name__ == "__main__":
    main()
