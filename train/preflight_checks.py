"""The checks of a pre-flight, each with the silent fault it finds.

They compare what eyas computes with an independent way to the same numbers: the library's own hidden states and logits,
rows computed alone, the target's own rotary module, the runtime's drafting.
"""

import torch
from torch import Tensor

from eyas.data.encode import encode_conversation
from eyas.data.feature_batch import collate
from eyas.data.feature_row import FeatureRow
from eyas.inference.draft import ChainTree
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.sampling import Sampling
from eyas.models.errors import CheckFailed
from eyas.models.rope import check_same_rope
from eyas.models.target import Target, TargetOutput
from eyas.models.ttt_attention import TTTContext
from eyas.train.plan import advice, human, make_plan
from eyas.train.preflight import Check, Outcome, Probe

SUPERVISED = (0.05, 0.95)
TTT_STEPS = 3
TURNS = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "That makes 6."},
]


def check_recipe(probe: Probe) -> Outcome:
    """The recipe fits its target, its files and its device; the longest row fits the target's positions."""
    probe.context.check()
    recipe, positions = probe.recipe, probe.context.target_config.max_position_embeddings
    longest = recipe.synthesize.max_prompt_tokens + recipe.synthesize.max_reply_tokens
    if longest > positions:
        raise CheckFailed(
            f"rows may get {longest} tokens long (synthesize.max_prompt_tokens + max_reply_tokens), the target takes "
            f"{positions} positions; lower one of them."
        )
    return Outcome(f"rows of up to {longest} of {positions} positions on {probe.context.device}")


def check_plan(probe: Probe) -> Outcome:
    """Disk and memory suffice for what the run has still to do."""
    plan = make_plan(probe.context)
    if plan.refusals:
        raise CheckFailed(" ".join([*plan.refusals, advice(plan)]))
    memory = max((stage.needed_memory for stage in plan.stages if not stage.finished), default=0)
    return Outcome(
        f"{human(plan.disk_needed)} of {human(plan.disk_limit)} disk, {human(memory)} of {human(plan.memory_limit)} "
        "memory"
    )


def check_template(probe: Probe) -> Outcome:
    """What the template renders of a conversation holds every reply whole, and only that is marked as generated."""
    template = probe.template
    first, report = encode_conversation(template, TURNS[:2])
    _check_marked(probe, first.input_ids_T, first.generated_mask_T, TURNS[1]["content"])
    if report.rewritten_turns:
        raise CheckFailed(
            "the chat template renders a first turn differently once it is answered, so the served prompt never leads "
            "to the reply; set target.template_arguments as the target is served (for example enable_thinking: false)."
        )
    bos = template.tokenizer.bos_token_id
    if bos is not None and first.input_ids_T[:2].tolist() == [bos, bos]:
        raise CheckFailed("a rendered conversation begins with two BOS tokens; the template and the tokenizer add one.")
    _, both = encode_conversation(template, TURNS)
    end = template.tokenizer.convert_ids_to_tokens(template.end_of_turn)
    if both.rewritten_turns:
        return Outcome(
            f"a turn ends with {end!r}; the template rewrites earlier turns of a conversation, which are left unmarked",
            "warning",
        )
    return Outcome(f"two turns marked exactly; a turn ends with {end!r}")


def _check_marked(probe: Probe, ids_T: Tensor, mask_T: Tensor, content: str) -> None:
    """Raise CheckFailed unless the marked tokens read as the content and one end-of-turn token."""
    marked = ids_T[mask_T].tolist()
    end = probe.template.end_of_turn
    text = str(probe.template.tokenizer.decode(marked[:-1], skip_special_tokens=True)) if marked else ""
    if not marked or marked[-1] != end or text.strip() != content:
        raise CheckFailed(
            f"of a conversation with the reply {content!r} the tokens {text!r} are marked as generated; the template's "
            f"end of turn was taken to be {probe.template.tokenizer.convert_ids_to_tokens(end)!r}."
        )


def check_target(probe: Probe) -> Outcome:
    """The target loads as extraction loads it, and its tokenizer's ids are in its vocabulary."""
    target, tokenizer = probe.target, probe.template.tokenizer
    if len(tokenizer) > target.vocab_size:
        raise CheckFailed(
            f"the tokenizer has {len(tokenizer)} tokens, the target {target.vocab_size}: they do not belong together."
        )
    kind = str(target.dtype).removeprefix("torch.")
    return Outcome(f"{target.config.model_type}, {target.config.num_hidden_layers} layers, {kind}")


@torch.inference_mode()
def check_features(probe: Probe) -> Outcome:
    """Aux states are the residual streams of the layers named, in ascending order, and as wide as the head reads."""
    target = probe.target
    ids_T = probe.examples[0][1].input_ids_T
    ours = target.forward(ids_T[None].to(target.device))
    config, D = probe.context.head_config, target.config.hidden_size
    if ours.aux_hidden_BTF.shape[-1] != config.aux_width:
        raise CheckFailed(
            f"aux states are {ours.aux_hidden_BTF.shape[-1]} wide, the head reads {config.aux_width} = "
            f"{len(config.aux_layers)} layers of {D}."
        )
    out = target.decoder(input_ids=ids_T[None].to(target.device), output_hidden_states=True, use_cache=False)
    for chunk, k in zip(ours.aux_hidden_BTF.split(D, dim=-1), target.aux_layers, strict=True):
        if k == target.config.num_hidden_layers:  # the library hands this one out after the final norm
            chunk = target.decoder.norm(chunk)
        _check_close(chunk, out.hidden_states[k], target, f"the state after {k} layers")
    _check_close(ours.final_hidden_BTD, out.hidden_states[-1], target, "the final state")
    return Outcome(f"layers {', '.join(map(str, target.aux_layers))} and the final state equal the library's")


def _check_close(found: Tensor, expected: Tensor, target: Target, what: str) -> None:
    difference = float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6))
    limit = 1e-4 if target.dtype == torch.float32 else 2e-2
    if not difference <= limit:
        raise CheckFailed(
            f"{what} differs by {difference:.1e} (relative, allowed {limit:.0e}) from the library's own: the layers "
            "are not where models/target.py looks for them."
        )


def check_teacher(probe: Probe) -> Outcome:
    """Teacher logits rebuilt from the stored final state equal the model's own."""
    ids_T = probe.examples[0][1].input_ids_T
    difference = probe.target.self_check(ids_T)
    return Outcome(f"rebuilt logits within {difference:.1e} of their range")


def check_batching(probe: Probe) -> Outcome:
    """A row's states are its own, whatever is computed beside it, before it, or a second time."""
    target = probe.target
    whole = probe.examples[0][1].input_ids_T
    rows = [whole[:length] for length in (len(whole), max(1, len(whole) // 2), max(1, len(whole) - 1), len(whole))]
    rows += [example.input_ids_T for _, example in probe.examples[1:3]]
    alone = [target.forward(row[None].to(target.device)) for row in rows]
    ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for b, row in enumerate(rows):
        ids_BT[b, : len(row)] = row
    limit = 1e-3 if target.dtype == torch.float32 else 0.1
    for _again in range(2):
        together = target.forward(ids_BT.to(target.device))
        for b, row in enumerate(rows):
            for name in ("aux_hidden_BTF", "final_hidden_BTD"):
                a, batched = getattr(alone[b], name)[0].float(), getattr(together, name)[b, : len(row)].float()
                difference = float((a - batched).norm() / a.norm().clamp(min=1e-6))
                if not difference <= limit:
                    raise CheckFailed(
                        f"{name} of a row of {len(row)} tokens in a batch of {len(rows)} differs by {difference:.1e} "
                        f"(relative, allowed {limit:.0e}) from the row alone: this target's batched forward mixes rows."
                    )
    return Outcome(f"{len(rows)} rows with shared prefixes, twice in a batch and alone, agree")


def check_supervision(probe: Probe) -> Outcome:
    """Between 5 % and 95 % of the tokens are marked as written by the target."""
    marked = sum(int(example.generated_mask_T.sum()) for _, example in probe.examples)
    total = sum(len(example) for _, example in probe.examples)
    share = marked / total
    low, high = SUPERVISED
    if not low <= share <= high:
        raise CheckFailed(
            f"{share:.1%} of {total} tokens are marked as written by the target, between {low:.0%} and {high:.0%} are "
            "usual; look at the preview: either the template hides the turns, or replies are far shorter or longer "
            "than prompts."
        )
    return Outcome(f"{share:.0%} of the tokens of {len(probe.examples)} rows are marked")


def check_head(probe: Probe) -> Outcome:
    """The head can be made as the recipe says; its attention is as wide as the target's, its MLP no bottleneck."""
    config, head = probe.context.head_config, probe.head
    width = config.num_attention_heads * config.head_dim
    reads = (2 if config.kind == "eagle3" else 1) * config.hidden_size
    found = next(tuple(p.shape) for name, p in head.named_parameters() if name.endswith("q_proj.weight"))
    if found != (width, reads):
        raise CheckFailed(
            f"q_proj is {found}, {config.num_attention_heads} heads of {config.head_dim} ask for {(width, reads)}."
        )
    shape = f"{config.num_attention_heads} heads of {config.head_dim}, MLP {config.intermediate_size} wide"
    if config.intermediate_size < config.hidden_size:
        return Outcome(
            f"{shape}: narrower than the hidden size {config.hidden_size}; raise head.intermediate_size", "warning"
        )
    return Outcome(shape)


def check_rope(probe: Probe) -> Outcome:
    """The head rotates as the target does at positions 0, 63, 5000 and the last."""
    config = probe.context.head_config
    check_same_rope(probe.head.rope, probe.target.decoder, config)
    return Outcome(
        f"{config.rope_parameters.get('rope_type')} RoPE, equal up to position {config.max_position_embeddings - 1}"
    )


@torch.inference_mode()
def check_unrolling(probe: Probe) -> Outcome:
    """The logits that training unrolls at a slot are those that the runtime drafts there."""
    target, head = probe.target, probe.head
    row_id, example = probe.examples[0]
    ids_T = example.input_ids_T
    out = target.forward(ids_T[None].to(target.device))
    aux_TF, final_TD = out.aux_hidden_BTF[0].float(), out.final_hidden_BTD[0].float()
    row = FeatureRow(row_id, ids_T, example.generated_mask_T, aux_TF.cpu(), final_TD.cpu(), torch.full_like(ids_T, -1))
    slot = len(ids_T) - 2 - TTT_STEPS
    if slot < 0:
        return Outcome(f"row {row_id} has only {len(ids_T)} tokens", "warning")
    batch = collate([[row]], length=len(row), dtype=torch.float32).to(target.device)
    context = TTTContext(batch.document_BT)
    feature = head.fuse(head.states(batch.aux_hidden_BTF, batch.final_hidden_BTD))
    trained = []
    for step in range(TTT_STEPS):
        feature, logits_BTU = head.step(feature, batch.token_ids(step), batch.position_ids(step), context)
        trained.append(logits_BTU[0, slot])
    drafting = EagleDrafting(head, ChainTree(TTT_STEPS))
    drafting.join([tuple(ids_T.tolist())], [Sampling()], capacity=len(ids_T))
    states = TargetOutput(aux_TF[None, : slot + 1], final_TD[None, : slot + 1])
    drafting.extend(0, [ids_T[1 : slot + 2].tolist()], states)
    ids_T = ids_T.to(target.device)
    drafted, features_RKD = [drafting.logits_RU[0]], drafting.features_RD[None]
    for step in range(1, TTT_STEPS):
        seen = torch.ones(1, 1, step, dtype=torch.bool, device=target.device)
        token_RK = ids_T[slot + 1 + step].view(1, 1)
        features_RKD, logits_RKU = drafting.expand(features_RKD, token_RK, depth=step, tree_mask_RKN=seen)
        drafted.append(logits_RKU[0, 0])
    difference = max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(trained, drafted, strict=True)
    )
    if not difference <= 1e-3:
        raise CheckFailed(
            f"training's logits differ from the runtime's own drafting by {difference:.1e} of their range (allowed "
            "1e-03): what would be trained is not what would be served."
        )
    return Outcome(f"{TTT_STEPS} steps at slot {slot}: training and drafting within {difference:.1e}")


CHECKS: dict[str, Check] = {
    "recipe": check_recipe,
    "disk and memory": check_plan,
    "chat template": check_template,
    "target": check_target,
    "feature layers": check_features,
    "teacher logits": check_teacher,
    "batching": check_batching,
    "supervised tokens": check_supervision,
    "head shape": check_head,
    "RoPE": check_rope,
    "training equals drafting": check_unrolling,
}
VITAL = frozenset({"recipe", "target"})
