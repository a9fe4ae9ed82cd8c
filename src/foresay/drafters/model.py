"""A draft model as a drafter: its own slot cache, batched over ragged rows.

Every pass feeds what the cache lacks, so "all accepted, and the draft has not seen its own last token" needs no code.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import Drafter, LanguageModel, LengthPolicy, Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import Rows
from foresay.drafters.draft_cache import DraftCache
from foresay.drafters.draft_chain import DraftChain
from foresay.errors import UnsupportedModelError
from foresay.models.vocabulary import VocabularyAdapter


class ModelDrafter(Drafter):
    """Guesses with a smaller model that shares the target's token ids.

    target_vocab_size: width of the target's logits. A draft whose logits are wider is cut there, a narrower one never
    proposes the ids it lacks; both are laws it really draws from, so the output stays exact.
    """

    def __init__(
        self, model: LanguageModel, target_vocab_size: int, *, context: DraftCache | None = None, sample: bool = True
    ) -> None:
        """context: the cache to draft with, where it is shared with others; None makes one. sample: whether tokens for sampled
        rows are drawn as the row draws; else they are the likeliest, fewer of which hold, and the text does not depend on them.
        """
        self.context, self.samples = context or DraftCache(model, target_vocab_size), sample

    def admit(self, rows: Rows, first: int) -> None:
        """Give the new rows empty cache rows; their prompts are filled at their first proposal."""
        self.context.admit(rows, first)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the engine's moves."""
        self.context.rearrange(moves, count)

    def reset(self) -> None:
        """Forget every row."""
        self.context.reset()

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Rewind to what was committed."""
        self.context.rewind(rows)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draw up to `budget` tokens for each row, each from the law recorded with it; an end token is the last of its row."""
        model = self.context.model
        seen = self.context.view(rows)
        room = self.context.room(seen, budget)
        if max(room) <= 0:
            return Proposal.empty(len(rows), model.device)
        # a row past the draft's context is never fed again: it rides as pads
        fed = [b > 0 for b in room]
        self.context.prepare(seen, fed)
        layers = hidden_layers(model, policy)
        output = self.context.catch_up(seen, fed, layers)
        chain = DraftChain(rows, room, model.device)
        with chain.keeping():
            self._draw(chain, output, rows, policy, layers)
            if rows.level:
                each = zip(chain.ids.tolist(), chain.counts.tolist(), strict=True)
                self.context.remember(seen, [ids[: max(0, n - 1)] for ids, n in each])
        return chain.proposal()

    def _draw(
        self, chain: DraftChain, output: ModelOutput, rows: Rows, policy: LengthPolicy, layers: tuple[int, ...]
    ) -> None:
        """Draw token after token. output: the draft model's pass over what its cache lacked."""
        while True:
            distributions = output.draft_distributions(rows, chain.ids, greedy=not self.samples)
            hidden = output.hidden[layers[0]][:, -1] if layers else None
            if not chain.add(distributions, policy, hidden):
                break
            output = self.context.forward(
                ModelInput(chain.ids[:, -1:], chain.fed, logits=Logits.LAST, hidden_layers=layers)
            )


def hidden_layers(model: VocabularyAdapter, policy: LengthPolicy) -> tuple[int, ...]:
    """The draft's last layer, when the policy looks at it. Raises UnsupportedModelError when the model shows none."""
    if not policy.needs_hidden:
        return ()
    layers = model.capabilities.num_layers
    if layers is None:
        raise UnsupportedModelError(
            f"length {type(policy).__name__} reads the draft's hidden states, and {type(model.inner).__name__} shows none"
        )
    return (layers,)
