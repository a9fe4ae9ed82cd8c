"""Keys and values in 8 bits: close to the model's own, the same bits in any pass, half of the memory, and refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.errors import UnknownNameError
from foresay.models.cpu.build import library
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make
from helpers.guarantees import READ, fused
from helpers.passes import in_pieces, scores, started
from helpers.refusals import refused

INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}


def compiled(family: str, weights: str = "float32", cache_dtype: torch.dtype | None = torch.int8) -> CausalModel:
    model = fused(make(family), weights)
    model.use_fused(cache_dtype)
    assert model.batch_invariant
    return model


@pytest.mark.parametrize("family", READ)
def test_scores_are_close_to_those_of_exact_keys_and_values(family: str) -> None:
    ids = torch.randint(2, 90, (1, 200), generator=torch.Generator().manual_seed(0))
    exact, rounded = (scores(compiled(family, cache_dtype=dtype), ids)[0] for dtype in (None, torch.int8))
    error = float((rounded - exact).square().mean().sqrt() / exact.std())
    assert 0 < error < 0.05


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_a_token_has_its_bits_in_any_pass(family: str, weights: str) -> None:
    """Alone, in blocks, in a ragged batch, in a tree, and in a row that was truncated, saved and loaded again."""
    model = compiled(family, weights)
    ids = torch.randint(2, 90, (2, 200), generator=torch.Generator().manual_seed(1))
    wanted = [scores(model, ids[i : i + 1])[0] for i in range(2)]
    assert torch.equal(in_pieces(model, ids[0], (1, 3, 16, 17, 100, 63)), wanted[0])
    cache = started(model, 2)
    model.forward(ModelInput(ids[:, :150], (150, 90)), cache)
    model.forward(ModelInput(ids[:, :5].flip(1), (5, 5)), cache)
    cache.truncate([150, 90])
    saved = cache.save_prefix(1, 90)
    cache.truncate([150, 0])
    cache.load_prefix(1, saved, 90)
    fed = torch.stack([ids[0, 150:170], ids[1, 90:110]])
    together = scores(model, fed, cache=cache)
    assert torch.equal(together[0], wanted[0][150:170]) and torch.equal(together[1], wanted[1][90:110])
    if not model.capabilities.trees:
        return
    cache.truncate([150, 90])
    tree = torch.stack([ids[0, [150, 3, 151, 152]], ids[1, [90, 3, 91, 92]]])
    parents = torch.tensor([[-1, 0, 0, 2]] * 2)
    grown = model.forward(ModelInput(tree, (4, 4), parents=parents), cache).scores()
    assert torch.equal(grown[0, [0, 2, 3]], wanted[0][150:153]) and torch.equal(grown[1, [0, 2, 3]], wanted[1][90:93])
    assert not torch.equal(grown[0, 1], wanted[0][151]), "control: another token"


def test_it_is_an_option_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any draft and batch give the same text, a draft model keeps its own format, and memory is counted as it is used.

    Without a look at the model's parameters, which each request took.
    """
    folder = tiny.save(tmp_path / "tiny", make("llama", 4, vocab_size=264, head_dim=32).to(torch.bfloat16))
    loaded, plain = (load_model(folder, LoadOptions(dtype="bf16", **more)).model for more in (INT8, {}))
    with monkeypatch.context() as patched:
        patched.setattr(plain.model, "parameters", lambda: iter(()))
        assert loaded.cache_bytes([100]) == plain.cache_bytes([100]) * (32 + 4) // 64
    for model, elements in ((loaded, 36), (plain, 64)):
        cache = started(model)
        model.forward(ModelInput(torch.tensor([[5, 6, 7]]), [3]), cache)
        assert cache.tensors.nbytes == elements * 3 * 2 * 3 * 2
    prompts = ["hello world", "you and I", "hello hello hello"]
    texts = []
    for drafter in ("none", "suffix", "self(1)", f"model({folder})"):
        generator = foresay.load(folder, dtype="bf16", drafter=drafter, max_batch_size=2, **INT8)
        found = generator.generate(prompts, max_new_tokens=30, ignore_eos=True)
        texts.append([one.token_ids for one in found])
    assert all(one == texts[0] for one in texts)
    assert LoadOptions(**INT8).for_draft().kv_cache_dtype == "auto"


def test_what_the_kernels_do_not_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("kv_cache_dtype", "fp4", UnknownNameError):
        LoadOptions(kv_cache_dtype="fp4")
    with refused("kv_cache_dtype", "int8"):
        LoadOptions(backend="llama.cpp", **INT8)
    folder = tiny.save(tmp_path / "gpt2", make("gpt2", vocab_size=264))
    with refused("kv_cache_dtype", "int8"):
        load_model(folder, LoadOptions(**INT8))
    folder = tiny.save(tmp_path / "llama", make("llama", vocab_size=264))
    monkeypatch.setenv("FORESAY_NATIVE", "0")
    library.cache_clear()
    try:
        with refused("kv_cache_dtype", "int8"):
            load_model(folder, LoadOptions(**INT8))
    finally:
        library.cache_clear()


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    model = compiled("llama")
    ids, found = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]]), []
    for _ in range(2):
        found.append(scores(model, ids))
        model.model.model.embed_tokens.weight.data[9] = torch.inf
    assert found[1][1, 3].isnan().all() and torch.equal(found[1][0], found[0][0])
