"""The parser of the command line: every command with its options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from corral import __version__
from corral.core.paths import resolve_path
from corral.errors import ConfigError, nearest
from corral.tools.cli.report import add_report_commands

EPILOG = """\
examples:
  corral train --algo PPO --env CartPole-v1 --stop episode_return_mean=450
  corral train --algo PPO --env CartPole-v1 --stop num_env_steps=500000 --seed 0 --set training.lr=3e-3
  corral train --algo PPO --env CartPole-v1 --stop num_env_steps=100000 --seeds 0-4 --parallel 2
  corral train --config experiment.yaml
  corral train --tuned LunarLander-v3
  corral train --resume runs/PPO-CartPole-v1-20260101-120000 --stop num_env_steps=1000000
"""
SERVE_EPILOG = """examples:
  corral serve --config experiment.yaml --port 5555
  corral serve --algo PPO --env CartPole-v1 --stop episode_return_mean=450 --num-envs 8
  corral serve --resume runs/PPO-CartPole-v1-20260101-120000
"""
SHELLS = ("bash", "zsh")


class _Parser(argparse.ArgumentParser):
    """Names the nearest option of a command where an option is unknown, and does not print the whole usage."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the options and an empty list; what is unknown is refused by the command to which it was given."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            kind = "option" if unknown[0].startswith("-") else "argument without an option:"
            hint = nearest(unknown[0].partition("=")[0], options)
            if unknown[0].endswith((".yaml", ".yml")) and "--config" in options:
                hint = f"Did you mean --config {unknown[0]}?"
            self.error(f"unknown {kind} {unknown[0]!r}. {hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End with the exit status of a wrong command line."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` shows what it takes.\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, from which the documentation is made too.

    After parsing, `run` is the import path of the function that runs the command: it takes the options, and returns the
    exit status.
    """
    parser = _Parser(prog="corral", description="Reinforcement learning from one config.")
    parser.add_argument("--version", action="version", version=f"corral {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands)
    _add_serve(commands)
    _add_search(commands)
    _add_checkpoint(commands)
    _add_evaluate(commands)
    _add_play(commands)
    _add_record(commands)
    _add_export(commands)
    _add_config(commands)
    _add_list(commands)
    add_report_commands(commands)
    events = commands.add_parser("events", help="list the events that callbacks can listen to")
    events.set_defaults(run="corral.tools.cli.events:print_events")
    completion = commands.add_parser("completion", help="print a script that completes commands, options and names")
    completion.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    completion.set_defaults(run="corral.tools.cli.completion:print_completion")
    return parser


def _path(text: str) -> Path:
    """Return a path; an empty one, as of a variable of the shell that is not set, would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    try:
        return resolve_path(text, "it")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train an algorithm on an env",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_training_options(train)
    train.set_defaults(run="corral.tools.cli.train:run")


def _add_training_options(train: argparse.ArgumentParser) -> None:
    """Add the options of a command that trains."""
    train.add_argument("--config", type=_path, help="a YAML file of groups of settings, with 'algo' and 'stop'")
    train.add_argument(
        "--tuned",
        metavar="ENV",
        help="the tuned settings and stop criterion for this env, of --algo or of the first algorithm that has some; "
        "`corral list tuned` shows which there are",
    )
    train.add_argument(
        "--algo", help="name of the algorithm, such as PPO, or import path of a config class, such as my_algo:MyConfig"
    )
    train.add_argument("--env", help="a Gymnasium id, or package.module:Name")
    train.add_argument(
        "--data",
        metavar="PATH",
        help="recorded data to learn from: a directory, file or URL, or minari:ID; short for --set offline_data.input_",
    )
    train.add_argument(
        "--record",
        metavar="PATH",
        help="record what is sampled to this directory or URL, or minari:ID; short for --set offline_data.output",
    )
    train.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="end when a number of the result reaches this, or, as NAME<NUMBER, when it is below; may be given several "
        "times; the first one met ends the run",
    )
    train.add_argument("--seed", help="seed of everything random")
    train.add_argument(
        "--seeds",
        help="train once with each of these seeds, such as 0-4 or 0,3,7-9, into one directory, and compare the returns",
    )
    train.add_argument(
        "--parallel",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="with --seeds, how many runs to have at a time; 1 if left out, and one for each core without a number",
    )
    train.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="GROUP.NAME=VALUE",
        help="any setting; a value is read as YAML, such as 3e-3, [64, 64] or true",
    )
    train.add_argument("--run-dir", type=_path, help="where to write; runs/<algo>-<env>-<time> if left out")
    train.add_argument(
        "--resume",
        type=_path,
        metavar="RUN",
        help="continue the run, or the runs of --seeds, in this directory, with its settings and stop criteria where "
        "no option overrides them",
    )
    train.add_argument(
        "--resume-or-start",
        type=_path,
        metavar="RUN",
        help="continue the run, or the runs of --seeds, in this directory, or begin it there if there is none: one "
        "command for a service or a scheduler that starts a job again",
    )
    train.add_argument(
        "--checkpoint-every",
        metavar="SECONDS",
        help="seconds between two checkpoints; short for --set checkpointing.checkpoint_every_s",
    )
    train.add_argument(
        "--logger",
        action="append",
        default=[],
        dest="loggers",
        metavar="NAME",
        help="also write results with csv, json, images, tensorboard, wandb, mlflow, trackio or "
        "package.module:Class; may be given several times",
    )
    train.add_argument("--tensorboard", action="store_true", help="short for --logger tensorboard")
    train.add_argument("--quiet", action="store_true", help="show only the last line")
    train.add_argument("--end-with-input", action="store_true", help=argparse.SUPPRESS)  # see pool.py


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="train on the episodes of simulators in other programs, which connect and ask for actions",
        epilog=SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("--host", help="address to listen at; 127.0.0.1, this machine only, if left out")
    serve.add_argument("--port", type=int, help="port to listen at, 5555 if left out; 0 is any free one")
    serve.add_argument("--unix", metavar="PATH", help="listen at this Unix socket, and at no port")
    serve.add_argument(
        "--num-envs",
        type=int,
        metavar="N",
        help="episodes that all clients together play at the same time; short for "
        "--set env_runners.num_envs_per_env_runner, and 16 if neither is given",
    )
    serve.add_argument("--token-file", type=_path, metavar="FILE", help="serve only clients that say the token in it")
    serve.add_argument("--certificate", type=_path, metavar="FILE", help="certificate in PEM format, for TLS")
    serve.add_argument("--key", type=_path, metavar="FILE", help="its private key")
    _add_training_options(serve)
    serve.set_defaults(run="corral.tools.cli.serve:run")


def _add_search(commands: Any) -> None:
    search = commands.add_parser("search", help="search hyperparameters, and write the best ones as a file")
    search.add_argument("--config", type=_path, help="a YAML file as for `corral train`, with a group 'search'")
    search.add_argument("--env", help="a Gymnasium id, or package.module:Name, in place of the file's")
    search.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="when each run ends, in place of the file's criteria; may be given several times",
    )
    search.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="GROUP.NAME=VALUE",
        help="any setting that is not searched; a value is read as YAML",
    )
    search.add_argument("--trials", type=int, metavar="N", help="number of trials in all, in place of the file's")
    search.add_argument(
        "--seeds-per-trial", type=int, metavar="N", help="number of seeds of each trial, in place of the file's"
    )
    search.add_argument(
        "--parallel",
        type=int,
        default=0,
        metavar="N",
        help="number of trials at a time; if left out or 0, as many as the cores hold",
    )
    search.add_argument("--run-dir", type=_path, help="where to write; a new directory in runs if left out")
    search.add_argument("--resume", type=_path, metavar="DIR", help="continue the search in this directory")
    search.add_argument("--quiet", action="store_true", help="show only the last line")
    search.set_defaults(run="corral.tools.cli.search:run")


def _add_checkpoint(commands: Any) -> None:
    checkpoint = commands.add_parser("checkpoint", help="look into a checkpoint")
    checkpoint_commands = checkpoint.add_subparsers(dest="checkpoint_command", required=True)
    info = checkpoint_commands.add_parser("info", help="print what a checkpoint holds; nothing is imported or run")
    info.add_argument("path", help="a checkpoint, a run directory, whose last checkpoint is taken, or a URL")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run="corral.tools.cli.checkpoint:print_info")


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser("evaluate", help="measure the policy of a run or a checkpoint")
    _add_policy_options(evaluate)
    evaluate.add_argument("--episodes", type=int, help="number of episodes; 100, or one per seed, if left out")
    evaluate.add_argument(
        "--seeds", type=int, nargs="+", metavar="SEED", help="seed of each episode, to compare policies"
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object, with each episode")
    evaluate.add_argument(
        "--data",
        metavar="PATH",
        help="estimate the return from recorded data, without an env: a directory, file or URL, or minari:ID",
    )
    evaluate.add_argument(
        "--method",
        choices=("all", "is", "wis", "pdis", "wpdis", "dr", "wdr", "fqe"),
        help="with --data, which estimate; all that apply, if left out",
    )
    evaluate.add_argument("--module", metavar="ID", help="with --data, which module of a run of several agents")
    evaluate.add_argument("--gamma", type=float, help="with --data, the discount per step; the run's, if left out")
    evaluate.add_argument(
        "--max-ratio", type=float, help="with --data, a bound to which the probability ratio of each step is clipped"
    )
    evaluate.add_argument(
        "--gradient-steps", type=int, help="with --data, gradient steps of fitted Q evaluation; 10000 if left out"
    )
    evaluate.add_argument("--batch-size", type=int, help="with --data, its batch size; 256 if left out")
    evaluate.add_argument("--lr", type=float, help="with --data, its first learning rate; 0.001 if left out")
    evaluate.set_defaults(run="corral.tools.cli.policies:evaluate")


def _add_play(commands: Any) -> None:
    play = commands.add_parser("play", help="show or record episodes of the policy of a run or a checkpoint")
    _add_policy_options(play)
    play.add_argument("--episodes", type=int, default=3, help="number of episodes; 3 if left out")
    play.add_argument("--record", type=_path, metavar="DIR", help="record each episode there rather than show it")
    play.add_argument("--format", choices=("mp4", "gif"), help="of the recordings; mp4 if left out")
    play.set_defaults(run="corral.tools.cli.policies:play")


def _add_record(commands: Any) -> None:
    record = commands.add_parser("record", help="record episodes of the policy of a run, to learn from them")
    record.add_argument("path", metavar="RUN", help="a run directory, whose best checkpoint is taken, or a checkpoint")
    record.add_argument(
        "--output", required=True, help="directory or URL of Parquet files, or minari:ID; files that are there stay"
    )
    record.add_argument("--episodes", type=int, default=100, help="number of episodes; 100 if left out")
    record.add_argument("--env", help="another env than the run's: a Gymnasium id, or package.module:Name")
    record.add_argument("--seed", type=int, default=0, help="seed of the env and of exploration; 0 if left out")
    record.add_argument("--explore", action="store_true", help="explore as training does, in place of acting greedily")
    record.add_argument("--infos", action="store_true", help="record the infos of the env, too")
    record.set_defaults(run="corral.tools.cli.record:record")


def _add_export(commands: Any) -> None:
    export = commands.add_parser("export", help="write the policy of a run as a file that other programs read")
    export.add_argument("path", metavar="RUN", help="a run directory, whose best checkpoint is taken, or a checkpoint")
    export.add_argument(
        "-o",
        "--output",
        type=_path,
        required=True,
        metavar="FILE",
        help="the file to write: .onnx, .pt2 of torch.export, or .safetensors for the weights alone",
    )
    export.add_argument("--module", metavar="ID", help="which module of a run of several agents")
    export.add_argument(
        "--data",
        metavar="PATH",
        help="check the file with recorded observations, without an env: a directory, file or URL, or minari:ID",
    )
    export.add_argument(
        "--episodes", type=int, help="number of episodes whose observations check the file; 3 if left out"
    )
    _add_env_options(export)
    export.set_defaults(run="corral.tools.cli.export:export", seed=0)


def _add_env_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", help="another env than the run's: a Gymnasium id, or package.module:Name")
    parser.add_argument(
        "--env-config",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the env in place of the run's; may be given several times; a value is read as YAML",
    )


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="a run directory, whose best checkpoint is taken, or a checkpoint")
    _add_env_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the env and of exploration; 0 if left out")
    parser.add_argument("--explore", action="store_true", help="draw actions from the policy's distribution")
    parser.add_argument(
        "--max-episode-steps", type=int, default=100_000, help="steps after which an episode is given up as endless"
    )


def _add_config(commands: Any) -> None:
    config = commands.add_parser("config", help="list the settings of an algorithm, with their defaults and meaning")
    config.add_argument("algo", metavar="ALGO", help="name of the algorithm, or import path of a config class")
    config.add_argument(
        "name",
        metavar="SETTING",
        nargs="?",
        help="one setting, such as lr or training.lr, or a group, such as training",
    )
    config.add_argument("--json", action="store_true", help="print one JSON object")
    config.set_defaults(run="corral.tools.cli.settings:print_settings")


def _add_list(commands: Any) -> None:
    names = commands.add_parser("list", help="list algorithms, explorations, envs or tuned settings")
    names.add_argument("what", choices=("algorithms", "explorations", "envs", "tuned"), help="what to list")
    names.add_argument("word", nargs="?", default="", help="only names with this word in them")
    names.add_argument("--all", action="store_true", help="of envs, old versions too, and long lists in full")
    names.set_defaults(run="corral.tools.cli.listing:print_names")
