"""A model that writes one text: each token's successor is fixed, so a text of different tokens comes out as it was given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken

from helpers import tiny
from helpers.families import make


def save(
    folder: Path,
    pieces: Sequence[str],
    template: str,
    *,
    special: Sequence[str] = (),
    others: Sequence[Sequence[str]] = (),
    context: int = 2048,
) -> Path:
    """A folder of a model that writes these pieces, each a token of its own, after `<assistant>`, and ends.

    special: the pieces that are special tokens. others: further texts, each as the token after which it comes and its pieces.
    """
    assert len(set(pieces)) == len(pieces)
    chains = (("<assistant>", *pieces), *others)
    tokenizer = tiny.tokenizer()
    new = [one for one in dict.fromkeys(itertools.chain.from_iterable(chains)) if one not in tokenizer.get_vocab()]
    tokenizer.add_tokens([AddedToken(one, special=one in special, normalized=False) for one in new])
    tokenizer.chat_template = template
    model = make("llama", vocab_size=len(tokenizer), hidden_size=128, max_position_embeddings=context)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(len(tokenizer), 128, generator=generator)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.norm.weight.data.fill_(1.0)
    model.model.embed_tokens.weight.data = table
    successors = {
        pair for chain in chains for pair in itertools.pairwise(tokenizer.convert_tokens_to_ids([*chain, "<eos>"]))
    }
    model.lm_head.weight.data = torch.zeros_like(table)
    for before, after in successors:
        model.lm_head.weight.data[after] += table[before]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
