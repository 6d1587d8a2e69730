"""Images side by side: the reference, every candidate, and what differs."""

from __future__ import annotations

from html import escape

import torch

from dq.eval.pictures import Encoder, difference, difference_gain
from dq.eval.result import CandidateResult, EvalResult

_CAPTION = ("psnr", "ssim", "lpips", "st-lpips")
_SAMPLE = 8  # prompts that set the gain of the difference maps


def gallery(result: EvalResult, limit: int) -> str:
    """Return the HTML of the first `limit` prompts: one strip each, with difference maps on one common gain."""
    reference = result.images.get("reference")
    if reference is None or not len(result.prompts):
        return '<p class="soft">The result holds no images.</p>'
    shown = range(min(limit, len(reference)))
    candidates = [c for c in result.candidates if c.name in result.images]
    sample = [difference(result.images[c.name][i], reference[i]) for c in candidates for i in shown[:_SAMPLE]]
    gain = difference_gain(sample)
    encoder = Encoder(len(shown) * (1 + 2 * len(candidates)))
    strips = [_strip(result, i, reference[i], candidates, encoder, gain) for i in shown]
    more = len(reference) - len(shown)
    tools = (
        '<label><input type="checkbox" id="maps" checked> difference maps</label>'
        f"<span class='soft'>|candidate − reference| × {gain}, black is equal. Point at an image to see the reference "
        f"in its place.{f' {more} more prompts are not shown.' if more else ''}"
        f"{' Some images are JPEG here; metrics used the originals.' if encoder.lossy else ''}</span>"
    )
    return f'<div class="tools">{tools}</div>' + "".join(strips)


def _strip(
    result: EvalResult, i: int, reference: torch.Tensor, candidates: list[CandidateResult], encoder: Encoder, gain: int
) -> str:
    alt = escape(result.prompts[i], quote=True)
    cells = [
        f'<figure><img class="reference" src="{encoder.image(reference)}" alt="reference: {alt}">'
        "<figcaption>reference</figcaption></figure>"
    ]
    for c in candidates:
        image = result.images[c.name][i]
        name = escape(c.name)
        heat = encoder.heat(difference(image, reference), gain)
        cells.append(
            f'<figure><img class="candidate" src="{encoder.image(image)}" alt="{name}: {alt}">'
            f'<img class="diff" src="{heat}" alt="difference of {name} from the reference">'
            f"<figcaption>{name}<br>{_numbers(c, i)}</figcaption></figure>"
        )
    seed = result.settings.get("seed")
    seed = f" · seed {seed + i}" if isinstance(seed, int) else ""
    caption = f"<h3>{escape(result.prompts[i])} <small>#{i}{seed}</small></h3>"
    return f'<div class="card prompt">{caption}<div class="strip">{"".join(cells)}</div></div>'


def _numbers(candidate: CandidateResult, i: int) -> str:
    scores = [candidate.scores[n] for n in _CAPTION if n in candidate.scores]
    return " · ".join(f"<span>{s.name} {s.text(s.values[i])}</span>" for s in scores if i < len(s.values))
