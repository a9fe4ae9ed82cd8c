"""Options of loading a model, validated before any file is read.

Owns the names of dtypes and devices. Loads nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from foresay.checks import check_int
from foresay.errors import ConfigError, UnknownNameError
from foresay.models.hardware import Hardware

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
DTYPES |= {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
WEIGHTS = {"auto": None, "bf16": None, "int8": 8, "int4": 4}
"""Weight formats, and the number of bits of rounded ones."""
ACTIVATIONS = ("float32", "bf16", "int8")
"""Roundings of the inputs of linear layers in the CPU kernels."""
KV_CACHE_DTYPES = ("auto", "int8")
DEVICES = ("cpu", "cuda", "mps", "xpu")
TRANSFORMERS, LLAMA_CPP = BACKENDS = ("transformers", "llama.cpp")
"""Engines that compute the forward passes."""
_FOLLOWED = (
    *("dtype", "weights", "activations", "kv_cache_dtype", "reproducible"),
    *("lora", "device_map", "quantization_config", "tp_plan"),
)
"""Options that have no effect with llama.cpp."""
_CONTRADICTIONS = (
    ("device", "device_map"),
    *(("lora", name) for name in ("tp_plan", "quantization_config")),
    *(("tp_plan", name) for name in ("device", "device_map", "quantization_config")),
    *(("tp_plan", name) for name in ("weights", "activations", "kv_cache_dtype")),
    *((name, "quantization_config") for name in ("weights", "draft_weights")),
)
"""Pairs of options of which only one may be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of loading a model.

    Raises:
        ConfigError: Values that are unknown, contradict each other or need a device that is not available.
    """

    dtype: str | torch.dtype = "auto"
    """"auto": bf16 if the processor computes in it natively or our kernels run whole passes, else float32."""
    device: str | torch.device | None = None
    """Device of the model; None uses the GPU if there is one."""
    weights: str = "auto"
    """Format of the weights of linear layers on a CPU: "auto" as given by `dtype`, except for GGUF files, whose 4-bit blocks
    are kept; "bf16" for any file; "int8" (a scale per 32 weights) and "int4" (scale and offset per 32 weights) round them, which
    makes another model with other outputs."""
    activations: str = "auto"
    """Rounding of the inputs of linear layers in the compiled CPU kernels: "float32" for none; "bf16", the default for bf16
    weights if the processor multiplies in it; "int8" (in groups of 32), the default for weights of 8 bits and fewer, as in other
    engines. Does not apply to draft models."""
    kv_cache_dtype: str = "auto"
    """Format of keys and values: "auto" for the model's dtype; "int8" for 8 bits with a scale per head and token, in the compiled
    CPU kernels: about half of bf16's memory, and another output. Does not apply to draft models."""
    reproducible: bool | None = None
    """On a GPU with foresay's kernels, None: a token's scores do not depend on the other tokens of passes that score up to 512.
    True: prompts are computed in the same way, which may be slower, so that no text depends on what else is decoded. False lets a
    library multiply, which may be faster for many rows; a draft may then decide between two nearly equal tokens."""
    draft_weights: str | None = None
    """`weights` of draft models loaded by name; None: as the target's. Does not change the output, which is the target's."""
    device_map: str | Mapping[str, Any] | None = None
    """Distribution of layers over devices, as in accelerate: "auto", "balanced", or a device per module."""
    max_memory: Mapping[int | str, int | str] | None = None
    """With device_map, the maximum bytes of weights per device: {0: "20GB", "cpu": "60GB"}."""
    offload_folder: str | None = None
    """Folder for weights that device_map assigns to "disk", unless accelerate reads them from the model's own files."""
    draft_device: str | torch.device | None = None
    """Device of draft models loaded by name; None: as the target's."""
    quantization_config: Any = None
    """A configuration with which transformers quantizes the weights; passed on unchanged."""
    tp_plan: str | None = None
    """Tensor parallelism over the processes that torchrun started: "auto"; passed to transformers unchanged."""
    lora: str | Sequence[str] | None = None
    """Low-rank adapters to merge into the weights: folders of peft or GGUF files, PATH or PATH=SCALE. Drafts stay as they are."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; passed to transformers unchanged."""
    trust_remote_code: bool = False
    """Run a model's own Python code; passed to transformers unchanged."""
    backend: str = TRANSFORMERS
    """"llama.cpp" computes a GGUF file, or an alias, by llama.cpp's kernels in its stored blocks."""
    gpu_layers: int | None = None
    """Number of layers that llama.cpp puts on GPUs; None: all, if it was built for GPUs and one is available."""
    progress: Callable[[str], None] | None = field(default=None, compare=False)
    """Called with a message before each operation that may take long."""

    @classmethod
    def of(cls, given: Mapping[str, Any], others: Iterable[str] = ()) -> LoadOptions:
        """Return options by name.

        Args:
            given: Values by name.
            others: Further names that the error may suggest.

        Raises:
            UnknownNameError: A name that is no option.
        """
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise UnknownNameError("option", name, [*cls.__dataclass_fields__, *others])
        return cls(**given)

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str) and self.dtype != "auto" and self.dtype not in DTYPES:
            raise UnknownNameError("dtype", self.dtype, ["auto", *DTYPES])
        for name in ("max_memory", "offload_folder"):
            if getattr(self, name) is not None and self.device_map is None:
                text = "only has an effect with {device_map}; add that"
                raise ConfigError(text, param=name, value=getattr(self, name), device_map="auto")
        if not isinstance(self.dtype, str) and self.dtype not in DTYPES.values():
            text = f"must be 'auto', {', '.join(map(repr, DTYPES))} or such a torch.dtype"
            raise ConfigError(text, param="dtype", value=self.dtype)
        for name in ("device", "draft_device"):
            if getattr(self, name) is not None:
                check_device(getattr(self, name), name)
        if self.activations not in ("auto", *ACTIVATIONS):
            raise UnknownNameError("activations", self.activations, ("auto", *ACTIVATIONS))
        if not isinstance(self.reproducible, bool | None):
            raise ConfigError("must be True, False or None", param="reproducible", value=self.reproducible)
        if self.reproducible is False and (self.device_map is not None or not self.hardware.gpu_kernels):
            where = self.device_map or self.computes_on
            text = f"applies to foresay's kernels for GPUs, and the model would be on {str(where)!r}; drop it"
            raise ConfigError(text, param="reproducible", value=False)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UnknownNameError("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        self._check_pairs()
        for name, weights in (("weights", self.weights), ("draft_weights", self.draft_weights)):
            if weights is not None:
                self._check_weights(name, weights)
        self._check_backend()

    def _check_pairs(self) -> None:
        """Check that no two options contradict each other, and that there are several processes for tp_plan."""
        for one, other in _CONTRADICTIONS:
            if self._is_given(one) and self._is_given(other):
                value, against = getattr(self, one), getattr(self, other)
                shown = {other: against if isinstance(against, str) else ...}
                text = f"and {{{other}}} contradict; give one of them"
                raise ConfigError(text, param=one, value=str(value) if one == "device" else value, **shown)
        if self.tp_plan is not None and int(os.environ.get("WORLD_SIZE", "1")) < 2:
            text = "needs several processes, and there is only this one; start them with: torchrun --nproc-per-node N"
            raise ConfigError(text, param="tp_plan", value=self.tp_plan)

    def _is_given(self, name: str) -> bool:
        """Return True for an option that is not its default; for weights, if they are rounded."""
        value = getattr(self, name)
        if name in ("weights", "draft_weights"):
            return WEIGHTS.get(value) is not None
        return bool(value != self.__dataclass_fields__[name].default)

    def _check_backend(self) -> None:
        if self.backend not in BACKENDS:
            raise UnknownNameError("backend", self.backend, BACKENDS)
        if self.backend == TRANSFORMERS:
            if self.gpu_layers is not None:
                text = "is for {backend}; drop it, or give that"
                raise ConfigError(text, param="gpu_layers", value=self.gpu_layers, backend=LLAMA_CPP)
            return
        if self.gpu_layers is not None:
            check_int("gpu_layers", self.gpu_layers, 0)
        if self.gpu_layers and self.device is not None and torch.device(self.device).type == "cpu":
            text = "and {device} contradict; drop one"
            raise ConfigError(text, param="gpu_layers", value=self.gpu_layers, device=str(self.device))
        for name in _FOLLOWED:
            value = getattr(self, name)
            if value not in (None, "auto", True) or (name == "device_map" and value is not None):
                text = "has no effect with llama.cpp, which follows the file; drop it"
                raise ConfigError(text, param=name, value=value)

    def _check_weights(self, name: str, weights: str) -> None:
        if weights not in WEIGHTS:
            raise UnknownNameError(name, weights, WEIGHTS)
        if weights == "auto":
            return
        if name == "weights" and self.dtype not in ("auto", "bf16", "bfloat16", torch.bfloat16):
            text = "computes in bf16, and {dtype} was given; drop one"
            raise ConfigError(text, param=name, value=weights, dtype=str(self.dtype))
        if WEIGHTS[weights] is None:
            return
        elsewhere = str(self.computes_on if self.device_map is None else self.device_map)
        if name == "draft_weights":  # without a device a draft is where its target is, which may be an object
            elsewhere = str(self.draft_device or self.device or self.device_map or "cpu")
        is_gpu = self.device_map is None and Hardware(torch.device(elsewhere)).gpu_kernels
        if elsewhere.partition(":")[0] != "cpu" and not is_gpu:
            text = (
                f"is for CPUs, but the model would be on {elsewhere!r}; give {{device}}, load a checkpoint quantized by "
                "AWQ, GPTQ, bitsandbytes or torchao, or give {quantization_config}"
            )
            raise ConfigError(text, param=name, value=weights, device="cpu", quantization_config=...)

    def changed(self) -> str:
        """Return the names of the options that differ from their defaults."""
        fields = dataclasses.fields(self)
        return ", ".join(f.name for f in fields if f.compare and getattr(self, f.name) != f.default)

    @property
    def computes_in(self) -> str | torch.dtype:
        """The dtype requested by `dtype` or `weights`."""
        return self.dtype if self.weights == "auto" else torch.bfloat16

    @property
    def computes_on(self) -> torch.device:
        """The requested device; by default a GPU if there is one."""
        if self.device is not None:
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def hardware(self) -> Hardware:
        """The requested device and its kernels."""
        return Hardware(self.computes_on)

    @property
    def bits(self) -> int | None:
        """Number of bits of rounded weights; None if they are not rounded."""
        return WEIGHTS[self.weights]

    @property
    def exposes_hidden_states(self) -> bool:
        """True if a target loaded with these options returns the hidden states that a draft head reads."""
        return self.backend == TRANSFORMERS and self.tp_plan is None

    def for_draft(self, *, gguf: bool = True) -> LoadOptions:
        """Return the options of a draft model.

        Args:
            gguf: True if llama.cpp can read it; otherwise transformers computes it.
        """
        changes: dict[str, Any] = {"revision": None, "draft_weights": None, "draft_device": None, "activations": "auto"}
        changes |= {"kv_cache_dtype": "auto", "reproducible": None, "lora": None}
        if self.draft_device is not None:
            changes |= dict.fromkeys(("device_map", "max_memory", "offload_folder", "tp_plan", "gpu_layers"))
            changes |= {"device": self.draft_device}
        if self.draft_weights is not None and self.draft_weights != self.weights:
            changes |= {"weights": self.draft_weights, "dtype": self.dtype if self.draft_weights == "auto" else "auto"}
        if self.backend == LLAMA_CPP and not gguf:
            changes |= {"backend": TRANSFORMERS, "gpu_layers": None}
        return dataclasses.replace(self, **changes)


class LoadKeywords(TypedDict, total=False):
    """Fields of LoadOptions as keyword arguments of `foresay.load`, for editors and type checkers."""

    dtype: str | torch.dtype
    device: str | torch.device | None
    weights: str
    activations: str
    kv_cache_dtype: str
    reproducible: bool | None
    draft_weights: str | None
    device_map: str | Mapping[str, Any] | None
    max_memory: Mapping[int | str, int | str] | None
    offload_folder: str | None
    draft_device: str | torch.device | None
    quantization_config: Any
    tp_plan: str | None
    lora: str | Sequence[str] | None
    revision: str | None
    trust_remote_code: bool
    backend: str
    gpu_layers: int | None
    progress: Callable[[str], None] | None


def check_device(device: str | torch.device, name: str = "device") -> None:
    """Raise ConfigError, which names the argument, for a device that PyTorch does not know or that is not available."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in DEVICES:
        raise ConfigError(f"is not a device; known kinds: {', '.join(DEVICES)}", param=name, value=device)
    if found.type == "cpu":
        return
    of_kind: Any = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.mps}[found.type]
    if not of_kind.is_available():
        what = "GPU" if found.type == "cuda" else f"device of the kind {found.type}"
        raise ConfigError(f"was requested, but PyTorch sees no {what}; use 'cpu'", param=name, value=str(device))
    if found.index is not None and found.index >= of_kind.device_count():
        known = ", ".join(f"{found.type}:{number}" for number in range(of_kind.device_count()))
        raise ConfigError(f"was requested, but PyTorch sees only {known}", param=name, value=str(device))
