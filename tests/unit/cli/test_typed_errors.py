"""Errors in the words of the command line."""

from __future__ import annotations

import pytest

from foresay.cli.typed_errors import as_typed

FLAGS = {
    name: "--" + name.replace("_", "-")
    for name in ("top_k", "length", "dtype", "device_map", "draft", "batch_size", "model")
}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("top_k=-1 must be an integer at least 0", "--top-k -1 must be an integer at least 0"),
        ("length='x' and dtype='fp32' contradict", "--length 'x' and --dtype 'fp32' contradict"),
        ("needs a draft model; pass draft=", "needs a draft model; pass --draft"),
        (
            "max_memory needs a device_map; add device_map='auto'",
            "max_memory needs a --device-map; add --device-map 'auto'",
        ),
        ("max_batch_size=0 must be at least 1", "--batch-size 0 must be at least 1"),
        ("'f(top_k=3)': unknown setting", "'f(top_k=3)': unknown setting"),
        ("'cascade(model=A, length=3)' ends", "'cascade(model=A, length=3)' ends"),
        ("was begun with params.top_k=4, and this run has 5", "was begun with params.top_k=4, and this run has 5"),
        ("foresay.toml: dtype='x' must be a text", "foresay.toml: dtype='x' must be a text"),
        ("the length of it, and a model", "the length of it, and a model"),
        ("cannot read '/a/top_k'", "cannot read '/a/top_k'"),
    ],
)
def test_names_of_python_arguments_become_flags(message: str, wanted: str) -> None:
    assert as_typed(message, FLAGS) == wanted
