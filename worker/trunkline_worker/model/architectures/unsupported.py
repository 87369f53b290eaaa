"""Well-known architectures whose layers the specs cannot describe, and what they lack for that."""

# What an architecture has → its names, without "ForCausalLM".
_FAMILIES = {
    "multi-head latent attention": """
        AXK1 DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 Glm4MoeLite GlmMoeDsa KimiK2 LongcatFlash MiniCPM3 Youtu
    """,
    "recurrent or convolutional layers": """
        BailingHybrid Bamba FalconH1 FalconMamba GraniteMoeHybrid Jamba KimiLinear Lfm2 Lfm2Moe Mamba Mamba2 MiniMax
        NemotronH OlmoHybrid Qwen3Next Qwen3_5 Qwen3_5Moe RecurrentGemma Rwkv Zamba Zamba2 xLSTM
    """,
    "norms and activations of Gemma, and KV blocks of layers with a window that are freed early": """
        Gemma Gemma2 Gemma3 Gemma3n Gemma4 VaultGemma
    """,
    "norms that subtract a mean": """
        Bloom Cohere Cohere2 Falcon GPT2 GPTBigCode GPTJ GPTNeo GPTNeoX Mpt Nemotron OPT Olmo Persimmon Phi Phimoe
        StableLm Starcoder2
    """,
    "rotary embedding of neighbouring elements": "Ernie4_5 Glm Glm4 Helium",
    "inputs other than text": "Llama4 Mllama Moshi Phi4Multimodal Whisper",
}
_FEATURES = {name: feature for feature, names in _FAMILIES.items() for name in names.split()}


def feature_of(architecture: str) -> str | None:
    """Returns what the layer specs cannot describe of an architecture; None: it is not a well-known one.

    architecture: as `architectures` of config.json names it
    """
    if architecture.endswith("ForConditionalGeneration"):
        return "inputs other than text"
    return _FEATURES.get(architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel"))
