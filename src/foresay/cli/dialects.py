"""Options, commands and variables of other engines, and foresay's words for them; docs/how-to/coming-from.md has all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import click

PAGE = "docs/how-to/coming-from.md"
OPTIONS = {
    "--max-num-seqs": "--batch-size",
    "--max-model-len": "not needed: the context is the model's own, and --memory-limit bounds memory",
    "--gpu-memory-utilization": "--memory-limit",
    "--api-key": "--keys-file, or the variable FORESAY_API_KEYS",
    "--served-model-name": "--name",
    "--enable-prefix-caching": "not needed: it is on; --share-prefixes none turns it off",
    "--tool-call-parser": "--tool-format",
    "--generation-config": "--sampling",
    "--quantization": "--weights, or a GGUF file",
    "--tensor-parallel-size": "--device-map",
    "--speculative-config": "--drafter, --draft and --length",
    "-c": "not needed: the context is the model's own",
    "--ctx-size": "not needed: the context is the model's own",
    "-t": "--threads",
    "-ngl": "--device cuda, or --backend llama.cpp --gpu-layers",
    "--n-gpu-layers": "--device cuda, or --backend llama.cpp --gpu-layers",
    "-np": "--batch-size",
    "-md": "--draft",
    "--model-draft": "--draft",
    "--draft-max": "--length",
    "--draft-p-min": '--length "confidence(P)"',
    "--temp": "--temperature",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "--jinja": "not needed: the model's chat template is always used",
}
"""Options of vLLM and llama.cpp: what takes their part here."""
COMMANDS = {
    "run": "foresay chat MODEL, or foresay generate PROMPT -m MODEL",
    "show": "foresay info MODEL",
    "list": "foresay info, which names the models that are here",
    "ls": "foresay info, which names the models that are here",
    "ps": "the models of a server: GET /v1/models",
    "pull": "the name of a hub's model, in any command that takes a MODEL",
}
"""Commands of Ollama."""
VARIABLES = {
    "OLLAMA_HOST": "--host and --port",
    "OLLAMA_NUM_PARALLEL": "--batch-size",
    "OLLAMA_KV_CACHE_TYPE": "--kv-cache-dtype",
    "VLLM_API_KEY": "--keys-file, or FORESAY_API_KEYS",
}
"""Variables that other servers read."""


def hint(error: click.ClickException, args: Sequence[str]) -> str:
    """Return what foresay has in place of another engine's option or command that was typed; "" for none.

    args: the whole command line.
    """
    if isinstance(error, click.NoSuchCommand) and error.command_name in COMMANDS:
        return f"In foresay it is {COMMANDS[error.command_name]}; see {PAGE}."
    context = getattr(error, "ctx", None)
    own = {flag for one in (context.command.params if context else ()) for flag in (*one.opts, *one.secondary_opts)}
    typed = (arg.partition("=")[0] for arg in args)
    name = next((one for one in typed if one in OPTIONS and one not in own), None)
    return "" if name is None else f"In foresay {name} is {OPTIONS[name]}; see {PAGE}."


def unread(environment: Mapping[str, str], names: Iterable[str] = VARIABLES) -> Iterator[str]:
    """Yield a line for each variable of other servers that is set, which a server of foresay does not read."""
    for name in names:
        if environment.get(name):
            yield f"{name} is not read; in foresay it is {VARIABLES[name]}"
