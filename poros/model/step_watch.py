"""Detects that an optimizer has stepped, without a callback."""

import torch
from torch import nn


class StepWatch:
    """Notices that an optimizer has stepped, by some elements of what it trains.

    Args:
        model: Whose trainable parameters to watch: the last few. Of a LoRA, the first step changes
            at least the matrix that starts at zero.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._watched = [(parameter, _sample(parameter)) for parameter in trained[-8:]]

    def has_stepped(self) -> bool:
        """Whether one has since it was last seen to, or will not change these any more.

        May wait for the device.
        """
        stepped = any(
            not parameter.requires_grad or not torch.equal(_sample(parameter), before)
            for parameter, before in self._watched
        )
        if stepped:
            self._watched = [(parameter, _sample(parameter)) for parameter, _ in self._watched]
        return stepped


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Some elements of a parameter: an optimizer's step changes them if it changes any."""
    return parameter.detach().reshape(-1)[:64].clone()
