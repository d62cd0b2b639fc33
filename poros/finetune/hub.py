"""Sends the adapter of a finished run to the hub, by the Trainer's settings for it.

The Trainer itself would send the run's folder, with its checkpoints.
"""

import shlex
from pathlib import Path

from poros.errors import StoreWriteError, quoted
from poros.recipes.recipe import Recipe

SETTINGS = ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision")
"""Of ``training``: those that this module takes from the Trainer."""


def send(recipe: Recipe, adapter: Path) -> None:
    """Send the folder of an adapter to its repository, which is made if it is not there.

    Raises:
        StoreWriteError: If that fails; the adapter stays in its folder.
    """
    from huggingface_hub import HfApi

    asked = recipe.training.more
    name = asked.get("hub_model_id") or adapter.parent.name
    branch, api = asked.get("hub_revision"), HfApi()
    try:
        name = api.create_repo(name, private=asked.get("hub_private_repo"), exist_ok=True).repo_id
        if branch:
            api.create_branch(name, branch=branch, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=adapter, revision=branch)
    except Exception as error:  # of the network, the hub, and its client
        said = quoted(f"{type(error).__name__}: {error}", is_bare=True, limit=400)
        line = f"hf upload {name} {shlex.quote(str(adapter))}"
        raise StoreWriteError(
            f"training.push_to_hub: expected to send the adapter, found {said}; log in with `hf "
            f"auth login`, check the connection and the name (training.hub_model_id); it is whole "
            f"in {quoted(str(adapter))}: `{line}` sends it"
        ) from error
