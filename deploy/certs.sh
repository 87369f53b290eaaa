#!/usr/bin/env bash
# Makes an authority and certificates for a router, a worker, Redis and a client, to try TLS on one machine.
#   usage: certs.sh DIRECTORY [DAYS]
# Each certificate NAME.crt has the key NAME.key. Run it again to renew all but the authority.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: certs.sh DIRECTORY [DAYS]" >&2; exit 2; fi
directory=$1 days=${2:-30}
umask 077
mkdir -p "$directory"
cd "$directory"

make_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }

if [ ! -e ca.crt ]; then
  make_key ca.key
  openssl req -x509 -new -key ca.key -sha256 -days 3650 -subj "/CN=Trunkline trial authority" -out ca.crt \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

# issue NAME ALTERNATIVE_NAMES: both files are complete before they replace the ones before.
issue() {
  make_key "$1.key.new"
  openssl req -new -key "$1.key.new" -subj "/CN=$1" -out "$1.csr"
  printf 'subjectAltName=%s\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n' "$2" > "$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -sha256 -days "$days" \
    -extfile "$1.ext" -out "$1.crt.new" 2>/dev/null
  rm "$1.csr" "$1.ext"
  mv "$1.key.new" "$1.key"
  mv "$1.crt.new" "$1.crt"
}

here=DNS:localhost,IP:127.0.0.1,IP:::1
issue router "DNS:trunkline-router,$here"
issue worker "DNS:trunkline-worker,$here"
issue redis "DNS:trunkline-redis,$here"
issue client DNS:trunkline-client
echo "$(pwd): ca.crt, and NAME.crt with NAME.key for router, worker, redis and client"
