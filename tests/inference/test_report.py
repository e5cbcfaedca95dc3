"""The report's page and picture, read back: numbers worked out by hand, hostile text, honest sentences."""

import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.context_acceptance import acceptance_by_context
from eyas.inference.evaluation import Measurement, summarise
from eyas.inference.report import acceptance_figure, render_page, verdict, write_report

# Per prompt: 4 rounds of depth 2, and how many of them kept a first and a second draft token.
SURVIVED = {
    "chain": {"code": [2, 1], "writing": [0, 0]},
    "tree": {"code": [3, 2], "writing": [2, 0]},
}
SECONDS = {"plain": 1.0, "chain": 0.8, "tree": 0.5}
PROMPTS = {"code-1": "code", "code-2": "code", "writing-1": "writing"}
TEXTS = {
    "code-1": "Print <script>alert('prompt')</script> & more",
    "code-2": "Second prompt of its set",
    "writing-1": "A poem, please",
}
VOCABULARY = ["alpha", " beta", " gamma\n", " <b>delta</b>", "\ufffd"]
TOKENS = [0, 1, 2, 3, 0, 1, 2, 3, 0, 4]
ACCEPTED = [False, True, True, False, True, False, False, True, False, False]


def measurement(prompt_id: str, method: str, temperature: float, *, seconds: float) -> Measurement:
    prompt_set = PROMPTS[prompt_id]
    stats = AcceptanceStats(0, rounds=9)
    if method != "plain":
        stats = AcceptanceStats(2, rounds=4, drafted=8, survived=list(SURVIVED[method][prompt_set]))
    return Measurement(
        prompt_id=prompt_id,
        prompt_set=prompt_set,
        method=method,
        temperature=temperature,
        token_ids=TOKENS,
        accepted=[False] * len(TOKENS) if method == "plain" else ACCEPTED,
        prompt_tokens=60,
        rounds=[[2, 2, 3], [1, 2, 2], [0, 2, 1], [1, 2, 2], [0, 2, 1]],
        finish_reason="length",
        stats=stats.as_dict(),
        seconds=seconds,
        prefill_seconds=0.1,
        identical_to_plain=True,
        gap=None,
    )


def measurements(*, temperatures: tuple[float, ...] = (0.0, 1.0), **seconds: float) -> list[Measurement]:
    """Return 10 tokens per prompt, method and temperature; T=1 has only code-1."""
    return [
        measurement(prompt_id, method, temperature, seconds={**SECONDS, **seconds}[method])
        for temperature in temperatures
        for prompt_id in (PROMPTS if temperature == 0 else ["code-1"])
        for method in SECONDS
    ]


def report(made: list[Measurement], training: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "recipe": "tiny-recipe",
        "target": "some/target",
        "target_fingerprint": "aaaa1111",
        "template_fingerprint": "bbbb2222",
        "prompt_hash": "cccc3333",
        "settings": {"prompts": ["bundled:eval"], "tree": {"depth": 2, "top_k": 3}, "dtype": "float32", "seed": 17},
        "versions": {"eyas": "0.0.7", "torch": "2.99"},
        "command": "eyas run tiny-recipe --set train.steps=20",
        "training": training or {},
        "results": summarise(made),
        "by_context": acceptance_by_context(made),
    }


class Page(HTMLParser):
    """A page taken apart: all tags, table rows as cell texts, marked texts, and text outside style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.marks: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "mark":
            self.marks.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data.strip()
        if "mark" in self.open:
            self.marks[-1] += data


def page(made: list[Measurement], training: dict[str, Any] | None = None) -> Page:
    return Page(render_page(report(made, training), made, texts=TEXTS, decode=VOCABULARY.__getitem__))


def test_verdict_and_tables_hold_the_numbers_worked_out_by_hand() -> None:
    shown = page(measurements())
    # 12 rounds at T=0: the tree keeps 5 + 5 + 2 = 12 draft tokens, the chain 3 + 3 + 0 = 6.
    assert (
        "The tree emits 2.00 tokens per target forward at T=0, 2.00x the speed of plain decoding, with output "
        "identical to plain decoding on 3 of 3 prompts." in shown.text
    )
    for row in (
        ["T=0", "plain", "3", "1.00", "10.0", "1.00x", "-"],
        ["T=0", "chain", "3", "1.50", "12.5", "1.25x", "3 of 3"],
        ["T=0", "tree", "3", "2.00", "20.0", "2.00x", "3 of 3"],
        ["T=1", "tree", "1", "2.25", "20.0", "2.00x", "sampled"],
        ["code", "2", "10.0", "1.75", "2.25", "1.25x", "2.00x"],
        ["writing", "1", "10.0", "1.00", "1.50", "1.25x", "2.00x"],
        ["all", "3", "10.0", "1.50", "2.00", "1.25x", "2.00x"],
        ["0 to 63", "3.00", "3", "3.00", "3"],  # a round behind 61 tokens for each of three prompts
        ["64 to 127", "1.50", "12", "1.50", "12"],
    ):
        assert row in shown.rows


def test_provenance_is_complete() -> None:
    shown = page(measurements())
    for fact in (
        "tiny-recipe", "some/target", "eyas run tiny-recipe --set train.steps=20", "seed 17", "tree.top_k 3",
        "prompts bundled:eval", "torch 2.99", "target aaaa1111", "template bbbb2222", "prompts cccc3333",
    ):  # fmt: skip
        assert fact in shown.text


def test_text_of_prompts_and_models_is_escaped_and_nothing_is_loaded() -> None:
    made = [replace(m, prompt_set="<i>odd</i>") if m.prompt_set == "writing" else m for m in measurements()]
    shown = page(made)
    assert "<script>alert('prompt')</script> & more" in shown.text
    assert "<b>delta</b>" in shown.text
    assert "<i>odd</i>" in shown.text
    assert not {"script", "b", "i", "link", "iframe"} & {tag for tag, _ in shown.tags}
    sources = [attributes["src"] for tag, attributes in shown.tags if tag == "img"]
    assert len(sources) == 2
    assert all(source is not None and source.startswith("data:image/png;base64,iVBORw0KGgo") for source in sources)
    assert not any("href" in attributes for _, attributes in shown.tags)


def test_samples_are_the_first_prompt_of_each_set_with_accepted_tokens_marked() -> None:
    shown = page(measurements())
    assert shown.marks == [" beta", " gamma↵\n", "alpha", " <b>delta</b>"] * 2
    assert shown.text.count("4 of 10 tokens drafted") == 2
    assert "A poem, please" in shown.text
    assert "Second prompt of its set" not in shown.text
    assert "spans several tokens" in shown.text


def test_slower_than_plain_is_the_headline_and_the_faster_method_is_named() -> None:
    made = measurements(tree=2.0)
    assert verdict(summarise(made)) == (
        "The tree is slower than plain decoding: 0.50x its speed at T=0, emitting 2.00 tokens per target forward, with "
        "output identical to plain decoding on 3 of 3 prompts; the chain is faster, 1.25x plain decoding with 1.50 "
        "tokens."
    )
    slow = [attributes for tag, attributes in page(made).tags if (tag, attributes.get("class")) == ("span", "slow")]
    assert len(slow) == 5  # the tree at T=0 and T=1, in two sets and over all


@pytest.mark.parametrize(("seconds", "start"), [(1.002, "The tree is no faster"), (0.98, "The tree emits 2.00")])
def test_a_speed_that_rounds_to_one_is_called_no_gain(seconds: float, start: str) -> None:
    assert verdict(summarise(measurements(tree=seconds, chain=3.0))).startswith(start)


def test_without_greedy_measurements_nothing_is_said_about_identity() -> None:
    made = measurements(temperatures=(0.5, 1.0))
    assert verdict(summarise(made)) == (
        "The tree emits 2.25 tokens per target forward at T=0.5, 2.00x the speed of plain decoding."
    )
    assert "Per prompt set at T=0.5" in page(made).text


def test_greedy_differences_are_listed_with_their_gap_widest_first() -> None:
    gaps = {
        ("code-2", "tree", 0.0): 0.00125, ("writing-1", "chain", 0.0): 0.5, ("code-1", "tree", 1.0): 7.75,
    }  # fmt: skip
    made = [replace(m, identical_to_plain=False, gap=gaps[m.key]) if m.key in gaps else m for m in measurements()]
    shown = page(made)
    first = shown.rows.index(["writing-1", "chain", "0.5"])
    assert shown.rows[first + 1] == ["code-2", "tree", "0.00125"]
    assert "7.75" not in shown.text
    assert "on 2 of 3 prompts" in shown.text
    assert "Where the output differs" not in page(measurements()).text


def test_training_curve_and_coverage_appear_only_when_known() -> None:
    history = [{"step": 0, "tau": 1.0}, {"step": 20, "tau": 2.3456}, {"step": 40, "tau": 2.25}]
    training = {"history": history, "coverage": {"train": 0.99125, "validation": 0.985}, "head_parameters": 4321}
    shown = page(measurements(), training)
    assert "Best held-out chain tau 2.346 at step 20" in shown.text
    assert ["validation", "98.50%"] in shown.rows
    assert "head_parameters 4321" in shown.text
    assert sum(tag == "img" for tag, _ in shown.tags) == 3
    without = page(measurements())
    assert "Training" not in without.text
    assert "Coverage" not in without.text


def test_acceptance_figure_draws_tau_survival_and_alpha() -> None:
    left, right = acceptance_figure(report(measurements())).axes
    assert [bar.get_width() for bars in left.containers for bar in bars] == [1.5, 1.75, 1.0, 2.0, 2.25, 1.5]
    assert [label.get_text() for label in left.get_yticklabels()] == ["all prompts", "code", "writing"]
    drawn = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert drawn["tree: survival"] == [8 / 12, 4 / 12]
    assert drawn["tree: alpha"] == [8 / 12, 4 / 8]
    assert drawn["chain: alpha"] == [4 / 12, 2 / 4]


def test_alpha_is_not_drawn_beyond_the_depth_where_nothing_survived() -> None:
    made = [m for m in measurements() if m.prompt_set == "writing"]
    right = acceptance_figure(report(made)).axes[1]
    drawn = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert drawn["chain: survival"] == [0.0, 0.0]
    assert drawn["chain: alpha"] == [0.0]
    assert drawn["tree: alpha"] == [0.5, 0.0]


def test_files_are_written_whole_and_alone(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation"
    # A dollar sign would begin a formula in matplotlib, and this one would not parse.
    made = [replace(m, prompt_set="cost $x_{ $") if m.prompt_set == "writing" else m for m in measurements()]
    write_report(folder, report(made), made, texts=TEXTS, decode=VOCABULARY.__getitem__)
    assert sorted(path.name for path in folder.iterdir()) == ["acceptance.png", "report.html"]
    picture = (folder / "acceptance.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width == 2400
    assert 900 <= height <= 1600
    assert picture[-8:-4] == b"IEND"
    assert (folder / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    made = measurements()
    with pytest.raises(KeyError):
        write_report(tmp_path, report(made), made, texts={}, decode=VOCABULARY.__getitem__)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "old"
