"""Metrics against their formulas and against other implementations of the same thing."""

import math
import sys
import types

import pytest
import torch

from dq.eval import shift_tolerant
from dq.eval.frechet import frechet_distance
from dq.eval.metrics import METRICS
from dq.eval.metrics.fid import FID
from dq.eval.metrics.lpips_metric import LPIPS
from dq.registry import DQError

NAMES = ["fd-alex", "fid", "lpips", "psnr", "ssim", "st-lpips"]
needs_weights = pytest.mark.skipif(shift_tolerant.missing() is not None, reason="stlpips-pytorch is not installed")


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    reference = torch.rand(3, 3, 48, 40, generator=generator)
    candidate = (reference + 0.1 * torch.randn(reference.shape, generator=generator)).clamp(0, 1)
    return reference, candidate


def test_all_are_found_by_folder():
    assert METRICS.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_identical_images_are_best(name, pair):
    metric = METRICS.get(name)
    if metric.available():
        assert "\n" not in metric.available()
        return
    value = metric.compute(pair[0], pair[0]).double()
    assert torch.isfinite(value).all()
    worse = metric.compute(*pair).double()
    assert (value > worse).all() if metric.higher_is_better else (value < worse).all()
    assert value.shape == ((3,) if metric.kind == "paired" else ())


def test_psnr_by_hand():
    black, grey = torch.zeros(2, 3, 4, 4), torch.full((2, 3, 4, 4), 0.1)
    assert METRICS.get("psnr").compute(black, grey).tolist() == pytest.approx([20.0, 20.0], abs=1e-5)
    assert METRICS.get("psnr").compute(black, black).tolist() == [100.0, 100.0]


def test_ssim_is_torchmetrics(pair):
    from torchmetrics.image import StructuralSimilarityIndexMeasure

    expected = [StructuralSimilarityIndexMeasure(data_range=1.0)(c[None], r[None]) for r, c in zip(*pair, strict=True)]
    torch.testing.assert_close(METRICS.get("ssim").compute(*pair), torch.stack(expected))


def test_ssim_refuses_images_below_its_window():
    with pytest.raises(DQError, match="11 px"):
        METRICS.get("ssim").compute(torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8))


@needs_weights
@pytest.mark.parametrize("size", [(24, 24), (33, 47), (64, 64)])
def test_st_lpips_is_the_package_itself(size, monkeypatch):
    """The package imports IPython and torchsummary, which it does not use here: stand-ins let its code run."""
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(embed=None))
    monkeypatch.setitem(sys.modules, "torchsummary", types.SimpleNamespace(summary=None))
    package = pytest.importorskip("stlpips_pytorch.stlpips")
    theirs = package.LPIPS(net="alex", variant="shift_tolerant", verbose=False)
    x, y = torch.rand(2, 3, *size), torch.rand(2, 3, *size)
    with torch.no_grad():
        expected = theirs(x, y, normalize=True).flatten()
    torch.testing.assert_close(METRICS.get("st-lpips").compute(x, y), expected, rtol=1e-4, atol=1e-6)


@needs_weights
def test_st_lpips_tolerates_a_shift_better_than_a_blur():
    base = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    image = torch.nn.functional.interpolate(base, size=96, mode="bilinear")
    shifted, blurred = image.roll(1, -1), torch.nn.functional.avg_pool2d(image, 9, stride=1, padding=4)
    metric = METRICS.get("st-lpips")
    assert metric.compute(image, shifted) < 0.5 * metric.compute(image, blurred)


@needs_weights
def test_weights_are_read_without_importing_the_package(monkeypatch):
    for name in [m for m in sys.modules if m.startswith("stlpips_pytorch")]:
        monkeypatch.delitem(sys.modules, name)
    shift_tolerant._load.cache_clear()
    shift_tolerant.load()
    assert not [m for m in sys.modules if m.startswith("stlpips_pytorch")]


def test_other_weights_and_too_small_images_are_refused():
    with pytest.raises(DQError, match="not the shift-tolerant AlexNet"):
        shift_tolerant.ShiftTolerantAlexNet({"features.0.weight": torch.zeros(1)})
    if shift_tolerant.missing() is None:
        with pytest.raises(DQError, match="24 px"):
            METRICS.get("st-lpips").compute(torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16))


def test_frechet_of_known_gaussians():
    """Diagonal covariances: |m1 - m2|^2 + sum (s1 - s2)^2."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4000, 3, generator=generator, dtype=torch.float64)
    z = (z - z.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(z.T))).T  # exactly N(0, I)
    mean, scale = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([2.0, 0.5, 3.0]).double()
    expected = mean.square().sum() + (scale - 1).square().sum()
    assert frechet_distance(z, z * scale + mean) == pytest.approx(float(expected), rel=1e-9)
    assert frechet_distance(z, z) == 0.0


@pytest.mark.parametrize("n", [5, 12, 40])
def test_frechet_is_the_textbook_formula(n):
    """Also below the dimension (12), where the matrix square root needs care and the nuclear norm does not."""
    x, y = torch.randn(n, 12).double(), torch.randn(n, 12).double() * 1.5 + 0.3
    sx, sy = torch.cov(x.T), torch.cov(y.T)
    root = torch.linalg.eigvals(sx @ sy).real.clamp_min(0).sqrt().sum()
    expected = (x.mean(0) - y.mean(0)).square().sum() + sx.trace() + sy.trace() - 2 * root
    assert frechet_distance(x, y) == pytest.approx(float(expected), rel=1e-5)


def test_set_metrics_flag_few_images_and_refuse_one():
    metric = METRICS.get("fd-alex")
    assert "256" in metric.note(24) and metric.note(256) is None
    with pytest.raises(DQError, match="at least 2"):
        metric.compute(torch.rand(1, 3, 32, 32), torch.rand(1, 3, 32, 32))
    with pytest.raises(DQError, match="at least 2"):
        frechet_distance(torch.rand(1, 4), torch.rand(1, 4))


@pytest.fixture
def no_download(monkeypatch, tmp_path):
    """An empty torch hub cache, no environment variables, and a loud failure on any download."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    for variable in ("DQ_LPIPS_TRUNK", "DQ_FID_WEIGHTS"):
        monkeypatch.delenv(variable, raising=False)

    def refuse(url, *args, **kwargs):
        raise AssertionError(f"tried to download {url}")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    return tmp_path


@pytest.mark.parametrize("name", ["lpips", "fid"])
def test_without_weights_unavailable_with_a_reason(name, no_download):
    metric = METRICS.get(name)
    assert "not found" in metric.available()
    with pytest.raises(DQError, match="not found"):
        metric.compute(torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32))
    given = type(metric)(no_download / "missing.pth")
    assert "no file" in given.available()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lpips_with_given_trunk_is_the_package(no_download, monkeypatch, pair):
    lpips, models = pytest.importorskip("lpips"), pytest.importorskip("torchvision.models")
    alexnet = models.alexnet(weights=None)
    path = no_download / "hub" / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth"
    path.parent.mkdir(parents=True)
    torch.save(alexnet.state_dict(), path)
    theirs = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
    for name, value in theirs.net.named_parameters():
        value.data.copy_(alexnet.features.state_dict()[name.split(".", 1)[1]])
    with torch.no_grad():
        expected = theirs(*pair, normalize=True).flatten()
    found = LPIPS()  # in the hub cache
    assert found.available() is None
    torch.testing.assert_close(found.compute(*pair), expected)
    monkeypatch.setenv("DQ_LPIPS_TRUNK", str(path))
    torch.testing.assert_close(LPIPS(path).compute(*pair), expected)


def test_wrong_weight_files_are_named(no_download):
    path = no_download / "wrong.pth"
    torch.save({"features.0.weight": torch.zeros(2)}, path)
    for metric in (LPIPS(path), FID(path)):
        if metric.available() is None:
            with pytest.raises(DQError, match=r"wrong\.pth"):
                metric.compute(torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32))


@pytest.mark.slow
def test_fid_is_torchmetrics(no_download, monkeypatch, pair):
    """Random Inception weights; torchmetrics' own distance on the same features, at a size where it is feasible."""
    inception = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    fid = pytest.importorskip("torchmetrics.image.fid")
    path = no_download / "inception.pth"
    with monkeypatch.context() as patch:
        patch.setattr(inception, "load_state_dict_from_url", lambda *a, **k: {})
        patch.setattr(torch.nn.Module, "load_state_dict", lambda *a, **k: None)
        blank = inception.FeatureExtractorInceptionV3("inception-v3-compat", ["64"])
    torch.save(blank.state_dict(), path)
    metric = FID(path)
    assert metric.available() is None
    x, y = (metric.features(images) for images in pair)
    assert x.shape == (3, 2048)
    assert math.isfinite(metric.compute(*pair).item())

    class Take(torch.nn.Module):
        num_features = 64

        def forward(self, features):
            return features

    scale = 1.0 / x.std()
    x, y = (x[:, :64] * scale).float(), (y[:, :64] * scale).float()
    theirs = fid.FrechetInceptionDistance(feature=Take(), normalize=True)
    theirs.update(x, real=True)
    theirs.update(y, real=False)
    assert metric.distance(x, y) == pytest.approx(float(theirs.compute()), rel=1e-3, abs=1e-3)
