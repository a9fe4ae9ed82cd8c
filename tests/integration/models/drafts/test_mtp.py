"""Multi-token-prediction layers of a checkpoint: loaded by name, next to transformers' own pass, and exact.

Of several layers, each draft token is that of its own layer in a pass over the whole text.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.cache_utils import MtpCache as TransformersMtpCache

from foresay.decoding.proposal import Proposal
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, HeadDrafter, Hybrid, SuffixDrafter
from foresay.drafters.draft_cache import MAX_CATCH_UP
from foresay.drafters.target_features import RowFeatures
from foresay.errors import UnsupportedModelError
from foresay.generation.load import load
from foresay.models.drafts import mtp
from foresay.models.drafts.mtp import MtpHead, num_mtp_layers
from foresay.models.huggingface.causal import CausalModel
from helpers import heads, tiny
from helpers.drafting import decoded, watched
from helpers.families import make
from helpers.mtp import save_with_mtp
from helpers.passes import hidden_states
from helpers.refusals import refused
from helpers.support import run

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
    text = [7, 3, 90, 41, 200, 5, 18]
    model = target(tmp_path, family)
    head: Any = MtpHead(model, name="tiny")
    states = hidden_states(model, text, [model.num_layers])[model.num_layers]
    found = heads.chain(head, torch.tensor(text[1:]), states[:-1], 2)
    steps = decoded(model, HeadDrafter(head, SIZE), new=4, gamma=3)
    assert any(step.num_drafted == 3 for step in steps)
    for ours, theirs in zip(found, chain(head, text, 3), strict=True):
        torch.testing.assert_close(ours[: len(theirs)], theirs, atol=5e-4, rtol=1e-3)


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


# -- several layers ----------------------------------------------------------------------------------------------------

SMALL, LAYERS, DRAFT = 8, 3, 5
PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2, 7], [1, 2, 1], [6] * 9, [3, 1] * 8, [4]]
PARAMS = SamplingParams(max_new_tokens=13, ignore_eos=True)
SPECIALS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> MtpHead:
    folder = tmp_path_factory.mktemp("layers")
    save_with_mtp(folder, "deepseek_v3", seed=5, vocab_size=SMALL, num_nextn_predict_layers=LAYERS, **SPECIALS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return MtpHead(CausalModel(model), name="tiny")


def recorded(head: MtpHead) -> Any:
    """A drafter with what it `found`: the text before each draft, the number of its tokens that are committed, and the draft."""
    drafter: Any = HeadDrafter(head, SMALL)
    drafter.found = []

    def see(rows: Rows, proposal: Proposal) -> None:
        for row, ids, count in zip(rows, proposal.token_ids.tolist(), proposal.num_tokens, strict=True):
            if count:
                drafter.found.append((row.tokens.tolist(), row.committed.size, ids[:count]))

    return watched(drafter, see)


def differences(head: MtpHead, text: list[int], committed: int, draft: Sequence[int]) -> int:
    """The number of draft tokens that transformers' own layers do not predict.

    Each layer runs over the whole text, without a cache. A text may end with draft tokens of other drafters.
    """
    model, layers = head.target.model, head._layers
    layers.config._attn_implementation = model.config._attn_implementation = "eager"
    tokens, wrong = [*text, *draft], 0
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        hidden = model(ids[:, :committed], output_hidden_states=True, use_cache=False).hidden_states[-1][:, :-1]
        first = 1
        for index in range(committed, len(tokens)):
            layer = min(index - committed, LAYERS - 1)
            given = ids[:, first : first + hidden.shape[1]]
            positions = torch.arange(layer + 1, layer + 1 + hidden.shape[1])[None]
            cache = TransformersMtpCache(config=layers.config)
            after = layers.forward_layer(layer, hidden, positions, cache, input_ids=given)
            scores = layers._project_to_logits(after[0, -1])
            wrong += index >= len(text) and bool(scores.max() - scores[tokens[index]] > 1e-4)
            if layer < LAYERS - 1:
                hidden, first = after, first + 1
            else:  # the last layer goes on after its own output
                hidden = torch.cat([hidden, after[:, -1:]], 1)
    head.target.model.config._attn_implementation = "foresay"
    layers.config._attn_implementation = "foresay"
    return wrong


def decoded_by(head: MtpHead, make: Callable[[Any], Any] = lambda one: one, **given: Any) -> tuple[Any, Any]:
    """Output and drafts of a batch whose rows accept different numbers of tokens and end at different steps."""
    drafter = recorded(head)
    outputs, steps, engine = run(
        head.target, PROMPTS, PARAMS, drafter=make(drafter), gamma=DRAFT, join_later=2, max_batch_size=3, **given
    )
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert {0, 2} <= {step.num_accepted for step in steps if step.num_drafted > 2}
    plain, _, _ = run(head.target, PROMPTS, PARAMS, drafter=None, gamma=0)
    assert outputs == plain
    return drafter, steps


def is_wrong(head: MtpHead, drafter: Any) -> bool:
    """True if some draft has a token that transformers' own layers do not predict."""
    assert len(drafter.found) > 20
    return any(differences(head, *one) for one in drafter.found)


@pytest.fixture(scope="module")
def together(head: MtpHead) -> Any:
    return decoded_by(head)[0]


def test_each_depth_is_drafted_by_its_own_layer(head: MtpHead, together: Any) -> None:
    assert {len(draft) for _, _, draft in together.found} >= {DRAFT}
    assert not is_wrong(head, together)


def test_long_prompts_and_short_drafts_are_cached_in_parts(head: MtpHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of one token leave pairs to the later layers, which are cached once they are many."""
    monkeypatch.setattr(mtp, "Capabilities", lambda **given: mtp_capabilities(**given | {"prefill_chunk": 2}))
    drafter = recorded(head)
    long = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5] * 3
    for gamma in (1, DRAFT):
        run(head.target, [long, long[4:]], PARAMS, drafter=drafter, gamma=gamma)
    assert not is_wrong(head, drafter)


mtp_capabilities = mtp.Capabilities


def test_after_the_tokens_of_another_drafter(head: MtpHead) -> None:
    """Rows of a cascade are at different layers in the same pass."""
    drafter, _ = decoded_by(head, lambda one: Cascade([SuffixDrafter(), one], [[2, 3], [0, 0]]))
    before = {len(text) - committed for text, committed, _ in drafter.found}
    assert before == {0, 1, 2}
    assert not is_wrong(head, drafter)


def test_where_another_drafter_or_none_drafts_in_between(head: MtpHead) -> None:
    """Pairs of steps without these drafts are cached later."""
    drafter, _ = decoded_by(head, lambda one: Hybrid(SuffixDrafter(), one, min_match=2, k=DRAFT))
    assert not is_wrong(head, drafter)


@pytest.mark.parametrize("broken", ["pairs of the layer before", "one cache for all layers", "drafts kept"])
def test_other_pairs_and_caches_are_seen(head: MtpHead, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls."""
    if broken == "pairs of the layer before":
        monkeypatch.setattr(torch.Tensor, "roll", lambda self, *given: self.clone())
    elif broken == "one cache for all layers":
        intact = mtp._MtpCache.update
        monkeypatch.setattr(
            mtp._MtpCache, "update", lambda self, keys, values, layer, *more, **given: intact(self, keys, values, 0)
        )
    else:
        mark = RowFeatures.mark_cached

        def all_but_the_last(self: RowFeatures, count: int) -> None:
            is_step = len(self.pending) < MAX_CATCH_UP + LAYERS  # else a part of a prompt
            mark(self, max(count, len(self.pending) - 1) if is_step else count)

        monkeypatch.setattr(RowFeatures, "mark_cached", all_but_the_last)
    drafter = recorded(head)
    run(head.target, PROMPTS, PARAMS, drafter=drafter, gamma=DRAFT, max_batch_size=3)
    monkeypatch.undo()
    assert is_wrong(head, drafter)


def test_trees_are_refused(head: MtpHead) -> None:
    with refused("nodes", 4):
        HeadDrafter(head, SMALL, nodes=4)
    assert HeadDrafter(head, SMALL).context._num_layers == LAYERS  # type: ignore[attr-defined]


def test_the_drafts_of_a_row_are_those_of_any_batch(head: MtpHead, together: Any) -> None:
    alone = recorded(head)
    for prompt in PROMPTS:
        run(head.target, [prompt], PARAMS, drafter=alone, gamma=DRAFT)
    assert sorted(alone.found) == sorted(together.found)
