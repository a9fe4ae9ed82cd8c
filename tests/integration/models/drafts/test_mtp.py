"""Multi-token-prediction layers of a checkpoint: loaded by name, next to transformers' own pass, and exact."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache

from foresay.decoding.protocols import Logits, ModelInput
from foresay.drafters import HeadDrafter
from foresay.errors import UnsupportedModelError
from foresay.generation.load import load
from foresay.models.drafts.mtp import NEXT, MtpHead, num_mtp_layers
from foresay.models.huggingface.causal import CausalModel
from helpers import tiny
from helpers.drafting import decoded
from helpers.families import make
from helpers.mtp import save_with_mtp
from helpers.passes import started

FAMILIES = ["deepseek_v3", "qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe"]
SIZE = 264


def target(folder: Path, family: str, **changes: Any) -> CausalModel:
    path = save_with_mtp(folder, family, vocab_size=SIZE, **changes)
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
def test_drafts_are_those_of_transformers_own_pass(family: str, tmp_path: Path) -> None:
    model = target(tmp_path, family)
    head = MtpHead(model, name="tiny")
    text = [7, 3, 90, 41, 200, 5, 18]
    cache = started(model)
    layer = model.num_layers
    states = model.forward(
        ModelInput(torch.tensor([text]), [7], logits=Logits.NONE, hidden_layers=(layer,)), cache
    ).hidden[layer]
    own = started(head)
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
    model = target(tmp_path, family)  # transformers' own pass has released the other one
    steps = decoded(model, HeadDrafter(MtpHead(model, name="tiny"), SIZE), new=4, gamma=3)
    assert any(step.num_drafted == 3 for step in steps)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_mtp(tmp_path_factory.mktemp("with"), "deepseek_v3", vocab_size=SIZE)


def text(path: Path, **options: Any) -> tuple[str, Any]:
    """Text by a folder's model, and its generator."""
    generator = load(str(path), dtype="fp32", **options)
    return generator.generate("abcabc", max_new_tokens=16).text, generator


def test_by_name_and_by_default(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """8-bit weights give other draft tokens but the same text; nothing is printed."""
    capfd.readouterr()
    plain, loaded = text(path, drafter="none")
    whole, rounded, hybrid = (
        text(path, num_draft_tokens=3, **one)
        for one in ({"drafter": "mtp"}, {"drafter": "mtp", "draft_weights": "int8"}, {"drafter": "hybrid(suffix, mtp)"})
    )
    assert capfd.readouterr().err == ""
    by_default, chosen = text(path)
    assert {whole[0], rounded[0], hybrid[0], by_default} == {plain} and "mtp" in chosen.drafter_name
    layers, x = [one.resources.mtp()._layers.layers for _, one in (whole, rounded)], torch.randn(1, 64)
    assert not torch.equal(*(one[0].eh_proj(x) for one in layers)) and all(len(one) == 1 for one in layers)
    qwen = save_with_mtp(tmp_path / "qwen", "qwen3_5", vocab_size=SIZE)  # whose configuration need not name its layer
    plain, unnamed = text(qwen, drafter="none")
    assert [num_mtp_layers(one.target.model) for one in (loaded, unnamed)] == [1, 0]
    assert text(qwen, drafter="mtp")[0] == plain
    without = tiny.save(tmp_path / "without")
    with pytest.raises(UnsupportedModelError, match="names none"):
        load(str(without), drafter="mtp")
    lacking = tiny.save(tmp_path / "lacking", make("deepseek_v3", vocab_size=SIZE))
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        load(str(lacking), drafter="mtp", dtype="fp32")
    assert load(str(lacking), dtype="fp32").drafter_name == "suffix"


def test_layers_of_an_unknown_form_are_refused(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers loads their numbers as they lie, and leaves the scales."""
    path = shutil.copytree(path, tmp_path / "with")
    weights = load_file(path / "model.safetensors")
    name = next(one for one in weights if one.startswith("model.layers.3.") and one.endswith("o_proj.weight"))
    save_file(weights | {f"{name}_scale_inv": torch.ones(1)}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"o_proj\.weight_scale_inv\): they are quantized"):
        load(str(path), drafter="mtp", dtype="fp32")
    with caplog.at_level("INFO", "foresay"):
        assert load(str(path), dtype="fp32").drafter_name == "suffix"
    assert "drafting without multi-token-prediction layers" in caplog.text


def test_a_hub_target_reads_its_own_snapshot_and_keeps_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the files of the latest commit, and none that are not in the cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit, other = "a" * 40, "b" * 40
    snapshots = tmp_path / "models--org--small" / "snapshots"
    model = target(snapshots / commit, "qwen3_5", seed=3)
    save_with_mtp(snapshots / other, "qwen3_5", seed=4, vocab_size=SIZE)
    (tmp_path / "models--org--small" / "refs").mkdir()
    (tmp_path / "models--org--small" / "refs" / "main").write_text(other, encoding="utf-8")
    config: Any = model.model.config
    wanted = MtpHead(model, name="tiny")._layers.layers[0].eh_proj
    config.name_or_path, config._commit_hash = "org/small", commit
    before = config.to_dict()
    found = MtpHead(model, name="tiny")._layers.layers[0].eh_proj
    other_layers = MtpHead(target(tmp_path / "other", "qwen3_5", seed=4), name="tiny")._layers.layers[0].eh_proj
    x = torch.randn(1, 64)
    assert torch.equal(wanted(x), found(x)) and not torch.allclose(wanted(x), other_layers(x)), "control: other weights"
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
