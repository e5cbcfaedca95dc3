"""The target behind an engine, with a stand-in for vLLM that speaks its protocol and computes states with transformers.

What a real vLLM hands out is in tests/test_vllm_extract.py; here are the errors, which a real one rarely makes.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eyas.models import vllm_target
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.models.vllm_target import VllmTarget
from eyas.tests.toys import save_tiny_model

ENGINE = """
import json, os, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
job = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32)
taps = {}
for k in job["layers"]:
    model.model.layers[k - 1].register_forward_hook(lambda m, a, out, k=k: taps.update({k: out}))
print(json.dumps({"ready": "0"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    with torch.inference_mode():
        if "logprobs" in request:
            top = model(torch.tensor([request["logprobs"]])).logits[0, :-1].log_softmax(-1).max(-1)
            answer = {"top": [[int(i), float(v)] for i, v in zip(top.indices, top.values)]}
        else:
            for row, path in zip(request["rows"], request["paths"]):
                model(torch.tensor([row]))
                states = torch.stack([taps[k][0] for k in job["layers"]], dim=1)
                ids = torch.tensor(row)
                exec(open(FAULT).read())
                save_file({"states": states.contiguous(), "token_ids": ids}, path)
            answer = {"rows": len(request["rows"])}
    print(json.dumps(answer), flush=True)
"""
AUX = (2, 4, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of Python that the stand-in runs before it writes a row."""
    return tmp_path_factory.mktemp("fault") / "fault.py"


def start(model: Path, folder: Path, program: str) -> VllmTarget:
    """Return a target on a stand-in program."""
    path = folder / "engine.py"
    path.write_text(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_target, "PROGRAM", path)
        return VllmTarget(str(model), dtype=torch.float32, aux_layers=AUX, python=sys.executable, max_length=64)


@pytest.fixture(scope="module")
def served(model: Path, fault: Path) -> Iterator[VllmTarget]:
    target = start(model, fault.parent, ENGINE.replace("FAULT", repr(str(fault))))
    yield target
    target.close()
    assert not target.folder.exists()


@pytest.fixture
def target(served: VllmTarget, fault: Path) -> VllmTarget:
    """The target without a fault."""
    fault.write_text("")
    return served


def ids(rows: int) -> torch.Tensor:
    return torch.randint(3, 200, (rows, 13))


def test_features_are_those_of_the_whole_model(model: Path, target: VllmTarget) -> None:
    ours = Target.load(str(model), dtype=torch.float32, aux_layers=AUX)
    ids_BT = ids(3)
    found, expected = target.forward(ids_BT), ours.forward(ids_BT)
    torch.testing.assert_close(found.aux_hidden_BTF, expected.aux_hidden_BTF, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.final_hidden_BTD, expected.final_hidden_BTD, rtol=1e-4, atol=1e-4)
    assert target.self_check(ids_BT[0]) < 1e-4
    assert list(target.folder.glob("row-*")) == []


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("ids = ids.flip(0)", ["or those of another row"]),
        ("states = states[:-1]", ["shape (12, 4, 40) for a row of 13 tokens", "expected (13, 4, 40)"]),
    ],
)
def test_states_of_other_tokens_are_refused(target: VllmTarget, fault: Path, code: str, parts: list[str]) -> None:
    fault.write_text(code)
    with pytest.raises(UserError) as caught:
        target.forward(ids(2))
    for part in parts:
        assert part in str(caught.value)


def test_layers_that_are_one_off_are_found_by_the_self_check(target: VllmTarget, fault: Path) -> None:
    fault.write_text("states[:, -1] = states[:, -2]")
    with pytest.raises(UserError, match="final norm or head"):
        target.self_check(ids(1)[0])


def test_an_engine_that_ends_is_quoted(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"exit code 3: no such device"):
        start(model, tmp_path, "import sys; print('no such device', file=sys.stderr); sys.exit(3)")


def test_an_interpreter_that_is_not_there(model: Path) -> None:
    with pytest.raises(UserError, match=r"cannot start vLLM with extract.vllm_python '/no/python'"):
        VllmTarget(str(model), dtype=torch.float32, aux_layers=AUX, python="/no/python", max_length=64)
