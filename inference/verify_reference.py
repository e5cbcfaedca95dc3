"""The verifiers in plain Python, one row at a time: the definitions that the batched ones are held to."""

from collections.abc import Callable

from torch import Tensor

from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.inference.verify import NAN, Verification

Coin = list[float]


def inverse_cdf(weights: list[float], coin: float) -> int:
    """Return the first index whose running sum exceeds the coin's share of the whole; never one of weight zero."""
    bound, total = coin * sum(weights), 0.0
    for index, weight in enumerate(weights):
        total += weight
        if weight > 0 and total > bound:
            return index
    return max(index for index, weight in enumerate(weights) if weight > 0)


def _refuse_nan(logits: Tensor) -> None:
    if bool(logits.isnan().any()):
        raise FloatingPointError(NAN)


def _child(tree: DraftTree, node: int, token: int) -> int | None:
    parents, tokens = tree.parents_N.tolist(), tree.tokens_N.tolist()
    return next((i for i in range(node + 1, len(tree)) if (parents[i], tokens[i]) == (node, token)), None)


def _walk(tree: DraftTree, choose: Callable[[int, int], int]) -> Verification:
    path = [0]
    while True:
        token = choose(path[-1], len(path) - 1)
        child = _child(tree, path[-1], token)
        if child is None:
            return Verification(tuple(path), token)
        path.append(child)


def greedy(tree: DraftTree, logits_NV: Tensor, _sampling: Sampling, _coins: Coin) -> Verification:
    """Return the walk along the argmax."""

    def choose(node: int, _level: int) -> int:
        _refuse_nan(logits_NV[node])
        return int(logits_NV[node].argmax())

    return _walk(tree, choose)


def sampling(tree: DraftTree, logits_NV: Tensor, sampling: Sampling, coins: Coin) -> Verification:
    """Return the walk along tokens drawn from the target, coin by coin."""

    def choose(node: int, level: int) -> int:
        _refuse_nan(logits_NV[node])
        return inverse_cdf(sampling.probabilities(logits_NV[node]).tolist(), coins[level])

    return _walk(tree, choose)


def _tables(tree: DraftTree, logits_NV: Tensor, sampling: Sampling) -> tuple[list[list[float]], list[list[float]]]:
    assert tree.drawn_KV is not None
    _refuse_nan(logits_NV)
    return [sampling.probabilities(row).tolist() for row in logits_NV], tree.drawn_KV.tolist()


def leviathan(tree: DraftTree, logits_NV: Tensor, sampling: Sampling, coins: Coin) -> Verification:
    """Return algorithm 1 of Leviathan et al.: one token after the other."""
    p, q = _tables(tree, logits_NV, sampling)
    tokens = tree.tokens_N[1:].tolist()
    for i, token in enumerate(tokens):
        if not coins[i] * q[i][token] < p[i][token]:
            left = [max(a - b, 0.0) for a, b in zip(p[i], q[i], strict=True)]
            return Verification(tuple(range(i + 1)), inverse_cdf(left if sum(left) > 0 else p[i], coins[len(tokens)]))
    return Verification(tuple(range(len(tokens) + 1)), inverse_cdf(p[-1], coins[len(tokens)]))


def block(tree: DraftTree, logits_NV: Tensor, sampling: Sampling, coins: Coin) -> Verification:
    """Return algorithm 2 of Sun et al.: the longest prefix whose joint ratio passes."""
    p, q = _tables(tree, logits_NV, sampling)
    tokens = tree.tokens_N[1:].tolist()
    joint, accepted, weights = 1.0, 0, None
    for i in range(len(tokens) + 1):
        if i > 0:
            joint = min(joint * p[i - 1][tokens[i - 1]] / q[i - 1][tokens[i - 1]], 1.0)
        if i == len(tokens):
            left, bar = p[i], joint
        else:
            left = [max(joint * a - b, 0.0) for a, b in zip(p[i], q[i], strict=True)]
            rest = sum(left) + 1 - joint
            bar = sum(left) / rest if rest > 0 else 0.0
        if i == 0 or coins[i - 1] < bar:
            accepted, weights = i, left if sum(left) > 0 else p[i]
    assert weights is not None
    return Verification(tuple(range(accepted + 1)), inverse_cdf(weights, coins[len(tokens)]))


Reference = Callable[[DraftTree, Tensor, Sampling, Coin], Verification]
REFERENCES: dict[str, Reference] = {"greedy": greedy, "sampling": sampling, "leviathan": leviathan, "block": block}
