"""Another engine in an interpreter of its own: `PYTHON engines.py KIND`, started by `common.Engine`.

The first line on standard input is the arguments of the engine's class as JSON; each later line is [method, arguments], and is
replied to by {"value": ...} or {"error": "one line"}. Imports neither foresay nor, before it is needed, anything that is not in
the standard library. How to install the engines: docs/how-to/other-engines.md.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from itertools import islice
from time import perf_counter
from typing import Any


class Vllm:
    """vLLM with continuous batching of at most `batch` sequences. No prefix caching: repeats would skip their prompts."""

    def __init__(self, model: str, threads: int, dtype: str, ngram: int = 0) -> None:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))}
        vllm: Any = importlib.import_module("vllm")
        drafts = {"num_speculative_tokens": ngram, "prompt_lookup_min": 2, "prompt_lookup_max": 4, "method": "ngram"}
        self._vllm, more = vllm, {"speculative_config": drafts} if ngram else {}
        self._llm = vllm.LLM(
            model, dtype=dtype, max_model_len=8192, max_num_seqs=128, enable_prefix_caching=False, seed=0, **more
        )

    def texts(self, prompts: list[list[int]], new: int, batch: int, ignore_eos: bool) -> dict[str, Any]:
        """Greedy outputs, and the seconds that they took."""
        params = self._vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=ignore_eos, detokenize=False)
        engine, waiting, running = self._llm.llm_engine, list(enumerate(prompts))[::-1], 0
        outputs: list[list[int]] = [[] for _ in prompts]
        began = perf_counter()
        while waiting or running:
            while waiting and running < batch:
                index, ids = waiting.pop()
                engine.add_request(str(index), {"prompt_token_ids": ids}, params)
                running += 1
            for one in engine.step():
                if one.finished:
                    outputs[int(one.request_id)] = list(map(int, one.outputs[0].token_ids))
                    running -= 1
        return {"outputs": outputs, "seconds": perf_counter() - began}


class LlamaCpp:
    """llama.cpp on a GGUF file, one prompt at a time, with no state shared between prompts."""

    def __init__(self, model: str, threads: int, dtype: str = "", lookup: int = 0, draft: str = "") -> None:
        """lookup: tokens of its prompt lookup. draft: file of a draft model that proposes four tokens."""
        import llama_cpp
        import numpy as np
        from llama_cpp import llama_speculative

        def load(path: str, **more: Any) -> Any:
            threads_of = {"n_threads": threads, "n_threads_batch": threads}
            return llama_cpp.Llama(path, n_ctx=8192, flash_attn=True, verbose=False, **threads_of, **more)

        class Draft(llama_speculative.LlamaDraftModel):  # type: ignore[misc]
            def __init__(self) -> None:
                self.model = load(draft)

            def __call__(self, input_ids: Any, /, **more: Any) -> Any:
                return np.array(list(islice(self.model.generate(input_ids.tolist(), temp=0.0), 4)), dtype=np.intc)

        drafts: Any = llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
        drafts = Draft() if draft else drafts
        self._llama = load(model, draft_model=drafts, logits_all=drafts is not None)
        self._load, self._path = load, model

    def texts(self, prompts: list[list[int]], new: int, batch: int, ignore_eos: bool) -> dict[str, Any]:
        """Greedy outputs, and the seconds that they took."""
        outputs: list[list[int]] = []
        began, end = perf_counter(), self._llama.token_eos()
        for ids in prompts:
            self._llama.reset()
            outputs.append([])
            for token in islice(self._llama.generate(ids, temp=0.0, repeat_penalty=1.0), new):
                outputs[-1].append(int(token))
                if token == end and not ignore_eos:
                    break
        return {"outputs": outputs, "seconds": perf_counter() - began}

    def seconds(self, before: int, count: int) -> float:
        """Seconds of a pass over `count` tokens after `before` tokens."""
        self._llama.reset()
        if before:
            self._llama.eval([i % 4000 + 5 for i in range(before)])
        began = perf_counter()
        self._llama.eval([i % 3000 + 7 for i in range(count)])
        return perf_counter() - began

    def perplexity(self, windows: list[list[int]]) -> float:
        """Perplexity of the tokens of each window after those before them in it."""
        import numpy as np

        model, total, count = self._load(self._path, logits_all=True), 0.0, 0
        for ids in windows:
            model.reset()
            model.eval(ids)
            scores = np.asarray(model.scores[: len(ids) - 1], dtype=np.float64)
            top = scores.max(1, keepdims=True)
            norm = np.log(np.exp(scores - top).sum(1)) + top[:, 0]
            total += float((norm - scores[np.arange(len(ids) - 1), ids[1:]]).sum())
            count += len(ids) - 1
        return math.exp(total / count)


KINDS: dict[str, Any] = {"vllm": Vllm, "llama.cpp": LlamaCpp}


def main() -> None:
    """Reply to lines until the input ends. Whatever an engine prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: 1.5 times faster on two cores
    engine: Any = None
    for line in sys.stdin:
        try:
            message = json.loads(line)
            if engine is None:
                engine, value = KINDS[sys.argv[1]](**message), None
            else:
                value = getattr(engine, message[0])(**message[1])
            reply = {"value": value}
        except Exception as error:
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
