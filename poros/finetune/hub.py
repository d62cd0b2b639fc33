"""Sends the adapter of a finished run to the hub, by the Trainer's settings for it.

The Trainer itself would send the run's folder, with its checkpoints.
"""

import json
from pathlib import Path

from poros.errors import StoreWriteError
from poros.loaders.names import is_local
from poros.recipes.recipe import Recipe

SETTINGS = ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision")
"""Settings of ``training`` that this module handles in the Trainer's place."""


def send(recipe: Recipe, adapter: Path) -> str:
    """Send the folder of an adapter to its repository, made if necessary; return its name.

    Raises:
        StoreWriteError: If that fails; the adapter stays, and the same command sends it.
    """
    from huggingface_hub import HfApi

    from poros.loaders.settings import describe_error
    from poros.model.origin import ADAPTER_CONFIG

    asked, api = recipe.training.more, HfApi()
    name = asked.get("hub_model_id") or adapter.parent.name
    branch, is_private = asked.get("hub_revision"), asked.get("hub_private_repo")
    base = json.loads((adapter / ADAPTER_CONFIG).read_text("utf-8"))["base_model_name_or_path"]
    # The hub refuses a model card that names a path as the base.
    left_out = ["README.md"] if is_local(base) else []
    try:
        name = api.create_repo(name, private=is_private, exist_ok=True).repo_id
        if branch:
            api.create_branch(name, branch=branch, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=adapter, revision=branch, ignore_patterns=left_out
        )
    except Exception as error:  # of the network, the hub, and its client
        again = "the same command" + " without output.merged" * bool(recipe.output.merged)
        raise StoreWriteError(
            f"training.push_to_hub: expected to send the adapter, found {describe_error(error)}; "
            f"check the connection and the name (training.hub_model_id); {again} sends it"
        ) from error
    return name
