"""llama.cpp's C interface in Python over a Markov table: as strict as the real one about cells, sequences and positions."""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class Memory:
    """Cells that hold a token at a position, for one sequence or several."""

    def __init__(self, params: Any) -> None:
        self.params = params
        self.cells: list[tuple[set[int], int, int]] = []
        self.scores = np.zeros((0, 0), dtype=np.float32)
        self.passes: list[int] = []

    def of(self, sequence: int) -> list[int]:
        held = sorted((at, token) for owners, at, token in self.cells if sequence in owners)
        assert [at for at, _ in held] == list(range(len(held))), "positions of a sequence must follow each other"
        return [token for _, token in held]


class Library(ModuleType):
    """The functions that foresay calls. `contexts` are those that were made, `freed` what was given back."""

    LLAMA_SPLIT_MODE_NONE = 0

    def __init__(self, table: torch.Tensor, *, encoder: bool = False, rewinds: bool = True) -> None:
        super().__init__("llama_cpp.llama_cpp")
        self.logits = table.double().log().float().numpy()
        self.contexts: list[Memory] = []
        self.freed: list[Any] = []
        self.fails_at, self.most_cells, self.offloads = -1, 1 << 20, False
        self._encoder, self._rewinds = encoder, rewinds
        width, numbers = self.logits.shape[-1], {"n_layer": 2, "n_head": 4, "n_head_kv": 2, "n_embd": 32, "n_params": 9}
        for name, value in {**numbers, "n_ctx_train": 4096, "size": 18}.items():
            setattr(self, f"llama_model_{name}", lambda _, value=value: value)
        for name in ("is_diffusion", "is_recurrent", "is_hybrid"):
            setattr(self, f"llama_model_{name}", lambda _: False)
        self.llama_vocab_n_tokens = lambda _: width

    def llama_backend_init(self) -> None: ...

    def llama_supports_gpu_offload(self) -> bool:
        return self.offloads

    def llama_log_callback(self, heard: Any) -> Any:
        self.heard = heard
        return heard

    def llama_log_set(self, callback: Any, _: Any) -> None: ...

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace(n_gpu_layers=-1, main_gpu=0, use_extra_bufts=True)

    def llama_model_load_from_file(self, path: bytes, params: Any) -> int:
        self.loaded = params
        if path.endswith(b"broken.gguf"):
            self.heard(4, b"a tensor is missing\n", None)
            return 0
        return 1

    def llama_model_free(self, model: int) -> None:
        self.freed.append(model)

    def llama_model_get_vocab(self, model: int) -> int:
        return 2

    def llama_model_has_encoder(self, model: int) -> bool:
        return self._encoder

    def llama_model_desc(self, model: int, text: Any, size: int) -> None:
        text.value = b"table 9 F32"

    def llama_context_default_params(self) -> Any:
        return SimpleNamespace()

    def llama_init_from_model(self, model: int, params: Any) -> Memory | None:
        if params.n_ctx > self.most_cells:
            return None
        self.contexts.append(Memory(params))
        return self.contexts[-1]

    def llama_free(self, context: Memory) -> None:
        self.freed.append(context)

    def llama_get_memory(self, context: Memory) -> Memory:
        return context

    def llama_set_n_threads(self, context: Memory, one: int, other: int) -> None:
        context.params.n_threads = one

    def llama_memory_seq_rm(self, memory: Memory, sequence: int, first: int, last: int) -> bool:
        assert 0 <= sequence < memory.params.n_seq_max and last == -1
        if first and not self._rewinds:
            return False
        for owners, at, _ in memory.cells:
            if at >= first:
                owners.discard(sequence)
        memory.cells = [cell for cell in memory.cells if cell[0]]
        return True

    def llama_memory_seq_cp(self, memory: Memory, source: int, target: int, first: int, last: int) -> None:
        assert not memory.of(target) and first == 0
        for owners, at, _ in memory.cells:
            if source in owners and at < last:
                owners.add(target)

    def llama_state_seq_get_size(self, memory: Memory, sequence: int) -> int:
        return 4 * len(memory.of(sequence))

    def llama_state_seq_get_data(self, memory: Memory, to: Any, size: int, sequence: int) -> int:
        data = np.array(memory.of(sequence), dtype=np.int32).tobytes()
        ctypes.memmove(to, data, len(data))
        return len(data)

    def llama_state_seq_set_data(self, memory: Memory, source: Any, size: int, sequence: int) -> int:
        tokens = np.frombuffer(ctypes.string_at(source, size), dtype=np.int32).tolist()
        if len(memory.cells) + len(tokens) > memory.params.n_ctx:
            return 0
        memory.cells += [({sequence}, at, token) for at, token in enumerate(tokens)]
        return size

    def llama_decode(self, memory: Memory, batch: Batch) -> int:
        if batch.n_tokens > memory.params.n_batch or not batch.n_tokens:
            return -1
        memory.passes.append(batch.n_tokens)
        scores = []
        for i in range(batch.n_tokens):
            sequence, token, at = batch.seq_id[i][0], batch.token[i], batch.pos[i]
            if len(memory.cells) >= memory.params.n_ctx:
                return 1
            if token == self.fails_at:
                return -2
            held = memory.of(sequence)
            assert 0 <= sequence < memory.params.n_seq_max and batch.n_seq_id[i] == 1 and at == len(held)
            memory.cells.append(({sequence}, at, token))
            if batch.logits[i]:
                scores.append(self.logits[held[-1] if held else 0, token])
        memory.scores = np.array(scores, dtype=np.float32)
        return 0

    def llama_batch_init(self, size: int, embeddings: int, sequences: int) -> Batch:
        arrays = [(ctypes.c_int32 * size)() for _ in range(3)]
        places, wanted = (ctypes.POINTER(ctypes.c_int32) * size)(), (ctypes.c_int8 * size)()
        each = [(ctypes.c_int32 * sequences)() for _ in range(size)]
        for i, one in enumerate(each):
            places[i] = ctypes.cast(one, ctypes.POINTER(ctypes.c_int32))
        self.kept = [*arrays, places, wanted, each]
        token, pos, counts = (ctypes.cast(one, ctypes.POINTER(ctypes.c_int32)) for one in arrays)
        logits = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int8))
        return Batch(0, token, None, pos, counts, ctypes.cast(places, Batch._fields_[5][1]), logits)

    def llama_batch_free(self, batch: Batch) -> None: ...

    def llama_get_logits(self, memory: Memory) -> Any:
        return memory.scores.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
