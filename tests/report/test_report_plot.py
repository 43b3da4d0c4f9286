"""`corral plot`: pictures of one number."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from corral.core.intervals import t_interval
from corral.errors import ConfigError
from corral.tools.cli.main import main
from corral.tools.report import write_plot
from written_runs import config, result, write_run

pytest.importorskip("matplotlib")


def test_a_picture_shows_the_runs(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"seed-{seed}", [1.0, 2.0 + seed], settings=config(seed))
    write_run(tmp_path / "dqn", [4.0], settings=config(algo="DQN"))
    svg = write_plot(tmp_path, tmp_path / "curves.svg").read_text(encoding="utf-8")
    for text in ("DQN CartPole-v1", "PPO CartPole-v1, 2 runs", "env steps", "episode_return_mean"):
        assert f"<!-- {text} -->" in svg  # matplotlib draws letters as paths, and names the text
    png = write_plot(tmp_path, tmp_path / "curves.png", x="time", y="learners/default_policy/total_loss")
    with Image.open(png) as image:
        assert image.size == (1050, 630)
        colors = {tuple(color) for _, color in image.convert("RGB").getcolors(2**20) or ()}
    assert {(0, 0x72, 0xB2), (0xD5, 0x5E, 0)} <= colors


def drawn(svg: str, end: str) -> list[tuple[float, float]]:
    """Return the points of the path that is followed by a text, in the units of the picture, upwards."""
    [path] = re.findall(rf'<path d="([^"]*)"[^>]*{end}', svg)
    return [(float(x), -float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]


def test_the_line_is_the_mean_and_the_area_its_interval(tmp_path: Path) -> None:
    returns = [[1.0, 3.0, 2.0, 8.0, 9.0], [2.0, 5.0, 6.0, 7.0, 3.0], [4.0, 4.0]]
    for seed, found in enumerate(returns):
        write_run(tmp_path / str(seed), found, settings=config(seed))
    svg = write_plot(tmp_path, tmp_path / "curves.svg").read_text(encoding="utf-8")
    solid = drawn(svg, "clip-path[^>]*fill: none; stroke: #0072b2")  # the line of the legend is not clipped
    dotted = drawn(svg, "clip-path[^>]*stroke-dasharray[^>]*stroke: #0072b2")
    # The third run keeps its last value for one result more; then two runs are left, without an interval.
    values = np.array([[1, 2, 4], [3, 5, 4], [2, 6, 4]], float)
    means = [*values.mean(axis=1), 7.5, 6.0]
    scale, start = np.polyfit(means, [y for _, y in dotted], 1)
    np.testing.assert_allclose(([y for _, y in dotted] - start) / scale, means, atol=1e-3)
    np.testing.assert_allclose(np.diff([x for x, _ in dotted], 2), 0, atol=1e-3)  # at equal distances
    assert solid == dotted[:3]
    low, high = t_interval(values.T)
    area = svg[svg.index("FillBetween") :].partition("</defs>")[0]
    height = float(re.findall(r'<use [^>]* y="([\d.]+)" style="fill: #0072b2', svg)[0])  # from which the area is placed
    corners = [(-float(y) - height - start) / scale for y in re.findall(r"[ML] \S+ (\S+)", area)]
    np.testing.assert_allclose([min(corners), max(corners)], [low.min(), high.max()], atol=1e-3)
    for end in (*low, *high):
        assert min(abs(corner - end) for corner in corners) < 1e-3


def test_each_env_has_axes_with_a_scale_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.0, 1.0], settings=config())
    write_run(tmp_path / "b", [0.0, -1000.0], settings=config(env="Pendulum-v1"))
    svg = write_plot(tmp_path, tmp_path / "curves.svg").read_text(encoding="utf-8")
    for title in ("CartPole-v1", "Pendulum-v1"):
        assert f"<!-- {title} -->" in svg
    rising, falling = (drawn(svg, f"clip-path[^>]*fill: none; stroke: {color}") for color in ("#0072b2", "#d55e00"))
    assert rising[1][1] - rising[0][1] == pytest.approx(falling[0][1] - falling[1][1], rel=1e-3)
    assert min(y for _, y in rising) > max(y for _, y in falling)  # one below the other


def test_the_x_axis_is_env_steps_or_seconds(tmp_path: Path) -> None:
    rows = [result(iteration, 1.0, steps=100, seconds=7000.0) for iteration in range(1, 6)]
    run = write_run(tmp_path / "run", results=rows)
    for x, title, last in (("steps", "env steps", "500"), ("time", "seconds", "35000")):
        svg = write_plot(run, tmp_path / f"{x}.svg", x=x).read_text(encoding="utf-8")
        assert re.search(rf"<!-- [^>]*{title}[^>]* -->", svg)
        assert f"<!-- {last} -->" in svg


def test_runs_with_the_same_seed_are_named_in_the_label(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        write_run(tmp_path / name, settings=config(seed))
    svg = write_plot(tmp_path, tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "<!-- PPO CartPole-v1, 3 runs (several with seed 0) -->" in svg


def test_runs_without_results_are_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have no results yet"):
        write_plot(write_run(tmp_path / "run", results=[]), tmp_path / "curves.svg")


def test_the_same_runs_give_the_same_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0, 2.0])
    first, second = (write_plot(run, tmp_path / f"{name}.png").read_bytes() for name in "ab")
    assert first == second


def test_a_run_without_values_is_drawn_without_a_line(tmp_path: Path) -> None:
    write_run(tmp_path / "nan", results=[result(1, None)], settings=config(algo="SAC"))
    write_run(tmp_path / "one", [1.0])
    svg = write_plot(tmp_path, tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "<!-- SAC CartPole-v1: no values -->" in svg
    with Image.open(write_plot(tmp_path / "nan", tmp_path / "nan.png")) as image:
        assert image.size == (1050, 630)


def test_strange_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    for name in ("_hidden", "$x^", "a\udce4"):
        (write_run(tmp_path / name) / "config.yaml").unlink()
    svg = write_plot(tmp_path, tmp_path / "curves.svg").read_text(encoding="utf-8")
    for text in (" _hidden", "$x^", "a?"):
        assert f"<!-- {text} -->" in svg.replace("\\$", "$")


def test_the_command_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "run"]) == 0
    assert capsys.readouterr().out == "The picture is stored in curves.png\n"
    assert main(["plot", "run", "--y", "episode_retrun_mean"]) == 2
    assert "Did you mean 'env_runners/episode_return_mean'?" in capsys.readouterr().err
    assert main(["plot", "run", "-o", "curves.bmp"]) == 2
    assert "curves.bmp: the name of a picture ends with .png, .svg or .pdf" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"x='iterations': use 'steps' or 'time'"):
        write_plot("run", x="iterations")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'corral\[report\]'"):
        write_plot(write_run(tmp_path / "run"), tmp_path / "curves.png")
