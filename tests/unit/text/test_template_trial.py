"""Chat templates of files that take too much are refused when a model is loaded; all others are taken as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from foresay.errors import ModelLoadError
from foresay.models.sources.loading import load_tokenizer
from foresay.text.template_trial import LIMITS, check_template
from helpers import tiny

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEXTS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
TAKEN = [
    "{% for m in messages %}{{ m.content | trim }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{{ raise_exception('after the first message') }}",
    "{{ strftime_now('%Y') }}{{ tools | tojson(indent=2) }}{{ bos_token }}{% generation %}x{% endgeneration %}",
    "{% this is no template",
    "{{ ''.__class__.__mro__ }}{{ unknown.field }}",
]


def named(template: object) -> SimpleNamespace:
    return SimpleNamespace(chat_template=template, special_tokens_map={"bos_token": "<s>", "more": ["<a>"]})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ({"default": TAKEN[0], "tool_use": LOOPS}, "processor time"),
        ("{% if tools %}" + LOOPS + "{% endif %}", "processor time"),
        ("{{ 'a' * 4000000000 }}", "of memory"),
        ("{{ messages[0].content * 2000000000 }}", "of memory"),
        (TEXTS, "the chat template needs more than"),
    ],
)
def test_templates_that_take_too_much(template: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "cpu_s", 1.0)
    with pytest.raises(ModelLoadError, match=f"^name: .*{reason}"):
        check_template("name", named(template))


def test_other_templates() -> None:
    for template in (None, *TAKEN):
        check_template("name", named(template))


def test_it_is_tried_when_a_model_is_loaded(tmp_path: Path) -> None:
    tiny.tokenizer(chat="{{ 'a' * 4000000000 }}").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="of memory"):
        load_tokenizer(tmp_path)
