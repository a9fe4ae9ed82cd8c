"""One run of vLLM in its own environment: a job as JSON on stdin, what it wrote and counted as the last line of stdout."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from foresay.integrations.vllm import Proposer


class Failing(Proposer):
    """A drafter that raises from time to time."""

    raised = 0

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        drafter, rng = self.follower._drafter.inner, random.Random(0)
        propose = drafter.propose

        def sometimes(*args: Any) -> Any:
            if rng.random() < 0.05:
                Failing.raised += 1
                raise RuntimeError("on purpose")
            return propose(*args)

        drafter.propose = sometimes


def main() -> None:
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    engine = LLM(
        **job["arguments"], dtype="float32", max_model_len=1024, max_num_seqs=job["batch"], enable_prefix_caching=False,
        enforce_eager=True, disable_log_stats=False,
    )  # fmt: skip
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in job["max_tokens"]]
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    counted = {m.name: getattr(m, "value", None) for m in engine.get_metrics() if "spec_decode" in m.name}
    imported: Any = sys.modules.get("vllm_run")  # vLLM imports this file by that name
    raised = 0 if imported is None else imported.Failing.raised
    print(
        json.dumps(
            {"raised": raised, "outputs": [list(one.outputs[0].token_ids) for one in outputs], "counted": counted}
        )
    )


if __name__ == "__main__":
    main()
