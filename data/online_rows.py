"""Rows without a store: features computed when they are asked for, the same that a store would hold.

They pass through the store's format (bf16 or 8 bits round here as they do there) and are checked as extraction checks
its shards. A cache of a given size keeps the rows used last; without one each epoch computes the features again.
Rows asked for together are computed together, so features equal a store's up to the rounding of another batch shape.
"""

from collections import OrderedDict
from collections.abc import Sequence

from eyas.data.extract_checks import check_batched, check_examples, check_target
from eyas.data.extract_plan import ExtractionPlan, plan_batches, plan_shards
from eyas.data.feature_row import BareRow, FeatureRow, TokenRow, scatter_rows, teaching_positions
from eyas.data.forward_rows import Example, forward_rows
from eyas.data.manifest import FeatureSpec
from eyas.data.shard import StoredRow, decode_row, encode_row
from eyas.models.target import Target


class OnlineRows:
    """Features of `examples` computed on demand; a `RowSource`. `cache_bytes` bounds what is kept."""

    def __init__(
        self, target: Target, examples: list[Example], plan: ExtractionPlan, spec: FeatureSpec, *, cache_bytes: int
    ) -> None:
        assert spec.aux_layers == target.aux_layers
        self.target, self.examples, self.plan, self.spec = target, examples, plan, spec
        self.lengths = [len(example) for _, example in examples]
        self.cache_bytes, self.cached_bytes = cache_bytes, 0
        self._cache: OrderedDict[int, StoredRow] = OrderedDict()

    def __len__(self) -> int:
        return len(self.examples)

    def check(self) -> None:
        """Raise UserError when rows or target fail what extraction would check: once, on the longest rows."""
        check_examples(self.examples, self.plan)
        check_target(self.target, self.examples[0])
        longest = plan_shards(self.lengths, rows_per_shard=self.plan.rows_per_shard)[0]
        batch = plan_batches(longest, self.lengths, tokens_per_batch=self.plan.tokens_per_batch)[0]
        rows = list(forward_rows(self.target, [self.examples[index] for index in batch]))
        check_batched(self.target, self.examples[batch[-1]], rows[-1])

    def tokens(self, index: int) -> TokenRow:
        """Return a row's tokens; the token the target wrote next stands for the argmax, which it is in greedy rows."""
        row_id, example = self.examples[index]
        taught = teaching_positions(example.generated_mask_T)
        written = scatter_rows(example.input_ids_T[taught + 1], taught, len(example), -1)
        return BareRow(row_id, example.input_ids_T, example.generated_mask_T, written)

    def rows(self, indices: Sequence[int]) -> list[FeatureRow]:
        """Return rows from the cache or from the target."""
        found = {index: self._cache[index] for index in indices if index in self._cache}
        for index in found:
            self._cache.move_to_end(index)
        missing = [index for index in dict.fromkeys(indices) if index not in found]
        for batch in plan_batches(missing, self.lengths, tokens_per_batch=self.plan.tokens_per_batch):
            everywhere = self.spec.final_at == "everywhere"
            rows = forward_rows(self.target, [self.examples[index] for index in batch], final_everywhere=everywhere)
            for index, row in zip(batch, rows, strict=True):
                found[index] = encode_row(row, self.spec)
                self._keep(index, found[index])
        return [decode_row(found[index], self.spec) for index in indices]

    def _keep(self, index: int, row: StoredRow) -> None:
        """Put a row into the cache and drop those used longest ago until it is within its bytes again."""
        if row.bytes > self.cache_bytes:
            return
        self._cache[index] = own(row)
        self.cached_bytes += row.bytes
        while self.cached_bytes > self.cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self.cached_bytes -= dropped.bytes


def own(row: StoredRow) -> StoredRow:
    """Return a row that holds no part of its batch, so that keeping it keeps nothing else alive."""
    tensors = {name: value.clone() for name, value in row.__dict__.items() if hasattr(value, "clone")}
    return StoredRow(**{**row.__dict__, **tensors})
