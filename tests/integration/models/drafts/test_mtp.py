"""Multi-token-prediction layers of a checkpoint: loaded by name, next to transformers' own pass, and exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import HeadDrafter
from foresay.errors import UnsupportedModelError
from foresay.generation.load import load
from foresay.models.drafts.mtp import NEXT, MtpHead, num_mtp_layers
from foresay.models.huggingface.causal import CausalModel
from helpers import tiny
from helpers.mtp import save_with_mtp
from helpers.support import run

FAMILIES = ["deepseek_v3", "qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe"]
SMALL = 264
PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2], [1, 2, 1], [6] * 9, [3, 1] * 8]


def target(folder: Path, family: str, **changes: Any) -> CausalModel:
    path = save_with_mtp(folder, family, vocab_size=SMALL, **changes)
    found = load(str(path), drafter="none", dtype="fp32").target.model
    assert isinstance(found, CausalModel)
    return found


def chain(head: MtpHead, text: list[int], drafts: int) -> list[torch.Tensor]:
    """transformers' own pass over a whole text and the draft tokens after it: logits before each of them, [V]."""
    model = head.target.model
    layers: Any = head._layers
    head.target.release()  # transformers' own attention and masks
    tokens = list(text)
    with torch.inference_mode():
        hidden = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states[-1]
        out = []
        for _ in range(drafts):
            layers.config._attn_implementation = "eager"
            ids = torch.tensor([tokens[1:]])
            positions = torch.arange(1, len(tokens))[None]
            after = layers.forward_layer(
                0, hidden[:, : len(tokens) - 1], positions, MtpCache(config=layers.config), input_ids=ids
            )
            logits = layers._project_to_logits(after[:, -1])[0]
            out.append(logits)
            tokens.append(int(logits.argmax()))
            hidden = torch.cat([hidden[:, : len(tokens) - 2], after[:, -1:]], 1)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_tokens_are_those_of_transformers_own_pass(family: str, tmp_path: Path) -> None:
    model = target(tmp_path, family)
    head = MtpHead(model, name="tiny")
    text = [7, 3, 90, 41, 200, 5, 18]
    cache = model.new_cache()
    cache.add_rows(1)
    layer = model.num_layers
    states = model.forward(
        ModelInput(torch.tensor([text]), [7], logits=Logits.NONE, hidden_layers=(layer,)), cache
    ).hidden[layer]
    own = head.new_cache()
    own.add_rows(1)
    given = ModelInput(torch.tensor([text[1:]]), [6], logits=Logits.LAST, features=states[:, :-1])
    found = head.forward(given, own)
    scores = [found.scores()[0, 0]]
    features = found.hidden[NEXT][:, -1:]
    for _ in range(2):
        token = scores[-1].argmax().view(1, 1)
        found = head.forward(ModelInput(token, [1], logits=Logits.LAST, features=features), own)
        scores.append(found.scores()[0, 0])
        features = found.hidden[NEXT]
    wanted = chain(head, text, 3)
    for ours, theirs in zip(scores, wanted, strict=True):
        torch.testing.assert_close(ours[: len(theirs)], theirs, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_plain_decoding(family: str, tmp_path: Path) -> None:
    model = target(tmp_path, family)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    drafter = HeadDrafter(MtpHead(model, name="tiny"), SMALL)
    ours, steps, engine = run(model, PROMPTS, params, drafter=drafter, gamma=3, join_later=2, max_batch_size=3)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert ours == plain and any(step.num_drafted == 3 for step in steps)


def test_by_name_and_what_is_refused(tmp_path: Path) -> None:
    path = save_with_mtp(tmp_path / "with", "qwen3_5", vocab_size=SMALL)
    plain = load(str(path), drafter="none", dtype="fp32")
    for drafter in ("mtp", "hybrid(suffix, mtp)"):
        other = load(str(path), drafter=drafter, dtype="fp32", num_draft_tokens=3)
        assert (
            other.generate("abcabc", max_new_tokens=16).token_ids
            == plain.generate("abcabc", max_new_tokens=16).token_ids
        )
    without = tiny.save(tmp_path / "without")
    with pytest.raises(UnsupportedModelError, match="names none"):
        load(str(without), drafter="mtp")
    assert isinstance(plain.target.model, CausalModel) and num_mtp_layers(plain.target.model) == 0
    lacking = tiny.save(tmp_path / "lacking", save_model(tmp_path))
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        load(str(lacking), drafter="mtp", dtype="fp32")


def test_the_default_of_a_checkpoint_that_has_them(tmp_path: Path) -> None:
    path = save_with_mtp(tmp_path / "with", "deepseek_v3", vocab_size=SMALL)
    found = load(str(path), dtype="fp32")
    assert "mtp" in found.drafter_name
    plain = load(str(path), drafter="none", dtype="fp32")
    assert (
        found.generate("abcabc", max_new_tokens=16).token_ids == plain.generate("abcabc", max_new_tokens=16).token_ids
    )
    lacking = tiny.save(tmp_path / "lacking", save_model(tmp_path))
    assert load(str(lacking), dtype="fp32").drafter_name == "suffix"


def test_layers_of_an_unknown_form_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers loads their numbers as they lie, and leaves the scales."""
    path = save_with_mtp(tmp_path / "with", "deepseek_v3", vocab_size=SMALL)
    weights = load_file(path / "model.safetensors")
    name = next(one for one in weights if one.startswith("model.layers.3.") and one.endswith("o_proj.weight"))
    save_file(weights | {f"{name}_scale_inv": torch.ones(1)}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"o_proj\.weight_scale_inv\): they are quantized"):
        load(str(path), drafter="mtp", dtype="fp32")
    with caplog.at_level("INFO", "foresay"):
        assert load(str(path), dtype="fp32").drafter_name == "suffix"
    assert "drafting without multi-token-prediction layers" in caplog.text


def save_model(folder: Path) -> Any:
    """A model whose configuration names a layer that its files lack."""
    from helpers.families import make

    return make("deepseek_v3", vocab_size=SMALL)


def test_the_layers_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Control: other weights give other draft tokens."""
    one, two = (
        MtpHead(target(tmp_path / str(seed), "qwen3_5", seed=seed), name="tiny")._layers.layers[0].eh_proj
        for seed in (3, 4)
    )
    x = torch.randn(1, 64)
    assert not torch.allclose(one(x), two(x))


def test_a_hub_target_reads_its_own_snapshot_and_keeps_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the files of the latest commit, and none that are not in the cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit, other = "a" * 40, "b" * 40
    snapshots = tmp_path / "models--org--small" / "snapshots"
    model = target(snapshots / commit, "qwen3_5", seed=3)
    save_with_mtp(snapshots / other, "qwen3_5", seed=4, vocab_size=SMALL)
    (tmp_path / "models--org--small" / "refs").mkdir()
    (tmp_path / "models--org--small" / "refs" / "main").write_text(other, encoding="utf-8")
    config: Any = model.model.config
    wanted = MtpHead(model, name="tiny")._layers.layers[0].eh_proj
    config.name_or_path, config._commit_hash = "org/small", commit
    before = config.to_dict()
    found = MtpHead(model, name="tiny")._layers.layers[0].eh_proj
    x = torch.randn(1, 64)
    assert torch.equal(wanted(x), found(x))
    assert config.to_dict() == before and config.name_or_path == "org/small"
    config._commit_hash = "c" * 40
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        MtpHead(model, name="tiny")
    config._commit_hash = None
    with pytest.raises(UnsupportedModelError, match="no folder 'org/small'"):
        MtpHead(model, name="tiny")


def test_of_layers_that_share_a_projection_the_first_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = target(tmp_path, "qwen3_5", mtp_num_hidden_layers=2)
    head = MtpHead(model, name="tiny")
    assert head.num_mtp_layers == 1 and "of 2 multi-token-prediction layers" in caplog.text
    assert num_mtp_layers(model) == 2


def test_options_of_drafts_apply(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """8-bit weights give other draft tokens but the same text; nothing is printed."""
    path = save_with_mtp(tmp_path, "qwen3_5", vocab_size=SMALL)
    capfd.readouterr()
    plain = load(str(path), drafter="none", dtype="fp32")
    rounded = load(str(path), drafter="mtp", dtype="fp32", draft_weights="int8", num_draft_tokens=3)
    whole = load(str(path), drafter="mtp", dtype="fp32", num_draft_tokens=3)
    assert capfd.readouterr().err == ""
    layers = [one.resources.mtp()._layers.layers for one in (whole, rounded)]
    x = torch.randn(1, 64)
    assert not torch.equal(*(one[0].eh_proj(x) for one in layers)) and all(len(one) == 1 for one in layers)
    wanted = plain.generate("abcabc", max_new_tokens=16).token_ids
    assert rounded.generate("abcabc", max_new_tokens=16).token_ids == wanted
