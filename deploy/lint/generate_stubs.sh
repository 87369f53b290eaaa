#!/usr/bin/env bash
# Generates the gRPC stubs.   usage: generate_stubs.sh VENV_BIN OUT_DIR
set -euo pipefail
bin=$(realpath "$1"); out=$(realpath "$2")
cd "$(dirname "$0")/../../protos"
PATH="$bin:$PATH" "$bin/python" -m grpc_tools.protoc -I. \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  trunkline/v1/*.proto trunkline/engine/v1/*.proto
