"""One run of vLLM in its own environment: a job as JSON on stdin, outputs and counts as the last line of stdout."""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    engine = LLM(
        **job["arguments"], dtype="float32", max_model_len=1024, enable_prefix_caching=False,
        enforce_eager=True, disable_log_stats=False,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    counted = {m.name: getattr(m, "value", None) for m in engine.get_metrics() if "spec_decode" in m.name}
    print(json.dumps({"outputs": [list(one.outputs[0].token_ids) for one in outputs], "counted": counted}))


if __name__ == "__main__":
    main()
