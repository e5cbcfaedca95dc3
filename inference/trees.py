"""The kinds of draft trees that an EAGLE head draws, by name: a new one is tested by being added."""

from eyas.inference.cost_aware_tree import CostAwareTree
from eyas.inference.draft import ChainTree, DynamicTree, StaticTree

TREES = {"chain": ChainTree, "static": StaticTree, "dynamic": DynamicTree, "auto": CostAwareTree}
