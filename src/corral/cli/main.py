"""The command `corral`."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from corral import __version__
from corral.cli import EXIT_ERROR, EXIT_USAGE, interrupted_status, print_error
from corral.cli.report import add_report_commands
from corral.core.interrupts import ending_signals_raised
from corral.errors import ConfigError, CorralError

EPILOG = """\
examples:
  corral train --algo PPO --env CartPole-v1 --stop episode_return_mean=450
  corral train --algo PPO --env CartPole-v1 --stop num_env_steps=500000 --seed 0 --set training.lr=3e-3
  corral train --config experiment.yaml
  corral train --resume runs/PPO-CartPole-v1-20260101-120000 --stop num_env_steps=1000000
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Returns:
        0, 1 (failed), 2 (wrong usage), or 128 plus the number of the signal that ended it, such as 130 (Ctrl-C) or 143
        (SIGTERM).
    """
    options = make_parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode gets other characters, and no error
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        with ending_signals_raised():
            return int(options.run(options))
    except KeyboardInterrupt as error:
        return interrupted_status(error)
    except ConfigError as error:
        print_error(error)
        return EXIT_USAGE
    except (CorralError, FileExistsError) as error:
        print_error(error)
        return EXIT_ERROR
    finally:
        _drop_unwritable_output()


def _drop_unwritable_output() -> None:
    """Drop what standard output cannot write, such as to a closed pipe: Python would fail with it at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, from which the documentation is made too."""
    parser = argparse.ArgumentParser(prog="corral", description="Reinforcement learning from one config.")
    parser.add_argument("--version", action="version", version=f"corral {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser(
        "train",
        help="train an algorithm on an env",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("--config", type=Path, help="a YAML file of groups of settings, with 'algo' and 'stop'")
    train.add_argument(
        "--algo", help="name of the algorithm, such as PPO, or import path of a config class, such as my_algo:MyConfig"
    )
    train.add_argument("--env", help="a Gymnasium id, or package.module:Name")
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
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="GROUP.NAME=VALUE",
        help="any setting; a value is read as YAML, such as 3e-3, [64, 64] or true",
    )
    train.add_argument("--run-dir", type=Path, help="where to write; runs/<algo>-<env>-<time> if left out")
    train.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue the run in this directory, with its settings and stop criteria where no option overrides them",
    )
    train.add_argument(
        "--checkpoint-every",
        metavar="SECONDS",
        help="seconds between two checkpoints; short for --set checkpointing.checkpoint_every_s",
    )
    train.add_argument(
        "--tensorboard", action="store_true", help="also write TensorBoard event files; needs 'corral[tensorboard]'"
    )
    train.add_argument("--quiet", action="store_true", help="show only the last line")
    train.set_defaults(run=_train)

    checkpoint = commands.add_parser("checkpoint", help="look into a checkpoint")
    checkpoint_commands = checkpoint.add_subparsers(dest="checkpoint_command", required=True)
    info = checkpoint_commands.add_parser("info", help="print what a checkpoint holds; nothing is imported or run")
    info.add_argument("path", help="a checkpoint, a run directory, whose last checkpoint is taken, or a URL")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_checkpoint_info)

    evaluate = commands.add_parser("evaluate", help="measure the policy of a run or a checkpoint")
    _add_policy_options(evaluate)
    evaluate.add_argument("--episodes", type=int, help="number of episodes; 100, or one per seed, if left out")
    evaluate.add_argument(
        "--seeds", type=int, nargs="+", metavar="SEED", help="seed of each episode, to compare policies"
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object, with each episode")
    evaluate.set_defaults(run=_evaluate)

    play = commands.add_parser("play", help="show or record episodes of the policy of a run or a checkpoint")
    _add_policy_options(play)
    play.add_argument("--episodes", type=int, default=3, help="number of episodes; 3 if left out")
    play.add_argument("--record", type=Path, metavar="DIR", help="record each episode there rather than show it")
    play.add_argument("--format", choices=("mp4", "gif"), default="mp4", help="of the recordings; mp4 if left out")
    play.set_defaults(run=_play)

    add_report_commands(commands)

    events = commands.add_parser("events", help="list the events that callbacks can listen to")
    events.set_defaults(run=_events)
    return parser


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="a run directory, whose best checkpoint is taken, or a checkpoint")
    parser.add_argument("--env", help="another env than the run's: a Gymnasium id, or package.module:Name")
    parser.add_argument(
        "--env-config",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the env in place of the run's; may be given several times; a value is read as YAML",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the env and of exploration; 0 if left out")
    parser.add_argument("--explore", action="store_true", help="draw actions from the policy's distribution")
    parser.add_argument(
        "--max-episode-steps", type=int, default=100_000, help="steps after which an episode is given up as endless"
    )


def _train(options: argparse.Namespace) -> int:
    from corral.cli.experiment import load_experiment

    _import_from_working_directory()
    config, stop = load_experiment(options)
    config.validate()  # a mistake is reported before torch's slower parts are loaded and anything is written
    from corral.cli.train import train
    from corral.loggers import TensorBoardLogger, default_loggers

    loggers = None
    if options.tensorboard:
        loggers = [*default_loggers(), TensorBoardLogger()]
    return train(config, stop, run_dir=options.run_dir, resume=options.resume, loggers=loggers, quiet=options.quiet)


def _checkpoint_info(options: argparse.Namespace) -> int:
    from corral.cli.checkpoint import print_info

    return print_info(options.path, as_json=options.json)


def _import_from_working_directory() -> None:
    """Let import paths find modules of the user there, as `python -m` does."""
    if (directory := os.getcwd()) not in sys.path:
        sys.path.insert(0, directory)


def _evaluate(options: argparse.Namespace) -> int:
    _import_from_working_directory()
    from corral.cli.policies import evaluate

    return evaluate(options)


def _play(options: argparse.Namespace) -> int:
    _import_from_working_directory()
    from corral.cli.policies import play

    return play(options)


def _events(_: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from corral.callbacks.callback import ARGUMENTS, EVENTS

    console = Console(highlight=False)
    for process in dict.fromkeys(event.process for event in EVENTS.values()):
        console.print(Text(f"In the process of the {process.replace('_', ' ')}\n", "bold underline"))
        for event in EVENTS.values():
            if event.process == process:
                console.print(Text(event.name, "bold cyan"))
                console.print(Padding(Text(event.fires), (0, 0, 0, 4), expand=False))
                console.print(
                    Padding(Text("arguments: " + ", ".join(event.arguments), "dim"), (0, 0, 1, 4), expand=False)
                )
    console.print(Text("Arguments (a callable may take any subset, by name)\n", "bold underline"))
    for name, meaning in ARGUMENTS.items():
        console.print(Text(name, "bold"))
        console.print(Padding(Text(meaning.replace("`", "")), (0, 0, 0, 4), expand=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
