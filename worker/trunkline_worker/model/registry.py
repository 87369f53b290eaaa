"""All architectures, by the name that config.json's `architectures` gives them."""

from trunkline_worker.model.architectures.architecture import Architecture
from trunkline_worker.model.families.exaone4 import EXAONE4
from trunkline_worker.model.families.granite import GRANITE
from trunkline_worker.model.families.llama import LLAMA
from trunkline_worker.model.families.mistral import MISTRAL
from trunkline_worker.model.families.mixtral import MIXTRAL
from trunkline_worker.model.families.olmo2 import OLMO2
from trunkline_worker.model.families.olmo3 import OLMO3
from trunkline_worker.model.families.olmoe import OLMOE
from trunkline_worker.model.families.phi3 import PHI3
from trunkline_worker.model.families.qwen2 import QWEN2
from trunkline_worker.model.families.qwen2_moe import QWEN2_MOE
from trunkline_worker.model.families.qwen3 import QWEN3
from trunkline_worker.model.families.qwen3_moe import QWEN3_MOE
from trunkline_worker.model.families.seed_oss import SEED_OSS
from trunkline_worker.model.families.smollm3 import SMOLLM3

ARCHITECTURES: dict[str, Architecture] = {
    each.name: each
    for each in (
        EXAONE4,
        GRANITE,
        LLAMA,
        MISTRAL,
        MIXTRAL,
        OLMO2,
        OLMO3,
        OLMOE,
        PHI3,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        SEED_OSS,
        SMOLLM3,
    )
}
