"""Follows the README and the pages of docs/ as a reader does: every command and every block, from empty folders.

    make walk                         # builds the wheel, installs it with its extras, and follows all pages
    make walk PAGES="docs/cli.md"     # one page

It prints a table: what ran, what failed, and what was not run, with the reason. Python blocks run as they are.
Trainings of the command line end after `--seconds`, by a stop criterion that is added, and searches after eight trials;
nothing else is changed. What a page takes for granted, such as a run of the reader's, is made when a command names it;
see `Reader.provide`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pages import (
    PAGES,
    ROOT,
    Block,
    Command,
    blocks,
    output_of,
    output_problem,
    page_id,
    page_module,
    run_block,
    spans,
)

PROGRAMS = ("corral", "pip", "python", "make", "tensorboard", "npm", "node", "ray", "ssh", "curl", "wandb", "cd")
LIMIT_S = 1800.0
CLONE = ("examples", "benchmarks", "clients")
"""Folders of the clone; a page that names a file in one of them is read in a clone."""

_PLACEHOLDER = re.compile(r"\b(ENV|PATH|FILE|DIR|NODE|ORT|SCRIPT|ID)\b|\.\.\.|--its-options")
_IN_CLONE = re.compile(r"make\b|pip install ['\"]?\.|python benchmarks/|.* docs/images/")
_FRAGMENT = re.compile(r"corral train (?!.*--(env|tuned|config|resume|data)\b)")
_COPY = f"cp {ROOT}/examples/porting/cartpole_rllib.py"
GIVEN_FILES = {
    "my_envs.py": "echo 'from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv as MyCheetah' > my_envs.py",
    "train_cartpole.py": f"{_COPY} train_cartpole.py",
    "script.py": f"{_COPY} script.py",
    "token.txt": "echo secret > token.txt",
    "cert.pem": "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 1 -subj /CN=localhost",
    "cartpole.zip": f"cp {ROOT}/tests/policies/sb3_samples/ppo_cartpole.zip cartpole.zip",
}
"""Files that a reader has, and the command that makes each of them."""
_STAYS = re.compile(r"tensorboard |corral serve |corral report .*--watch|python examples/serve_policy.py")
TRAININGS = "corral (?:train|serve|search(?!.*--resume))"
"""Commands that take stop criteria, as a pattern."""
_MADE = ("--run-dir", "--resume-or-start", "-o", "--output", "--record")
"""Options whose values a command makes."""


class Outcome(NamedTuple):
    """What happened to a block or a command: its place and text, `ran`, `not run` or `failed`, and why."""

    page: str
    line: int
    text: str
    what: str
    why: str = ""
    seconds: float = 0.0


class FailedError(Exception):
    """A command did not end as the page promises."""


def in_a_shell(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command line, and return its exit status and what it printed."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


class Reader:
    """Runs commands of a page in a folder, as a reader with a shell does.

    Args:
        folder: The folder.
        programs: Folder of `corral`, `python` and `pip`.
        given: Folder for what several pages take for granted.
        added: Options that are added to commands, by pattern of their beginning, such as stop criteria of trainings.
        run_line: What runs a command line, in a folder and an environment; it returns status and output.
    """

    def __init__(
        self,
        folder: Path,
        programs: Path,
        given: Path,
        added: Mapping[str, str],
        run_line: Callable[[str, Path, Mapping[str, str]], tuple[int, str]] = in_a_shell,
    ) -> None:
        self.folder, self.given, self._run_line = folder, given, run_line
        self._staying: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self._added = added
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "SDL_VIDEODRIVER": "dummy",  # windows need no display
            "BROWSER": "true",  # opens no browser
            "WANDB_MODE": "offline",
            "COLUMNS": "100",
        }

    def run(self, command: str) -> str:
        """Run a command, and return what it printed.

        Raises:
            FailedError: Its exit status is not 0, or it took too long.
        """
        self.provide(command)
        self.keep_running()
        if command.startswith("cd "):
            self.folder = self.folder / command[3:].strip()
            return ""
        shown = command
        for pattern, options in self._added.items():
            shown = re.sub(rf"^({pattern})", rf"\1 {options}", shown)
        if _STAYS.match(command):
            self._start(shown)
            return ""
        try:
            status, printed = self._run_line(shown, self.folder, self._environment)
        except subprocess.TimeoutExpired as error:
            raise FailedError(f"not over after {LIMIT_S:.0f} s") from error
        if status or "does not provide the extra" in printed or "Traceback" in printed:
            raise FailedError(f"exit status {status}: {printed[-1500:]}")
        return printed

    def _start(self, command: str) -> None:
        """Start a command that stays, and wait until it prints something; another one of its kind is ended before."""
        same = [entry for entry in self._staying if entry[0].split()[:2] == command.split()[:2]]
        self._staying = [entry for entry in self._staying if entry not in same]
        self._end(same)
        output = self.folder / f".staying-{len(self._staying)}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env={**self._environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._staying.append((command, process, output))
        deadline_s = time.monotonic() + 120.0
        while not output.stat().st_size and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):  # what it prints may be why it ends
            process.wait(2.0)
        if process.poll():
            raise FailedError(f"exit status {process.returncode}: {output.read_text(errors='replace')[-1500:]}")

    def keep_running(self) -> None:
        """Start commands that stay again, if their trainings are over."""
        ended = [entry for entry in self._staying if entry[1].poll() == 0]
        self._staying = [entry for entry in self._staying if entry not in ended]
        for command, _, _ in ended:
            self._start(command)

    def leave(self) -> None:
        """End the commands that stay, as Ctrl-C does.

        Raises:
            FailedError: One of them ended otherwise.
        """
        self._end(self._staying)

    @staticmethod
    def _end(staying: Sequence[tuple[str, subprocess.Popen[bytes], Path]]) -> None:
        for _, process, _ in staying:
            process.send_signal(signal.SIGINT)
        for command, process, output in staying:
            try:
                status = process.wait(60.0)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            text = output.read_text(errors="replace")
            if status not in (0, 130, -signal.SIGINT) or (command.startswith("corral") and "Traceback" in text):
                raise FailedError(f"{command}: exit status {status} after Ctrl-C: {text[-1500:]}")

    def provide(self, command: str) -> None:
        """Make what a command names and the page takes for granted: runs, recorded data, files of other pages."""
        words = shlex.split(command, comments=True)
        for before, word in zip(["", *words], words, strict=False):
            named = f"{word.partition(':')[0]}.py" if re.fullmatch(r"\w+:\w+", word) else word
            file = self.folder / named
            if before not in _MADE and not word.startswith(("-", "/", "http")) and not file.exists():
                self._provide(named, file)

    def _provide(self, name: str, file: Path) -> None:
        if name.split("/")[0] in CLONE:
            folder = name.split("/")[0]
            if not (self.folder / folder).exists():  # a copy, in which commands may write
                shutil.copytree(ROOT / folder, self.folder / folder, ignore=shutil.ignore_patterns("runs"))
        elif name in GIVEN_FILES:
            self._make(GIVEN_FILES[name], self.folder)
        elif (text := titled(name)) is not None:
            file.write_text(text, encoding="utf-8")
        elif "20260101-120000" in name and (own := self._own_runs(name)):
            file.symlink_to(own[-1])  # a reader writes the date of the run
        elif re.fullmatch(r"runs/[\w-]+", name) or name in ("RUN", "cartpole"):
            self._copy(self._given_run("Pendulum-v1" if "Pendulum" in name else "CartPole-v1"), file)
        elif name.startswith("checkpoints/"):
            self._copy(sorted((self._given_run("CartPole-v1") / "checkpoints").iterdir())[-1], file)
        elif name.startswith("recorded/"):
            self._copy(self._given_data(), file)

    def _own_runs(self, name: str) -> list[Path]:
        """Return what commands of the page made of this name with another date, and no search or seeds of that name."""
        pattern = re.compile(re.escape(Path(name).name).replace(r"20260101\-120000", r"\d{8}-\d{6}"))
        return sorted(path for path in (self.folder / name).parent.glob("*") if pattern.fullmatch(path.name))

    def _given_run(self, env: str) -> Path:
        home = self.given / env
        if not home.exists():
            evaluation = "--set evaluation.evaluation_interval=1 --set evaluation.evaluation_duration=1"
            stop = "--seed 0 --stop training_iteration=2"
            self._make(f"corral train --algo PPO --env {env} {evaluation} {stop} --run-dir {home}")
        return home

    def _given_data(self) -> Path:
        home = self.given / "recorded"
        if not home.exists():
            run = self._given_run("CartPole-v1")
            self._make(f"corral record {run} --episodes 20 --explore --output {home}")
        return home

    def _make(self, command: str, folder: Path | None = None) -> None:
        status, printed = self._run_line(command, folder or self.given, self._environment)
        if status:
            raise FailedError(f"{command}: {printed}")

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target)


def titled(name: str) -> str | None:
    """Return the block that a page shows as a file of this name."""
    return next((block.text for page in PAGES for block in blocks(page) if block.title == name), None)


def not_run(command: Command) -> str | None:
    """Return why a command of a page is not run here, or `None`."""
    if command.no_run is not None:
        return command.no_run
    if _IN_CLONE.match(command.text):
        return "in a clone"
    if _FRAGMENT.match(command.text):
        return "a part of a command"
    if command.text.startswith(("wandb ", "ray ")):
        return "needs an account or a cluster"
    if "--index-url" in command.text or command.text.startswith("npm "):
        return "another index of packages"
    if _PLACEHOLDER.search(command.text):
        return "a placeholder"
    program = command.text.split()[0]
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    known = program == "cd" or "=" in program or shutil.which(program, path=places)
    return None if known else f"{program} is not installed"


def span_commands(prose: str) -> list[Command]:
    """Return the commands in the code spans and indented lines of a text, without mere names of commands."""
    found = [text for text in spans(prose) if text.split()[0] in PROGRAMS and len(text.split()) > 1]
    is_name = re.compile(r"corral (?!events$)[a-z]+$|python -m [\w.]+$")
    return [Command(text) for text in found if not is_name.match(text)]


def steps(path: Path) -> Iterator[tuple[int, Block | Command, Block | None]]:
    """Yield what a reader of a page does, in order: line, block or command, and the block that shows an output."""
    found = blocks(path)
    end = 0
    for block, after in zip(found, [*found[1:], None], strict=False):
        for command in span_commands(block.before):
            yield block.line, command, None
        if block.language == "sh":
            for command in block.commands():
                yield block.line, command, None
        elif block.language in ("python", "yaml") or block.title:
            yield block.line, block, output_of(block, after)
        end = block.end
    for command in span_commands(path.read_text(encoding="utf-8")[end:]):
        yield -1, command, None


def follow(path: Path, reader: Reader) -> Iterator[Outcome]:
    """Follow a page in the working directory, and yield what happened at each step; after a failure too."""
    module = page_module()
    for line, step, shown in steps(path):
        begun_s, why = time.monotonic(), None
        first = step.text.splitlines()[0]
        text = first if isinstance(step, Command) else f"{step.language}: {first}"
        why = not_run(step) if isinstance(step, Command) else step.no_run(walk=True)
        if why is not None:
            yield Outcome(page_id(path), line, text, "not run", why)
            continue
        try:
            if isinstance(step, Command):
                reader.run(step.text)
            elif step.title is not None and step.language != "python":
                (reader.folder / step.title).write_text(step.text, encoding="utf-8")
            elif step.language == "python":
                if step.title is not None:
                    (reader.folder / step.title).write_text(step.text, encoding="utf-8")
                reader.keep_running()
                printed = run_block(step, path, module)
                why = None if step.no_run() else output_problem(step, printed, shown)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            why = str(error) if isinstance(error, FailedError) else traceback.format_exc(limit=-3)
        seconds = time.monotonic() - begun_s
        yield Outcome(page_id(path), line, text, "ran" if why is None else "failed", why or "", seconds)
    try:
        reader.leave()
    except FailedError as error:
        yield Outcome(page_id(path), -1, "what stays", "failed", str(error))


def follow_here(name: str, given: str, seconds: float) -> None:
    """Follow one page in the working directory, and print each outcome as a line of JSON."""
    os.environ["COLUMNS"] = "100"
    sys.path[0] = os.getcwd()  # what a reader's script finds first
    added = {TRAININGS: f"--stop time_s={seconds:g}", "corral search.*": "--trials 8"}
    reader = Reader(Path.cwd(), Path(sys.executable).parent, Path(given), added)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for outcome in follow(ROOT / name, reader):
            print(json.dumps(outcome), file=out, flush=True)


def follow_all(paths: Sequence[Path], seconds: float) -> list[Outcome]:
    """Follow pages, each in a process and an empty folder of its own, and return all outcomes."""
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as given:
        for path in paths:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, page_id(path), "--given", given, "--seconds", f"{seconds}"]
                with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        found.append(Outcome(*json.loads(line)))
                        print(said(found[-1]), flush=True)
                if process.returncode:
                    found.append(Outcome(page_id(path), -1, "", "failed", f"exit status {process.returncode}"))
    return found


def said(outcome: Outcome) -> str:
    """Return the line about an outcome, with the reason of a failure below it."""
    place = f"{outcome.page}:{outcome.line}" if outcome.line >= 0 else outcome.page
    why = f" ({outcome.why})" if outcome.what == "not run" else f"\n{outcome.why}" if outcome.why else ""
    return f"{outcome.what:7} {outcome.seconds:5.0f} s  {place}  {outcome.text}{why}"


def table(found: Sequence[Outcome]) -> str:
    """Return the table of all pages, and below it what was not run and what failed."""
    lines = [f"{'page':45} {'ran':>5} {'not run':>8} {'failed':>7}"]
    for page in dict.fromkeys(outcome.page for outcome in found):
        counts = [sum(o.page == page and o.what == what for o in found) for what in ("ran", "not run", "failed")]
        lines.append("{:45} {:5} {:8} {:7}".format(page, *counts))
    totals = [sum(o.what == what for o in found) for what in ("ran", "not run", "failed")]
    lines.append("{:45} {:5} {:8} {:7}".format("all", *totals))
    left_out = Counter((outcome.why, outcome.text) for outcome in found if outcome.what == "not run")
    lines += ["", "not run:", *(f"  {why}: {text} ({number})" for (why, text), number in sorted(left_out.items()))]
    return "\n".join([*lines, "", "failed:", *(said(outcome) for outcome in found if outcome.what == "failed")])


def main() -> int:
    """Follow the pages that the command line names, or all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="pages, such as docs/cli.md; all if left out")
    parser.add_argument("--seconds", type=float, default=20.0, help="when trainings of the command line end")
    parser.add_argument("--given", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.given is not None:
        follow_here(options.pages[0], options.given, options.seconds)
        return 0
    paths = [ROOT / name for name in options.pages] or [page for page in PAGES if any(True for _ in steps(page))]
    found = follow_all(paths, options.seconds)
    print(f"\n{table(found)}")
    return int(any(outcome.what == "failed" for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
