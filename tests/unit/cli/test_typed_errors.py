"""Errors in the words of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foresay.cli.typed_errors import as_typed
from foresay.errors import ConfigError

NAMES = ("top_k", "length", "device_map", "draft", "batch_size", "greedy", "output", "texts")
FLAGS = {name: "--" + name.replace("_", "-") for name in NAMES} | {"model": "MODEL", "port": "FORESAY_SERVE_PORT"}
GIVEN = {"output": Path("a.json"), "texts": ("b.txt", "c d.txt"), "length": 3, "draft": None}


@pytest.mark.parametrize(
    ("param", "value", "wanted"),
    [
        ("top_k", -1, "--top-k -1"),
        ("length", "confidence(x=0.5)", "--length 'confidence(x=0.5)'"),
        ("draft", "a/b", "--draft a/b"),
        ("draft", "\x1b[2J", "--draft '\\x1b[2J'"),
        ("draft", "x" * 300, f"--draft '{'x' * 199}..."),
        ("max_batch_size", 0, "--batch-size 0"),
        ("--output", Path("a b"), "--output 'a b'"),
        ("greedy", False, "--greedy"),
        ("model", "gpt2", "MODEL gpt2"),
        ("port", 0, "FORESAY_SERVE_PORT=0"),
        ("path", "a.json", "--output a.json"),
        ("folder", Path("c d.txt"), "--texts 'c d.txt'"),
        ("path", "other.json", "other.json"),
        ("foresay.toml: length", 0, "foresay.toml: length=0"),
        ("scale", 1.5, "scale=1.5"),
    ],
)
def test_parameters_are_named_as_they_are_typed(param: str, value: Any, wanted: str) -> None:
    assert ConfigError("is wrong", param=param, value=value).worded(as_typed(FLAGS, GIVEN)) == f"{wanted} is wrong"


def test_other_parameters_are_named_as_they_are_typed() -> None:
    error = ConfigError(
        "and {device_map} contradict; drop {draft}", param="top_k", value=3, device_map="auto", draft=...
    )
    assert error.worded(as_typed(FLAGS, {})) == "--top-k 3 and --device-map auto contradict; drop --draft"
    assert str(error) == "top_k=3 and device_map='auto' contradict; drop draft"


def test_settings_of_an_expression_keep_their_names() -> None:
    error = ConfigError("is wrong", param="top_k", value=3)
    assert error.about("f(top_k=3)", owned=True).worded(as_typed(FLAGS, {})) == "f(top_k=3): top_k=3 is wrong"
    assert error.about("prompt 'a'").worded(as_typed(FLAGS, {})) == "prompt 'a': --top-k 3 is wrong"
