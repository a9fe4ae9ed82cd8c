from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from foresay import errors
from foresay.decoding.acceptance import RULES, make_rule
from foresay.errors import MAX_SHOWN, ConfigError, ForesayError, RequestError, UnknownNameError, shown
from helpers.refusals import refused

DRAWN = dict(re.findall(r"── (\w+) *(?:\((\w+)\))?", errors.__doc__ or ""))
"""Names below ForesayError in the tree of the module's docstring, and the other bases that it states."""
NAMES = (
    "ConfigError PromptError UnknownNameError ContextLengthError OutOfMemoryError RequestError QueueFullError "
    "VocabularyMismatchError UnsupportedModelError ModelNotFoundError ModelLoadError"
)


def _exceptions() -> dict[str, type[BaseException]]:
    return {n: v for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, BaseException)}


def test_the_tree_is_the_one_drawn() -> None:
    bases = {name: [base.__name__ for base in kind.__bases__] for name, kind in _exceptions().items()}
    below = dict.fromkeys(("PromptError", "UnknownNameError"), "ConfigError")
    wanted = {name: [below.get(name, "ForesayError"), *filter(None, [other])] for name, other in DRAWN.items()}
    assert bases == {**wanted, "ForesayError": ["Exception"]} and list(DRAWN) == NAMES.split()


def test_the_nearest_name_is_offered() -> None:
    message = str(UnknownNameError("rule", "blok", {"speculative", "block", "match"}))
    assert message == "rule='blok' is unknown. Did you mean 'block'? Known: block, match, speculative."
    assert str(UnknownNameError("rule", "zzz", ["block", "match"])) == "rule='zzz' is unknown. Known: block, match."
    assert {name: make_rule(name).name for name in RULES} == {name: name for name in RULES}
    with refused("rule", "speculativ", UnknownNameError):
        make_rule("speculativ")


@pytest.mark.parametrize("name", ["ForesayError", *NAMES.split()])
def test_every_error_can_be_about_something(name: str) -> None:
    kind = _exceptions()[name]
    arguments = {UnknownNameError: ("rule", "blok", ["block"]), RequestError: (7, "no room")}.get(kind, ("no room",))
    error = kind(*arguments)
    assert isinstance(error, ForesayError)
    before, about = str(error), error.about("prompt 'a'")
    assert type(about) is kind and str(about) == f"prompt 'a': {before}"
    assert str(error) == before and about.about("file 'f'").args == (f"file 'f': prompt 'a': {before}",)


def test_what_an_error_knows_besides_its_message_stays() -> None:
    class OwnError(ForesayError):
        def __init__(self, *, place: int) -> None:
            super().__init__(f"at {place}")
            self.place = place

    assert RequestError(7, "no room").about("batch").request_id == 7
    about = OwnError(place=3).about("line")
    assert (type(about), str(about), about.place) == (OwnError, "line: at 3", 3)


def test_a_wrong_value_is_kept_with_its_parameter() -> None:
    error = ConfigError("must be positive", param="k", value=-1).about("file 'f'")
    assert (str(error), error.param, error.value) == ("file 'f': k=-1 must be positive", "k", -1)
    assert str(ConfigError(": not JSON", param="f.json", value="{")) == "f.json: not JSON"
    assert str(ConfigError("no room")) == "no room" and str(ConfigError("is empty", param="k")) == "k is empty"


def test_a_value_is_shown_on_one_line_and_cut() -> None:
    assert shown(Path("a")) == "'a'" and shown("a\nb") == r"'a\nb'" and "\n" not in shown(np.zeros((3, 3)))
    assert [len(shown(value)) for value in ("x" * 1000, b"x" * 1000, ["x"] * 1000)] == [MAX_SHOWN + 3] * 3


def without_param(source: str) -> list[int]:
    """Lines on which a ConfigError is made without a parameter."""
    tree = ast.parse(source if "ConfigError(" in source else "")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "ConfigError"]
    return [call.lineno for call in made if not any(keyword.arg == "param" for keyword in call.keywords)]


def test_every_config_error_has_its_parameter() -> None:
    root = Path(errors.__file__).parent
    found = {str(file.relative_to(root)): without_param(file.read_text("utf-8")) for file in root.rglob("*.py")}
    assert {file: lines for file, lines in found.items() if lines} == {}
    assert without_param('ConfigError("k is wrong")\nConfigError("is wrong", param="k", value=1)') == [1]
