"""Well-known architectures that the layer specs cannot describe, by what it is that they cannot."""

# What an architecture has → its names, without "ForCausalLM".
_FAMILIES = {
    "multi-head latent attention": """
        AXK1 DeepseekV2 DeepseekV3 DeepseekV32 Glm4MoeLite GlmMoeDsa LongcatFlash MiniCPM3 Youtu
    """,
    "compressed keys and values": "DeepseekV4",
    "recurrent or convolutional layers": """
        BailingHybrid Bamba FalconH1 FalconMamba GraniteMoeHybrid Jamba KimiLinear Lfm2 Lfm2Moe Mamba Mamba2 MiniMax
        NemotronH OlmoHybrid Qwen3Next Qwen3_5 Qwen3_5Moe RecurrentGemma Rwkv Zamba Zamba2 xLSTM
    """,
    "norms and activations": "Gemma",
    "norms and activations, and windows that need KV blocks of their own": "Gemma2 Gemma3 Gemma3n Gemma4 VaultGemma",
    "norms that subtract a mean": """
        Bloom Cohere Cohere2 Falcon GPT2 GPTBigCode GPTJ GPTNeo GPTNeoX Mpt Nemotron OPT Olmo Persimmon Phi PhiMoE
        StableLm Starcoder2
    """,
    "attention sinks, and biases of experts": "GptOss",
    "bias for the choice of experts": "Dots1 Ernie4_5_Moe Glm4Moe MiniMaxM2",
    "rotary embedding of neighbouring elements": "Ernie4_5 Glm Glm4 Helium",
    "inputs other than text": "Phi4MM Phi4Multimodal",
}
_FEATURES = {name: feature for feature, names in _FAMILIES.items() for name in names.split()}


def feature_of(architecture: str) -> str | None:
    """Returns what the layer specs cannot describe of an architecture; None: it is not a well-known one.

    architecture: as `architectures` of config.json names it
    """
    if architecture.endswith("ForConditionalGeneration"):
        return "inputs other than text"
    return _FEATURES.get(architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel"))
