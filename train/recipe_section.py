"""What the sections of a recipe are made of: a strict base, and the kinds of values that several share."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A strict, immutable recipe section."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
