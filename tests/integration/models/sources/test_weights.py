"""`weights=`: models in 8 and 4 bits decode the same text with any draft and in any batch; what cannot be is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import foresay
from foresay.errors import ConfigError, UnknownNameError
from foresay.models.huggingface.products import Int4Product, Int8Product
from foresay.models.sources.load_options import LoadOptions
from helpers import tiny

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
    kinds = {type(m.product) for m in own.model.model.modules() if hasattr(m, "product")}
    assert Int4Product in kinds


def test_what_is_loaded_is_said(folder: Path) -> None:
    eight = foresay.load(folder, drafter="none", weights="int8")
    assert eight.target.precision == "bfloat16, int8 weights"
    assert {type(m.product) for m in eight.target.model.model.modules() if hasattr(m, "product")} == {Int8Product}  # type: ignore[attr-defined]
    assert foresay.load(folder, drafter="none", dtype="fp32").target.precision == "float32"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": "int4", "dtype": "fp32"}, "weights='int4' computes in bf16, but dtype='fp32' was given; drop one"),
        ({"weights": "int8", "device_map": "cuda"}, "is for CPUs, but 'cuda' was asked for"),
        ({"weights": "int4", "quantization_config": object()}, "contradict; give one of them"),
        ({"draft_weights": "int4", "dtype": "fp32"}, "draft_weights='int4' computes in bf16"),
    ],
)
def test_what_contradicts_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LoadOptions(**options)  # type: ignore[arg-type]


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(UnknownNameError, match="int5"):
        LoadOptions(weights="int5")


def test_settings_keep_the_format(folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "foresay.toml"
    settings.write_text(f'target = "{folder}"\ndrafter = "none"\nweights = "int4"\n')
    assert foresay.load(settings).target.weights == "int4"
    assert foresay.load(settings, weights="int8").target.weights == "int8"
