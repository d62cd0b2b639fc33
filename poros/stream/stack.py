"""Layers that are called one behind the other, looked at as one.

What decides what each of them computes is looked up for all in one go: one list of all their
tensors, attributes and hooks is read several times faster than as many short ones.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from poros.stream.body import LayerBody
from poros.stream.condition import Condition
from poros.stream.layer_index import LayerIndex

Layer = TypeVar("Layer", bound=LayerBody)


class LayerStack(Generic[Layer]):
    """These ``layers``, as long as they are composed of the same modules.

    Attributes:
        contents: Their modules and tensors, as they were found.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.contents = LayerIndex(
            {str(each.index): each.contents().modules()[0] for each in layers},
            set().union(*(each.weights.bindings.tensor_ids for each in layers)),
        )

    def is_current(self) -> bool:
        """Whether they still consist of exactly these modules, and hold the same tensors."""
        return self.contents.is_current() and self.contents.has_same_tensors()

    def condition(self) -> Condition:
        """What decides what they compute now, while they are current and none is visited.

        Equal ones mean equal ones of each layer. The contrary need not be so: what a layer does to
        itself as it runs is noted in that layer alone.
        """
        name = self.layers[0].name.rpartition(".")[0]
        bindings = [each.weights.bindings for each in self.layers]
        return Condition(name, self.contents, bindings)
