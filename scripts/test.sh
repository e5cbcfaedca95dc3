#!/usr/bin/env bash
# Sets up .venv if need be, then: without arguments ruff, mypy and the whole CPU test suite; with arguments only `pytest ARGUMENTS`.
#   bash scripts/test.sh
#   bash scripts/test.sh tests/test_layers.py -x
#   bash scripts/test.sh -m real            the quickstart's assertions on the real model
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv dev
cd "$ROOT"
python="$VENV/bin/python"

if [[ $# -gt 0 ]]; then
    exec "$python" -m pytest "$@"
fi
say "ruff check"
"$python" -m ruff check .
say "ruff format --check"
"$python" -m ruff format --check .
say "mypy"
"$python" -m mypy
say "pytest"
exec "$python" -m pytest
