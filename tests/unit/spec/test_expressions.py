"""The grammar of expressions: what they mean, that they can be written back, and how bad ones are reported."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.errors import ConfigError, UnknownNameError
from foresay.spec.expressions import Call, apply, parse
from helpers.refusals import refused


def call(name: str, *values: Any, **named: Any) -> Call:
    return Call(name, (*((None, value) for value in values), *named.items()))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("max_gram", call("max_gram")),
        ("  max_gram ", call("max_gram")),
        ("max_gram()", call("max_gram")),
        ("none", call("none")),
        ("suffix(3)", call("suffix", 3)),
        ("suffix(-3, 0.5, 1e-3, .5)", call("suffix", -3, 0.5, 1e-3, 0.5)),
        ("f(true, FALSE, None, truth)", call("f", True, False, None, "truth")),
        ("prompt_lookup(max_ngram=6)", call("prompt_lookup", max_ngram=6)),
        ("f ( 1 ; b = 2 , ) ", call("f", 1, b=2)),
        ("model(org/name-7B.gguf)", call("model", "org/name-7B.gguf")),
        (r"model(C:\models\a)", call("model", r"C:\models\a")),
        ('model("my model, (two)")', call("model", "my model, (two)")),
        ("""model('say "hi"')""", call("model", 'say "hi"')),
        ('model("12", "true", "")', call("model", "12", "true", "")),
        ("f([[5, 14], [0, 1],], [])", call("f", [[5, 14], [0, 1]], [])),
        ("f(k=[1; 2])", call("f", k=[1, 2])),
        ("a(b(c=d(1)), [e()])", call("a", call("b", c=call("d", 1)), [call("e")])),
        ('f("k"=1)', call("f", k=1)),
        (
            "c(model=A, model=B, g; k=[[1,2],[0,1]], lenience=2)",
            Call("c", (("model", "A"), ("model", "B"), (None, "g"), ("k", [[1, 2], [0, 1]]), ("lenience", 2))),
        ),
    ],
)
def test_what_an_expression_means(text: str, wanted: Call) -> None:
    assert parse(text) == wanted
    assert parse(str(wanted)) == wanted, str(wanted)


words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="'"), max_size=8) | st.sampled_from(
    ["true", "12", "none", "1e5", "a b", "a,b", "(", "x=y", "inf", " "]
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(
    lambda n: n not in ("true", "false", "none", "nan", "inf")
)
numbers = st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
plain = numbers | st.booleans() | st.none() | words


def calls(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    named = st.tuples(st.none() | names, values)
    return st.builds(Call, names, st.lists(named, max_size=4).map(tuple))


values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | calls(inner), max_leaves=8)


@given(calls(values))
@settings(max_examples=60, deadline=None)
def test_what_is_written_back_means_the_same(one: Call) -> None:
    assert parse(str(one)) == one


@given(st.text("ab1=,;()[]'\" .-", max_size=12))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_call_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        assert parse(str(parse(text))) == parse(text)


WRONG = (
    "", "   ", "3", "[a]", "true", "a b", "a)", "f(", "f(1", "f(1 2)", "f(,)", "f(a,,b)", "f(a=)", "f(3=4)", "f([1)", "f([1",
    "f(  'a)", "it's",
)  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_expression_is_named(text: str) -> None:
    with refused("expression", text):
        parse(text)


def _two(first: int, second: int = 2) -> tuple[int, int]:
    return first, second


def _many(*items: tuple[str | None, Any], k: int) -> Any:
    return items, k


KNOWN: dict[str, Any] = {"two": _two, "many": _many}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("two(5)", (5, 2)),
        ("two(second=1, first=3)", (3, 1)),
        ("two(second=1, 3)", (3, 1)),
        ("many(a, b=1, k=2)", (((None, "a"), ("b", 1)), 2)),
        ("many(k=2)", ((), 2)),
    ],
)
def test_a_calls_values_meet_parameters(text: str, wanted: Any) -> None:
    assert apply("thing", parse(text), KNOWN) == wanted


@pytest.mark.parametrize(
    ("text", "kind", "param", "value"),
    [
        ("tow(5)", UnknownNameError, "thing", "tow"),
        *(
            (text, ConfigError, "thing", text)
            for text in (
                "two(1, 2, 3)",
                "two(1, first=2)",
                "two(first=1, 2)",
                "two(first=1, first=2)",
                "many(k=1, k=2)",
                "two",
            )
        ),
        ("many(a)", ConfigError, "thing", "many"),
        ("two(1, secnd=2)", UnknownNameError, "setting", "secnd"),
    ],
)
def test_what_does_not_meet_them(text: str, kind: type[Exception], param: str, value: Any) -> None:
    with refused(param, value, kind):
        apply("thing", parse(text), KNOWN)
