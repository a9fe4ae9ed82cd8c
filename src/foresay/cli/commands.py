"""The table of commands: summaries, examples and functions. Importing it imports no command."""

from __future__ import annotations

from foresay.cli.lazy import Entry

RUN, MEASURE, TRAIN, OTHER = "Run", "Measure", "Train", "Other"

COMMANDS = {
    "generate": Entry(
        "Generate a continuation of one prompt.",
        "generate:run",
        (
            'foresay generate "Name three rivers." -m Qwen/Qwen2.5-0.5B-Instruct',
            'foresay generate "Name three rivers." --trace --compare',
            "foresay generate --lines --json < prompts.txt > outputs.jsonl",
        ),
        RUN,
    ),
    "chat": Entry(
        "Talk with a model; change how it decodes while it runs.",
        "chat:run",
        ("foresay chat Qwen/Qwen2.5-0.5B-Instruct", "foresay chat -t 0.7 --system 'Answer in one sentence.'"),
        RUN,
    ),
    "serve": Entry(
        "Serve a model through an OpenAI-compatible API.",
        "serve:run",
        (
            "foresay serve Qwen/Qwen2.5-0.5B-Instruct --port 8000",
            "foresay serve --host 0.0.0.0 --keys-file keys.txt",
        ),
        RUN,
        variables="FORESAY_SERVE",
    ),
    "compare": Entry(
        "Decode one prompt with each method, side by side.",
        "compare:run",
        (
            'foresay compare "Name three rivers." -m Qwen/Qwen2.5-0.5B-Instruct',
            "foresay compare --file prompt.txt --drafter 'suffix(scale=2)' --repeats 3",
        ),
        RUN,
    ),
    "demo": Entry(
        "Decode a few prompts with and without speculation.",
        "demo:run",
        ("foresay demo", "foresay demo Qwen/Qwen2.5-0.5B-Instruct -n 64"),
        RUN,
    ),
    "record": Entry(
        "Record a model's outputs, for replaying drafters.",
        "record:run",
        ("foresay record outputs.jsonl -m Qwen/Qwen2.5-0.5B-Instruct --prompts prompts.jsonl -n 128",),
        MEASURE,
    ),
    "replay": Entry(
        "Measure drafters on a recording, without the model.",
        "replay:run",
        (
            "foresay replay outputs.jsonl --drafter suffix --drafter max_gram --length 4",
            "foresay replay outputs.jsonl --profile profile.json --length throughput",
        ),
        MEASURE,
    ),
    "check": Entry(
        "Check that outputs and tokens per pass did not change.",
        "check:run",
        (
            "foresay check outputs.jsonl --save check.json",
            "foresay check outputs.jsonl --drafter suffix --length 8 --against check.json --tolerance 0.1",
        ),
        MEASURE,
    ),
    "profile": Entry(
        "Time a model's forward passes on this machine.",
        "profile:run",
        (
            "foresay profile Qwen/Qwen2.5-0.5B-Instruct -o profile.json",
            "foresay profile --batch-size 1,8 --context 512",
        ),
        MEASURE,
    ),
    "simulate": Entry(
        "Predict throughput and latency under load.",
        "simulate:run",
        (
            "foresay simulate outputs.jsonl --profile profile.json --rate 1,2,4 --drafter suffix",
            "foresay simulate outputs.jsonl --profile profile.json --first-p99 1 --total-rate 100",
        ),
        MEASURE,
    ),
    "bench": Entry(
        "Time methods against plain decoding and other engines.",
        "bench:run",
        (
            "foresay bench results.jsonl -m Qwen/Qwen2.5-0.5B-Instruct --drafter suffix --count 12 -n 64",
            "foresay bench results.jsonl --batch-size 1,8 --against transformers",
        ),
        MEASURE,
    ),
    "tune": Entry(
        "Find the fastest settings here; write foresay.toml.",
        "tune:run",
        (
            "foresay tune Qwen/Qwen2.5-0.5B-Instruct --estimate",
            "foresay tune --prompts prompts.jsonl --latency 40 --batch-size 1,4,8 --yes",
        ),
        MEASURE,
    ),
    "report": Entry(
        "Write a report of benchmark results.", "report:run", ("foresay report results.jsonl -o report",), MEASURE
    ),
    "distill": Entry(
        "Train a draft head, block drafter or draft model.",
        "distill:run",
        (
            "foresay distill head -m Qwen/Qwen2.5-0.5B-Instruct --outputs outputs.jsonl --minutes 60",
            "foresay distill block --kind block --outputs outputs.jsonl --minutes 60 --precision bf16",
            "foresay distill draft --draft pruned --text corpus.txt",
        ),
        TRAIN,
    ),
    "prune": Entry(
        "Cut a smaller draft model out of a model's weights.",
        "prune:run",
        ("foresay prune Qwen/Qwen2.5-0.5B-Instruct pruned --layers 8",),
        TRAIN,
    ),
    "export": Entry(
        "Write a draft in another engine's format.",
        "export:run",
        ("foresay export head exported -m Qwen/Qwen2.5-0.5B-Instruct",),
        TRAIN,
    ),
    "acceptance-head": Entry(
        "Train a predictor of which draft tokens are accepted.",
        panel=TRAIN,
        commands={
            "data": Entry(
                "Draft after a target's outputs; record what it accepts.",
                "acceptance:data",
                ("foresay acceptance-head data accepted --drafter 'model(pruned)' --count 32 -n 24",),
            ),
            "train": Entry(
                "Train an acceptance head on recorded data.",
                "acceptance:train",
                ("foresay acceptance-head train predictor accepted",),
            ),
            "eval": Entry(
                "Measure how well an acceptance head predicts.",
                "acceptance:evaluate",
                ("foresay acceptance-head eval predictor accepted",),
            ),
        },
    ),
    "ngram": Entry(
        "Make n-gram tables from text, and inspect them.",
        panel=TRAIN,
        commands={
            "build": Entry(
                "Count the n-grams of text files; write a table.",
                "ngram:build",
                ("foresay ngram build corpus.txt -m Qwen/Qwen2.5-0.5B-Instruct -o table.safetensors --order 3",),
            ),
            "show": Entry(
                "Describe an n-gram table.",
                "ngram:show",
                ("foresay ngram show table.safetensors -m Qwen/Qwen2.5-0.5B-Instruct",),
            ),
        },
    ),
    "memory": Entry(
        "Show or merge the texts that a server keeps.",
        panel=OTHER,
        commands={
            "show": Entry("Show how much a memory has kept.", "memory:show", ("foresay memory show memory",)),
            "merge": Entry(
                "Add the texts of memories to another one, by owner.",
                "memory:merge",
                ("foresay memory merge all memory-1 memory-2",),
            ),
        },
    ),
    "info": Entry(
        "Show versions and caches, or what a model supports.",
        "info:run",
        ("foresay info", "foresay info Qwen/Qwen2.5-0.5B-Instruct --batch-size 8 --context 4096"),
        OTHER,
    ),
    "methods": Entry(
        "List drafters, rules and lengths with their settings.", "methods:run", ("foresay methods",), OTHER
    ),
    "prepare": Entry(
        "Compile kernels and convert a model's weights in advance.",
        "prepare:run",
        ("foresay prepare", "foresay prepare model.gguf --weights int4"),
        OTHER,
    ),
    "vllm-config": Entry(
        "Print vLLM's arguments for a drafter or settings file.",
        "vllm_config:run",
        (
            "foresay vllm-config Qwen/Qwen2.5-0.5B-Instruct --drafter prompt_lookup",
            "foresay vllm-config foresay.toml --json",
        ),
        OTHER,
    ),
}
"""Every command by name, in the order of the help page."""
