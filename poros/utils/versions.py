"""The release of Poros, and the installed ones of the libraries that bits can depend on."""

from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "trl",
    "bitsandbytes",
    "accelerate",
    "datasets",
)


def library_versions(*names: str) -> dict[str, str]:
    """Return releases by distribution, and that of Poros; imports no library.

    Args:
        *names: Of distributions; all of ``LIBRARIES`` if there are none. Left out if not installed.
    """
    found = {"poros": __version__}
    for name in names or LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
