# Shell functions that prepare `.venv` in the checkout; test.sh and quickstart.sh source this file and call `prepare_venv dev|run`.
#
# What they keep to:
#   * Python 3.11 or newer: `python3`, or the one named by EYAS_PYTHON. An existing `.venv` is used as it is.
#   * A torch that this Python can import is the user's own choice and is respected: its site-packages are lent to `.venv` by a
#     .pth file, and nothing is ever installed into them. Otherwise torch ${EYAS_TORCH:-2.13.0} is installed; pip takes the CPU
#     build of that version where the configured package index has one.
#   * Everything else comes in the versions of constraints.txt. A stamp makes the next run skip pip altogether.
#   * Progress goes to stderr, so that stdout stays the program's; pip's own words go to .venv/install.log.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
LOG="$VENV/install.log"
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'eyas: %s\n' "$*" >&2; }

# step WHAT COMMAND...: run COMMAND with its output in the log; one line with the seconds it took, or the end of the log and exit 1.
step() {
    local what="$1" start=$SECONDS
    shift
    printf 'eyas: %s ... ' "$what" >&2
    printf '\n== %s\n' "$*" >>"$LOG"
    if "$@" >>"$LOG" 2>&1; then
        printf '%s s\n' "$((SECONDS - start))" >&2
    else
        printf 'failed; the end of %s:\n' "$LOG" >&2
        tail -n 25 "$LOG" >&2
        exit 1
    fi
}

# Exits 2 with one sentence unless the given interpreter runs and is new enough.
require_python() {
    if ! command -v "$1" >/dev/null; then
        say "there is no $1 here; install Python 3.11 or newer, or name one: EYAS_PYTHON=/path/to/python3.11"
        exit 2
    fi
    if ! "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        say "$1 is $("$1" --version 2>&1), but eyas needs Python 3.11 or newer; name one: EYAS_PYTHON=/path/to/python3.11"
        exit 2
    fi
}

# Prints the site-packages folders of the given interpreter when it can import a torch that eyas can use; fails otherwise.
lendable_torch() {
    "$1" - <<'PYTHON' 2>/dev/null
import sys

import torch

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7):
    sys.exit(1)
print(*(path for path in sys.path if path.rstrip("/").endswith(("site-packages", "dist-packages"))), sep="\n")
PYTHON
}

# Makes .venv unless one is there that runs, and lends it the user's own torch.
make_venv() {
    local python="${EYAS_PYTHON:-python3}" lent=""
    require_python "$python"
    if [[ -z "${EYAS_TORCH:-}" ]]; then
        lent="$(lendable_torch "$python" || true)"
    fi
    mkdir -p "$VENV"
    step "making .venv with $("$python" --version)" "$python" -m venv --clear "$VENV"
    if [[ -n "$lent" ]]; then
        printf '%s\n' "$lent" >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/eyas_lent.pth"
        say "using the torch that $python imports; nothing is installed into its environment"
    fi
}

torch_version() {
    "$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null
}

# Writes .venv/constraints.txt: the tested versions, with the torch that is there; triton belongs to torch and is pinned only
# beside the torch it was tested with.
write_constraints() {
    local torch="$1" pinned
    pinned="$(sed -n 's/^torch==//p' "$ROOT/constraints.txt")"
    if [[ "${torch%%+*}" == "$pinned" ]]; then
        grep -v '^torch==' "$ROOT/constraints.txt" >"$VENV/constraints.txt"
    else
        grep -v -E '^(torch|triton)==' "$ROOT/constraints.txt" >"$VENV/constraints.txt"
    fi
    printf 'torch==%s\n' "$torch" >>"$VENV/constraints.txt"
}

# prepare_venv dev|run: .venv holds eyas (editable) and what it needs; with `dev` also what the tests need.
prepare_venv() {
    local kind="$1" key target="$ROOT" pip=("$VENV/bin/python" -m pip)
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}"
    key="$ROOT $(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
    if [[ -x "$VENV/bin/python" ]]; then
        for stamp in "$VENV/eyas-$kind.stamp" "$VENV/eyas-dev.stamp"; do
            if [[ -f "$stamp" && "$(<"$stamp")" == "$key" ]]; then
                say ".venv is up to date"
                return
            fi
        done
        require_python "$VENV/bin/python"
    else
        make_venv
    fi
    if ! "${pip[@]}" --version >/dev/null 2>&1; then
        step "adding pip to .venv" "$VENV/bin/python" -m ensurepip
    fi
    if ! torch_version >/dev/null; then
        step "installing torch ${EYAS_TORCH:-2.13.0} (minutes at the first time)" \
            "${pip[@]}" install "torch==${EYAS_TORCH:-2.13.0}"
    fi
    write_constraints "$(torch_version)"
    [[ "$kind" == dev ]] && target="$ROOT[dev]"
    step "installing eyas and what it needs beside torch $(torch_version) (a minute or two)" \
        "${pip[@]}" install --constraint "$VENV/constraints.txt" --editable "$target"
    printf '%s' "$key" >"$VENV/eyas-$kind.stamp"
}
