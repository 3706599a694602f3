#!/bin/sh
# On a machine with a network and no GPU: everything that the other side needs, in one directory.
#
#     connected.sh OUT KEY.pem [WARM OPTIONS...]       default: --tp 8 --target sm_100a
#
# KEY.pem is an Ed25519 key (openssl genpkey -algorithm ed25519 -out KEY.pem); it stays here. What is to be trusted there is
# its public half, which does not travel with the pack: hand it over by another way.
set -eu
out=$1 key=$2
shift 2
[ $# -gt 0 ] || set -- --tp 8 --target sm_100a
here=$(cd "$(dirname "$0")/../.." && pwd)
jitspark=${JITSPARK:-$here/bin/jitspark}
mkdir -p "$out"
"$jitspark" warm "$@"
"$jitspark" pack "$@" --with-runtime --sign "$key" "$out/kernels.tar.zst"
# jitspark itself and what it needs, as wheels: no compiler
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
(cd "$here" && cp -R pyproject.toml README.md LICENSE jitspark cache_tools kernel_specs "$source")
"${PYTHON:-python3}" -m pip wheel --quiet --wheel-dir "$out/wheels" "$source"
cp "$here/examples/air-gapped/isolated.sh" "$out"
(cd "$out" && find . -type f ! -name SHA256SUMS -exec sha256sum {} + | sort -k 2 >SHA256SUMS)
