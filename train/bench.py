"""How fast training is, side by side: tokens per second of the training step and of a plain row-by-row loop.

The batch has a real target's dimensions and random contents; the target itself is not run. Both loops do the same work
(training-time test, every slot supervised, bf16 autocast, fp32 masters, AdamW), step by step in turn in one process, so
that their ratio is worth something on a busy machine. Peak memory is each loop's own, in a process of its own.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eyas.data.feature_batch import FeatureBatch
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_config import HeadConfig, head_config_for
from eyas.models.target_head import TargetHead
from eyas.models.ttt_attention import TTTContext
from eyas.models.warm_start import init_random, set_vocabulary
from eyas.train.draft_loss import draft_loss_reference
from eyas.train.losses import LossMix
from eyas.train.objective import ObjectivePlan, TrainingTimeTest
from eyas.train.plan_facts import head_size
from eyas.train.utilisation import TrainingWork

KL = LossMix((("kl", 1.0),))


@dataclass(frozen=True)
class TrainingCase:
    """One setting; the dimensions are SmolLM2-135M's."""

    draft_vocab_size: int
    ttt_steps: int
    rows: int = 4
    row_length: int = 256
    hidden_size: int = 576
    intermediate_size: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49152

    @property
    def tokens(self) -> int:
        return self.rows * self.row_length

    @property
    def head_config(self) -> HeadConfig:
        """The head of a 30-layer target of these dimensions."""
        target = LlamaConfig(
            hidden_size=self.hidden_size, intermediate_size=self.intermediate_size, num_hidden_layers=30,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim,
            vocab_size=self.vocab_size,
        )  # fmt: skip
        return head_config_for(target, aux_layers=(2, 15, 27), draft_vocab_size=self.draft_vocab_size)

    @property
    def flops(self) -> float:
        """Floating-point operations that a step needs at least."""
        slots = self.row_length - 2
        work = TrainingWork(self.head_config, head_size(self.head_config), self.ttt_steps, trains_output=True)
        return self.rows * work.flops(
            tokens=self.row_length,
            slots=slots,
            visible=slots * (slots + 1) // 2,
            pairs=sum(slots - step for step in range(self.ttt_steps)),
        )


CASES = (TrainingCase(8192, 3), TrainingCase(32000, 7))


class Loops:
    """One head with its batch, and the two loops over it."""

    def __init__(self, case: TrainingCase) -> None:
        torch.manual_seed(0)
        self.case = case
        self.head = Eagle3Head(case.head_config)
        init_random(self.head)
        vocabulary = DraftVocabulary(
            torch.randperm(case.vocab_size)[: case.draft_vocab_size].sort().values, case.vocab_size
        )
        set_vocabulary(self.head, vocabulary)
        self.head.use_embedding(nn.Embedding(case.vocab_size, case.hidden_size))
        self.teacher = TargetHead(0.05 * torch.randn(case.draft_vocab_size, case.hidden_size), None, 1.0, None)
        plan = ObjectivePlan(KL, tuple(0.8**step for step in range(case.ttt_steps)))
        self.module = TrainingTimeTest(self.head, self.teacher, vocabulary.draft_ids_V, plan)
        self.batch = random_batch(case, vocabulary)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-4, fused=True)

    def packed(self) -> None:
        """Train one batch as eyas does."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.module(self.batch, self.module.counts(self.batch))
        self._update(loss)

    def plain(self) -> None:
        """Train the same batch row by row, with whole logits and scores left to autograd."""
        counts = [self.case.rows * (self.case.row_length - 2 - step) for step in range(self.case.ttt_steps)]
        for b in range(self.case.rows):
            row = FeatureBatch(**{name: value[b : b + 1] for name, value in self.batch.__dict__.items()})
            with torch.autocast("cpu", torch.bfloat16):
                self._row_loss(row, counts).backward()
        self._update(None)

    def _row_loss(self, row: FeatureBatch, counts: list[int]) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            p_TU = self.teacher.logits(row.final_hidden_BTD[0]).softmax(-1)
        context = TTTContext(row.document_BT, attention="dense")
        feature = self.head.fuse(row.aux_hidden_BTF)
        losses = []
        for step in range(self.case.ttt_steps):
            feature, logits_BTU = self.head.step(feature, row.token_ids(step), row.position_ids(step), context)
            slots = self.case.row_length - 2 - step
            taught = draft_loss_reference(logits_BTU[0, :slots].float(), p_TU[1 + step : 1 + step + slots], KL)
            losses.append(0.8**step * taught.sum() / counts[step])
        return torch.stack(losses).sum()

    def _update(self, loss: Tensor | None) -> None:
        if loss is not None:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def random_batch(case: TrainingCase, vocabulary: DraftVocabulary) -> FeatureBatch:
    """Return rows whose every slot is supervised and can be drafted."""
    B, T, D = case.rows, case.row_length, case.hidden_size
    ids = vocabulary.token_ids_U[torch.randint(len(vocabulary), (2, B, T))]
    generated = torch.ones(B, T, dtype=torch.bool)
    generated[:, 0] = False
    return FeatureBatch(
        input_ids_BT=ids[0],
        aux_hidden_BTF=torch.randn(B, T, 3 * D),
        final_hidden_BTD=torch.randn(B, T, D),
        argmax_BT=ids[1],
        generated_mask_BT=generated,
        document_BT=torch.zeros(B, T, dtype=torch.int64),
        position_BT=torch.arange(T).expand(B, T).contiguous(),
    )


def bench_training(cases: tuple[TrainingCase, ...], *, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return timings, ratio, utilisation and peak memory of every case."""
    results = []
    for case in cases:
        say(f"{case.draft_vocab_size} draft ids, {case.ttt_steps} steps: timing")
        times = _times(case, repeats)
        say(f"{case.draft_vocab_size} draft ids, {case.ttt_steps} steps: peak memory")
        peaks = {name: _in_own_process(_peak_memory, case, name) for name in ("packed", "plain")}
        speed = {name: case.tokens / statistics.median(seconds) for name, seconds in times.items() if name != "matmul"}
        matmul = max(_matmul_flops(case, seconds) for seconds in times["matmul"])
        results.append(
            {
                "draft_vocab_size": case.draft_vocab_size,
                "ttt_steps": case.ttt_steps,
                "tokens_per_second": speed["packed"],
                "plain_tokens_per_second": speed["plain"],
                "ratio": speed["packed"] / speed["plain"],
                "utilisation": speed["packed"] / case.tokens * case.flops / matmul,
                "matmul_gflops": matmul / 1e9,
                "peak_gib": peaks["packed"],
                "plain_peak_gib": peaks["plain"],
            }
        )
        say(f"{speed['packed']:.0f} tokens/s, {speed['packed'] / speed['plain']:.2f} times the plain loop")
    return {"threads": torch.get_num_threads(), "rows": cases[0].rows, "row_length": cases[0].row_length,
            "torch": torch.__version__, "cases": results}  # fmt: skip


def _times(case: TrainingCase, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each repeat of both loops and of a bare product, taken in turn after one warm-up each."""
    loops = Loops(case)
    x = torch.randn(case.tokens, case.hidden_size).bfloat16()
    w = torch.randn(case.draft_vocab_size, case.hidden_size).bfloat16()
    work: dict[str, Callable[[], Any]] = {
        "packed": loops.packed, "plain": loops.plain, "matmul": lambda: nn.functional.linear(x, w)
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(repeats + 1):
        for name, run in work.items():
            started = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - started)
    return times


def _matmul_flops(case: TrainingCase, seconds: float) -> float:
    return 2.0 * case.tokens * case.hidden_size * case.draft_vocab_size / seconds


def _peak_memory(case: TrainingCase, name: str) -> float:
    """Return the peak resident memory of this process after two steps of a loop, GiB (Linux: VmHWM)."""
    loops = Loops(case)
    for _ in range(2):
        getattr(loops, name)()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 2**20


def _in_own_process(function: Callable[[TrainingCase, str], float], case: TrainingCase, name: str) -> float:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, case, name).result()
