"""What a run shows: lines, a panel on a terminal, and a panel in a notebook."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import shutil
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from corral import PPOConfig
from corral.core.metrics.result import describe_return
from corral.core.metrics.timers import PARTS
from corral.errors import ConfigError, RunDirectoryError
from corral.runs.loggers.progress import Progress, sparkline
from corral.testing import CountingEnv
from small import small

RESULT = {
    "training_iteration": 1,
    "num_env_steps_sampled_lifetime": 256,
    "time_total_s": 1.0,
    "env_runners": {"episode_return_mean": 20.0},
}
PART = next(iter(PARTS))
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
        display = Progress(PPOConfig().environment("CartPole-v1"), {})
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


def test_the_last_words_name_the_state_that_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second iteration is interrupted in its round of evaluation, after it has sampled and learned."""
    rounds: list[int] = []

    def interrupt(algorithm: Any) -> None:
        rounds.append(algorithm.training_iteration)
        if len(rounds) == 2:
            raise KeyboardInterrupt

    config = small().evaluation(evaluation_interval=1, evaluation_duration=1)
    with config.callbacks(on_evaluate_start=interrupt).build() as algo, pytest.raises(KeyboardInterrupt):
        algo.fit(stop={"training_iteration": 5}, run_dir=tmp_path / "run", progress="last")
    rows = [json.loads(line) for line in (tmp_path / "run" / "result.jsonl").read_text().splitlines()]
    steps = rows[-1]["num_env_steps_sampled_lifetime"]
    assert len(rows) == 2
    assert f"Interrupted after 2 iterations, {steps:,} env steps" in capsys.readouterr().out


def test_a_run_whose_directory_was_removed_is_not_said_to_be_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small().callbacks(on_train_result=lambda: shutil.rmtree(tmp_path / "run")).build() as algo:
        with pytest.raises(RunDirectoryError, match="was removed"):
            algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path / "run", progress="last")
    printed = capsys.readouterr().out
    assert printed == "Failed after no iteration.\n"


def fit(tmp_path: Path, progress: Any, stop: Any = None) -> None:
    with small().build() as algo:
        algo.fit(stop=stop or {"training_iteration": 3}, run_dir=tmp_path / "run", progress=progress)


def test_fit_prints_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, "auto")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("PPO on ") and "1 iteration, 32 env steps" in first
    assert last.startswith("Done after 3 iterations, 96 env steps, ")
    assert last.endswith(f": training_iteration=3 reached 3. The run is stored in {tmp_path / 'run'}")


def test_progress_is_the_last_line_or_nothing_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "a", "last")
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("Done after 3 iterations")
    fit(tmp_path / "b", False)
    assert capsys.readouterr().out == ""


def test_an_unknown_way_to_show_progress_is_refused(tmp_path: Path) -> None:
    with small().build() as algo:
        for progress in ("line", True, None, 2):
            with pytest.raises(ConfigError, match=r"progress=.*: use 'auto', 'panel', 'lines', 'last' or False"):
                algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_and_an_interrupted_run_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for error, how in ((KeyboardInterrupt(), "Interrupted"), (RuntimeError("no"), "Failed")):

        def fail(result: Any, error: BaseException = error) -> None:
            raise error

        with small().callbacks(on_train_result=fail).build() as algo, pytest.raises(type(error)):
            algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path / how)
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"{how} after ")


def test_the_curve_shows_the_latest_values_from_their_smallest_to_their_largest() -> None:
    rising = [float(value) for value in range(100)]
    assert sparkline(rising, "abcd", 4) == "abcd"
    assert sparkline(rising[::-1], "abcd", 4) == "dcba"
    assert sparkline([1000.0, *rising], "abcd", 4) == "abcd"  # what is not shown scales nothing
    assert sparkline([0.0, math.nan, 3.0], "abcd") == "a d"
    assert sparkline([5.0, 5.0], "abcd") == "aa"
    assert sparkline([1.0, math.inf, 2.0], "abcd") == "a d"
    assert sparkline([1e308, -1e308], "abcd") == "da"
    assert sparkline([math.nan, math.nan], "abcd") == sparkline([]) == ""


def lines_of_panel(display: Progress, episodes: dict[str, Any], width: int) -> list[str]:
    """Return the lines of a panel without its borders, each space once."""
    result = {
        "training_iteration": 2,
        "num_env_steps_sampled_lifetime": 256,
        "time_total_s": 1.5,
        "env_runners": {**episodes, "num_env_steps_sampled": 128},
        "timers": {"iteration_s": 0.5, **{f"{part}_share": 0.0 for part in PARTS}, f"{PART}_share": 0.75},
        "bottleneck": {"part": PART, "share": 0.75, "setting": "env_runners.num_env_runners"},
    }
    display._console = console = Console(width=width, record=True, file=io.StringIO())
    display.update(result)
    console.print(display._panel())
    return [" ".join(line.strip("│ ").split()) for line in console.export_text().splitlines()]


def test_the_panel_shows_numbers_progress_and_what_takes_the_time() -> None:
    stop = {"num_env_steps": 4_000_000, "episode_return_mean": 100, "env_runners/num_episodes": 8}
    display = Progress(PPOConfig().environment("CartPole-v1"), stop, "panel")
    display.start(Path("run"))
    returns = {"episode_return_mean": math.nan, "episode_return_min": 3.0, "episode_return_max": 41.0}
    lines = lines_of_panel(display, {**returns, "num_episodes": 5}, 120)
    assert "PPO on CartPole-v1" in lines[0]
    assert "iteration 2 time 1.5 s" in lines
    assert "env steps 256 env steps/s 256" in lines
    assert "mean return nan min .. max 3.0 .. 41.0" in lines
    assert [line.partition(" ")[0] for line in lines if "256 of 4,000,000, " in line] == ["num_env_steps"]
    assert [line.partition(" ")[0] for line in lines if line.endswith("no value yet")] == ["episode_return_mean"]
    assert [line.partition(" ")[0] for line in lines if line.endswith("5 of 8")] == ["env_runners/num_episodes"]
    assert f"{PART} 75%" in lines  # parts without a share are left out
    assert f"{PART} takes 75% of the time: see env_runners.num_env_runners" in lines
    assert "run" in lines


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("num_modules", [1, 2, 30])
def test_the_panel_shows_the_returns_of_modules_and_whole_names(num_modules: int, width: int) -> None:
    means = {f"warehouse_robot_{index:02d}": -1000.0 - index for index in range(num_modules)}
    [*_, last] = [f"env_runners/module_episode_return_mean/{name}" for name in means]
    display = Progress(PPOConfig().environment("CartPole-v1"), {last: 3.5}, "panel")
    episodes = dict.fromkeys(("episode_return_mean", "episode_return_min", "episode_return_max"), 0.0)
    lines = lines_of_panel(display, {**episodes, "module_episode_return_mean": means}, width)
    text = " ".join(lines)
    shown = re.findall(r"warehouse_robot_(\d\d) (-\d+\.0)", text.partition(" of the time")[0])
    assert [float(mean) for _, mean in shown] == [-1000.0 - int(number) for number, _ in shown]
    assert ("by module" in text) == (num_modules > 1)
    if num_modules <= 2:
        assert len(shown) == (num_modules if num_modules > 1 else 0)
    else:
        assert 3 <= len(shown) < 30 and f"and {30 - len(shown)} more" in text
    value = f"-{1000 + num_modules - 1:,} of 3.5"
    bar = re.compile(r"[━╸╺ ]")
    assert value in text and last in bar.sub("", text.replace(value, ""))  # the name may take several lines
    assert len(lines) <= 16


@pytest.mark.parametrize("mode", ["lines", "panel"])
def test_the_evaluated_return_is_shown_with_its_interval(
    mode: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results: list[Any] = []
    config = (
        small()
        .evaluation(evaluation_interval=2, evaluation_duration=5)
        .callbacks(on_train_result=lambda result: results.append(result))
    )
    with config.build() as algo:
        algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path / "run", progress=mode)
    assert [result["evaluation"]["fresh"] for result in results] == [False, True, False]
    printed = " ".join(capsys.readouterr().out.split())
    assert "mean return 6.0, evaluated return 6.0" in printed  # 1 + 2 + 3
    assert mode == "lines" or "evaluated return 6.0 95% interval 6.0 .. 6.0" in printed
    log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert log.count("Evaluation with iteration 2: mean return 6.0, 95% interval 6.0 .. 6.0.") == 1
    assert log.count("Evaluation with iteration") == 1


def test_a_round_of_few_episodes_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small().evaluation(evaluation_interval=1, evaluation_duration=2).build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress="panel")
    printed = " ".join(capsys.readouterr().out.split())
    assert "evaluated return 6.0 95% interval none: too few episodes" in printed
    log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert "Evaluation with iteration 1: mean return 6.0, 95% interval none: too few episodes." in log


def test_a_panel_says_that_there_was_no_round_yet() -> None:
    display = Progress(small().evaluation(evaluation_interval=2), {}, "panel")
    with small().evaluation(evaluation_interval=2).build() as algo:
        display.update(algo.train())
    console = Console(file=io.StringIO(), width=100)
    console.print(display._panel())
    assert "no round yet" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_panel_leaves_place_on_its_last_line_for_what_a_terminal_writes_on_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    console = Console(width=70, record=True, file=io.StringIO())
    console.print(Progress(small(), {}, "panel")._panel())
    assert {len(line) for line in console.export_text().splitlines()} == {68}  # and two for ^C


def test_text_of_others_moves_no_cursor_in_the_panel_or_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    forged, shown = "\x1b[2Jx\x9b31m\u202e\ud800", r"\x1b[2Jx\x9b31m\u202e\ud800"
    display = Progress(PPOConfig().environment("CartPole-v1"), {f"env_runners/{forged}": 1})
    display._title = forged
    display.start(Path(forged))
    display._warning.emit(logging.makeLogRecord({"msg": f"warning\n{forged}"}))
    display.update(RESULT)
    display.end("Done")
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"The run is stored in {shown}")
    returns = {"episode_return_mean": 1.0, "episode_return_min": 1.0, "episode_return_max": 1.0}
    display._mode, display._shown_s = "panel", -math.inf
    text = "\n".join(lines_of_panel(display, {**returns, "num_episodes": 5}, 120))
    assert text.count(shown) == 4  # title, criterion, warning and path
    assert text.replace("\n", "").isprintable()


def test_the_panel_is_drawn_again_while_no_result_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.runs.loggers.progress.WAIT_SHOWN_S", 0.2)
    screen = io.StringIO()
    display = Progress(small(), {}, "panel")
    display._console = Console(width=70, file=screen, force_terminal=True)

    def wait_for(text: str) -> None:
        deadline_s = time.monotonic() + 10
        while text not in screen.getvalue():
            assert time.monotonic() < deadline_s, screen.getvalue()
            time.sleep(0.02)

    with display:
        wait_for("no new result for 0 s")
        logging.getLogger("corral").warning("no simulator has connected yet")
        wait_for("latest warning: no simulator has connected yet")
        screen.truncate(screen.seek(0))
        with small().build() as algo:
            display.update(algo.train())
        wait_for("takes")
        wait_for("no new result for 0 s")
        screen.truncate(screen.seek(0))
    assert "takes" in screen.getvalue()
    assert "no new result" not in screen.getvalue()


def test_a_run_without_an_ended_episode_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small().environment(CountingEnv, env_config={"episode_length": 1000})
    with config.build() as algo:
        result = algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run")
    assert math.isnan(result["env_runners"]["episode_return_mean"])
    assert " s, no episode has ended yet: training_iteration=1" in capsys.readouterr().out
    log = (tmp_path / "run" / "run.log").read_text(encoding="utf-8")
    assert "Iteration 1: 32 env steps, no episode has ended yet." in log and "nan" not in log
    display = Progress(config, {}, "panel")
    display.update(result)
    console = Console(file=io.StringIO(), width=100)
    console.print(display._panel())
    assert "none yet" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_that_samples_nothing_speaks_of_no_episode() -> None:
    nan = {"episode_return_mean": math.nan, "num_env_steps_sampled_lifetime": math.nan}
    assert describe_return({"env_runners": nan}) == ""
