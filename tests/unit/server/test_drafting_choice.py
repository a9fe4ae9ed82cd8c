"""The drafting method of a request, and what clients learn about the methods: names without settings, which may be paths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foresay.decoding.acceptance import Speculative
from foresay.lengths import ConstantLength
from foresay.server.drafting_choice import DraftingChoice, drafting_facts
from foresay.server.errors import ApiError
from foresay.server.option_fields import Drafting

PATH = "/home/me/none/suffix/head"


@pytest.mark.parametrize(
    ("drafter", "shown"),
    [
        ("suffix", "suffix"),
        ("none", "none"),
        ("suffix(min_match=3)", "suffix"),
        ("hybrid(suffix, head(smollm2-135m, sample=false))", "hybrid(suffix, head)"),
        (f"head({PATH})", "head"),
        (f'hybrid(suffix; block("{PATH} model", nodes=4))', "hybrid(suffix, block)"),
        ("MyDrafter", "other"),
    ],
)
def test_facts_name_the_methods_and_no_path(drafter: str, shown: str) -> None:
    generator: Any = SimpleNamespace(drafter_name=drafter, policy=ConstantLength(5), rule=Speculative())
    facts = drafting_facts(generator)
    assert (facts["drafter"], facts["length"], facts["rule"]) == (shown, "constant", "speculative")


def test_every_choice_that_is_reported_is_accepted_and_others_are_not() -> None:
    generator: Any = SimpleNamespace(drafter_name="none", policy=ConstantLength(5), rule=Speculative())
    choices = drafting_facts(generator)["choices"]
    assert set(choices) == {"drafter", "length", "rule"} and "none" in choices["drafter"]
    assert "throughput" in choices["length"] and "constant" not in choices["length"], "which needs a number"
    for field, names in choices.items():
        for name in names:
            assert getattr(DraftingChoice.of(Drafting.model_validate({field: name})), field) == name
    for field, name in (("drafter", "model(x)"), ("length", "acceptance(x)"), ("rule", "unknown")):
        with pytest.raises(ApiError, match=f"foresay.{field}"):
            DraftingChoice.of(Drafting.model_validate({field: name}))
