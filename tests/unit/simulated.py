"""A simulated allocator over a CPU, for tests of runs that are sized by measuring.

What a step takes follows from a few numbers that the test knows and the runtime does not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros.gates import tiny
from poros.model.measuring import DeviceMemory
from poros.model.runtime import Runtime
from poros.model.sizing import ResidencyPlan, Wanted
from tests.support import make_base, prepare_plain

NUM_LAYERS = 6
KB = 1024
STANDING, OTHERS = 300 * KB, 5000 * KB
PER_TOKEN, GRAPH_PER_TOKEN = 4 * KB, 2 * KB


class SimulatedMemory(DeviceMemory):
    """Holds what the numbers above say; ``overhead`` is lost between the graphs of kept layers."""

    def __init__(self, overhead: float = 1.0) -> None:
        self.overhead = overhead
        self.runtime: Runtime | None = None
        self.peaks: list[int] = []
        """Of each micro-batch, without what is not the model's."""
        self.given_back = 0
        self.num_tokens = 0
        """Of the batch that is trained on."""
        self._reserved = OTHERS
        self._is_recomputed = False

    def allocated(self) -> int:
        found = OTHERS
        if self.runtime is not None:
            found += STANDING + self.runtime.ring.num_bytes
        if torch._C._current_graph_task_id() != -1:
            # Asked before a layer is recomputed, and after it, when its graph is there.
            found += GRAPH_PER_TOKEN * self.num_tokens * self._is_recomputed
            self._is_recomputed = not self._is_recomputed
        return found

    def reserved(self) -> int:
        return self._reserved

    def num_given_back(self) -> int:
        return self.given_back

    def give_back(self) -> None:
        self.given_back += 1
        self._reserved = self.allocated()

    def free(self) -> int:
        return 10**9

    def hold(self, runtime: Runtime) -> None:
        """Belong to ``runtime``'s model."""
        self.runtime = runtime
        sizer: Any = runtime.sizer
        genuine = sizer._held

        def held() -> int:
            genuine()  # looks at the model's tensors and their gradients
            return STANDING + runtime.ring.num_bytes

        sizer._held = held

    def train(self, num_tokens: int, times: float = 1.0, together: int = 1) -> None:
        """So many micro-batches have passed together."""
        assert self.runtime is not None
        num_tokens *= together
        graphs = self.runtime.room.keep_last * GRAPH_PER_TOKEN * num_tokens * self.overhead
        passing = PER_TOKEN * num_tokens * times + graphs
        self.peaks.append(STANDING + self.runtime.ring.num_bytes + int(passing))
        self._reserved = max(self._reserved, OTHERS + self.peaks[-1])


Prepare = Callable[..., "Loop"]


def build() -> Any:
    """With few adapters: what is tested is how often it moves, over many steps."""
    base = make_base("qwen2", num_layers=NUM_LAYERS, hidden_size=64, dropout=0.05)
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj"], "init_lora_weights": False, "lora_dropout": 0.05}
    return get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **options))


def simulated(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """What prepares a model on a device whose memory is simulated, for a loop of steps."""

    def prepare(num_bytes: int | None = None, overhead: float = 1.0, **policy: Any) -> Loop:
        memory = SimulatedMemory(overhead)
        monkeypatch.setattr("poros.model.runtime.device_memory", lambda device: memory)
        if num_bytes is not None:
            policy["vram_budget"] = f"{num_bytes}B"
        model = prepare_plain(build(), device="cpu", **{"self_check": "off", **policy}).train()
        runtime = poros.runtime(model)
        runtime.sizer._estimate = lambda _, budget, wanted, *rest: Estimated(wanted)  # type: ignore[assignment]
        memory.hold(runtime)
        return Loop(model, memory)

    return prepare


class Estimated:
    """An estimate that everything fits: the floor is not what is tested."""

    def __init__(self, wanted: Wanted) -> None:
        self.num_slots, self.keep_last = wanted.num_slots, wanted.keep_last
        self.offload_boundaries = bool(wanted.offload_inputs)
        self.num_blocks, self.total_num_bytes = NUM_LAYERS, 1
        self.check_kernels = "peft"
        self.replays = self.shares_dense = False

    def table(self) -> str:
        return "nothing"


class Loop:
    """Optimizer steps over batches of given lengths; the room in which each ran."""

    def __init__(self, model: Any, memory: SimulatedMemory) -> None:
        self.model, self.memory = model, memory
        self.runtime = poros.runtime(model)
        self.sizer: Any = self.runtime.sizer
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def run(self, *lengths: int, times: float = 1.0, steps: bool = True) -> list[ResidencyPlan]:
        rooms = []
        for length in lengths:
            batch = tiny.make_batches(1, batch_size=1, num_tokens=length, padded=False)[0]
            self.memory.num_tokens = length
            self.model(**batch).loss.backward()
            rooms.append(self.runtime.room)
            self.memory.train(length, times)
            if steps:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return rooms


def block_num_bytes() -> int:
    return poros.runtime(prepare_plain(build(), device="cpu", slots=2)).ring.num_bytes // 2


BLOCK = block_num_bytes()


def budget(num_slots: int, keep_last: int, length: int) -> int:
    graphs = keep_last * GRAPH_PER_TOKEN * length
    return STANDING + num_slots * BLOCK + PER_TOKEN * length + graphs
