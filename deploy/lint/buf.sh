#!/usr/bin/env bash
# buf lint, and buf breaking against the last merged version.   usage: buf.sh NPM_PACKAGE
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! command -v npx >/dev/null; then
  echo "buf: skipped, Node.js (npx) is missing"; exit 0
fi
buf() { npx --yes "$1" "${@:2}" 2> >(grep -v '^npm ' >&2); }
if ! buf "$1" --version >/dev/null; then
  echo "buf: skipped, npm could not fetch $1"; exit 0
fi
buf "$1" lint protos
# The last merged version: the remote's main, or the previous commit if main is this commit.
for ref in origin/main HEAD^; do
  commit=$(git rev-parse -q --verify "$ref" 2>/dev/null) || continue
  [ "$commit" = "$(git rev-parse HEAD)" ] && continue
  git cat-file -e "$commit:protos/buf.yaml" 2>/dev/null || continue
  before=$(mktemp -d); trap 'rm -rf "$before"' EXIT
  git archive "$commit" protos | tar -x -C "$before"
  buf "$1" breaking protos --against "$before/protos"
  echo "buf: lint clean, nothing broken since $(git rev-parse --short "$commit")"; exit 0
done
echo "buf: lint clean; there is no earlier version to compare with"
