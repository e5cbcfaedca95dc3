"""A preview of training rows as one self-contained HTML page."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eyas.data.corpus import write_atomically
from eyas.data.supervision import ShownRow


def write_preview(path: Path, rows: list[ShownRow], *, title: str, origin: str, facts: dict[str, str]) -> None:
    """Write the page; texts come from prompts and models, so all of them are escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("preview.html.j2").render(rows=rows, title=title, origin=origin, facts=facts)
    write_atomically(path, page)
