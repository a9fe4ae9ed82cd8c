"""Options that several commands take, alone and in groups, and the values that they make."""

from __future__ import annotations

from typing import Any

from foresay.cli.command import Option, argument, group, option
from foresay.errors import ConfigError

DRAFTING, MACHINE, SAMPLING = "Drafting", "Machine", "Sampling"
"""Headings of options in help pages."""
DEFAULT_MODEL = "smollm2-135m"
_ANY = "Alias, hub id, folder or GGUF file"
_EXPRESSION = "an expression such as max_gram, suffix(scale=3), cascade(...); see foresay info --methods"
_LENGTH = "a number, or a policy: heuristic, confidence(0.4), entropy, throughput"

# -- the model

MODEL_ARGUMENT = argument("[MODEL]", f"{_ANY}, or settings file (.toml).", name="model_argument")


def model(default: str = f"foresay.toml in this folder, else {DEFAULT_MODEL}", *, settings: bool = True) -> Any:
    """Return --model. settings: True if it may be a settings file."""
    return option("-m --model MODEL", f"{_ANY}{', or settings file (.toml)' * settings}.  [default: {default}]")


MODEL = model()
WHICH = (MODEL_ARGUMENT, MODEL)
"""The model as the argument or with -m."""
TARGET = model(DEFAULT_MODEL, settings=False)
PROMPT = argument("[PROMPT]", "The prompt, in quotes; '-' or none reads standard input.", many=True)

# -- drafting

DRAFTER = option("--drafter EXPRESSION", f"auto, none, published or {_EXPRESSION}.", "auto")
DRAFTERS = option(
    "--drafter EXPRESSION...", f"A drafter, may be repeated: {_EXPRESSION}.  [default: the n-gram drafters]"
)
DRAFTERS_TO_COMPARE = option(
    "--drafter EXPRESSION...",
    f"auto, none, published or {_EXPRESSION}. With --compare may be repeated.  "
    "[default: auto; compared: the n-gram drafters too]",
)
LENGTH = option("--length LENGTH", f"Draft length: {_LENGTH}; 0 is plain decoding.")
LENGTHS = option("--length LENGTH...", f"Draft length, may be repeated: {_LENGTH}.")
RULE = option(
    "--rule RULE",
    "Acceptance rule: speculative, block, match, coupled; lossy, the output may differ: lenience(2), typical."
    "  [default: speculative]",
)
DRAFT_WEIGHTS = option("--draft-weights FORMAT", "Weight format of draft models; never changes the target's output.")
DRAFT = group(
    DRAFTING,
    option("--draft MODEL", "A draft model: alias, hub id, folder or GGUF file."),
    DRAFT_WEIGHTS,
    option("--draft-device DEVICE", "Device of draft models.  [default: the target's]"),
)
group(DRAFTING, DRAFTER, DRAFTERS, DRAFTERS_TO_COMPARE, LENGTH, LENGTHS, RULE)
METHOD = (*DRAFT, DRAFTER, LENGTH, RULE)

# -- sampling

MAX_NEW_TOKENS = option("-n --max-new-tokens N", "Generate at most N tokens.  [default: 256]")
TEMPERATURE = option("-t --temperature X", "0 is greedy.  [default: 0]")
_CORE = (
    MAX_NEW_TOKENS,
    TEMPERATURE,
    option("--top-k N", "Sample from the N most likely tokens; 0 is all.  [default: 0]"),
    option("--top-p X", "Sample from the most likely tokens of this total probability.  [default: 1]"),
    option("--seed N", "Make a sampled output reproducible."),
    option("--ignore-eos", "Continue after the end-of-sequence token."),
)
BASIC_SAMPLING = group(SAMPLING, *_CORE)
"""Sampling of commands that measure."""
ALL_SAMPLING = group(
    SAMPLING,
    *_CORE,
    option("--min-p X", "Sample from tokens at least this fraction as likely as the most likely.  [default: 0]"),
    option("--min-new-tokens N", "Generate at least N tokens.  [default: 0]"),
    option("--repetition-penalty X", "Above 1 discourages repetition.  [default: 1, or the model's]"),
    option("--presence-penalty X", "Subtracted once from tokens already generated."),
    option("--frequency-penalty X", "Subtracted per occurrence already generated."),
    option("--stop TEXT...", "End before this text; may be repeated."),
    option(
        "--sampling SOURCE", "Defaults of sampling options: foresay (greedy), or model, those of its generation config."
    ),
)
LOGPROBS = option("--logprobs N", "Report log-probabilities, and those of the N most likely tokens; needs --json.")

# -- batches, workers, output


def keep_prompts() -> Option:
    """Return the option that names a folder of kept prompts."""
    return option(
        "--keep-prompts DIR",
        "Folder that keeps the keys and values of prompts, so that a later process need not prefill them. Its files hold prompts "
        "in the clear.",
    )


MAX_BATCH = option("--batch-size N", "Rows decoded at a time.  [default: the settings file's, else 32]")


def batch_sizes(default: str) -> Any:
    """Return --batch-size of a command that takes several."""
    return option("--batch-size N[,N...]", "Rows decoded at a time; several separated by commas.", default)


WORKERS = group(
    "Workers",
    option("--workers N", "Distribute the work over N processes, each with the model and a share of the cores."),
    option("--ray", "Workers are actors of a Ray cluster (extra ray)."),
)
JSON = option("--json", "Print JSON instead of text.")
TRACE = option("--trace", "Colour each token by its origin: draft, residual or bonus.")
FORCE = option("--force", "Replace an output that exists.")
OUTPUT = option("-o --output FILE", "Write the result here.")

# -- the machine

DTYPE = option("--dtype DTYPE", "Compute in auto, bf16, fp16 or fp32.", "auto")
WEIGHTS = option(
    "--weights FORMAT", "Weight format on a CPU: auto, bf16, int8 or int4. Rounded weights are another model.", "auto"
)
DEVICE = option("--device DEVICE", "cpu, cuda, cuda:1, ...  [default: a GPU if there is one]")
THREADS = option("--threads N", "Processor threads; fewer are faster next to other busy processes.")
TRUST = option("--trust-remote-code", "Run Python code that comes with a model.")
BACKEND = option(
    "--backend NAME", "transformers, or llama.cpp for GGUF files (extra llamacpp).  [default: transformers]"
)
GPU_LAYERS = option("--gpu-layers N", "Layers that llama.cpp puts on GPUs.  [default: all]")
KV_CACHE = option(
    "--kv-cache-dtype DTYPE",
    "Keys and values in the CPU kernels: auto, int8 (half of bf16's memory, another output).",
    "auto",
)
LORA = option(
    "--lora PATH[=SCALE]...",
    "A low-rank adapter to merge into the weights: a folder of peft or a GGUF file; may be repeated.",
)
READING = group(MACHINE, DTYPE, WEIGHTS, DEVICE, THREADS, TRUST)
"""Options of a command that only reads parts of a model."""
BASIC_MACHINE = group(MACHINE, *READING, BACKEND)
ALL_MACHINE = group(
    MACHINE,
    *READING,
    KV_CACHE,
    LORA,
    option("--device-map PLAN", "Spread the layers over devices: auto, balanced, balanced_low_0, sequential."),
    option("--max-memory SIZES", "With --device-map: memory for weights on each device, such as 0=20GB,cpu=60GB."),
    option("--offload-folder FOLDER", "With --device-map: folder for weights that fit on no device."),
    BACKEND,
    GPU_LAYERS,
)


def raw() -> Any:
    """Return --raw, without a heading of its own."""
    return option("--raw", "Continue texts as they are, without a chat template.")


def numbers(text: str, flag: str, low: int = 1) -> list[int]:
    """Return the integers of a list separated by commas, each once. Raises ConfigError, naming the flag, for one below `low`."""
    try:
        out = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError("must be integers separated by commas, such as 1,4,8", param=flag, value=text) from None
    if min(out) < low:
        raise ConfigError(f"must be integers of at least {low}", param=flag, value=text)
    return list(dict.fromkeys(out))
