"""What the tests of loading share: checkpoints and stores, each made once a session."""

from collections.abc import Iterator

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
