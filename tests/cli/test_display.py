"""What a run shows when no terminal is there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from corral import PPOConfig
from corral.cli.display import Display

RESULT = {
    "training_iteration": 1,
    "num_env_steps_sampled_lifetime": 256,
    "time_total_s": 1.0,
    "env_runners": {"episode_return_mean": 20.0},
}
LAST_WORDS = "Interrupted after 1 iteration, 256 env steps, 1.0 s, mean return 20.0. The run is stored in run"


def interrupt_after(num_lines: int) -> Any:
    """Return a trace function that raises in the given line of code that runs, as Ctrl-C may in any."""
    left = num_lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.skipif(sys.gettrace() is not None, reason="another tracer is at work")
def test_the_last_words_come_wherever_an_update_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    for num_lines in range(10_000):
        display = Display(PPOConfig().environment("CartPole-v1"), {})
        display.start(Path("run"))
        sys.settrace(interrupt_after(num_lines))
        try:
            display.update(RESULT)
            break
        except KeyboardInterrupt:
            display.end("Interrupted")
        finally:
            sys.settrace(None)
        printed = capsys.readouterr().out.splitlines()[-1]
        assert printed.startswith("Interrupted after ")
        if display.result is not None:
            assert printed == LAST_WORDS
    assert 5 < num_lines < 10_000
