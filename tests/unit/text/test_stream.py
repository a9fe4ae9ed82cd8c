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
TOKENIZERS = pytest.mark.parametrize("make", [byte_level, byte_fallback])
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
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_full_decode(make: Any, text: str) -> None:
    ids = encoded(make(), text)
    assert "".join(pieces_of(make(), ids)) == decoded(make(), ids)


@given(ids=st.lists(st.integers(0, 319), max_size=25))
@settings(max_examples=200, deadline=None)
def test_pieces_of_any_byte_level_ids_join_to_the_full_decode(ids: list[int]) -> None:
    """Broken characters and special tokens included."""
    assert "".join(pieces_of(byte_level(), ids)) == decoded(byte_level(), ids)


@given(text=texts, data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_cut_byte_fallback_output_keeps_its_whole_characters(text: str, data: st.DataObject) -> None:
    """A full decode turns a whole run of byte tokens into replacement characters when its last one is incomplete."""
    ids = encoded(byte_fallback(), text)
    cut = ids[: data.draw(st.integers(0, len(ids)))]
    *pieces, rest = pieces_of(byte_fallback(), cut)
    assert decoded(byte_fallback(), ids).startswith("".join(pieces))
    assert set(rest) <= {"\ufffd"}


@TOKENIZERS
@pytest.mark.parametrize("text", ["日本", "😀", "a😀b", "é"])
def test_a_character_comes_whole_with_its_last_byte(make: Any, text: str) -> None:
    tokenizer = make()
    ids = encoded(tokenizer, text)
    *pieces, rest = pieces_of(tokenizer, ids)
    assert rest == ""
    assert "".join(pieces).strip() == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_spaces_special_tokens_and_incomplete_characters() -> None:
    tokenizer, level = byte_fallback(), byte_level()
    ids = encoded(tokenizer, "a bc")
    assert pieces_of(tokenizer, ids)[:5] == ["", "a", " ", "b", "c"]
    assert "".join(pieces_of(tokenizer, [*ids[:2], tokenizer.eos_token_id, *ids[2:]])) == "a bc", "special: no text"
    assert len(encoded(tokenizer, "😀")) == 5 and pieces_of(level, encoded(level, "𝕏")) == ["", "", "", "𝕏", ""]
    detokenizer = Detokenizer(level)
    assert [detokenizer.push(token) for token in encoded(level, "𝕏")[:2]] == ["", ""]
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""], "what stays incomplete is flushed once"


# --- context ---


@TOKENIZERS
@pytest.mark.parametrize(
    ("prompt", "output"), [("the capital of", " paris. it"), ("a", "b"), ("ab", " c d"), ("é", " x"), ("a ", "b")]
)
def test_an_output_joins_its_prompt(make: Any, prompt: str, output: str) -> None:
    tokenizer = make()
    before, whole = encoded(tokenizer, prompt), encoded(tokenizer, prompt + output)
    assert whole[: len(before)] == before
    for special in ([], [tokenizer.eos_token_id] * 12):
        assert Detokenizer(tokenizer, context=[*before, *special]).all(whole[len(before) :]) == output


def test_a_stop_string_may_begin_with_the_first_space() -> None:
    tokenizer = byte_fallback()
    before, ids = encoded(tokenizer, "of"), encoded(tokenizer, "of paris x")[3:]
    stop = StopStrings(tokenizer, (" par",), context=before)
    assert stop(ids) == 4 and stop.cut_at == 0
    assert StopStrings(tokenizer, (" par",))(ids) is None, "control: without the prompt the space is lost"


@pytest.mark.parametrize("prompt", ["龘龘龘", "a😀😀😀", "龘" * 40, "é" * 9])
@pytest.mark.parametrize("output", ["\n the", "靐龖齾.", "😀\n1.", "x"])
def test_a_context_of_bytes_begins_with_a_character(prompt: str, output: str) -> None:
    """Bytes are decoded in runs: a run that begins inside a character would have no character at all."""
    tokenizer = byte_fallback()
    before, whole = encoded(tokenizer, prompt), encoded(tokenizer, prompt + output)
    assert Detokenizer(tokenizer, context=before).all(whole[len(before) :]) == output
    stop = StopStrings(tokenizer, (output[0],), context=before)
    assert stop(whole[len(before) :]) is not None and stop.cut_at == 0


@TOKENIZERS
def test_a_prompt_that_ends_inside_a_character(make: Any) -> None:
    ids = encoded(make(), "abé" + "fg é")
    cut = len(encoded(make(), "abé")) - 1
    assert Detokenizer(make(), context=ids[:cut]).all(ids[cut:]) == "éfg é"


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decoded = tokenizer, 0
        self.added_tokens_decoder = tokenizer.added_tokens_decoder

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


def garbage(tokenizer: Any, kind: str, count: int) -> list[int]:
    """Tokens that complete no character: bytes that begin none, bytes that begin one, special tokens, ids of no token."""
    unknown = len(tokenizer) + 7
    lead = encoded(tokenizer, "𝕏")[-4]
    return {
        "no character": [tokenizer.convert_tokens_to_ids("<0xFF>" if make_is_fallback(tokenizer) else "Ń")] * count,
        "a beginning": [lead] * count,
        "special": [tokenizer.eos_token_id] * count,
        "unknown": [unknown] * count,
    }[kind]


def make_is_fallback(tokenizer: Any) -> bool:
    return tokenizer is byte_fallback()


@TOKENIZERS
@pytest.mark.parametrize("kind", ["no character", "a beginning", "special", "unknown"])
def test_the_work_of_a_token_is_bounded(make: Any, kind: str) -> None:
    tokenizer = make()
    ids = garbage(tokenizer, kind, 2000)
    if kind in ("no character", "a beginning"):
        assert set(decoded(tokenizer, ids)) == {"\ufffd"}
    counting = Counting(tokenizer)
    text = Detokenizer(counting).all(ids)
    assert counting.decoded < 40 * len(ids)
    assert text == decoded(tokenizer, ids)
    after = encoded(tokenizer, "a b")
    assert Detokenizer(tokenizer).all([*ids, *after]).endswith("a b")


# --- stop strings ---

LETTERS = Spelling("a", "b", "E", "N", "D", "xEN", "Dy", "END", "ENDEND", "\n\n", "EE", "aEND.")
A, LB, E, N, DD, XEN, DY, END, END2, NL2, EE, AEND = range(12)


def stopper(*strings: str, min_new_tokens: int = 0) -> StopStrings:
    return StopStrings(LETTERS, strings, min_new_tokens)


@pytest.mark.parametrize(
    ("ids", "strings", "keep", "cut_at"),
    [
        ([A, END], "END", 2, 1), ([A, E, N, DD, LB], "END", 4, 1), ([XEN, DY, LB], "END", 2, 1), ([AEND, A], "END", 1, 1),
        ([END2], "END", 1, 0), ([E, E, N, DD], "END", 4, 1), ([E, N, E, N], "END", None, None), ([], "END", None, None),
        ([A, LB, XEN, DY, A], "END", 4, 3), ([A, END], "D END ND", 2, 1), ([A, END, A, XEN, DY], "ENd end NDE", None, None),
    ],
)  # fmt: skip
def test_a_stop_string_ends_with_the_token_that_completes_it(
    ids: list[int], strings: str, keep: int | None, cut_at: int | None
) -> None:
    """The first stop string in the text ends it; the text is cut before it."""
    for blocks in ([ids], [[token] for token in ids], [ids[:1], ids[1:]]):
        stop, seen, kept = stopper(*strings.split()), 0, None
        for block in blocks:
            count = stop(block)
            if count is not None:
                kept = seen + count
                break
            seen += len(block)
        assert (kept, stop.cut_at) == (keep, cut_at)


@pytest.mark.parametrize(("minimum", "keep"), [(0, 1), (1, 1), (2, 3), (3, 3), (4, None)])
def test_a_string_completed_too_early_does_not_stop(minimum: int, keep: int | None) -> None:
    stop = stopper("END", min_new_tokens=minimum)
    assert stop([END, A, END]) == keep
    assert stop.cut_at == {1: 0, 3: 4, None: None}[keep]


# --- streams ---


def streamed(
    tokenizer: Any, blocks: Sequence[Sequence[int]], stops: Sequence[str], minimum: int = 0
) -> tuple[list[Piece], list[str], str, bool]:
    """As the generator streams: the pieces, the text after each push, the text as generated in one piece, and whether
    a string stopped it."""
    stop = StopStrings(tokenizer, tuple(stops), minimum)
    stream = TextStream(tokenizer, stops)
    pieces: list[Piece] = []
    after: list[str] = []
    ids: list[int] = []
    for block in blocks:
        count = stop(block) if stops else None
        kept = list(block)[:count]
        ids += kept
        pieces += stream.push(kept, [D] * len(kept))
        after.append("".join(piece.text for piece in pieces))
        if count is not None:
            break
    pieces += stream.finish(stopped=stop.cut_at is not None)
    whole = stop.text[: stop.cut_at] if stop.cut_at is not None else decoded(tokenizer, ids)
    return pieces, after, whole, stop.cut_at is not None


def assert_stream_is_generation(blocks: Sequence[Sequence[int]], stops: Sequence[str], minimum: int = 0) -> None:
    pieces, after, whole, _ = streamed(LETTERS, blocks, stops, minimum)
    assert "".join(piece.text for piece in pieces) == whole
    assert all(text == whole[: len(text)] for text in after), "text was streamed that is not in the output"


blocks_of_letters = st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=4), max_size=6)


@given(blocks_of_letters, st.lists(st.sampled_from(["END", "EN", "E", "DE", "aE", "\n", ".", "bb"]), max_size=3))
@settings(max_examples=400, deadline=None)
def test_a_stream_never_takes_back_what_it_sent(blocks: list[list[int]], stops: list[str]) -> None:
    assert_stream_is_generation(blocks, stops)


@given(blocks_of_letters, st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_a_stream_ignores_strings_that_came_too_early(blocks: list[list[int]], minimum: int) -> None:
    assert_stream_is_generation(blocks, ["END", "E"], minimum)


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
    pieces, after, whole, stopped = streamed(LETTERS, blocks, stops, minimum)
    assert stopped and whole == text and text.startswith(after[-1])
    assert "".join(piece.text for piece in pieces) == text


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
@settings(max_examples=200, deadline=None)
def test_origins_are_preserved_through_holding_back(tokens: list[tuple[int, Origin]]) -> None:
    stream = TextStream(LETTERS, ["Q", "ENDa", "xENx"])
    pieces: list[Piece] = []
    for token, origin in tokens:
        pieces += stream.push([token], [origin])
    pieces += stream.finish(stopped=False)
    expected = [(char, origin) for token, origin in tokens for char in LETTERS.tokens[token]]
    assert [(char, piece.origin) for piece in pieces for char in piece.text] == expected
