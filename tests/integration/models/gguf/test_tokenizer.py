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
import torch
from tokenizers import Tokenizer

import foresay
from foresay.errors import ModelLoadError
from foresay.models.gguf import tokenizer as building
from foresay.models.gguf.header import read_header
from foresay.models.gguf.vocabulary import read_vocabulary
from foresay.models.sources import loading
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_tokenizer
from helpers import fuzz_gguf, tiny
from helpers.gguf_files import write_gguf
from helpers.gguf_vocabularies import MARKS, texts, trained, write_vocabulary

NORMAL, CONTROL, USER = 1, 3, 4


def small(path: Path, *marks: str, kind: int = CONTROL, **values: Any) -> Path:
    """A vocabulary of four letters, "ab", marks from id 5 on, and no end of its own unless a value gives one."""
    types = [NORMAL] * 5 + [kind] * len(marks)
    return write_vocabulary(path / "a.gguf", [*"abcd", "ab", *marks], types, merges=[("a", "b")], **values)


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


# -- ends --------------------------------------------------------------------------------------------------------------

ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> "
    "_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ "
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
"""The names by which llama.cpp knows ends of generation."""


@pytest.mark.parametrize("mark", ENDS.split())
def test_a_mark_that_llama_cpp_knows_by_name_ends_a_text(tmp_path: Path, mark: str) -> None:
    found = read_vocabulary(read_header(small(tmp_path, "<s>", mark)))
    assert found is not None and found.ends == (6,)


@pytest.mark.parametrize(
    ("marks", "kind", "values", "ends"),
    [
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
    ],
)
def test_the_ends_of_a_file(
    tmp_path: Path, marks: list[str], kind: int, values: dict[str, int], ends: tuple[int, ...]
) -> None:
    found = read_vocabulary(read_header(small(tmp_path, *marks, kind=kind, **values)))
    assert found is not None and found.ends == ends


def _chat(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model whose file has the end of a text 0 and, by its name alone, the end of a turn 2."""
    monkeypatch.setattr(tiny, "SPECIALS", ("<eos>", "<bos>", "<end_of_turn>", "<assistant>"))
    return write_gguf(path / "tiny.gguf", fuzz_gguf.model("llama"))


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_a_chat_ends_with_its_turn(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file's blocks and dequantized; the negative control is a file without that mark."""
    options = LoadOptions(dtype=dtype)
    assert load_model(write_gguf(tmp_path / "plain.gguf", fuzz_gguf.model("llama")), options).eos_token_ids == {0}
    path = _chat(tmp_path, monkeypatch)
    loaded = load_model(path, options)
    assert loaded.eos_token_ids == {0, 2}
    assert loaded.model.model.generation_config.eos_token_id == [0, 2]  # type: ignore[attr-defined]


def test_a_chat_ends_with_its_turn_under_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _chat(tmp_path, monkeypatch)
    monkeypatch.setattr(loading, "open_gguf", lambda header, options: SimpleNamespace(weights=None))
    assert load_model(path, LoadOptions(backend="llama.cpp")).eos_token_ids == {0, 2}


def test_generation_stops_at_the_end_of_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _chat(tmp_path, monkeypatch)
    model = foresay.load(str(path), drafter="none")
    ids = model.generate([70, 9], max_new_tokens=8, ignore_eos=True).token_ids
    weights = load_model(path).model.model  # type: ignore[attr-defined]
    with torch.no_grad():
        assert int(weights(torch.tensor([[70, 9]])).logits[0, -1].argmax()) == ids[0]
    result = model.generate([70, 9], max_new_tokens=8, logit_bias={2: 100.0})
    assert list(result.token_ids) in ([], [2]) and result.finish_reason == "stop"


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


def _without_a_mark(backend: Tokenizer, *_: Any) -> None:
    backend.add_special_tokens([mark for mark in MARKS if "Assistant" not in mark])


def _with_another_token(backend: Tokenizer, *_: Any) -> None:
    _MARK(backend, *_)
    backend.add_tokens(["<outside>"])


_MARK = building._mark


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_without_a_mark, r"its token \d+, '<｜Assistant｜>', is encoded as \["),
        (_with_another_token, r"its token '<outside>' has id none, but 3006 in the tokenizer"),
    ],
)
def test_a_tokenizer_that_differs_from_its_file_is_refused(
    tmp_path: Path, broken: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_mark", broken)
    assert re.search(message, refused(write_vocabulary(tmp_path / "a.gguf")))


def test_tokens_that_are_not_distinct_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    assert "its tokens 1 and 2 of tokenizer.ggml.tokens are both 'b'" in refused(
        write_vocabulary(path, ["a", "b", "b"], [1, 1, 1])
    )
    write_vocabulary(path, ["a", "bbbb"], [1, 1])
    path.write_bytes(path.read_bytes().replace(b"bbbb", b"\xff\xfe\xfd\xfc"))
    assert "is b'\\xff\\xfe\\xfd\\xfc', which is not UTF-8" in refused(path)
    write_vocabulary(path, ["a", "aa", "", ""], [1, 1, 1, 1], merges=[("a", "a")])
    assert load_tokenizer(path).get_vocab() == {"a": 0, "aa": 1, "[EMPTY_2]": 2, "[EMPTY_3]": 3}


def test_a_padding_that_is_ordinary_text_stays_text(tmp_path: Path) -> None:
    path = small(tmp_path, "<|im_end|>", eos_token_id=5, padding_token_id=1)
    tokenizer = load_tokenizer(path)
    assert tokenizer.pad_token is None and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer("abc").input_ids, skip_special_tokens=True) == "abc"


def test_a_word_that_is_a_token_needs_no_merges_where_the_family_ignores_them(tmp_path: Path) -> None:
    tokens, merges = trained()
    tokens = [*tokens, "zqzq"]
    for pre, count in (("llama-bpe", 1), ("qwen2", 4)):
        path = write_vocabulary(
            tmp_path / "a.gguf", tokens, [1] * len(tokens), pre=pre, merges=merges, add_bos_token=False
        )
        assert len(load_tokenizer(path)("zqzq").input_ids) == count


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "flags", "ids"),
    [
        ("gpt-2", {}, [0]),
        ("gpt-2", {"add_bos_token": True}, [5, 0]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [5, 0, 6]),
        ("llama-bpe", {}, [5, 0]),
        ("tekken", {}, [5, 0]),
        ("llama-bpe", {"add_bos_token": False}, [0]),
    ],
)
def test_begin_and_end_are_added_as_the_file_or_its_family_wants(
    tmp_path: Path, pre: str, flags: dict[str, bool], ids: list[int]
) -> None:
    path = small(tmp_path, "<x>", "<y>", pre=pre, bos_token_id=5, eos_token_id=6, **flags)
    assert load_tokenizer(path)("a").input_ids == ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"add_bos_token": True},
            "its value tokenizer.ggml.bos_token_id is 'missing'; allowed is the id of the token that",
        ),
        (
            {"add_bos_token": True, "bos_token_id": 0},
            "tokenizer.ggml.bos_token_id is 0; allowed is the id of a control",
        ),
        ({"add_bos_token": 1}, "its value tokenizer.ggml.add_bos_token is 1; allowed is true or false"),
        ({"eom_token_id": 99}, "its value tokenizer.ggml.eom_token_id is 99; allowed is an integer from 0 to 5"),
        ({"fim_pad_token_id": [1]}, "its value tokenizer.ggml.fim_pad_token_id is a list of 1; allowed is an integer"),
    ],
)
def test_a_value_that_no_tokenizer_can_have(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    assert message in refused(small(tmp_path, "<x>", **values))


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "none", "no_vocab", "hybriddna", "whitespace"])
def test_a_kind_of_tokenizer_that_is_not_supported(tmp_path: Path, model: str) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", ["a"], [1], model=model, scores=[0.0])
    assert f"its value tokenizer.ggml.model is {model!r}; allowed is one of gpt2, llama, gemma4" in refused(path)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    assert "its value tokenizer.ggml.merges is 'missing'" in refused(write_vocabulary(path, ["a"], [1]))
    plain = {"model": "llama", "add_bos_token": False}
    assert "its value tokenizer.ggml.scores is 'missing'" in refused(write_vocabulary(path, ["a"], [1], **plain))
    assert "'ab' of tokenizer.ggml.merges is not two tokens" in refused(
        write_vocabulary(path, ["a", "b"], [1, 1], merges=[("ab",)])  # type: ignore[list-item]
    )
    assert "merges 'a' and 'b', but these and 'ab' are not all" in refused(
        write_vocabulary(path, ["a", "b"], [1, 1], merges=[("a", "b")])
    )
    assert "a list of finite numbers" in refused(
        write_vocabulary(path, ["a", "b"], [1, 1], scores=[0.0, float("nan")], **plain)
    )


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
def test_the_ids_are_those_of_sentencepiece(tmp_path: Path, family: str, pieces: tuple[Any, bool]) -> None:
    model, prefix = pieces
    values = {} if prefix == (family == "llama") else {"add_space_prefix": prefix}  # what llama.cpp's converter writes
    tokenizer = load_tokenizer(write_pieces(tmp_path / "a.gguf", model, family=family, **values))
    end = model.piece_to_id("<|im_end|>")
    for text in texts(marks=("<|im_end|>",)):
        wanted = [model.bos_id()]
        for part in re.split(r"(<\|im_end\|>)", text):
            wanted += [end] if part == "<|im_end|>" else model.encode(part) if part else []
        ids = tokenizer(text).input_ids
        assert ids == wanted, text
        assert tokenizer.decode(ids[1:], skip_special_tokens=False).replace(" ", "") == text.replace(" ", "")
    found = read_vocabulary(read_header(tmp_path / "a.gguf"))
    assert found is not None and found.ends == (model.eos_id(), end)  # llama.cpp's default 2, and a name


def test_a_file_without_types_or_scores(tmp_path: Path) -> None:
    """Older files: the first three tokens are llama.cpp's defaults, and listed merges replace scores."""
    path = write_vocabulary(
        tmp_path / "a.gguf", ["<unk>", "<s>", "</s>", "▁", "a", "▁a"], model="llama", merges=[("▁", "a")]
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer("a</s>a").input_ids == [1, 5, 2, 5]
    found = read_vocabulary(read_header(path))
    assert found is not None and found.ends == (2,)


def test_other_scores_give_other_ids(tmp_path: Path, pieces: tuple[Any, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: merges in the order of ids reversed."""
    model, prefix = pieces
    path = write_pieces(tmp_path / "a.gguf", model, add_space_prefix=prefix)
    sound = [load_tokenizer(path)(text).input_ids for text in texts(50)]
    read = building.read_scores
    monkeypatch.setattr(building, "read_scores", lambda header: [-score for score in read(header)])
    assert [load_tokenizer(path)(text).input_ids for text in texts(50)] != sound


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
    tokens = [
        "<unk>",
        "<bos>",
        "h",
        "i",
        "▁",
        "hi",
        "▁hi",
        "\n",
        "\n\n",
        *(f"<0x{i:02X}>" for i in range(256)),
        "<turn|>",
    ]
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
    path = write_vocabulary(tmp_path / "a.gguf", tokens, types, merges=[("a", "b")], name=name)
    tokenizer = load_tokenizer(path)
    assert tokenizer("<|user|>\na").input_ids == [5, *ids]
    assert tokenizer("<|endoftext|>\na").input_ids == [6, 7, 0]
