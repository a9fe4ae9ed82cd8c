"""Embeddings of the target: request fields and answer of POST /v1/embeddings.

Owns the fields' names and the encodings of vectors. Knows neither keys nor routes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field, StrictInt, StrictStr

from foresay.server.errors import FieldError, as_api_errors
from foresay.server.fields import Fields, Neutral
from foresay.server.generating import unless_disconnected
from foresay.server.requests import TokenIds, limit_prompts
from foresay.server.served import Served


class EmbeddingRequest(Fields):
    """POST /v1/embeddings."""

    neutral: ClassVar[Neutral] = {"add_special_tokens": (True,), "normalize": (True,)}

    model: StrictStr | None = None
    input: Annotated[
        StrictStr | TokenIds | Annotated[list[StrictStr | TokenIds], Field(min_length=1, fail_fast=True)],
        BeforeValidator(limit_prompts),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    """"base64": of the vector's numbers as float32, the lowest byte first."""
    dimensions: StrictInt | None = None
    """Length of the vectors; only the model's own."""
    pooling: Literal["mean", "last"] | None = None
    """Hidden states of the last layer that are the embedding, see POOLINGS; None stands for the server's setting."""
    user: StrictStr | None = None
    """Accepted and ignored."""

    def texts(self) -> list[Any]:
        """Return the inputs as a list of texts and lists of token ids."""
        single = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if single else list(self.input)


async def embed(
    model: Served,
    request: EmbeddingRequest,
    raw_request: Request,
    make: Callable[[list[torch.Tensor], int], dict[str, Any]] | None = None,
) -> Response:
    """Handle a request for embeddings. make: returns another API's body of the vectors and the number of their tokens.

    Raises ApiError for a request that is rejected or fails.
    """
    features = model.generator.target.model.capabilities
    if features.reads_source or not features.num_layers:
        raise FieldError("model", "has no embeddings: they need a decoder whose hidden states can be read")
    pooling = request.pooling or model.settings.pooling
    vectors, tokens = await unless_disconnected(_vectors(model, request, pooling), raw_request)

    def response() -> Response:
        return JSONResponse(make(vectors, tokens) if make else _body(model, request, pooling, vectors, tokens))

    return await model.prepare(response)


async def _vectors(model: Served, request: EmbeddingRequest, pooling: str) -> tuple[list[torch.Tensor], int]:
    vectors = list[torch.Tensor]()
    with as_api_errors("input"):
        texts = await model.encoded(request.texts())
        for ids in texts:
            vectors.append(await model.embedded(ids, pooling))
            width = len(vectors[0])
            if request.dimensions not in (None, width):
                text = f"differs from the {width} numbers of this model's vectors, which are not shortened"
                raise FieldError("dimensions", text, value=request.dimensions)
    return vectors, sum(map(len, texts))


def _body(
    model: Served, request: EmbeddingRequest, pooling: str, vectors: list[torch.Tensor], tokens: int
) -> dict[str, Any]:
    encode = _base64 if request.encoding_format == "base64" else torch.Tensor.tolist
    data = [{"object": "embedding", "index": i, "embedding": encode(one)} for i, one in enumerate(vectors)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model.names[0], "pooling": pooling, "usage": usage}


def _base64(vector: torch.Tensor) -> str:
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
