"""Drafters of other installed packages, by entry points of the group `foresay.drafters`.

An entry point's name is the drafter's name in expressions; its object is a class or function that makes a drafter, and its
parameters are the settings. Entry points are read when a name is not foresay's own, or when all drafters are listed. Nothing is
imported before it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from foresay.decoding.protocols import Drafter
from foresay.errors import ConfigError, ForesayError
from foresay.spec.recipe import DrafterBuilder, Recipe, Resources

GROUP = "foresay.drafters"
_LENGTH = 5
"""Draft tokens per pass unless a length is given."""


def names() -> list[str]:
    """Names of all registered drafters, without importing them."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def recipe_maker(name: str) -> Callable[..., Recipe]:
    """Import a drafter and return the function from its settings to a recipe; its docstring is the drafter's.

    Raises ConfigError, naming the distribution, for a drafter that cannot be imported, is not callable, or is registered twice.
    """
    found = list(entry_points(group=GROUP, name=name))
    if len(found) != 1:
        packages = ", ".join(sorted(map(_package, found)))
        raise ConfigError(f"drafter {name!r} is registered by {packages}; uninstall all but one")
    [point] = found
    try:
        maker: Any = point.load()
        signature = inspect.signature(maker)
    except Exception as error:
        raise ConfigError(
            f"drafter {name!r} of {_package(point)} ({point.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error

    def make(*values: Any, **settings: Any) -> Recipe:
        def build() -> Drafter:
            return _built(point, lambda: maker(*values, **settings))

        def prepare(resources: Resources) -> DrafterBuilder:
            build()  # wrong settings must fail before the first request
            return build

        return Recipe(prepare, _LENGTH, samples=True)

    make.__signature__ = signature  # type: ignore[attr-defined]
    make.__doc__ = inspect.getdoc(maker)
    return make


def _built(point: EntryPoint, make: Callable[[], Any]) -> Drafter:
    try:
        drafter = make()
    except ForesayError:
        raise
    except Exception as error:
        raise ConfigError(f"drafter {point.name!r} of {_package(point)}: {type(error).__name__}: {error}") from error
    if not hasattr(drafter, "propose"):
        raise ConfigError(
            f"drafter {point.name!r} of {_package(point)} makes a {type(drafter).__name__}, which has no propose(); "
            "it must make a foresay.Drafter"
        )
    return cast(Drafter, drafter)


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
