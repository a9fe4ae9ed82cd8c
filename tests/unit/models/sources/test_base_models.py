"""Names of a model, and of those it was made from, on the hub: from aliases, ids, folders and GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from foresay import ModelLoadError, ModelNotFoundError
from foresay.models.sources.location import find
from helpers.fake_hub import FakeHub
from helpers.gguf_image import Image


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    return FakeHub(monkeypatch, tmp_path / "hub", online=False)


def hub_names(name: str) -> tuple[str, ...]:
    return find(name).hub_names()


def card(text: str) -> bytes:
    return f"---\n{text}\n---\n# A model\n".encode()


def test_an_alias_and_a_hub_id_with_and_without_its_card(fake: FakeHub) -> None:
    assert hub_names("smollm2-135m") == ("HuggingFaceTB/SmolLM2-135M-Instruct",)
    assert hub_names("org/tuned") == ("org/tuned",)
    fake.store("org/tuned", {"README.md": card("base_model:\n- Qwen/Qwen3-8B\n- org/Tuned\n- Qwen/Qwen3-4B")})
    assert hub_names("org/tuned") == ("org/tuned", "Qwen/Qwen3-8B", "Qwen/Qwen3-4B")


FOLDERS: list[tuple[bytes | None, bytes | None, tuple[str, ...]]] = [
    (None, None, ()),
    (b'{"_name_or_path": "Qwen/Qwen3-8B"}', None, ("Qwen/Qwen3-8B",)),
    (b'{"_name_or_path": "a/b"}', card("base_model: c/d"), ("a/b", "c/d")),
    *[(one, None, ()) for one in (b'{"_name_or_path": "/home/me/model"}', b'{"_name_or_path": ["a/b"]}', b"\xff{", b"[1]")],
    *[(None, card(one), ()) for one in ("base_model: {a: b}", "base_model: 'a/b; rm'", "base_model: [a/b", "other: 1")],
    *[(None, one, ()) for one in (b"\xff\xfe\x00", b"base_model: a/b")],
    (None, card("base_model: a/b\nother: " + "x" * (1 << 16)), ()),
    (None, card("base_model: [7, null, a/b]"), ("a/b",)),
    (None, card("base_model: a/b") + b" " * (1 << 20), ("a/b",)),
    (None, b"---\r\nbase_model: a/b\r\n---\r\n", ("a/b",)),
    (None, card("base_model:\n" + "\n".join(f"- a/b{i}" for i in range(100))), tuple(f"a/b{i}" for i in range(15))),
]  # fmt: skip
"""config.json, README.md, and the names."""


def test_a_folder(tmp_path: Path) -> None:
    for i, (config, readme, names) in enumerate(FOLDERS):
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, content in (("config.json", config), ("README.md", readme)):
            if content is not None:
                (folder / name).write_bytes(content)
        assert hub_names(str(folder)) == names, i


FILES: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({}, ()),
    ({"base_model.0.repo_url": "https://huggingface.co/Qwen/Qwen3-8B"}, ("Qwen/Qwen3-8B",)),
    ({"base_model.0.organization": "Qwen", "base_model.0.name": "Qwen3 8B"}, ("Qwen/Qwen3-8B",)),
    ({"base_model.0.organization": "Qwen", "base_model.0.name": "Qwen3 999B"}, ()),
    ({"base_model.1.repo_url": "https://huggingface.co/a/b", "name": "Qwen3 8B"}, ("a/b", "Qwen/Qwen3-8B")),
    ({"name": "QWEN3-8B"}, ("Qwen/Qwen3-8B",)),
    ({"name": "Qwen3"}, ()),
    ({"base_model.0.repo_url": "https://evil.example/Qwen/Qwen3-8B"}, ()),
    ({"base_model.0.repo_url": "https://huggingface.co/a/b?x=\x1b"}, ()),
]


def test_a_gguf_file(tmp_path: Path) -> None:
    for values, names in FILES:
        image = Image([], []).changed(
            {"general.architecture": "qwen3", **{f"general.{n}": v for n, v in values.items()}}
        )
        assert hub_names(str(image.write(tmp_path / "model.gguf"))) == names, values
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xff\xff")
    with pytest.raises(ModelLoadError, match="damaged"):
        hub_names(str(tmp_path / "model.gguf"))


def test_a_name_that_is_nothing() -> None:
    for name in ("nonsense", "./missing", "a/b/c", "missing.gguf", "/no/such"):
        with pytest.raises(ModelNotFoundError) as caught:
            hub_names(name)
        assert repr(name) in str(caught.value)
