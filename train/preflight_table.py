"""A pre-flight as a table in the terminal, with one row decoded and its supervised tokens marked."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.data.encode import ChatTemplate, TokenizedExample
from eyas.train.preflight import Finding

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "not checked": "dim"}
OPEN, CLOSE = "\u27e6", "\u27e7"


def print_findings(name: str, findings: list[Finding], preview: str | None) -> None:
    """Print the findings and the preview of one row to stdout."""
    console = Console(highlight=False, markup=False)
    table = Table(title=f"{name}: pre-flight", title_justify="left", show_lines=False)
    for column in ("check", "verdict", "what was seen"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.check, Text(finding.verdict, style=STYLES[finding.verdict]), finding.detail)
    console.print(table)
    if preview is not None:
        console.print(f"one row, tokens that are trained in {OPEN}brackets{CLOSE}:")
        console.print(preview, soft_wrap=True)
    bad = sum(finding.verdict == "failed" for finding in findings)
    verdict = f"{bad} of {len(findings)} checks failed" if bad else "ready"
    console.print(verdict, style="red" if bad else "green")


def marked_text(template: ChatTemplate, example: TokenizedExample) -> str:
    """Return a row decoded whole, its generated spans in brackets."""
    pieces, span = [], 0
    ids, mask = example.input_ids_T.tolist(), example.generated_mask_T.tolist()
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[span]:
            text = str(template.tokenizer.decode(ids[span:i]))
            pieces.append(f"{OPEN}{text}{CLOSE}" if mask[span] else text)
            span = i
    return "".join(pieces)
