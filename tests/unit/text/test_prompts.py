from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from foresay.errors import PromptError
from foresay.text.prompts import ChatOptions, FillIn, encode, is_batch
from helpers.making import byte_level
from helpers.refusals import refused

USER = {"role": "user", "content": "the cat"}
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    out = deepcopy(byte_level())
    out.chat_template = TEMPLATE
    return out


def test_one_prompt_or_a_batch() -> None:
    array, tensor = np.array([1, 2]), torch.tensor([1, 2])
    for prompt in ("text", [1, 2], (1, 2), range(3), [USER], [USER, USER], tensor, array):
        assert not is_batch(prompt), prompt
    for prompt in (
        ["text"],
        ["a", "b"],
        [[1, 2], [3]],
        [(1,), (2,)],
        [[USER], [USER]],
        [tensor],
        [array],
        tensor[None],
        array[None],
    ):
        assert is_batch(prompt), prompt


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (5, "type int is not supported"), (None, "type NoneType"), (USER, "type dict"), ({1}, "type set"), (b"a", "bytes"),
        ([], "the prompt is empty"), ((), "the prompt is empty"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_named(prompt: Any, words: str) -> None:
    with refused("prompt", kind=PromptError):
        is_batch(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 1], (3, 1), [np.int64(3), 1], torch.tensor([3, 1]), torch.tensor([3, 1], dtype=torch.uint8),
        np.array([3, 1], np.int32),
    ],
    ids=repr,
)  # fmt: skip
def test_token_ids_pass_through_as_plain_integers(prompt: Any) -> None:
    ids = encode(prompt, None)
    assert ids == [3, 1]
    assert {type(token) for token in ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (torch.tensor([[1, 2]]), "shape (1, 2) and dtype torch.int64"),
        (torch.tensor(1), "shape () and dtype torch.int64"),
        (torch.tensor([1.0]), "shape (1,) and dtype torch.float32"),
        (np.array([True]), "shape (1,) and dtype bool"),
        ([1, 2.0], "prompt item 2.0 of type float"),
        ([True], "prompt item True of type bool"),
        ([1, USER], f"prompt item {USER!r} of type dict"),
        ([None], "prompt item None of type NoneType"),
        (np.array([], np.int64), "the prompt is empty"),
        ("", "the prompt is empty; give at least one character"),
        (b"hello", "bytes"),
        ([USER, {"role": "user"}], "message 1 has the keys ['role']"),
        ([{"content": "x", "name": "y"}], "message 0 has the keys ['content', 'name']"),
        ([USER, {"role": "robot", "content": "x"}], "message 1 has role='robot'; known roles: system, user, assistant, tool"),
        ([{"role": "user", "content": "bad"}], "the chat template refused the messages: no bad words"),
        (FillIn("a", "b"), "no tokens for filling in"),
    ],
    ids=repr,
)  # fmt: skip
def test_bad_prompts_are_named(prompt: Any, words: str, tokenizer: Any) -> None:
    tokenizer.add_tokens(["<fim_prefix>", "<fim_middle>"], special_tokens=True)
    with pytest.raises(PromptError, match=re.escape(words)):
        encode(prompt, tokenizer)


def test_a_text_is_encoded_as_it_is() -> None:
    text = "<user>the cat\n<assistant>"
    assert byte_level().decode(encode(text, byte_level())) == text


def test_messages_go_through_the_chat_template(tokenizer: Any) -> None:
    ids = encode([USER, {"role": "assistant", "content": "sat"}, USER], tokenizer)
    assert {type(token) for token in ids} == {int}
    assert tokenizer.decode(ids) == "<user>the cat\n<assistant>sat\n<user>the cat\n<assistant>"
    for role in ("system", "user", "assistant", "tool", "developer"):
        assert tokenizer.decode(encode([{"role": role, "content": "x"}], tokenizer)).startswith(f"<{role}>x")


def test_messages_need_a_chat_template() -> None:
    with refused("prompt", kind=PromptError):
        encode([USER], byte_level())


@pytest.mark.parametrize(("prompt", "what"), [("text", "a text prompt"), ([USER], "chat messages")])
def test_text_and_messages_need_a_tokenizer(prompt: Any, what: str) -> None:
    with refused("tokenizer", kind=PromptError):
        encode(prompt, None)


@pytest.mark.parametrize(
    "marks",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ],
)
def test_a_gap_between_two_texts(marks: tuple[str, str, str], tokenizer: Any) -> None:
    tokenizer.add_tokens(list(marks), special_tokens=True)
    before, after, middle = tokenizer.convert_tokens_to_ids(list(marks))
    ids = tokenizer("the cat", add_special_tokens=False).input_ids
    assert encode(FillIn("the cat", "the cat"), tokenizer) == [before, *ids, after, *ids, middle]
    assert encode(FillIn("", "the cat"), tokenizer) == [before, after, *ids, middle]


def test_control_tokens_of_messages_are_text_unless_asked_for(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "a<eos>b"}]
    special = tokenizer.convert_tokens_to_ids("<eos>")
    text, control = encode(messages, tokenizer), encode(messages, tokenizer, ChatOptions(control_tokens=True))
    assert special not in text and special in control
    assert tokenizer.decode(text) == tokenizer.decode(control)
    assert special in encode("a<eos>", tokenizer), "a text prompt is encoded as it is"
