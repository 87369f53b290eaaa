# docker build -f deploy/docker/worker.Dockerfile -t trunkline-worker:0.1.0 .
# A tag can move. For reproducible builds set a digest: --build-arg BASE=python:3.12-slim-bookworm@sha256:…
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/trunkline
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protos protos
COPY kernels kernels
COPY worker worker
COPY router router
COPY bench/trunkline_bench bench/trunkline_bench
COPY deploy/trunkline_cli deploy/trunkline_cli
# --constraint does not apply to build dependencies. The first variable does before pip 25.3, the second from then on.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt
# The cli extra has hf, which downloads models. PyPI's torch for Linux includes CUDA's libraries; the node has the driver.
RUN /opt/trunkline/bin/pip install '.[worker,grammar,cli]'

FROM ${BASE}
# gcc: Triton's launchers and the kernels for CPUs are compiled at run time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 trunkline && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin trunkline
COPY --from=build /opt/trunkline /opt/trunkline
# Compiled kernels go to /tmp, a volume, because the root file system should be read-only.
ENV PATH=/opt/trunkline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp TRITON_CACHE_DIR=/tmp/triton NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 50061
# It needs no init process: the worker handles SIGTERM, and its engine process ends with it.
ENTRYPOINT ["trunkline-worker"]
