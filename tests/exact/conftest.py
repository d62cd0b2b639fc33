"""What the tests of equal bits share: resident runs and checkpoints, each made once a session."""

import gc
from collections.abc import Iterator

import pytest

from poros.kernels import forwards
from tests.loops import narrow_slices
from tests.support import copied
from tools.fuzz import campaign


@pytest.fixture(scope="session")
def judge() -> Iterator[campaign.Judge]:
    """Judges programs in the fuzzer's language; its deep copies of models are faster ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.fuzz.models._copied", copied)
        judge = campaign.make_judge()
        # The models that are kept are not looked through for leaks.
        yield lambda program: gc.freeze() or judge(program)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses in several slices of the small vocabulary."""
    narrow_slices(monkeypatch)


@pytest.fixture(autouse=True)
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the tests counts as a library's, as what layers and models do is looked at."""
    tests = {"tests", "tools", request.module.__name__.partition(".")[0]}
    monkeypatch.setattr(forwards, "LIBRARIES", forwards.LIBRARIES | tests)
