"""Tokenizers built of GGUF files: each token is the file's, texts end where llama.cpp ends them, and flags are honoured."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece

import foresay
from foresay.errors import ModelLoadError
from foresay.models.gguf import tokenizer as building
from foresay.models.gguf.header import read_header
from foresay.models.gguf.vocabulary import read_vocabulary
from foresay.models.sources import gguf_file
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_tokenizer
from helpers import tiny
from helpers.gguf_cases import file_of
from helpers.gguf_vocabularies import MARKS, texts, trained, write_vocabulary

NORMAL, CONTROL, USER = 1, 3, 4


def small(path: Path, *marks: str, kind: int = CONTROL, **values: Any) -> Path:
    """A vocabulary of four letters, "ab", marks from id 5 on, and no end of its own unless a value gives one."""
    types = [NORMAL] * 5 + [kind] * len(marks)
    return write_vocabulary(path / "a.gguf", [*"abcd", "ab", *marks], types, merges=[("a", "b")], **values)


def ends_of(path: Path) -> tuple[int, ...]:
    found = read_vocabulary(read_header(path))
    assert found is not None
    return found.ends


# -- ends --------------------------------------------------------------------------------------------------------------

ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> "
    "_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ "
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
"""The names by which llama.cpp knows ends of generation."""


OF_FILES: list[tuple[str, int, dict[str, int], tuple[int, ...]]] = [
    (["<x>", "<|im_end|>"], CONTROL, {"eos_token_id": 5}, (5, 6)),
    (["<x>", "<y>", "<z>"], CONTROL, {"eos_token_id": 7, "eot_token_id": 5, "eom_token_id": 6}, (7, 5, 6)),
    (["<|end|>", "<|return|>", "<|call|>"], CONTROL, {"eos_token_id": 6}, (6, 7)),
    (["<|end|>", "<|return|>", "<|call|>"], CONTROL, {"eos_token_id": 6, "eot_token_id": 5}, (6, 7)),
    (["<|end|>", "<|flush|>", "<|calls|>"], CONTROL, {}, (6, 7)),
    (["<|end|>", "<|return|>"], CONTROL, {}, (5, 6)),
    (["</s>", "<|tool_response>"], CONTROL, {}, (6,)),
    (["</s>", "<turn|>"], CONTROL, {}, (5, 6)),
    (["<|im_end|>"], USER, {}, (5,)),
    (["<|im_end|>"], NORMAL, {}, (5,)),  # converters forget some; llama.cpp takes it for a control token, too
    (["</s>", "<|x|>"], NORMAL, {}, ()),  # ordinary text of a page
    (["<x>", "<y>"], CONTROL, {"fim_pad_token_id": 5, "fim_pre_token_id": 6}, (5,)),
]


def test_the_ends_of_a_file(tmp_path: Path) -> None:
    """Marks that llama.cpp knows by their names, and those that values name."""
    for mark in ENDS.split():
        assert ends_of(small(tmp_path, "<s>", mark)) == (6,), mark
    for marks, kind, values, ends in OF_FILES:
        assert ends_of(small(tmp_path, *marks, kind=kind, **values)) == ends, marks


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_a_chat_ends_with_its_turn(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its mark's name alone, in blocks, dequantized and under llama.cpp. Control: a file without that mark."""
    options = LoadOptions(dtype=dtype)
    assert load_model(file_of("llama", tmp_path), options).eos_token_ids == {0}
    monkeypatch.setattr(tiny, "SPECIALS", ("<eos>", "<bos>", "<end_of_turn>", "<assistant>"))
    path = file_of("llama", tmp_path)
    loaded: Any = load_model(path, options)
    assert loaded.eos_token_ids == {0, 2} and loaded.model.model.generation_config.eos_token_id == [0, 2]
    result = foresay.load(str(path), drafter="none", dtype=dtype).generate(
        [70, 9], max_new_tokens=8, logit_bias={2: 100.0}
    )
    assert list(result.token_ids) in ([], [2]) and result.finish_reason == "stop"
    monkeypatch.setattr(gguf_file, "open_gguf", lambda header, options: SimpleNamespace(weights=None))
    assert load_model(path, LoadOptions(backend="llama.cpp")).eos_token_ids == {0, 2}


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_each_token_is_the_files_own(tmp_path: Path) -> None:
    """With marks of full-width bars, which transformers' conversion cuts into pieces outside the vocabulary."""
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", pre="deepseek-r1-qwen", eos_token_id=1))
    tokens = [*trained()[0], *MARKS]
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokens))] == tokens
    assert len(tokenizer) == len(tokens)
    for mark in MARKS:
        assert tokenizer(mark).input_ids == [tokens.index(mark)]
        assert tokenizer(f"hello{mark} world").input_ids.count(tokens.index(mark)) == 1
        shown = tokenizer.decode([tokens.index(mark)], skip_special_tokens=True)
        assert shown == (mark if MARKS[mark] == USER else "")
    for text in texts():
        ids = tokenizer(text).input_ids
        assert max(ids) < len(tokens)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        (next(iter(MARKS)), r"its token \d+, '<｜Assistant｜>', is encoded as \["),
        ("<outside>", r"its token '<outside>' has id none, but 3006 in the tokenizer"),
    ],
)
def test_a_tokenizer_that_differs_from_its_file_is_refused(
    tmp_path: Path, instead: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a mark were forgotten, or another token added."""
    add = building.AddedToken
    monkeypatch.setattr(building, "AddedToken", lambda one, **how: add(instead if "Assistant" in one else one, **how))
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(write_vocabulary(tmp_path / "a.gguf"))


def test_empty_tokens_get_names(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", ["a", "aa", "", ""], [1, 1, 1, 1], merges=[("a", "a")])
    assert load_tokenizer(path).get_vocab() == {"a": 0, "aa": 1, "[EMPTY_2]": 2, "[EMPTY_3]": 3}


def test_a_padding_that_is_ordinary_text_stays_text(tmp_path: Path) -> None:
    path = small(tmp_path, "<|im_end|>", eos_token_id=5, padding_token_id=1)
    tokenizer = load_tokenizer(path)
    assert tokenizer.pad_token is None and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer("abc").input_ids, skip_special_tokens=True) == "abc"


def test_a_word_that_is_a_token_needs_no_merges_where_the_family_ignores_them(tmp_path: Path) -> None:
    tokens, merges = trained()
    tokens, path = [*tokens, "zqzq"], tmp_path / "a.gguf"
    for pre, count in (("llama-bpe", 1), ("qwen2", 4)):
        write_vocabulary(path, tokens, [1] * len(tokens), pre=pre, merges=merges, add_bos_token=False)
        assert len(load_tokenizer(path)("zqzq").input_ids) == count


BEGINS: list[tuple[str, dict[str, bool], list[int]]] = [
    ("gpt-2", {}, [0]),
    ("gpt-2", {"add_bos_token": True}, [5, 0]),
    ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [5, 0, 6]),
    ("llama-bpe", {}, [5, 0]),
    ("tekken", {}, [5, 0]),
    ("llama-bpe", {"add_bos_token": False}, [0]),
]


def test_begin_and_end_are_added_as_the_file_or_its_family_wants(tmp_path: Path) -> None:
    for pre, flags, ids in BEGINS:
        path = small(tmp_path, "<x>", "<y>", pre=pre, bos_token_id=5, eos_token_id=6, **flags)
        assert load_tokenizer(path)("a").input_ids == ids, (pre, flags)


PIECES: dict[str, Any] = {"model": "llama", "add_bos_token": False}
OTHER_KINDS = ("bert", "t5", "rwkv", "plamo2", "none", "no_vocab", "hybriddna", "whitespace")
REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    (["a", "<x>"], {"add_bos_token": True}, "tokenizer.ggml.bos_token_id is 'missing'; allowed is the id of the token that"),
    (["a"], {"add_bos_token": True, "bos_token_id": 0}, "tokenizer.ggml.bos_token_id is 0; allowed is the id of a control"),
    (["a"], {"add_bos_token": 1}, "its value tokenizer.ggml.add_bos_token is 1; allowed is true or false"),
    (["a"], {"eom_token_id": 99}, "its value tokenizer.ggml.eom_token_id is 99; allowed is an integer from 0 to 0"),
    (["a"], {"fim_pad_token_id": [1]}, "its value tokenizer.ggml.fim_pad_token_id is a list of 1; allowed is an integer"),
    *((["a"], {"model": one, "scores": [0.0]}, f"tokenizer.ggml.model is {one!r}; allowed is one of") for one in OTHER_KINDS),
    (["a", "b", "b"], {}, "its tokens 1 and 2 of tokenizer.ggml.tokens are both 'b'"),
    (["a"], {}, "its value tokenizer.ggml.merges is 'missing'"),
    (["a"], PIECES, "its value tokenizer.ggml.scores is 'missing'"),
    (["a", "b"], {"merges": [("ab",)]}, "'ab' of tokenizer.ggml.merges is not two tokens"),
    (["a", "b"], {"merges": [("a", "b")]}, "merges 'a' and 'b', but these and 'ab' are not all"),
    (["a", "b"], {**PIECES, "scores": [0.0, float("nan")]}, "a list of finite numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "values", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_tokenizer_can_have(tmp_path: Path, tokens: list[str], values: dict[str, Any], message: str) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", tokens, [1] * len(tokens), **values)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and message in str(caught.value)


def test_a_token_that_is_no_text(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", ["a", "bbbb"], [1, 1])
    path.write_bytes(path.read_bytes().replace(b"bbbb", b"\xff\xfe\xfd\xfc"))
    with pytest.raises(ModelLoadError, match=r"is b'\\xff\\xfe\\xfd\\xfc', which is not UTF-8"):
        load_tokenizer(path)


def test_a_chat_template_is_the_files_own_or_that_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "chat_template": "of the folder"})
    )
    path = small(tmp_path, "<x>")
    assert load_tokenizer(path).chat_template == "of the folder"
    assert load_tokenizer(path).get_vocab().keys() == {*"abcd", "ab", "<x>"}
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(foresay.ConfigError, match="a JSON object is needed"):
        load_tokenizer(path)


# -- SentencePiece -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def pieces(request: pytest.FixtureRequest) -> tuple[Any, bool]:
    """A SentencePiece model with byte pieces, and whether it puts a space before a text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text.replace("\n", " ") for text in texts(800, seed=2, marks=())]),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        character_coverage=0.98,
        control_symbols=["<|im_end|>"],
        minloglevel=2,
        num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), request.param


def write_pieces(path: Path, model: Any, **values: Any) -> Path:
    count = model.get_piece_size()
    types = [
        6 if model.is_byte(i) else 2 if model.is_unknown(i) else 3 if model.is_control(i) else 1 for i in range(count)
    ]
    tokens, scores = [model.id_to_piece(i) for i in range(count)], [model.get_score(i) for i in range(count)]
    return write_vocabulary(path, tokens, types, model="llama", pre="default", scores=scores, **values)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_ids_are_those_of_sentencepiece(
    tmp_path: Path, family: str, pieces: tuple[Any, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: merges in the order of ids reversed."""
    model, prefix = pieces
    values = {} if prefix == (family == "llama") else {"add_space_prefix": prefix}  # what llama.cpp's converter writes
    path = write_pieces(tmp_path / "a.gguf", model, family=family, **values)
    tokenizer, end, found = load_tokenizer(path), model.piece_to_id("<|im_end|>"), []
    for text in texts(200, marks=("<|im_end|>",)):
        wanted = [model.bos_id()]
        for part in re.split(r"(<\|im_end\|>)", text):
            wanted += [end] if part == "<|im_end|>" else model.encode(part) if part else []
        found.append(tokenizer(text).input_ids)
        assert found[-1] == wanted, text
        assert tokenizer.decode(wanted[1:], skip_special_tokens=False).replace(" ", "") == text.replace(" ", "")
    assert ends_of(path) == (model.eos_id(), end)  # llama.cpp's default 2, and a name
    read = building.read_scores
    monkeypatch.setattr(building, "read_scores", lambda header: [-score for score in read(header)])
    other = load_tokenizer(path)
    assert [other(text).input_ids for text in texts(200, marks=("<|im_end|>",))] != found


def test_a_file_without_types_or_scores(tmp_path: Path) -> None:
    """Older files: the first three tokens are llama.cpp's defaults, and listed merges replace scores."""
    path = write_vocabulary(
        tmp_path / "a.gguf", ["<unk>", "<s>", "</s>", "▁", "a", "▁a"], model="llama", merges=[("▁", "a")]
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer("a</s>a").input_ids == [1, 5, 2, 5]
    assert ends_of(path) == (2,)


@pytest.mark.parametrize(
    ("model", "pre", "first"),
    [
        ("gemma4", "default", [1]),
        ("gpt2", "gemma4", [1]),
        ("gpt2", "granite-embed-multi-311m", [1]),
        ("gpt2", "sarvam-moe", []),
    ],
)
def test_merges_over_marked_spaces(tmp_path: Path, model: str, pre: str, first: list[int]) -> None:
    """Gemma 4's kind: listed merges over whole texts, and bytes for unknown characters."""
    bytes_of = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<bos>", *"hi▁", "hi", "▁hi", "\n", "\n\n", *bytes_of, "<turn|>"]
    types = [2, 3, *[1] * 7, *[6] * 256, 3]
    merges = [("h", "i"), ("▁", "hi"), ("\n", "\n")]
    path = write_vocabulary(
        tmp_path / "a.gguf", tokens, types, model=model, pre=pre, merges=merges, bos_token_id=1, unknown_token_id=0
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer("hi hi\n\n<turn|> é").input_ids == [*first, 5, 6, 8, len(tokens) - 1, 4, 9 + 0xC3, 9 + 0xA9]
    assert tokenizer.decode(tokenizer("hi é", add_special_tokens=False).input_ids) == "hi é"


@pytest.mark.parametrize(("name", "ids"), [("Phi 3 mini", [7, 0]), ("phi-3-mini", [0]), ("Phi3", [0])])
def test_marks_of_phi_3_take_the_white_space_after_them(tmp_path: Path, name: str, ids: list[int]) -> None:
    """By llama.cpp's rule, which goes by the model's name."""
    tokens, types = [*"abcd", "ab", "<|user|>", "<|endoftext|>", "Ċ"], [1] * 5 + [3, 3, 1]
    path = write_vocabulary(tmp_path / "a.gguf", tokens, types, merges=[("a", "b")], others={"general.name": name})
    tokenizer = load_tokenizer(path)
    assert tokenizer("<|user|>\na").input_ids == [5, *ids]
    assert tokenizer("<|endoftext|>\na").input_ids == [6, 7, 0]
