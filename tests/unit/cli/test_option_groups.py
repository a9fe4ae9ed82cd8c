"""Groups of options as a command takes them, and as the command line sees them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

import pytest
import typer

from foresay.cli.lab_options import numbers
from foresay.cli.option_groups import flatten_groups
from foresay.errors import ConfigError


@dataclass(frozen=True)
class Size:
    width: int = 1
    height: int = 2


def plain(name: str, *, loud: bool = False) -> str:
    return name


def command(name: str, *, size: Size, loud: bool = False) -> Any:
    """Do it."""
    return name, size, loud


def test_a_group_becomes_its_fields() -> None:
    flat = flatten_groups(command)
    assert list(inspect.signature(flat).parameters) == ["name", "width", "height", "loud"]
    assert flat.__doc__ == "Do it."
    assert flat(name="x", width=3, height=4, loud=True) == ("x", Size(3, 4), True)


def test_a_command_without_groups_is_itself() -> None:
    assert flatten_groups(plain) is plain


def test_numbers() -> None:
    assert numbers("1,4,4,8", "--batch") == [1, 4, 8]
    with pytest.raises(ConfigError, match=r"--batch '1,x' must be integers separated by commas, such as 1,4,8"):
        numbers("1,x", "--batch")
    assert numbers("0,2", "--batch", 0) == [0, 2]
    with pytest.raises(ConfigError, match="--batch '0' must be integers of at least 1"):
        numbers("0", "--batch")


SHARED = Annotated[int, typer.Option(help="Shared by groups.")]
OWN = Annotated[int, typer.Option(rich_help_panel="Own")]


@dataclass(frozen=True)
class Panelled:
    PANEL: ClassVar[str] = "Size"
    shared: SHARED = 1
    own: OWN = 2


def run(*, group: Panelled) -> None: ...


def test_a_groups_options_are_in_its_panel_unless_they_have_their_own() -> None:
    parameters = inspect.signature(flatten_groups(run)).parameters
    panels = {name: get_args(parameter.annotation)[1].rich_help_panel for name, parameter in parameters.items()}
    assert panels == {"shared": "Size", "own": "Own"}
    assert get_args(SHARED)[1].rich_help_panel is None, "the shared option itself is not changed"
