"""Files of JSON, TOML and text that foresay reads, as `helpers.fuzzing` wants them: sound ones to mutate, and a use of each."""

from __future__ import annotations

import gzip
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from foresay.decoding.outcome import FinishReason, Origin, Step
from foresay.drafters import Memory
from foresay.engine.stats import Stats
from foresay.lengths import ConstantLength
from foresay.models.sources.published import FILE, read_table
from foresay.records.profile import Floor, Profile, Timing
from foresay.records.recording import Record, Recording, recording_writer
from foresay.records.results import Cell, Failure, Prediction, PromptResult, Run, Trace, results_writer
from foresay.spec.settings_file import Settings, read_models, read_settings, write_settings
from foresay_lab.data.datasets import load_items
from foresay_lab.replay.arrivals import from_trace
from foresay_lab.replay.cost_tables import read_costs
from foresay_lab.replay.grid import open_grid
from foresay_lab.replay.replay import replay
from foresay_lab.report.report import read_report
from helpers import fuzz_gguf, fuzz_requests, fuzz_tensors
from helpers.fuzz_mutators import dump, mutate_bytes, mutate_json, mutate_lines
from helpers.fuzzing import Format, one_file, working_folder

STEPS = [
    Step(0, (1, 2), (Origin.DRAFT, Origin.RESIDUAL), 3, 1, (1, 1), draft_s=0.2, target_s=0.4, total_s=0.8),
    Step(0, (4,), (Origin.BONUS,), 0, 0, (), FinishReason.STOP, target_s=0.1, total_s=0.2),
]
CELLS = (Cell("none", "chat", 1), Cell("suffix, 12", "chat", 1))
PROMPT = PromptResult.of("a", "chat", STEPS)
RUNS = [
    Run(cell, repeat, 2.0 + repeat, 10, 4.0, identical=True, stats=Stats.of(STEPS).as_dict(), prompts=(PROMPT,))
    for cell in CELLS
    for repeat in (0, 1)
]
MORE = (Failure(CELLS[0], 3, "e"), Prediction(CELLS[1], 5.0, 2.0), Trace(CELLS[1], "a", (("hi", "draft"),)))
HEADER = {
    "model": "tiny",
    "vocab_size": 50,
    "eos": [0],
    "tokenizer": None,
    "params": {"max_new_tokens": 8, "stop_token_ids": [6], "logit_bias": [[3, 1.5]]},
    "settings": {"prompts": "abc", "chat": True, "seed": None, "dtype": "float32", "max_length": 512},
    "provenance": {"time": "now", "machine": {"cores": 2}},
}
RECORDS = [
    Record("a", (1, 2), (3, 4, 5), finish_reason="stop", category="chat", logprobs=(-1.0, -2.0, -0.5)),
    Record("b/2", (7,), (8, 9), seed=9, token_probs=(0.25, 0.5), top=(((8, -1.5), (2, -2.0)), ((9, -0.1),))),
]
LOG = "tensor([[ 5,  6,\n          7]])\ntensor([[8, 9]], device='cuda:0')\ntensor([[1,\n         2, 3]])\n"
TALK = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
ROWS = [
    {"id": "x", "prompt": "Write.", "category": "chat", "raw": False, "followups": ["More."]},
    {"prompt": TALK[:1]},
    {"messages": TALK},
    {"instruction": "Do.", "input": "this"},
]
ARRIVALS = [1.5, {"timestamp": 2.5}, 3]
REPLAY = {
    "method": "none", "estimate": False, "tokens_per_pass": [1.5, None, None], "acceptance_rate": None, "draft_utilization": None,
    "discard_rate": 0.0, "seconds": 1.0, "stats": Stats.of(STEPS).as_dict(),
}  # fmt: skip


@cache
def _lines(kind: str) -> list[Any]:
    """The lines of a sound file."""
    with working_folder() as folder:
        path = folder / "file"
        if kind == "replays":
            with open_grid(path, {"batch_size": 1}) as (_, append):
                append({"recording": "r", "digest": "d", **REPLAY})
        else:
            of_results = ({"model": "tiny", "seeds": [1]}, {"time": "now", "machine": {"cores": 2}})
            with recording_writer(path, HEADER) if kind == "recording" else results_writer(path, *of_results) as writer:
                for one in RECORDS if kind == "recording" else (*RUNS, *MORE):
                    writer.append(one.as_line())  # type: ignore[attr-defined]
        return [json.loads(line) for line in path.read_text().splitlines()]


# -- recordings and what is imported as such -----------------------------------------------------------------------------


def _read_recording(path: Path) -> None:
    recording = Recording.load(path / "file")
    replay(recording, None, ConstantLength(0))


PIECES = (b"tensor([[", b"tensor([[1]]\n", b"tensor([[1]])\n", b"tensor([[1, 2,\n", b"[[", b"tensor(")
INSERTED = (b"-1", b"9" * 5000, b"9" * 30, b"1e5", b"...", b"\xff", b"_1", b"1 2")


def _log(rng: random.Random) -> bytes:
    text, kind = LOG.encode(), rng.random()
    if kind < 0.1:
        return text + rng.choice(PIECES) * rng.choice((10, 1000, 50_000)) + rng.choice((b"", text))
    if kind < 0.35:
        at = rng.randrange(len(text))
        return text[:at] + rng.choice(INSERTED) + text[at:]
    return mutate_bytes(text, rng)


def _read_log(path: Path) -> None:
    recording = Recording.load(path / "file", prompts=[[1], [2, 3], [4]])
    replay(recording, None, ConstantLength(0))


NUMBERS = ("", "_", "1__2", "-1", "9" * 30, "9" * 5000, "1.5", "x", " 1 ", "1_" * 50_000 + "1", "\u0661")


def _cache(rng: random.Random) -> bytes:
    pairs: Any = {"1_2": "1_2_3_4", "9": "9_8"} if rng.random() < 0.5 else {"5_6_7": "0_3_4", "8": "0_2"}
    if rng.random() < 0.4:
        odd, key = rng.choice(NUMBERS), rng.choice(sorted(pairs))
        pairs = {**pairs, **({key: odd} if rng.random() < 0.5 else {odd: pairs[key]})}
    return mutate_json(pairs, rng)


# -- results, profiles, settings and other JSON and text -------------------------------------------------------------------


def _profile() -> Any:
    timing = [Timing(b, c, x, 0.01 * (b + c), 0.01, 0.1) for b in (1, 4) for c in (1, 5) for x in (8, 64)]
    floor = Floor(10**8, 10**4, 1e10)
    made = Profile("tiny", "float32", {"cores": 2}, tuple(timing), ((32, 0.1), (64, 0.2)), floor, column_cost=0.5)
    with working_folder() as folder:
        made.with_drafts("suffix", [(1, 4, 0.01), (4, 4, 0.02)], 1e-4).save(folder / "p.json")
        return json.loads((folder / "p.json").read_text())


def _read_profile(path: Path) -> None:
    profile = Profile.load(path / "file")
    if profile.timings:
        seconds = profile.clock()
        for point in ((1, 1, 8), (3, 2.5, 100), (64, 16, 4000)):
            seconds(*point)
    profile.fill_seconds(1000)
    for name in profile.drafts:
        profile.draft_seconds(name, 2, 3)
    if profile.floor is not None:
        profile.floor.seconds(2, 100.0)


NAMES = ("target", "length", "max_batch_size", "measured", "x", "a.b", "a" + ".b" * 3000, "[" * 3000)
VALUES = (
    "[" * 5000, "[" * 5000 + "]" * 5000, "{a=" * 2000 + "1" + "}" * 2000, "9" * 5000, "nan", "1979-05-27", '""', "-1", "true",
    "[]", '"x"', "0", "inf", "9223372036854775808", '"\\ud800"', "'''",
)  # fmt: skip


def _settings(rng: random.Random) -> bytes:
    with working_folder() as folder:
        given = Settings(target="tiny", drafter="suffix", length=4, max_batch_size=8, dtype="float32")
        write_settings(folder / "s.toml", given, {"speed_up": 1.5})
        text = (folder / "s.toml").read_text()
    if rng.random() < 0.3:
        text = f"[models.a]\n{text}"
    if rng.random() < 0.4:
        return mutate_bytes(text.encode(), rng)
    name = rng.choice(NAMES)
    lines = [one for one in text.splitlines() if not one.startswith(name)] if rng.random() < 0.7 else [text]
    return "\n".join([f"{name} = {rng.choice(VALUES)}", *lines]).encode()


def _write_data(place: Path, rng: random.Random) -> Path:
    data = mutate_lines(ROWS, rng) if rng.random() < 0.6 else mutate_json(ROWS, rng)
    name = rng.choice(("d.jsonl", "d.json", "d.csv", "d.txt"))
    if rng.random() < 0.4:
        name += ".gz"
        if rng.random() < 0.15:
            data = b" " * rng.choice((10_000, 200_000_000)) + data
        data = gzip.compress(data, 6 if len(data) < 1 << 24 else 1)
        data = mutate_bytes(data, rng) if rng.random() < 0.5 else data
    (place / name).write_bytes(data)
    return place


def _read_costs(path: Path) -> None:
    read_costs(str(path / "file")).swi("a", 10, {"a": 5, "b": 3})


# -- published drafts ------------------------------------------------------------------------------------------------------

PUBLISHED = json.loads(FILE.read_bytes())
PUBLISHED["targets"].sort(key=lambda target: -len({field for draft in target["drafts"] for field in draft}))
del PUBLISHED["targets"][2:]  # of the most fields


def _read_published(path: Path) -> None:
    for target in read_table(path / "file").values():
        assert all(draft.size is None or draft.size > 0 for draft in target.drafts)


# -- databases of texts ----------------------------------------------------------------------------------------------------

TEXTS = [[i, *range(400)] for i in range(20)]


@cache
def _memory() -> bytes:
    with working_folder() as folder:
        memory = Memory(folder)
        for text in TEXTS:
            memory.add("", np.array(text))
        memory.close()
        return (folder / "memory.db").read_bytes()


def _read_memory(path: Path) -> None:
    """Add a text; those that are read are sound, whatever became of the others."""
    memory = Memory(path)
    memory.add("", np.array([1, 2]))
    memory.flush()
    assert all(text.tolist() in [*TEXTS, [1, 2]] for text in memory.texts(""))
    memory.close()


def _read_replays(path: Path) -> None:
    with open_grid(path / "file", {"batch_size": 1}) as (there, _):
        assert all(isinstance(name, str) for key in there for name in key)


SOUND = {**fuzz_tensors.SOUND, "profile": lambda: {"file": dump(_profile()).encode()}}
"""Files of a sound case, of some formats."""
FORMATS: dict[str, Format] = {
    "gguf": fuzz_gguf.FORMAT,
    "requests": fuzz_requests.FORMAT,
    **fuzz_tensors.FORMATS,
    **{
        name: Format(one_file("file", made), check)
        for name, made, check in (
            ("recording", lambda rng: mutate_lines(_lines("recording"), rng), _read_recording),
            ("tensor-log", _log, _read_log),
            ("cs-drafting", _cache, _read_recording),
            ("results", lambda rng: mutate_lines(_lines("results"), rng), lambda path: read_report([path / "file"])),
            ("replays", lambda rng: mutate_lines(_lines("replays"), rng), _read_replays),
            ("profile", lambda rng: mutate_json(_profile(), rng), _read_profile),
            ("settings", _settings, lambda path: read_models(path / "file") or read_settings(path / "file")),
            ("arrivals", lambda rng: mutate_lines(ARRIVALS, rng), lambda path: from_trace(path / "file")),
            ("published", lambda rng: mutate_json(PUBLISHED, rng), _read_published),
            ("costs", lambda rng: mutate_json({"a": 70.0, "b": 2}, rng), _read_costs),
        )
    },
    "memory": Format(one_file("memory.db", lambda rng: mutate_bytes(_memory(), rng)), _read_memory),
    "data": Format(_write_data, lambda path: load_items(str(next(path.iterdir())))),
}
