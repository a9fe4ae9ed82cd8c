"""`weights=`: models in 8 and 4 bits decode the same text with any draft and in any batch; what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.errors import UnknownNameError
from foresay.models.hardware import Hardware
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import activations_of
from foresay.models.sources import loading
from foresay.models.sources.folder import Folder
from foresay.models.sources.load_options import LoadOptions
from helpers import tiny
from helpers.families import make
from helpers.quantized import edit
from helpers.refusals import refused

PROMPTS = ["hello", "hello again, hello", "you and the others", "one"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("weights") / "draft", tiny.llama(1))


def texts(generator: foresay.Generator) -> list[tuple[int, ...]]:
    return [tuple(one.token_ids) for one in generator.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)]


@pytest.mark.parametrize(("weights", "batch"), [("int8", 1), ("int4", 3), ("bf16", 3)])
def test_the_same_text_with_any_draft_and_in_any_batch(weights: str, batch: int, folder: Path, small: Path) -> None:
    """Rounded weights are another model, or the format would be ignored; what is loaded is reported."""
    plain = foresay.load(folder, drafter="none", weights=weights, dtype="bf16")
    alone = [tuple(plain.generate(p, max_new_tokens=24, ignore_eos=True).token_ids) for p in PROMPTS]
    assert texts(plain) == alone
    for method in ({"drafter": "suffix"}, {"drafter": "self(1)"}, {"draft": small}):
        drafted = foresay.load(folder, weights=weights, dtype="bf16", max_batch_size=batch, **method)
        assert texts(drafted) == alone
    if weights == "int4":
        assert texts(foresay.load(folder, drafter="none", weights="bf16", dtype="bf16")) != alone
    if weights == "int8":
        assert plain.target.precision == "bfloat16, int8 weights"
        bits = {int(m.product.bits) for m in plain.target.model.model.modules() if hasattr(m, "product")}  # type: ignore[attr-defined]
        assert bits <= {8, 11}, "a scale per 32 weights, and rows of 48 are padded to two groups"


def test_a_draft_in_fewer_bits_leaves_the_text_alone(folder: Path, small: Path) -> None:
    """Also one that is loaded by a change."""
    plain = foresay.load(folder, drafter="none", dtype="bf16", draft_weights="int4")
    for drafted in (
        foresay.load(folder, small, dtype="bf16", draft_weights="int4"),
        foresay.change(plain, drafter=f"model({small})"),
    ):
        assert texts(drafted) == texts(plain) and drafted.target.weights == ""
        [draft] = drafted.resources.models.values()
        assert draft.precision == "bfloat16, int4 weights"
        assert min(m.product.bits for m in draft.model.model.modules() if hasattr(m, "product")) == 5.0


def test_what_contradicts_is_refused(folder: Path) -> None:
    """Among it a rounding of weights, or of inputs, that is not possible."""
    for param, options in (
        ("weights", {"weights": "int4", "dtype": "fp32"}),
        ("weights", {"weights": "int8", "device_map": "cuda"}),
        ("weights", {"weights": "bf16", "dtype": "fp16"}),
        ("weights", {"weights": "int4", "quantization_config": object()}),
        ("activations", {"weights": "int8", "activations": "bf16"}),
        ("activations", {"dtype": "fp32", "activations": "int8"}),
        ("tp_plan", {"tp_plan": "auto", "activations": "int8"}),
        ("activations", {"backend": "llama.cpp", "activations": "int8"}),
        ("reproducible", {"reproducible": 0}),
        ("reproducible", {"reproducible": False, "device_map": "auto"}),
    ):
        with refused(param, options[param]):
            foresay.load(folder, drafter="none", **options)
    for param in ("weights", "activations"):
        with refused(param, "int5", UnknownNameError):
            LoadOptions(**{param: "int5"})


def test_rounded_weights_are_refused_where_a_gpu_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were loaded as they are there, and reported as rounded; kernels for GPUs round them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with refused("weights", "int8"):
        LoadOptions(weights="int8")
    assert LoadOptions(weights="int8", device="cpu").bits == 8
    monkeypatch.setattr(Hardware, "gpu_kernels", property(lambda self: not self.on_cpu))
    assert LoadOptions(weights="int8").bits == 8


def test_a_library_multiplies_on_gpus_with_kernels_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for has_kernels in (False, True):  # with them, it is not over pages here
        monkeypatch.setattr(Hardware, "gpu_kernels", has_kernels)
        with refused("reproducible", False):
            foresay.load(folder, reproducible=False)
    assert LoadOptions(reproducible=False).for_draft().reproducible is None


def test_reproducible_prompts_need_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert foresay.load(folder, drafter="none", reproducible=True).generate("a", max_new_tokens=1).token_ids
    monkeypatch.setattr(CausalModel, "batch_invariant", False)
    with refused("reproducible", True):
        foresay.load(folder, drafter="none", reproducible=True)


def test_draft_weights_without_a_draft_model_to_load_are_refused(folder: Path, small: Path) -> None:
    for drafter in ("auto", "max_gram", "self(1)", "cascade(self=1, max_gram; k=[[2, 2], [0, 2]])"):
        with refused("draft_weights", "int4"):
            foresay.load(folder, drafter=drafter, draft_weights="int4")
    with refused("draft_weights", "int8"):
        foresay.load(folder, foresay.load(small, drafter="none").target, draft_weights="int8")


def test_bf16_weights_are_bf16_whatever_the_processor_likes(
    folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hardware, "native_dtype", torch.float32)
    monkeypatch.setattr(Hardware, "cpu_kernels", False)
    assert foresay.load(folder, drafter="none").target.dtype == "float32"
    assert foresay.load(folder, drafter="none", weights="bf16").target.dtype == "bfloat16"
    drafted = foresay.load(folder, small, dtype="fp32", draft_weights="bf16")
    assert drafted.target.dtype == "float32"
    assert [one.dtype for one in drafted.resources.models.values()] == ["bfloat16"]  # type: ignore[union-attr]


QUANTIZED = {"quantization_config": {"quant_method": "bitsandbytes"}}


@pytest.mark.parametrize(
    ("family", "changes", "options", "kernels", "wanted"),
    [
        ("llama", {}, {}, True, "bfloat16"),
        ("llama", {}, {}, False, "float32"),
        ("gpt2", {}, {}, True, "float32"),
        ("llama", {"hidden_act": "relu"}, {}, True, "float32"),
        ("llama", QUANTIZED, {}, True, "float32"),
        ("llama", {}, {"dtype": "fp32"}, True, "float32"),
        ("llama", {}, {"device_map": "auto"}, True, "float32"),
    ],
)
def test_auto_is_bf16_where_kernels_of_ours_make_whole_passes(
    family: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    kernels: bool,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a processor that does not compute in it, with or without the hub; a model that is trained keeps its float32."""
    edit(tiny.save(tmp_path, make(family, 0)), lambda values: values.update(changes))
    monkeypatch.setattr(Hardware, "native_dtype", torch.float32)
    monkeypatch.setattr(Hardware, "cpu_kernels", kernels)
    own = LoadOptions(**({} if "device_map" in options else {"device": "cpu"}), **options)
    for one in (Folder("", str(tmp_path)), Folder("", str(tmp_path), only_cached=True)):
        assert one.describe(own).dtype == getattr(torch, wanted)
    if changes is not QUANTIZED:
        assert loading.load_model(tmp_path, own).dtype == wanted
        assert loading.load_weights(tmp_path, LoadOptions(device="cpu"))[0].dtype == torch.float32


def test_settings_keep_the_format(folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "foresay.toml"
    settings.write_text(f'target = "{folder}"\ndrafter = "none"\nweights = "int4"\n')
    assert foresay.load(settings).target.weights == "int4"
    assert foresay.load(settings, weights="int8").target.weights == "int8"


def test_inputs_are_rounded_as_requested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where no kernels are, and for training."""
    for activations, wanted in (("auto", "int8"), ("float32", "float32"), ("int8", "int8")):
        model: Any = foresay.load(folder, drafter="none", weights="int8", activations=activations).target.model
        assert activations_of(model.model) == [wanted]
        struct = model.fused._native._model.layer[0].qkv
        assert struct.activations == ["float32", "bf16", "int8"].index(wanted), "in whole passes too"
    with refused("activations", "float32"):
        loading.load_weights(folder, LoadOptions(activations="float32"))
    monkeypatch.setattr(Hardware, "cpu_kernels", False)
    with refused("activations", "float32"):
        foresay.load(folder, drafter="none", activations="float32")
