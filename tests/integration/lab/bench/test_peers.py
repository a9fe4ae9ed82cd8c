"""Peers: how they are written down, the worker's protocol with an engine made here, and the host against small scripts."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay import child_process
from foresay.child_process import ChildProcess
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError, ModelLoadError, ModelNotFoundError, UnknownNameError
from foresay.lab.bench.peers import base, open_peer, parse, process, worker
from foresay.lab.bench.peers.process import WorkerPeer, open_worker
from helpers.waiting import has_ended, wait_until

WRITE = SamplingParams(max_new_tokens=4, ignore_eos=True)

# -- expressions


@pytest.mark.parametrize(
    ("text", "kind", "python", "settings"),
    [
        ("transformers", "transformers", None, {}),
        (" transformers() ", "transformers", None, {}),
        ("transformers(assistant=smollm2-135m)", "transformers", None, {"assistant": "smollm2-135m"}),
        ('transformers(assistant="/a (b)/c")', "transformers", None, {"assistant": "/a (b)/c"}),
        ("transformers(lookup=10)", "transformers", None, {"lookup": "10"}),
        ("vllm=/v/bin/python", "vllm", "/v/bin/python", {}),
        ("vllm=/v/bin/python(ngram=5)", "vllm", "/v/bin/python", {"ngram": "5"}),
        ("vllm = /v (x)/python ( ngram = 5 )", "vllm", "/v (x)/python", {"ngram": "5"}),
        ("llama.cpp=python3", "llama.cpp", "python3", {}),
    ],
)
def test_expressions(text: str, kind: str, python: str | None, settings: dict[str, str]) -> None:
    assert parse(text) == base.PeerSpec(kind, python, settings)


def test_an_interpreter_may_have_parentheses(tmp_path: Path) -> None:
    path = tmp_path / "python(3)"
    path.touch()
    assert parse(f"vllm={path}") == base.PeerSpec("vllm", str(path))
    assert parse(f"vllm={path}(ngram=2)") == base.PeerSpec("vllm", str(path), {"ngram": "2"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vlm=python", "unknown peer 'vlm'. Did you mean 'vllm'? Known: economize, llama.cpp, transformers, vllm."),
        ("", "unknown peer ''. Known: economize, llama.cpp, transformers, vllm."),
        ("vllm", "'vllm' names no interpreter; write vllm=PYTHON"),
        ("llama.cpp=", "names no interpreter; write llama.cpp=PYTHON"),
        ("transformers=python", "transformers runs in this process and takes no interpreter"),
        ("transformers(lookup=10", "has no ')' at its end"),
        ("transformers(lookup)", "'lookup' is not key=value"),
        ("transformers(look=3)", "unknown setting of transformers 'look'. Did you mean 'lookup'?"),
        ("transformers(lookup=3, lookup=4)", "gives lookup twice"),
        ("llama.cpp=python(ngram=3)", "unknown setting of llama.cpp 'ngram'. Known: lookup."),
    ],
)
def test_bad_expressions(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transformers(lookup=ten)", "lookup='ten' must be an integer"),
        ("transformers(lookup=0)", "lookup=0 must be an integer"),
        ("transformers(cache=fast)", "cache='fast' must be static"),
        ("transformers(lookup=3, assistant=x)", "cannot combine assistant and lookup; give one of them"),
    ],
)
def test_bad_settings_are_found_before_a_model_is_looked_for(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_peer(text, model="/nowhere", dtype="fp32", threads=None)


# -- models


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    for find in (base.transformers_source, base.model_folder, base.gguf_file):
        with pytest.raises(ModelNotFoundError, match="no model '/nowhere'"):
            find("/nowhere")
        with pytest.raises(ModelNotFoundError, match=r"no model 'smollm'.*smollm2-135m"):
            find("smollm")


def test_a_folder_needs_configuration_and_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"vllm needs config\.json"):
        base.model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 77}}')
    with pytest.raises(ModelNotFoundError, match="vllm needs weights"):
        base.model_folder(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert base.model_folder(str(tmp_path)) == str(tmp_path)
    assert base.context_of(str(tmp_path)) == 77
    with pytest.raises(ConfigError, match="vllm reads a transformers folder"):
        base.model_folder(str(tmp_path / "config.json"))


def test_a_gguf_file_is_found_or_its_lack_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder contains 0; give the"):
        base.gguf_file(str(tmp_path))
    with pytest.raises(ConfigError, match="'a/b' a hub id names none"):
        base.gguf_file("a/b")
    one = tmp_path / "one.gguf"
    one.write_bytes(b"GGUF....")
    assert base.gguf_file(str(tmp_path)) == base.gguf_file(str(one)) == str(one)
    assert base.transformers_source(str(one)) == (str(tmp_path), {"gguf_file": "one.gguf"})
    one.write_bytes(b"PK")
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        base.gguf_file(str(one))
    assert base.gguf_file("smollm2-135m").endswith(".gguf")


def test_a_hub_id_that_was_not_downloaded_is_named() -> None:
    with pytest.raises(
        ModelNotFoundError, match="'nobody/nothing' is not in the hub's cache; get it with: hf download"
    ):
        base.model_folder("nobody/nothing")


def test_dtypes() -> None:
    assert str(base.torch_dtype("bf16")) == "torch.bfloat16"
    assert base.torch_dtype("auto").is_floating_point
    with pytest.raises(UnknownNameError, match="unknown dtype 'int8'"):
        base.torch_dtype("int8")


# -- the worker's side


class Adding:
    """An engine that counts on from the last token."""

    def load(self, job: Mapping[str, Any]) -> dict[str, str]:
        if job.get("model") == "broken":
            raise ValueError("two\nlines")
        return {"engine": "adding 1"}

    def run(self, job: Mapping[str, Any]) -> list[list[int]]:
        self.passes = 3
        return [[prompt[-1] + 1 + i for i in range(job["max_new_tokens"])] for prompt in job["prompts"]]


def talk(*messages: Any) -> list[dict[str, Any]]:
    replies = io.StringIO()
    lines = [message if isinstance(message, str) else json.dumps(message) for message in messages]
    worker.serve(lines, replies, worker.WorkerSession({"adding": Adding}))
    return [json.loads(line) for line in replies.getvalue().splitlines()]


LOAD = {"op": "load", "engine": "adding"}
RUN = {"op": "run", "prompts": [[1, 5], [7]], "max_new_tokens": 2}


def test_load_run_close() -> None:
    began = time.perf_counter()
    loaded, ran, closed = talk(LOAD, RUN, {"op": "close"}, RUN)
    took = time.perf_counter() - began
    assert loaded["ok"] and loaded["about"]["engine"] == "adding 1" and loaded["about"]["python"]
    assert ran["ok"] and ran["outputs"] == [[6, 7], [8, 9]] and ran["passes"] == 3 and 0 <= ran["seconds"] <= took
    assert closed == {"ok": True}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([RUN], "no engine is loaded; send a load message first"),
        ([LOAD, LOAD], "an engine is already loaded; start another worker"),
        ([{"op": "load", "engine": "x"}], "unknown engine 'x'; known: adding"),
        ([{"op": "dance"}], "unknown op 'dance'; known: load, run, close"),
        (["[1]"], "unknown op None; known: load, run, close"),
        ([{**LOAD, "model": "broken"}], "ValueError: two lines"),
        ([LOAD, {"op": "run"}], "KeyError: 'prompts'"),
    ],
)
def test_errors_are_replies(messages: list[Any], error: str) -> None:
    assert talk(*messages)[-1] == {"ok": False, "error": error}


def test_a_line_that_is_no_json_is_answered_and_the_session_goes_on() -> None:
    first, second = talk("{", LOAD)
    assert not first["ok"] and first["error"].startswith("JSONDecodeError")
    assert second["ok"]


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert worker.one_line(ValueError()) == "ValueError"
    text = worker.one_line(ValueError("ab\n" * 1000))
    assert "\n" not in text and len(text) == worker.ERROR_LENGTH and text.endswith("...")


def test_a_missing_engine_names_interpreter_and_page() -> None:
    with pytest.raises(
        worker.RefusedError, match=re.escape(f"{sys.executable} cannot import no_such_engine")
    ) as caught:
        worker.imported("no_such_engine", "install it there")
    assert "install it there, see docs/how-to/other-engines.md" in str(caught.value)


def test_the_worker_imports_only_the_standard_library() -> None:
    code = f"import runpy, sys; runpy.run_path({str(process.WORKER)!r}); print(*sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    tops = {name.split(".")[0] for name in out.stdout.split()} - {"__main__"}
    assert tops <= sys.stdlib_module_names | {"__mp_main__"}, tops - sys.stdlib_module_names


def test_an_engine_may_print_and_finds_the_real_transformers() -> None:
    """Run the shipped script's main with an engine that prints on both levels and imports what lies beside the script."""
    code = textwrap.dedent(f"""
        import os, runpy, sys
        sys.path.insert(0, {str(process.WORKER.parent)!r})
        names = runpy.run_path({str(process.WORKER)!r})
        class Noisy:
            def load(self, job):
                print("noise", flush=True)
                os.write(1, b"more noise")
                import importlib.util
                return {{"read": sys.stdin.read(), "at": str(importlib.util.find_spec("transformers").origin)}}
        names["ENGINES"]["noisy"] = Noisy
        names["main"]()
    """)
    sent = '{"op": "load", "engine": "noisy"}\n{"op": "close"}\n'
    out = subprocess.run(
        [sys.executable, "-c", code], input=sent, capture_output=True, text=True, check=True, timeout=60
    )
    loaded, closed = map(json.loads, out.stdout.splitlines())
    assert loaded["ok"] and closed["ok"]
    beside, found = process.WORKER.with_name("transformers.py"), importlib.util.find_spec("transformers")
    assert beside.exists() and found is not None
    assert loaded["about"] == {**loaded["about"], "at": found.origin, "read": ""} and found.origin != str(beside)
    assert out.stderr == "noise\nmore noise"


# -- engines, with the modules they call stood in for


class FakeLlm:
    """vLLM's inner engine: one token per sequence and step, and how many it had at a time."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.llm_engine, self.live, self.most = settings, self, {}, 0

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.live[name] = (prompt["prompt_token_ids"], params, [])

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.live[name]

    def step(self) -> list[Any]:
        self.most = max(self.most, len(self.live))
        done = []
        for name, (prompt, params, new) in list(self.live.items()):
            if prompt == [666]:
                raise RuntimeError("a bad prompt")
            new.append(prompt[-1] + len(new) + 1)
            if len(new) == min(params.max_tokens, prompt[0]):
                del self.live[name]
                done.append(Bag(request_id=name, finished=True, outputs=[Bag(token_ids=new)]))
        return done


class Bag:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> worker.Vllm:
    fake = Bag(LLM=FakeLlm, SamplingParams=Bag, __version__="9", RequestOutputKind=Bag(FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", fake)
    engine = worker.Vllm()
    about = engine.load({"model": "m", "dtype": "float32", "context": 64, "max_batch": 8, "ngram": 5})
    assert about["engine"] == "vllm 9" and about["enable_prefix_caching"] == "False"
    assert "'num_speculative_tokens': 5" in about["speculative_config"]
    return engine


SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 3, "ignore_eos": True, "max_new_tokens": 4}


@pytest.mark.parametrize("batch", [1, 2, 5, 9])
def test_vllm_is_fed_the_batch_size_and_answers_in_order(vllm: worker.Vllm, batch: int) -> None:
    prompts = [[4, 10], [2, 20], [3, 30], [4, 40], [1, 50]]
    outputs = vllm.run({**SAMPLING, "prompts": prompts, "batch_size": batch})
    assert outputs == [[p[-1] + 1 + i for i in range(min(p[0], 4))] for p in prompts]
    assert vllm._engine.most == min(batch, 5)
    assert vllm.passes == sum(map(len, outputs)) if batch == 1 else vllm.passes < sum(map(len, outputs))


def test_vllm_after_an_error_has_nothing_left_over(vllm: worker.Vllm) -> None:
    with pytest.raises(RuntimeError, match="a bad prompt"):
        vllm.run({**SAMPLING, "prompts": [[4, 1], [666]], "batch_size": 2})
    assert not vllm._engine.live
    assert vllm.run({**SAMPLING, "prompts": [[1, 1]], "batch_size": 2}) == [[2]]


class FakeLlama:
    def __init__(self, **settings: Any) -> None:
        self.settings, self.seeds, self.resets = settings, [], 0

    def token_eos(self) -> int:
        return 7

    def n_ctx(self) -> int:
        return int(self.settings["n_ctx"])

    def reset(self) -> None:
        self.resets += 1

    def set_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def generate(self, prompt: list[int], **sampling: Any) -> Iterator[int]:
        assert sampling["repeat_penalty"] == 1.0 and sampling["min_p"] == 0.0
        token = prompt[-1]
        while True:
            token += 1
            yield token


def test_llama_cpp_writes_the_exact_number_and_ends_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", Bag(Llama=FakeLlama, __version__="8"))
    engine = worker.LlamaCpp()
    assert engine.load({"model": "m", "context": 16, "threads": 2})["engine"] == "llama-cpp-python 8"
    assert engine.run({**SAMPLING, "prompts": [[5], [1, 2]]}) == [[6, 7, 8, 9], [3, 4, 5, 6]]
    assert engine.run({**SAMPLING, "prompts": [[5], [1]], "ignore_eos": False}) == [[6, 7], [2, 3, 4, 5]]
    assert engine._llama.seeds == [3, 4, 3, 4] and engine._llama.resets == 4
    with pytest.raises(worker.RefusedError, match="have 17 tokens, the context 16"):
        engine.run({**SAMPLING, "prompts": [[1] * 13]})
    assert engine._llama.settings["draft_model"] is None and not engine._llama.settings["logits_all"]


def test_llama_cpp_looks_guesses_up_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", Bag(Llama=FakeLlama, __version__="8"))
    drafts = Bag(LlamaPromptLookupDecoding=lambda num_pred_tokens: f"looks up {num_pred_tokens}")
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", drafts)
    engine = worker.LlamaCpp()
    assert engine.load({"model": "m", "context": 16, "threads": 2, "lookup": 7})["lookup"] == "7"
    assert engine._llama.settings["draft_model"] == "looks up 7" and engine._llama.settings["logits_all"]


class FakeEconomized:
    def __init__(self, drafts: int) -> None:
        self.drafts, self.sampled = drafts, []

    def generate(
        self, ids: torch.Tensor, max_new_tokens: int, eos_token_id: list[int] | None, **sampling: Any
    ) -> torch.Tensor:
        self.sampled.append(sampling)
        new = [int(ids[0, -1]) + 1 + i for i in range(max_new_tokens)]
        ends = [i + 1 for i, token in enumerate(new) if token in (eos_token_id or [])]
        return torch.cat([ids[0], torch.tensor(new[: min(ends, default=max_new_tokens)])])[None]


@pytest.mark.parametrize(("lookup", "drafts"), [(0, 0), (5, 6)])
def test_economize_writes_the_exact_number_and_ends_where_asked(
    lookup: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Bag(generation_config=Bag(eos_token_id=7))
    base.eval = lambda: base  # type: ignore[attr-defined]
    fake = Bag(
        apply=lambda model, *techniques, decoding=0: FakeEconomized(decoding),
        DecodeConfig=lambda cycle_length: cycle_length,
        __version__="1",
        LookupConfig=Bag,
    )
    monkeypatch.setitem(sys.modules, "economize", fake)
    monkeypatch.setitem(sys.modules, "economize.techniques.lookup", fake)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: base)
    engine = worker.Economize()
    job = {"model": "m", "dtype": "float32", "context": 64, "threads": torch.get_num_threads(), "lookup": lookup}
    assert engine.load(job)["engine"] == "economize 1"
    assert engine._model.drafts == drafts
    assert engine.run({**SAMPLING, "prompts": [[5], [1, 2]]}) == [[6, 7, 8, 9], [3, 4, 5, 6]]
    assert engine.run({**SAMPLING, "prompts": [[5]], "ignore_eos": False}) == [[6, 7]]
    assert engine._model.sampled[-1] == {"do_sample": False}
    engine.run({**SAMPLING, "prompts": [[5]], "temperature": 0.5, "top_k": 3})
    assert engine._model.sampled[-1] == {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 1.0}


# -- the host's side

GOOD = """
import json, sys, time
for line in sys.stdin:
    message = json.loads(line)
    if message["op"] == "close":
        print('{"ok": true}', flush=True)
        break
    if message["op"] == "load":
        reply = {"ok": True, "about": {"engine": message["engine"], "context": str(message["context"])}}
    elif message["seed"] == 13:
        reply = {"ok": False, "error": "no luck"}
    else:
        reply = {"ok": True, "outputs": [prompt[-1:] for prompt in message["prompts"]], "seconds": 0.5, "passes": 7}
    print(json.dumps(reply), flush=True)
"""
Start = Callable[[str], ChildProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ChildProcess] = []

    def begin(source: str) -> ChildProcess:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        started.append(ChildProcess("peer", [sys.executable, str(script)], os.environ))
        return started[-1]

    yield begin
    for one in started:
        one.close()


def assert_gone(pid: int) -> None:
    """No process, nor a zombie, with that id."""
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.fixture
def peer(tmp_path: Path, gguf: str) -> Iterator[WorkerPeer]:
    script = tmp_path / "good.py"
    script.write_text(GOOD)
    spec = parse(f"llama.cpp={sys.executable}")
    opened = open_worker(spec, model=gguf, dtype="bf16", threads=3, script=script)
    yield opened
    opened.close()


def test_a_peer_runs_and_closes(peer: WorkerPeer, gguf: str) -> None:
    assert peer.name == "llama.cpp"
    about = {"engine": "llama.cpp", "context": "8192", "model": gguf, "dtype": "the GGUF file's", "threads": "3"}
    assert peer.describe() == {**about, "interpreter": sys.executable}
    for _ in range(2):
        run = peer.run([[1, 2], [3]], WRITE, 1)
        assert run == base.PeerRun([[2], [3]], 0.5, passes=7)
    peer.close()
    peer.close()
    assert_gone(peer.pid)
    with pytest.raises(ForesayError, match="the worker has ended"):
        peer.run([[1]], WRITE, 1)


def test_a_refusal_is_an_error_and_the_worker_goes_on(peer: WorkerPeer) -> None:
    with pytest.raises(ConfigError, match=r"^llama\.cpp: no luck$"):
        peer.run([[1]], replace(WRITE, seed=13), 1)
    assert peer.run([[1]], WRITE, 1).outputs == [[1]]


def test_a_request_larger_than_a_pipe(peer: WorkerPeer) -> None:
    prompts = [[123456] * 8000 + [i] for i in range(40)]
    assert peer.run(prompts, replace(WRITE, max_new_tokens=1), 1).outputs == [[i] for i in range(40)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 2}, "llama.cpp runs one prompt at a time, not 2; use batch size 1"),
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[]]}, "at least one token"),
        ({"batch_size": 0}, "batch_size=0 must be an integer at least 1"),
        ({"max_new_tokens": 8192}, "have 8193 tokens, the context 8192 that it was loaded with"),
        ({"seed": 2**32 - 1}, "seed=4294967295 must be"),
        (
            {"min_p": 0.1},
            "llama.cpp does not support min_p=0.1; it supports only max_new_tokens",
        ),
        ({"stop": ("x",)}, "does not support stop=('x',)"),
        ({"banned_token_ids": (7,)}, "does not support banned_token_ids=(7,)"),
    ],
)
def test_what_no_peer_can_do(peer: WorkerPeer, changes: dict[str, Any], message: str) -> None:
    settings = dict(changes)
    prompts, batch_size = settings.pop("prompts", [[1]]), settings.pop("batch_size", 1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        peer.run(prompts, replace(WRITE, **settings), batch_size)


def test_vllm_has_a_largest_batch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 50}')
    (tmp_path / "model.safetensors").touch()
    script = tmp_path / "good.py"
    script.write_text(GOOD)
    spec = parse(f"vllm={sys.executable}(ngram=4)")
    peer = open_worker(spec, model=str(tmp_path), dtype="bf16", threads=None, script=script)
    assert peer.name == "vllm+ngram" and peer.describe()["context"] == "50" and peer.describe()["dtype"] == "bfloat16"
    assert peer.run([[1]], WRITE, 128).outputs == [[1]]
    with pytest.raises(ConfigError, match="loaded for 128 prompts at a time, not 129"):
        peer.run([[1]], WRITE, 129)
    peer.close()


def test_a_worker_that_hangs_is_ended(start: Start) -> None:
    child = start("import time\ntime.sleep(600)")
    with pytest.raises(ForesayError, match=r"^peer: no answer within 0\.3 s, so it was ended$"):
        child.request({"op": "run"}, 0.3)
    assert_gone(child.pid)
    with pytest.raises(ForesayError, match=r"the worker has ended \(peer: no answer within 0\.3 s"):
        child.request({"op": "run"}, 0.3)


def test_a_worker_that_hears_no_signal_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "GRACE_S", 0.5)
    child = start("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", file=sys.stderr, flush=True)
        input()
        print('{"ok": true}', flush=True)
        time.sleep(600)
    """)
    child.request({"op": "load"}, 60)
    with pytest.raises(ForesayError, match="its last error line: deaf"):
        child.request({"op": "run"}, 0.3)
    assert_gone(child.pid)


def test_a_worker_that_dies_is_reported_with_its_last_words(start: Start) -> None:
    child = start("import sys\nsys.stdin.readline()\nsys.exit('first\\nout of luck\\n')")
    with pytest.raises(
        ForesayError, match=r"^peer: the worker ended with exit code 1; its last error line: out of luck$"
    ):
        child.request({"op": "run"}, 60)
    assert_gone(child.pid)


def test_a_worker_that_is_killed_is_reported(start: Start) -> None:
    child = start("import os\ninput()\nos.kill(os.getpid(), 9)")
    with pytest.raises(ForesayError, match=r"^peer: the worker was killed by signal 9$"):
        child.request({"op": "run"}, 60)
    assert_gone(child.pid)


def test_a_worker_that_babbles_is_ended(start: Start) -> None:
    child = start("input()\nprint('Hello there')")
    with pytest.raises(ForesayError, match=r"the worker answered 'Hello there'; is .* a Python"):
        child.request({"op": "run"}, 60)
    assert_gone(child.pid)


def test_the_workers_children_end_with_it(start: Start) -> None:
    """Also where the worker itself is gone already and a child of its holds the pipes."""
    child = start("""
        import json, os, subprocess, sys
        input()
        kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[1])
        print(json.dumps({"ok": True, "kept": kept.pid}), flush=True)
        input()
        os._exit(3)
    """)
    kept = child.request({"op": "run"}, 60)["kept"]
    os.kill(kept, 0)
    with pytest.raises(ForesayError, match="ended with exit code 3"):
        child.request({"op": "run"}, 60)
    assert_gone(child.pid)
    wait_until(lambda: has_ended(kept), "the worker's child ends with it")


def test_what_a_worker_said_is_heard_before_its_end(start: Start) -> None:
    """Without waiting for who holds its pipes; also what goes without an answer, in a batch."""
    child = start("""
        import json, os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[1])
        for _ in range(3):
            print(json.dumps(json.loads(input())["op"]), flush=True)
        sys.stdout.write("half a li")
        sys.stdout.flush()
        os._exit(4)
    """)
    said: list[Any] = []

    def hear() -> bool:
        child.wait_ready(0.1)
        said.extend(child.read())
        return False

    for number in range(3):
        child.send({"op": number})
    with pytest.raises(ForesayError, match="ended with exit code 4"):
        wait_until(hear, "the worker's end")
    assert said == [0, 1, 2]
    with pytest.raises(ForesayError, match=r"the worker has ended \(.*exit code 4"):
        child.read()
    assert_gone(child.pid)


def test_an_interrupt_ends_the_worker(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    child = start("import time\ntime.sleep(600)")

    def interrupted(*_: Any) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        child.request({"op": "run"}, 60)
    assert_gone(child.pid)


def test_the_worker_ends_at_the_hosts_exit(tmp_path: Path) -> None:
    script = tmp_path / "good.py"
    script.write_text(GOOD)
    code = textwrap.dedent(f"""
        import os, sys
        from foresay.child_process import ChildProcess
        child = ChildProcess("peer", [sys.executable, {str(script)!r}], os.environ)
        child.request({{"op": "load", "engine": "x", "context": 1}}, 60)
        print(child.pid)
    """)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    wait_until(lambda: has_ended(int(out.stdout)), "the worker ends with its host")
    assert out.stderr == ""


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_an_interpreter_that_is_not_there(kind: str, tmp_path: Path) -> None:
    def refusal(python: str) -> str:
        with pytest.raises(ConfigError) as caught:
            open_peer(f"{kind}={python}", model="smollm2-135m", dtype="bf16", threads=1)
        return str(caught.value)

    assert "the interpreter '/no/python' does not exist" in refusal("/no/python")
    assert f"is a folder; name the interpreter, such as {tmp_path}/bin/python" in refusal(str(tmp_path))
    plain = tmp_path / "plain"
    plain.write_text("no program")
    assert "cannot be executed" in refusal(str(plain))


def test_a_file_that_is_no_program_cannot_be_run(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(b"\0\0")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ConfigError, match="cannot be run"):
        ChildProcess("peer", [str(path)], os.environ)


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_an_interpreter_without_the_engine(kind: str, tmp_path: Path, gguf: str) -> None:
    """The shipped worker, for real, where neither engine is installed."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    blocked = tmp_path / "python"
    blocked.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without what is installed
    blocked.chmod(0o755)
    with pytest.raises(
        ConfigError, match=r"cannot import (vllm|llama_cpp).*No module named.*docs/how-to/other-engines.md"
    ):
        open_peer(f"{kind}={blocked}", model=str(tmp_path), dtype="bf16", threads=1)


def test_the_environment_misleads_no_other_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    found = process.environment("vllm", 1)
    assert "PYTHONPATH" not in found
    assert found["OMP_NUM_THREADS"] == found["HF_HUB_OFFLINE"] == found["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert found["VLLM_CPU_OMP_THREADS_BIND"].isdecimal()
    assert "VLLM_CPU_KVCACHE_SPACE" not in {k for k in process.environment("llama.cpp", 1) if k not in os.environ}
