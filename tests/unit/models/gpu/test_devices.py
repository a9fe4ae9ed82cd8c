"""Steps of every drafter on a device other than the host, which is PyTorch's "meta": it has shapes and no values.

No operation mixes tensors of the device and of the host, none reads a value back, and kernels get tensors of the
device alone. What is read from weights when a model is loaded is replaced.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from triton.runtime import interpreter

from foresay.decoding import kernels
from foresay.decoding import step as step_module
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter, SelfDrafter
from foresay.drafters.hidden_states import BlockDrafter, HeadDrafter
from foresay.models.drafts import base, block
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.head import HeadModel
from foresay.models.gpu import product
from foresay.models.hardware import Hardware
from foresay.models.huggingface import causal, linears
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.operations import RotaryTable
from foresay.models.layer import Norm
from helpers.blocks import random_block
from helpers.drafting_on_pages import BLOCKS
from helpers.families import VOCAB, make
from helpers.heads import random_head
from helpers.simulated_steps import one_accepted
from helpers.support import run

META = torch.device("meta")
PROMPTS = [[1, 2, 3], [4], list(range(70))]
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "top_k": 20, "top_p": 0.9}}


def turns(self: RotaryTable, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.zeros(count, 2 * self._rotary.inv_freq.shape[-1])
    return table, table


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches by the kernel's name; they compute nothing."""
    names = Counter[str]()

    def launch(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        for one in (*given, *named.values()):
            assert not isinstance(one, torch.Tensor) or one.device == META, (
                f"{self.fn.__name__} got a tensor of the host"
            )
        names[self.fn.__name__] += 1

    def capture(run: Any) -> Any:
        run()
        return run

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    monkeypatch.setattr(Hardware, "gpu_kernels", property(lambda self: self.device == META))
    monkeypatch.setattr(kernels, "uses_kernels", lambda device: device == META)
    for module in (causal, base, block):
        monkeypatch.setattr(module, "capture_on", lambda device: capture)
    monkeypatch.setattr(product, "sides_of", lambda device, dtype: product.SIDES[:1])  # which compares values
    monkeypatch.setattr(linears, "weight_of", lambda layer: layer.weight)  # which refuses weights that are offloaded
    monkeypatch.setattr(RotaryTable, "until", turns)
    monkeypatch.setattr(step_module, "later", one_accepted)
    monkeypatch.setattr(CausalModel, "memory_bytes", lambda self: 1 << 24)
    return names


def on_device(family: str, seed: int = 0) -> CausalModel:
    model = make(family, seed)
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                module._parameters[name] = nn.Parameter(weight.to(META), requires_grad=False)
    target = CausalModel(model)
    target.use_fused()
    assert target.paged is not None and target.device == META
    return target


def drafter_of(kind: str, target: CausalModel) -> Any:
    if kind in BLOCKS:
        return BlockDrafter(BlockModel(random_block(target, layers=(0, 1), **BLOCKS[kind]), target), VOCAB)
    if kind == "model":
        return ModelDrafter(on_device("llama", 1), VOCAB)
    if kind == "first layers":
        return SelfDrafter(first_layers(target, 1), VOCAB)
    nodes = {"nodes": 16} if kind == "tree" else {}
    return HeadDrafter(HeadModel(random_head(target), target), VOCAB, **nodes)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        *((kind, "greedy") for kind in ("none", "head", "tree")),
        *((kind, "sampled") for kind in ("none", "head", "model", "first layers", *BLOCKS)),
    ],
)
@torch.inference_mode()
def test_decoding_stays_on_the_device(kind: str, setting: str, launched: Counter[str]) -> None:
    target = on_device("llama")
    params = [SamplingParams(max_new_tokens=12, ignore_eos=True, **SETTINGS[setting]) for _ in PROMPTS]
    options: dict[str, Any] = {"gamma": 0} if kind == "none" else {"drafter": drafter_of(kind, target), "gamma": 3}
    _, steps, engine = run(target, PROMPTS, params, max_batch_size=2, **options)
    assert engine.draft_failures == 0
    assert {"_partial", "_product"} <= launched.keys()
    assert ("_settle" in launched) == (kind not in ("none", "tree")) and any(one.num_drafted for one in steps) == (
        kind != "none"
    )
    assert launched["_choose"] == launched["_settle"], "a token of a draft is chosen in one launch"
    levels = launched["children"]
    assert (levels > 0) == (launched["prune"] > 0) == (kind == "tree") and launched["expand"] == levels


def test_a_tensor_of_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the factors of norms are on the host."""
    monkeypatch.setattr(Norm, "float32", lambda self: torch.ones(len(self.weight)))
    with pytest.raises(AssertionError, match="got a tensor of the host"):
        test_decoding_stays_on_the_device("none", "greedy", Counter())


@torch.inference_mode()
def test_launches_of_a_layer(monkeypatch: pytest.MonkeyPatch, launched: Counter[str]) -> None:
    """Parts of products are added by their readers, and a gate ends its product. Control: gates whose product has parts, too."""

    def counted(whole: tuple[int, ...]) -> Counter[str]:
        monkeypatch.setattr(product, "parts_of", lambda outputs, inputs: 1 if outputs in whole else 4)
        target = on_device("phi3")
        launched.clear()
        run(target, [[4]], [SamplingParams(max_new_tokens=9, ignore_eos=True)], max_batch_size=1, gamma=0)
        layers = launched["_place"] / target.num_layers
        assert launched["_add_norm"] / layers == 2 * target.num_layers + 1
        assert launched["_product"] / layers == 4 * target.num_layers + 1
        assert launched["_partial"] == launched["_place"], "8 launches a layer, and 2 after the last: 258 for 32 layers"
        return launched

    inner = make("phi3", 0).config.intermediate_size
    assert not {"_reduce", "_gate"} & counted((VOCAB, 2 * inner)).keys()
    assert counted((VOCAB,))["_gate"] == launched["_place"]
