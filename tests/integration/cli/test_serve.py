"""`foresay serve` with a settings file of several models: what is loaded, and what is refused before anything is."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.cli import serve as command
from foresay.server.service import Service
from helpers import tiny
from helpers.refusals import refused


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Service]:
    """Services that would serve now, and no model is loaded before one does."""
    found: list[Service] = []

    def serve(service: Service, sockets: list[socket.socket], **more: Any) -> None:
        found.append(service)
        for one in sockets:
            one.close()

    monkeypatch.setattr("foresay.server.running.serve", serve)
    return found


def written(folder: Path, text: str) -> str:
    path = folder / "models.toml"
    path.write_text(text)
    return str(path)


def test_models_of_a_file(
    shell: tiny.Shell, chat_folder: Path, served: list[Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own settings, which options replace, and its own folder of kept texts."""
    (tmp_path / "near").symlink_to(chat_folder)
    text = '[models.one]\ntarget = "near"\ndrafter = "max_gram"\nlength = 2\ndtype = "fp32"\nmax_batch_size = 3\n'
    text += f'[models."org/two:x"]\ntarget = "{chat_folder}"\nmeasured = {{ speed_up = 1.5 }}\n'
    path, loaded = written(tmp_path, f"max_loaded = 2\n{text}"), list[dict[str, Any]]()
    honest = command.load

    def load(target: Any, **given: Any) -> Any:
        loaded.append(given)
        return honest(target, **given)

    monkeypatch.setattr(command, "load", load)
    code, _, err = shell("serve", path, "--port", "0")
    assert code == 0 and f"one: target {tmp_path / 'near'}, drafter max_gram, length 2\n" in err and loaded == []
    one, two = served[-1].entries
    assert served[-1].settings.max_loaded == 2 and [one.names, two.names] == [["one"], ["org/two:x"]]
    assert (one.max_batch_size, two.max_batch_size) == (3, 32)
    assert one.num_bytes == sum(file.stat().st_size for file in chat_folder.glob("*.safetensors")) > 0
    first = one.load()
    assert (first.drafter_name, first.max_batch_size) == ("max_gram", 3)
    assert first.policy.num_draft_tokens == 2  # type: ignore[attr-defined]
    assert first.target.generation.sampling == "model" and two.load().drafter_name == "suffix"
    more = ["--drafter", "suffix", "--batch-size", "5", "--memory", str(tmp_path / "texts"), "--sampling", "foresay"]
    assert shell("serve", path, "--port", "0", *more)[0] == 0
    kept = str(tmp_path / "texts" / "org%2Ftwo%3Ax")
    assert [one.max_batch_size for one in served[-1].entries] == [5, 5] and served[-1].settings.max_loaded == 2
    second = served[-1].entries[1].load()
    assert second.resources is not None and list(second.resources.memories) == [kept]
    assert second.target.generation.sampling == "foresay"
    second.resources.memories[kept].close()


def test_a_table_of_one_model_is_loaded_at_once(
    shell: tiny.Shell, chat_folder: Path, served: list[Service], tmp_path: Path
) -> None:
    assert shell("serve", written(tmp_path, f'[models.one]\ntarget = "{chat_folder}"\n'), "--port", "0")[0] == 0
    assert [one.names for one in served[-1].loaded] == [["one"]]


WRONG = {
    'target = "./gone"': "no such file or folder: './gone'",
    'target = "gone.gguf"': "no such file or folder: 'gone.gguf'",
    'target = "org/gone"': "'org/gone' is not in the hub's cache, and requests are off",
    'target = "gone"': "the model 'gone'",
    'target = "{folder}"\ndrafter = "max_grm"': "drafter='max_grm'",
    'target = "{folder}"\ndrafter = "head(./gone)"': "",
    'target = "{folder}"\ndtype = "fp99"': "dtype='fp99'",
    'target = "{folder}"\nlength = "entropy"\ndrafter = "suffix"': "length='entropy' ends drafts",
    'target = "{folder}"\nkeep = 1': "setting='keep'",
    "drafter = 'suffix'": "target is missing",
}
"""The table of a second model, and how its refusal goes on after the name of the table."""
GOOD = '[models.good]\ntarget = "{folder}"\n[models.b]\n'
BOTH = GOOD + 'target = "{folder}"\n'
REFUSED = [
    *((GOOD + text, [], f"models.toml: models.b: {problem}") for text, problem in WRONG.items()),
    (GOOD + 'target = "{empty}"', [], "has no config.json"),
    (GOOD + 'target = "{bare}"', [], "has no weights: it needs files that end in .safetensors"),
    (BOTH + 'drafter = "none"', ["--memory", "{memory}"], "models.toml: models.b: memory="),
    (BOTH, ["--sampling", "x"], "sampling='x' is unknown"),
    (
        BOTH,
        ["--keep-prompts", "{memory}", "--share-prefixes", "none"],
        "--share-prefixes none and --keep-prompts contradict",
    ),
    (BOTH, ["--keep-prompts-gb", "2"], "--keep-prompts-gb 2 needs --keep-prompts"),
    (BOTH, ["--name", "x"], "--name is for one model, and "),
    (BOTH, ["--draft", "{folder}"], "--draft is for one model, and "),
    (BOTH, ["--lora", "{folder}"], "--lora is for one model, and "),
    ('dtype = "fp32"\n' + BOTH, [], "models.toml: dtype='fp32'"),
    ("models = 3", [], "models.toml: models=3"),
    ("[models]", [], "models.toml: models={{}}"),
    ("[models]\nb = 3", [], "models.toml: models.b=3"),
    ('[models."../b"]\ntarget = "{folder}"', [], "models.toml: models='../b'"),
    ("max_loaded = 0\n" + BOTH, [], "models.toml: max_loaded=0 must be"),
]


def test_what_is_refused_before_anything_is_loaded(
    shell: tiny.Shell, chat_folder: Path, served: list[Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("load", "load_generator"):
        monkeypatch.setattr(command, name, lambda *_, **__: pytest.fail("a model is loaded"))
    names = {"folder": chat_folder, **{name: tmp_path / name for name in ("empty", "bare", "memory")}}
    for name in ("empty", "bare"):
        names[name].mkdir()
    (names["bare"] / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for text, options, message in REFUSED:
        path = written(tmp_path, text.format(**names))
        refusal = shell.refused("serve", Path(path).name, "--port", "0", *(one.format(**names) for one in options))
        assert message.format() in refusal and not served, text


def test_other_commands_need_one_model(shell: tiny.Shell, chat_folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path, f'[models.one]\ntarget = "{chat_folder}"\n')
    for name in ("generate", "info", "tune", "vllm-config"):
        more = ["hello"] if name == "generate" else []
        assert shell.refused(name, *more, "-m", path).startswith(f"{path}: models ")
    with refused("models"):
        foresay.load(path)
