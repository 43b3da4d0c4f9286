"""The command `corral`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from corral import __version__
from corral.cli import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, print_error
from corral.errors import ConfigError, CorralError

EPILOG = """\
examples:
  corral train --algo PPO --env CartPole-v1 --stop episode_return_mean=450
  corral train --algo PPO --env CartPole-v1 --stop num_env_steps=500000 --seed 0 --set training.lr=3e-3
  corral train --config experiment.yaml
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, 1 (failed), 2 (wrong usage) or 130 (interrupted)."""
    options = make_parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode gets other characters, and no error
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ConfigError as error:
        print_error(error)
        return EXIT_USAGE
    except (CorralError, FileExistsError) as error:
        print_error(error)
        return EXIT_ERROR


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
        help="end when a number of the result reaches this; may be given several times; the first reached ends it",
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

    events = commands.add_parser("events", help="list the events that callbacks can listen to")
    events.set_defaults(run=_events)
    return parser


def _train(options: argparse.Namespace) -> int:
    from corral.cli.experiment import load_experiment

    if (directory := os.getcwd()) not in sys.path:
        sys.path.insert(0, directory)  # as `python -m` does, so that import paths find modules of the user
    config, stop = load_experiment(options)
    config.validate()  # a mistake is reported before torch's slower parts are loaded and anything is written
    from corral.cli.train import train
    from corral.loggers import TensorBoardLogger, default_loggers

    loggers = default_loggers()
    if options.tensorboard:
        loggers.append(TensorBoardLogger())
    return train(config, stop, run_dir=options.run_dir, loggers=loggers, quiet=options.quiet)


def _checkpoint_info(options: argparse.Namespace) -> int:
    from corral.cli.checkpoint import print_info

    return print_info(options.path, as_json=options.json)


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
