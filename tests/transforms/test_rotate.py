"""Rotation against items 13, 14 and vector V3 of the methods specification."""

import pytest
import torch

from dq.qtensor import quantize
from dq.registry import DQError
from dq.spec import QuantSpec
from dq.stats import Stat
from dq.transforms import TRANSFORMS, GroupState
from dq.transforms.rotate import candidates, group_size, output_error, regular_hadamard, rotate, signs

INT4 = QuantSpec("int4", "token")
W8 = [0.21, -0.35, 0.12, 0.40, -0.18, 0.27, -0.30, 0.15]


def int4(row):
    """(codes, scale, dequantized row) of one row at one scale."""
    q = quantize(row[None].float(), INT4)
    return (q.dequantize() / q.scale).round().int()[0].tolist(), q.scale.item(), q.dequantize()[0].double()


def sylvester(size):
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / size**0.5


def test_hadamard_8():
    """Item 13, with Sylvester's matrix: an outlier spreads, INT4 of the dot product errs by 6.9 % instead of 40 %."""
    x = torch.tensor([0.3, -0.5, 9, 0.2, -0.4, 0.6, -0.1, 0.4], dtype=torch.float64)
    w = torch.tensor(W8, dtype=torch.float64)
    assert float(x @ w) == pytest.approx(1.722)
    xq, _, xd = int4(x)
    wq, _, wd = int4(w)
    assert xq == [0, 0, 7, 0, 0, 0, 0, 0] and wq == [4, -6, 2, 7, -3, 5, -5, 3]
    assert float(xd @ wd) == pytest.approx(1.0285714, rel=1e-6)
    h = sylvester(8)
    xh, wh = x @ h, w @ h
    expected = [3.358757, 2.863782, -3.358757, -3.005204, 3.005204, 3.924443, -3.288047, -2.65165]
    assert xh.tolist() == pytest.approx(expected, abs=1e-6)
    expected = [0.113137, -0.219203, -0.148492, 0.296985, 0.155563, 0.417193, -0.318198, 0.296985]
    assert wh.tolist() == pytest.approx(expected, abs=1e-6)
    xq, xs, xd = int4(xh)
    wq, ws, wd = int4(wh)
    assert xq == [6, 5, -6, -5, 5, 7, -6, -5] and xs == pytest.approx(0.5606347, rel=1e-6)
    assert wq == [2, -4, -2, 5, 3, 7, -5, 5] and ws == pytest.approx(0.0595990, rel=1e-6)
    assert float(xd @ wd) == pytest.approx(1.6038367, rel=1e-6)


def test_regular_h4():
    """Item 14."""
    expected = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]
    assert (2 * regular_hadamard(4)).tolist() == expected
    x = torch.tensor([5, 5.2, 4.8, 5.1], dtype=torch.float64)
    assert rotate(x, 4).tolist() == pytest.approx([4.95, 5.25, 4.85, 5.05])
    assert (x @ sylvester(4)).tolist() == pytest.approx([10.05, -0.25, 0.15, 0.05])


def test_regular_h16():
    """Item 14 and methods section 4: the first row, and a constant row that stays as it is (Sylvester: 12)."""
    first = [1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, -1, -1, -1, -1, 1]
    assert (4 * regular_hadamard(16))[0].tolist() == first
    row = torch.full((16,), 3.0, dtype=torch.float64)
    assert rotate(row, 16).tolist() == pytest.approx([3.0] * 16)
    assert float((row @ sylvester(16)).max()) == pytest.approx(12)


@pytest.mark.parametrize("size", [4, 16, 64, 256, 1024])
def test_regular_matrices(size):
    """Symmetric, orthogonal, so self-inverse; the columns of the +-1 matrix sqrt(n) H all sum to +sqrt(n)."""
    h = regular_hadamard(size, torch.float64)
    assert torch.equal(h, h.T)
    assert torch.equal(h @ h, torch.eye(size, dtype=torch.float64))  # exact: entries are +-2^-k
    assert (h * size**0.5).sum(0).tolist() == [size**0.5] * size
    assert h.abs().unique().numel() == 1


@pytest.mark.parametrize("size", [2, 3, 8, 32, 100, 128, 512])
def test_other_sizes_are_refused(size):
    with pytest.raises(DQError, match=f"power of 4 as size, got {size}"):
        regular_hadamard(size)


def test_v3():
    x = torch.tensor([5, 5.2, 4.8, 5.1, -0.3, 0.2, 0.1, -0.4], dtype=torch.float64)
    w = torch.tensor(W8, dtype=torch.float64)
    xr, wr = rotate(x, 4), rotate(w, 4)
    assert xr.tolist() == pytest.approx([4.95, 5.25, 4.85, 5.05, 0.2, -0.3, -0.4, 0.1])
    assert wr.tolist() == pytest.approx([-0.21, 0.07, 0.54, -0.02, -0.18, 0.27, -0.30, 0.15])
    assert float(x @ w) == pytest.approx(1.864) and float(xr @ wr) == pytest.approx(1.864)
    xq, xs, xd = int4(xr)
    wq, _, wd = int4(wr)
    assert xq == [7, 7, 6, 7, 0, 0, -1, 0] and xs == pytest.approx(0.75)
    assert wq == [-3, 1, 7, 0, -2, 4, -4, 2]
    assert float(xd @ wd) == pytest.approx(1.851429, rel=1e-6)


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        # Methods section 4, the table of K.
        ((3072,), 256),
        ((12288,), 256),
        ((15360,), 256),
        ((6144,), 256),
        ((1536,), 256),
        ((8960,), 256),
        ((2432,), 64),
        ((9728,), 256),
        ((1152,), 64),
        ((4608,), 256),
        ((13824,), 256),
        ((3840,), 256),
        ((2240,), 64),
        ((5600,), 16),
        ((640,), 64),
        ((3072, 12288), 256),
        ((6144, 18432), 256),
        # A group never straddles a seam; where nothing fits there is no rotation.
        ((96, 32), 16),
        ((40, 24), 0),
        ((37,), 0),
    ],
)
def test_group_sizes(parts, size):
    assert group_size(parts) == size


def state_of(width, parts=()):
    return GroupState({"a.to_q": torch.randn(8, width)}, (("a.to_q",),), QuantSpec("int4", "channel"), k_parts=parts)


def test_asked_for_size_must_divide():
    for width, parts in ((100, ()), (128, (96, 32))):
        with pytest.raises(DQError, match=r"rotation size 64 does not divide .*a\.to_q"):
            TRANSFORMS.get("rotate").fit(state_of(width, parts), size=64)


def test_odd_width_is_left_alone():
    state = state_of(37)
    before = state.weights["a.to_q"]
    TRANSFORMS.get("rotate").fit(state)
    assert state.steps == [] and state.weights["a.to_q"] is before


def test_parts_rotate_like_separate_inputs():
    """A linear on [attention | mlp] rotates like one split at the seam."""
    x = torch.randn(5, 64 + 192, dtype=torch.float64)
    whole = rotate(x, 64)
    assert torch.equal(whole, torch.cat([rotate(x[:, :64], 64), rotate(x[:, 64:], 64)], 1))


def test_outliers_spread():
    """What a rotation is for: one loud channel no longer sets the step of all others."""
    x = torch.randn(64, 256)
    x[:, 7] *= 50
    direct = (quantize(x, INT4).dequantize() - x).square().mean()
    turned = rotate(x, 256)
    spread = (rotate(quantize(turned, INT4).dequantize(), 256) - x).square().mean()
    assert spread < direct / 2


def test_v3_sylvester():
    x = torch.tensor([5, 5.2, 4.8, 5.1, -0.3, 0.2, 0.1, -0.4], dtype=torch.float64)
    w = torch.tensor(W8, dtype=torch.float64)
    xq, xs, xd = int4(rotate(x, 4, "sylvester"))
    wq, _, wd = int4(rotate(w, 4, "sylvester"))
    assert xq == [7] + 7 * [0] and xs == pytest.approx(1.43571, abs=5e-6)
    assert float(xd @ wd) == pytest.approx(1.938214, rel=1e-6)


@pytest.mark.parametrize("kind", ["regular", "sylvester", "random"])
@pytest.mark.parametrize("size", [16, 64])
def test_kinds_are_orthogonal(kind, size):
    h = rotate(torch.eye(64, dtype=torch.float64), size, kind, seed=2)
    torch.testing.assert_close(h @ h.T, torch.eye(64, dtype=torch.float64))
    torch.testing.assert_close(rotate(h, size, kind, seed=2, inverse=True), torch.eye(64, dtype=torch.float64))


def test_random_signs_stand_on_the_input_side():
    """x D H: with one sign everywhere Sylvester's coordinate 0 gathers the row, with random signs it does not."""
    row = torch.full((256,), 3.0, dtype=torch.float64)
    assert float(rotate(row, 256, "sylvester").max()) == pytest.approx(48)
    assert float(rotate(row, 256, "random", seed=1).abs().max()) < 12
    d = signs(256, 1, torch.float64)
    torch.testing.assert_close(rotate(row, 256, "random", seed=1), rotate(row * d, 256, "sylvester"))


def test_signs_never_change():
    """A checkpoint holds the seed, not the signs."""
    assert signs(12, 0).tolist() == [-1, -1, 1, 1, -1, 1, -1, 1, 1, -1, -1, -1]


@pytest.mark.parametrize(
    ("parts", "size"),
    [((3072,), 3072), ((15360,), 15360), ((3072, 12288), 3072), ((2432,), 128), ((18944,), 512), ((96, 32), 32)],
)
def test_full_sizes(parts, size):
    """The whole width, or of a concatenated input what its parts have in common."""
    assert group_size(parts, -1) == group_size(parts, "full") == size


def test_step_params():
    """The regular rotation is written as before; other kinds say what they are."""
    for asked, found in (
        ({}, {"size": 64}),
        ({"kind": "sylvester"}, {"size": 64, "kind": "sylvester"}),
        ({"kind": "sylvester", "size": -1}, {"size": 192, "kind": "sylvester"}),
        ({"kind": "random", "size": "full", "seed": 5}, {"size": 192, "kind": "random", "seed": 5}),
    ):
        state = state_of(192)
        TRANSFORMS.get("rotate").fit(state, **asked)
        assert state.steps[0].params == found
        assert TRANSFORMS.get("rotate").plan((8, 192), (192,), asked).steps == (("rotate", found),)


@pytest.mark.parametrize(
    "params",
    [{"kind": "hadamard"}, {"size": 32}, {"size": -1}, {"size": 76, "kind": "sylvester"}, {"size": "all"}, {"rows": 0}],
)
def test_bad_parameters_are_refused(params):
    assert TRANSFORMS.get("rotate").check(params)


def calibrated(x, w, act="int4/token"):
    stat = Stat(x.shape[1], name="a")
    stat.update(x)
    return GroupState({"a": w}, (("a",),), QuantSpec.parse("int4/channel"), QuantSpec.parse(act), {"a": stat})


def test_auto_candidates():
    assert candidates((3072,)) == [
        *[("regular", n) for n in (256, 64, 16)],
        *[("sylvester", n) for n in (256, 64, 16, 3072)],
    ]
    assert candidates((37,)) == []


@pytest.mark.parametrize("case", ["outliers", "offset", "plain"])
def test_auto_is_no_worse_than_any_candidate(case):
    x, w = torch.randn(96, 128), torch.randn(24, 128)
    if case == "outliers":
        x[:, [3, 70]] *= 40
    elif case == "offset":
        x[:, :32] += 3
    state = calibrated(x, w)
    errors = {choice: output_error(state, choice, 96) for choice in (None, *candidates((128,)))}
    TRANSFORMS.get("rotate").fit(state, kind="auto")
    found = output_error(state, None, 96)
    assert found == pytest.approx(min(errors.values()), rel=1e-3)
    assert (case == "outliers") <= bool(state.steps)


def test_auto_leaves_alone_what_rotation_harms():
    """Inputs on the grid already: every rotation only adds error, so there is no step."""
    x, w = torch.randint(-7, 8, (64, 64)).float(), torch.randint(-7, 8, (16, 64)).float()
    x[:, 0], w[:, 0] = 7, 7
    state = calibrated(x, w)
    TRANSFORMS.get("rotate").fit(state, kind="auto")
    assert state.steps == []


def test_auto_needs_calibration():
    with pytest.raises(DQError, match="kind = 'auto' needs calibration"):
        TRANSFORMS.get("rotate").fit(state_of(64), kind="auto")


def test_v3_offsets():
    """Vector V3: Sylvester's matrix gathers an offset on one of four groups and loses; the regular one does not."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(256, 1024, generator=g), torch.randn(64, 1024, generator=g)
    x[:, :256] += 3

    def error(kind):
        turn = (lambda t: t) if kind is None else (lambda t: rotate(t, 256, kind))
        y = x @ w.T
        xq = quantize(turn(x), INT4).dequantize()
        return float((xq @ turn(w).T - y).norm() / y.norm())

    plain, sylvester_error, regular = error(None), error("sylvester"), error("regular")
    assert plain == pytest.approx(0.133, rel=0.15)
    assert sylvester_error == pytest.approx(0.515, rel=0.15)
    assert regular == pytest.approx(0.123, rel=0.15)


def test_compiles_without_building_the_matrix_in_the_graph():
    torch.compiler.reset()
    turn = torch.compile(lambda t: rotate(t, 192, "random", 7), backend="eager", fullgraph=True)
    x = torch.randn(4, 192)
    torch.testing.assert_close(turn(x), rotate(x, 192, "random", 7))


@pytest.mark.parametrize(
    ("offset", "sigma", "none", "sylvester", "regular"),
    [(3.0, 1.0, 0.133, 0.515, 0.123), (3.0, 0.3, 0.116, 0.218, 0.086), (3.0, 0.05, 0.056, 0.047, 0.059)],
)
def test_row_outliers(offset, sigma, none, sylvester, regular):
    """Section 4, measured there with other random numbers: INT4 per token, K = 1024, an offset on one group of 256. A
    same-sign row lands in one coordinate of Sylvester's matrix; in the regular one it stays as flat as it was. Where a
    row hardly varies, Sylvester's may win."""
    x, w = sigma * torch.randn(256, 1024), torch.randn(256, 1024)
    x[:, :256] += offset
    y, spec, found = x @ w.T, QuantSpec.parse("int4/token"), {}
    for kind in ("none", "sylvester", "regular"):
        turn = (lambda t: t) if kind == "none" else (lambda t, kind=kind: rotate(t, 256, kind))
        found[kind] = float((quantize(turn(x), spec).dequantize() @ turn(w).T - y).norm() / y.norm())
    for kind, expected in (("none", none), ("sylvester", sylvester), ("regular", regular)):
        assert found[kind] == pytest.approx(expected, rel=0.35), kind
    assert (found["regular"] < found["sylvester"]) == (sigma > 0.1)
