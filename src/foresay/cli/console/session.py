"""The state of a console: a model and how it decodes, what may be set, and the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foresay.cli.common import fresh_seed
from foresay.cli.console.screen import Screen
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.load import change
from foresay.lengths import LENGTHS
from foresay.spec.expressions import parse, written
from foresay.text.prompts import Prompt, encode

INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Exchange:
    """A message and its answer, with all that is needed to write it again."""

    user: str
    answer: str
    ended: str
    """The finish reason, or "interrupted"."""
    stats: Stats
    seconds: float
    seed: int | None
    exact: bool
    method: dict[str, str]
    """Drafter, length and rule."""
    params: SamplingParams
    left_out: int = 0
    """Exchanges before it that the model did not see."""
    draft_error: str | None = None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.stats.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class ChatSession:
    """A console. Commands read and change it; it prints nothing by itself."""

    generator: Generator
    params: SamplingParams
    screen: Screen
    interactive: bool
    """Whether somebody types: Ctrl-C then ends an answer, not the program."""
    system: str | None = None
    template: bool = False
    trace: bool = False
    rule: str = "speculative"
    length: str | None = None
    """Rule and length policy as they were given; None is the drafter's own length, or a number."""
    draft: str | None = None
    """The draft model last named."""
    exchanges: list[Exchange] = field(default_factory=list)
    running: bool = True

    def __post_init__(self) -> None:
        self.note_draft()

    # -- how it decodes

    def change(self, **settings: Any) -> None:
        """`foresay.change` on the model in use; nothing changes when that raises."""
        self.generator = change(self.generator, **settings)
        self.rule = settings.get("rule", self.rule)
        if "length" in settings:
            self.length = settings["length"]
        elif "drafter" in settings or "num_draft_tokens" in settings:
            self.length = None
        if "drafter" in settings:
            self.note_draft()

    def note_draft(self) -> None:
        """Remember the model that drafts, for what compares with it."""
        call = parse(self.generator.drafter_name)
        if call.name == "model" and call.values:
            self.draft = next((str(v) for k, v in call.values if k in (None, "name")), self.draft)

    def set(self, **changes: Any) -> None:
        """Change sampling parameters."""
        self.params = SamplingParams.of(self.params, **changes)

    @property
    def method(self) -> dict[str, str]:
        """Drafter, length and rule in words."""
        gamma = getattr(self.generator.policy, "num_draft_tokens", None)
        length = f"{gamma} tokens" if gamma is not None else self.length or written(self.generator.policy, LENGTHS)
        return {"drafter": self.generator.drafter_name, "length": length, "rule": self.rule}

    def seeded(self) -> SamplingParams:
        """The parameters, with a seed of their own where sampling has none."""
        if self.params.greedy or self.params.seed is not None:
            return self.params
        return SamplingParams.of(self.params, seed=fresh_seed())

    # -- the conversation

    @property
    def has_template(self) -> bool:
        """Whether the model's tokenizer has a chat template."""
        return bool(getattr(self.generator.tokenizer, "chat_template", None))

    def messages(self, exchanges: Sequence[Exchange] | None = None, user: str | None = None) -> list[dict[str, str]]:
        """System message, exchanges (all unless given), and perhaps one more message of the user's."""
        out = [] if self.system is None else [{"role": "system", "content": self.system}]
        for one in self.exchanges if exchanges is None else exchanges:
            out += [{"role": "user", "content": one.user}, {"role": "assistant", "content": one.answer}]
        return out + ([] if user is None else [{"role": "user", "content": user}])

    def prompt(self, exchanges: Sequence[Exchange], user: str) -> Prompt:
        """What the model is to continue: messages, or without a template one text, a new line before each message."""
        if self.template:
            return self.messages(exchanges, user)
        parts = ([] if self.system is None else [self.system]) + [one.user + one.answer for one in exchanges]
        return "\n".join([*parts, user])

    def fitted(self, exchanges: Sequence[Exchange], user: str) -> tuple[Prompt, int]:
        """The prompt with as many of the latest exchanges as fit beside an answer, and how many were left out."""
        longest, room = self._space()
        low, high = 0, len(exchanges)
        while low < high:  # fewer exchanges never take more tokens
            middle = (low + high) // 2
            ids = encode(self.prompt(exchanges[middle:], user), self.generator.tokenizer)
            low, high = (low, middle) if len(ids) + room <= longest else (middle + 1, high)
        return self.prompt(exchanges[low:], user), low

    def _space(self) -> tuple[int, int]:
        """(tokens the model can hold, tokens kept free for the answer: a quarter at most)."""
        model = self.generator.target.model
        if model.capabilities.reads_source:
            return model.capabilities.max_source_length or 1 << 62, 0
        return model.max_length, max(1, min(self.params.max_new_tokens, model.max_length // 4))

    # -- what it has written

    def totals(self) -> tuple[Stats, float]:
        """The counts of all answers, and their seconds."""
        stats = Stats()
        for one in self.exchanges:
            stats.merge(one.stats)
        return stats, sum(one.seconds for one in self.exchanges)

    def last(self) -> Exchange:
        """The latest exchange."""
        if not self.exchanges:
            raise ConfigError("there is no answer yet; write a message first")
        return self.exchanges[-1]
