"""The machinery of `benchmarks/`: ratios, verdicts, and processes that are ended."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import corral_config
import defaults
import machine
import measuring
import quality
import quality_rows
import report
import run
import runner_groups
import runs_of_seeds
import tuned
from at_least import at_least
from cases import CASES, MAIN, RECORDED_RATIOS, SCRIPTS, select
from corral.algorithms.tuned_settings import tuned_algorithms
from corral.envs.vector import EnvContext
from measuring import Options
from processes import Outcome, run_script
from report import Run
from statistics_of_pairs import bootstrap_interval, ratio_of_pairs, times_faster
from timed_env import EPISODE_STEPS, TimedEnv


def case(name: str):  # type: ignore[no-untyped-def]  # benchmarks/ is no package that mypy knows
    return next(case for case in CASES if case.name == name)


def one(pair: int, system: str, value: float | None, *, capped: bool = False) -> Run:
    return Run(pair, system, value, capped, {}, None if value is not None else "boom")


def test_ratios_say_how_many_times_faster() -> None:
    assert times_faster(20, 10, True) == 2  # a rate
    assert times_faster(10, 20, False) == 2  # a duration
    low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert 1 <= low <= 3 <= high <= 5
    assert ratio_of_pairs([]) is None
    assert ratio_of_pairs([1.0, 2.0, 9.0]).median == 2


def test_misses_and_failures_are_reported_as_such() -> None:
    corral = [one(pair, "corral", 89.0) for pair in range(5)]
    floor = [one(pair, "floor", 100.0) for pair in range(5)]
    rllib = [one(pair, "rllib", 89.0, capped=True) for pair in range(5)]
    _, of_rllib, of_sb3, of_floor = report.rows(case("ppo"), corral + floor + rllib)
    assert (of_floor.ratio, of_floor.budget, of_floor.verdict) == ("0.89 [0.89, 0.89]", ">= 0.9x", "missed")
    assert (of_rllib.ratio[:8], of_sb3.verdict) == ("at least", "not measured")
    assert report.rows(case("ppo"), [one(5, "corral", 200.0), one(5, "floor", 100.0)])[-1].verdict == "met"
    failed = [one(0, "corral", None), *corral[1:]]
    assert [row.verdict for row in report.rows(case("ppo"), failed + floor + rllib)[1:]] == [
        "failed",
        "not measured",
        "failed",
    ]


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ((1.0, 1.2, 1.1), "kept"),
        ((0.9, 0.94, 0.94), "fell"),
        ((0.9, 0.94, 0.96), "kept"),  # the interval reaches 95%
    ],
)
def test_a_ratio_to_a_rival_falls_only_with_its_whole_interval(shares: tuple[float, ...], verdict: str) -> None:
    recorded = RECORDED_RATIOS["sac"]["sb3"]
    runs = [one(pair, "corral", share * recorded) for pair, share in enumerate(shares)]
    runs += [one(pair, "sb3", 1.0) for pair in range(len(shares))]
    row = report.rows(case("sac"), runs)[1]
    assert (row.budget, row.verdict) == (f">= 95% of {recorded:g}x", verdict)


def test_recorded_ratios_are_of_cases_and_rivals() -> None:
    for name, ratios in RECORDED_RATIOS.items():
        assert ratios.keys() <= {*case(name).systems} & {"rllib", "sb3"}, name


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("two_runners_against_one", 1.8, "met"),
        ("two_runners_against_one", 1.79, "missed"),
        ("weight_sync", 14.9, "met"),
        ("weight_sync", 15.0, "missed"),
        ("ray_start", -0.5, "met"),
    ],
)
def test_floors_and_limits_of_our_own_value(name: str, value: float, verdict: str) -> None:
    runs = [one(pair, "corral", value) for pair in range(5)]
    assert report.rows(case(name), runs)[0].verdict == verdict
    assert report.rows(case(name), [*runs, one(5, "corral", None)])[0].verdict == "failed"


def test_results_survive_the_file() -> None:
    result = report.CaseResult("date", "abc1234", "command", False, {}, [one(0, "corral", 1.0), one(0, "sb3", None)])
    assert report.from_json(report.to_json({"ppo": result}))["ppo"].runs == result.runs


def test_each_row_names_the_commit_and_the_clock_of_its_measurement() -> None:
    cpu = Run(0, "corral", 1.0, False, {"clock": "CPU"}, None)
    new = report.CaseResult("date", "abc1234", "command", False, {}, [cpu, one(0, "sb3", 1.0)])
    old = report.CaseResult("date", "0ld0000 with changes", "command", False, {}, [one(0, "corral", 1.0)])
    older = dataclasses.replace(old, commit=machine.UNKNOWN)
    text = report.render({"dqn": new, "weight_sync": old, "process_start": older})
    assert "Measured date in 1 pairs, in CPU seconds, at commit abc1234 by" in text
    assert "Measured date in 1 pairs at commit 0ld0000 with changes by" in text
    assert "| < 15 ms | met | 0ld0000 with changes |" in text
    assert "| SAC at equal hyperparameters | the floor |  | >= 0.9x | not measured |  |" in text
    # Without git the commit is not known: the section names none, and the table of budgets has no row.
    assert "Measured date in 1 pairs by" in text and "unknown" not in text
    assert "| Start of two process runners | itself |" not in text


def test_a_commit_is_named_with_the_changes_to_what_is_measured(tmp_path: Path) -> None:
    assert machine.measured_commit(tmp_path) == "unknown"  # as in an archive of the sources

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "src").mkdir()
    source = tmp_path / "src" / "a.py"
    source.write_text("1")
    git("add", ".")
    git("commit", "-m", "a")
    commit = machine.measured_commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    (tmp_path / "RESULTS.md").write_text("1")
    assert machine.measured_commit(tmp_path) == commit
    source.write_text("2")
    assert machine.measured_commit(tmp_path) == f"{commit} with changes"


def test_the_main_measures_are_fifteen_and_take_two_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--main"])
    arguments = run._parse()
    assert [case.name for case in arguments.cases] == [case.name for case in CASES if case.name in MAIN]
    assert (len(arguments.cases), arguments.pairs, arguments.out.name) == (15, 2, "RESULTS.md")


def test_cpu_seconds_count_the_processes_that_a_script_started(tmp_path: Path) -> None:
    work = "import time\nwhile time.process_time() < 0.5: pass"
    ended = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    outcome = run_script([sys.executable, "-c", f"{ended}; print({{}})"], 60.0, tmp_path)
    assert outcome.cpu_seconds is not None and outcome.cpu_seconds >= 0.5, outcome.error
    assert run.to_run(case("time_to_450"), 0, "sb3", dataclasses.replace(outcome, line={"reached": False})) == Run(
        0, "sb3", outcome.cpu_seconds, True, {"reached": False, **times_of(outcome)}, None
    )


def times_of(outcome: Outcome) -> dict[str, Any]:
    return {"clock": "CPU", "cpu_seconds": outcome.cpu_seconds, "wall_seconds": outcome.wall_seconds}


def test_selection_and_rotation() -> None:
    assert [case.name for case in select("sampling,ppo")] == ["sampling_1", "sampling_8", "sampling_64", "ppo"]
    with pytest.raises(ValueError, match="nope"):
        select("nope")
    assert run.rotated(("a", "b", "c"), 4) == ("b", "c", "a")


def is_alive(pid: int) -> bool:
    """Say whether a process still runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_script_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, time; "
        f"child = subprocess.Popen(['sleep', '600'], process_group=0); open({str(tmp_path / 'pid')!r}, 'w')"
        ".write(str(child.pid)); time.sleep(600)"
    )
    outcome = run_script([sys.executable, "-c", code], 2.0, tmp_path)
    assert outcome.line is None
    assert "killed after 2" in outcome.error
    child, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline:  # a kill is delivered in its own time
        time.sleep(0.01)
    assert not is_alive(child)


def test_a_script_that_fails_says_how(tmp_path: Path) -> None:
    outcome = run_script([sys.executable, "-c", "raise SystemExit('out of luck')"], 20.0, tmp_path)
    assert outcome.line is None
    assert "out of luck" in outcome.error


def test_the_report_shows_every_case() -> None:
    results = {
        case.name: report.CaseResult(
            "date", "abc1234", "command", False, {}, [one(0, system, 0.5) for system in case.systems]
        )
        for case in CASES
    }
    text = report.render(results)
    assert all(f"\n## {case.title}\n" in text for case in CASES)
    assert "| One `log_value` | itself | 0.500 (0.500 to 0.500) | < 1 us/call | met | abc1234 |" in text
    assert (
        "| Two process runners against one | itself | 0.50 (0.50 to 0.50) | >= 1.8 times | missed | abc1234 |" in text
    )
    assert "| Start of two process runners | itself | 0.50 (0.50 to 0.50) | < 4 s | met | abc1234 |" in text
    assert (
        "| An `on_episode_step` that logs one value, 64 envs | RLlib | 1.00 [1.00, 1.00] | >= 95% of 16.32x | fell | "
        "abc1234 |"
    ) in text
    assert "| PPO at equal hyperparameters | the floor | 1.00 [1.00, 1.00] | >= 0.9x | met | abc1234 |" in text


@pytest.mark.parametrize("script", ["corral_side.py", "floor_side.py", "bare_loop.py"])
def test_the_number_of_threads_is_set_before_numpy_is_imported(script: str) -> None:
    """NumPy took a thread per core in all measures of Corral, because one of their modules imported it too early."""
    code = f"import sys, {Path(script).stem}; print(*{{'numpy', 'torch'}} & {{*sys.modules}})"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(run.__file__).parent, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []


def test_every_measure_is_known_to_its_scripts() -> None:
    for measured in CASES:
        for system in measured.systems:
            assert f'"{measured.measure}": ' in (Path(report.__file__).parent / SCRIPTS[system]).read_text()
    assert [case.name for case in select("sampling")] == ["sampling_1", "sampling_8", "sampling_64"]


def test_relative_rate_compares_the_env_steps_of_the_same_time() -> None:
    clock = 0.0
    calls: list[str] = []

    def sampler(name: str, steps: int) -> Callable[[], int]:
        def sample() -> int:
            nonlocal clock
            clock += 2.0
            calls.append(name)
            return steps

        return sample

    fields = measuring.relative_rate(
        sampler("two", 30), sampler("one", 20), Options(1, 20.0, 0, 0.0), clock=lambda: clock
    )
    assert fields["times"] == pytest.approx(1.5)
    assert fields["turns"] == 5  # of 4 seconds each
    assert calls[2:] == ["two", "one", "one", "two", "two", "one", "one", "two", "two", "one"]


def test_a_script_gets_the_engine_of_its_case() -> None:
    code = (
        "import measuring; measuring.run_measure('corral', {'group_ppo': lambda options: {'engine': options.engine}})"
    )
    for engine in ("process", "ray"):
        arguments = case(f"two_runners_{engine}_ppo").arguments(0, quick=True)
        outcome = run_script([sys.executable, "-c", code, *arguments], 20.0, Path(measuring.__file__).parent)
        assert outcome.line is not None and outcome.line["engine"] == engine, outcome.error


def test_the_timed_env_is_slow_in_one_runner_only() -> None:
    settings = {"step_s": 1e-6, "spins": True, "slow_runner": 2}
    envs = [TimedEnv(EnvContext(settings, worker_index=index)) for index in (1, 2)]
    assert envs[1].step_s == pytest.approx(10 * envs[0].step_s)
    assert [int(env.reset()[0][0]) for env in envs] == [1, 2]
    ends = [envs[0].step(0)[2:4] for _ in range(EPISODE_STEPS)]
    assert ends == [*[(False, False)] * (EPISODE_STEPS - 1), (False, True)]


def test_rounds_are_counted_by_runner() -> None:
    config = corral_config.config(Options(1, 0.0, 0, 0.0), num_envs=1).env_runners(num_env_runners=3).engine("local")
    config.environment(TimedEnv, env_config={"step_s": 0.0, "spins": True}).env_runners(straggler_factor=None)
    steps = {1: 0, 2: 0, 3: 0}
    with runner_groups._group(config) as group:
        sample = runner_groups._sampler(group, 30)
        taken: list[int] = []

        def sample_and_note() -> list[Any]:
            rollouts = sample()
            taken.append(sum(rollout.num_env_steps for rollout in rollouts))
            return rollouts

        runner_groups._count_rounds(sample_and_note, steps)
    assert steps == dict.fromkeys((1, 2, 3), 10 * runner_groups.STRAGGLER_ROUNDS)
    assert taken == [30] * (1 + runner_groups.STRAGGLER_ROUNDS)  # the first one is not counted


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([500, 500, 500], [400, 450, 420], "better, 1.00"),
        ([400, 450, 420], [500, 500, 500], "below, 0.00"),
        ([400, 500, 450], [455, 480, 470], "as good, 0.33"),  # 500 is above all three, and the others below
        ([-400, -450, -420], [-500, -500, -500], "better, 1.00"),
        ([500, 500, 500], [500, 500, 500], "as good, 0.50"),
    ],
)
def test_defaults_are_compared_by_the_probability_of_a_higher_return(
    ours: list[float], theirs: list[float], verdict: str
) -> None:
    assert runs_of_seeds.judge(ours, theirs) == verdict


def test_a_row_without_all_its_seeds_has_no_verdict() -> None:
    env = "LunarLanderContinuous-v3"
    fields = {"algo": "SAC", "env": env, "training_return": 1.0, "greedy_return": 2.0, "cpu_seconds": 3.0}
    runs = [{**fields, "library": library, "seed": seed} for library in defaults.LIBRARIES for seed in range(6)]
    assert f"| {env} | 20,000 | 1 (1, 1, 1, 1, 1, 1) |" in defaults.render(runs)
    assert "as good, 0.50 |" in defaults.render(runs)
    assert "5 of 6 seeds |" in defaults.render(runs[:-1])


def test_the_table_of_tuned_settings_names_every_setting_and_says_what_was_not_measured() -> None:
    runs = [
        {"algo": algo, "env": "Pendulum-v1", "greedy_return": -100.0 - 10 * seed, "cpu_seconds": 5.0 + seed}
        for algo, num_seeds in {"PPO": 5, "SAC": 2, "TD3": 1}.items()
        for seed in range(num_seeds)
    ]
    lines = tuned.render(runs).splitlines()
    rows = {(line.split()[1], line.split("|")[1].strip()): line for line in with_headings(lines)}
    online = tuned.ZOO.keys()
    assert {*rows} == {(algo, env) for env, algos in tuned_algorithms().items() for algo in algos if algo in online}
    ppo, sac, td3 = (rows[algo, "Pendulum-v1"] for algo in ("PPO", "SAC", "TD3"))
    each = "-100.0, -110.0, -120.0, -130.0, -140.0"
    assert ppo.endswith(f"| Pendulum-v1 | 100,000 | -120.0 (-133.3 to -103.3) | {each} | -172.2 (100,000) | 7 |")
    assert "| -105.0, 2 of 5 seeds | -100.0, -110.0 |" in sac
    assert "| -100.0, 1 of 5 seeds | -100.0 |" in td3
    assert rows["SAC", "Hopper-v5"].endswith("| Hopper-v5 | 1,000,000 | not measured |  | 2,325.5 (1,000,000) |  |")


def with_headings(lines: list[str]) -> list[str]:
    """Return the rows of tables, each after the heading of its section."""
    found, heading = [], ""
    for line in lines:
        heading = line if line.startswith("## ") else heading
        if line.startswith("| ") and not line.startswith(("| Env |", "| ---")):
            found.append(f"{heading} {line}")
    return found


def test_the_table_of_tuned_settings_in_the_documentation_is_the_one_of_the_runs() -> None:
    runs = json.loads(tuned.RUNS_FILE.read_text())
    assert {run["settings"] for run in runs} <= {tuned.fingerprint(run["algo"], run["env"]) for run in runs}
    assert tuned.TABLE_FILE.read_text() == tuned.render(runs)


def quality_run(row: str, seed: int, points: list[list[float]], **fields: Any) -> dict[str, Any]:
    return {"env": "Pendulum-v1", "row": row, "seed": seed, "version": "1", "commit": "", "points": points, **fields}


def test_the_leaderboard_sorts_rows_by_the_steps_to_the_return() -> None:
    fast, slow, never = [[500, 9, -900], [1000, 18, -150]], [[500, 9, -900], [2000, 40, -150]], [[500, 9, -900]]
    courses = {"Corral SAC": [fast, slow, slow, slow, slow], "SB3 SAC": [slow, never, never, never, never]}
    runs = [
        quality_run(row, seed, points, day="2026-11-27")
        for row, each in courses.items()
        for seed, points in enumerate(each)
    ]
    runs.append(quality_run("Corral TQC", 0, fast, day="2026-11-27"))
    runs[0] |= {"commit": "abcd1234", "day": "2026-11-28"}
    page = quality.render(runs)
    table = page[page.index("## Pendulum-v1") : page.index("## Settings")].splitlines()[4:]
    assert table[0] == "| Corral SAC | 5 of 5 | 2,000 | 40 | -150 (-150 to -150) | -150 | abcd1234 | 2026-11-28 |"
    assert table[1].startswith("| SB3 SAC | 1 of 5 | later | later | -900 (")
    assert len(table) == 2 + 1 and "TQC" not in page  # a row of which seeds are missing is not listed
    assert "CartPole" not in page and "- SB3 SAC: nothing.\n" in page


def test_a_run_of_the_leaderboard_is_measured_again_when_its_row_changed() -> None:
    task, row = quality_rows.TASKS["Pendulum-v1"], quality_rows.Row("Mine", "corral", "SAC", {"training.lr": 1e-3})
    same = dataclasses.replace(task, threshold=-100.0)
    assert quality.fingerprint(task, row) == quality.fingerprint(same, row)
    for other in (dataclasses.replace(row, settings={}), dataclasses.replace(row, library="sb3")):
        assert quality.fingerprint(task, other) != quality.fingerprint(task, row)
    assert quality.fingerprint(dataclasses.replace(task, num_steps=9), row) != quality.fingerprint(task, row)


def test_a_row_of_the_leaderboard_learns_and_is_evaluated_on_the_way(tmp_path: Path) -> None:
    script = Path(quality.__file__).with_name("quality_side.py")
    code = (
        "import runpy, sys, quality_rows\n"
        "quality_rows.TASKS['CartPole-v1'] = quality_rows.Task(475.0, 4000, 2000)\n"
        f"sys.argv = ['quality_side.py', 'CartPole-v1', 'Corral PPO', '--seed', '3']\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    steps, seconds, returns = zip(*found["points"], strict=True)
    assert [step // 2000 for step in steps] == [1, 2] and 0 < seconds[0] < seconds[1]
    assert all(9 <= value <= 500 for value in at_least(1, returns)) and found["row"] == "Corral PPO"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda each: each.name)
def test_an_interrupted_table_keeps_what_is_done_and_leaves_no_training(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import json, os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it\n"
        "from pathlib import Path\n"
        "from processes import run_script\n"
        "from runs_of_seeds import add_runs\n"
        "here = Path.cwd()\n"
        "def train(name):\n"
        "    sleep = 'time.sleep(600);' * (name != 'quick')\n"
        "    script = f'import os, time; open({name!r}, \"w\").write(str(os.getpid())); {sleep} print({{}})'\n"
        "    outcome = run_script([sys.executable, '-c', script], 600.0, here)\n"
        "    return {'name': name} if outcome.line is not None else {'error': outcome.error}\n"
        "runs = []\n"
        "def keep():\n"
        "    (here / 'runs').write_text(json.dumps(runs))\n"
        "add_runs(train, [('quick',), ('one',), ('two',), ('three',)], 2, runs, keep)\n"
    )
    paths = [str(Path(measuring.__file__).parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stderr=subprocess.DEVNULL,
    )
    names, deadline = ("one", "two"), time.monotonic() + 60

    def pid_of(name: str) -> int:
        return int((tmp_path / name).read_text())

    while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in (*names, "runs")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    assert all(is_alive(pid_of(name)) for name in names)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert not any(is_alive(pid_of(name)) for name in names)
    assert not (tmp_path / "three").exists()
    assert json.loads((tmp_path / "runs").read_text()) == [{"name": "quick"}]
