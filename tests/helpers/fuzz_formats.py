"""The files that foresay reads, GGUF aside, as `helpers.fuzzing` wants them: sound ones to mutate, and a use of each."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from foresay.decoding.outcome import FinishReason, Origin, Step
from foresay.drafters.ngram_table import NgramTable
from foresay.engine.stats import Stats
from foresay.lab.data.datasets import load_items
from foresay.lab.replay.arrivals import from_trace
from foresay.lab.replay.cost_tables import read_costs
from foresay.lab.replay.grid import open_grid
from foresay.lab.replay.replay import replay
from foresay.lab.report.report import read_report
from foresay.lengths import ConstantLength
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay.methods.settings_file import Settings, read_settings, write_settings
from foresay.models.heads.config import HeadConfig
from foresay.models.heads.files import Head, read_head, write_head
from foresay.models.heads.module import HeadModule
from foresay.models.sources.catalog import load_tokenizer
from foresay.records.profile import Floor, Profile, Timing
from foresay.records.recording import Record, Recording, recording_writer
from foresay.records.results import Cell, Failure, Prediction, PromptResult, Run, Trace, results_writer
from foresay.text.prompts import encode
from foresay.text.tokenizer import token_bytes, tokenizer_fingerprint
from foresay.training.checkpoints import State, load_checkpoint, save_checkpoint
from helpers import tables, tiny
from helpers.fuzz_mutators import Tensors, dump, mutate_bytes, mutate_json, mutate_lines, mutate_tensors, mutate_value
from helpers.fuzzing import Format

STEPS = [
    Step(0, (1, 2), (Origin.DRAFT, Origin.RESIDUAL), 3, 1, (1, 1), draft_s=0.2, target_s=0.4, total_s=0.8),
    Step(0, (4,), (Origin.BONUS,), 0, 0, (), FinishReason.STOP, target_s=0.1, total_s=0.2),
]
CELLS = (Cell("none", "chat", 1), Cell("suffix, 12", "chat", 1))
RUNS = [
    Run(
        *(cell, repeat, 2.0 + repeat, 10),
        plain_seconds=4.0,
        identical=True,
        stats=Stats.of(STEPS).as_dict(),
        prompts=(PromptResult.of("a", "chat", STEPS),),
    )
    for cell in CELLS
    for repeat in (0, 1)
]
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
ROWS = [
    {"id": "x", "prompt": "Write.", "category": "chat", "raw": False, "followups": ["More."]},
    {"prompt": [{"role": "user", "content": "Hi"}]},
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Ho"},
            {"role": "user", "content": "Hm"},
        ]
    },
    {"instruction": "Do.", "input": "this"},
]


def _files(write: Callable[[Path, random.Random], Path]) -> Callable[[int, int, Path], Iterator[Path]]:
    """Cases that `write` makes in a folder of each."""

    def cases(seed: int, count: int, folder: Path) -> Iterator[Path]:
        for number in range(count):
            place = folder / str(number)
            place.mkdir(parents=True, exist_ok=True)
            yield write(place, random.Random(f"{seed} {number}"))

    return cases


def _one(name: str, made: Callable[[random.Random], bytes]) -> Callable[[int, int, Path], Iterator[Path]]:
    """Cases that are one file in a folder, which is the case."""

    def write(place: Path, rng: random.Random) -> Path:
        (place / name).write_bytes(made(rng))
        return place

    return _files(write)


@cache
def _lines(kind: str) -> list[Any]:
    """The lines of a sound file."""
    with tiny_folder() as folder:
        path = folder / "file"
        if kind == "recording":
            with recording_writer(path, HEADER) as writer:
                for record in RECORDS:
                    writer.append(record.as_line())
        elif kind == "results":
            more = (
                Failure(CELLS[0], 3, "e"),
                Prediction(CELLS[1], 5.0, 2.0),
                Trace(CELLS[1], "a", (("hi", "draft"),)),
            )
            with results_writer(
                path, {"model": "tiny", "seeds": [1]}, {"time": "now", "machine": {"cores": 2}}
            ) as writer:
                for one in (*RUNS, *more):
                    writer.append(one.as_line())
        else:
            facts = {"method": "none", "estimate": False, "tokens_per_pass": [1.5, None, None], "acceptance_rate": None}
            facts |= {
                "draft_utilization": None,
                "discard_rate": 0.0,
                "seconds": 1.0,
                "stats": Stats.of(STEPS).as_dict(),
            }
            with open_grid(path, {"batch_size": 1}) as kept:
                kept.add("r", "d", facts)
        return [json.loads(line) for line in path.read_text().splitlines()]


def tiny_folder() -> Any:
    import tempfile

    class _Folder(tempfile.TemporaryDirectory[str]):
        def __enter__(self) -> Path:  # type: ignore[override]
            return Path(super().__enter__())

    return _Folder()


# -- recordings and what is imported as such -----------------------------------------------------------------------------


def _read_recording(path: Path) -> None:
    recording = Recording.load(path / "file")
    replay(recording, None, ConstantLength(0))


def _log(rng: random.Random) -> bytes:
    text = LOG.encode()
    if rng.random() < 0.1:
        piece = rng.choice(
            (b"tensor([[", b"tensor([[1]]\n", b"tensor([[1]])\n", b"tensor([[1, 2,\n", b"[[", b"tensor(")
        )
        return text + piece * rng.choice((10, 1000, 50_000)) + rng.choice((b"", text))
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        return (
            text[:at] + rng.choice((b"-1", b"9" * 5000, b"9" * 30, b"1e5", b"...", b"\xff", b"_1", b"1 2")) + text[at:]
        )
    return mutate_bytes(text, rng)


def _read_log(path: Path) -> None:
    recording = Recording.load(path / "file", prompts=[[1], [2, 3], [4]])
    replay(recording, None, ConstantLength(0))


def _cache(rng: random.Random) -> bytes:
    pairs: Any = {"1_2": "1_2_3_4", "9": "9_8"} if rng.random() < 0.5 else {"5_6_7": "0_3_4", "8": "0_2"}
    if rng.random() < 0.4:
        odd = rng.choice(
            ("", "_", "1__2", "-1", "9" * 30, "9" * 5000, "1.5", "x", " 1 ", "1_" * 50_000 + "1", "\u0661")
        )
        key = rng.choice(sorted(pairs))
        pairs = {**pairs, **({key: odd} if rng.random() < 0.5 else {odd: pairs[key]})}
    return mutate_json(pairs, rng)


# -- results, profiles, settings and other JSON and text -------------------------------------------------------------------


def _read_results(path: Path) -> None:
    read_report([path / "file"])


def _profile() -> Any:
    timing = [Timing(b, c, x, 0.01 * (b + c), 0.01, 0.1) for b in (1, 4) for c in (1, 5) for x in (8, 64)]
    floor = Floor(10**8, 10**4, 1e10)
    made = Profile("tiny", "float32", {"cores": 2}, tuple(timing), ((32, 0.1), (64, 0.2)), floor, column_cost=0.5)
    with tiny_folder() as folder:
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


def _settings(rng: random.Random) -> bytes:
    with tiny_folder() as folder:
        given = Settings(target="tiny", drafter="suffix", length=4, max_batch_size=8, dtype="float32")
        write_settings(folder / "s.toml", given, {"speed_up": 1.5})
        text = (folder / "s.toml").read_text()
    if rng.random() < 0.6:
        odd = (
            "[" * 5000,
            "[" * 5000 + "]" * 5000,
            "{a=" * 2000 + "1" + "}" * 2000,
            "9" * 5000,
            "nan",
            "1979-05-27",
            '""',
        )
        values = [*odd, "-1", "true", "[]", '"x"', "0", "inf", "9223372036854775808", '"\\ud800"', "'''"]
        name = rng.choice(("target", "length", "max_batch_size", "measured", "x", "a.b", "a" + ".b" * 3000, "[" * 3000))
        lines = [one for one in text.splitlines() if not one.startswith(name)] if rng.random() < 0.7 else [text]
        return "\n".join([f"{name} = {rng.choice(values)}", *lines]).encode()
    return mutate_bytes(text.encode(), rng)


def _data(rng: random.Random) -> bytes:
    return mutate_lines(ROWS, rng) if rng.random() < 0.6 else mutate_json(ROWS, rng)


def _write_data(place: Path, rng: random.Random) -> Path:
    data, name = _data(rng), rng.choice(("d.jsonl", "d.json", "d.csv", "d.txt"))
    if rng.random() < 0.4:
        name += ".gz"
        if rng.random() < 0.15:
            data = b" " * rng.choice((10_000, 200_000_000)) + data
        data = gzip.compress(data, 6 if len(data) < 1 << 24 else 1)
        data = mutate_bytes(data, rng) if rng.random() < 0.5 else data
    (place / name).write_bytes(data)
    return place


def _read_data(path: Path) -> None:
    load_items(str(next(path.iterdir())))


def _read_arrivals(path: Path) -> None:
    from_trace(path / "file")


def _arrivals(rng: random.Random) -> bytes:
    return mutate_lines([1.5, {"timestamp": 2.5}, 3], rng)


def _read_costs(path: Path) -> None:
    read_costs(str(path / "file")).swi("a", 10, {"a": 5, "b": 3})


def _read_replays(path: Path) -> None:
    with open_grid(path / "file", {"batch_size": 1}) as kept:
        assert all(isinstance(name, str) for key in kept.there for name in key)


# -- safetensors: tables, heads, checkpoints ---------------------------------------------------------------------------------


def _stored(path: Path) -> tuple[Tensors, dict[str, str] | None]:
    kinds = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "bool": "BOOL"}
    arrays = load_file(path)
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    return {
        n: (kinds[str(a.dtype)], tuple(a.shape), np.ascontiguousarray(a).tobytes()) for n, a in arrays.items()
    }, metadata


@cache
def _table() -> tuple[Tensors, dict[str, str] | None]:
    with tiny_folder() as folder:
        tables.small().save(folder / "t.safetensors")
        return _stored(folder / "t.safetensors")


def _fact(text: str, rng: random.Random) -> str:
    return dump(mutate_value(json.loads(text), rng))


def _read_table(path: Path) -> None:
    table = NgramTable.load(next(path.iterdir()))
    table.continuation([0, 1], 3)
    table.check(tables.MARK, table.vocab_size)


def _list(rng: random.Random) -> bytes:
    return mutate_json([1, 2, None, 4, 0, -1], rng)


@cache
def _head() -> tuple[dict[str, dict[str, Any]], tuple[Tensors, dict[str, str] | None]]:
    """config.json of both layouts, and the weights."""
    layer: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    layer |= {"intermediate_size": 24, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    layer |= {"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = HeadConfig(layer, 40, 10, 12, (0, 1, 2), False, "tiny")
    module = HeadModule(config, 3)
    module.embed_tokens = torch.nn.Embedding(40, 16)
    head = Head(config, module, torch.arange(0, 40, 4))
    with tiny_folder() as folder:
        write_head(head, folder, lm_head=torch.zeros(10, 16))
        plain = json.loads((folder / "config.json").read_text())
        write_head(head, folder, layout="speculators", lm_head=torch.zeros(10, 16))
        both = {"plain": plain, "speculators": json.loads((folder / "config.json").read_text())}
        return both, _stored(folder / "model.safetensors")


def _write_head(place: Path, rng: random.Random) -> Path:
    configs, (tensors, metadata) = _head()
    config: Any = configs[rng.choice(sorted(configs))]
    changes_config = rng.random() < 0.6
    text = mutate_json(config, rng) if changes_config else dump(config).encode()
    (place / "config.json").write_bytes(text)
    kept = (
        mutate_tensors(tensors, metadata, rng, lambda t, r: t + "x")
        if not changes_config
        else _sound(tensors, metadata)
    )
    (place / "model.safetensors").write_bytes(kept)
    return place


def _sound(tensors: Tensors, metadata: dict[str, str] | None) -> bytes:
    from helpers.fuzz_mutators import joined, safetensors

    return joined(*safetensors(tensors, metadata))


def _read_head(path: Path) -> None:
    head = read_head(path)
    states = torch.zeros(1, 2, head.module.fc.in_features)
    head.module.float().unrolled(states, torch.zeros(1, 2, head.config.hidden_size), 1)  # drafting converts weights too


@cache
def _acceptance() -> tuple[dict[str, Any], Tensors, Tensors]:
    """config.json, our weights, and weights named as in published heads."""
    with tiny_folder() as folder:
        AcceptanceHead(8, 2).save(folder)
        ours, _ = _stored(folder / "model.safetensors")
        names = {"blocks.0.": "0.linear.", "blocks.1.": "1.linear.", "out.": "2."}
        theirs = {}
        for name, tensor in ours.items():
            old = next(one for one in names if name.startswith(one))
            theirs[names[old] + name.removeprefix(old)] = tensor
        return json.loads((folder / "config.json").read_text()), ours, theirs


def _write_acceptance(place: Path, rng: random.Random) -> Path:
    config, ours, theirs = _acceptance()
    text = mutate_json(config, rng) if rng.random() < 0.4 else dump(config).encode()
    (place / "config.json").write_bytes(text)
    (place / "model.safetensors").write_bytes(mutate_tensors(rng.choice((ours, theirs)), None, rng, lambda t, r: t))
    return place


def _read_acceptance(path: Path) -> None:
    head = AcceptanceHead.load(path)
    head.accepted(torch.zeros(1, head.hidden_size))


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


PLAN = {"model": "tiny", "epochs": 2, "processes": 1}


@cache
def _checkpoint() -> tuple[Any, dict[str, tuple[Tensors, dict[str, str] | None]]]:
    model, optimiser = _trained()
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    with tiny_folder() as folder:
        save_checkpoint(folder / "c", State(step=3), PLAN, model, [optimiser])
        names = ("weights.safetensors", "optimiser.safetensors")
        return json.loads((folder / "c" / "state.json").read_text()), {n: _stored(folder / "c" / n) for n in names}


def _write_checkpoint(place: Path, rng: random.Random) -> Path:
    state, weights = _checkpoint()
    which = rng.choice(("state.json", *sorted(weights)))
    (place / "state.json").write_bytes(mutate_json(state, rng) if which == "state.json" else dump(state).encode())
    for name, (tensors, metadata) in weights.items():
        data = mutate_tensors(tensors, metadata, rng, lambda t, r: t) if name == which else _sound(tensors, metadata)
        (place / name).write_bytes(data)
    return place


def _read_checkpoint(path: Path) -> None:
    model, optimiser = _trained()
    load_checkpoint(path, PLAN, model, [optimiser])
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()


# -- tokenizers ------------------------------------------------------------------------------------------------------------


@cache
def _tokenizer() -> dict[str, Any]:
    with tiny_folder() as folder:
        tiny.tokenizer(chat=True).save_pretrained(folder)
        return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")} | {
            path.name: path.read_text() for path in folder.glob("*.jinja")
        }


def _write_tokenizer(place: Path, rng: random.Random) -> Path:
    files = _tokenizer()
    which = rng.choice(sorted(files))
    for name, value in files.items():
        sound = value.encode() if isinstance(value, str) else dump(value).encode()
        changed = mutate_bytes(sound, rng) if isinstance(value, str) else mutate_json(value, rng)
        (place / name).write_bytes(changed if name == which else sound)
    return place


def _read_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    ids = tokenizer("hello, world \u00e9").input_ids
    tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    tokenizer_fingerprint(tokenizer)
    encode([{"role": "user", "content": "hi"}], tokenizer)
    for i in ids[:3]:
        token_bytes(tokenizer, i)


FORMATS: dict[str, Format] = {
    "recording": Format(_one("file", lambda rng: mutate_lines(_lines("recording"), rng)), _read_recording),
    "tensor-log": Format(_one("file", _log), _read_log),
    "cs-drafting": Format(_one("file", _cache), _read_recording),
    "results": Format(_one("file", lambda rng: mutate_lines(_lines("results"), rng)), _read_results),
    "replays": Format(_one("file", lambda rng: mutate_lines(_lines("replays"), rng)), _read_replays),
    "profile": Format(_one("file", lambda rng: mutate_json(_profile(), rng)), _read_profile),
    "settings": Format(_one("s.toml", _settings), lambda path: read_settings(path / "s.toml")),
    "data": Format(_files(_write_data), _read_data),
    "arrivals": Format(_one("file", _arrivals), _read_arrivals),
    "costs": Format(_one("file", lambda rng: mutate_json({"a": 70.0, "b": 2}, rng)), _read_costs),
    "ngram": Format(_one("t.safetensors", lambda rng: mutate_tensors(*_table(), rng, _fact)), _read_table),
    "ngram-list": Format(_one("t.json", _list), _read_table),
    "head": Format(_files(_write_head), _read_head),
    "acceptance-head": Format(_files(_write_acceptance), _read_acceptance),
    "checkpoint": Format(_files(_write_checkpoint), _read_checkpoint),
    "tokenizer": Format(_files(_write_tokenizer), _read_tokenizer),
}
