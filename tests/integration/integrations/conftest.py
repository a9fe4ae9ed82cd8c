from __future__ import annotations

import pytest
from transformers import GenerationConfig, PreTrainedModel

from helpers import tiny


@pytest.fixture
def model() -> PreTrainedModel:
    model = tiny.llama()
    model.generation_config = GenerationConfig(eos_token_id=0, bos_token_id=1, pad_token_id=1, max_new_tokens=24)
    return model
