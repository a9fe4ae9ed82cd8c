"""The hub's cache and its list of models, answers of a hostile hub among them. Nothing leaves the machine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foresay.models.sources import hub
from foresay.models.sources.published import PublishedDraft
from helpers.fake_hub import FakeHub, entry


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    return FakeHub(monkeypatch, tmp_path / "hub")


def listed(fake: FakeHub, *entries: Any, targets: tuple[str, ...] = ("org/target",)) -> tuple[list[Any], str | None]:
    fake.listed = lambda filters: entries
    return hub.list_drafts(targets)


def test_drafts_are_listed_by_base_model_and_tag(fake: FakeHub) -> None:
    size = {"safetensors": "safetensors", "license:mit": "license:mit"}
    drafts, problem = listed(
        fake,
        entry("a/few", "eagle3", "safetensors", downloads=3, total=100),
        entry("a/many", "DFlash2", *size, "dflash", downloads=9),
        entry("a/gguf", "dspark", "gguf", downloads=5),
        entry("a/finetune", "text-generation", downloads=99),
    )
    assert problem is None
    assert drafts == [
        (PublishedDraft(repo="a/many", kind="dflash2", license="mit"), "org/target"),
        (PublishedDraft(repo="a/gguf", kind="dspark", files="gguf"), "org/target"),
        (PublishedDraft(repo="a/few", kind="eagle3", parameters=100), "org/target"),
    ]
    assert fake.requests[0] == "list base_model:org/target speculative-decoding"
    assert {one.split()[1] for one in fake.requests} == {"base_model:org/target"} and len(fake.requests) == 5


def test_at_most_three_targets_are_requested_and_a_draft_is_listed_once(fake: FakeHub) -> None:
    drafts, _ = listed(fake, entry("a/b", "eagle3"), targets=tuple(f"org/t{i}" for i in range(10)))
    assert [target for _, target in drafts] == ["org/t0"] and len(fake.requests) == 3 * 5


def test_no_model_is_requested_offline_or_without_a_network(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.answers = False
    assert hub.list_drafts(("org/target",)) == ([], "no answer ([Errno 111] Connection refused)")
    offline = FakeHub(monkeypatch, tmp_path, online=False)
    drafts, problem = hub.list_drafts(("org/target",))
    assert drafts == [] and "HF_HUB_OFFLINE" in str(problem) and fake.requests == offline.requests == []


def test_a_failure_is_reported_in_one_printable_line(fake: FakeHub) -> None:
    def fails(filters: list[str]) -> Iterable[Any]:
        if len(fake.requests) == 2:
            raise OSError("no route\n\x1b[31m" + "x" * 1000)
        return [entry("a/b", "eagle3", "safetensors")]

    fake.listed = fails
    drafts, problem = hub.list_drafts(("org/target",))
    assert [one.repo for one, _ in drafts] == ["a/b"], "what came before it is kept"
    assert problem is not None and problem.isprintable() and len(problem) < 250 and "no route" in problem


def test_a_hub_that_does_not_answer_is_left(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def waits(filters: list[str]) -> Iterator[Any]:
        yield entry("a/b", "eagle3", "safetensors")
        released.wait(60)

    fake.listed = waits
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.05)
    before = set(threading.enumerate())
    drafts, problem = hub.list_drafts(("org/target",))
    released.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert len(fake.requests) == 1, "nothing is requested after the time"
    assert {one.repo for one, _ in drafts} <= {"a/b"} and problem == "no answer within 0.05 s"


def test_an_endless_answer_is_cut(fake: FakeHub) -> None:
    drawn = itertools.count()
    fake.listed = lambda filters: (entry(f"a/b{next(drawn)}", "eagle3", "safetensors") for _ in itertools.count())
    drafts, problem = hub.list_drafts(("org/target",))
    assert problem is None and len(drafts) == 50 * len(fake.requests) and next(drawn) == len(drafts)


HOSTILE = [
    *[None, 7, {"id": "a/b", "tags": ["eagle3"]}, entry("a/b", 7, None, ["eagle3"]), entry("a/b", *["x"] * 1000, "eagle3")],
    *[entry(name, "eagle3") for name in (None, ["a/b"])],
    *[entry(name, "eagle3") for name in ("a", "a/b/c", "../b", "a/b\n", "a/\x1b]0;x\x07", "a/b) hybrid(", "ａ/b")],
    entry("a/" + "b" * 10_000, "eagle3"),
]  # fmt: skip


def test_a_hostile_entry_is_left_out(fake: FakeHub) -> None:
    for hostile in HOSTILE:
        drafts, problem = listed(fake, hostile, entry("good/one", "eagle3", "safetensors"))
        assert [one.repo for one, _ in drafts] == ["good/one"] and problem is None, hostile


def test_a_wrong_size_downloads_or_licence_is_unknown(fake: FakeHub) -> None:
    for total in (True, -1, 0, 1.5, "7", 2**70, [1]):
        one = entry("a/b", "eagle3", "license:<script>", "license:", total=total, downloads="many")
        assert listed(fake, one)[0] == [(PublishedDraft(repo="a/b", kind="eagle3", files="unknown"), "org/target")]


def test_the_cache(fake: FakeHub) -> None:
    assert list(hub.cached_repositories()) == [] and hub.cached_folder("a/b") is None
    first = fake.store(
        "a/b", {"config.json": {}, "model.safetensors": b"12345", "more.safetensors": b"1", "x.bin": b"1"}
    )
    second = fake.store("c/d", {"model.gguf": b"12"})
    (fake.cache / "models--broken").mkdir()
    (fake.cache / "models--a;b--c").mkdir()
    (fake.cache / "models--g--h").write_text("")
    (fake.cache / "models--e--f" / "snapshots").mkdir(parents=True)
    assert dict(hub.cached_repositories()) == {"a/b": first, "c/d": second}
    assert hub.cached_folder("a/b") == first and hub.cached_folder("no/such") is None
    assert hub.cached_folder("../../etc") is None
    assert (hub.weight_bytes(first), hub.weight_bytes(second)) == (6, 2) and fake.requests == []
