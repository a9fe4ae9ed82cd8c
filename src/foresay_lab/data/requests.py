"""Prompts of a data set as requests to a model: token ids, turn by turn.

Owns the conversion of a PromptItem to token ids and the order of a conversation's turns: each needs the earlier answers.
Decodes only these answers, and measures nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ForesayError
from foresay.generation.generator import Generator
from foresay.text.prompts import encode
from foresay_lab.data.items import PromptItem, as_prompt, next_turn


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One turn of a PromptItem as token ids, ready to be submitted to an engine."""

    id: str
    """The item's id; later turns append "/2", "/3", ..."""
    category: str
    token_ids: tuple[int, ...]
    """The prompt of this turn, including earlier turns and answers."""
    item: PromptItem
    turn: int = 0
    """Counted from 0."""


class RequestBuilder:
    """Tokenizer of the turns of PromptItems for one model.

    The first turn of an item needs only the item (`first`), a later turn also the earlier answers (`following`). `all` decodes
    these answers itself.
    """

    def __init__(self, generator: Generator, *, chat: bool = True) -> None:
        """chat: apply the model's chat template, if it has one, to items that are not raw."""
        self.generator, self.chat = generator, chat

    def first(self, items: Iterable[PromptItem]) -> list[PromptRequest]:
        """Return the first turn of each item. Raises PromptError, naming the item, for a prompt that cannot be encoded."""
        return [self._request(item, 0, as_prompt(item, self.generator.tokenizer, chat=self.chat)) for item in items]

    def following(self, request: PromptRequest, answers: Sequence[str]) -> PromptRequest | None:
        """Return the turn after this one, or None after the last.

        answers: the texts generated for all turns so far. Raises PromptError as `first` does.
        """
        turn = request.turn + 1
        if turn > len(request.item.followups):
            return None
        item = dataclasses.replace(request.item, prompt=next_turn(request.item, turn, answers))
        return self._request(request.item, turn, as_prompt(item, self.generator.tokenizer, chat=self.chat))

    def all(self, items: Iterable[PromptItem], params: SamplingParams) -> list[PromptRequest]:
        """Return every turn of every item. Later turns contain the earlier answers by plain greedy decoding.

        params: only max_new_tokens is used, as the length limit of each answer. Raises PromptError as `first` does.
        """
        requests = self.first(items)
        greedy = SamplingParams(max_new_tokens=params.max_new_tokens)
        pending: list[tuple[PromptRequest, list[str]]] = [(one, []) for one in requests if one.item.followups]
        while pending:
            outputs = self.generator.plain().generate([list(one.token_ids) for one, _ in pending], greedy)
            ended = [(one, [*said, output.text]) for (one, said), output in zip(pending, outputs, strict=True)]
            pending = [(after, said) for one, said in ended if (after := self.following(one, said)) is not None]
            requests += [one for one, _ in pending]
        return requests

    def _request(self, item: PromptItem, turn: int, prompt: Any) -> PromptRequest:
        name = item.id if turn == 0 else f"{item.id}/{turn + 1}"
        try:
            ids = encode(prompt, self.generator.tokenizer)
        except ForesayError as error:
            raise (error.about(f"prompt {name!r}") if name else error) from None
        return PromptRequest(name, item.category, tuple(ids), item, turn)


def digest(requests: Sequence[PromptRequest]) -> str:
    """Return a fingerprint of ids, token ids and follow-ups, which must match for a file to be resumed."""
    text = json.dumps([[one.id, one.token_ids, one.item.followups] for one in requests])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded_params_of(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that differ from their defaults, and max_new_tokens, which every reader of a file needs."""
    default = SamplingParams()
    names = [one.name for one in dataclasses.fields(params)]
    changed = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(default, name)}
    return {**changed, "max_new_tokens": params.max_new_tokens}
