"""Write the reference pages from the code: the config, the events, the explorations and the command line.

It writes the types of the setters too; see `setter_types.py`. What it writes is committed, and tests compare it with
what this script gives.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api_pages
import setter_types
from gymnasium import spaces

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.config.description import (
    SettingDescription,
    describe_network,
    describe_settings,
    section_of,
    summary_of,
)
from corral.algorithms.config.settings import GROUPS
from corral.algorithms.ppo import PPOConfig
from corral.algorithms.registry import ALGORITHMS, config_class
from corral.callbacks.callback import ARGUMENTS, EVENTS
from corral.compat.rllib.settings import SETTINGS as RLLIB_SETTINGS
from corral.compat.rllib.settings import TRAINING as RLLIB_TRAINING
from corral.compat.rllib.settings import Setting
from corral.compat.rllib.table import FROM_RAY, NOT_SERVED, entries, home_module, open_homes, public_names
from corral.compat.rllib.table import MODULES as RLLIB_MODULES
from corral.core.settings import default_of
from corral.errors import ConfigError
from corral.exploration import BUILT_IN, Exploration, check_exploration, exploration_class
from corral.exploration.build import settings_of
from corral.tools.cli.main import make_parser

REFERENCE = Path(__file__).parent / "reference"
EXAMPLES_PAGE = Path(__file__).parent / "examples.md"
NOTE = "<!-- Written by docs/generate.py; run `make docs` after a change in the code. -->"


def type_of(types: list[str]) -> str:
    """Return the types of a setting as Markdown."""
    return " or ".join(f"`{part}`" for part in types)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; bars inside cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def literal(value: object) -> str:
    """Return a value as code in Markdown, with double quotes as in all examples."""
    text = repr(value)
    return f"`{text}`" if '"' in text else "`{}`".format(text.replace("'", '"'))


def literal_setting(name: str, value: object) -> str:
    """Return a setting with its value as code in Markdown."""
    return f"`{name}={literal(value).strip('`')}`"


def with_links(text: str) -> str:
    """Return a text of a docstring in which names of pages, such as docs/replay.md, are links to the pages."""
    return re.sub(r"`?docs/([\w/-]+)\.md`?", lambda found: f"[{title_of(found[1])}](../{found[1]}.md)", text)


def title_of(page: str) -> str:
    """Return the title of a page."""
    return (REFERENCE.parent / f"{page}.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def settings_list(place: str, settings: list[SettingDescription]) -> str:
    """Return settings as a list of name, type, default, bounds and meaning.

    Each entry has an anchor of its own, such as `training-lr`, and its name is a link to it.

    Args:
        place: Heading of the list, with which the anchors begin.
        settings: The settings.

    Raises:
        KeyError: A setting is missing from the docstring.
    """
    entries = []
    for setting in settings:
        if not setting.meaning:
            raise KeyError(f"{place}: {setting.name}")
        facts = [type_of(setting.types), f"default {literal(setting.default)}", *setting.bounds]
        anchor = f"{place.lower()}-{setting.name}"
        name = f'<a id="{anchor}" href="#{anchor}">**`{setting.name}`**</a>'
        entries.append(f"- {name}: {', '.join(facts)}. {with_links(setting.meaning)}")
    return "\n".join(entries)


def algorithm_section(name: str, listed: dict[str, tuple[str, object]]) -> list[str]:
    """Return the part of the config page on one algorithm: its own settings, and the defaults that it changes.

    Args:
        name: The algorithm.
        listed: Algorithm and default, by name and meaning, of each setting that the page has already. Such a setting is
            only named; others are added.
    """
    cls, base = config_class(name), {f.name: f for f in dataclasses.fields(AlgorithmConfig)}
    fields = dataclasses.fields(cls)
    own = [f.name for f in fields if f.name not in base]
    changed = [f for f in fields if f.name in base and default_of(f) != default_of(base[f.name])]
    defaults = [literal_setting(f.name, default_of(f)) for f in changed]
    defaults.append(literal_setting("num_envs_per_env_runner", cls.DEFAULT_NUM_ENVS))
    new, by_algorithm = [], dict[str, list[str]]()
    for setting in describe_settings(cls, own):
        other, default = listed.setdefault(f"{setting.name}: {setting.meaning}", (name, setting.default))
        if other == name:
            new.append(setting.name)
        else:
            changed_default = "" if setting.default == default else f" (default {literal(setting.default)})"
            by_algorithm.setdefault(other, []).append(f"`{setting.name}`{changed_default}")
    same = [f"as [{other}](#{other.lower()}) has them: {', '.join(names)}" for other, names in by_algorithm.items()]
    return [
        f"## {name}",
        f"`{cls.__name__}` adds these settings to `.training(...)`:",
        *([settings_list(name, describe_settings(cls, new))] if new else []),
        *([f"{'Also as' if new else 'As'}{'; '.join(same).removeprefix('as')}."] if same else []),
        f"Defaults that differ from the groups above: {', '.join(defaults)}.",
    ]


def networks_table() -> str:
    """Return which defaults the default modules of other algorithms have, and which settings in addition to PPO's."""
    of_ppo = {setting.name: setting for setting in describe_network(PPOConfig)}
    rows: dict[tuple[str, str], list[str]] = {}
    for name in ALGORITHMS:
        own = {setting.name: setting for setting in describe_network(config_class(name))}
        changed = [
            literal_setting(each, own[each].default)
            for each in of_ppo
            if each in own and own[each].default != of_ppo[each].default
        ]
        if "fcnet_hiddens" in own and (text := own["fcnet_hiddens"].meaning) != of_ppo["fcnet_hiddens"].meaning:
            changed.insert(0, f"{re.findall(r'`None` is (`.*?`), ', text)[0]} for `fcnet_hiddens=None`")
        new = [f"`{each}`" for each in own if each not in of_ppo]
        if changed or new:
            rows.setdefault((", ".join(changed), ", ".join(new)), []).append(f"[{name}](#{name.lower()})")
    return table(["algorithm", "other defaults", "in addition"], [[", ".join(rows[row]), *row] for row in rows])


def config_page() -> str:
    """Return the page of all settings."""
    parts = [
        NOTE,
        "# Config",
        "Every setting belongs to a group. `config.<group>(name=value)` sets it in Python, "
        "`--set <group>.<name>=<value>` on the command line, and `<group>: {<name>: <value>}` in a YAML file. "
        "In Python each is a plain attribute of the config too.",
        "`Schedule` is a number, or `[[num_env_steps, value], ...]` joined by straight lines; the first step is 0.",
    ]
    for group, owner in GROUPS.items():
        parts += [f"## {group}", summary_of(owner), settings_list(group, describe_settings(owner))]
    parts += [
        "## model_config",
        "Settings of the default module of PPO, given with `.rl_module(model_config={...})`. Other algorithms have "
        "[other defaults](#model_config-of-other-algorithms) and not all of these settings; `corral config SAC "
        "model_config` lists what SAC has.",
        settings_list("model_config", describe_network(PPOConfig)),
        "### model_config of other algorithms",
        networks_table(),
    ]
    listed: dict[str, tuple[str, object]] = {}
    for name in ALGORITHMS:
        parts += algorithm_section(name, listed)
    return "\n\n".join(parts) + "\n"


def events_page() -> str:
    """Return the page of all events."""
    rows = [
        [f"`{event.name}`", event.process, ", ".join(f"`{name}`" for name in event.arguments), event.fires]
        for event in EVENTS.values()
    ]
    parts = [
        NOTE,
        "# Events",
        "Every event that a callback can listen to. A callable may take any subset of the arguments, by name. "
        "`corral events` prints this list. [Callbacks](../callbacks.md) says how to use it.",
        table(["event", "runs in", "arguments", "fires"], rows),
        "## Arguments",
        table(["argument", "what"], [[f"`{name}`", meaning] for name, meaning in ARGUMENTS.items()]),
    ]
    return "\n\n".join(parts) + "\n"


# A space of each kind, to find out which an algorithm takes.
ACTION_SPACES: tuple[spaces.Space[Any], ...] = (
    spaces.Discrete(2),
    spaces.MultiDiscrete([2, 2]),
    spaces.MultiBinary(2),
    spaces.Box(-1.0, 1.0, (1,)),
)


@functools.cache
def takes_actions(algorithm: str, place: int) -> bool:
    """Return whether the modules of an algorithm take the actions of a place of `ACTION_SPACES`."""
    try:
        config_class(algorithm)().module_spec(spaces.Box(-1.0, 1.0, (1,)), ACTION_SPACES[place]).build()
    except ConfigError:
        return False
    return True


def suits(algorithm: str, kind: str) -> str:
    """Return whether an exploration type is an algorithm's default, accepted or refused."""
    config = config_class(algorithm)()
    default = config.default_exploration["type"] == kind
    config.exploration(exploration_config={"type": kind})
    for place, space in enumerate(ACTION_SPACES):
        if not takes_actions(algorithm, place):
            continue
        try:
            check_exploration(config, space)
        except ConfigError:
            continue
        return "default" if default else "yes"
    return "refused"


def exploration_settings(kind: str, listed: dict[str, str]) -> str:
    """Return the settings of a type as a table, with the docs of the class that each comes from.

    Args:
        kind: The type.
        listed: The type by the row of each setting that the page has already; such settings are only named.

    Raises:
        KeyError: A setting is missing from the docstrings.
    """
    cls = exploration_class(kind)
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__[: cls.__mro__.index(Exploration)]):
        docs |= section_of(owner, "Args")
    rows = [[f"`{name}`", literal(default), with_links(docs[name])] for name, default in settings_of(cls).items()]
    known = {row[0]: listed.setdefault(" ".join(row), kind) for row in rows}
    new = [row for row in rows if known[row[0]] == kind]
    by_kind: dict[str, list[str]] = {}
    for name, other in known.items():
        by_kind.setdefault(other, []).append(name)
    same = [f"{', '.join(names)} as [{other}](#{other.lower()})" for other, names in by_kind.items() if other != kind]
    parts = [table(["setting", "default", "meaning"], new)] if new else []
    parts += [f"{'It also' if new else 'It'} takes {'; '.join(same)}."] if same else []
    return "\n\n".join(parts) or "It has no settings."


def exploration_page() -> str:
    """Return the page of the exploration types: who takes which, and their settings."""
    rows = []
    for kind in BUILT_IN:
        cls = exploration_class(kind)
        taken = ", ".join(space.__name__ for space in cls.action_spaces)
        fates: dict[str, list[str]] = {"default": [], "yes": [], "refused": []}
        for name in ALGORITHMS:
            fates[suits(name, kind)].append(name)
        shown = [", ".join(fates[fate]) or "-" for fate in ("default", "refused")]
        rows.append([f"[`{kind}`](#{kind.lower()})", taken, *shown])
    parts = [
        NOTE,
        "# Exploration types",
        'What `exploration_config={"type": ...}` takes, and with which actions. All algorithms take a type, except '
        "the ones that refuse it at build. [Exploration](../exploration.md) says how to choose one.",
        table(["type", "actions", "default of", "refused by"], rows),
    ]
    listed: dict[str, str] = {}
    for kind in BUILT_IN:
        text = inspect.cleandoc(exploration_class(kind).__doc__ or "").partition("\n\nArgs:")[0]
        source = f"Source: {exploration_class(kind).paper}."
        parts += [f"## {kind}", text.replace("\n    ", "\n"), source, exploration_settings(kind, listed)]
    return "\n\n".join(parts) + "\n"


def options_table(parser: argparse.ArgumentParser, listed: dict[str, str]) -> str:
    """Return the options of a parser as a table, or nothing; argparse's own help differs between Python versions.

    Args:
        parser: The parser of a command.
        listed: The command by the row of each option that the page has already; such options are only named.
    """
    rows, same = [], dict[str, list[str]]()
    for action in parser._actions:
        is_left_out = action.help == argparse.SUPPRESS or (action.nargs == 0 and action.dest in ("help", "version"))
        if not action.option_strings or is_left_out:
            continue
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        meaning = re.sub(r"(\S*<\S+>)", r"`\1`", action.help or "")  # bare, it would be an HTML tag
        option = f"`{', '.join(action.option_strings)}{value}`"
        if (command := listed.setdefault(f"{option} {meaning}", parser.prog)) == parser.prog:
            rows.append([option, meaning])
        else:
            same.setdefault(command, []).append(option)
    parts = [table(["option", "meaning"], rows)] if rows else []
    parts += [
        f"As in [{command}](#{command.replace(' ', '-')}): {', '.join(options)}." for command, options in same.items()
    ]
    return "\n\n".join(parts)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yield parser and help text of each command; of a group of commands, the commands in it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for entry in action._choices_actions:
                inner = list(commands_of(action.choices[entry.dest]))
                yield from inner or [(action.choices[entry.dest], str(entry.help))]


def cli_page() -> str:
    """Return the page of the command line."""
    parser = make_parser()
    parts = [
        NOTE,
        "# Command line",
        f"{parser.description} `-h` after any command lists its options. [Using it](../cli.md) says more.",
    ]
    listed: dict[str, str] = {}
    for sub, help_text in commands_of(parser):
        parts += [f"## {sub.prog}", f"{help_text.capitalize()}.", options_table(sub, listed) or "It has no options."]
        if sub.epilog:
            examples = "\n".join(line.strip() for line in sub.epilog.splitlines() if line.startswith("  "))
            parts += ["Examples:", f"```sh\n{examples}\n```"]
    return "\n\n".join(parts) + "\n"


def rllib_page() -> str:
    """Return the page of RLlib's settings, from the table that serves them."""
    lines = [
        "# Settings of RLlib",
        "",
        NOTE,
        "",
        "What becomes of each setting of RLlib 2.60 in a script that Corral runs, with RLlib's default; see",
        "[RLlib scripts](../rllib-migration.md). `same` settings have the same meaning in Corral. `ignored` settings",
        "change no result. Any value of a `refused` setting but the default is an error.",
        "",
    ]
    for group, settings in RLLIB_SETTINGS.items():
        lines += [f"## {group}", "", *_rllib_rows(settings)]
    for algorithm, settings in RLLIB_TRAINING.items():
        lines += [f"## training, {algorithm}", "", *_rllib_rows(settings)]
    return "\n".join(lines).rstrip() + "\n"


def _rllib_rows(settings: dict[str, Setting]) -> list[str]:
    by_fate: dict[str, list[str]] = {}
    for name, setting in settings.items():
        note = f"`{setting.note}`" if setting.kind == "same" and setting.note else setting.note
        default = repr(setting.default).replace("'", '"')
        by_fate.setdefault(f"{setting.kind}: {note}" if note else setting.kind, []).append(f"`{name}={default}`")
    rows = [f"| {', '.join(names)} | {fate} |" for fate, names in by_fate.items()]
    return ["| Setting | In Corral |", "| --- | --- |", *rows, ""]


def rllib_names_page() -> str:
    """Return the page of the names that are served at paths of RLlib, and of what is refused, from the table."""
    paths: dict[tuple[str, str, str], list[str]] = {}
    for module in RLLIB_MODULES:
        for name, (home, original) in entries(module).items():
            paths.setdefault((name, home, original), []).append(module)
    lines = [
        "# Names of RLlib",
        "",
        NOTE,
        "",
        "What `ray.rllib` has in a script that Corral runs; see [RLlib scripts](../rllib-migration.md). `ray.rllib.`",
        "is left out before paths. A name is one object at all paths where RLlib has it; the shortest is listed.",
        "",
        "| Path | Names |",
        "| --- | --- |",
    ]
    by_path: dict[str, list[str]] = {}
    stand_ins: list[str] = []
    for (name, home, original), modules in sorted(paths.items()):
        by_path.setdefault(min(modules, key=len), []).append(f"`{name}`")
        if (what := _summary_of(getattr(home_module(home), original))).startswith("Stands for"):
            stand_ins.append(f"| `{name}` | {what} |")
    for path, names in sorted(by_path.items()):
        lines.append(f"| {f'`{path}`' if path else '`ray.rllib` itself'} | {', '.join(names)} |")
    lines += ["", "Some of them change nothing:", "", "| Name | What it is |", "| --- | --- |", *stand_ins]
    lines += ["", "## Modules whose names are all served", "", "| Path | Names |", "| --- | --- |"]
    for module in RLLIB_MODULES:
        names = sorted({name for home in open_homes(module) for name in public_names(home_module(home))})
        if names:
            lines.append(f"| `{module}` | {', '.join(f'`{name}`' for name in names)} |")
    lines += ["", "## Loaded from the files of the installed Ray", ""]
    lines += [f"- `{module}`" for module in FROM_RAY]
    lines += ["", "## Refused", "", "| What | In its place |", "| --- | --- |"]
    lines += [f"| {what} | {remedy} |" for _, what, remedy in NOT_SERVED]
    return "\n".join(lines) + "\n"


def _summary_of(found: Any) -> str:
    """Return the first line of an object's documentation, or the value of a constant."""
    if isinstance(found, (str, int, float, bool)):
        return f"`{found!r}`".replace("'", '"')
    if isinstance(found, dict):
        return f"a dict of {len(found)} entries"
    documentation = inspect.getdoc(found) if isinstance(found, type) or callable(found) else None
    return (documentation or "an alias for annotations").splitlines()[0].replace("|", "or")


EXAMPLES = {
    "": ("First steps, and search", ""),
    "callbacks": ("Callbacks", ""),
    "algorithms": ("Algorithms of your own", ""),
    "building_blocks": ("Training loops of your own", "Runners and learners without an `Algorithm`."),
    "exploration": ("Exploration", ""),
    "curriculum": ("Curricula", ""),
    "multi_agent": ("Several agents", ""),
    "evaluation": ("Evaluation", ""),
    "coordination": ("Coordination", ""),
    "porting": ("Ports from RLlib", "Pairs of files with the same returns; see [the page](port-an-rllib-script.md)."),
    "tune": ("Ray Tune", ""),
    "tuned": ("Tuned settings", "For `corral train --config FILE`; [returns](background/tuned.md)."),
}
"""Title, and what comes before the table if not empty, by folder of examples/."""


def examples_page() -> str:
    """Return the page of the scripts in examples/, each with the first sentence of its text."""
    folder = Path(__file__).parents[1] / "examples"
    lines = ["# Examples", "", NOTE, "", "Scripts that run as they are: `python examples/callbacks/acrobot_angle.py`."]
    lines += ["", "![CartPole, Acrobot, Pendulum and MountainCar](images/envs.png)", ""]
    for name, (title, about) in EXAMPLES.items():
        lines += [f"## {title}", "", *([about, ""] if about else []), "| file | what it shows |", "| --- | --- |"]
        for path in sorted([*(folder / name).glob("*.py"), *(folder / name).glob("*.yaml")]):
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".py":
                first = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
            else:
                comments = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
                first = re.split(r"\.\s+(?=[A-Z])", " ".join(line.removeprefix("#").strip() for line in comments))[0]
            file = path.relative_to(folder).as_posix()
            lines.append(f"| [`{file}`](../examples/{file}) | {first.removesuffix('.')} |")
        lines += [""]
        for picture, text in PICTURES.get(name, {}).items():
            lines += [f"![{Path(picture).stem}](images/{picture})", "", f"{text}.", ""]
    return "\n".join(lines)


PICTURES = {
    "callbacks": {
        "heat-map.png": "`callbacks/heat_map.py`: visited cells of a frozen lake in the 1st, 5th and 20th iteration",
        "curiosity.svg": "`callbacks/curiosity.py`: mean return of three seeds, with the bonus and without it",
    },
    "algorithms": {"own-algorithms.svg": "Learning curves of the three algorithms on CartPole"},
    "exploration": {
        "own-exploration.svg": "`exploration/own_exploration.py`: mean return with repeated and single actions"
    },
    "curriculum": {
        "growing-corridor.svg": "`curriculum/growing_corridor.py`: mean number of steps in the longest corridor"
    },
    "multi_agent": {"two-cartpoles.svg": "`multi_agent/two_cartpoles.py`: a module for both agents, and one for each"},
    "coordination": {
        "central-hyperparameter.svg": "`coordination/central_hyperparameter.py`: the weight of the shaping reward fades"
    },
}
"""Caption by picture, by folder of examples/; docs/make_gallery.py draws them."""


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    return {
        "config.md": config_page(),
        "events.md": events_page(),
        "cli.md": cli_page(),
        "exploration.md": exploration_page(),
        "rllib-settings.md": rllib_page(),
        "rllib-names.md": rllib_names_page(),
        **api_pages.api_pages(NOTE),
    }


def main() -> None:
    """Write the pages, and the types of the setters."""
    setter_types.main()
    (REFERENCE / "api").mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
    EXAMPLES_PAGE.write_text(examples_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
