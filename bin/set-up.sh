# Sourced by the scripts beside it: makes a virtual environment on first use, and again when pyproject.toml changes.
#
#   ready VENV WHAT...   afterwards $root/VENV holds this checkout and what `pip install WHAT...` brings
#
# Safe when many start at once: one sets up, the others wait. A set-up that was cut short is never used: the stamp is
# written last and removed first. The usual case, an unchanged stamp, starts no process.

set -euo pipefail
root=$(cd -P -- "${BASH_SOURCE[0]%/*}/.." && pwd)

ready() {
    local venv=$root/$1 want
    shift
    # the place counts too: a copied checkout holds an environment that points at the original
    want="$root $* $(<"$root/pyproject.toml")"
    stamp_is "$venv" "$want" && return
    # The lock is on the checkout's own directory: nothing to create, nothing to clean up.
    (flock 9 && { stamp_is "$venv" "$want" || set_up "$venv" "$want" "$@"; }) 9<"$root"
}

stamp_is() {
    [[ -x $1/bin/python && -f $1/stamp && $(<"$1/stamp") == "$2" ]]
}

set_up() {
    local venv=$1 want=$2 python said
    shift 2
    echo "jitspark: setting up ${venv##*/}, once; this takes a minute or two" >&2
    # an environment without a stamp was never finished; one of another place or Python is of no use
    if [[ ! -f $venv/stamp || $(<"$venv/stamp") != "$root "* ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        rm -rf -- "$venv"
        python=$(find_python)
        "$python" -m venv -- "$venv" >&2 || give_up "$python could not make $venv" "Mend it, or name another with PYTHON=..."
    fi
    rm -f -- "$venv/stamp"
    # pip's own settings (where packages come from) stay; those that would install elsewhere do not
    said=$(cd "$root" && env -u PIP_TARGET -u PIP_PREFIX -u PIP_USER -u PYTHONPATH -u PYTHONHOME \
        "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@" 2>&1) ||
        give_up "$said"$'\n'"pip could not install $*" "Mend what pip says above and run this again."
    printf '%s\n' "$want" >"$venv/stamp.new"
    mv -- "$venv/stamp.new" "$venv/stamp"
}

# The first usable interpreter, by its real path: a shim for a version that is not there fails when it is run.
find_python() {
    local name found candidates=(python3 python3.11 python3.12 python3.13 python3.14 python)
    [[ ! ${PYTHON:-} ]] || candidates=("$PYTHON")
    for name in "${candidates[@]}"; do
        found=$("$name" -c '
import sys, venv, ensurepip
sys.version_info >= (3, 11) or sys.exit(1)
print(sys.executable)' 2>/dev/null) || continue
        [[ -x $found ]] && printf '%s\n' "$found" && return
    done
    give_up "no usable Python${PYTHON:+ ($PYTHON)}" "Install Python 3.11 or newer with venv, or name one with PYTHON=..."
}

give_up() {
    echo "jitspark set-up: $1. $2" >&2
    exit 5
}
