"""Trees of a head: their nodes are those of a search by single passes, whichever nodes were dropped on the way."""

from __future__ import annotations

import pytest
import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import HeadDrafter
from foresay.drafters.feature_cache import FeatureCache
from foresay.drafters.hidden_states import BRANCHES
from foresay.lengths import ConstantLength
from foresay.models.drafts.base import NEXT
from foresay.models.drafts.head import HeadModel
from foresay.models.huggingface.causal import CausalModel
from helpers.families import VOCAB, make
from helpers.heads import random_head
from helpers.passes import started

NODES, WIDTH = 13, HeadDrafter.width
Path = tuple[int, ...]


def row_of(head: HeadModel, length: int) -> Row:
    """A row of random tokens and hidden states, greedy."""
    numbers = torch.Generator().manual_seed(length)
    tokens = torch.randint(2, VOCAB, (length + 1,), generator=numbers).tolist()
    row = Row(0, tokens, SamplingParams(max_new_tokens=60), limit=length + 60)
    width = head.target.model.config.hidden_size
    row.prompt_hidden = {
        layer: torch.randn(length, width, generator=numbers).to(head.dtype) for layer in head.hidden_layers
    }
    return row


def probabilities(head: HeadModel, row: Row, path: Path) -> torch.Tensor:
    """The head's distribution after the row and a path, by single passes over a cache of its own."""
    tokens, features = torch.from_numpy(row.tokens[1:])[None], head.features(head.joined(row.prompt_hidden))[None]
    cache = started(head)
    out = head.forward(ModelInput(tokens, [tokens.shape[1]], logits=Logits.LAST, features=features), cache)
    before = out.hidden[NEXT][:, -1:]
    for token in path:
        out = head.forward(ModelInput(torch.tensor([[token]]), [1], logits=Logits.LAST, features=before), cache)
        before = out.hidden[NEXT]
    return out.scores()[0, -1].float().softmax(-1)


def searched(head: HeadModel, row: Row) -> set[Path]:
    """Level by level, the children of the most probable new nodes among the best of all."""
    nodes: dict[Path, float] = {}
    level: list[Path] = [()]
    while level:
        newest = {}
        for path in level:
            top = probabilities(head, row, path).topk(BRANCHES)
            for p, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                newest[(*path, token)] = nodes.get(path, 1.0) * p
        nodes |= newest
        best = sorted(nodes, key=lambda path: -nodes[path])[:NODES]
        level = sorted((path for path in newest if path in best), key=lambda path: -nodes[path])[:WIDTH]
    return set(best)


def grown(head: HeadModel, row: Row) -> set[Path]:
    rows = Rows([row], capabilities=Capabilities(trees=True))
    drafter = HeadDrafter(head, VOCAB, nodes=NODES)
    drafter.admit(rows, 0)
    proposal = drafter.propose(rows, [NODES], ConstantLength(NODES))
    assert proposal.failure is None and proposal.parents is not None
    nodes: list[Path] = []
    for token, parent in zip(proposal.token_ids[0].tolist(), proposal.parents[0].tolist(), strict=True):
        nodes.append((*(nodes[parent] if parent >= 0 else ()), token))
    return set(nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tree_has_the_nodes_of_a_search_by_single_passes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalModel(make("llama", 3, vocab_size=VOCAB, tie_word_embeddings=False).to(dtype))
    model.use_fused()
    heads = [HeadModel(random_head(model, gain=1.2, seed=seed), model) for seed in range(12)]
    rows = [row_of(head, 4 + i) for i, head in enumerate(heads)]
    wanted = [searched(head, row) for head, row in zip(heads, rows, strict=True)]
    assert sum(max(map(len, nodes)) > 3 for nodes in wanted) > 3, "no tree is deep"
    assert [grown(head, row) for head, row in zip(heads, rows, strict=True)] == wanted
    monkeypatch.setattr(FeatureCache, "keep_nodes", lambda self, index: None)
    assert [grown(head, row) for head, row in zip(heads, rows, strict=True)] != wanted, "control: nodes were dropped"
