#!/usr/bin/env bash
# tests/venv.sh EXTRAS: the virtual environment .venv at the repository's root, holding this package with EXTRAS
# ("example", "dev,example"). Does nothing where a former call with the same pyproject.toml came to its end; one that
# was stopped half-way is gone over again. PYTHON may name the interpreter to use.
set -eu

extras=$1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
marker=$venv/installed-${extras//,/-}
wanted=$(cd "$root" && { pwd; cat pyproject.toml; } | cksum)

candidates="python3.11 python3.12 python3.13 python3"

usable() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-$candidates}; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    printf '%s %s\n' >&2 \
        "Found no Python 3.11 or newer with its venv module, looking for ${PYTHON:-$candidates}:" \
        "install one (Debian, Ubuntu: apt install python3 python3-venv), or name it in PYTHON."
    exit 1
}

if [ "$(cat "$marker" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "Creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
echo "Installing ds_dflash[$extras] into $venv (some minutes the first time)"
"$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --editable "$root[$extras]"
echo "$wanted" >"$marker"
