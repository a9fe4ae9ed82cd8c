"""Generate with your own model: one prompt, a batch, a stream, and a comparison with plain decoding.

python examples/own_model.py MODEL
"""

from __future__ import annotations

import sys

import foresay
from foresay import SamplingParams


def main(name: str, tokens: int = 48) -> None:
    """Run every part. name: hub id, folder, GGUF file or alias. tokens: tokens to generate."""
    model = foresay.load(name)
    print(model.description)

    prompt = [{"role": "user", "content": "Name three rivers in Europe."}]
    if getattr(model.tokenizer, "chat_template", None) is None:
        prompt = prompt[0]["content"]  # a base model continues a text
    answer = model.generate(prompt, max_new_tokens=tokens)
    print(answer.text)
    print(f"{answer.stats.num_tokens} tokens in {answer.stats.num_passes} target passes")

    sampled = SamplingParams(max_new_tokens=tokens, temperature=0.8, top_p=0.95, seed=7)
    for one in model.generate(["The sea is", "Once upon a time"], [SamplingParams(max_new_tokens=12), sampled]):
        print(one.finish_reason, repr(one.text))

    for chunk in model.stream("Three colours:", max_new_tokens=tokens):
        print(chunk.text, end="", flush=True)
    print()

    plain = foresay.change(model, drafter="none").generate(prompt, max_new_tokens=tokens)
    print("same output without a drafter:", plain.token_ids == answer.token_ids)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["smollm2-135m"])
