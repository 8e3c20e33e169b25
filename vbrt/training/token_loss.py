"""Cross-entropy of language models over logits [..., V] of any dtype, a chunk of tokens at a time, with the plain bits.

transformers' loss widens all logits to fp32 and keeps their log-probabilities: 10 bytes a logit of a model in bf16, and
more. Here fp32 tensors exist for a chunk of tokens, and the gradient overwrites the logits unless something else holds
them: 2 bytes.

T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from vbrt.libraries.torch_api import functorch_enabled, is_fake, may_overwrite

__all__ = ["TokenLoss"]

_CHUNK = 1 << 24  # logits: 64 MiB in fp32
_ROWS = 16  # tokens of a chunk are a multiple: torch's kernels round by the alignment of a token's row
_IGNORED = torch.iinfo(torch.long).min  # no label, whatever a model ignores


class TokenLoss:
    """`loss_function` of a transformers model: its arguments and its bits, in less memory.

    Few logits, compiled and transformed models get the plain loss.
    """

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        """plain: transformers' `ForCausalLMLoss`."""
        self.plain = plain

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean over labels other than `ignore_index`, or their sum by `num_items_in_batch`. A token's label
        is the next one's in `labels`, or its own in `shift_labels`."""
        target = shift_labels
        if target is None and labels is not None:
            target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if target is None or not _is_taken(logits, target, vocab_size):
            return self.plain(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        target_T = target.reshape(-1).to(logits.device)
        target_T = torch.where(target_T == ignore_index, _IGNORED, target_T)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = _CrossEntropy.apply(logits, target_T, reduction)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _is_taken(logits: Tensor, target: Tensor, vocabulary: int) -> bool:
    if torch.compiler.is_compiling() or functorch_enabled() or logits.numel() <= _CHUNK:
        return False
    plain = type(logits) in (Tensor, nn.Parameter) or is_fake(logits)
    return plain and logits.shape[-1] == vocabulary and target.numel() * vocabulary == logits.numel()


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, target_T: Tensor, reduction: str) -> Tensor:
        logits_TV = logits.reshape(-1, logits.shape[-1]).detach()  # a view of nothing, or its base counts as held
        ctx.save_for_backward(logits_TV, target_T)
        ctx.shape, ctx.reduction = logits.shape, reduction
        picked_T = torch.empty(len(target_T), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits_TV):
            log_p = F.log_softmax(logits_TV[rows].float(), dim=-1)
            picked_T[rows] = log_p.gather(1, target_T[rows, None].clamp(min=0))[:, 0]
        first_T = target_T.clamp(max=0)  # the only column, or ignored: torch adds in the order of a whole matrix
        return F.nll_loss(picked_T[:, None], first_T, ignore_index=_IGNORED, reduction=reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, scale: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, target_T = ctx.saved_tensors
        if ctx.reduction == "mean":
            scale = scale / (target_T != _IGNORED).sum()
        grad_TV = logits_TV if may_overwrite(logits_TV) else torch.empty_like(logits_TV)
        for rows in _chunks(logits_TV):
            with torch.enable_grad():
                wide = logits_TV[rows].to(torch.float32, copy=True).requires_grad_()
                loss = F.cross_entropy(wide, target_T[rows], ignore_index=_IGNORED, reduction="sum")
            grad_TV[rows] = torch.autograd.grad(loss, wide, scale)[0]
        return grad_TV.view(ctx.shape), None, None


def _chunks(x_TV: Tensor) -> Iterator[slice]:
    tokens = max(_ROWS, _CHUNK // x_TV.shape[1] // _ROWS * _ROWS)
    return (slice(at, at + tokens) for at in range(0, len(x_TV), tokens))
