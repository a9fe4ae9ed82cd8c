"""Commands that measure: their options and help pages."""

from __future__ import annotations

from pathlib import Path

from foresay.cli import options as opt
from foresay.cli.command import argument, group, option
from foresay.cli.options import batch_sizes, model, raw
from foresay_lab.commands import command
from foresay_lab.commands.options import CHOICE, DATA, PROMPTS, SOURCE, SOURCES

RECORD = command(
    "record",
    """Record a model's outputs, for replaying drafters.

    `foresay replay`, `simulate`, `tune` and `distill` read the recording.""",
    argument("OUTPUT", "The recording to write; one that exists is continued.", Path),
    opt.MODEL,
    opt.MAX_BATCH,
    opt.LOGPROBS,
    DATA,
    opt.BASIC_SAMPLING,
    opt.WORKERS,
    opt.BASIC_MACHINE,
    examples="foresay record outputs.jsonl -m Qwen/Qwen2.5-0.5B-Instruct --prompts prompts.jsonl -n 128",
)

REPLAY = command(
    "replay",
    """Measure drafters on a recording, without the model.

    Prints tokens per pass and acceptance of each drafter and length. The model is loaded only for a drafter that needs its
    tokenizer or layers. --output is extended: results that it contains are not computed again. --prompts are the prompts of a
    log of tensors.""",
    argument("RECORDING...", "Recordings; also logs of printed tensors, and CS-Drafting's caches.", Path),
    model("the recording's"),
    option("--batch-size N", "Rows decoded at a time.", 1),
    option("--profile FILE", "A profile of the target: adds predicted speeds; --length throughput needs it."),
    option(
        "--costs TABLE=NAME",
        "Cost table of the standardized walltime improvement (SWI), model_parameters, previous_work or a JSON file, and "
        "the target's name in it.",
    ),
    opt.OUTPUT,
    opt.JSON,
    opt.DRAFTERS,
    opt.LENGTHS,
    group(PROMPTS, SOURCE, raw()),
    opt.WORKERS,
    opt.READING,
    examples="""
        foresay replay outputs.jsonl --drafter suffix --drafter max_gram --length 4
        foresay replay outputs.jsonl --profile profile.json --length throughput""",
)

CHECK = command(
    "check",
    """Check that outputs and tokens per pass did not change.

    A test for continuous integration. Exit code 1 if an output differs from the recorded one, or if tokens per pass of all
    prompts, or of a category with at least 500 tokens, fell by more than --tolerance since the file of --against. The draft
    length is constant by default, and --length throughput is refused: it depends on time.""",
    argument("RECORDING", "The recording, from foresay record.", Path),
    model("the recording's"),
    opt.MAX_BATCH,
    option("--limit N", "Decode the first N prompts only."),
    option("--save FILE", "Write this run's tokens per pass."),
    option("--against FILE", "Compare tokens per pass with those of a file from --save."),
    option("--tolerance X", "Accept this relative loss of tokens per pass.  [default: 0.05]"),
    opt.JSON,
    opt.DRAFTER,
    opt.LENGTH,
    opt.RULE,
    opt.BASIC_MACHINE,
    examples="""
        foresay check outputs.jsonl --save check.json
        foresay check outputs.jsonl --drafter suffix --length 8 --against check.json --tolerance 0.1""",
)

PROFILE = command(
    "profile",
    """Time a model's forward passes on this machine.

    Prints the duration of a pass by batch size, draft length and context, next to the lower bound that memory bandwidth sets.
    The profile is cached; --output writes it to a file for foresay replay and simulate.""",
    opt.WHICH,
    batch_sizes("1,2,4,8"),
    option(
        "--length N[,N...]", "Draft tokens scored per row; each row is scored for one token more.", "0,1,2,3,4,5,6,8"
    ),
    option("--context N[,N...]", "Tokens of a row; only the first with all draft lengths.", "128,512"),
    option("--repeats N", "Passes of each kind; the median is taken.", 7),
    option("--fresh", "Measure again what the cache contains."),
    opt.OUTPUT,
    opt.JSON,
    opt.BASIC_MACHINE,
    examples="""
        foresay profile Qwen/Qwen2.5-0.5B-Instruct -o profile.json
        foresay profile --batch-size 1,8 --context 512""",
)

SIMULATE = command(
    "simulate",
    """Predict throughput and latency under load.

    The engine's own loop decodes the recorded outputs, with and without speculation, and the profile gives the duration of each
    pass. A server's own overhead of some milliseconds is not included.""",
    argument("RECORDING", "A greedy recording of the target's outputs.", Path),
    model("the recording's"),
    option("--profile FILE", "A profile of the target (foresay profile -o FILE).", required=True),
    option("--batch-size N", "Rows decoded at a time.", 32),
    opt.JSON,
    group(
        opt.DRAFTING,
        option(
            "--drafter EXPRESSION...", "A drafter to compare with plain decoding; may be repeated.  [default: suffix]"
        ),
        opt.LENGTH,
    ),
    group(
        "Arrivals",
        option("--rate X[,X...]", "Requests per second, several separated by commas.", "1,2,4,8"),
        option("--burst N", "Requests that arrive at once.", 1),
        option("--requests N", "Requests of each load.", 200),
        option("--seed N", "Seed of the arrival times.", 0),
        option("--trace FILE", "Arrival times in seconds, one a line, in place of the options above."),
    ),
    group(
        "Latency targets",
        option("--first-p99 X", "Seconds to the first token, for 99% of the requests."),
        option("--gap-p99 X", "Seconds between two events of a stream, for 99% of them."),
        option("--total-rate X", "Also print how many engines serve this many requests per second within the targets."),
    ),
    opt.READING,
    examples="""
        foresay simulate outputs.jsonl --profile profile.json --rate 1,2,4 --drafter suffix
        foresay simulate outputs.jsonl --profile profile.json --first-p99 1 --total-rate 100""",
)

BENCH = command(
    "bench",
    """Time methods against plain decoding and other engines.

    Every run is written to the results file (see foresay report). Exit code 1 if an exact method's output differs from plain
    decoding's, or if nothing could be run.""",
    argument("OUTPUT", "The results file to write; one that exists is continued.", Path),
    opt.MODEL,
    option(
        "--against ENGINE...",
        "Another engine, may be repeated: transformers, or with cache=static, assistant=MODEL or lookup=N.",
    ),
    batch_sizes("1"),
    option("--repeats N", "Runs of each method, in turns; the median is shown.", 3),
    option("--report FOLDER", "Also write the report of the results (see foresay report)."),
    option("--specdec FILE", "Write SpecDec++'s result record: one method with a draft model, batch size 1."),
    opt.DRAFTERS,
    opt.LENGTHS,
    opt.RULE,
    opt.DRAFT_WEIGHTS,
    SOURCES,
    CHOICE,
    group(opt.SAMPLING, option("-t --temperature X...", "Run at this temperature; may be repeated.  [default: 0]")),
    [one for one in opt.BASIC_SAMPLING if one is not opt.TEMPERATURE],
    opt.WORKERS,
    opt.BASIC_MACHINE,
    examples="""
        foresay bench results.jsonl -m Qwen/Qwen2.5-0.5B-Instruct --drafter suffix --count 12 -n 64
        foresay bench results.jsonl --batch-size 1,8 --against transformers""",
)

WORTH = command(
    "worth",
    """Find out within a minute whether speculation pays here.

    Records outputs of some prompts of each kind, times passes of a few widths, replays the default drafter on the outputs, and
    runs it live next to plain decoding. Prints the gains by kind of prompt and the command to use. `foresay tune` compares more
    methods and takes longer.""",
    opt.WHICH,
    option("--draft MODEL", "Also predict a draft model."),
    option("--seconds X", "Time for all, loading included: prompts, methods and live runs are as many as fit.", 60.0),
    opt.JSON,
    SOURCE,
    opt.BASIC_MACHINE,
    examples="""
        foresay worth Qwen/Qwen2.5-0.5B-Instruct
        foresay worth model.gguf --draft small.gguf --seconds 120""",
)

TUNE = command(
    "tune",
    """Find the fastest settings here; write foresay.toml.

    Records outputs, times forward passes, replays every candidate on them, and runs the best candidates and the model's own
    default live, for half of the time at least. If the default is best, nothing is written unless --output is given. Other
    commands read foresay.toml in their folder. The outputs of an interrupted run are kept for the next one.""",
    opt.WHICH,
    batch_sizes("1"),
    option("--latency X", "Latency target: milliseconds between two tokens of a request. Also chooses the batch size."),
    option("--recording FILE", "A recording of this model, in place of --prompts."),
    option("-n --max-new-tokens N", "Tokens recorded of each output.", 96),
    option("-o --output FILE", "The settings file to write.", "foresay.toml"),
    opt.FORCE,
    option("--minutes X", "Time for all, loading included: prompts, candidates and live runs are as many as fit.", 3.0),
    opt.DRAFTERS,
    opt.LENGTHS,
    group(
        opt.DRAFTING,
        option("--draft MODEL", "Also try a draft model: lengths, confidence thresholds, and cascades with max_gram."),
    ),
    DATA,
    opt.BASIC_MACHINE,
    examples="""
        foresay tune Qwen/Qwen2.5-0.5B-Instruct
        foresay tune --prompts prompts.jsonl --latency 40 --batch-size 1,4,8""",
)

REPORT = command(
    "report",
    """Write a report of benchmark results.

    The folder gets report.html, one page with the table, the figures and sampled outputs.""",
    argument("RESULTS...", "Results of foresay bench; several are merged.", Path),
    option("-o --output FOLDER", "The folder to write to.", "report"),
    option("--title TEXT", "Title of the report."),
    examples="foresay report results.jsonl -o report",
)

COMMANDS = (RECORD, REPLAY, CHECK, PROFILE, SIMULATE, BENCH, WORTH, TUNE, REPORT)
