"""Run foresay's drafters inside vLLM, in an environment that has both (docs/how-to/vllm.md).

python examples/vllm_arguments.py MODEL
"""

from __future__ import annotations

import json
import subprocess
import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    """Get vLLM's arguments from foresay, and generate with them."""
    command = [sys.executable, "-m", "foresay", "vllm-config", model, "--drafter", "suffix(keep=true)", "--json"]
    arguments = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    engine = LLM(**arguments)
    for output in engine.generate(["The sea is", "Once upon a time"], SamplingParams(temperature=0, max_tokens=32)):
        print(output.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["Qwen/Qwen2.5-0.5B-Instruct"])
