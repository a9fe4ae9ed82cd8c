"""Text of tokens as they come: whole characters, joined to the prompt, cut at stop strings, with the origin of each piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.outcome import Origin
from foresay.text.stream import Detokenizer, Piece, StopStrings, TextStream
from helpers.making import Spelling, byte_fallback, byte_level

D, R, B = Origin.DRAFT, Origin.RESIDUAL, Origin.BONUS
TOKENIZERS = pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
texts = st.text(
    alphabet=st.one_of(st.sampled_from("aé日😀\n .,\ufffd\u0301"), st.characters(codec="utf-8")), max_size=30
)


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


@TOKENIZERS
@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_full_decode(tokenizer: Any, text: str) -> None:
    """A character comes whole, with its last byte."""
    ids = encoded(tokenizer, text)
    *pieces, rest = pieces_of(tokenizer, ids)
    assert "".join(pieces) + rest == decoded(tokenizer, ids)
    assert "\ufffd" in text or (rest == "" and "\ufffd" not in "".join(pieces))


@given(ids=st.lists(st.integers(0, 319), max_size=25))
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_byte_level_ids_join_to_the_full_decode(ids: list[int]) -> None:
    """Broken characters and special tokens included."""
    assert "".join(pieces_of(byte_level(), ids)) == decoded(byte_level(), ids)


@given(text=texts, data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_cut_byte_fallback_output_keeps_its_whole_characters(text: str, data: st.DataObject) -> None:
    """A full decode turns a whole run of byte tokens into replacement characters when its last one is incomplete."""
    ids = encoded(byte_fallback(), text)
    *pieces, rest = pieces_of(byte_fallback(), ids[: data.draw(st.integers(0, len(ids)))])
    assert decoded(byte_fallback(), ids).startswith("".join(pieces))
    assert set(rest) <= {"\ufffd"}


def test_spaces_special_tokens_and_incomplete_characters() -> None:
    tokenizer, level = byte_fallback(), byte_level()
    ids = encoded(tokenizer, "a bc")
    assert pieces_of(tokenizer, ids)[:5] == ["", "a", " ", "b", "c"]
    assert "".join(pieces_of(tokenizer, [*ids[:2], tokenizer.eos_token_id, *ids[2:]])) == "a bc", "special: no text"
    assert len(encoded(tokenizer, "😀")) == 5 and pieces_of(level, encoded(level, "𝕏")) == ["", "", "", "𝕏", ""]
    detokenizer = Detokenizer(level)
    assert [detokenizer.push(token) for token in encoded(level, "𝕏")[:2]] == ["", ""]
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""], "what stays incomplete is flushed once"


@TOKENIZERS
def test_an_output_joins_its_prompt(tokenizer: Any) -> None:
    for prompt, output in (("the capital of", " paris. it"), ("a", "b"), ("ab", " c d"), ("é", " x"), ("a ", "b")):
        before, whole = encoded(tokenizer, prompt), encoded(tokenizer, prompt + output)
        for special in ([], [tokenizer.eos_token_id] * 12):
            assert Detokenizer(tokenizer, context=[*before, *special]).all(whole[len(before) :]) == output
    ids = encoded(tokenizer, "abé" + "fg é")
    cut = len(encoded(tokenizer, "abé")) - 1
    assert Detokenizer(tokenizer, context=ids[:cut]).all(ids[cut:]) == "éfg é", "it ends inside a character"


def test_a_context_of_bytes_begins_with_a_character() -> None:
    """Bytes are decoded in runs: a run that begins inside a character would have no character at all."""
    tokenizer = byte_fallback()
    for prompt in ("龘龘龘", "a😀😀😀", "龘" * 40, "é" * 9, "of"):
        for output, string in (("\n the", "\n"), ("靐龖齾.", "靐"), ("😀\n1.", "😀"), ("x", "x"), (" paris", " par")):
            before, ids = encoded(tokenizer, prompt), encoded(tokenizer, prompt + output)
            after = ids[len(before) :]
            assert Detokenizer(tokenizer, context=before).all(after) == output
            stop = StopStrings(tokenizer, (string,), context=before)
            assert stop(after) is not None and stop.cut_at == 0
    assert StopStrings(tokenizer, (" par",))(after) is None, "control: without the prompt the first space is lost"


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decoded = tokenizer, 0
        self.added_tokens_decoder = tokenizer.added_tokens_decoder

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


@TOKENIZERS
def test_the_work_of_a_token_is_bounded(tokenizer: Any) -> None:
    """Also of bytes that begin no character, bytes that begin one, special tokens and ids of no token."""
    broken = tokenizer.convert_tokens_to_ids("<0xFF>" if tokenizer is byte_fallback() else "Ń")
    lead = encoded(tokenizer, "𝕏")[-4]
    assert set(decoded(tokenizer, [broken] * 9 + [lead] * 9)) == {"\ufffd"}
    for token in (broken, lead, tokenizer.eos_token_id, len(tokenizer) + 7):
        counting, ids = Counting(tokenizer), [token] * 1000
        assert Detokenizer(counting).all(ids) == decoded(tokenizer, ids)
        assert counting.decoded < 40 * len(ids)
        assert Detokenizer(tokenizer).all([*ids, *encoded(tokenizer, "a b")]).endswith("a b")


LETTERS = Spelling("a", "b", "E", "N", "D", "xEN", "Dy", "END", "ENDEND", "\n\n", "EE", "aEND.")
A, LB, E, N, DD, XEN, DY, END, END2, NL2, EE, AEND = range(12)


@pytest.mark.parametrize(
    ("ids", "strings", "minimum", "keep", "cut_at"),
    [
        ([A, END], "END", 0, 2, 1), ([A, E, N, DD, LB], "END", 0, 4, 1), ([XEN, DY, LB], "END", 0, 2, 1),
        ([AEND, A], "END", 0, 1, 1), ([END2], "END", 0, 1, 0), ([E, E, N, DD], "END", 0, 4, 1),
        ([E, N, E, N], "END", 0, None, None), ([], "END", 0, None, None), ([A, LB, XEN, DY, A], "END", 0, 4, 3),
        ([A, END], "D END ND", 0, 2, 1), ([A, END, A, XEN, DY], "ENd end NDE", 0, None, None),
        ([END, A, END], "END", 1, 1, 0), ([END, A, END], "END", 2, 3, 4), ([END, A, END], "END", 3, 3, 4),
        ([END, A, END], "END", 4, None, None),
    ],
)  # fmt: skip
def test_a_stop_string_ends_with_the_token_that_completes_it(
    ids: list[int], strings: str, minimum: int, keep: int | None, cut_at: int | None
) -> None:
    """The first stop string that does not come too early ends the text, which is cut before it."""
    for blocks in ([ids], [[token] for token in ids], [ids[:1], ids[1:]]):
        stop, seen, kept = StopStrings(LETTERS, tuple(strings.split()), minimum), 0, None
        for block in blocks:
            if (count := stop(block)) is not None:
                kept = seen + count
                break
            seen += len(block)
        assert (kept, stop.cut_at) == (keep, cut_at)


def streamed(blocks: Sequence[Sequence[int]], stops: Sequence[str], minimum: int) -> tuple[str, bool]:
    """As the generator streams: the text, which is that of the output, and whether a string stopped it."""
    stop, stream = StopStrings(LETTERS, tuple(stops), minimum), TextStream(LETTERS, stops)
    pieces, after, ids = list[Piece](), list[str](), list[int]()
    for block in blocks:
        count = stop(block) if stops else None
        ids += block[:count]
        pieces += stream.push(block[:count], [D] * len(block[:count]))
        after.append("".join(piece.text for piece in pieces))
        if count is not None:
            break
    pieces += stream.finish(stopped=stop.cut_at is not None)
    whole = decoded(LETTERS, ids) if stop.cut_at is None else stop.text[: stop.cut_at]
    assert "".join(piece.text for piece in pieces) == whole
    assert all(whole.startswith(text) for text in after), "text was streamed that is not in the output"
    return whole, stop.cut_at is not None


@given(
    st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=4), max_size=6),
    st.lists(st.sampled_from(["END", "EN", "E", "DE", "aE", "\n", ".", "bb"]), max_size=3),
    st.sampled_from([0, 0, 1, 3, 6]),
)
@settings(max_examples=400, deadline=None)
def test_a_stream_never_takes_back_what_it_sent(blocks: list[list[int]], stops: list[str], minimum: int) -> None:
    """Nor is it cut by a string that came too early."""
    streamed(blocks, stops, minimum)


@pytest.mark.parametrize(
    ("blocks", "stops", "minimum", "text"),
    [
        ([[A, NL2]], ["\n"], 0, "a"), ([[LB, AEND]], ["END"], 0, "ba"), ([[EE]], ["E"], 0, ""),
        ([[XEN], [XEN]], ["EN", "ENxENxEN"], 2, "xENx"),
    ],
    ids=["a doubled newline", "text after the string", "the string twice in a token", "an early one that is held"],
)  # fmt: skip
def test_a_stop_string_is_not_streamed(blocks: Any, stops: list[str], minimum: int, text: str) -> None:
    """Nor the text after it in its token; an early one that is still held does not cut the stream."""
    assert streamed(blocks, stops, minimum) == (text, True)


def test_text_is_owed_to_the_token_that_completes_it() -> None:
    """Text that may begin a stop string is held back, and released by the text that follows or at the end."""
    level = byte_level()
    ids = encoded(level, "a𝕏")
    for tokenizer, stops, pushed, wanted in (
        (LETTERS, ["END"], [([A, E], [D, D]), ([N], [R]), ([LB], [B])],
         [[("a", D)], [], [("E", D), ("N", R), ("b", B)], []]),
        (LETTERS, ["END"], [([XEN], [R])], [[("x", R)], [("EN", R)]]),
        (LETTERS, [], [([A, E, END], [D, R, B])], [[("a", D), ("E", R), ("END", B)], []]),
        (level, [], [(ids[:4], [D, D, D, R]), (ids[4:], [B])], [[("a", D)], [("𝕏", B)], []]),
        (level, [], [(ids[1:4], [D, D, R])], [[], [("\ufffd", R)]]),
    ):  # fmt: skip
        stream = TextStream(tokenizer, stops)
        assert [*(stream.push(*one) for one in pushed), stream.finish(stopped=False)] == wanted
    with pytest.raises(ValueError, match="zip"):
        stream.push([A, LB], [D])


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from([D, R, B])), max_size=12))
@settings(max_examples=100, deadline=None)
def test_origins_are_preserved_through_holding_back(tokens: list[tuple[int, Origin]]) -> None:
    stream = TextStream(LETTERS, ["Q", "ENDa", "xENx"])
    pieces = [piece for token, origin in tokens for piece in stream.push([token], [origin])]
    pieces += stream.finish(stopped=False)
    expected = [(char, origin) for token, origin in tokens for char in LETTERS.tokens[token]]
    assert [(char, piece.origin) for piece in pieces for char in piece.text] == expected
