"""Parts of a block drafter that let a token's scores depend on the tokens before it in the block.

A block's scores come from one pass and know nothing of each other. A Markov head (DSpark) adds scores of low rank that depend on
the previous token: as they are, gated by the block's output, or from a recurrent state. Domino (arXiv 2605.29707) adds scores of
the output and a GRU's state over the tokens so far. A candidate selector (DFlash2) keeps the best tokens of each position and
adds a score of the step from the previous token to each. Training and decoding compute the same formula; only products differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from foresay.models.drafts.block_config import DOMINO, SELECTOR, BlockConfig, PathShape

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Product of a weight [out, in] with x [..., in] -> [..., out]."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of paths: outputs of a block and their scores, and the tokens before them.

    scores: [..., K]. hidden: [..., D]. previous: [...] int64. embedded: [..., D], their embeddings. index: [...] int64, tokens of
    the block before. state: [..., R], as the step before left it; zeros before the first.
    """

    scores: torch.Tensor
    hidden: torch.Tensor
    previous: torch.Tensor
    embedded: torch.Tensor
    index: torch.Tensor
    state: torch.Tensor


class PathHead(nn.Module, ABC):
    """Base of the parts."""

    PREFIX: ClassVar[str]
    """Start of its tensors' names in files."""
    state_size = 0
    """R."""

    @abstractmethod
    def step(self, at: Step, multiply: Multiply) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [..., K] after the previous tokens, and the state."""

    @abstractmethod
    def products(self) -> list[torch.Tensor]:
        """Return the weights that `step` multiplies; the last one is zero in a new draft, so that its scores are the layers'."""


class MarkovHead(PathHead):
    """Scores W2 W1[previous]."""

    PREFIX = "markov_head."

    def __init__(self, config: BlockConfig, path: PathShape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, path.rank)
        self.markov_w2 = nn.Linear(path.rank, config.draft_vocab_size, bias=False)

    def step(self, at: Step, multiply: Multiply) -> tuple[torch.Tensor, torch.Tensor]:
        """See PathHead."""
        read, state = self._read(at, self.markov_w1.weight[at.previous], multiply)
        return at.scores + multiply(self.markov_w2.weight, read), state

    def _read(self, at: Step, previous: torch.Tensor, multiply: Multiply) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input [..., rank] of W2 and the state. previous: [..., rank], W1[previous]."""
        return previous, at.state

    def products(self) -> list[torch.Tensor]:
        """See PathHead."""
        return [self.markov_w2.weight]


class GatedMarkovHead(MarkovHead):
    """Scores W2 (g * W1[previous]), g = sigmoid(W [h; W1[previous]] + b)."""

    def __init__(self, config: BlockConfig, path: PathShape) -> None:
        super().__init__(config, path)
        self.gate_proj = nn.Linear(config.hidden_size + path.rank, path.rank)

    def products(self) -> list[torch.Tensor]:
        """See PathHead."""
        return [self.gate_proj.weight, self.markov_w2.weight]

    def _read(self, at: Step, previous: torch.Tensor, multiply: Multiply) -> tuple[torch.Tensor, torch.Tensor]:
        gate = multiply(self.gate_proj.weight, torch.cat([at.hidden, previous], -1)) + self.gate_proj.bias
        return torch.sigmoid(gate) * previous, at.state


class RecurrentMarkovHead(MarkovHead):
    """Scores W2 tanh(o), (f, c, o) = W [s; W1[previous]; h] + b, with the state s' = sigmoid(f) s + (1 - sigmoid(f)) tanh(c)."""

    def __init__(self, config: BlockConfig, path: PathShape) -> None:
        super().__init__(config, path)
        self.state_size = path.rank
        self.joint_proj = nn.Linear(2 * path.rank + config.hidden_size, 3 * path.rank)

    def products(self) -> list[torch.Tensor]:
        """See PathHead."""
        return [self.joint_proj.weight, self.markov_w2.weight]

    def _read(self, at: Step, previous: torch.Tensor, multiply: Multiply) -> tuple[torch.Tensor, torch.Tensor]:
        read = torch.cat([at.state.to(previous.dtype), previous, at.hidden], -1)
        forget, candidate, out = (multiply(self.joint_proj.weight, read) + self.joint_proj.bias).chunk(3, -1)
        kept = torch.sigmoid(forget)
        return torch.tanh(out), kept * at.state + (1 - kept) * torch.tanh(candidate)


class DominoHead(PathHead):
    """Scores W2 silu(W1 [h; s]), s the state of a GRU over the embeddings of the tokens before."""

    PREFIX = ""

    def __init__(self, config: BlockConfig, path: PathShape) -> None:
        super().__init__()
        self.state_size, self.free, width = path.state, path.free, config.hidden_size
        self.prefix_gru = nn.GRU(width, path.state, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + path.state, path.rank, bias=False),
            nn.SiLU(),
            nn.Linear(path.rank, config.draft_vocab_size, bias=False),
        )

    def step(self, at: Step, multiply: Multiply) -> tuple[torch.Tensor, torch.Tensor]:
        """See PathHead."""
        read = at.embedded
        input_weight, state_weight, first, last = self.products()
        of_input = multiply(input_weight, read).chunk(3, -1)
        of_state = multiply(state_weight, at.state.to(read.dtype)).chunk(3, -1)
        reset, keep = (torch.sigmoid(of_input[i] + of_state[i]) for i in (0, 1))
        new = torch.tanh(of_input[2] + reset * of_state[2])
        state = (1 - keep) * new + keep * at.state
        inner = F.silu(multiply(first, torch.cat([at.hidden, state.to(at.hidden.dtype)], -1)))
        more = torch.where((at.index >= self.free)[..., None], multiply(last, inner), 0.0)
        return at.scores + more, state

    def products(self) -> list[torch.Tensor]:
        """See PathHead."""
        names = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")
        return [self.get_parameter(name) for name in names]


class CandidateSelector(PathHead):
    """Scores U(b) + <A[previous] * H h, B[b]> of the tokens b with the highest U, and none of others."""

    PREFIX = "candidate_selector."

    def __init__(self, config: BlockConfig, path: PathShape) -> None:
        super().__init__()
        self.count = min(path.candidates, config.draft_vocab_size)
        self.hidden_projection = nn.Linear(config.hidden_size, path.rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.randn(config.vocab_size, path.rank) / path.rank**0.5)
        self.successor_codebook = nn.Parameter(torch.randn(config.draft_vocab_size, path.rank) / path.rank**0.5)

    def step(self, at: Step, multiply: Multiply) -> tuple[torch.Tensor, torch.Tensor]:
        """See PathHead."""
        best, candidates = at.scores.float().topk(self.count, -1)
        left = self.predecessor_codebook[at.previous] * multiply(self.hidden_projection.weight, at.hidden)
        edges = (left[..., None, :] * self.successor_codebook[candidates]).float().sum(-1)
        none = torch.full_like(at.scores, -torch.inf, dtype=torch.float32)
        return none.scatter(-1, candidates, best + edges), at.state

    def products(self) -> list[torch.Tensor]:
        """See PathHead."""
        return [self.hidden_projection.weight]


_KINDS: dict[str, Callable[[BlockConfig, PathShape], PathHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
    DOMINO: DominoHead,
    SELECTOR: CandidateSelector,
}


def path_head(config: BlockConfig) -> PathHead | None:
    """Return the part of a configuration with random weights; None without one."""
    return None if config.path is None else _KINDS[config.path.kind](config, config.path)
