"""Items of a data set as requests to a model: token ids, turn by turn.

Owns how an item becomes token ids, and that a later turn waits for the answer to the one before. Measures nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ForesayError
from foresay.generation.generator import Generator
from foresay.lab.data.items import PromptItem, as_prompt, next_turn
from foresay.text.prompts import encode


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One turn of an item, ready for an engine."""

    id: str
    """The item's, with "/2" behind it for its second turn."""
    category: str
    token_ids: tuple[int, ...]
    item: PromptItem
    turn: int = 0


class RequestBuilder:
    """Turns items into requests for one model."""

    def __init__(self, generator: Generator, *, chat: bool = True) -> None:
        """chat: put texts through the model's chat template, where it has one and the item is not raw."""
        self.generator, self.chat = generator, chat

    def first(self, items: Iterable[PromptItem]) -> list[PromptRequest]:
        """The first turn of each. An error says which item it is about."""
        return [self._ask(item, 0, as_prompt(item, self.generator.tokenizer, chat=self.chat)) for item in items]

    def following(self, ask: PromptRequest, answers: Sequence[str]) -> PromptRequest | None:
        """The turn after this one, None behind the last. answers: to all turns so far."""
        turn = ask.turn + 1
        if turn > len(ask.item.followups):
            return None
        asked = dataclasses.replace(ask.item, prompt=next_turn(ask.item, turn, answers))
        return self._ask(ask.item, turn, as_prompt(asked, self.generator.tokenizer, chat=self.chat))

    def all(self, items: Iterable[PromptItem], params: SamplingParams) -> list[PromptRequest]:
        """Every turn of every item; later turns follow what plain greedy decoding answers to the earlier ones."""
        asks = self.first(items)
        greedy = SamplingParams(max_new_tokens=params.max_new_tokens)
        going: list[tuple[PromptRequest, list[str]]] = [(ask, []) for ask in asks if ask.item.followups]
        while going:
            outputs = self.generator.plain().generate([list(ask.token_ids) for ask, _ in going], greedy)
            following: list[tuple[PromptRequest, list[str]]] = []
            for (ask, answers), output in zip(going, outputs, strict=True):
                said = [*answers, output.text]
                after = self.following(ask, said)
                if after is not None:
                    following.append((after, said))
            asks += [ask for ask, _ in following]
            going = following
        return asks

    def _ask(self, item: PromptItem, turn: int, prompt: Any) -> PromptRequest:
        name = item.id if turn == 0 else f"{item.id}/{turn + 1}"
        try:
            ids = encode(prompt, self.generator.tokenizer)
        except ForesayError as error:
            raise (error.about(f"prompt {name!r}") if name else error) from None
        return PromptRequest(name, item.category, tuple(ids), item, turn)


def digest(asks: Sequence[PromptRequest]) -> str:
    """A fingerprint of what is asked: a file that goes on must ask the same."""
    said = json.dumps([[ask.id, ask.token_ids, ask.item.followups] for ask in asks])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def changed_params(params: SamplingParams) -> Mapping[str, Any]:
    """The parameters that are not at their defaults, for a header."""
    default = SamplingParams()
    names = [f.name for f in dataclasses.fields(params)]
    return {n: getattr(params, n) for n in names if getattr(params, n) != getattr(default, n)}
