"""A multi-token-prediction layer over pages drafts as transformers' own code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_layers import MtpModel

from foresay.decoding.proposal import Proposal
from foresay.drafters.hidden_states import HeadDrafter
from foresay.models.drafts import mtp
from foresay.models.drafts.mtp import MtpHead
from foresay.models.gpu import layers
from foresay.models.hardware import Hardware
from foresay.models.huggingface import linears
from foresay.models.huggingface.causal import CausalModel
from helpers.drafting_on_pages import SAMPLED, Recorded, drafts, on_pages
from helpers.families import make, whole_product
from helpers.paged import few_programs

VOCAB = 61


def drafting(monkeypatch: pytest.MonkeyPatch, pages: bool, nodes: int) -> tuple[HeadDrafter, CausalModel]:
    few_programs(monkeypatch)
    on_pages(monkeypatch, pages)
    monkeypatch.setattr(Hardware, "gpu_kernels", pages)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "max_position_embeddings": 192}
    model = make("glm4_moe", 1, num_nextn_predict_layers=1, **sizes)
    target = CausalModel(model)
    torch.manual_seed(5)
    found = MtpModel(model, 1).eval()
    for weight in found.layers.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
    if pages:
        monkeypatch.setattr(linears, "product_of", whole_product)
        target.use_fused()
    head = MtpHead(target, name="tiny", layers=found)
    target.fused = None  # its own passes are tested elsewhere
    assert (head.paged is not None) == pages
    return HeadDrafter(head, VOCAB, sample=not nodes, nodes=nodes), target


def compare(monkeypatch: pytest.MonkeyPatch, nodes: int, settings: list[dict[str, Any]], enough: int) -> list[Proposal]:
    """Assert that drafts on pages are those of transformers' own code; return them."""
    reference, target = drafting(monkeypatch, False, nodes)
    expected, proposals = drafts(reference, target, settings, 8, enough)
    drafter, target = drafting(monkeypatch, True, nodes)
    assert drafter.context.draws_chains
    found, others = drafts(drafter, target, settings, 8, enough)
    assert found == expected and len(others) == len(proposals)
    for one, other in zip(others, proposals, strict=True):
        assert list(one.num_tokens) == list(other.num_tokens)
        for i, n in enumerate(one.num_tokens):
            assert one.token_ids[i, :n].tolist() == other.token_ids[i, :n].tolist()
    return others


@pytest.mark.parametrize("nodes", [0, 4])
@torch.inference_mode()
def test_drafts_are_those_of_transformers_own_code(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if nodes:
        monkeypatch.setattr(Recorded, "sizes", (4, 3, 4, 0))
    found = compare(monkeypatch, nodes, [{}] * 2 if nodes else SAMPLED, 3)
    assert any(max(one.num_tokens) > 2 for one in found)


@pytest.mark.parametrize("part", ["the embedding's norm", "the position"])
@torch.inference_mode()
def test_a_layer_that_is_read_wrongly_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    if part == "the position":
        known = layers.place
        monkeypatch.setattr(layers, "place", lambda *given, **how: known(*given[:4], given[4] // 2, *given[5:], **how))
    else:
        norm_of = mtp.norm_of
        monkeypatch.setattr(mtp, "norm_of", lambda module: norm_of(torch.nn.RMSNorm(32, 1e-5)))
    with pytest.raises(AssertionError):
        compare(monkeypatch, 0, SAMPLED[:2], 2)
