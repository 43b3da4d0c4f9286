"""The house rules of docs/design.md and CONTRIBUTING.md that no linter knows."""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from code_lines import count_lines, lines_by_room, parse, read_budget
from corral import _HOMES

# One process runs all of it, and reads each file once.
pytestmark = pytest.mark.xdist_group("house")
ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "corral"
FILES = sorted(SRC.rglob("*.py"))
# The rooms from the lowest to the highest: none imports a higher one, also not for annotations.
ORDER = (
    *("core", "engines", "modules", "data", "envs", "callbacks", "learners", "exploration", "runners", "runs"),
    *("algorithms", "tools", "compat"),
)
PACKAGES = sorted(file.parent.relative_to(SRC).as_posix() for file in SRC.rglob("__init__.py") if file.parent != SRC)
# package -> lower packages that it does not import either
NEVER = {
    "engines": ("corral.core",),
    "modules": ("corral.engines",),
    "modules/transforms": tuple(f"corral.modules.{path.stem}" for path in (SRC / "modules").glob("*.py")),
    "data": ("corral.engines",),
    "envs": ("corral.modules",),
    "callbacks/curriculum": ("corral.engines", "corral.modules", "corral.envs"),
    "learners": ("corral.envs", "corral.data.episodes"),
    "runners": ("corral.learners",),
    "runs": ("corral.learners", "corral.runners.runner", "corral.runners.runner_group"),
    "runs/policies": ("corral.callbacks", "corral.data.episodes", "corral.runners"),
    "algorithms": tuple(
        f"corral.engines.{name}"
        for name in ("local", "process", "ray", "make_engine")  # the contract and its holder
    ),
    "tools/report": tuple(f"corral.{room}" for room in ORDER if room not in ("core", "runs", "tools")),
}
# Packages in which a class and the functions that were split from it name each other in annotations.
WITH_PARTS = {"algorithms", "algorithms/config", "compat/rllib", "engines", "modules", "runners", "runs/policies"}
RAY_HOMES = ("engines/ray", "compat/")


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    """Let no collection visit the syntax trees of all files, which are no garbage."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@functools.cache
def imports(source: str, path: str, *, annotations: bool = False) -> list[str]:
    """Return the dotted names that a file imports, functions included; `path` is relative to src/corral.

    Imports under TYPE_CHECKING count only with `annotations`.
    """
    package = ["corral", *Path(path).parts[:-1]]
    nodes, found = [*ast.walk(parse(source))], []
    guarded = {
        inner
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in nodes:
        if node in guarded and not annotations:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                home = _HOMES.get(alias.name) if module == "corral" else None
                found.append(home or f"{module}.{alias.name}")
    return found


def test_the_lowest_declared_versions_are_what_make_lowest_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    named = [name for name in [*project["dependencies"], *extras] if not name.startswith("corral[")]
    declared = {re.sub(r">=([^,]+).*", r"==\1", dependency) for dependency in named}
    pinned = (ROOT / "requirements" / "lowest.txt").read_text().partition("# What tests need")[0].splitlines()[1:]
    assert declared == set(pinned)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def violations(source: str, path: str) -> list[str]:
    """Return the imports of a file that break a rule."""
    room = path.partition("/")[0]
    if "/" not in path:  # `corral/__init__.py` lists what users import, wherever it is
        higher: tuple[str, ...] = ()
    else:
        higher = ORDER[ORDER.index(room) + 1 :]
    forbidden = [f"corral.{name}" for name in higher]
    forbidden += itertools.chain.from_iterable(
        names for package, names in NEVER.items() if path.startswith(f"{package}/")
    )
    if not path.startswith(RAY_HOMES):
        forbidden.append("ray")
    found = set(imports(source, path, annotations=True))
    return sorted(name for name in found if any(within(name, package) for package in forbidden))


def modules_in_circles(sources: dict[str, str], *, annotations: bool) -> list[str]:
    """Return the modules that import each other in a circle, and the modules that import these.

    `sources` maps paths relative to src/corral to source texts.
    """
    names = {path: "corral." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in sources}
    left = {
        name: {
            other
            for imported in imports(sources[path], path, annotations=annotations)
            for other in names.values()
            if other != name and imported in (other, f"{other}.{imported.rpartition('.')[2]}")
        }
        for path, name in names.items()
    }
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


# `engines/actors.py` imports the form of actors on Ray inside a function, so that ray is imported only where it runs.
@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "engines"])
def test_the_modules_of_a_package_import_each_other_in_one_direction(package: str) -> None:
    sources = {
        path.relative_to(SRC).as_posix(): path.read_text(encoding="utf-8") for path in (SRC / package).rglob("*.py")
    }
    assert len(sources) > 1
    inner = {name for name in PACKAGES if name.startswith(f"{package}/")}
    circle = modules_in_circles(sources, annotations=not ({package} | inner) & WITH_PARTS)
    assert circle == []


def test_every_room_has_a_place_in_the_order() -> None:
    assert sorted(ORDER) == [name for name in PACKAGES if "/" not in name]
    assert len(ORDER) <= 14
    assert {*NEVER, *WITH_PARTS} <= {*PACKAGES}


@pytest.mark.parametrize(
    "back",
    [
        "def f():\n    from corral.data.episodes.rollout import Rollout",
        "import corral.data.episodes.rollout",
        "from corral.data.episodes import rollout",
        "from .rollout import Rollout",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from corral.data.episodes.rollout import Rollout",
    ],
)
def test_a_circle_is_found_wherever_its_imports_are(back: str) -> None:
    sources = {
        "data/episodes/rollout.py": "from corral.data.episodes.episode import SingleAgentEpisode",
        "data/episodes/episode.py": "from corral.data.episodes.infos import info_at",
        "data/episodes/infos.py": "import corral.core.tree",
    }
    assert modules_in_circles(sources, annotations=True) == []
    circle = modules_in_circles(sources | {"data/episodes/infos.py": back}, annotations=True)
    assert circle == ["corral.data.episodes.episode", "corral.data.episodes.infos", "corral.data.episodes.rollout"]
    at_run_time = modules_in_circles(sources | {"data/episodes/infos.py": back}, annotations=False)
    assert at_run_time == ([] if "TYPE_CHECKING" in back else circle)


def test_import_rules() -> None:
    found = {
        path: violations(file.read_text(encoding="utf-8"), path)
        for file in FILES
        for path in [file.relative_to(SRC).as_posix()]
    }
    assert len(found) > 300
    assert {path: names for path, names in found.items() if names} == {}


def test_the_rules_catch_what_breaks_them_and_let_the_rest_through() -> None:
    breaking = [
        ("algorithms/ppo.py", "from corral.engines import make_engine"),
        ("algorithms/ppo.py", "from ..engines.local import LocalEngine"),
        ("algorithms/ppo.py", "def f():\n    import ray"),
        ("learners/learner.py", "import corral.runners.runner"),
        ("learners/learner.py", "from corral.envs import vector"),
        ("learners/learner.py", "from corral import PPOConfig"),
        ("runners/runner.py", "from corral.compat.rllib import PPO"),
        ("data/episodes/trajectories.py", "from corral.callbacks.dispatch import Dispatcher"),
        ("engines/local.py", "import ray.util"),
        ("engines/process.py", "def f():\n    import ray"),
        ("envs/ray.py", "import ray"),
        ("callbacks/curriculum/thresholds.py", "from corral.runners.runner import EnvRunner"),
        ("runners/runner.py", "if TYPE_CHECKING:\n    from corral.algorithms.algorithm import Algorithm"),
        ("modules/transforms/rows.py", "from corral.modules.module import Module"),
        ("tools/report/runs.py", "from corral.learners.learner import Learner"),
    ]
    keeping = [
        ("engines/ray.py", "import ray"),
        ("engines/ray_actors.py", "from ray.util import state"),
        ("compat/tune/trainable.py", "import ray.tune"),
        ("compat/rllib/ppo.py", "from corral.compat.rllib import names"),
        ("algorithms/ppo.py", "from corral.learners.learner import Batch"),
        ("algorithms/ppo.py", "import raylib"),
        ("algorithms/algorithm.py", "from corral.engines.lazy import LazyEngine"),
    ]
    assert [rule for rule in breaking if not violations(rule[1], rule[0])] == []
    assert [rule for rule in keeping if violations(rule[1], rule[0])] == []


# Files of compat/ that fill namespaces of their own: configs of RLlib, and modules and functions of the user.
NAMESPACES = ("config.py", "envs.py", "__main__.py", "ray_stub.py", "tune_hook.py")


def names_of_core(tree: ast.Module) -> set[str]:
    """Return the names that a file of compat/ imports from other rooms."""
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if within(name := getattr(node, "module", None) or alias.name, "corral") and not within(name, "corral.compat")
    }


def written(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what a file writes to, each in a pair with its owner: `a.b` and `a` in `a.b = 1`, or `a` in `a.pop(1)`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("update", "setdefault", "pop", "clear"):
                yield node, node.func.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            yield node, node.args[0]


def root(node: ast.expr) -> str:
    """Return the name that a chain of attributes and items starts with, or an empty string."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def namespace_owner(node: ast.expr) -> str | None:
    """Return `a` for `a.__dict__` and for `vars(a)`, and `None` for anything else."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return ast.unparse(node.value)
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars"
    return ast.unparse(node.args[0]) if is_call and node.args else None  # type: ignore[attr-defined]


def reached(source: str, *, fills_namespaces: bool = False) -> list[str]:
    """Return what a file of compat/ writes to from outside: the class or the dict of an object, or the core."""
    tree = parse(source)
    core, found = names_of_core(tree), []
    for node, owner in written(tree):
        is_form = isinstance(node, ast.Attribute) and node.attr in ("__class__", "__dict__")
        is_namespace = not fills_namespaces and namespace_owner(owner) not in (None, "self")
        if is_form or is_namespace or root(owner) in core:
            found.append(ast.unparse(node))
    return found


def test_compat_uses_the_extension_points_and_writes_into_no_object_of_the_core() -> None:
    files = sorted((SRC / "compat").rglob("*.py"))
    found = {
        path.name: lines
        for path in files
        if (lines := reached(path.read_text(encoding="utf-8"), fills_namespaces=path.name in NAMESPACES))
    }
    assert len(files) > 50
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "episode.__class__ = Other",
        "first, self.episode.__class__ = 1, Other",
        "view.__dict__ = vars(logger)",
        "vars(native)['rllib'] = view",
        "view = vars(native)['rllib'] = View(native)",
        "native.__dict__['rllib'] = view",
        "vars(native).setdefault('rllib', View())",
        "from corral.runners import runner\nrunner.CURRENT = 1",
        "import corral.runners.runner\ncorral.runners.runner.CURRENT = 1",
        "from corral.runners.runner import EnvRunner\nEnvRunner.sample = sample",
        "from corral.runners import runner as native\nnative.KNOWN['x'] = 1",
        "from corral.runners.runner import EnvRunner\nsetattr(EnvRunner, name, value)",
    ],
)
def test_what_writes_into_the_core_is_found(source: str) -> None:
    assert len(reached(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "vars(self)['name'] = value",
        "vars(native).get('name')",
        "from corral.compat.rllib import metrics\nmetrics.CURRENT = 1",
        "from corral.errors import ConfigError\nerror = ConfigError('x')\nerror.name = 1",
        "native.keep_view(View, view)",
    ],
)
def test_what_writes_into_its_own_objects_is_let_through(source: str) -> None:
    assert reached(source) == []


def levels(sources: Iterable[str]) -> dict[str, int]:
    """Return the number of levels of classes above each class, by name; classes of other packages do not count."""
    bases: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, []).extend(ast.unparse(base).partition("[")[0] for base in node.bases)

    def above(name: str) -> int:
        return max((1 + above(base) for base in bases[name] if base in bases and base != name), default=0)

    return {name: above(name) for name in bases}


# `compat/` has the class trees of the programs that it speaks for.
def test_no_class_has_more_than_three_levels_of_classes_above_it() -> None:
    found = levels(path.read_text(encoding="utf-8") for path in FILES if "compat" not in path.parts)
    assert found["TQCConfig"] == 3
    assert {name: number for name, number in found.items() if number > 3} == {}


def test_levels_are_counted_through_mixins_and_generic_bases() -> None:
    found = levels(["class A: ...\nclass B(A): ...\nclass C(int): ...", "class D(C, B[int], metaclass=M): ..."])
    assert found == {"A": 0, "B": 1, "C": 0, "D": 2}


def test_importing_corral_is_light() -> None:
    code = (
        "import sys, corral; print(*[name for name in ('torch', 'ray', 'gymnasium', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_exported_name_is_there() -> None:
    import corral

    assert all(getattr(corral, name).__module__ == home for name, home in _HOMES.items())
    assert corral.coordination.__name__ == "corral.coordination"
    with pytest.raises(AttributeError, match="PPOConfi"):
        corral.PPOConfi  # noqa: B018


def test_the_changelog_begins_with_the_next_version_or_with_this_one() -> None:
    import corral

    newest = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert newest == "Unreleased" or newest.startswith(f"{corral.__version__} (")


# A room grows only by what another loses: then both numbers of tests/code_lines.json change, in one commit. More lines
# in all need a line in CHANGELOG.md that says what users get for them.
def test_no_room_has_more_lines_of_code_than_its_budget() -> None:
    now, budget = lines_by_room(), read_budget()
    assert {room: (lines, budget.get(room, 0)) for room, lines in now.items() if lines > budget.get(room, 0)} == {}
    loose = {room: (now.get(room, 0), lines) for room, lines in budget.items() if now.get(room, 0) < 0.97 * lines}
    assert loose == {}, "these rooms became smaller: run `python tests/code_lines.py --write`"


def test_lines_of_code_are_counted_without_docstrings_comments_and_imports() -> None:
    source = '''"""Text."""

import os
from a import (
    b,
)


# why
def f(
    x,
):  # how
    """Do.

    More.
    """
    return """a

    b"""
'''
    assert count_lines(source) == 6
