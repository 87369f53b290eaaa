"""All architectures, by the name that config.json's `architectures` gives them."""

from trunkline_worker.model.architectures.architecture import Architecture
from trunkline_worker.model.architectures.llama import LLAMA
from trunkline_worker.model.architectures.mistral import MISTRAL
from trunkline_worker.model.architectures.mixtral import MIXTRAL
from trunkline_worker.model.architectures.olmoe import OLMOE
from trunkline_worker.model.architectures.qwen2 import QWEN2
from trunkline_worker.model.architectures.qwen2_moe import QWEN2_MOE
from trunkline_worker.model.architectures.qwen3 import QWEN3
from trunkline_worker.model.architectures.qwen3_moe import QWEN3_MOE

ARCHITECTURES: dict[str, Architecture] = {
    each.name: each for each in (LLAMA, MISTRAL, MIXTRAL, OLMOE, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)
}
