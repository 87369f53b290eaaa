#!/usr/bin/env bash
# Checks the types in the live page's comments.   usage: page_types.sh NPM_PACKAGE
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! command -v npx >/dev/null; then
  echo "page_types: skipped, Node.js (npx) is missing"; exit 0
fi
tsc() { npx --yes --package "$1" tsc "${@:2}" 2> >(grep -v '^npm ' >&2); }
if ! tsc "$1" --version >/dev/null; then
  echo "page_types: skipped, npm could not fetch $1"; exit 0
fi
tsc "$1" --project tests/page/tsconfig.json
echo "page_types: the types of the live page agree"
