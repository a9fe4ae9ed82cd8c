"""Results in notebooks: escaped text, one span per run of tokens with the same origin."""

from __future__ import annotations

import re
from typing import Any

from foresay import Generation, Stats
from foresay.decoding.outcome import FinishReason, Origin, Step
from helpers.refusals import refused

WORDS = ["<script>", "alert(1)", "</script>", " & ", '"quoted"', " STOP"]


class Words:
    """A tokenizer whose token ids are indices of WORDS."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(WORDS[i] for i in ids)


def generation(*steps: tuple[tuple[int, ...], tuple[Origin, ...]], text: str, tokenizer: Any = None) -> Generation:
    done = [Step(0, ids, origins, len(ids) - 1, len(ids) - 1) for ids, origins in steps]
    ids = [token for step in done for token in step.token_ids]
    return Generation(text, ids, [1], FinishReason.STOP, done, Stats.of(done), None, True, tokenizer=tokenizer)


TWO_STEPS = (((0, 1, 2), (Origin.DRAFT, Origin.DRAFT, Origin.RESIDUAL)), ((3, 4), (Origin.DRAFT, Origin.BONUS)))


def body(html: str) -> str:
    found = re.search(r"<pre[^>]*>(.*)</pre>", html, re.DOTALL)
    assert found is not None
    return found[1]


def test_text_is_escaped_and_coloured_by_origin() -> None:
    html = generation(*TWO_STEPS, text="".join(WORDS[:5]), tokenizer=Words())._repr_html_()
    assert "<script" not in html
    spans = re.findall(r'<span title="(\w+): [^"]+" style="[^"]+">([^<]*)</span>', body(html))
    assert spans == [
        ("draft", "&lt;script&gt;alert(1)"),
        ("residual", "&lt;/script&gt;"),
        ("draft", " &amp; "),
        ("bonus", "&quot;quoted&quot;"),
    ]
    assert "5 tokens in 2 target passes; finish reason: stop" in html
    assert len(set(re.findall(r'style="(background[^"]+)"', html))) == 3, "a style for each origin"
    html = generation(text="", tokenizer=Words())._repr_html_()
    assert body(html) == "" and "0 tokens in 0 target passes" in html


def test_a_stop_string_is_cut_as_in_the_text() -> None:
    one = generation(((3, 5), (Origin.DRAFT, Origin.BONUS)), text=" & ", tokenizer=Words())
    assert "STOP" not in one._repr_html_()
    assert "".join(piece.text for piece in one.pieces()) == " &  STOP"


def test_without_a_tokenizer_the_text_is_plain() -> None:
    one = generation(*TWO_STEPS, text="<b>")
    assert body(one._repr_html_()) == "&lt;b&gt;" and "<span" not in one._repr_html_()
    with refused("tokenizer"):
        one.pieces()
    assert [piece.text for piece in one.pieces(Words())] == WORDS[:5]
