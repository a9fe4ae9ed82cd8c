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


WHOLE = '[models.good]\ntarget = "{folder}"\n[models.b]\n'
NAMED = "models.toml: models.b: "


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (WHOLE + 'target = "./gone"', [], NAMED + "no such file or folder: './gone'"),
        (WHOLE + 'target = "gone.gguf"', [], NAMED + "no such file or folder: 'gone.gguf'"),
        (WHOLE + 'target = "{empty}"', [], "has no config.json"),
        (WHOLE + 'target = "{bare}"', [], "has no weights: it needs files that end in .safetensors"),
        (WHOLE + 'target = "org/gone"', [], NAMED + "'org/gone' is not in the hub's cache, and requests are off"),
        (WHOLE + 'target = "gone"', [], NAMED + "model='gone'"),
        (WHOLE + 'target = "{folder}"\ndrafter = "max_grm"', [], NAMED + "drafter='max_grm'"),
        (WHOLE + 'target = "{folder}"\ndrafter = "head(./gone)"', [], NAMED),
        (WHOLE + 'target = "{folder}"\ndtype = "fp99"', [], NAMED + "dtype='fp99'"),
        (
            WHOLE + 'target = "{folder}"\nlength = "entropy"\ndrafter = "suffix"',
            [],
            NAMED + "length='entropy' ends drafts",
        ),
        (WHOLE + 'target = "{folder}"\ndrafter = "none"', ["--memory", "{memory}"], NAMED + "memory="),
        (WHOLE + 'target = "{folder}"\nkeep = 1', [], NAMED + "setting='keep'"),
        (WHOLE + "drafter = 'suffix'", [], NAMED + "target is missing"),
        (WHOLE + 'target = "{folder}"', ["--sampling", "x"], "sampling='x' is unknown"),
        (WHOLE + 'target = "{folder}"', ["--name", "x"], "--name is for one model, and "),
        (WHOLE + 'target = "{folder}"', ["--draft", "{folder}"], "--draft is for one model, and "),
        ('dtype = "fp32"\n' + WHOLE + 'target = "{folder}"', [], "models.toml: dtype='fp32'"),
        ("models = 3", [], "models.toml: models=3"),
        ("[models]", [], "models.toml: models={}"),
        ("[models]\nb = 3", [], "models.toml: models.b=3"),
        ('[models."../b"]\ntarget = "{folder}"', [], "models.toml: models='../b'"),
        ("max_loaded = 0\n" + WHOLE + 'target = "{folder}"', [], "models.toml: max_loaded=0 must be"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    text: str,
    options: list[str],
    message: str,
    shell: tiny.Shell,
    chat_folder: Path,
    served: list[Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("load", "load_generator"):
        monkeypatch.setattr(command, name, lambda *_, **__: pytest.fail("a model is loaded"))
    bare, empty = tmp_path / "bare", tmp_path / "empty"
    empty.mkdir()
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    names = {"folder": chat_folder, "empty": empty, "bare": bare, "memory": tmp_path / "memory"}

    def filled(value: str) -> str:
        for name, folder in names.items():
            value = value.replace(f"{{{name}}}", str(folder))
        return value

    path = written(tmp_path, filled(text))
    monkeypatch.chdir(tmp_path)
    refusal = shell.refused("serve", Path(path).name, "--port", "0", *map(filled, options))
    assert message in refusal and not served


def test_other_commands_need_one_model(shell: tiny.Shell, chat_folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path, f'[models.one]\ntarget = "{chat_folder}"\n')
    for name in ("generate", "info", "tune", "vllm-config"):
        more = ["hello"] if name == "generate" else []
        assert shell.refused(name, *more, "-m", path).startswith(f"{path}: models ")
    with refused("models"):
        foresay.load(path)
