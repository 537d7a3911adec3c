"""Which key blocks each query of a head selected, and how much of softmax's weight they have.

Other letters: N key blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.backends.block_sparse import BlockSparseConfig
from attnzoo.ops.block_sparse.options import SparseOptions
from attnzoo.report import charts
from attnzoo.report.charts import Axis, Plot, Series

NOT_ATTENDED, FIRST, WINDOW, SELECTED = range(4)  # kinds of a block, in the order of colours


@dataclass(frozen=True, kw_only=True)
class SelectedBlocks:
    """The blocks that the queries of one head attend to.

    Attributes:
        kinds: ``[T, N]``: ``NOT_ATTENDED``, or why a block is attended to, also in part:
            ``FIRST``, ``WINDOW`` or ``SELECTED``.
        covered: Share of softmax's weight on the attended keys, ``[T]``.
        best: The largest share that as many selected blocks could have, ``[T]``.
    """

    kinds: Tensor
    covered: Tensor
    best: Tensor

    def facts(self) -> dict[str, Any]:
        """Return means over all queries as plain data."""
        selected = (self.kinds == SELECTED).sum(1).float()
        return {
            "selected_blocks": round(float(selected.mean()), 2),
            "weight_attended": round(float(self.covered.mean()), 4),
            "weight_of_best_blocks": round(float(self.best.mean()), 4),
        }

    def summary(self) -> str:
        """Return the means as a sentence."""
        facts = self.facts()
        return (
            f"A query selects {facts['selected_blocks']:.1f} blocks on average. With its window "
            f"and the first tokens they have {facts['weight_attended']:.1%} of softmax's weight; "
            f"the best selection of as many blocks would have {facts['weight_of_best_blocks']:.1%}."
        )

    def plots(self) -> list[Plot]:
        """Return the picture of the selection, and the shares of softmax's weight by query."""
        shares = (("selected blocks", self.covered), ("best blocks", self.best))
        series = [
            Series(name=name, x=range(len(y)), y=y.tolist(), style=style, kind="plain")
            for style, (name, y) in enumerate(shares)
        ]
        return [
            Plot(
                name="blocks",
                title="Selected blocks",
                text="Rows are queries, columns are key blocks: dark blocks are not attended to; "
                "then the first tokens, the window, and the selected blocks (the brightest).",
                figure=charts.matrix_chart(
                    self.kinds.tolist(),
                    x=Axis(label="key block"),
                    y=Axis(label="query"),
                    limits=(NOT_ATTENDED, SELECTED),
                ),
            ),
            Plot(
                name="covered",
                title="Softmax's weight on the attended keys",
                text="By query; and what the best selection of as many blocks would have.",
                figure=charts.line_chart(
                    series, x=Axis(label="query"), y=Axis(label="share", percent=True)
                ),
            ),
        ]


def selected_blocks(
    exact: Tensor, approximate: Tensor, config: BlockSparseConfig, *, causal: bool
) -> SelectedBlocks:
    """Read a selection from the weights of one head, which are 0 where a key is not attended to.

    Args:
        exact: Softmax's weights, ``[T, S]``, T = S.
        approximate: Those of ``block_sparse``.
        config: Its options.
        causal: Whether the layer is causal.
    """
    options = SparseOptions(
        *(causal, config.window, config.num_sinks, config.top_k, config.block_size),
        config.query_block,
    )
    position = torch.arange(len(exact))
    first = position // config.query_block * config.query_block
    begin, end = options.near_range(first, len(exact))
    in_window = (position >= begin[:, None]) & (position < end[:, None])
    is_first = (position < config.num_sinks).expand_as(in_window)
    seen = position <= position[:, None] if causal else torch.ones_like(in_window)
    near = (in_window | is_first) & seen
    far = approximate.ne(0) & ~near

    def by_block(keys: Tensor) -> Tensor:  # [T, S] -> [T, N, size]
        padded = F.pad(keys, (0, -len(exact) % config.block_size))
        return padded.view(len(keys), -1, config.block_size)

    kinds = torch.zeros(by_block(far).shape[:2], dtype=torch.int64)
    for kind, keys in ((FIRST, is_first & seen), (WINDOW, in_window & seen), (SELECTED, far)):
        kinds = kinds.masked_fill(by_block(keys).any(2), kind)
    mass = by_block(exact.masked_fill(near, 0)).sum(2)
    near_mass = (exact * near).sum(1)
    selected = kinds == SELECTED
    largest = F.pad(mass.sort(dim=1, descending=True).values.cumsum(1), (1, 0))
    best = largest.gather(1, selected.sum(1, keepdim=True)).squeeze(1)
    covered = near_mass + (mass * selected).sum(1)
    return SelectedBlocks(kinds=kinds, covered=covered, best=near_mass + best)
