"""Commands that list, prepare and describe: their options and help pages."""

from __future__ import annotations

from pathlib import Path

from foresay.cli import options as opt
from foresay.cli.command import argument, command, option
from foresay.cli.options import model

DRAFTS = command(
    "drafts",
    """List the drafts that exist for a model, and what each costs.

    They are found by the name that the model, or its base model, has on the hub: in a table of this version, in the hub's cache,
    and in the hub's own list. Without a network, or with HF_HUB_OFFLINE=1, the table and the cache remain, which is reported.

    Cost: bytes of the draft's weights / bytes that one pass of the target reads. Files that are here count with their size,
    others with 2 bytes a parameter; a mixture of experts with its active parameters. With the unit "token" the draft takes a
    pass for each draft token, with the unit "block" one for all of them. The best draft that is decoded here comes first.""",
    opt.WHICH,
    opt.JSON,
    examples="""
        foresay drafts Qwen/Qwen3-8B
        foresay drafts model.gguf --json""",
)

MEMORY = command(
    "memory",
    """Show the texts that a server keeps; add those of others.

    Texts are added by owner, without those that the memory has already.""",
    argument("DIR", "Folder of a memory.", Path),
    option("--add DIR...", "Add the texts of this memory, may be repeated; DIR is created if it is missing."),
    examples="foresay memory memory\nforesay memory all --add memory-1 --add memory-2",
)

INFO = command(
    "info",
    """Show versions, methods, or what a model or a table is.

    Without a model: versions, processor, kernels, caches and the example models. With a model: whether it is supported, or why
    not; exit code 2 if it is not. With an n-gram table: what it contains, as text if --model names its tokenizer.""",
    argument("[MODEL]", "Alias, hub id, folder, GGUF file or settings file; or an n-gram table.", name="subject"),
    model("none, show versions and caches"),
    option("--methods", "List drafters, rules and lengths with their settings."),
    option("--batch-size N", "Rows of the batch whose memory is estimated.", 32),
    option("--context N", "Tokens of each of these rows.  [default: 2048, or the model's context]"),
    opt.DTYPE,
    opt.WEIGHTS,
    opt.KV_CACHE,
    opt.DEVICE,
    opt.TRUST,
    opt.BACKEND,
    examples="""
        foresay info
        foresay info --methods
        foresay info Qwen/Qwen2.5-0.5B-Instruct --batch-size 8 --context 4096
        foresay info table.safetensors -m Qwen/Qwen2.5-0.5B-Instruct""",
)

PREPARE = command(
    "prepare",
    """Compile kernels and convert a model's weights in advance.

    Later commands load from the caches. Exit code 1 if the model's forward passes do not use compiled kernels.""",
    opt.WHICH,
    opt.DTYPE,
    opt.WEIGHTS,
    opt.TRUST,
    examples="foresay prepare\nforesay prepare model.gguf --weights int4",
)

VLLM_CONFIG = command(
    "vllm-config",
    """Print vLLM's arguments for a drafter or settings file.

    vLLM runs each draft by a method of its own. Write a head or a block drafter with `foresay export` first, and name that
    folder.""",
    opt.WHICH,
    option(
        "--drafter EXPRESSION",
        "head(FOLDER), block(FOLDER), model(FOLDER), mtp, prompt_lookup or none.  [default: prompt_lookup]",
    ),
    option("--length LENGTH", "Draft length: a number."),
    opt.JSON,
    examples="""
        foresay vllm-config Qwen/Qwen2.5-0.5B-Instruct --drafter prompt_lookup
        foresay vllm-config foresay.toml --json""",
)

COMMANDS = (DRAFTS, MEMORY, INFO, PREPARE, VLLM_CONFIG)
