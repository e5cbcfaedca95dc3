#!/usr/bin/env bash
# A small EAGLE-1 head on a finished quickstart's corpus, in a real vLLM: drafts, acceptance and text, compared with ours.
#   bash scripts/vllm_eagle1.sh RUN PYTHON [OUT]
#     RUN     the quickstart's folder, such as runs/smollm2-quickstart
#     PYTHON  an interpreter with vLLM (scripts/vllm_cpu_env.sh builds one)
#     OUT     the new run's folder (default: RUN-eagle1)
# Features are computed anew: EAGLE-1 reads final states at every token. Run again it goes on where it stopped. Exit code 1
# when vLLM does not do what we do.
set -euo pipefail
if [[ $# -lt 2 || $# -gt 3 || ! -f "$1/stages/synthesize.json" ]]; then
    echo "usage: bash scripts/vllm_eagle1.sh RUN PYTHON [OUT]; RUN is a run of smollm2-quickstart with a finished corpus" >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv run
run="${1%/}" python="$2" out="${3:-${1%/}-eagle1}"
if [[ ! -d "$out" ]]; then
    mkdir -p "$out/stages"
    cp -r "$run/corpus" "$out/corpus"
    cp "$run/stages/synthesize.json" "$out/stages/"
fi
"$VENV/bin/eyas" run smollm2-quickstart --out "$out" \
    --set head.kind=eagle1 --set head.draft_vocab_size=null \
    --set train.steps=400 --set train.validate_every=100 \
    --set evaluate.max_new_tokens=16 --set evaluate.sampled_prompts=0
exec "$VENV/bin/eyas" verify-engine "$out/head" --target smollm2-135m-instruct --python "$python"
