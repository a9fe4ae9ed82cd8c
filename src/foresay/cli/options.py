"""Options that several commands take, alone and in groups (see `option_groups`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError

_EXPRESSION = "an expression such as max_gram, suffix(scale=3), cascade(...); docs/drafters.md"

PromptArgument = Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")]
FileOption = Annotated[Path | None, typer.Option(help="Read the prompt from a UTF-8 file.")]
DEFAULT_MODEL = "smollm2-135m"
ModelOption = Annotated[
    str | None,
    typer.Option(
        help=f"Alias, hub id, folder, GGUF file, or settings (.toml). Default: foresay.toml here, else {DEFAULT_MODEL}."
    ),
]
DrafterOption = Annotated[str, typer.Option(help=f"auto, none or {_EXPRESSION}.")]
DraftersOption = Annotated[list[str] | None, typer.Option("--drafter", help=f"A further method: {_EXPRESSION}.")]
RawOption = Annotated[bool, typer.Option("--raw", help="No chat template: continue the text as it is.")]
TraceOption = Annotated[bool, typer.Option("--trace", help="Colour each token by who wrote it.")]
DtypeOption = Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")]
WeightsOption = Annotated[str, typer.Option(help="auto, bf16, int8 or int4; rounded weights are another model.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
ThreadsOption = Annotated[int | None, typer.Option(help="Processor threads; fewer on a machine that is busy.")]
BackendOption = Annotated[
    str | None,
    typer.Option(help="transformers, or llama.cpp for GGUF files (extra llamacpp).  [default: transformers]"),
]
GpuLayersOption = Annotated[
    int | None, typer.Option(help="Layers that llama.cpp puts on GPUs; all of them by default.")
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which weights."""

    model: ModelOption = None
    draft: Annotated[str | None, typer.Option(help="A draft model, named the same way.")] = None


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Draft length and acceptance rule."""

    num_draft_tokens: Annotated[int | None, typer.Option(help="Draft tokens per pass; 0 is plain decoding.")] = None
    length: Annotated[
        str | None,
        typer.Option(help="Length policy: a number, heuristic, confidence(0.4), entropy, throughput."),
    ] = None
    rule: Annotated[
        str | None,
        typer.Option(
            help="speculative (the default), block, match, coupled; lossy, output may differ: lenience(2), typical."
        ),
    ] = None

    @property
    def rule_name(self) -> str:
        """The rule, unless a settings file names another."""
        return "speculative" if self.rule is None else self.rule


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters of a request."""

    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens to write at most.")] = 256
    min_new_tokens: Annotated[int, typer.Option(help="Tokens to write at least.")] = 0
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Keep tokens this share as likely as the likeliest.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repetition.")] = 1.0
    presence_penalty: Annotated[float, typer.Option(help="Once per token already written.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="Per occurrence already written.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Makes a sampled output reproducible.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Write past the end token.")] = False

    def params(self, **more: Any) -> SamplingParams:
        """SamplingParams of these; ConfigError for one that a greedy output does not depend on."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        params = SamplingParams(**{**given, "stop": tuple(self.stop or ()), **more})
        if params.greedy:  # whoever gives one of these has forgotten the temperature
            for flag, used in idle(params).items():
                if used:
                    raise ConfigError(f"--{flag} changes nothing at temperature 0; add --temperature")
        return params


def idle(params: SamplingParams) -> dict[str, bool]:
    """Parameters without effect on greedy output -> whether they were set."""
    return {
        "seed": params.seed is not None,
        "top-k": params.top_k > 0,
        "top-p": params.top_p < 1,
        "min-p": params.min_p > 0,
    }


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """What it runs on."""

    dtype: DtypeOption = "auto"
    weights: WeightsOption = "auto"
    draft_weights: Annotated[str | None, typer.Option(help="The same for drafts; the output is the target's.")] = None
    device: DeviceOption = None
    draft_device: Annotated[str | None, typer.Option(help="Device of draft models; the target's by default.")] = None
    device_map: Annotated[
        str | None, typer.Option(help="Spread the layers over devices: auto, balanced, balanced_low_0, sequential.")
    ] = None
    max_memory: Annotated[
        str | None, typer.Option(help="With --device-map, the memory for weights on each device, as 0=20GB,cpu=60GB.")
    ] = None
    offload_folder: Annotated[
        Path | None, typer.Option(help="With --device-map, the folder for weights that fit on no device.")
    ] = None
    threads: ThreadsOption = None
    trust_remote_code: TrustOption = False
    backend: BackendOption = None
    gpu_layers: GpuLayersOption = None
