"""Model folders whose configuration no model has, or that disagrees with their weights: an error in a line, in little time."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_tokenizer, load_weights
from helpers import tiny
from helpers.families import FAMILIES, SEQ2SEQ, make, make_seq2seq
from helpers.quantized import edit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "tiny")


def change(folder: Path, **values: Any) -> None:
    edit(folder, lambda stored: stored.update(values))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder, LoadOptions(dtype="fp32"))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600 and str(folder) in message
    return message


HOSTILE: dict[str, list[Any]] = {
    "num_hidden_layers": [0, -1, 10**9, 1 << 63, "3", 3.0, True, float("nan")],
    "hidden_size": [0, -32, 10**9, "32", {}],
    "intermediate_size": [0, 10**9],
    "num_attention_heads": [0, -4, 10**9, "4"],
    "num_key_value_heads": [0, 3, 8, -2],
    "head_dim": [0, -8, 10**9],
    "vocab_size": [0, -1, 1 << 40, "264"],
    "max_position_embeddings": [0, -1, 1 << 40, "long"],
    "rms_norm_eps": [0.0, -1e-6, float("nan"), float("inf"), "1e-6"],
    "partial_rotary_factor": [1e6, 0.0, -1.0, float("nan")],
    "rope_theta": [0.0, float("nan"), -1.0],
}


@pytest.mark.parametrize(("key", "value"), [(key, one) for key, many in HOSTILE.items() for one in many], ids=str)
def test_a_value_that_no_model_has(folder: Path, key: str, value: Any) -> None:
    """Named with what is allowed; the tokenizer alone and the weights alone refuse it too."""
    change(folder, **{key: value})
    message = refusal(folder)
    assert f" {key} in its config.json is " in message or " num_key_value_heads in its config.json is" in message
    assert "; allowed is a" in message
    for load in (load_tokenizer, load_weights):
        with pytest.raises(ModelLoadError, match=r"in its config\.json is"):
            load(folder)


@pytest.mark.parametrize("value", [0.0, float("nan"), -1.0, "8"], ids=str)
def test_a_factor_within_an_object(folder: Path, value: Any) -> None:
    change(folder, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": value})
    assert " rope_parameters.factor in its config.json is " in refusal(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 1000},
        {"vocab_size": 1 << 30},
        {"hidden_size": 1 << 16},
        {"intermediate_size": 1 << 24},
        {"head_dim": 1 << 16},
    ],
    ids=str,
)
def test_a_model_larger_than_its_files(folder: Path, values: dict[str, int]) -> None:
    """transformers makes what is missing, and fills it with noise, before it states so."""
    change(folder, **values)
    assert "its config.json describes a model of " in refusal(folder)


@pytest.mark.parametrize(
    "values", [{"num_attention_heads": 2}, {"intermediate_size": 47}, {"vocab_size": 263}], ids=str
)
def test_sizes_that_disagree_with_the_weights(folder: Path, values: dict[str, int]) -> None:
    change(folder, **values)
    assert "weights" in refusal(folder) or "size" in refusal(folder)


def test_a_configuration_that_nests(folder: Path) -> None:
    path = folder / "config.json"
    sound = path.read_text()
    for depth, wanted in ((40, "allowed is at most 32 nested objects"), (100_000, "RecursionError")):
        path.write_text(f'{{"x": {"[" * depth}{"]" * depth}, {sound[1:]}')
        assert wanted in refusal(folder)


def test_a_configuration_of_many_megabytes(folder: Path) -> None:
    change(folder, x=" " * (17 << 20))
    with pytest.raises(ModelLoadError, match=r"config\.json' has 178\d+ bytes; allowed are 16777216"):
        load_model(folder)


def test_numbers_that_only_a_pass_meets(folder: Path) -> None:
    """No rule names them: the pass after loading does."""
    make("deepseek_v3", 0, vocab_size=264).save_pretrained(folder)
    assert load_model(folder, LoadOptions(dtype="fp32")).model.vocab_size == 264
    for values, wanted in (({"n_group": 0}, "ZeroDivisionError"), ({"routed_scaling_factor": 1e39}, "not finite")):
        sound = (folder / "config.json").read_text()
        change(folder, **values)
        assert wanted in refusal(folder)
        (folder / "config.json").write_text(sound)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_that_are_not_finite(tmp_path: Path, dtype: str) -> None:
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    folder = tiny.save(tmp_path / "tiny", model)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match="gives scores that are not finite"):
        load_model(folder, LoadOptions(dtype=dtype))


@pytest.mark.parametrize("family", [*FAMILIES, *SEQ2SEQ])
def test_every_family_is_within_the_ranges(tmp_path: Path, family: str) -> None:
    paired = family in SEQ2SEQ
    model = make_seq2seq(family) if paired else make(family, 0)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert load_model(tmp_path, LoadOptions(dtype="fp32")).model.capabilities.reads_source == paired


def test_a_billion_layers_take_neither_time_nor_memory(tmp_path: Path) -> None:
    """Qwen2's configuration lists the kind of each; a process with a gigabyte to spare refuses it at once."""
    path = tiny.save(tmp_path / "tiny", make("qwen2", 0, vocab_size=264, use_sliding_window=False))
    load_model(path)
    change(path, num_hidden_layers=10**9)
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), hard))
    try:
        assert "num_hidden_layers in its config.json is 1000000000; allowed is" in refusal(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
