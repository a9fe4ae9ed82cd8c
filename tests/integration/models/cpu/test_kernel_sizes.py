"""Sizes that do not fit each other, and memory that runs out: an error that names them, never a signal."""

from __future__ import annotations

import ctypes
import itertools
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.errors import ForesayError, ModelLoadError, OutOfMemoryError, UnsupportedModelError
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cpu import build, structs
from foresay.models.cpu.product import NativeProduct
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.config_sizes import check_sizes
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from foresay.models.sources.wrapping import wrap
from helpers import tiny
from helpers.broken_kernels import Broken
from helpers.families import make
from helpers.forks import fork
from helpers.guarantees import fused
from helpers.passes import scores, started

SEED, CALLS = 1, 100


def test_no_size_ends_the_process(tmp_path: Path) -> None:
    process = fork(["helpers.kernel_fuzz", str(SEED), str(CALLS)], out := tmp_path / "out")
    process.join(300)
    assert process.exitcode == 0, Path(f"{out}.err").read_text()[-500:]
    found = json.loads(out.read_text())
    assert set(found) == {"multiply", "pack", "rows", "add_norm", "gate", "attend", "pass", "chain", "mix"}
    assert all(ran + refused == CALLS for ran, refused in found.values())
    assert all(ran > 5 and refused > 5 for ran, refused in found.values()), f"both have to happen: {found}"


# -- statuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "rows", "error", "message"),
    [
        (4, -1, ValueError, "the compiled kernels refused a call: rows = -1"),
        ((1 << 31) - 1, 1 << 26, OutOfMemoryError, "memory ran out in the compiled kernels"),
        (0, 1, ValueError, "the compiled kernels refused a call: depth = 0"),
    ],
)
def test_an_exception_of_the_kernels_is_one_of_python(
    depth: int, rows: int, error: type[Exception], message: str
) -> None:
    library, number = build.library(), torch.zeros(64)
    assert library is not None
    one = structs.ProductStruct(0, 1, depth, 0, 0, 0, number.data_ptr())
    with pytest.raises(error, match=message):
        library.foresay_multiply(ctypes.byref(one), number.data_ptr(), number.data_ptr(), rows, 1, 1)


def test_what_a_worker_throws_reaches_the_caller_and_the_pool_goes_on(broken_kernels: Broken) -> None:
    """By 1, 2 and 4 threads, whose tasks throw at panel 3 of what is packed."""
    with broken_kernels("a task that throws"):
        library = build.library()
        assert library is not None
        block, one = torch.zeros(64, dtype=torch.uint8), NativeProduct.of_numbers(torch.eye(640), None)
        for threads, panels in itertools.product((1, 2, 4), (8, 2, 8, 3, 5)):
            rows = torch.full((panels * 32,), block.data_ptr())
            levels, scales = (torch.zeros(panels * size, dtype=torch.uint8) for size in (512, 64))
            with pytest.raises(OutOfMemoryError) if panels > 3 else nullcontext():
                library.foresay_pack(0, rows.data_ptr(), len(rows), 32, levels.data_ptr(), scales.data_ptr(), threads)
            x, out = torch.randn(200, 640), torch.empty(200, 640)
            library.foresay_multiply(ctypes.byref(one.struct), x.data_ptr(), out.data_ptr(), 200, 0, threads)
            assert torch.equal(out, x)


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 5),
        torch.ones(5, 4, dtype=torch.float64),
        torch.ones(4, 5).t(),
        torch.ones(5, 4, device="meta"),
        torch.ones(5, 4).to_sparse(),
        torch.ones(20),
    ],
)
def test_an_address_is_given_out_for_memory_of_the_stated_shape_alone(tensor: torch.Tensor) -> None:
    right = torch.ones(5, 4)
    assert structs.address(right, (5, 4), torch.float32) == right.data_ptr()
    with pytest.raises(ValueError, match=r"the kernels need a contiguous CPU tensor \[5, 4\] of torch\.float32"):
        structs.address(tensor, (5, 4), torch.float32)


def test_products_of_other_widths_and_depths() -> None:
    with pytest.raises(ValueError, match=r"\[1, 8\]"):
        NativeProduct.of_numbers(torch.eye(8), None)(torch.ones(1, 16))
    with pytest.raises(LookupError, match="together"):
        NativeProduct.in_place([torch.ones(4, 8), torch.ones(4, 4)], [None, None])
    with pytest.raises(LookupError, match="biases"):
        NativeProduct.in_place([torch.ones(4, 8)], [torch.ones(3)])


@pytest.mark.parametrize("place", ["rows", "slots"])
def test_a_pass_stays_within_its_cache(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a cache's tensors are smaller than its lengths state."""
    model = fused(make("llama"))
    cache = started(model, 2)
    scores(model, torch.tensor([[5, 6], [7, 8]]), cache=cache)
    monkeypatch.setattr(SlotCache, "reserve", lambda *_: None)
    if place == "slots":
        cache.lengths[0] = 5000
    else:
        cache.add_rows(5)
    first = 0 if place == "slots" else 6
    with pytest.raises(ValueError, match=r"the compiled kernels refused a call: (row|slot) = "):
        model.forward(ModelInput(torch.tensor([[5]]), (1,), first_row=first), cache)


# -- configurations ----------------------------------------------------------------------------------------------------


def test_a_rotary_factor_beyond_the_head_is_refused_when_a_folder_is_loaded(tmp_path: Path) -> None:
    """Such folders used to end the process, whichever kind of scaling their field named."""
    folder = tiny.save(tmp_path / "model", tiny.llama(head_dim=1))
    config = json.loads((folder / "config.json").read_text())
    factor = {"factor": 2.0, "partial_rotary_factor": 1e6, "original_max_position_embeddings": 256}
    for kind in ("default", "linear", "yarn", "llama3"):
        rope = {"rope_type": kind, "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **factor}
        (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
        with pytest.raises(ForesayError, match=r"partial_rotary_factor.*1000000\.0.*to 1"):
            load_model(folder, LoadOptions())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 0}, "head_dim=0; allowed is a whole number from 1"),
        ({"num_attention_heads": -4}, "num_attention_heads=-4; allowed is a whole number from 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3; allowed is a divisor of the 4 heads"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0; allowed is a finite number from 1e-06 to 1"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor=nan"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 2.0}}}, "partial_rotary_factor=2.0"),
    ],
)
def test_sizes_that_no_attention_has_are_named(changes: dict[str, object], message: str) -> None:
    config = make("llama").config
    check_sizes(config)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match="the configuration has") as caught:
        check_sizes(config)
    assert message in str(caught.value)


def test_an_odd_head_is_left_to_transformers_where_that_can_run_it() -> None:
    """One dimension it can, three it cannot."""
    found = wrap("one", make("llama", head_dim=1), None, optimise=True)
    assert isinstance(found.model, CausalModel) and found.model.fused is None
    with pytest.raises(UnsupportedModelError, match="an even number up to head_dim=3"):
        wrap("three", make("llama", head_dim=3), None, optimise=True)


def test_a_covered_family_is_probed_where_its_fused_passes_fail() -> None:
    """Scores that are no numbers are no agreement."""
    weights = make("llama")
    weights.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ModelLoadError, match="scores that are not finite"):
        wrap("broken", weights, None, optimise=True)
