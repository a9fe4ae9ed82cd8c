"""Low-rank adapters: the merged model is that of weights with s B A added, whatever the format of file and weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

import foresay
from foresay.errors import ModelLoadError
from foresay.models.gguf.blocks import row_order
from foresay.models.sources.lora import adapters, digest
from helpers import assistants, tiny
from helpers.families import make
from helpers.gguf_cases import scores
from helpers.gguf_files import architecture_of, write_gguf
from helpers.refusals import refuses

Q, DOWN, TABLE = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens"
RANK = 4
Pairs = Mapping[str, Mapping[str, torch.Tensor]]
PROMPTS = ["hello, hello", "one two one"]


def factors(model: PreTrainedModel, name: str, rank: int = RANK) -> dict[str, torch.Tensor]:
    """Random A and B of a linear layer, large enough to change what is generated."""
    dice, rows = torch.Generator().manual_seed(len(name)), model.get_submodule(name).weight
    width, height = rows.shape[1], rows.shape[0]
    return {"A": torch.randn(rank, width, generator=dice) * 0.3, "B": torch.randn(height, rank, generator=dice) * 0.3}


PAIRS = {name: factors(tiny.llama(), name) for name in (Q, DOWN)}


def write(folder: Path, pairs: Pairs = PAIRS, **values: Any) -> Path:
    """An adapter in peft's layout."""
    folder.mkdir(exist_ok=True)
    tensors = {
        f"base_model.model.{name}.lora_{k}.weight": one for name, pair in pairs.items() for k, one in pair.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none", "init_lora_weights": True, **values}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def write_adapter(path: Path, pairs: Pairs, alpha: float = 8.0, more: str = "", architecture: str = "llama") -> Path:
    """The same in llama.cpp's layout, in which rows of queries are pairs of a head's halves."""
    values = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha}
    tensors = {
        f"{name}.weight.lora_{k.lower()}": one.contiguous().numpy()
        for name, pair in pairs.items()
        for k, one in pair.items()
    }
    return assistants.write_gguf(path, architecture, values | ({more: [5, 6]} if more else {}), tensors)


def merged(model: PreTrainedModel, pairs: Pairs, by: float) -> PreTrainedModel:
    for name, pair in pairs.items():
        model.get_submodule(name).weight.data += by * (pair["B"] @ pair["A"])
    return model


def texts(model: Any, **options: Any) -> list[Any]:
    target = foresay.load(model, drafter="suffix", **options)
    return [one.token_ids for one in target.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)]


@pytest.mark.parametrize("options", [{"dtype": "fp32"}, {"weights": "int8"}], ids=str)
def test_an_adapter_is_in_the_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    """Before they are packed; with drafts, and as plain decoding of a model that was merged before."""
    base = tiny.llama().to(torch.bfloat16).float()  # so that the sums are rounded once
    folder = tiny.save(tmp_path / "base", base)
    wanted = texts(tiny.save(tmp_path / "merged", merged(base, PAIRS, 2.0)), **options)
    lora = write(tmp_path / "lora")
    found = texts(folder, lora=str(lora), **options)
    assert found == wanted != texts(folder, **options)
    plain = foresay.load(folder, drafter="none", lora=[f"{lora}=1.0"], **options)
    assert [one.token_ids for one in plain.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)] == wanted


def scores_of(model: Any, **options: Any) -> torch.Tensor:
    found: Any = foresay.load(model, drafter="none", **options).target.model
    return scores(found)


@functools.cache
def plain() -> torch.Tensor:
    return scores_of(tiny.llama())


def added(folder: Path, given: str | Sequence[str]) -> torch.Tensor:
    """The difference that an adapter makes to the scores of the tiny model."""
    return scores_of(folder, dtype="fp32", lora=given) - plain()


def expected(pairs: Pairs, by: float) -> torch.Tensor:
    return scores_of(merged(tiny.llama(), pairs, by)) - plain()


@pytest.mark.parametrize(
    ("values", "scale", "by"),
    [
        ({}, "", 2.0),
        ({}, "=-0.5", -1.0),
        ({"use_rslora": True}, "", 4.0),
        ({"alpha_pattern": {"q_proj": 2, "^model.layers.1.mlp.down_proj": 2}}, "", 0.5),
        ({"r": 16, "rank_pattern": {"self_attn.q_proj": 4, "down_proj": 4}, "fan_in_fan_out": False}, "", 2.0),
    ],
    ids=["alpha / r", "a scale", "rslora", "alpha_pattern", "rank_pattern"],
)
def test_scales(
    tmp_path: Path,
    folder: Path,
    values: dict[str, Any],
    scale: str,
    by: float,
) -> None:
    lora = write(tmp_path / "lora", **values)
    wanted = expected(PAIRS, by)
    torch.testing.assert_close(added(folder, f"{lora}{scale}"), wanted, atol=2e-4, rtol=1e-3)
    assert (added(folder, f"{lora}=0.25") - wanted).abs().max() > 0.01, "control: another scale"


def test_several_adapters_and_embeddings(tmp_path: Path, folder: Path) -> None:
    first, second = write(tmp_path / "a", {Q: PAIRS[Q]}), write(tmp_path / "b", {DOWN: PAIRS[DOWN]}, lora_alpha=4)
    both = expected({Q: PAIRS[Q], DOWN: {"A": PAIRS[DOWN]["A"], "B": PAIRS[DOWN]["B"] / 2}}, 2.0)
    torch.testing.assert_close(added(folder, [str(first), str(second)]), both, atol=2e-4, rtol=1e-3)
    table = factors(tiny.llama(), TABLE)
    names = {
        f"base_model.model.{TABLE}.lora_embedding_A": table["B"].t(),
        f"base_model.model.{TABLE}.lora_embedding_B": table["A"].t(),
    }
    names[f"base_model.model.{TABLE}.base_layer.weight"] = (
        tiny.llama().get_submodule(TABLE).weight.data
    )  # a copy of the model's
    save_file({name: one.contiguous() for name, one in names.items()}, first / "adapter_model.safetensors")
    torch.testing.assert_close(added(folder, str(first)), expected({TABLE: table}, 2.0), atol=2e-4, rtol=1e-3)


def test_adapters_of_llama_cpp(tmp_path: Path) -> None:
    """On a folder and on a GGUF file whose weights are numbers; rows in the file's order."""
    model = tiny.llama()
    heads = model.config.num_attention_heads
    back = row_order(len(PAIRS[Q]["B"]), heads).argsort()
    stored = {"blk.0.attn_q": {**PAIRS[Q], "B": PAIRS[Q]["B"][back]}, "blk.1.ffn_down": PAIRS[DOWN]}
    lora, folder = write_adapter(tmp_path / "lora.gguf", stored), tiny.save(tmp_path / "model")
    wanted = expected(PAIRS, 2.0)
    torch.testing.assert_close(added(folder, str(lora)), wanted, atol=2e-4, rtol=1e-3)
    unordered = write_adapter(tmp_path / "unordered.gguf", {"blk.0.attn_q": PAIRS[Q], "blk.1.ffn_down": PAIRS[DOWN]})
    assert (added(folder, str(unordered)) - wanted).abs().max() > 0.01, "control: rows in transformers' order"
    file = write_gguf(tmp_path / "model.gguf", model)
    torch.testing.assert_close(added(file, str(lora)), wanted, atol=5e-3, rtol=0.02)
    assert texts(file, lora=str(lora), dtype="fp32") != texts(file, dtype="fp32")
    blocks = write_gguf(tmp_path / "blocks.gguf", model, {"attn_q": "Q8_0"})
    refuses(lambda: foresay.load(blocks, lora=str(lora)), "lora", str(lora))
    assert foresay.load(blocks, lora=str(lora), weights="bf16").target.name == str(blocks)


@pytest.mark.parametrize("family", ["ministral3", "olmo3"])
def test_adapters_of_a_family_that_shares_its_architectures_name(tmp_path: Path, family: str) -> None:
    model = make(family)
    folder, pair, (name, entry) = tiny.save(tmp_path / "model", model), factors(model, Q), architecture_of(model)
    stored = dict(pair)
    if entry.interleaved:
        stored["B"] = stored["B"][row_order(len(stored["B"]), model.config.num_attention_heads).argsort()]
    lora = write_adapter(tmp_path / "lora.gguf", {"blk.0.attn_q": stored}, architecture=name)
    given = (str(lora), str(write(tmp_path / "lora", {Q: pair})), None)
    ours, theirs, without = (scores_of(folder, dtype="fp32", lora=one) for one in given)
    torch.testing.assert_close(ours, theirs)
    assert (ours - without).abs().max() > 0.01


def test_what_is_not_merged_is_refused(tmp_path: Path, folder: Path) -> None:
    def wrong(words: str, tensors: Any = PAIRS, **values: Any) -> None:
        lora = write(tmp_path / "lora", tensors, **values)
        with pytest.raises(ModelLoadError, match=words) as raised:
            foresay.load(folder, lora=str(lora), dtype="fp32")
        assert "\n" not in str(raised.value)

    for field, value in (
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 2]]),
        ("peft_type", "IA3"),
        ("target_parameters", ["x"]),
        ("of_a_newer_version", {"scale": 2}),
    ):
        wrong(str(value).strip("[]'")[:6] if field == "peft_type" else field, **{field: value})
    wrong("rank 4, and adapter_config.json states 8", r=8)
    wrong("pattern", rank_pattern={"(q|k)+": 4})
    wrong("no number", lora_alpha="x")
    wrong("which is not merged", {Q: {**PAIRS[Q], "C": PAIRS[Q]["A"] + 1}})
    changed = tiny.llama().get_submodule(TABLE).weight.data + 1
    lora, name = write(tmp_path / "lora"), f"base_model.model.{TABLE}.base_layer.weight"
    save_file({name: changed}, lora / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="base_layer"):
        foresay.load(folder, lora=str(lora), dtype="fp32")
    wrong("no two factors", {Q: {"A": PAIRS[Q]["A"]}})
    wrong("does not have", {"model.layers.7.self_attn.q_proj": PAIRS[Q]})
    wrong("belongs to another model", {Q: {**PAIRS[Q], "B": PAIRS[Q]["B"][:-1]}})
    wrong("not finite", {Q: {**PAIRS[Q], "B": PAIRS[Q]["B"] * torch.inf}})
    wrong("no tensors", {})
    (tmp_path / "lora" / "adapter_config.json").unlink()
    with pytest.raises(ModelLoadError, match="cannot be read"):
        foresay.load(folder, lora=str(tmp_path / "lora"))
    with pytest.raises(ModelLoadError, match="no low-rank adapter"):
        foresay.load(folder, lora=str(write_gguf(tmp_path / "model.gguf", tiny.llama())))
    with pytest.raises(ModelLoadError, match="which is not merged"):
        foresay.load(folder, lora=str(write_adapter(tmp_path / "a.gguf", {"blk.9.attn_q": PAIRS[Q]})))
    for given in ({"more": "adapter.alora.invocation_tokens"}, {"alpha": float("nan")}):
        file = write_adapter(tmp_path / "b.gguf", {"blk.1.ffn_down": PAIRS[DOWN]}, **given)
        with pytest.raises(ModelLoadError, match=r"adapter\.(alora|lora\.alpha).*which is not merged"):
            foresay.load(folder, lora=str(file))
    tied = tiny.save(tmp_path / "tied", tiny.llama(tie_word_embeddings=True))
    with pytest.raises(ModelLoadError, match="also that of"):
        foresay.load(tied, lora=str(write(tmp_path / "lora", {"lm_head": factors(tiny.llama(), "lm_head")})))


def test_another_base_model_is_logged(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And fields that change nothing are no reason to refuse an adapter. A line of a file stays one line."""
    harmless = {"target_modules": ["q_proj"], "megatron_core": "megatron.core", "lora_dropout": 0.1, "use_dora": False}
    for model in (folder, write_gguf(tmp_path / "of-this-name.gguf", tiny.llama())):
        for base, logged in (("org/Another\nModel", 1), (f"org/{model.stem.upper()}", 0), (None, 0)):
            lora = write(tmp_path / "lora", base_model_name_or_path=base, **harmless)
            foresay.load(model, lora=str(lora), dtype="fp32")
            lines = [one.getMessage() for one in caplog.records if "base model" in one.getMessage()]
            assert [repr(base) in one and repr(str(model)) in one for one in lines] == [True] * logged
            caplog.clear()


def test_options_that_contradict(tmp_path: Path, folder: Path) -> None:
    lora = str(write(tmp_path / "lora"))
    refuses(lambda: foresay.load(folder, lora="nowhere"), "lora", "nowhere")
    refuses(lambda: foresay.load(folder, lora=f"{lora}=1.2.3"), "lora", f"{lora}=1.2.3")
    refuses(lambda: foresay.load(folder, lora=lora, backend="llama.cpp"), "lora", lora)
    refuses(lambda: foresay.load(folder, lora=lora, quantization_config={}), "lora", lora)
    of = [digest(adapters(one)) for one in (None, lora, f"{lora}=0.5")]
    assert len(set(of)) == 3 and of[0] == b"", "kept prompts of one are not those of another"
    names = [foresay.load(folder, drafter="none", lora=one).target.model for one in (None, lora)]
    assert names[0].learned != names[1].learned


def test_commands(tmp_path: Path, folder: Path, shell: tiny.Shell) -> None:
    lora = write(tmp_path / "lora")
    args = ["--model", str(folder), "--dtype", "fp32", "-n", "24", "--ignore-eos", "--json", PROMPTS[0]]
    [found] = shell.objects("generate", "--lora", f"{lora}=1", *args)
    [plain] = shell.objects("generate", *args)
    assert found["token_ids"] == texts(folder, lora=str(lora), dtype="fp32")[0] != plain["token_ids"]
    code, _, err = shell("generate", "--lora", "nowhere", *args)
    assert code == 2 and "--lora" in err and "nowhere" in err
