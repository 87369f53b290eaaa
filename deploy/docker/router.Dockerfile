# docker build -f deploy/docker/router.Dockerfile -t trunkline-router:0.1.0 .
# A tag moves: to build the same again, --build-arg BASE=python:3.12-slim-bookworm@sha256:… names a digest.
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
# --constraint does not reach what builds the package. The first of these does before pip 25.3, then the second.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt
RUN /opt/trunkline/bin/pip install '.[router]'

# One distribution, so every command is there; what the worker's needs, torch above all, is not.
FROM ${BASE}
RUN groupadd --gid 10001 trunkline && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin trunkline
COPY --from=build /opt/trunkline /opt/trunkline
ENV PATH=/opt/trunkline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 50051
# No init process before it: it takes SIGTERM itself, and waits for every process that it starts.
ENTRYPOINT ["trunkline-router"]
