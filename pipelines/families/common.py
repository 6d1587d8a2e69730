"""What the data of several families has in common: the linears of an attention, and blocks of two streams."""

from dq.family import Fold

QKV, ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
OUT = ("to_out.0", "to_add_out")


def under(path: str, *names: str) -> tuple[str, ...]:
    """The names below a path."""
    return tuple(f"{path}.{name}" for name in names)


def values(attention: str, *, text: bool = False) -> Fold:
    """Softmax mixes tokens, not channels: rows of to_v are the channels that to_out reads. With `text`, of a joint
    attention, whose two outputs read the values of both streams."""
    outputs, sources = (OUT, ("to_v", "add_v_proj")) if text else (OUT[:1], ("to_v",))
    return Fold("rows", under(attention, *outputs), under(attention, *sources))


def two_streams(block: str, modulation: tuple[str, str], feed_forward: tuple[str, str]) -> tuple[Fold, ...]:
    """Folds of a block with an image and a text stream that meet in `<block>.attn`.

    Args:
        modulation: linears of the image and of the text that make shift, scale, gate for the attention and again for
            the feed-forward.
        feed_forward: the two first linears of the feed-forward networks.
    """
    folds = []
    for names, source, up in zip((QKV, ADDED), modulation, feed_forward, strict=True):
        producer = (f"{block}.{source}",)
        folds.append(Fold("modulation", under(f"{block}.attn", *names), producer, 6, (0, 1)))
        folds.append(Fold("modulation", (f"{block}.{up}",), producer, 6, (3, 4)))
    return (*folds, values(f"{block}.attn", text=True))
