"""Muon's arithmetic compared with torch's."""

import pytest
import torch
from torch.optim import _muon

from ztk.kernels import CONTROL_COLUMNS, Control
from ztk.optim.muon import COEFFICIENTS, EPS, Muon, orthogonalise, scale_of

SHAPES = [(24, 96), (97, 24), (16, 16), (1, 7), (5, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalisation_has_torchs_bits(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, EPS)
    assert torch.equal(Muon().orthogonalised(matrix), theirs)


def test_singular_values_are_near_one():
    """The quintic's fixed band, with float32's rounding far below its distance from one."""
    values = torch.linalg.svdvals(orthogonalise(torch.randn(48, 32, generator=torch.Generator().manual_seed(1))))
    assert 0.6 < values.min() <= values.max() < 1.3
    assert not orthogonalise(torch.zeros(4, 3)).any()


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_scales_are_torchs(rule, shape):
    assert scale_of(shape, rule=rule) == pytest.approx(_muon._adjust_lr(1.0, rule, torch.Size(shape)), rel=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_directions_are_torchs_and_do_not_depend_on_cuts(nesterov):
    """float32: each of the five operations rounds once, and torch's lerp has two or three; all terms are below 4."""
    generator = torch.Generator().manual_seed(2)
    control = torch.zeros(CONTROL_COLUMNS)
    control[Control.momentum], control[Control.grad_coefficient] = 0.95, 0.5
    buffer, theirs = torch.zeros(101), torch.zeros(101)
    muon = Muon(nesterov=nesterov)
    for _ in range(3):
        gradient = torch.randn(101, generator=generator)
        pieces = buffer.clone()
        cut = [
            muon.direction(pieces[a:b], grad=gradient[a:b], control=control) for a, b in ((0, 7), (7, 64), (64, 101))
        ]
        direction = muon.direction(buffer, grad=gradient, control=control)
        assert torch.equal(torch.cat(cut), direction)
        assert torch.equal(pieces, buffer)
        g = gradient * 0.5
        theirs.lerp_(g, 1 - 0.95)
        expected = g.lerp(theirs, 0.95) if nesterov else theirs
        torch.testing.assert_close(direction, expected, rtol=0, atol=8 * 4 * 2**-24)
