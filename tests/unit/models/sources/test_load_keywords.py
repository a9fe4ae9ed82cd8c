"""LoadKeywords, which types the keyword arguments of `foresay.load`, agrees with LoadOptions."""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_type_hints

import foresay
from foresay.models.sources.load_options import LoadKeywords, LoadOptions


def test_the_names_and_types_are_those_of_load_options() -> None:
    options = get_type_hints(LoadOptions)
    assert get_type_hints(LoadKeywords) == {
        field.name: options[field.name] for field in dataclasses.fields(LoadOptions)
    }


def test_every_keyword_may_be_left_out() -> None:
    assert LoadKeywords.__required_keys__ == frozenset()


def test_load_takes_them() -> None:
    options = inspect.signature(foresay.load).parameters["options"]
    assert options.kind is inspect.Parameter.VAR_KEYWORD and str(options.annotation) == "Unpack[LoadKeywords]"
