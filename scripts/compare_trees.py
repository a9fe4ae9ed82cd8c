"""Tokens per second of two source trees of foresay, in turns of one run.

    python scripts/compare_trees.py OLD/src NEW/src [--turns 12] [--only "plain b1"]

Each tree has a process of its own, which loads the model once and then waits. The turns alternate, so that
other load on the machine affects both; the ratio is the median of the ratios of neighbouring turns. Nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

PROMPTS = [
    "Name three rivers of Europe and three of Asia.",
    "What is the capital of France, and what is it known for?",
    "A short poem about the sea:",
    "Explain why the sky is blue.",
]
CASES = {  # name: (drafter, prompts, new tokens)
    "plain b1": ("none", 1, 16),
    "suffix b1": ("suffix", 1, 24),
    "plain b32": ("none", 32, 6),
    "suffix b32": ("suffix", 32, 6),
}


def serve(model: str) -> None:
    """Child: each input line names a case, each output line has the tokens per second of its steps without prefill."""
    import foresay

    generator = foresay.load(model, drafter="none", max_batch_size=32)
    for line in sys.stdin:
        drafter, rows, tokens = CASES[line.strip()]
        prompts = (PROMPTS * 8)[:rows]
        changed = foresay.change(generator, drafter=drafter)
        results = changed.generate(prompts, max_new_tokens=tokens, ignore_eos=True)
        seconds = sum(step.total_s for step in results[0].steps)
        print(json.dumps(sum(len(r.token_ids) for r in results) / seconds), flush=True)


def spawn(src: str, model: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": src}
    command = [sys.executable, __file__, "--serve", "--model", model]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(child: subprocess.Popen[str], case: str) -> float:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(case + "\n")
    child.stdin.flush()
    return float(json.loads(child.stdout.readline()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--only", action="append", choices=list(CASES))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(given.model)
    if len(given.trees) != 2:
        parser.error("two source folders, please")
    children = [spawn(tree, given.model) for tree in given.trees]
    try:
        for case in given.only or CASES:
            for child in children:
                ask(child, case)  # the first turn warms up and is not counted
            speeds = []
            for turn in range(given.turns):
                order = (0, 1) if turn % 2 == 0 else (1, 0)  # neither tree always goes second
                got = {i: ask(children[i], case) for i in order}
                speeds.append((got[0], got[1]))
            old, new = (statistics.median(s[i] for s in speeds) for i in (0, 1))
            ratios = sorted(s[1] / s[0] for s in speeds)
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            ratio = statistics.median(ratios)
            print(f"{case:>11}: {old:7.2f} -> {new:7.2f} tokens/s, x{ratio:.3f} ({low:.3f} to {high:.3f})", flush=True)
    finally:
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
            child.wait()


if __name__ == "__main__":
    main()
