#!/usr/bin/env bash
# Fails if the committed stubs differ from those generated from the .proto files.   usage: stub_drift.sh VENV_BIN
set -euo pipefail
here=$(dirname "$0")
fresh=$(mktemp -d); trap 'rm -rf "$fresh"' EXIT
"$here/generate_stubs.sh" "$1" "$fresh"
drift=0
while IFS= read -r file; do
  cmp -s "$fresh/$file" "$here/../../protos/$file" || { echo "stub drift: protos/$file; run make protos" >&2; drift=1; }
done < <(cd "$fresh" && find . -type f | sed 's|^\./||')
[ "$drift" = 0 ] && echo "stubs: no drift"
exit "$drift"
