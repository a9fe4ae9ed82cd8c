"""Options that several commands take, alone and in groups (see `option_groups`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError

DRAFTING, MACHINE, SAMPLING = "Drafting", "Machine", "Sampling"
"""Headings of options in help pages."""
DEFAULT_MODEL = "smollm2-135m"
_EXPRESSION = "an expression such as max_gram, suffix(scale=3), cascade(...); see foresay methods"
_LENGTH = "a number, or a policy: heuristic, confidence(0.4), entropy, throughput"
MODEL = "Alias, hub id, folder, GGUF file or settings file (.toml)."
_DEFAULT = f"[default: foresay.toml in this folder, else {DEFAULT_MODEL}]"

PromptArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PROMPT]", show_default=False, help="The prompt, in quotes; '-' or none reads standard input."
    ),
]
FileOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Read the prompt from a UTF-8 file.")]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=f"{MODEL}  {_DEFAULT}")]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help=f"Alias, hub id, folder or GGUF file.  [default: {DEFAULT_MODEL}]"
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="MODEL", rich_help_panel=DRAFTING, help="A draft model: alias, hub id, folder or GGUF file."
    ),
]
DrafterOption = Annotated[
    str, typer.Option(metavar="EXPRESSION", rich_help_panel=DRAFTING, help=f"auto, none or {_EXPRESSION}.")
]
DraftersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="EXPRESSION",
        rich_help_panel=DRAFTING,
        help=f"A drafter, may be repeated: {_EXPRESSION}.  [default: the n-gram drafters]",
    ),
]
LengthsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--length", metavar="LENGTH", rich_help_panel=DRAFTING, help=f"Draft length, may be repeated: {_LENGTH}."
    ),
]
LengthOption = Annotated[
    str | None, typer.Option(metavar="LENGTH", rich_help_panel=DRAFTING, help=f"Draft length: {_LENGTH}.")
]
RuleOption = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        rich_help_panel=DRAFTING,
        help="Acceptance rule: speculative, block, match, coupled; lossy, the output may differ: lenience(2), typical."
        "  [default: speculative]",
    ),
]
MaxBatchOption = Annotated[
    int | None, typer.Option("--batch-size", help="Rows decoded at a time.  [default: the settings file's, else 32]")
]
BatchSizeOption = Annotated[int, typer.Option(help="Rows decoded at a time.")]
BatchSizesOption = Annotated[
    str, typer.Option("--batch-size", metavar="N[,N...]", help="Rows decoded at a time; several separated by commas.")
]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the result here.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
SamplingSourceOption = Annotated[
    str | None,
    typer.Option(
        "--sampling",
        metavar="SOURCE",
        rich_help_panel=SAMPLING,
        help="Defaults of sampling options: foresay (greedy), or model, those of its generation config.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RawOption = Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")]
TraceOption = Annotated[
    bool, typer.Option("--trace", help="Colour each token by its origin: draft, residual or bonus.")
]
DtypeOption = Annotated[
    str, typer.Option(metavar="DTYPE", rich_help_panel=MACHINE, help="Compute in auto, bf16, fp16 or fp32.")
]
WeightsOption = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        rich_help_panel=MACHINE,
        help="Weight format on a CPU: auto, bf16, int8 or int4. Rounded weights are another model.",
    ),
]
KvCacheOption = Annotated[
    str,
    typer.Option(
        metavar="DTYPE",
        rich_help_panel=MACHINE,
        help="Keys and values in the CPU kernels: auto, int8 (half of bf16's memory, another output).",
    ),
]
ActivationsOption = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        rich_help_panel=MACHINE,
        help="Round inputs of linear layers on a CPU: auto, float32 (none), bf16 or int8.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE", rich_help_panel=MACHINE, help="cpu, cuda, cuda:1, ...  [default: a GPU if there is one]"
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(rich_help_panel=MACHINE, help="Processor threads; fewer are faster next to other busy processes."),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=MACHINE,
        help="transformers, or llama.cpp for GGUF files (extra llamacpp).  [default: transformers]",
    ),
]
GpuLayersOption = Annotated[
    int | None, typer.Option(rich_help_panel=MACHINE, help="Layers that llama.cpp puts on GPUs.  [default: all]")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", rich_help_panel=MACHINE, help="Run Python code that comes with a model.")
]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model of a command, as its argument or with --model. Raises ConfigError if both are given on the command line."""

    invocation: typer.Context
    model_argument: Annotated[str | None, typer.Argument(metavar="[MODEL]", show_default=False, help=MODEL)] = None
    model: ModelOption = None

    def __post_init__(self) -> None:
        source = self.invocation.get_parameter_source("model")
        if self.model_argument is not None and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"the model is given twice, as the argument {self.model_argument!r} and with --model {self.model!r}; drop one"
            )

    @property
    def name(self) -> str | None:
        """The argument, else the option or its environment variable; None if neither is given."""
        return self.model if self.model_argument is None else self.model_argument


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Target and draft model."""

    model: ModelOption = None
    draft: DraftOption = None


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Draft length and acceptance rule."""

    PANEL: ClassVar[str] = DRAFTING
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Draft tokens per pass, in place of --length; 0 is plain decoding.")
    ] = None
    length: LengthOption = None
    rule: RuleOption = None

    @property
    def rule_name(self) -> str:
        """The rule, "speculative" unless one is given."""
        return "speculative" if self.rule is None else self.rule


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters of a request."""

    PANEL: ClassVar[str] = SAMPLING
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", help="Generate at most N tokens.  [default: 256]")
    ] = None
    min_new_tokens: Annotated[int | None, typer.Option(help="Generate at least N tokens.  [default: 0]")] = None
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy.  [default: 0]")] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from the N most likely tokens; 0 is all.  [default: 0]")] = (
        None
    )
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens of this total probability.  [default: 1]"),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(help="Sample from tokens at least this fraction as likely as the most likely.  [default: 0]"),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 discourages repetition.  [default: 1, or the model's]")
    ] = None
    presence_penalty: Annotated[float, typer.Option(help="Subtracted once from tokens already generated.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="Subtracted per occurrence already generated.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Make a sampled output reproducible.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-sequence token.")] = False

    def params(self, source: str | None = None, **more: Any) -> SamplingParams:
        """Return SamplingParams of these options. Raises ConfigError for one that has no effect on greedy output.

        source: "model" leaves that check to `sampled`, which knows the model's own sampling.
        """
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        params = SamplingParams(**{name: value for name, value in given.items() if value is not None}, **more)
        if source != "model":
            refuse_idle(params)
        return params


def refuse_idle(params: SamplingParams) -> None:
    """Raise ConfigError for an option that has no effect on greedy output."""
    for flag, used in idle(params).items() if params.greedy else ():  # a forgotten --temperature
        if used:
            raise ConfigError(f"--{flag} has no effect at temperature 0; add --temperature, or drop it")


def idle(params: SamplingParams) -> dict[str, bool]:
    """Parameters without effect on greedy output -> True if set."""
    return {
        "seed": params.seed is not None,
        "top-k": params.top_k > 0,
        "top-p": params.top_p < 1,
        "min-p": params.min_p > 0,
    }


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """Number formats, devices and threads."""

    PANEL: ClassVar[str] = MACHINE
    dtype: DtypeOption = "auto"
    weights: WeightsOption = "auto"
    activations: ActivationsOption = "auto"
    kv_cache_dtype: KvCacheOption = "auto"
    draft_weights: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Weight format of draft models; never changes the target's output."),
    ] = None
    device: DeviceOption = None
    draft_device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Device of draft models.  [default: the target's]")
    ] = None
    device_map: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN", help="Spread the layers over devices: auto, balanced, balanced_low_0, sequential."
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="With --device-map: memory for weights on each device, such as 0=20GB,cpu=60GB."
        ),
    ] = None
    offload_folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With --device-map: folder for weights that fit on no device."),
    ] = None
    threads: ThreadsOption = None
    trust_remote_code: TrustOption = False
    backend: BackendOption = None
    gpu_layers: GpuLayersOption = None
