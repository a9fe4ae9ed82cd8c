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
from foresay.errors import ConfigError, ForesayError, UnknownNameError
from foresay.spec.recipe import DrafterBuilder, Recipe, Resources, own_drafter_recipe

GROUP = "foresay.drafters"


def names() -> list[str]:
    """Names of all registered drafters, without importing them."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def recipe_maker(name: str) -> Callable[..., Recipe]:
    """Import a drafter and return the function from its settings to a recipe; its docstring is the drafter's.

    Raises UnknownNameError if no package registers the name, and ConfigError, which names the package, for a drafter that
    cannot be imported, whose parameters cannot be settings, or that is registered twice.
    """
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        raise UnknownNameError("drafter", name, names())
    if len(found) != 1:
        packages = ", ".join(sorted(map(_package, found)))
        raise ConfigError(f"is registered by {packages}; uninstall all but one", param="drafter", value=name)
    [point] = found
    try:
        maker: Any = point.load()
        signature = _signature(maker)
    except Exception as error:
        text = f"of {_package(point)} ({point.value}) cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(text, param="drafter", value=name) from error

    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            text = f"of {_package(point)} has the parameter {str(parameter)!r}, which cannot be a setting; settings have names"
            raise ConfigError(text, param="drafter", value=name)

    def make(*values: Any, **settings: Any) -> Recipe:
        def build() -> Drafter:
            return _build(point, lambda: maker(*values, **settings))

        def prepare(resources: Resources) -> DrafterBuilder:
            checked = [build()]  # wrong settings must fail before the first request
            return lambda: checked.pop() if checked else build()

        return own_drafter_recipe(prepare)

    make.__signature__ = signature  # type: ignore[attr-defined]
    make.__doc__ = inspect.getdoc(maker)
    return make


def _signature(maker: Any) -> inspect.Signature:
    """Return the parameters of a class or function; a class without its own __init__ has none, though protocols accept any."""
    if inspect.isclass(maker):
        bases = [one for one in maker.__mro__ if one is not object and not getattr(one, "_is_protocol", False)]
        if not any("__init__" in vars(one) for one in bases):
            return inspect.Signature()
    return inspect.signature(maker)


def _build(point: EntryPoint, make: Callable[[], Any]) -> Drafter:
    try:
        drafter = make()
    except ForesayError:
        raise
    except Exception as error:
        text = f"of {_package(point)} raises {type(error).__name__}: {error}"
        raise ConfigError(text, param="drafter", value=point.name) from error
    if not hasattr(drafter, "propose"):
        text = f"of {_package(point)} makes a {type(drafter).__name__}, which has no propose(); it must make a foresay.Drafter"
        raise ConfigError(text, param="drafter", value=point.name)
    return cast(Drafter, drafter)


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
