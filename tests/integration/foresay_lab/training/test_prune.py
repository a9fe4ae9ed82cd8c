"""Pruned models: what is kept computes what it computed, what matters is measured, and transformers loads the result."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foresay.errors import ConfigError, UnknownNameError, UnsupportedModelError
from foresay_lab.training.importance import Importance, measure
from foresay_lab.training.prune import Shape, choose_kept, layers_to_keep, pruned
from helpers import tiny
from helpers.families import make
from helpers.refusals import refuses

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "granite"]
IDS = torch.tensor([[5, 9, 17, 3, 4, 8, 60, 2, 33, 21, 7, 7]])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits[0]  # type: ignore[no-any-return]


def importance_of(model: Any) -> Importance:
    return measure(model, [IDS, IDS + 1])


def cut(model: Any, keep: Any = "first", **sizes: int) -> tuple[Any, Any]:
    """The pruned model, and what was kept."""
    whole = Shape.of(model.config)
    shape, found = whole.smaller(**sizes), importance_of(model)
    kept = choose_kept(whole, shape, layers_to_keep(keep, shape.layers, whole.layers, found), found)
    return pruned(model, shape, kept), kept


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_layers_are_the_model_without_the_others(family: str) -> None:
    """And all that there is computes the same."""
    model = make(family)
    torch.testing.assert_close(logits(cut(model)[0]), logits(model), atol=1e-5, rtol=1e-5)
    small, without = cut(model, [0, 2], layers=2)[0], copy.deepcopy(model)
    without.model.layers = torch.nn.ModuleList([model.model.layers[0], model.model.layers[2]])
    for index, layer in enumerate(without.model.layers):
        layer.self_attn.layer_idx = index
    without.config.num_hidden_layers = 2
    if getattr(without.config, "layer_types", None):
        without.config.layer_types = [model.config.layer_types[0], model.config.layer_types[2]]
    torch.testing.assert_close(logits(small), logits(without), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(small), logits(model), atol=1e-2)


@torch.no_grad()
def masked(model: Any, kept: Any, whole: Shape) -> Any:
    """The model with zeros where nothing is kept, and norms that divide by what is kept."""
    out = copy.deepcopy(model)
    dim = model.config.head_dim
    gone = torch.ones(whole.hidden, dtype=torch.bool)
    gone[kept.hidden] = False
    share = (len(kept.hidden) / whole.hidden) ** 0.5
    out.model.embed_tokens.weight[:, gone] = 0
    for norm in [m for n, m in out.named_modules() if n.endswith("layernorm") or n == "model.norm"]:
        norm.weight *= share
        norm.weight[gone] = 0
    for place, layer in enumerate(out.model.layers):
        heads, model_input = torch.ones(whole.heads, dtype=torch.bool), torch.ones(whole.feed_forward, dtype=torch.bool)
        heads[kept.heads[place]] = False
        model_input[kept.feed_forward[place]] = False
        layer.self_attn.o_proj.weight[:, heads.repeat_interleave(dim)] = 0
        layer.self_attn.o_proj.weight[gone] = 0
        layer.mlp.down_proj.weight[:, model_input] = 0
        layer.mlp.down_proj.weight[gone] = 0
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_a_narrower_model_computes_what_is_left(family: str) -> None:
    model = make(family, head_dim=8, rms_norm_eps=1e-12)
    whole = Shape.of(model.config)
    for sizes in (
        {"hidden": 20},
        {"heads": 2},
        {"heads": 2, "kv_heads": 1},
        {"kv_heads": 1, "heads": 1},
        {"feed_forward": 30},
        {"hidden": 24, "heads": 2, "kv_heads": 2, "feed_forward": 17},
    ):
        small, kept = cut(model, **sizes)
        wanted = logits(masked(model, kept, whole))
        torch.testing.assert_close(logits(small), wanted, atol=2e-4, rtol=2e-4)
        assert not torch.allclose(wanted, logits(model), atol=1e-2), "control"
        assert Shape.of(small.config) == whole.smaller(**sizes)


@torch.no_grad()
def test_what_matters_is_measured() -> None:
    """Weights are made large, or nothing, by hand."""
    model = make("llama", num_hidden_layers=4)
    layers = model.model.layers
    layers[1].self_attn.o_proj.weight.zero_()
    layers[1].mlp.down_proj.weight.zero_()  # the layer gives what it reads
    layers[0].mlp.gate_proj.weight[[3, 40]] *= 30
    layers[2].self_attn.v_proj.weight[8:] *= 30  # the second key head's values
    for norm in [m for n, m in model.named_modules() if n.endswith("layernorm")]:
        norm.weight[11] = 50
    found = importance_of(model)
    assert found.num_tokens == 24
    assert float(found.layers[1]) == pytest.approx(0, abs=1e-6)
    assert layers_to_keep("important", 3, 4, found) == (0, 2, 3)
    assert {3, 40} <= set(torch.topk(found.feed_forward[0], 4).indices.tolist())
    assert set(torch.topk(found.heads[2], 2).indices.tolist()) == {2, 3}
    assert int(found.hidden.argmax()) == 11


def test_evenly_spaced_layers_have_both_ends() -> None:
    for count, wanted in ((1, (0,)), (2, (0, 9)), (4, (0, 3, 6, 9)), (10, tuple(range(10)))):
        assert layers_to_keep("even", count, 10, None) == wanted
        assert layers_to_keep("first", count, 10, None) == tuple(range(count))


def test_shapes_that_cannot_be_cut_out_are_refused() -> None:
    whole = Shape(layers=3, hidden=32, heads=4, kv_heads=2, feed_forward=48)
    shapes: list[tuple[dict[str, int], str]] = [
        ({"layers": 4}, "layers=4 must be 1 to 3"),
        ({"hidden": 0}, "hidden=0 must be 1 to 32"),
        ({"heads": 3}, "must be a multiple of kv_heads=2"),
        ({"kv_heads": 1, "heads": 3}, "leaves 3 heads per group"),
    ]
    for sizes, message in shapes:
        with pytest.raises(ConfigError, match=message):
            whole.smaller(**sizes)
    with pytest.raises(ConfigError, match="must be 2 different ones of 0 to 2"):
        layers_to_keep([0, 3], 2, 3, None)
    with pytest.raises(UnknownNameError):
        layers_to_keep("last", 2, 3, None)
    refuses(lambda: choose_kept(whole, whole.smaller(hidden=16), [0, 1, 2], None), "text")
    refuses(lambda: measure(make("llama"), []), "text")
    for family in ("gpt2", "falcon", "mixtral"):
        model = make(family)
        with pytest.raises(UnsupportedModelError):
            cut(model, layers=2)


def test_the_command_writes_a_folder_that_transformers_loads(tmp_path: Path, shell: tiny.Shell) -> None:
    source, out, other = (tmp_path / name for name in ("source", "small", "other"))
    tiny.save(source, tiny.llama(num_hidden_layers=6))
    (tmp_path / "text.txt").write_text("hello world, hello world\n" * 40)

    def pruned_by(folder: Path) -> list[str]:
        return ["distill", str(folder), "--kind", "pruned", "--model", str(source)]

    sizes = ["--layers", "2", "--hidden", "16", "--attention-heads", "1", "--kv-heads", "1", "--feed-forward", "24"]
    printed = shell.out(*pruned_by(out), *sizes, "--text", str(tmp_path / "text.txt"), "--tokens", "100")
    assert "layers: 0, 5 of 6" in printed and "measured on 100 tokens" in printed
    assert Shape.of(AutoModelForCausalLM.from_pretrained(out).config) == Shape(2, 16, 1, 1, 24)
    assert AutoTokenizer.from_pretrained(out)("hello").input_ids == tiny.tokenizer()("hello").input_ids
    note = json.loads((out / "foresay.json").read_text())
    assert (note["layers_kept"], note["measured_on"]["tokens"]) == ([0, 5], 100)
    assert shell("generate", "hello", "--model", str(source), "--draft", str(out), "-n", "4")[0] == 0

    assert "add --force" in shell.refused(*pruned_by(out), "--layers", "1")
    shell.out(*pruned_by(out), "--keep", "0,2,4", "--force")
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 3
    assert "not made by foresay" in shell.refused(*pruned_by(source), "--layers", "1", "--force")
    assert "--hidden 33" in shell.refused(*pruned_by(other), "--hidden", "33")
    assert not other.exists()
    assert "measured on" in shell.out(*pruned_by(other), "--layers", "3", "--keep", "important")
