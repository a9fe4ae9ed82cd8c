"""Commands that run a model: their options and help pages."""

from __future__ import annotations

from foresay.cli import options as opt
from foresay.cli.command import command, group, option
from foresay.cli.options import raw
from foresay.server.settings import ServerSettings
from foresay.text.tool_calls.families import FORMATS

GENERATE = command(
    "generate",
    """Generate a continuation of one prompt.

    The output is the same as without speculation, unless the rule is lossy. A seed reproduces a sampled output.""",
    opt.PROMPT,
    option("--file FILE", "Read the prompt from a UTF-8 file."),
    opt.MODEL,
    opt.LOGPROBS,
    option("--lines", "Decode each line as a prompt, all in one batch."),
    opt.MAX_BATCH,
    opt.keep_prompts(),
    raw(),
    opt.TRACE,
    option("--compare", "Then decode without speculation and with each drafter; exit code 1 if the outputs differ."),
    option("--repeats N", "Runs of each method of --compare, in turns; the median is shown.", 1),
    opt.JSON,
    opt.DRAFT,
    opt.DRAFTERS_TO_COMPARE,
    opt.LENGTH,
    opt.RULE,
    opt.ALL_SAMPLING,
    opt.WORKERS,
    opt.ALL_MACHINE,
    examples="""
        foresay generate "Name three rivers." -m Qwen/Qwen2.5-0.5B-Instruct
        foresay generate "Name three rivers." --trace --compare --drafter suffix --drafter 'suffix(scale=2)'
        foresay generate --lines --json < prompts.txt > outputs.jsonl""",
)

CHAT = command(
    "chat",
    """Talk with a model; change how it decodes while it runs.

    /help lists the commands of the console.""",
    opt.WHICH,
    option("--system TEXT", "The system message."),
    option("--no-history", "Do not store what is entered."),
    opt.METHOD,
    opt.ALL_SAMPLING,
    opt.ALL_MACHINE,
    examples="""
        foresay chat Qwen/Qwen2.5-0.5B-Instruct
        foresay chat -t 0.7 --system 'Answer in one sentence.'""",
)

_DEFAULTS = ServerSettings()
_SERVER = group(
    "Server",
    option("--host ADDRESS", "Address to listen on.", _DEFAULTS.host),
    option("--port N", "Port; 0 takes a free one.", _DEFAULTS.port),
    option("--keys-file FILE", "Bearer keys, one a line, in addition to those of FORESAY_API_KEYS."),
    option("--open-to-all", "Accept other machines' requests without keys."),
    option("--cors ORIGIN...", "Origin whose pages may call the API, such as https://example.org, or *; repeatable."),
    option("--allow-host NAME...", "Further host name of this server, such as a proxy's; may be repeated."),
    option("--name NAME...", "Name of the model in the API; may be repeated.  [default: the model's]"),
    option(
        "--tool-format NAME",
        f"Format of the model's tool calls: auto (by its chat template), {', '.join(FORMATS)}.",
        _DEFAULTS.tool_format,
    ),
    option("--control-tokens", "Let control tokens in messages open turns; by default they are text."),
    option(
        "--memory DIR",
        "Folder that keeps outputs and prompts, from which later requests draft; apart for each API key.",
    ),
    option("--memory-prompts/--no-memory-prompts", "Keep prompts, not only outputs.", True),
    opt.keep_prompts(),
    option("--keep-prompts-gb N", "Gigabytes that this folder may take.  [default: 10]", type=float),
    option("--memory-shared", "Let requests of all API keys draft from each other's texts."),
    option(
        "--share-prefixes WITH",
        "Who reuses the work on a common beginning of prompts: requests of the same key, all or none.",
        _DEFAULTS.share_prefixes,
    ),
    option(
        "--pooling NAME",
        "Embeddings of requests that do not choose: mean (of all tokens' hidden states), or last (that of the last token).",
        _DEFAULTS.pooling,
    ),
    option(
        "--memory-limit SIZE",
        "Resident memory, such as 6GB, up to which caches grow and bodies of 64 KiB and more are read. Beyond it "
        "requests wait, or are answered with 503.",
    ),
    option("--max-waiting N", "Requests of one client that may wait; further ones get 429.", _DEFAULTS.max_waiting),
    option("--timeout X", "Longest duration of a request, in seconds.", _DEFAULTS.timeout_s),
    option("--drain X", "Seconds that running requests get to finish when the server stops.", _DEFAULTS.drain_s),
)

SERVE = command(
    "serve",
    """Serve a model through an OpenAI-compatible API.

    Requests share one engine with continuous batching. Each option can also be set by an environment variable
    FORESAY_SERVE_<OPTION>, such as FORESAY_SERVE_MODEL.""",
    opt.WHICH,
    option(
        "--sampling SOURCE",
        "Defaults of requests that leave sampling fields out: model (its generation config), or foresay.",
        "model",
    ),
    opt.MAX_BATCH,
    option("--warmup", "Decode a little before the first request."),
    option("--log-requests", "Log a line of JSON for each request, without its text."),
    opt.METHOD,
    _SERVER,
    opt.ALL_MACHINE,
    examples="""
        foresay serve Qwen/Qwen2.5-0.5B-Instruct --port 8000
        foresay serve models.toml --memory-limit 24GB
        foresay serve --host 0.0.0.0 --keys-file keys.txt""",
    variables="FORESAY_SERVE",
)

DEMO = command(
    "demo",
    """Decode a few prompts with and without speculation.

    Exit code 1 if an output differs.""",
    opt.WHICH,
    option("-n --max-new-tokens N", "Generate at most N tokens per prompt.", 128),
    examples="foresay demo\nforesay demo Qwen/Qwen2.5-0.5B-Instruct -n 64",
)

COMMANDS = (GENERATE, CHAT, SERVE, DEMO)
