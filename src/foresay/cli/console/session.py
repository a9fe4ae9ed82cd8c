"""State of a console: the model, its settings, and the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foresay.cli.common import draft_of, fresh_seed
from foresay.cli.console.screen import Screen
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.load import change
from foresay.lengths import LENGTHS
from foresay.spec.expressions import to_expression
from foresay.text.prompts import Prompt, encode

INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Exchange:
    """A message and its answer, with everything needed to generate it again."""

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
    """Number of oldest exchanges that the model did not see."""
    draft_error: str | None = None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.stats.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class ChatSession:
    """A console, which commands read and change. It prints nothing."""

    generator: Generator
    params: SamplingParams
    screen: Screen
    interactive: bool
    """True on a terminal: Ctrl-C then ends an answer, not the program."""
    system: str | None = None
    loading: Sequence[str] = ()
    """Options by which the model was loaded, for the command of /compare."""
    template: bool = False
    trace: bool = False
    rule: str = "speculative"
    length: str | None = None
    """Length policy as it was given; None for the drafter's own length, or a number."""
    draft: str | None = None
    """The draft model last named."""
    exchanges: list[Exchange] = field(default_factory=list)
    running: bool = True

    def __post_init__(self) -> None:
        self.note_draft()

    # -- settings

    def change(self, **settings: Any) -> None:
        """Call `foresay.change` on the model in use. Nothing changes if that raises."""
        self.generator = change(self.generator, **settings)
        self.rule = settings.get("rule", self.rule)
        if "length" in settings:
            self.length = settings["length"]
        elif "drafter" in settings or "num_draft_tokens" in settings:
            self.length = None
        if "drafter" in settings:
            self.note_draft()

    def note_draft(self) -> None:
        """Remember the draft model, for /compare."""
        self.draft = draft_of(self.generator) or self.draft

    def set(self, **changes: Any) -> None:
        """Change sampling parameters."""
        self.params = SamplingParams.of(self.params, **changes)

    @property
    def method(self) -> dict[str, str]:
        """Drafter, length and rule as text."""
        gamma = getattr(self.generator.policy, "num_draft_tokens", None)
        length = (
            f"{gamma} tokens" if gamma is not None else self.length or to_expression(self.generator.policy, LENGTHS)
        )
        return {"drafter": self.generator.drafter_name, "length": length, "rule": self.rule}

    def seeded(self) -> SamplingParams:
        """The parameters, with a new seed if sampling has none."""
        if self.params.greedy or self.params.seed is not None:
            return self.params
        return SamplingParams.of(self.params, seed=fresh_seed())

    # -- the conversation

    @property
    def has_template(self) -> bool:
        """True if the model's tokenizer has a chat template."""
        return bool(getattr(self.generator.tokenizer, "chat_template", None))

    def messages(self, exchanges: Sequence[Exchange] | None = None, user: str | None = None) -> list[dict[str, str]]:
        """System message, exchanges (default: all), and a further message of the user if given."""
        out = [] if self.system is None else [{"role": "system", "content": self.system}]
        for one in self.exchanges if exchanges is None else exchanges:
            out += [{"role": "user", "content": one.user}, {"role": "assistant", "content": one.answer}]
        return out + ([] if user is None else [{"role": "user", "content": user}])

    def prompt(self, exchanges: Sequence[Exchange], user: str) -> Prompt:
        """The prompt: messages, or without a template one text with each message on a new line."""
        if self.template:
            return self.messages(exchanges, user)
        parts = ([] if self.system is None else [self.system]) + [one.user + one.answer for one in exchanges]
        return "\n".join([*parts, user])

    def fitted(self, exchanges: Sequence[Exchange], user: str) -> tuple[Prompt, int]:
        """Return (the prompt with the latest exchanges that fit next to an answer, number of exchanges left out)."""
        longest, room = self._space()
        low, high = 0, len(exchanges)
        while low < high:  # fewer exchanges never take more tokens
            middle = (low + high) // 2
            ids = encode(self.prompt(exchanges[middle:], user), self.generator.tokenizer)
            low, high = (low, middle) if len(ids) + room <= longest else (middle + 1, high)
        return self.prompt(exchanges[low:], user), low

    def _space(self) -> tuple[int, int]:
        """(longest context in tokens, tokens reserved for the answer: at most a quarter)."""
        model = self.generator.target.model
        if model.capabilities.reads_source:
            return model.capabilities.max_source_length or 1 << 62, 0
        return model.max_length, max(1, min(self.params.max_new_tokens, model.max_length // 4))

    # -- answers

    def totals(self) -> tuple[Stats, float]:
        """Return (counts of all answers, their seconds)."""
        stats = Stats()
        for one in self.exchanges:
            stats.merge(one.stats)
        return stats, sum(one.seconds for one in self.exchanges)

    def last(self) -> Exchange:
        """The latest exchange."""
        if not self.exchanges:
            raise ConfigError("does not exist yet; enter a message first", param="an answer")
        return self.exchanges[-1]
