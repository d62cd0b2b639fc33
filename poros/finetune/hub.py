"""Sends the adapter of a finished run to the hub, by the Trainer's settings for it.

The Trainer itself would send the run's folder, with its checkpoints. A repository is made before
anything is loaded, so that what stands in the way of it is known then.
"""

import shlex
from pathlib import Path

from poros.errors import RecipeError, StoreWriteError, quoted
from poros.recipes.recipe import Recipe

SETTINGS = ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision")
"""Of ``training``: those that this module takes from the Trainer."""


def make_repository(recipe: Recipe) -> str | None:
    """Make the repository of a recipe, if it is not there; return its name, None if none is asked.

    Raises:
        RecipeError: If the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    asked = recipe.training.more
    if not asked.get("push_to_hub"):
        return None
    wanted = asked.get("hub_model_id") or Path(recipe.output.folder or "").name
    try:
        api = HfApi()
        made = api.create_repo(wanted, private=asked.get("hub_private_repo"), exist_ok=True)
        if asked.get("hub_revision"):
            api.create_branch(made.repo_id, branch=asked["hub_revision"], exist_ok=True)
        return str(made.repo_id)
    except Exception as error:  # of the network, the hub, and its client
        raise RecipeError(
            f"training.push_to_hub: expected a repository {quoted(wanted)} on the hub, found "
            f"{_said(error)}; log in with `hf auth login`, check the connection and the "
            "name (training.hub_model_id), or remove it"
        ) from error


def send(recipe: Recipe, repository: str, adapter: Path) -> None:
    """Send the folder of an adapter.

    Raises:
        StoreWriteError: If that fails; the adapter stays in its folder.
    """
    from huggingface_hub import HfApi

    revision = recipe.training.more.get("hub_revision")
    try:
        HfApi().upload_folder(repo_id=repository, folder_path=adapter, revision=revision)
    except Exception as error:
        line = f"hf upload {repository} {shlex.quote(str(adapter))}"
        raise StoreWriteError(
            f"training.push_to_hub: expected to send the adapter, found {_said(error)}; "
            f"it is whole in {quoted(str(adapter))}: `{line}` sends it"
        ) from error


def _said(error: Exception) -> str:
    return quoted(f"{type(error).__name__}: {error}", is_bare=True, limit=400)
