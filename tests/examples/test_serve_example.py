"""examples/serve_policy.py answers with the actions of the policy, and says what is wrong with an observation."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import example_files
from corral import FrameStack, Policy, PPOConfig, load_policy
from corral.errors import CorralError
from corral.modules.module import ActorCritic


def post(port: int, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}", body)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_actions_match_the_policy(env: str, tmp_path: Path) -> None:
    config = PPOConfig().environment(env).training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1)
    with config.build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress=False)
    policy, size = load_policy(tmp_path / "run"), 4 if env == "CartPole-v1" else 3
    with example_files.load("serve_policy.py").make_server(tmp_path / "run", port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for obs in np.random.default_rng(0).uniform(-1, 1, (20, size)).round(3).tolist():
                status, action = post(server.server_port, json.dumps(obs).encode())
                assert status == 200 and action == pytest.approx(np.asarray(policy(np.array(obs, np.float32))).tolist())
            wrongs = ((b"[1.0]", "shape"), (b"nonsense", "Expecting value"), (b"", "Expecting value"))
            for wrong, message in (*wrongs, (b"[" * 100_000, "recursion")):
                status, answer = post(server.server_port, wrong)
                assert status == 400 and message in answer["error"]
            unsized = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            unsized.request("POST", "/", headers={"Content-Length": "-1"})
            assert unsized.getresponse().status == 400
            unsized.close()
        finally:
            server.shutdown()
            thread.join()


def test_actions_of_dict_and_tuple_spaces_are_objects_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    gripper = spaces.Dict(grips=spaces.Discrete(1, start=3), moves=spaces.Box(-1, 1, (2,)))
    policy = Policy(ActorCritic(spaces.Box(-1, 1, (2,)), spaces.Tuple([gripper, spaces.MultiBinary(1)]), {}))
    example = example_files.load("serve_policy.py")
    monkeypatch.setattr(example, "load_policy", lambda run_dir: policy)
    with example.make_server("run", port=0) as server:
        threading.Thread(target=server.handle_request).start()
        status, (gripper_action, bits) = post(server.server_port, b"[0.5, 0.25]")
    moves = policy([0.5, 0.25])[0]["moves"].tolist()
    assert status == 200 and gripper_action == {"grips": 3, "moves": pytest.approx(moves)} and bits in ([0], [1])


def test_a_policy_with_memory_is_refused(tmp_path: Path) -> None:
    """It would mix the episodes of all clients."""
    config = PPOConfig().environment("CartPole-v1").env_runners(transforms=[FrameStack(2)])
    with config.build() as algo:
        algo.save(tmp_path / "saved")
    with pytest.raises(CorralError, match="remembers earlier observations"):
        example_files.load("serve_policy.py").make_server(tmp_path / "saved", port=0)
