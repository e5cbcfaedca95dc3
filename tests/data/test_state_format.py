"""What states lose when kept in half or in 8 bits, and what a token costs, counted in the files themselves."""

from pathlib import Path

import pytest
import torch

from eyas.data.encode import encode_reply
from eyas.data.extract import extract
from eyas.data.extract_plan import ExtractionPlan
from eyas.data.feature_row import teaching_positions
from eyas.data.state_format import STATE_FORMATS, bytes_per_token
from eyas.tests.data.toys import spec_of
from eyas.tests.toys import tiny_target

H = 40  # hidden size of the tiny target


def states() -> torch.Tensor:
    """Return 7 tokens of two layers of 63 numbers; layers and tokens differ in size, one dimension sticks out."""
    values = torch.randn(7, 2, 63)
    values[:, 1] *= 1e3
    values[3] *= 1e-4
    values[:, :, 5] *= 500
    return values.flatten(1)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_formats_without_a_scale_give_back_the_rounded_states(name: str) -> None:
    kept = STATE_FORMATS[name]
    given = torch.randn(7, 126)
    values, scales = kept.encode(given, layers=2)
    assert scales is None
    assert torch.equal(kept.decode(values, scales), given.to(kept.dtype))


def test_eight_bits_keep_every_layer_of_every_token_within_a_sixteenth() -> None:
    kept, given = STATE_FORMATS["float8_e4m3fn"], states()
    values, scales = kept.encode(given, layers=2)
    assert values.dtype == torch.float8_e4m3fn
    assert scales is not None
    assert scales.shape == (7, 2)
    back = kept.decode(values, scales)
    # e4m3 has 3 bits of mantissa: half a step is 1/16 of the value, down to 2^-6 of the scale and 2^-10 below.
    allowed = torch.maximum(given.abs() / 16, scales.repeat_interleave(63, dim=1) * 2**-10)
    assert bool(((back - given).abs() <= allowed * 1.001).all())
    for layer in (slice(0, 63), slice(63, 126)):
        error = (back[:, layer] - given[:, layer]).norm(dim=1) / given[:, layer].norm(dim=1)
        assert float(error.max()) < 0.05


def test_one_scale_for_all_layers_would_lose_the_small_ones() -> None:
    kept, given = STATE_FORMATS["float8_e4m3fn"], torch.randn(7, 126) * torch.tensor([1e-6] * 63 + [1.0] * 63)
    own, shared = (kept.decode(*kept.encode(given, layers=layers))[:, :63] for layers in (2, 1))
    assert float((own - given[:, :63]).norm() / given[:, :63].norm()) < 0.05
    assert float(shared.abs().max()) == 0


def test_eight_bits_of_nothing_and_of_the_largest_number_stay_finite() -> None:
    kept = STATE_FORMATS["float8_e4m3fn"]
    given = torch.tensor([[0.0, 0.0], [3e38, -3e38], [1e-30, 0.0]])
    back = kept.decode(*kept.encode(given, layers=1))
    assert bool(torch.isfinite(back).all())
    assert torch.equal(back[0], given[0])
    torch.testing.assert_close(back[1], given[1], rtol=0.04, atol=0)


def test_bytes_of_a_token_by_hand() -> None:
    of = bytes_per_token(hidden_size=4096, aux_layers=3, state_dtype="bfloat16")
    assert (of.every, of.every + of.taught) == (6 * 4096 + 5, 8 * 4096 + 9)
    eight = bytes_per_token(hidden_size=4096, aux_layers=3, state_dtype="float8_e4m3fn")
    assert (eight.every, eight.every + eight.taught) == (3 * 4096 + 5 + 12, 4 * 4096 + 9 + 16)
    everywhere = bytes_per_token(hidden_size=576, aux_layers=3, state_dtype="float32", final_everywhere=True)
    assert (everywhere.every, everywhere.taught) == (16 * 576 + 5, 4)
    assert of.total(tokens=10, taught=4) == 10 * of.every + 4 * of.taught


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("final_at", ["taught", "everywhere"])
def test_a_stores_files_are_as_large_as_the_layout_says(tmp_path: Path, state_dtype: str, final_at: str) -> None:
    target = tiny_target()
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 97, (120,), generator=generator).tolist() for _ in range(5)]
    examples = [(f"row-{n}", encode_reply(text[: 30 * n + 1], text[30 * n + 1 :])) for n, text in enumerate(texts[:4])]
    spec = spec_of(target, state_dtype=state_dtype, final_at=final_at)
    extract(target, examples, ExtractionPlan(128, 256, 4), tmp_path, spec=spec, progress=lambda *_: None)
    tokens = sum(len(example) for _, example in examples)
    taught = sum(len(teaching_positions(example.generated_mask_T)) for _, example in examples)
    assert taught == sum(int(example.generated_mask_T.sum()) - 1 for _, example in examples)
    cost = bytes_per_token(
        hidden_size=H, aux_layers=3, state_dtype=state_dtype, final_everywhere=final_at == "everywhere"
    )
    size = (tmp_path / "shard-00000.safetensors").stat().st_size
    data = cost.total(tokens=tokens, taught=taught)
    assert data < size < data + 3000  # header: spec, measurements and shapes once, a hash and an id per row
    if (state_dtype, final_at) == ("bfloat16", "taught"):
        prompt = tokens - taught
        assert data <= prompt * (6 * H + 5) + taught * (8 * H + 9)
    whole = bytes_per_token(hidden_size=H, aux_layers=3, state_dtype="bfloat16").total(tokens=tokens, taught=taught)
    if (state_dtype, final_at) == ("float8_e4m3fn", "taught"):
        assert 0.5 < data / whole < 0.6  # a scale of 4 bytes is much at 40 numbers; 0.504 at 576
