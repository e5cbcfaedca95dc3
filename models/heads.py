"""The kinds of draft heads: one registry, so that a new kind is trained, drafted with and tested by being added."""

from eyas.models.draft_head import DraftHead
from eyas.models.eagle1 import Eagle1Head
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_config import HeadConfig

HEADS: dict[str, type[DraftHead]] = {"eagle1": Eagle1Head, "eagle3": Eagle3Head}


def new_head(config: HeadConfig) -> DraftHead:
    """Return an uninitialised head of the kind its config names."""
    return HEADS[config.kind](config)
