"""The launch lines parsed as a shell would: engine names, numbers and paths must survive."""

import json
import shlex

import pytest

from eyas.models.launch import Serving, launch_lines


def commands(target: str, head: str, method: str = "eagle3") -> list[list[str]]:
    """Return the commands of the fenced blocks, split by the shell's rules."""
    serving = Serving(target, head, depth=5, top_k=4, num_draft_tokens=15)
    text = launch_lines(serving, method=method, engines=("vllm", "sglang"))
    return [shlex.split(block.replace("\\\n", " ")) for block in text.split("```")[1::2]]


@pytest.mark.parametrize("head", ["runs/head", "/home/me/my runs/head", "it's/a $HOME/head"])
@pytest.mark.parametrize("target", ["owner/name", "/models/a b"])
def test_both_commands_name_method_paths_and_numbers(target: str, head: str) -> None:
    vllm, sglang = commands(target, head)
    assert vllm[:4] == ["vllm", "serve", target, "--speculative-config"]
    assert json.loads(vllm[4]) == {
        "method": "eagle3",
        "model": head,
        "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 1,
    }
    assert len(vllm) == 5
    assert sglang[:3] == ["python", "-m", "sglang.launch_server"]
    assert dict(zip(sglang[3::2], sglang[4::2], strict=True)) == {
        "--model-path": target,
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": head,
        "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "4",
        "--speculative-num-draft-tokens": "16",  # SGLang counts the root
    }


def test_an_eagle1_head_is_served_by_the_names_that_engines_have_for_it() -> None:
    vllm, sglang = commands("a/b", "head", "eagle1")
    assert json.loads(vllm[4])["method"] == "eagle"
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "EAGLE"


@pytest.mark.parametrize("method", ["eagle1", "eagle3"])
def test_the_flag_that_vllm_removed_is_not_used(method: str) -> None:
    assert not any("--speculative-model" in command for command in commands("a/b", "head", method))
