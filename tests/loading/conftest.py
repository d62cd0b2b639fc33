"""What the tests of loading share: checkpoints and stores, each made once a session."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from tests.loading.loaded import Kinds


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return Kinds(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(autouse=True)
def transformers_is_left_as_it_was() -> Iterator[None]:
    """No method of quantization stays behind, whatever happened."""
    before = dict(AUTO_QUANTIZER_MAPPING)
    yield
    assert dict(AUTO_QUANTIZER_MAPPING) == before


@pytest.fixture
def readers() -> Iterator[Callable[[], list[threading.Thread]]]:
    """The threads that read layers from a disk since the test began; none may be left after it."""

    def living() -> list[threading.Thread]:
        found = [thread for thread in threading.enumerate() if thread.name.startswith("poros-disk")]
        return [thread for thread in found if thread not in earlier]

    earlier: list[threading.Thread] = []  # of models that others left to the garbage collector
    earlier += living()
    yield living
    if living():
        gc.collect()
    end = time.monotonic() + 5
    while living() and time.monotonic() < end:
        time.sleep(0.01)
    assert living() == []
