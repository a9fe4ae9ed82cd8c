"""`weights=`: models in 8 and 4 bits decode the same text with any draft and in any batch; what cannot be is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.errors import UnknownNameError
from foresay.models.hardware import Hardware
from foresay.models.huggingface.linears import activations_of
from foresay.models.sources import loading
from foresay.models.sources.describing import describe
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.location import locate
from helpers import tiny
from helpers.families import make
from helpers.quantized import edit
from helpers.refusals import refused

PROMPTS = ["hello", "hello again, hello", "you and the others", "one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("weights") / "target")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("weights") / "draft", tiny.llama(1))


def texts(generator: foresay.Generator) -> list[tuple[int, ...]]:
    return [tuple(one.token_ids) for one in generator.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)]


@pytest.mark.parametrize("weights", ["int8", "int4", "bf16"])
def test_the_same_text_with_any_draft_and_in_any_batch(weights: str, folder: Path, small: Path) -> None:
    plain = foresay.load(folder, drafter="none", weights=weights, dtype="bf16")
    alone = [tuple(plain.generate(p, max_new_tokens=24, ignore_eos=True).token_ids) for p in PROMPTS]
    assert texts(plain) == alone
    for method in ({"drafter": "suffix"}, {"drafter": "self(1)"}, {"draft": small}):
        for size in (1, 3):
            drafted = foresay.load(folder, weights=weights, dtype="bf16", max_batch_size=size, **method)
            assert texts(drafted) == alone


def test_rounded_weights_are_another_model(folder: Path) -> None:
    """Or the format would be ignored."""
    written = {w: texts(foresay.load(folder, drafter="none", weights=w, dtype="bf16")) for w in ("bf16", "int4")}
    assert written["bf16"] != written["int4"]


def test_a_draft_in_fewer_bits_leaves_the_text_alone(folder: Path, small: Path) -> None:
    plain = texts(foresay.load(folder, drafter="none", dtype="bf16"))
    drafted = foresay.load(folder, small, dtype="bf16", draft_weights="int4")
    assert texts(drafted) == plain
    assert drafted.target.weights == ""
    own = next(iter(drafted.resources.models.values()))
    assert min(m.product.bits for m in own.model.model.modules() if hasattr(m, "product")) == 5.0


def test_what_is_loaded_is_said(folder: Path) -> None:
    eight = foresay.load(folder, drafter="none", weights="int8")
    assert eight.target.precision == "bfloat16, int8 weights"
    kept = {int(m.product.bits) for m in eight.target.model.model.modules() if hasattr(m, "product")}  # type: ignore[attr-defined]
    assert kept <= {8, 11}, "a scale per 32 weights, and rows of 48 are padded to two groups"
    assert foresay.load(folder, drafter="none", dtype="fp32").target.precision == "float32"


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int4", "dtype": "fp32"}, {"weights": "int8", "device_map": "cuda"}, {"weights": "bf16", "dtype": "fp16"},
        {"weights": "int4", "quantization_config": object()},
    ],
)  # fmt: skip
def test_what_contradicts_is_refused(options: dict[str, Any]) -> None:
    with refused("weights", options["weights"]):
        LoadOptions(**options)


def test_rounded_weights_are_refused_where_a_gpu_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were loaded as they are there, and reported as rounded; kernels for GPUs round them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with refused("weights", "int8"):
        LoadOptions(weights="int8")
    assert LoadOptions(weights="int8", device="cpu").bits == 8
    monkeypatch.setattr(Hardware, "gpu_kernels", property(lambda self: not self.on_cpu))
    assert LoadOptions(weights="int8").bits == 8


def test_a_library_multiplies_on_gpus_with_kernels_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("reproducible", False):
        foresay.load(folder, reproducible=False)
    with refused("reproducible", "no"):
        LoadOptions(reproducible="no")  # type: ignore[arg-type]
    with refused("reproducible", False):
        LoadOptions(reproducible=False, device_map="auto")
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    assert LoadOptions(reproducible=False).for_draft().reproducible
    with refused("reproducible", False):  # it is not over pages here
        foresay.load(folder, reproducible=False)


@pytest.mark.parametrize("drafter", ["auto", "max_gram", "self(1)", "cascade(self=1, max_gram; k=[[2, 2], [0, 2]])"])
def test_draft_weights_without_a_draft_model_are_refused(drafter: str, folder: Path) -> None:
    with refused("draft_weights", "int4"):
        foresay.load(folder, drafter=drafter, draft_weights="int4")


def test_draft_weights_are_not_for_a_draft_that_is_there(folder: Path, small: Path) -> None:
    draft = foresay.load(small, drafter="none").target
    with refused("draft_weights", "int8"):
        foresay.load(folder, draft, draft_weights="int8")


def test_draft_weights_wait_for_a_change(folder: Path, small: Path) -> None:
    plain = foresay.load(folder, drafter="none", dtype="fp32", draft_weights="int8")
    drafted = foresay.change(plain, drafter=f"model({small})")
    [draft] = drafted.resources.models.values()
    assert (draft.precision, plain.target.precision) == ("bfloat16, int8 weights", "float32")
    assert texts(drafted) == texts(plain)


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


@pytest.mark.parametrize(
    ("family", "options", "kernels", "wanted"),
    [
        ("llama", {}, True, "bfloat16"),
        ("llama", {}, False, "float32"),
        ("gpt2", {}, True, "float32"),
        ("llama", {"dtype": "fp32"}, True, "float32"),
        ("llama", {"device_map": "auto"}, True, "float32"),
    ],
)
def test_auto_is_bf16_where_kernels_of_ours_make_whole_passes(
    family: str, options: dict[str, Any], kernels: bool, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor that does not compute in it; a model that is trained keeps its float32."""
    tiny.save(tmp_path, make(family, 0))
    monkeypatch.setattr(Hardware, "native_dtype", torch.float32)
    monkeypatch.setattr(Hardware, "cpu_kernels", kernels)
    where = {} if "device_map" in options else {"device": "cpu"}
    assert loading.load_model(tmp_path, LoadOptions(**where, **options)).dtype == wanted
    assert loading.load_weights(tmp_path, LoadOptions(device="cpu"))[0].dtype == torch.float32


@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {"quantization_config": {"quant_method": "bitsandbytes"}}])
def test_auto_stays_float32_where_the_family_s_own_code_runs(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama by name whose layers are not ones that the kernels take; the control is the one above."""
    folder = tiny.save(tmp_path, make("llama", 0))
    written = (folder / "config.json").read_text()
    edit(folder, lambda values: values.update(changes))
    monkeypatch.setattr(Hardware, "native_dtype", torch.float32)
    monkeypatch.setattr(Hardware, "cpu_kernels", True)
    options = LoadOptions(device="cpu")
    location = locate(folder, options)
    assert describe(location, options).dtype == torch.float32
    unreached = dataclasses.replace(location, only_cached=True)  # without the hub the same dtype is chosen
    (folder / "config.json").write_text(written)
    assert describe(unreached, options).dtype == torch.bfloat16


def test_an_unknown_format_is_named() -> None:
    with refused("weights", "int5", UnknownNameError):
        LoadOptions(weights="int5")


def test_settings_keep_the_format(folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "foresay.toml"
    settings.write_text(f'target = "{folder}"\ndrafter = "none"\nweights = "int4"\n')
    assert foresay.load(settings).target.weights == "int4"
    assert foresay.load(settings, weights="int8").target.weights == "int8"


@pytest.mark.parametrize("activations", ["auto", "float32", "int8"])
def test_inputs_are_rounded_as_requested(folder: Path, activations: str) -> None:
    loaded = foresay.load(folder, drafter="none", weights="int8", activations=activations)
    wanted = "int8" if activations == "auto" else activations
    module = loaded.target.model.model  # type: ignore[attr-defined]
    assert activations_of(module) == [wanted]
    struct = loaded.target.model.fused._native._model.layer[0].qkv  # type: ignore[attr-defined]
    assert struct.activations == ["float32", "bf16", "int8"].index(wanted), "in whole passes too"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"weights": "int8", "activations": "bf16"}, "activations"),
        ({"dtype": "fp32", "activations": "int8"}, "activations"),
        ({"activations": "int9"}, "activations"),
        ({"tp_plan": "auto", "activations": "int8"}, "tp_plan"),
        ({"backend": "llama.cpp", "activations": "int8"}, "activations"),
    ],
)
def test_a_rounding_that_is_not_possible_is_refused(folder: Path, options: dict[str, Any], param: str) -> None:
    with refused(param, options[param]):
        foresay.load(folder, drafter="none", **options)


def test_a_rounding_without_kernels_or_for_training_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("activations", "float32"):
        loading.load_weights(folder, LoadOptions(activations="float32"))
    monkeypatch.setattr(Hardware, "cpu_kernels", False)
    with refused("activations", "float32"):
        foresay.load(folder, drafter="none", activations="float32")
