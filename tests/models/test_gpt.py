import pytest
import torch

import wellnormed as wn
from wellnormed.models import GPT, GPTConfig

CONFIG = GPTConfig(vocabulary_size=11, length=8, width=16, heads=2, blocks=2)


def test_initial_weights_lie_on_their_spheres_or_at_zero(generator):
    model = GPT(CONFIG, generator)
    for a in wn.assign_norms(model):
        size = float(a.norm.upper_bound(a.parameter))
        assert size == 0 or size == pytest.approx(1, rel=1e-5), a.name  # float32
    assert bool((model.head.weight == 0).all())


@pytest.mark.parametrize("radius", [None, 1.0])
def test_the_projections_of_the_stream_can_be_switched(radius):
    config = GPTConfig(width=16, heads=2, blocks=1, stream_radius=radius)
    count = sum(isinstance(m, wn.nn.BallProjection) for m in GPT(config).modules())
    assert count == (0 if radius is None else 3)  # before 2 layers and the head


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="9 tokens exceed the 8 positions"):
        GPT(CONFIG)(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize("half", [False, True])
def test_rotary_attention_sees_distances_alone_and_has_no_table_of_positions(half, generator):
    shape = {"vocabulary_size": 11, "length": 8, "width": 16, "heads": 2, "blocks": 1}
    config = GPTConfig(**shape, rotary=True, half_rotary=half, relative_bias=False)
    model = GPT(config, generator)
    for p in model.parameters():
        p.data.normal_(generator=generator)
    assert "position.weight" not in dict(model.named_parameters())
    tokens = torch.randint(11, (1, 5), generator=generator)
    attend = model.layers[1].block  # after the ball projection
    q, k = attend.query, attend.key
    x = model.embedding(tokens)
    shifted = torch.cat([x[:, :1].expand(-1, 3, -1), x], 1)
    logits, later = (q(each) @ k(each).mT for each in (x, shifted))
    torch.testing.assert_close(logits, later[..., 3:, 3:])
    # half of the pairs, which are entries i and i + 4 of a head's 8, do not turn
    turned = (q(x) != q[0](x)).flatten(0, 2).any(0)
    assert turned.tolist() == ([True, True, False, False] * 2 if half else [True] * 8)
    # and not what queries and keys would give without their turns
    assert not torch.allclose(logits, q[0](x) @ k[0](x).mT)
