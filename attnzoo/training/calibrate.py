r"""Calibration: gates that start from the attention weights of the model with softmax.

One pass over some training rows measures softmax's attention in each swapped layer, and each gate
follows in closed form. The initial values of the gates are otherwise the same for every layer, head
and token, and transfer has to find in training what the attention weights show. Gates of ``delta``
are calibrated.
Source: the idea of gates that start from the teacher's attention statistics is that of
arXiv:2606.16429.

Let :math:`a_{ts}` be softmax's weights, of which those at a distance of at least the window are
*far*, except on the window's sinks. Let x be the hidden states and :math:`\ell` the window's
log-sum-exp. Each gate is linear in x under a sigmoid or softplus, so least squares on its logits
gives its weights:

- mixing, per query head: the logit of the far share :math:`p_t` of the weights of query t, on x,
  :math:`\ell` and a constant;
- writing, per key head: the logarithm of how much of the far weights key s gets from a later query
  on average, on x and a constant, minus its mean, so that a typical key is written with 1/2;
- decay, per key head: the rate :math:`1 / \bar a - 1 / \bar a_0`, at least :data:`MIN_RATE`, with
  the mean age :math:`\bar a` beyond the window of what is read, and the mean :math:`\bar a_0` that
  equal weights would give: attention that ignores the age needs no decay.

The ridge penalty is M over the number of tokens, relative to the variance of x. Time O(T^2 D + T
M^2) per row and O(M^3) per layer; memory O(G T^2) with G query heads per key head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.backends.delta import DeltaBackend
from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.inputs import AttentionInputs, zero_padding
from attnzoo.evaluation.rows import Rows
from attnzoo.registry import get_backend
from attnzoo.training.transfer import Transfer, swapped_layers

ROWS_AT_ONCE = 4
MIN_RATE = 1e-4  # decay of a token; the state keeps 1/e after 10,000 tokens
LOGIT_BOUND = 5.0  # of the logits of shares, and of the logarithms of how much a key is read
TINY = 1e-12


class LeastSquares:
    """Sums over tokens for ridge regression of several targets on shared inputs.

    Args:
        size: M.
    """

    def __init__(self, size: int) -> None:
        self.size, self.tokens = size, 0
        self.gram = torch.zeros(size + 1, size + 1, dtype=torch.float64)
        self.products: Tensor | None = None  # [M + 1, N] of the inputs and N columns
        self.squares: Tensor | None = None  # [N, N] of the columns

    def add(self, x: Tensor, columns: Tensor) -> None:
        """Add tokens: inputs ``[n, M]`` and targets or other columns ``[n, N]``."""
        x = torch.cat([x.double(), x.new_ones(len(x), 1, dtype=torch.float64)], 1).cpu()
        columns = columns.double().cpu()
        products, squares = x.mT @ columns, columns.mT @ columns
        self.tokens += len(x)
        self.gram += x.mT @ x
        self.products = products if self.products is None else self.products + products
        self.squares = squares if self.squares is None else self.squares + squares

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the regression of all columns on x, ``[M + 1, N]``, and products of residuals.

        The products, ``[N, N]``, are those of the columns minus their regressions.
        """
        assert self.products is not None
        assert self.squares is not None
        means = self.gram[-1, :-1] / max(self.tokens, 1)
        variance = self.gram.diagonal()[:-1] / max(self.tokens, 1) - means.square()
        ridge = torch.zeros(self.size + 1, dtype=torch.float64)
        ridge[:-1] = self.size * variance.mean().clamp(min=TINY)  # M / n, times n tokens
        found = torch.linalg.solve(self.gram + ridge.diag(), self.products)
        return found, self.squares - self.products.mT @ found


class GateCalibration:
    """Statistics of one layer's softmax attention, and the initial gates that follow from them.

    Args:
        window: W, in tokens; 1 for a layer without a window, which reads its own key from the
            state too.
        groups: Query heads per key head.
        hidden_size: M.
        num_sinks: Leading tokens of each sequence that are always in the window.
    """

    def __init__(self, window: int, groups: int, hidden_size: int, num_sinks: int = 0) -> None:
        self.window, self.groups, self.num_sinks = window, groups, num_sinks
        self.mixing, self.writing = LeastSquares(hidden_size), LeastSquares(hidden_size)
        self.far_share: Tensor | float = 0.0  # [H], summed over queries
        self.ages: Tensor | float = 0.0  # [Hkv, 2]: of what is read, and with equal weights
        self.read: Tensor | float = 0.0  # [Hkv]: the weight of both

    @torch.no_grad()
    def add(self, inputs: AttentionInputs) -> None:
        """Add rows of a causal call without a state; padding is zero."""
        assert inputs.hidden_states is not None
        mask = inputs.mask
        tokens = inputs.k.shape[2]
        for row in range(inputs.k.shape[0]):
            one = slice(row, row + 1)
            own = replace(
                mask,
                padding=None if mask.padding is None else mask.padding[one],
                segment_ids=None if mask.segment_ids is None else mask.segment_ids[one],
            )
            seen = own.dense(tokens, tokens, inputs.k.device)
            assert seen is not None
            real = torch.ones_like(seen[0, 0, 0]) if own.padding is None else own.padding[0]
            self._add_row(inputs, row, seen[0, 0] & real[:, None])

    def _add_row(self, inputs: AttentionInputs, row: int, seen: Tensor) -> None:
        """Add one row; ``seen`` is its dense mask, ``[T, T]``."""
        x: Tensor = inputs.hidden_states[row].float()  # type: ignore[index]
        q, k = inputs.q[row].float() * inputs.scale, inputs.k[row].float()
        rank = seen.diagonal().cumsum(0)  # positions among real tokens
        age = (rank[:, None] - rank - self.window + 1).clamp(min=0)
        far = seen & (age > 0) & (seen.sum(1) > self.num_sinks)
        readers, reading = far.sum(0), far.any(1)
        if not reading.any():
            return
        columns, received, shares, ages, total = [], [], [], [], []
        count = far.sum(1).clamp(min=1)
        equal_age = (far * age).sum(1) / count
        for head in range(k.shape[0]):
            own = q[head * self.groups : (head + 1) * self.groups]
            scores = (own @ k[head].mT).masked_fill(~seen, -torch.inf)
            near = scores.masked_fill(far, -torch.inf).logsumexp(-1)  # [G, T]
            beyond = scores.masked_fill(~far, -torch.inf).logsumexp(-1)
            logits = (beyond - near)[:, reading].clamp(-LOGIT_BOUND, LOGIT_BOUND)
            columns += [logits, near[:, reading]]
            weights = (scores - torch.logaddexp(near, beyond)[..., None]).exp()
            weights = weights.nan_to_num(0.0) * far
            share = weights.sum(-1)  # [G, T]
            received.append(weights.sum((0, 1)))
            shares.append(share[:, reading].sum(1))
            ages.append(torch.stack([(weights * age).sum(), (share * equal_age).sum()]))
            total.append(share.sum())
        self.mixing.add(x[reading], torch.cat(columns).mT)
        read = readers >= min(self.window, int(readers.max()))  # others have too few readers
        rates = torch.stack(received)[:, read] / readers[read]
        typical = rates.clamp(min=TINY).log().mean(1, keepdim=True)
        logs = (rates.clamp(min=TINY).log() - typical).clamp(-LOGIT_BOUND, LOGIT_BOUND)
        self.writing.add(x[read], logs.mT)
        self.far_share = self.far_share + torch.cat(shares).double().cpu()
        self.ages = self.ages + torch.stack(ages).double().cpu()
        self.read = self.read + torch.stack(total).double().cpu()

    @property
    def is_empty(self) -> bool:
        """Whether no query had a key beyond the window."""
        return self.mixing.tokens == 0

    def mean_far_share(self) -> Tensor:
        """Return the share of the attention on keys beyond the window by query head, ``[H]``."""
        return torch.as_tensor(self.far_share) / self.mixing.tokens

    def mean_age(self) -> Tensor:
        """Return the mean age of what is read beyond the window by key head, in tokens."""
        return torch.as_tensor(self.ages)[:, 0] / torch.as_tensor(self.read) + self.window - 1

    def decay_rates(self) -> Tensor:
        """Return the decay of a token by key head, ``[Hkv]``, as a positive number."""
        read, equal = torch.as_tensor(self.ages).unbind(1)
        weight = torch.as_tensor(self.read)
        return (weight / read - weight / equal).clamp(min=MIN_RATE)

    def write_gate(self) -> tuple[Tensor, Tensor]:
        """Return weights ``[Hkv, M]`` and biases ``[Hkv]`` of the logits of write strengths."""
        found, _ = self.writing.solve()
        return found[:-1].mT, found[-1]

    def mixing_gate(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights ``[H, M]``, those of the log-sum-exp, ``[H]``, and biases ``[H]``."""
        found, residual = self.mixing.solve()
        groups = self.groups
        targets, lses = (
            torch.arange(found.shape[1]).view(-1, 2, groups)[:, i].flatten() for i in (0, 1)
        )
        # the partial regression on the log-sum-exp, given x
        variance = residual[lses, lses] + TINY + 1e-3 * self.mixing.tokens
        slope = residual[targets, lses] / variance
        both = found[:, targets] - slope * found[:, lses]
        return both[:-1].mT, -slope, both[-1]


def can_calibrate(backend: str) -> bool:
    """Return whether the gates of a backend can be calibrated."""
    return issubclass(get_backend(backend), DeltaBackend)


def calibrated_layers(model: nn.Module) -> dict[str, DeltaBackend]:
    """Return the layers whose gates can be calibrated, by name."""
    layers = swapped_layers(model)
    return {name: x for name, x in layers.items() if isinstance(x, DeltaBackend)}


def new_calibration(backend: DeltaBackend) -> GateCalibration:
    """Return statistics of softmax's attention in a layer, to be filled for :func:`set_gates`."""
    config, geometry = backend.config, backend.geometry
    groups = geometry.num_heads // geometry.num_key_heads
    return GateCalibration(config.window or 1, groups, geometry.hidden_size or 1, config.num_sinks)


@torch.no_grad()
def set_gates(backend: DeltaBackend, calibration: GateCalibration) -> None:
    """Start write strengths, decays and mixing weights from softmax's attention."""
    weight, bias = calibration.write_gate()
    backend.write_weight.copy_(weight)
    backend.write_bias.copy_(bias)
    if backend.gate is not None:
        backend.gate.set_rates(calibration.decay_rates())
    if backend.far_log_weight is not None and backend.mix_weight is not None:
        assert backend.mix_lse is not None
        weight, of_lse, bias = calibration.mixing_gate()
        backend.mix_weight.copy_(weight)
        backend.mix_lse.copy_(of_lse)
        backend.far_log_weight.copy_(bias)


@torch.no_grad()
def calibrate(model: nn.Module, rows: Rows) -> list[dict[str, Any]]:
    """Start the gates of a swapped model from softmax's attention on some rows.

    Args:
        model: A swapped model; layers of other backends than ``delta`` keep their parameters.
        rows: Rows of tokens.

    Returns:
        For each calibrated layer its name (``layer``), the share of the attention on keys beyond
        the window (``beyond``), the mean distance in tokens of those keys (``age``), and the
        initial decay of a token (``decay``), means over heads. Layers without such keys, because
        rows are too short, are left out and keep their parameters.
    """
    layers = calibrated_layers(model)
    if not layers:
        return []
    found = {name: new_calibration(backend) for name, backend in layers.items()}
    handles = [
        backend.register_forward_pre_hook(_recorder(found[name]), with_kwargs=True)
        for name, backend in layers.items()
    ]
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        with Transfer(model, list(layers)):  # every layer gets the inputs of the softmax model
            for own in rows.to(device).split(ROWS_AT_ONCE):
                ids, at = own.tokens.long(), own.positions.long()
                model(input_ids=ids, position_ids=at, use_cache=False)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    summaries = []
    for name, backend in layers.items():
        if not found[name].is_empty:
            set_gates(backend, found[name])
            summaries.append(_summary(name, found[name], backend))
    return summaries


def _recorder(calibration: GateCalibration) -> Any:
    """Return a pre-hook that adds the inputs of a backend to its statistics."""

    def hook(backend: AttentionBackend, args: Any, kwargs: dict[str, Any]) -> None:
        q, k, v = args
        scale = kwargs.get("scale")
        scale = backend.geometry.scale if scale is None else scale
        assert scale is not None
        inputs = AttentionInputs(
            q=q,
            k=k,
            v=v,
            mask=kwargs["mask"],
            scale=scale,
            hidden_states=kwargs["hidden_states"],
        )
        calibration.add(zero_padding(inputs))

    return hook


def _summary(name: str, found: GateCalibration, backend: DeltaBackend) -> dict[str, Any]:
    """Return the means over heads of a layer's statistics, as plain data."""
    return {
        "layer": name,
        "beyond": float(found.mean_far_share().mean()),
        "age": float(found.mean_age().mean()),
        "decay": 0.0 if backend.gate is None else float(found.decay_rates().mean()),
    }
