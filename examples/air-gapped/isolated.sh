#!/bin/sh
# On the machine without network: install from the wheels, check the pack's signature, unpack it, and say what it needs.
#
#     isolated.sh KEY.pub PREFIX       makes PREFIX/venv and PREFIX/cache
set -eu
mkdir -p "$2"
key=$1 prefix=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
(cd "$here" && sha256sum --check --quiet SHA256SUMS)
"${PYTHON:-python3}" -m venv "$prefix/venv"
"$prefix/venv/bin/pip" install --quiet --no-index --find-links "$here/wheels" jitspark
export JITSPARK_CACHE_DIR="$prefix/cache"
"$prefix/venv/bin/jitspark" unpack "$here/kernels.tar.zst" --trust "$key"
"$prefix/venv/bin/jitspark" verify --trust "$key"
echo "In the service's environment: JITSPARK_CACHE_PATH=$prefix/cache JITSPARK_CACHE_DIR= JITSPARK_COMPILE=never"
