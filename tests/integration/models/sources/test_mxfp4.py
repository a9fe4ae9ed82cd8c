"""Folders of gpt-oss whose experts are stored in MXFP4: decoded in their 4.25 bits, with the text of the dequantized model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ModelLoadError
from foresay.models.huggingface.frozen import FrozenExperts
from foresay.models.sources import mxfp4
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_weights
from helpers import tiny
from helpers.comparing import NEW, assert_same, plain, prompts
from helpers.mxfp4 import VOCAB, Change, folder_of
from helpers.support import Sometimes, run

PARAMS = SamplingParams(max_new_tokens=NEW)
LAST = "model.layers.2.mlp.experts."


def in_float32(path: Path) -> Any:
    """The kernels without the rounding of inputs, keys and values."""
    loaded: Any = load_model(path, LoadOptions(activations="float32")).model
    loaded.use_fused(torch.float32)
    return loaded


def test_experts_stay_in_their_blocks(tmp_path: Path) -> None:
    """Each number is the stored one; no layer is expanded."""
    path, reference = folder_of(tmp_path / "tiny")
    loaded: Any = load_model(path)
    assert loaded.precision == "bfloat16, MXFP4 weights" and loaded.model.fused.is_native
    for own, wanted in zip(loaded.model.model.model.layers, reference.model.layers, strict=True):
        experts, dense = own.mlp.experts, wanted.mlp.experts
        assert isinstance(experts, FrozenExperts)
        assert {one.product.bits for one in (*experts.gate_up, *experts.down)} == {4.25}
        for i, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            rows = dense.gate_up_proj[i].T
            assert torch.equal(gate_up.product.dense().float(), torch.cat([rows[::2], rows[1::2]]))
            assert torch.equal(down.product.dense().float(), dense.down_proj[i].T)
            assert torch.equal(gate_up.bias.float(), dense.gate_up_proj_bias[i].view(-1, 2).T.flatten())
    assert all(one.dim() < 3 for one in loaded.model.model.parameters())


def test_texts_are_those_of_transformers(tmp_path: Path) -> None:
    """In float32, with rejected and with accepted drafts. Control: neighbours read as the two halves of a block."""
    path, reference = folder_of(tmp_path / "tiny")
    dense, _ = load_weights(path, LoadOptions(dtype="fp32"))
    for name, weight in reference.state_dict().items():
        assert torch.equal(dense.state_dict()[name], weight), name
    wanted = [plain(reference, prompt) for prompt in prompts()]
    assert len({token for output in wanted for token in output}) > 5, "a model that repeats itself proves little"
    drafter = Sometimes(wanted, VOCAB)
    ours, steps, engine = run(in_float32(path), prompts(), PARAMS, drafter=drafter, gamma=4, join_later=3)
    assert engine.draft_failures == 0
    assert any(step.num_accepted < step.num_drafted for step in steps)
    assert any(step.num_accepted == step.num_drafted == 4 for step in steps)
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
        assert_same(reference, prompt, one, theirs)


def scores(model: Any) -> torch.Tensor:
    cache, ids = model.new_cache(), torch.tensor([prompts()[3]])
    cache.add_rows(1)
    out: torch.Tensor = model.forward(ModelInput(ids, [ids.shape[1]]), cache).scores()[0].float()
    return out


def test_scores_are_those_of_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: neighbours read as the halves of a block, and gates as ups."""
    path, reference = folder_of(tmp_path / "tiny")
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompts()[3]])).logits[0]

    def difference() -> float:
        return float((scores(in_float32(path)) - wanted).abs().max() / (wanted.max() - wanted.min()))

    assert difference() < 1e-4
    intact = mxfp4._product
    with monkeypatch.context() as patch:

        def halved(blocks: torch.Tensor, scales: torch.Tensor, **given: Any) -> Any:
            fours = torch.cat([blocks & 15, blocks >> 4], -1)
            return intact(fours[..., ::2] | fours[..., 1::2] << 4, scales, **given)

        patch.setattr(mxfp4, "_product", halved)
        assert difference() > 1e-2
    monkeypatch.setattr(mxfp4, "_product", lambda blocks, scales, **given: intact(blocks, scales, alternates=False))
    assert difference() > 1e-2


def test_any_draft_and_any_batch_write_the_same(tmp_path: Path) -> None:
    path, _ = folder_of(tmp_path / "tiny")
    model = load_model(path).model
    alone = [run(model, [prompt], PARAMS, gamma=0)[0][0] for prompt in prompts()]
    for gamma, batch in ((1, 6), (4, 3)):
        drafter = Sometimes(alone, VOCAB)
        assert run(model, prompts(), PARAMS, drafter=drafter, gamma=gamma, max_batch_size=batch)[0] == alone


@pytest.mark.parametrize("options", [LoadOptions(dtype="fp32"), LoadOptions(weights="int8")])
def test_other_formats_are_made_of_the_numbers(tmp_path: Path, options: LoadOptions) -> None:
    path, reference = folder_of(tmp_path / "tiny")
    loaded = load_model(path, options)
    assert loaded.weights == ("int8" if options.bits else "")
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompts()[3]])).logits[0]
    error = (scores(loaded.model) - wanted).square().mean(-1).sqrt().median() / wanted.std()
    assert float(error) < (0.2 if options.bits else 1e-4), "the median, as rounding may select other experts"


def test_info_names_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = folder_of(tmp_path / "tiny")
    code, out, _ = tiny.Shell(monkeypatch, capsys)("info", str(path))
    assert code == 0 and "experts in MXFP4 as stored" in out
    assert "fused layers, kernels compiled for this machine" in out and "same bits: yes" in out


def to(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda weights: weights.update({LAST + name: change(weights[LAST + name])})


def without(*names: str) -> Change:
    return lambda weights: [weights.pop(LAST + name) for name in names]


CHANGES: dict[str, tuple[Change, str]] = {
    "no scales": (without("down_proj_scales"), r"experts\.down_proj are missing"),
    "no blocks": (without("gate_up_proj_blocks"), r"experts\.gate_up_proj are missing"),
    "fewer experts": (to("down_proj_blocks", lambda one: one[:2]), r"down_proj are of torch\.uint8 in the shape \[2, 64, 3"),
    "fewer rows": (to("gate_up_proj_scales", lambda one: one[:, :8].contiguous()), r"in the shape \[4, 8, 2\]"),
    "numbers": (to("down_proj_scales", torch.Tensor.float), r"are of torch\.float32"),
    "an exponent that is no number": (lambda weights: weights[LAST + "down_proj_scales"].view(-1)[7:8].fill_(255), "contain 255"),
    "no biases": (without("down_proj_bias"), "1 weights are missing"),
    "no layer's": (without("down_proj_blocks", "down_proj_scales"), "1 weights are missing|only a part of"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    change, problem = CHANGES[name]
    path, _ = folder_of(tmp_path / "tiny", change)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        load_model(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
