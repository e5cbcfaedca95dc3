"""Reading recipes: a YAML path or a bundled name, with `--set section.key=value` overrides, into a validated Recipe."""

from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from eyas.models.errors import UserError, nearest
from eyas.train.recipe import Recipe

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def load_recipe(source: str, overrides: list[str] | None = None) -> Recipe:
    """Return the recipe at a path or of a bundled name; raises UserError in one sentence for anything wrong in it."""
    path = _find(source)
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {source!r} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        found = "is empty" if fields is None else f"holds a {type(fields).__name__} instead of sections"
        raise UserError(f"recipe {source!r} {found}; start from a bundled one: {', '.join(bundled_recipes())}.")
    for override in overrides or []:
        _apply(fields, override)
    return parse_recipe(fields, where=source)


def parse_recipe(fields: dict[str, Any], *, where: str) -> Recipe:
    """Return the validated recipe of plain fields."""
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise UserError(f"recipe {where}: {_explain(error)}") from None


def dump_recipe(recipe: Recipe) -> str:
    """Return a recipe with every value written out, as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def bundled_recipes() -> list[str]:
    """Return the names of the bundled recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _find(source: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    bundled = RECIPES / f"{source}.yaml"
    if bundled.is_file():
        return bundled
    raise UserError(
        f"there is no recipe {source!r}: give a YAML file or a bundled name ({', '.join(bundled_recipes())})."
        f"{nearest(source, bundled_recipes())}"
    )


def _apply(fields: dict[str, Any], override: str) -> None:
    """Set one value in place; the value is read as YAML."""
    key, found, text = override.partition("=")
    if not found:
        raise UserError(f"--set takes section.key=value, given {override!r}.")
    *parents, last = key.strip().split(".")
    for parent in parents:
        if fields.get(parent) is None:  # left out, or switched off
            fields[parent] = {}
        inner = fields[parent]
        if not isinstance(inner, dict):
            raise UserError(f"--set {override!r}: {parent!r} is a value, not a section.")
        fields = inner
    try:
        fields[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {override!r}: the value is not YAML: {' '.join(str(error).split())}") from None


def _explain(error: ValidationError) -> str:
    """Return the first fault of a validation error as a sentence."""
    fault = error.errors()[0]
    # Where several types are allowed, pydantic adds the type it tried, such as "literal['kl']", to the place.
    place = ".".join(str(part) for part in fault["loc"] if isinstance(part, int) or part.isidentifier())
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if fault["type"] == "extra_forbidden":
        allowed = _keys_at(fault["loc"][:-1])
        return (
            f"unknown key {place!r}; allowed here: {', '.join(allowed)}.{nearest(str(fault['loc'][-1]), allowed)}{more}"
        )
    if fault["type"] == "missing":
        return f"{place!r} is missing{more}."
    message = fault["msg"].removeprefix("Value error, ")
    given = "" if not place or fault["type"] == "value_error" else f" (given {fault['input']!r})"
    return f"{place + ': ' if place else ''}{message}{given}{more}."


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are allowed in the section at a place, as a recipe spells them."""
    model: type[BaseModel] = Recipe
    for part in location:
        if isinstance(part, str):
            model = _section_in(model.model_fields[part].annotation) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a field's type: itself, or what a tuple holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section_in(inner))), None)
