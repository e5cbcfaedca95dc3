"""Every `eyas` command in the documentation names a verb, options and bundled recipes that there are."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from eyas.scripts.cli import app
from eyas.train.recipe_io import bundled_recipes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDERS = ("NAME", "VERB", "...")  # stand for any verb
COMMANDS: Any = typer.main.get_command(app)


def documented(text: str) -> list[str]:
    """Return the lines of fenced blocks that run eyas, whole where they are continued, and commands in backticks."""
    blocks = "\n".join(text.split("```")[1::2]).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in blocks.splitlines()]
    found = [line for line in lines if line.startswith("eyas ")]
    return found + re.findall(r"(?<!`)`(eyas [^`]+)`(?!`)", " ".join("".join(text.split("```")[::2]).split()))


def faults(line: str) -> list[str]:
    """Return what a documented command names that does not exist."""
    words = shlex.split(line, comments=True)[1:]
    verb: Any = COMMANDS
    while words and hasattr(verb, "commands"):
        if words[0] in PLACEHOLDERS:
            return []
        if words[0] not in verb.commands:
            return [words[0]]
        verb = verb.commands[words.pop(0)]
    known = {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
    recipes = [word for word in words[:1] if re.match(r"smollm2-(?!135m)", word) and "/" not in word]
    return [option for option in options if option not in {*known, "--help"}] + [
        name for name in recipes if name not in bundled_recipes()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_documented_command_names_is_there(page: Path) -> None:
    for line in documented(page.read_text(encoding="utf-8")):
        assert faults(line) == [], line


def test_commands_are_found_and_their_faults_named() -> None:
    assert len(documented(PAGES[0].read_text(encoding="utf-8"))) > 10
    text = (
        "a `eyas run x --untill train` b\n```\n$ eyas plann y.yaml  # --json\neyas run smollm2-none \\\n  --json\n```\n"
    )
    lines = documented(text)
    assert lines == ["eyas plann y.yaml  # --json", "eyas run smollm2-none    --json", "eyas run x --untill train"]
    assert [faults(line) for line in lines] == [["plann"], ["smollm2-none"], ["--untill"]]
