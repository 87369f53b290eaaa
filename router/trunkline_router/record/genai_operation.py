"""What a request is in the terms of OpenTelemetry's conventions for generative AI."""

PROVIDER = "trunkline"
CHAT, COMPLETION = "chat", "text_completion"
_CHAT_ENDPOINTS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def operation_of(endpoint: str) -> str:
    """CHAT or COMPLETION."""
    return CHAT if endpoint in _CHAT_ENDPOINTS else COMPLETION
