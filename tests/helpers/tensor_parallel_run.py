"""The output of one process of a tensor-parallel run, as JSON: `torchrun ... tensor_parallel_run.py TARGET DRAFT OUT`.

With a fifth argument, that of a process which ends before the second prompt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import foresay

PROMPTS = ["the number 7", "hello hello hello", "a b c a b c a", "some words, and some more words"]
WAYS: dict[str, dict[str, Any]] = {
    "adaptive, sampled": {"drafter": "suffix", "length": "throughput", "temperature": 0.8, "seed": 3},
    "drafted": {"draft": True, "num_draft_tokens": 3},
    "drafted, adaptive": {"draft": True, "length": "throughput"},
    "drafted, unsure, sampled": {"draft": True, "length": "confidence(0.2)", "temperature": 0.7, "seed": 5},
    "self, sampled": {"drafter": "self(1)", "num_draft_tokens": 2, "temperature": 0.9, "seed": 1},
}
NEW = 12


def written(target: str, draft: str, **options: Any) -> dict[str, list[list[int]]]:
    """The tokens of each way, in float32; for drafts of fixed length, the accepted draft tokens of each step too."""
    out = {}
    for name, way in WAYS.items():
        settings, sampling = dict(way), {}
        for key in ("temperature", "seed"):
            if key in settings:
                sampling[key] = settings.pop(key)
        drafts = (draft,) if settings.pop("draft", False) else ()
        model = foresay.load(target, *drafts, dtype="fp32", max_batch_size=3, **settings, **options)
        made = model.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, **sampling)
        out[name] = [one.token_ids for one in made]
        if "num_draft_tokens" in way:  # other lengths may adapt to what pays on this machine
            drafted, accepted = (
                sum(getattr(one.stats, key) for one in made) for key in ("num_drafted", "num_accepted")
            )
            assert 0 < accepted < drafted, (name, accepted, drafted)
            out[f"{name}: accepted"] = [[step.num_accepted for step in one.steps] for one in made]
    return out


def unseeded(target: str, **options: Any) -> list[list[int]]:
    """Sampled without a seed: no one knows what, but all processes the same."""
    model = foresay.load(target, drafter="suffix", dtype="fp32", **options)
    made = model.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, temperature=1.0)
    return [[*one.token_ids, one.seed or 0] for one in made]


def main() -> None:
    target, draft, out = sys.argv[1:4]
    rank = int(os.environ["RANK"])
    if len(sys.argv) > 4:
        model = foresay.load(target, drafter="suffix", dtype="fp32", tp_plan="auto")
        model.generate(PROMPTS[0], max_new_tokens=NEW)
        if rank == int(sys.argv[4]):
            os._exit(7)
        model.generate(PROMPTS[1], max_new_tokens=400, ignore_eos=True)
        return
    found = written(target, draft, tp_plan="auto") | {"unseeded": unseeded(target, tp_plan="auto")}
    (Path(out) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()  # else its threads may abort a process that exits


if __name__ == "__main__":
    main()
