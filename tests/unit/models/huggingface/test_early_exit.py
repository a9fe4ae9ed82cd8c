"""A model's first layers, and its head over fewer tokens: the right numbers, from the very same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresay.errors import UnsupportedModelError
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers, trimmed_head
from helpers.families import FAMILIES, VOCAB, make
from helpers.passes import scores
from helpers.refusals import refused

IDS = [5, 96, 17, 5, 40]
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [21, 22, 23, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
COUNTS = [12, 3]
NORMS = {
    "llama": "model.norm",
    "gpt2": "transformer.ln_f",
    "opt": "model.decoder.final_layer_norm",
    "gemma2": "model.norm",
}


def logits(model: CausalModel) -> torch.Tensor:
    return scores(model, TOKENS, COUNTS)


def storages(model: CausalModel) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in model.model.parameters()}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    for i, count in enumerate(COUNTS):
        torch.testing.assert_close(ours[i, :count], theirs[i, :count], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", NORMS)
def test_logits_are_the_hidden_state_there_behind_the_norm_and_the_head(family: str, count: int) -> None:
    whole = make(family)
    with torch.no_grad():
        hidden = whole(TOKENS, output_hidden_states=True).hidden_states[count]
        wanted = whole.get_output_embeddings()(whole.get_submodule(NORMS[family])(hidden))
        if family == "gemma2":
            wanted = torch.tanh(wanted / 30.0) * 30.0
    close(logits(first_layers(CausalModel(whole), count)), wanted)


def test_layers_that_depend_on_their_number_are_not_cut() -> None:
    with pytest.raises(UnsupportedModelError, match="its layers have inputs of their own, or read the keys and values"):
        first_layers(CausalModel(make("gemma4")), 2)


# the last layer of Gemma 4's configurations has no window, whatever their list states
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gemma4", "gemma4_equal", "gemma4_moe"}))
def test_every_family_is_cut_without_a_copy_and_the_whole_stays_as_it_was(family: str) -> None:
    """As the same family configured with two layers and given the whole's weights."""
    target = CausalModel(make(family))
    before, names = logits(target), storages(target)
    total = target.model.config.num_hidden_layers
    short = first_layers(target, 2)
    assert storages(short) < names
    assert short.model.config.num_hidden_layers == 2 and target.model.config.num_hidden_layers == total
    assert short.num_parameters < target.num_parameters
    name = "n_layer" if family in ("gpt2", "bloom") else "num_hidden_layers"
    changes: dict[str, Any] = {name: 2}
    kinds = getattr(target.model.config, "layer_types", None)
    if kinds:
        changes["layer_types"] = list(kinds[:2])
    two = make(family, **changes)
    two.load_state_dict({k: v for k, v in target.model.state_dict().items() if k in two.state_dict()}, strict=True)
    close(logits(short), logits(CausalModel(two)))
    assert torch.equal(logits(target), before)
    assert float((logits(short) - before)[0].abs().max()) > 1e-2


@pytest.mark.parametrize("family", ["llama", "falcon_alibi"])
def test_a_released_target_is_what_it_was(family: str) -> None:
    reference = make(family)
    with torch.no_grad():
        wanted = reference(TOKENS[:1]).logits
    target = CausalModel(reference)
    logits(first_layers(target, 1))
    with torch.no_grad():
        torch.testing.assert_close(target.release()(TOKENS[:1]).logits, wanted)


@pytest.mark.parametrize("count", [0, 3, True, 1.0, "1"])
def test_a_count_of_layers_that_is_none(count: Any) -> None:
    with refused("layers", count):
        first_layers(CausalModel(make("llama")), count)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "phi"])
def test_a_trimmed_head_scores_the_same_and_nothing_else(family: str) -> None:
    """Tied and untied heads, with a bias, after soft-capped and scaled logits."""
    target = CausalModel(make(family))
    bias = target.model.get_output_embeddings().bias
    if bias is not None:
        torch.nn.init.normal_(bias)
    whole = logits(target)
    kept = sorted(set(IDS))
    trimmed = trimmed_head(target, IDS)
    ours = logits(trimmed)
    assert ours.shape == whole.shape and trimmed.vocab_size == VOCAB
    close(ours[..., kept], whole[..., kept])
    distribution = ours.softmax(-1)
    others = [i for i in range(VOCAB) if i not in kept]
    assert float(distribution[..., others].abs().max()) == 0.0
    renormalised = whole.softmax(-1)[..., kept]
    close(distribution[..., kept], renormalised / renormalised.sum(-1, keepdim=True))
    assert torch.equal(logits(target), whole)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_trimmed_head_is_all_that_is_copied(family: str) -> None:
    target = CausalModel(make(family))
    short = trimmed_head(first_layers(target, 1), torch.tensor(IDS))
    own = {p.untyped_storage().data_ptr(): p for p in short.model.parameters()}
    new = [p for pointer, p in own.items() if pointer not in storages(target)]
    assert [tuple(p.shape) for p in new] == [(4, 32)]
    assert new[0].untyped_storage().nbytes() == 4 * 32 * 4, "and not a view that keeps the whole head alive"
    assert short.model.get_input_embeddings().weight is target.model.get_input_embeddings().weight


def test_bad_ids_and_a_model_without_a_head_of_its_own_are_refused() -> None:
    target = CausalModel(make("llama"))
    for ids in ([], [-1, 3], [3, VOCAB], [[1, 2]]):
        with refused("vocabulary"):
            trimmed_head(target, ids)  # type: ignore[arg-type]
    target.model.lm_head = torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match="the head of LlamaForCausalLM cannot be trimmed"):
        trimmed_head(target, IDS)


def test_cutting_a_trimmed_model_keeps_its_vocabulary() -> None:
    target = CausalModel(make("llama"))
    one = trimmed_head(first_layers(target, 1), IDS)
    other = first_layers(trimmed_head(target, IDS), 1)
    assert torch.equal(logits(one), logits(other))
