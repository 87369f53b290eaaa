# docker build -f deploy/docker/router.Dockerfile -t trunkline-router:0.1.0 .
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
RUN /opt/trunkline/bin/pip install '.[router]'

# The image has all commands, because they are one distribution, but not the worker's dependencies such as torch.
FROM ${BASE}
# jemalloc returns freed memory to the system; glibc keeps most of what large requests have used.
RUN apt-get update && apt-get install --yes --no-install-recommends libjemalloc2 && rm -rf /var/lib/apt/lists/*
ENV LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0
RUN groupadd --gid 10001 trunkline && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin trunkline
COPY --from=build /opt/trunkline /opt/trunkline
ENV PATH=/opt/trunkline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 50051 8000
# It needs no init process: the router handles SIGTERM, and waits for all processes that it starts.
ENTRYPOINT ["trunkline-router"]
