"""What a backward requires of its layer: that it is as it was at the forward."""

from typing import TYPE_CHECKING

from poros.errors import RematerializationError
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
    # The same object says that each is in its place, and of the same bits.
    moved = None if now.trained is before.trained else before.trained.moved()
    if moved is not None:
        raise RematerializationError(
            f"{name}: adapter parameter {moved.key!r} of shape {tuple(moved.parameter.shape)} was "
            "replaced, moved or cast between forward and backward; do so between steps"
        )
    attributes = before.contents.attributes
    if attributes.differ(before.attributes, now.attributes):
        changes = ", ".join(attributes.changes(before.attributes))
        raise RematerializationError(
            f"{name}: expected the modules in it as they were at the forward, found other "
            f"settings at its backward: {changes}; change them between steps, not within one"
        )
    now.know_as(before, staying)
