"""Check that the padding of tokens in a cached state does not change between calls.

A state of fixed size cannot add or remove earlier tokens, so a mask that differs from an earlier
call for one of them is refused.

Other letters: T new tokens, N earlier tokens that a mask covers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.hf.masks import ModelMask

UNLIMITED = sys.maxsize  # longer than any sequence


class PastPadding(NamedTuple):
    """The padding of the last tokens in a state.

    All layers that share a mask share one instance, so that the padding is compared once per call.
    """

    padding: Tensor | None  # [B or 1, N] bool, true where a token is real; None: all are real
    length: int  # N

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> PastPadding:
        """Return the padding after a change of the rows, as in beam search."""
        if self.padding is None or self.padding.shape[0] == 1:
            return self
        return self._replace(padding=change(self.padding))

    def without_last(self, tokens: int) -> PastPadding:
        """Return the padding without the last tokens."""
        length = max(self.length - tokens, 0)
        padding = None if self.padding is None else self.padding[:, :length]
        return PastPadding(padding, length)


def update_past_padding(
    mask: AttentionMask, past: PastPadding | None, new: int, total: int | Tensor
) -> PastPadding:
    """Return the padding of earlier and new tokens; raise if that of earlier tokens changed.

    A mask with padding costs one comparison of ``[B, N]`` and one device synchronisation per call
    of the model, shared by all layers; a mask without padding costs nothing. Compiled steps skip
    the check, because an error that depends on a tensor's values breaks the graph: the padding is
    unknown after them, and ``generate`` only appends to the mask.

    Args:
        mask: The mask of earlier and new tokens.
        past: The padding of the earlier tokens; ``None`` if it is unknown.
        new: T.
        total: Number of tokens in the cache including the new ones, for the message.

    Raises:
        UnsupportedError: A token was real and is padding now, or the reverse.
    """
    shared = mask.shared if isinstance(mask, ModelMask) else {}
    key = id(past), id(mask.padding), new
    if key not in shared:  # keeping the objects alive keeps their ids unique
        shared[key] = past, mask.padding, _checked_padding(mask, past, new, total)
    result: PastPadding = shared[key][2]
    return result


def _checked_padding(
    mask: AttentionMask, past: PastPadding | None, new: int, total: int | Tensor
) -> PastPadding:
    padding = mask.padding
    if padding is None:
        # otherwise built without positions, or with a static cache's counter: covers all tokens
        is_counted = isinstance(mask, ModelMask) and isinstance(mask.q_offset, int)
        earlier = int(mask.q_offset) if is_counted else UNLIMITED
    else:
        earlier = int(mask.q_offset)
        padding = padding[:, : earlier + new]
    if past is not None:
        common = min(past.length, earlier)
        before = None if past.padding is None else past.padding[:, past.length - common :]
        now = None if padding is None else padding[:, earlier - common : earlier]
        changed = _changed_entries(before, now)
        if changed is not None:
            raise UnsupportedError(_message(changed, before, int(total) - new - common))
    return PastPadding(padding, earlier + new)


def _changed_entries(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """Return where two paddings differ, ``[B, N]`` bool, or ``None`` if they are equal."""
    if before is None:
        if now is None:
            return None
        changed = ~now
    elif now is None:
        changed = ~before
    elif before.shape[0] != now.shape[0] and 1 not in (before.shape[0], now.shape[0]):
        return None  # another batch size, which the backend refuses
    else:
        changed = before != now
    return changed if bool(changed.any()) else None


def _message(changed: Tensor, before: Tensor | None, first: int) -> str:
    """Return the message that names the first changed token.

    Args:
        changed: The changed entries.
        before: The earlier padding; ``None`` if all tokens were real.
        first: Position of the first entry in the sequence.
    """
    row, column = changed.nonzero()[0].tolist()
    was_real = before is None or bool(before.expand_as(changed)[row, column])
    was, now = ("1", "0") if was_real else ("0", "1")
    return (
        f"attention_mask of row {row}, token {first + column} is {now} now and was {was} in an "
        f"earlier call ({int(changed.sum())} such entries); the state of this layer cannot add or "
        "remove earlier tokens. Pass an attention_mask over all tokens so far in every call, with "
        "the earlier entries unchanged (without a mask, every token counts as real); or start with "
        "an empty cache; or use use_cache=False; or use backend 'softmax', or 'flash' without a "
        "window, which keep all keys"
    )
