"""The parser of settings: types and bounds from annotations, and the texts of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from corral import PPOConfig
from corral.core.schedules import Schedule
from corral.core.settings import (
    Importable,
    NonNegativeInt,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Probability,
    bounds_of,
    check_setting,
    import_path,
    parse_settings,
    setting_types,
)
from corral.errors import ConfigError
from corral.testing import CountingEnv


@dataclass(kw_only=True)
class Base:
    width: PositiveInt = 8
    depth: PositiveInt | None = None
    rate: NonNegativeSchedule = 0.1
    kind: Literal["a", "b"] = "a"
    by_name: dict[str, PositiveFloat] = field(default_factory=dict)
    anything: Any = None
    function: Importable = None


@dataclass(kw_only=True)
class Derived(Base):
    width: int = 4
    rate: Schedule = 0.2
    depth: Annotated[int, Field(ge=3)] | None = None


@dataclass(kw_only=True)
class Narrow(Derived):
    rate: float = 0.3
    depth: int = 5


@pytest.mark.parametrize(
    ("name", "value", "converted"),
    [
        ("width", "12", 12),
        ("depth", None, None),
        ("rate", [[0, "1"], [5, 2]], [(0.0, 1.0), (5.0, 2.0)]),
        ("by_name", {"x": "0.5"}, {"x": 0.5}),
        ("anything", {1: 2}, {1: 2}),
        ("function", "corral.testing:CountingEnv", CountingEnv),
        ("function", CountingEnv, CountingEnv),
    ],
)
def test_values_take_the_type_of_the_setting(name: str, value: Any, converted: Any) -> None:
    assert check_setting(Base, name, value) == converted
    assert getattr(parse_settings(Base, {name: value}, "place"), name) == converted


SCHEDULE = ", such as [[0, 1e-3], [1_000_000, 0.0]], which is linear in between."


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("width", 0, "place: width=0 must be at least 1."),
        ("width", 2.5, "place: width=2.5 must be an integer."),
        ("depth", 0, "place: depth=0 must be at least 1 or None."),
        ("depth", "deep", "place: depth='deep' must be an integer or None."),
        ("kind", "c", "place: kind='c' must be 'a' or 'b'."),
        ("rate", "fast", "place: rate='fast' must be a number or a schedule over env steps" + SCHEDULE),
        ("rate", -1, "place: rate=-1: values must be finite and at least 0, got [-1.0]."),
        ("rate", [[0, "x"]], "place: rate=[[0, 'x']]: 'x' must be a number."),
        ("rate", [[1, 2]], "place: rate=[[1, 2]]: the first step of a schedule must be 0, not 1."),
        ("rate", [[0, 2], [0, 1]], "place: rate=[[0, 2], [0, 1]]: the steps of a schedule must rise, got [0.0, 0.0]."),
        ("by_name", {"x": 0}, "place: by_name={'x': 0}: 0 must be positive."),
        ("by_name", 3, "place: by_name=3 must be a dict."),
        ("width", float("nan"), "place: width=nan must be finite."),
        ("function", "corral.testing:CountinEnv", "'corral.testing' has no 'CountinEnv'. Did you mean 'CountingEnv'?"),
    ],
)
def test_messages_name_setting_value_and_bound(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_settings(Base, {name: value}, "place")
    assert message in str(error.value)


def test_long_values_are_cut_off_in_messages() -> None:
    with pytest.raises(ConfigError) as error:
        check_setting(Base, "kind", "x" * 10_000)
    assert len(str(error.value)) < 300


def test_an_unknown_name_is_told_with_all_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"place: unknown setting 'widt'. Did you mean 'width'\? It takes width, dep"):
        parse_settings(Base, {"widt": 1}, "place")


def test_another_default_keeps_the_bounds_and_other_bounds_replace_them() -> None:
    assert {name: bounds_of(hint) for name, hint in setting_types(Derived).items() if bounds_of(hint)} == {
        "width": ["at least 1"],
        "depth": ["at least 3"],
        "rate": ["at least 0"],
        "by_name": ["each positive"],
    }
    for name, value in (("width", 0), ("depth", 2), ("rate", -1.0)):
        with pytest.raises(ConfigError, match=name):
            check_setting(Derived, name, value)
    assert check_setting(Base, "depth", 2) == 2


def test_fewer_types_keep_the_bounds() -> None:
    assert bounds_of(setting_types(Narrow)["rate"]) == ["at least 0"]
    assert bounds_of(setting_types(Narrow)["width"]) == ["at least 1"]
    assert (check_setting(Narrow, "rate", "0.5"), check_setting(Narrow, "depth", 3)) == (0.5, 3)
    for name, value, message in (
        ("rate", -1, "rate=-1: values must be finite and at least 0"),
        ("rate", [[0, 1.0]], "rate=.* must be a number"),
        ("depth", 2, "depth=2: must be at least 3"),
        ("depth", None, "depth=None must be an integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_setting(Narrow, name, value)


@pytest.mark.parametrize(
    ("hint", "bounds"),
    [
        (Probability, ["in [0, 1]"]),
        (Annotated[float, Field(gt=0, le=1)], ["in (0, 1]"]),
        (Annotated[float, Field(gt=-1, lt=1)], ["in (-1, 1)"]),
        (PositiveFloat, ["positive"]),
        (Annotated[int, Field(lt=5)] | Literal["auto"], ["less than 5"]),
        (Annotated[float, Field(gt=2)], ["more than 2"]),
        (tuple[NonNegativeInt, ...], ["each at least 0"]),
        (int | None, []),
        (Literal["auto"], []),
    ],
    ids=str,
)
def test_bounds_as_text(hint: Any, bounds: list[str]) -> None:
    assert bounds_of(hint) == bounds


def test_an_import_path_may_lead_into_a_class() -> None:
    assert import_path("corral.testing:CountingEnv.step") is CountingEnv.step
    for path in ("CountingEnv", ":CountingEnv", "corral.testing:"):
        with pytest.raises(ConfigError, match=r"is not an import path such as 'package.module:Name'"):
            import_path(path)


# Config classes of users.


@dataclass(kw_only=True)
class Careful(PPOConfig):
    """A user's config: another default, and a setting of its own."""

    DEFAULT_NUM_ENVS: ClassVar[int] = 2
    num_epochs: int = 2
    patience: PositiveInt = 3


def test_a_users_config_keeps_the_bounds_of_its_base() -> None:
    config = Careful().training(patience=4)
    assert (config.num_epochs, config.patience) == (2, 4)
    for name in ("num_epochs", "patience"):
        with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
            config.training(**{name: 0})


def test_a_default_out_of_bounds_is_found_before_anything_starts() -> None:
    @dataclass(kw_only=True)
    class Wrong(PPOConfig):
        gamma: float = 1.5

    config = Wrong().environment("CartPole-v1")
    with pytest.raises(ConfigError, match=r"gamma=1.5 must be in \[0, 1\]"):
        config.validate()
    changed = PPOConfig().environment("CartPole-v1").training(lr=[[0, 1e-3]])
    changed.lr.append((0.0, 1.0))  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"lr=.*must rise"):
        changed.validate()


def test_settings_that_python_would_ignore_are_refused() -> None:
    class NoDecorator(PPOConfig):
        patience: int = 3

    class NoDecoratorNoType(PPOConfig):
        gamma = 0.9

    @dataclass(kw_only=True)
    class NoType(PPOConfig):
        patience: int = 3
        gamma = 0.9

    @dataclass(kw_only=True)
    class Below(NoDecorator):
        more: int = 1

    for cls, owner, names in (
        (NoDecorator, "NoDecorator", "patience"),
        (NoDecoratorNoType, "NoDecoratorNoType", "gamma"),
        (NoType, "NoType", "gamma"),
        (Below, "NoDecorator", "patience"),
    ):
        with pytest.raises(ConfigError) as error:
            cls()
        assert str(error.value).startswith(f"{owner}: Python ignores the settings {names}, since")
        assert f"write @dataclass(kw_only=True) above `class {owner}`" in str(error.value)


def test_a_subclass_without_settings_needs_no_decorator() -> None:
    class Renamed(PPOConfig):
        """Adds a method only."""

        SEEDS: ClassVar[tuple[int, ...]] = (1, 2)

        def seeded(self) -> list[PPOConfig]:
            return [self.copy(seed=seed) for seed in self.SEEDS]

    assert [config.seed for config in Renamed().training(lr=0.1).seeded()] == [1, 2]
