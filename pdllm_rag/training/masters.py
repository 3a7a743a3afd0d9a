"""Float32 master weights behind the weights that the model computes with, which are a rounding of them.

The gradient at the rounded weights is applied to the masters (the straight-through estimator), so a model that is
trained under the rounding that it will be stored in needs no rounding afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from pdllm_rag.models import packed

Rounding = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]  # float32 -> the values that are stored, as float32


def as_they_are(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """No rounding but that of the compute dtype."""
    return list(weights)


def four_bits(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Matrices in groups of 32 columns in 4 bits (`models.packed`), all at once; vectors in float16."""
    matrices = [weight for weight in weights if weight.dim() == 2]
    packed.check_q4(matrices)
    flat = torch.cat([weight.reshape(-1) for weight in matrices]).view(-1, packed.GROUP)
    rounded = iter(torch.split(packed.rounded_q4(flat).view(-1), [weight.numel() for weight in matrices]))
    return [next(rounded).view_as(weight) if weight.dim() == 2 else weight.half().float() for weight in weights]


def eight_bits(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Matrices by rows in 8 bits (`models.packed`); vectors in float16."""
    return [packed.rounded_q8(weight) if weight.dim() == 2 else weight.half().float() for weight in weights]


ROUNDINGS: Mapping[str, Rounding] = {"none": as_they_are, "4bit": four_bits, "8bit": eight_bits}


class Masters:
    """The trained parameters of a model by name, and their optimiser (AdamW; decay on matrices only)."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        rounding: Rounding,
        *,
        decay: float,
        betas: tuple[float, float],
    ) -> None:
        self._parameters = dict(parameters)
        self._rounding = rounding
        self.weights = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        matrices = [weight for weight in self.weights.values() if weight.dim() > 1]
        others = [weight for weight in self.weights.values() if weight.dim() <= 1]
        on_gpu = any(weight.is_cuda for weight in self.weights.values())
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}],
            betas=betas,
            fused=on_gpu,
        )
        self.put()

    @torch.no_grad()
    def put(self) -> None:
        """Round the masters into the model."""
        rounded = self._rounding(list(self.weights.values()))
        torch._foreach_copy_(list(self._parameters.values()), rounded)

    def step(self, lr: float, *, clip: float) -> torch.Tensor:
        """One step by the gradients that the model holds, which are cleared; returns their norm before clipping."""
        for name, parameter in self._parameters.items():
            self.weights[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), clip)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.put()
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and the optimiser's moments as one flat table."""
        found = {f"weight.{name}": weight for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            for key, value in self.optimiser.state.get(weight, {}).items():
                found[f"{key}.{name}"] = value
        return found

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state` gave.

        Raises:
            ValueError: it is of other parameters.
        """
        own = {f"weight.{name}" for name in self.weights}
        held = {name for name in state if name.startswith("weight.")}
        if own != held:
            raise ValueError(
                f"the checkpoint holds {len(held)} weights, expected {len(own)}; the first that differs is "
                f"{min(own ^ held)!r}. It is of another run: name another folder"
            )
        for name, weight in self.weights.items():
            weight.copy_(state[f"weight.{name}"])
            moments = {
                key: state[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in state
            }
            if moments:
                self.optimiser.state[weight] = {key: value.to(weight.device) for key, value in moments.items()}
        self.put()
