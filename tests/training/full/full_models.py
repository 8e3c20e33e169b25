"""Small models that train from the tiers, and plain torch's training, which mode "full" must equal, bit for bit."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TOKENS = 64, 50


class Tiny(nn.Module):
    """A residual stack on an embedding; `tied`: the last two of its layers have one weight."""

    def __init__(self, layers: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.layers[-1].weight = self.layers[-2].weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(self.norm(x))


def resident(model: nn.Module) -> nn.Module:
    """A copy of a model, which plain torch trains."""
    return copy.deepcopy(model)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class Masters:
    """Updates a model in bf16 by an optimizer on fp32 masters of all parameters: what mode "full" does, resident."""

    def __init__(self, model: nn.Module, make) -> None:
        own = list(model.parameters())
        masters = [nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in own]
        self.pairs = list(zip(own, masters, strict=True))
        self.inner = make(masters)

    def step(self) -> None:
        """Update the masters, and round them as torch does."""
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter, _ in self.pairs:
            parameter.grad = None


def batches(count: int, *, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets."""
    draw = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(TOKENS, (2, 4, 16), generator=draw)) for _ in range(count)]


def loss_of(model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    """The loss of a batch under bf16 autocast, which adds gradients of tied weights up in bf16 if it caches casts."""
    uses = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=len(uses) == len(set(uses))):
        logits = model(ids)
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    """The losses of some steps."""
    return train_on(batches(steps), model, optimizer)


def train_on(data: list[tuple[Tensor, Tensor]], model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses of a step for each batch."""
    losses = []
    for ids, target in data:
        loss = loss_of(model, ids, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
