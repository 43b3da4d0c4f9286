"""What the README and the documentation say is so."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import (
    PAGES,
    README,
    ROOT,
    Command,
    anchors,
    blocks,
    commands,
    first_column,
    links,
    named_paths,
    output_problem,
    page_id,
    page_module,
    paragraphs,
    repeated_sentences,
    run_block,
    run_blocks,
)
from walk import LIMIT_S, FailedError, Reader, in_a_shell, not_run, span_commands, steps

import corral
import warm
from at_least import at_least
from console_script import corral_command
from corral import Algorithm, AlgorithmConfig, PPOConfig, make_multi_agent
from corral.algorithms import registry
from corral.algorithms.registry import config_from_dict
from corral.algorithms.stopping import flat_result
from corral.core.metrics.timers import PARTS
from corral.engines.local import LocalEngine
from corral.tools.cli.experiment import read_experiment
from corral.tools.cli.main import make_parser
from corral.tools.playing.play import play_episodes
from corral.tools.search.settings import make_search

DOCS = ROOT / "docs"
METRICS, PPO, CALLBACKS = DOCS / "metrics.md", DOCS / "algorithms" / "ppo.md", DOCS / "callbacks.md"
LEARNER = "learners/default_policy/"
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"  # written by `make bench`


# Pages whose blocks start many processes, or train for long.
LONG = {
    "README.md",
    "docs/getting-started.md",
    "docs/fault-tolerance.md",
    "docs/engines.md",
    "docs/checkpoints.md",
    "docs/tensor-envs.md",
    "docs/save-resume-deploy.md",
    "docs/index.md",  # the code of the README
    "docs/learners.md",
    "docs/multi-agent.md",
    "docs/from-data-to-env.md",
    "docs/off-policy-evaluation.md",
    "docs/recorded-data.md",
    "docs/asynchronous-sampling.md",
    "docs/replay.md",
    "docs/atari-mujoco-envpool.md",
    "docs/metrics.md",
    "docs/algorithms/appo.md",
    "docs/algorithms/td3.md",
    "docs/algorithms/sac.md",
    "docs/algorithms/dqn.md",
    "docs/memory.md",
    "docs/write-an-algorithm.md",
    "docs/algorithms/bc.md",
    "docs/algorithms/cql.md",
    "docs/algorithms/crossq.md",
    "docs/algorithms/impala.md",
    "docs/algorithms/iql.md",
    "docs/algorithms/marwil.md",
    "docs/algorithms/tqc.md",
    "docs/exploration.md",
}


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=page_id(page)) for page in PAGES if any(b.language == language for b in blocks(page))]


def pages_to_run() -> list[Any]:
    names = {page_id(page) for page in PAGES}
    assert names >= LONG
    return [
        pytest.param(*page.values, id=page.id, marks=[pytest.mark.slow] if page.id in LONG else [])
        for page in pages_with("python")
    ]


@pytest.mark.parametrize("page", pages_to_run())
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))  # removed at the end
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))  # pages register algorithms
    for block, printed, shown in run_blocks(page):
        problem = output_problem(block, printed, shown)
        assert problem is None, f"{page_id(page)}:{block.line} {problem}"


class TrainedError(BaseException):
    """A block has trained for one iteration, and the test has seen enough."""


@pytest.mark.parametrize("page", sorted(LONG))
def test_the_first_block_of_a_long_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the README, all blocks, for one iteration each; runners and learners are in this process.

    An iteration has one pass over a batch, or two hundred env steps. The slow test above has all.
    """
    train, begin = Algorithm.train, Algorithm._begin
    num_iterations = 0

    def begin_small(self: Algorithm, config: AlgorithmConfig) -> None:
        given = {"num_epochs": 1, "min_sample_timesteps_per_iteration": 200}
        names = {name for name in given if (getattr(config, name, 0) or 0) > given[name]}
        begin(self, config.copy(**{name: given[name] for name in names}))

    def train_once(self: Algorithm) -> Any:
        nonlocal num_iterations
        num_iterations += 1
        if num_iterations > 1:
            raise TrainedError
        return train(self)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(Algorithm, "train", train_once)
    monkeypatch.setattr(Algorithm, "_begin", begin_small)
    module = page_module()
    to_run = at_least(1, (block for block in blocks(ROOT / page) if block.language == "python" and not block.no_run()))
    for block in to_run if page == "README.md" else to_run[:1]:
        num_iterations = 0
        # A worker that is killed, and learners that wait for each other, must be other processes than this one.
        if not {"os.kill", "num_learners"} & {*re.findall(r"[\w.]+", block.text)}:
            monkeypatch.setattr("corral.engines.process.ProcessEngine", LocalEngine)
        with contextlib.suppress(TrainedError):
            run_block(block, ROOT / page, module)


def first_commands() -> list[Any]:
    """Return the first command of each page that is run here, once."""
    found: dict[str, str] = {}
    for page in PAGES:
        commands_here = [step for _, step, _ in steps(page) if isinstance(step, Command) and not not_run(step)]

        first = next((command.text for command in commands_here if command.text.split()[0] not in ("pip", "cd")), None)
        if first is not None:
            found.setdefault(first, page_id(page))
    return [pytest.param(page, command, id=page) for command, page in found.items()]


SHORT = {
    "corral (?:train|serve)": "--stop training_iteration=1",
    "corral search(?!.*--resume)": "--stop training_iteration=2",  # the page's evaluation is in each second one
    "corral evaluate(?!.*--data)": "--episodes 2",
    "corral evaluate(?=.*--data)": "--gradient-steps 10",
    "corral play": "--episodes 1",
}
"""What ends the first commands of pages early."""


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for runs and data that pages take for granted."""
    return tmp_path_factory.mktemp("given")


def run_warm(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command line in a process that has torch, where no shell is needed."""
    program, *arguments = shlex.split(command, comments=True)
    of_corral = program == "corral" or (program, arguments[:1]) == ("python", ["-m"])
    if not of_corral or re.search(r"[|&;<>$*~`]", command):
        return in_a_shell(command, folder, environment)
    line = corral_command(*arguments) if program == "corral" else [sys.executable, *arguments]
    done = warm.run(line, cwd=folder, env=environment, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr


# A search has dozens of processes, Ray takes long to start, and a window plays in real time.
@pytest.mark.slow_cases("search", "write-an-algorithm", "examples.md", "memory")
@pytest.mark.parametrize(("page", "command"), first_commands())
def test_the_first_command_of_a_page_works(page: str, command: str, given: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path, Path(sysconfig.get_path("scripts")), given, SHORT, run_warm)
    reader.run(command)
    reader.leave()


def test_the_page_for_users_of_stable_baselines3_loads_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests" / "policies" / "sb3_samples" / "ppo_cartpole.zip", "cartpole.zip")
    shown = [block.text for block in blocks(DOCS / "from-stable-baselines3.md") if "from_sb3(" in block.text]
    assert len(shown) == 1
    exec(shown[0], {})


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_yaml_blocks_are_experiments(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            (tmp_path / "block.yaml").write_text(block.text, encoding="utf-8")
            settings = read_experiment(tmp_path / "block.yaml")
            stop, search = settings.pop("stop"), settings.pop("search", None)
            assert stop
            config = config_from_dict(settings)
            config.validate()
            if search is not None:
                make_search(config, stop, search)


def test_corral_lines_parse(capsys: pytest.CaptureFixture[str]) -> None:
    refused = []
    for page in PAGES:
        for line in commands(page, "corral"):
            try:
                make_parser().parse_args(shlex.split(line, comments=True)[1:])
            except SystemExit as end:
                message = capsys.readouterr().err
                if end.code != 0:  # --help and --version end with 0
                    refused.append(f"{page_id(page)}: {line}: {message}")
    assert not refused, "\n".join(refused)


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = [(page_id(page), shlex.split(line, comments=True)[1]) for page in PAGES for line in commands(page, "make")]
    unknown = [f"{page}: make {target}" for page, target in named if target not in targets]
    assert not unknown, "\n".join(unknown)


MARKED = """
<!-- no-run 2: asks for a key -->
```sh
true  # `corral events`
wandb login
corral train --algo PPO \\
    --env CartPole-v1
```
Read `corral train` and `corral evaluate RUN`, or in a clone

    make test

<!-- only-walk: needs a server -->
```python title="my_envs.py"
import gymnasium
```
"""


def test_what_a_page_does_not_run_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(MARKED, encoding="utf-8")
    shell, python = blocks(tmp_path / "page.md")
    assert shell.commands() == [
        Command("true  # `corral events`"),
        Command("wandb login", "asks for a key"),
        Command("corral train --algo PPO      --env CartPole-v1"),
    ]
    assert (python.title, python.no_run(), python.no_run(walk=True)) == ("my_envs.py", "needs a server", None)
    found = [(command.text, not_run(command)) for command in span_commands(python.before)]
    assert found == [("corral evaluate RUN", None), ("make test", "in a clone")]
    bare = [page_id(page) for page in PAGES if re.search(r"<!-- (no-run|only-walk)[\d, ]*-->", page.read_text("utf-8"))]
    assert not bare, f"write why a block is not run: {bare}"


def test_a_command_that_fails_is_seen(tmp_path: Path) -> None:
    reader = Reader(tmp_path, tmp_path, tmp_path, {"seq 2": "&& false"})
    assert reader.run("echo 1") == "1\n"
    for command in ("seq 2", "echo corral 0.2 does not provide the extra no", "no_such_command"):
        with pytest.raises(FailedError):
            reader.run(command)


def test_commands_are_found() -> None:
    assert len(commands(README, "corral")) >= 2
    assert {"make train", "make test"} <= {line.partition("  ")[0] for line in commands(README, "make")}


def test_relative_links_resolve() -> None:
    broken = []
    for page in TEXTS:
        for target in links(page):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if file == RESULTS:
                continue
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page_id(page)}: {target}")
    assert not broken, "\n".join(broken)


def test_paths_that_pages_name_exist() -> None:
    tests = {name for file in ROOT.glob("tests/**/*.py") for name in re.findall(r"\bdef (test_\w+)", file.read_text())}
    places, pages = (ROOT, ROOT / "src/corral", ROOT / "examples"), [*TEXTS, *(ROOT / "benchmarks").glob("*.md")]
    named = [(page, path) for page in pages for path in named_paths(page)]
    assert len(named) > 100
    missing = [
        f"{page_id(page)}: {path}"
        for page, path in named
        if path not in tests and not any(list(place.glob(path.rstrip("/"))) for place in places)
    ]
    assert not missing, "\n".join(missing)


def test_no_sentence_stands_twice_on_a_page() -> None:
    written = [page for page in TEXTS if "reference" not in page.parts]  # the reference has what docstrings say
    found = [f"{page_id(page)}: {sentence}" for page in written for sentence in repeated_sentences(page)]
    assert not found, "\n".join(found)


def test_paragraphs_are_whole() -> None:
    ends = (".", ":", "?", "!", ")", "`", "*", "}", ";", ",")
    begins_low = re.compile(r"[\w`)]{3}[.?!] (?!macOS|mp4|sb3)[a-z]")  # the rest of a sentence that was cut
    cut = [
        f"{page_id(page)}: {text}"
        for page in TEXTS
        for text in paragraphs(page)
        if not text.endswith(ends) or begins_low.search(text)
    ]
    assert not cut, "\n".join(cut)


def test_building_blocks_take_three_imports_and_25_lines_from_env_to_update() -> None:
    page = blocks(DOCS / "write-an-algorithm.md")
    first = next(block for block in page if "runner = EnvRunner(" in block.text)
    lines = [line for line in first.text.splitlines() if line.strip()]
    assert sum(line.startswith(("import ", "from ")) for line in lines) <= 3
    assert len(lines) <= 25


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    config = PPOConfig().environment("CartPole-v1").training(train_batch_size_per_learner=256, num_epochs=1)
    with config.build() as algo:
        return algo.train()


def small(algorithm: str, **training: Any) -> Any:
    """Return the config of an iteration of 64 steps."""
    config = config_from_dict({"algo": algorithm}).environment("CartPole-v1").debugging(seed=0)
    config.rl_module(model_config={"fcnet_hiddens": [8]}).reporting(
        min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=64
    )
    return config.training(train_batch_size_per_learner=64, **training).env_runners(num_envs_per_env_runner=2)


def test_each_key_of_a_result_is_on_a_page(result: dict[str, Any]) -> None:
    agents = small("PPO").environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    agents.multi_agent(policies={"p", "q"}, policy_mapping_fn=lambda agent_id, episode: "pq"[int(agent_id)])
    configs = [agents, *(small(name).env_runners(num_env_runners=1).engine("local") for name in ("PPO", "APPO"))]
    configs += [small("PPO").exploration(exploration_config={"type": kind}) for kind in ("Curiosity", "RND", "RE3")]
    keys = {*flat_result(result)}
    for config in configs:
        with config.build() as algo:
            keys |= {*flat_result(algo.train())}
    for name in registry.ALGORITHMS:
        cls = registry.config_class(name)().algo_class
        keys |= {f"{LEARNER}{metric}" for metric in cls.METRICS}
    assert len(keys) > 150
    written = [page for page in PAGES if "reference" not in page.parts]
    words = {word for page in written for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))}
    ids = {"p", "q", "0", "1", "default_policy", "__all_modules__"}
    missing = {
        key for key in keys for word in [next(w for w in key.split("/")[::-1] if w not in ids)] if word not in words
    }
    assert not missing, sorted(missing)


def test_result_keys_match_the_page(result: dict[str, Any]) -> None:
    keys = {key for key in flat_result(result) if not key.startswith(LEARNER)}
    listed = first_column(METRICS, "Result keys")
    assert len(listed) == len(set(listed))
    assert set(listed) == {*keys, "config", "early_means", f"{LEARNER}*"}


def test_evaluation_keys_match_the_page() -> None:
    config = PPOConfig().environment("CartPole-v1").training(train_batch_size_per_learner=256, num_epochs=1)
    with config.evaluation(evaluation_interval=2).build() as algo:
        results = [flat_result(algo.train()["evaluation"], "evaluation/") for _ in range(2)]
    listed = first_column(DOCS / "evaluation.md", "Result")
    assert sorted(listed) == sorted(results[0]) == sorted(results[1])


def test_ppo_metrics_match_the_page() -> None:
    config = PPOConfig().environment("CartPole-v1").training(train_batch_size_per_learner=256, num_epochs=1)
    with config.training(kl_coeff=0.2, kl_target=0.01, vf_loss_clip=10.0).build() as algo:
        result = algo.train()
    listed = first_column(PPO, "Metrics")
    assert sorted(listed) == sorted(result["learners"]["default_policy"])


@pytest.mark.parametrize("name", ["DQN", "SAC", "TD3"])
def test_metrics_from_a_buffer_match_the_page(name: str) -> None:
    text = (DOCS / "algorithms" / f"{name.lower()}.md").read_text(encoding="utf-8")
    section = re.split(r"^#+ ", re.split(r"^#+ Metrics$", text, flags=re.MULTILINE)[1], flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, flags=re.MULTILINE)
    listed = [metric for cell in cells for metric in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(getattr(corral, name).METRICS)


def test_bottleneck_settings_match_the_page() -> None:
    text = METRICS.read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|$", text, flags=re.MULTILINE)) == PARTS


def test_examples_match_the_page() -> None:
    assert sorted(first_column(CALLBACKS, "Examples")) == sorted(
        p.name for p in (ROOT / "examples/callbacks").glob("*.py")
    )


def test_examples_of_search_match_the_page() -> None:
    examples = ROOT / "examples"
    files = [*(examples / "tune").glob("*.py"), *examples.glob("search_*.py")]
    assert sorted(first_column(DOCS / "tune.md", "Examples")) == sorted(
        file.relative_to(examples).as_posix() for file in files
    )


def test_examples_of_algorithms_match_the_page() -> None:
    files = [path.name for path in (ROOT / "examples/algorithms").glob("*.py")]
    assert sorted(first_column(DOCS / "write-an-algorithm.md", "Examples")) == sorted(files)


def test_implementation_details_are_numbered_in_turn() -> None:
    for page in sorted((DOCS / "algorithms").glob("*.md")):
        numbers = re.findall(r"^(\d+)\. ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert numbers, page
        assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1)), page


def test_reference_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    script, folder = importlib.import_module("generate"), DOCS / "reference"
    found = {page.relative_to(folder).as_posix(): page.read_text(encoding="utf-8") for page in folder.rglob("*.md")}
    del found["index.md"]
    assert found == script.pages(), "run `make docs`, and commit docs/reference/"
    assert script.EXAMPLES_PAGE.read_text(encoding="utf-8") == script.examples_page(), "run `make docs`"


def test_the_types_of_the_setters_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    script = importlib.import_module("setter_types")
    assert script.MODULE.read_text(encoding="utf-8") == script.module_text(), (
        "run `make docs`, and commit setter_types.py"
    )


def test_the_env_of_the_first_hour_is_recorded(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(next(block.text for block in blocks(DOCS / "getting-started.md") if block.language == "python"), names)
    config = PPOConfig().environment(names["Docking"]).training(train_batch_size_per_learner=64, num_epochs=1)
    with config.build() as algo:
        policy = corral.load_policy(algo.save(tmp_path / "saved"))
    played = play_episodes(policy, names["Docking"], episodes=1, record=tmp_path, file_format="gif")
    assert [episode.file for episode in played] == [tmp_path / "episode-000.gif"]


def test_every_page_is_in_the_navigation() -> None:
    listed = {DOCS / "index.md"}
    for page in DOCS.rglob("*.md"):
        for tree in re.findall(
            r"^```{toctree}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert listed == set(DOCS.rglob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference" / "api").glob("*.md"))
    listed = {path.rpartition(".")[2] for path in re.findall(r"^[.][.] auto\w+:: (\S+)$", pages, flags=re.MULTILINE)}
    constants = {"__version__", "coordination", "BUILT_IN", "EVENTS", "FORMAT_VERSION", "IDENTITY_ACTION_SPACES"}
    rooms = [
        *(
            "callbacks",
            "callbacks.curriculum",
            "compat.tune",
            "data.replay",
            "engines",
            "exploration",
            "runs.checkpoint",
        ),
        *("runs.checkpoint", "runs.loggers", "testing", "tools.report"),
    ]
    for module in (corral, *(importlib.import_module(f"corral.{room}") for room in rooms)):
        assert set(module.__all__) - constants <= listed, module.__name__
