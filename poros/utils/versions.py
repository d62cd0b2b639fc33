"""Which releases of the libraries are installed that bits can depend on."""

from importlib.metadata import PackageNotFoundError, version

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
    """Releases by the names of distributions, and that of Poros; nothing is imported for it.

    Args:
        *names: Of distributions; all of ``LIBRARIES`` if there are none. Left out if not installed.
    """
    from poros import __version__

    found = {"poros": __version__}
    for name in names or LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
