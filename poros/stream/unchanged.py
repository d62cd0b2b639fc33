"""What a backward requires of its layer: that it is as it was at the forward."""

from typing import TYPE_CHECKING

from poros.errors import RematerializationError
from poros.stream.layer_index import shares_memory
from poros.stream.staying import StayingState

if TYPE_CHECKING:
    from poros.stream.body import LayerBody
    from poros.stream.condition import Condition


def require_unchanged(
    layer: "LayerBody", before: "Condition", staying: StayingState | None
) -> None:
    """Raise ``RematerializationError`` unless ``layer`` is as it was.

    Args:
        layer: The layer, now.
        before: Its condition at the forward.
        staying: What of it stays on the device, at the end of the forward.
    """
    name, now = layer.name, layer.condition()
    if now.is_known_as(before, staying):
        return
    if now.contents is not before.contents:
        raise RematerializationError(
            f"{name}: expected the modules of the forward, found others at its backward; add "
            "and remove adapters between steps, not within one"
        )
    if now.hooks != before.hooks:
        raise RematerializationError(
            f"{name}: expected the module hooks of the forward (of the modules in it, and of "
            "all modules), found others at its backward; register and remove hooks between "
            "steps, not within one: the recomputation would run with other hooks"
        )
    if now.adapter_state != before.adapter_state:
        raise RematerializationError(
            f"{name}: expected the adapters that were active at the forward, found another "
            "choice (or scaling, or merge) at its backward; call backward first"
        )
    # The same list says that each is in its place, and its proxy leaf still the same bits.
    is_same = now.adapters is before.adapters
    if [each._version for each in before.parameters] != before.versions:
        raise RematerializationError(
            f"{name}: expected its adapters as they were at the forward, found one edited in "
            "place between forward and backward; edit it after backward"
        )
    edited = None if staying is None else layer.edited_since(staying)
    if edited is not None:
        raise RematerializationError(
            f"{edited}: expected it as it was at the forward, found it edited, cast or "
            "replaced before the backward of its layer; do so between steps"
        )
    for adapter in () if is_same else before.adapters:
        held = adapter.owner.get(adapter.key)
        if held is not adapter.parameter or not shares_memory(held, adapter.proxy):
            raise RematerializationError(
                f"{name}: adapter parameter {adapter.key!r} of shape "
                f"{tuple(adapter.parameter.shape)} was replaced, moved or cast between forward "
                "and backward; do so between steps"
            )
    attributes = before.contents.attributes
    if attributes.differ(before.attributes, now.attributes):
        changes = ", ".join(attributes.changes(before.attributes))
        raise RematerializationError(
            f"{name}: expected the modules in it as they were at the forward, found other "
            f"settings at its backward: {changes}; change them between steps, not within one"
        )
    now.know_as(before, staying)
